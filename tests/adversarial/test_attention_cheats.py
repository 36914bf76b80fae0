"""Attention kernels that cheat. Each must be rejected by the checks that real kernels pass through.

A cheat here is the honest kernel with one thing wrong, so what rejects it is that one thing.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kdtree_engine.reference import tree_verify_attention
from kdtree_engine.reference.masks import MaskLayout, pack_masks, tree_mask, unpack_masks
from phases.attention_cases import huge_slot_case, standard_cases
from phases.attention_checks import (
    attention_equals_paths,
    attention_is_deterministic,
    attention_matches_oracle,
)
from phases.gate import Context, FailureKind, GateFailure
from phases.token_checks import tokens_equal_oracle

BF16 = torch.bfloat16
NUMERICAL = FailureKind.NUMERICAL
Attention = Callable[..., Any]


@pytest.fixture(params=[20260], ids=lambda seed: f"seed={seed}")
def ctx(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Context:
    return Context(seed=request.param, scratch=tmp_path)


@dataclasses.dataclass
class Call:
    """The arguments of one call, by name, with what they mean on the host."""

    q: torch.Tensor
    kv_pool: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    draft_slots: torch.Tensor
    mask: torch.Tensor | None
    mask_indptr: torch.Tensor | None
    options: dict[str, Any]

    @property
    def trees(self) -> list[int]:
        return self.qo_indptr.diff().tolist()

    @property
    def prefixes(self) -> list[int]:
        return self.kv_indptr.diff().tolist()

    def masks(self) -> list[torch.Tensor]:
        if self.mask is None:
            return [torch.ones(n, n, dtype=torch.bool).tril() for n in self.trees]
        return unpack_masks(self.mask, self.mask_indptr, self.trees, self.prefixes)

    def with_masks(self, masks: list[torch.Tensor]) -> Call:
        mask, starts = pack_masks(masks, self.prefixes, MaskLayout.DRAFT)
        return dataclasses.replace(self, mask=mask, mask_indptr=starts)

    def slots_of_prefixes(self) -> list[torch.Tensor]:
        return list(self.kv_indices[: int(self.kv_indptr[-1])].long().split(self.prefixes))

    def with_prefixes(self, slots: list[torch.Tensor]) -> Call:
        lengths = torch.tensor([0, *map(len, slots)]).cumsum(0)
        call = dataclasses.replace(
            self, kv_indptr=lengths, kv_indices=torch.cat([*slots, torch.empty(0)]).long()
        )
        return call if self.mask is None else call.with_masks(self.masks())

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = tree_verify_attention(
            self.q,
            self.kv_pool,
            self.qo_indptr,
            self.kv_indptr,
            self.kv_indices,
            self.draft_slots,
            self.mask,
            self.mask_indptr,
            sm_scale=self.options["sm_scale"],
            v_head_dim=self.options["v_head_dim"],
            return_lse=True,
        )
        return out.to(self.q.dtype), lse.float()


def kernel(body: Callable[[Call], tuple[torch.Tensor, torch.Tensor]]) -> Attention:
    """`body` with the operation's signature: a kernel that writes all of `out`."""

    @functools.wraps(body)
    def attention(
        q: torch.Tensor,
        kv_pool: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        draft_slots: torch.Tensor,
        mask: torch.Tensor | None = None,
        mask_indptr: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
        **options: Any,
    ) -> Any:
        result, lse = body(
            Call(
                q,
                kv_pool,
                qo_indptr,
                kv_indptr,
                kv_indices,
                draft_slots,
                mask,
                mask_indptr,
                options,
            )
        )
        if out is not None:
            result = out.copy_(result)
        return (result, lse) if return_lse else result

    return attention


