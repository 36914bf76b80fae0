"""The public operation on the CPU: the right numbers, refused faults, torch's own checks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from kdtree_engine import reference
from kdtree_engine.attention import tree_verify_attention
from kdtree_engine.reference.masks import MaskLayout
from phases.attention_cases import AttentionCase, AttentionInputs, make_inputs

RAGGED = AttentionCase("ragged", (9, 3, 1), (300, 21, 0), padded_rows=2)


def inputs_of(case: AttentionCase, dtype: torch.dtype, **options: Any) -> AttentionInputs:
    generator = torch.Generator().manual_seed(1)
    return make_inputs(
        case, dtype=dtype, device=torch.device("cpu"), generator=generator, **options
    )


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("layout", [None, *MaskLayout])
@pytest.mark.parametrize("deterministic", [False, True])
def test_it_agrees_with_the_oracle(
    dtype: torch.dtype, layout: MaskLayout | None, deterministic: bool
) -> None:
    case = AttentionCase("ragged", (9, 3, 1), (300, 21, 0), layout=layout, padded_rows=2)
    inputs = inputs_of(case, dtype)
    arguments = {"sm_scale": case.sm_scale, "return_lse": True}
    found, lse = tree_verify_attention(*inputs.tensors(), **arguments, deterministic=deterministic)
    wanted, wanted_lse = reference.tree_verify_attention(*inputs.tensors(), **arguments)
    assert found.dtype is dtype
    assert lse.dtype is torch.float32
    # Twice what the exact result loses when it is rounded to the output's dtype.
    rounding = relative_error(wanted.to(dtype), wanted)
    limit = 1e-6 if dtype is torch.float32 else 2 * rounding
    assert relative_error(found, wanted) <= limit
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)
    assert found[-2:].count_nonzero() == 0
    assert lse[-2:].eq(-math.inf).all()


def test_a_contiguous_view_needs_no_indices() -> None:
    case = AttentionCase("view", (9, 3), (100, 40))
    inputs = inputs_of(case, torch.bfloat16, contiguous_view=True)
    assert inputs.kv_indices is None
    found = tree_verify_attention(*inputs.tensors(), sm_scale=case.sm_scale)
    inputs.kv_indices = torch.arange(140)
    assert torch.equal(found, tree_verify_attention(*inputs.tensors(), sm_scale=case.sm_scale))


def test_out_is_written_in_full_and_returned() -> None:
    inputs = inputs_of(RAGGED, torch.bfloat16)
    out = torch.full((15, 8, 512), torch.nan, dtype=torch.bfloat16)
    found = tree_verify_attention(*inputs.tensors(), sm_scale=RAGGED.sm_scale, out=out)
    assert found is out
    assert torch.equal(out, tree_verify_attention(*inputs.tensors(), sm_scale=RAGGED.sm_scale))


@pytest.mark.parametrize("batch", [0, 3])
def test_no_tree_nodes_give_no_rows(batch: int) -> None:
    empty = torch.zeros(batch + 1, dtype=torch.int32)
    out, lse = tree_verify_attention(
        torch.zeros(0, 8, 576, dtype=torch.bfloat16),
        torch.zeros(1, 576, dtype=torch.bfloat16),
        empty,
        empty,
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(0, dtype=torch.int64),
        sm_scale=0.1,
        return_lse=True,
    )
    assert out.shape == (0, 8, 512)
    assert lse.shape == (0, 8)


def test_deterministic_gives_a_request_the_same_bits_alone_and_in_any_order() -> None:
    """And the default does not: its splits follow the batch, so the promise is worth something."""
    trees, prefixes = (9, 9, 9), (2500, 2500, 40)

    def bits(order: tuple[int, ...], deterministic: bool) -> list[torch.Tensor]:
        """Outputs of the requests in `order`, which all read the same three caches."""
        inputs = inputs_of(AttentionCase("all", trees, prefixes, layout=None), torch.float32)
        assert inputs.kv_indices is not None
        q = inputs.q.view(3, 9, 8, 576)
        slots = inputs.draft_slots.view(3, 9)
        prefix = inputs.kv_indices.split(list(prefixes))
        lengths = [0, *itertools.accumulate(prefixes[place] for place in order)]
        out = tree_verify_attention(
            q[list(order)].flatten(0, 1).contiguous(),
            inputs.kv_pool,
            torch.arange(len(order) + 1) * 9,
            torch.tensor(lengths),
            torch.cat([prefix[place] for place in order]),
            slots[list(order)].flatten(),
            sm_scale=0.07,
            deterministic=deterministic,
        )
        assert isinstance(out, torch.Tensor)
        return list(out.view(len(order), 9, 8, 512))

    for order in ((0,), (2, 0), (1, 2, 0), (0, 0, 1, 2, 2)):
        together, alone = bits(order, True), [bits((place,), True)[0] for place in order]
        assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
    assert not torch.equal(bits((1,), False)[0], bits((0, 1), False)[1])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kv_indices": torch.full((321,), 99_999)}, "kv_indices: .*slot 99999.*request 0"),
        ({"qo_indptr": torch.tensor([0, 9, 3, 13])}, "qo_indptr: .*9 then 3 at request 1"),
        ({"mask": torch.ones(400, dtype=torch.uint8)}, "mask: .*too short"),
    ],
)
def test_the_cpu_refuses_wrong_contents(change: dict[str, Any], text: str) -> None:
    inputs = inputs_of(RAGGED, torch.bfloat16)
    for name, value in change.items():
        setattr(inputs, name, value)
    with pytest.raises(ValueError, match=text):
        tree_verify_attention(*inputs.tensors(), sm_scale=RAGGED.sm_scale)


def test_a_mask_of_no_layout_is_refused_and_not_misread() -> None:
    inputs = inputs_of(RAGGED, torch.bfloat16)
    assert inputs.mask_indptr is not None
    inputs.mask_indptr[1:] -= 1
    with pytest.raises(ValueError, match="mask_indptr: expected a step of"):
        tree_verify_attention(*inputs.tensors(), sm_scale=RAGGED.sm_scale)


@pytest.mark.parametrize("with_lse", [False, True])
def test_opcheck(with_lse: bool) -> None:
    inputs = inputs_of(AttentionCase("small", (3, 2), (20, 5)), torch.bfloat16)
    out = torch.empty(5, 8, 512, dtype=torch.bfloat16)
    lse = torch.empty(5, 8) if with_lse else None
    torch.library.opcheck(
        torch.ops.kdtree_engine.tree_verify_attention.default,
        (*inputs.tensors(), 0.07, 5, False, out, lse),
    )


def test_meta_tensors_give_shapes_alone() -> None:
    inputs = inputs_of(RAGGED, torch.bfloat16)
    meta = [None if tensor is None else tensor.to("meta") for tensor in inputs.tensors()]
    out, lse = tree_verify_attention(*meta, sm_scale=0.1, return_lse=True)  # type: ignore[arg-type]
    assert out.device.type == lse.device.type == "meta"
    assert out.shape == (15, 8, 512)


def test_compiled_it_gives_the_same_bits() -> None:
    inputs = inputs_of(RAGGED, torch.bfloat16)

    def step(*tensors: torch.Tensor) -> torch.Tensor:
        out = tree_verify_attention(*tensors, sm_scale=RAGGED.sm_scale)
        assert isinstance(out, torch.Tensor)
        return out * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*inputs.tensors()), step(*inputs.tensors()))  # type: ignore[arg-type]


@pytest.mark.parametrize("deterministic", [False, True])
def test_in_float64_the_algorithm_is_exact(deterministic: bool) -> None:
    case = AttentionCase("long", (9, 3), (5000, 700))
    inputs = inputs_of(case, torch.float64)
    arguments = {"sm_scale": case.sm_scale}
    found = tree_verify_attention(*inputs.tensors(), **arguments, deterministic=deterministic)
    assert isinstance(found, torch.Tensor)
    wanted = reference.tree_verify_attention(*inputs.tensors(), **arguments)
    assert isinstance(wanted, torch.Tensor)
    assert relative_error(found, wanted) < 1e-13