@kernel
def honest(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    return call.run()


@kernel
def ignores_the_mask(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    return call.with_masks([torch.ones(n, n, dtype=torch.bool) for n in call.trees]).run()


@kernel
def takes_every_tree_for_a_chain(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    return dataclasses.replace(call, mask=None, mask_indptr=None).run()


@kernel
def position_causal(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """A node sees all nodes at smaller positions: uncles look like ancestors."""
    masks = []
    for mask in call.masks():
        depths = mask.sum(1)
        masks.append((depths[:, None] > depths) | torch.eye(len(mask), dtype=torch.bool))
    return call.with_masks(masks).run()


@kernel
def siblings_see_each_other(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Ancestry by parent alone: a node also sees the siblings that stand before it."""
    masks = []
    for mask in call.masks():
        strict = mask & ~torch.eye(len(mask), dtype=torch.bool)
        same_parent = (strict[:, None] == strict[None]).all(-1).tril()
        masks.append(mask | same_parent)
    return call.with_masks(masks).run()


@kernel
def drops_the_last_split(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits of 128 tokens, the remainder forgotten where there is a whole one before it."""
    return call.with_prefixes(
        [
            part[: len(part) // 128 * 128] if len(part) > 128 else part
            for part in call.slots_of_prefixes()
        ]
    ).run()


@kernel
def drops_the_last_key(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    return call.with_prefixes(
        [part[:-1] if len(part) > 128 else part for part in call.slots_of_prefixes()]
    ).run()


@kernel
def right_for_contiguous_slots_only(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    slots = len(call.kv_pool)
    return call.with_prefixes(
        [(part[:1] + torch.arange(len(part))) % slots for part in call.slots_of_prefixes()]
    ).run()


@kernel
def zeros_for_scattered_slots(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = call.run()
    contiguous = all((part.diff() == 1).all() for part in call.slots_of_prefixes())
    return (out if contiguous else torch.zeros_like(out)), lse


@kernel
def takes_v_from_the_rows_end(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """V is the first 512 of 576 values, not the last."""
    wide = dataclasses.replace(call, options=call.options | {"v_head_dim": call.q.shape[2]})
    out, lse = wide.run()
    return out[..., -call.options["v_head_dim"] :], lse


@kernel
def takes_k_for_512_wide(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    q = call.q.clone()
    q[..., call.options["v_head_dim"] :] = 0
    return dataclasses.replace(call, q=q).run()


@kernel
def pool_stride_of_512(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows are found at slot * 512 in a pool of rows of 576."""
    width = call.q.shape[2]
    flat = call.kv_pool.reshape(-1)
    rows = [flat[slot * 512 : slot * 512 + width] for slot in range(len(call.kv_pool))]
    return dataclasses.replace(call, kv_pool=torch.stack(rows)).run()


@kernel
def int32_slot_arithmetic(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """slot * 576 in 32 bits; what falls outside the pool reads as zeros."""
    width = call.q.shape[2]
    used = torch.cat([*call.slots_of_prefixes(), call.draft_slots.long()])
    offsets = (used * width + 2**31) % 2**32 - 2**31
    rows = call.kv_pool.view(-1, width)[(offsets // width).clamp(min=0)]
    rows[offsets < 0] = 0
    prefix = int(call.kv_indptr[-1])
    return dataclasses.replace(
        call,
        kv_pool=rows,
        kv_indices=torch.arange(prefix),
        draft_slots=torch.arange(prefix, len(used)),
    ).run()


@kernel
def nan_for_an_empty_prefix(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """An empty split merged as exp(-inf - -inf)."""
    out, lse = call.run()
    for request, length in enumerate(call.prefixes):
        if not length:
            out[call.qo_indptr[request] : call.qo_indptr[request + 1]] = torch.nan
    return out, lse


@kernel
def nan_in_padded_rows(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = call.run()
    out[call.qo_indptr[-1] :] = torch.nan
    return out, lse


@kernel
def reads_an_unused_slot(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """A tile's tail is filled with slot numbers of nobody and multiplied by zero afterwards."""
    out, lse = call.run()
    used = torch.cat([*call.slots_of_prefixes(), call.draft_slots.long()])
    unused = torch.ones(len(call.kv_pool), dtype=torch.bool)
    unused[used] = False
    tail = call.kv_pool.view(len(unused), -1)[unused][:1, : out.shape[2]]
    return out + 0 * tail, lse


@kernel
def mask_offset_of_the_first_request(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    masks = call.masks()
    if call.mask is None or not masks:
        return call.run()
    first = masks[0]
    wrong = []
    for mask in masks:
        shared = min(len(mask), len(first))
        mixed = tree_mask(torch.arange(len(mask)) - 1)
        mixed[:shared, :shared] = first[:shared, :shared]
        wrong.append(mixed)
    return call.with_masks(wrong).run()


@kernel
def lse_in_base_2(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = call.run()
    return out, lse / torch.log(torch.tensor(2.0))


@kernel
def too_coarse(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Accumulates with seven bits where eight are promised."""
    out, lse = call.run()
    return (out.float() * 64).to(torch.float8_e4m3fn).to(out.dtype) / 64, lse


@kernel
def one_head_short(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = call.run()
    return out[:, :-1], lse


@kernel
def fails_on_large_trees(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    if max(call.trees, default=0) > 64:
        raise RuntimeError("invalid configuration argument")
    return call.run()


def wide_output(*args: Any, **options: Any) -> Any:
    """The oracle as it is: float64 where the dtype of q is promised."""
    return tree_verify_attention(*args, **(options | {"out": None}))


def ignores_out(*args: Any, out: torch.Tensor | None = None, **options: Any) -> Any:
    return honest(*args, **options)


def leaves_the_last_row_unwritten(
    *args: Any, out: torch.Tensor | None = None, return_lse: bool = False, **options: Any
) -> Any:
    result, lse = honest(*args, return_lse=True, **options)
    if out is not None:
        out[:-1] = result[:-1]
        result = out
    return (result, lse) if return_lse else result


def leaves_the_last_row_if_it_looks_written(
    *args: Any, out: torch.Tensor | None = None, return_lse: bool = False, **options: Any
) -> Any:
    """Wise to NaN: what is plausible already stays."""
    if out is not None and out.isnan().any():
        return honest(*args, out=out, return_lse=return_lse, **options)
    return leaves_the_last_row_unwritten(*args, out=out, return_lse=return_lse, **options)


def cached_by(key: Callable[[tuple[Any, ...]], object]) -> Attention:
    """Answers again what it answered to arguments with the same key."""
    answers: dict[object, tuple[torch.Tensor, torch.Tensor]] = {}

    def attention(
        *args: Any, out: torch.Tensor | None = None, return_lse: bool = False, **options: Any
    ) -> Any:
        if key(args) not in answers:
            answers[key(args)] = honest(*args, return_lse=True, **options)
        result, lse = answers[key(args)]
        result = result.clone() if out is None else out.copy_(result)
        return (result, lse) if return_lse else result

    return attention


CHEATS: list[tuple[Attention, FailureKind]] = [
    (ignores_the_mask, NUMERICAL),
    (takes_every_tree_for_a_chain, NUMERICAL),
    (position_causal, NUMERICAL),
    (siblings_see_each_other, NUMERICAL),
    (drops_the_last_split, NUMERICAL),
    (drops_the_last_key, NUMERICAL),
    (right_for_contiguous_slots_only, NUMERICAL),
    (zeros_for_scattered_slots, NUMERICAL),
    (takes_v_from_the_rows_end, NUMERICAL),
    (takes_k_for_512_wide, NUMERICAL),
    (pool_stride_of_512, NUMERICAL),
    (nan_for_an_empty_prefix, NUMERICAL),
    (nan_in_padded_rows, NUMERICAL),
    (reads_an_unused_slot, NUMERICAL),
    (mask_offset_of_the_first_request, NUMERICAL),
    (lse_in_base_2, NUMERICAL),
    (too_coarse, NUMERICAL),
    (leaves_the_last_row_unwritten, NUMERICAL),
    (leaves_the_last_row_if_it_looks_written, NUMERICAL),
    (one_head_short, FailureKind.SHAPE),
    (ignores_out, FailureKind.SHAPE),
    (wide_output, FailureKind.DTYPE),
    (fails_on_large_trees, FailureKind.LAUNCH),
]


def test_the_honest_kernel_passes(ctx: Context) -> None:
    error, ratio, cases = attention_matches_oracle(honest, ctx, dtype=BF16, heads=(2,))
    assert 1e-3 < error.value < 2.5e-3  # what rounding to bf16 costs
    assert ratio.value == pytest.approx(1.0)
    assert cases.value == len(standard_cases())


@pytest.mark.parametrize(
    ("cheat", "kind"), CHEATS, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_a_cheat_is_rejected(cheat: Attention, kind: FailureKind, ctx: Context) -> None:
    with pytest.raises(GateFailure) as failure:
        attention_matches_oracle(cheat, ctx, dtype=BF16, heads=(2,))
    assert failure.value.kind is kind


@pytest.mark.parametrize(
    "key",
    [
        lambda args: tuple(None if tensor is None else tensor.shape for tensor in args),
        lambda args: tuple(None if tensor is None else tensor.data_ptr() for tensor in args),
    ],
    ids=["shapes", "addresses"],
)
def test_a_cached_answer_is_rejected(key: Callable[..., object], ctx: Context) -> None:
    with pytest.raises(GateFailure) as failure:
        attention_matches_oracle(cached_by(key), ctx, dtype=BF16, heads=(2,))
    assert failure.value.kind is NUMERICAL


@pytest.mark.parametrize(
    "cheat",
    [
        ignores_the_mask,
        takes_every_tree_for_a_chain,
        position_causal,
        siblings_see_each_other,
        drops_the_last_key,
        right_for_contiguous_slots_only,
        mask_offset_of_the_first_request,
    ],
    ids=lambda cheat: cheat.__name__,
)
def test_counting_alone_rejects_it(cheat: Attention, ctx: Context) -> None:
    """Where all scores are zero, no oracle is asked: the right answer is a mean that is counted."""
    counted = [case for case in standard_cases((2,)) if case.content.value == "uniform"]
    with pytest.raises(GateFailure) as failure:
        attention_matches_oracle(cheat, ctx, dtype=BF16, cases=counted)
    assert failure.value.kind is NUMERICAL


@pytest.mark.parametrize(
    "cheat",
    [ignores_the_mask, takes_every_tree_for_a_chain, position_causal, siblings_see_each_other],
    ids=lambda cheat: cheat.__name__,
)
def test_ordinary_attention_along_the_paths_rejects_it(cheat: Attention, ctx: Context) -> None:
    with pytest.raises(GateFailure) as failure:
        attention_equals_paths(cheat, ctx)
    assert failure.value.kind is NUMERICAL


def test_slots_beyond_int32_arithmetic_are_reached(ctx: Context) -> None:
    """An overflow shows only in a pool that is large enough: the standard cases cannot see it."""
    attention_matches_oracle(
        int32_slot_arithmetic, ctx, dtype=BF16, cases=standard_cases((2,))[::6]
    )
    attention_matches_oracle(honest, ctx, dtype=BF16, cases=[huge_slot_case(heads=2)])
    with pytest.raises(GateFailure) as failure:
        attention_matches_oracle(
            int32_slot_arithmetic, ctx, dtype=BF16, cases=[huge_slot_case(heads=2)]
        )
    assert failure.value.kind is NUMERICAL


def one_bit_at_random() -> Attention:
    """One element of 16 bits is a unit in the last place off, elsewhere in each call."""
    generator = torch.Generator().manual_seed(0)

    @kernel
    def attention(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = call.run()
        flat = out.view(-1).view(torch.int16)
        if len(flat):
            flat[int(torch.randint(len(flat), (1,), generator=generator))] += 1
        return out, lse

    return attention


@kernel
def depends_on_the_batch(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits chosen by batch size give other roundings: a bit here stands for them."""
    out, lse = call.run()
    if len(call.trees) > 1:
        out.view(-1).view(torch.int16)[0] += 1
    return out, lse


@kernel
def depends_on_the_order(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = call.run()
    if len(call.trees) > 1 and len(out):
        out[0].view(-1).view(torch.int16)[0] += int(call.trees[0] > call.trees[-1])
    return out, lse


def test_the_honest_kernel_is_deterministic(ctx: Context) -> None:
    (calls,) = attention_is_deterministic(honest, ctx, dtype=BF16, heads=2)
    assert calls.value == 9


@pytest.mark.parametrize(
    "cheat",
    [one_bit_at_random(), depends_on_the_batch, depends_on_the_order],
    ids=["one bit at random", "batch", "order"],
)
def test_right_but_not_deterministic_is_rejected(cheat: Attention, ctx: Context) -> None:
    """Within the tolerance of the oracle, but not the same bits each time."""
    attention_matches_oracle(cheat, ctx, dtype=BF16, cases=standard_cases((2,))[-3:])
    with pytest.raises(GateFailure, match="differs from the first call") as failure:
        attention_is_deterministic(cheat, ctx, dtype=BF16, heads=2)
    assert failure.value.kind is NUMERICAL


@pytest.mark.parametrize(
    ("cheat", "passes"),
    [(honest, True), (ignores_the_mask, False), (position_causal, False)],
    ids=["honest", "ignores the mask", "position causal"],
)
def test_tokens_tell(cheat: Attention, passes: bool, ctx: Context) -> None:
    """In the model too: a wrong token is excused only where rounding alone could flip it."""
    sizes: dict[str, Any] = {"budgets": (16,), "batches": (4,), "prompts_each": 4, "new_tokens": 12}
    if passes:
        tokens = tokens_equal_oracle(cheat, ctx, dtype=BF16, **sizes)[0]
        assert tokens.value > 0.7 * 4 * 12  # behind a near tie that fell otherwise, none count
        return
    with pytest.raises(GateFailure) as failure:
        tokens_equal_oracle(cheat, ctx, dtype=BF16, **sizes)
    assert failure.value.kind is FailureKind.TOKEN_MISMATCH
