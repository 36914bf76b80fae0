"""Phase 0's gates on reduced cases; the whole of them runs with `kd phase run 0`."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kdtree_engine.reference import attention as oracle
from kdtree_engine.reference import build_draft_tree, tiny_mla, tree_verify_attention
from kdtree_engine.reference.acceptance import (
    Acceptance,
    accept_sampled,
    apply_compaction,
    compaction_plan,
)
from kdtree_engine.reference.masks import MaskLayout, tree_mask
from kdtree_engine.reference.slots import SlotAllocator
from kdtree_engine.reference.speculative import Generation, NoisyDrafter, Parts
from kdtree_engine.reference.tiny_mla import TinyMLA
from kdtree_engine.reference.tree import DraftTree
from phases import token_checks
from phases.attention_cases import standard_cases
from phases.attention_checks import attention_equals_paths, attention_matches_oracle, path_cases
from phases.gate import Context, FailureKind, Figure, GateFailure, GateKind
from phases.p0_oracle import (
    PHASE,
    acceptance_checks,
    gates,
    mask_checks,
    model_checks,
    tree_checks,
)
from phases.token_checks import BATCHES, BUDGETS, speculation_equals_plain

ROTATE = tiny_mla._rotate


@pytest.fixture(params=[20265], ids=lambda seed: f"seed={seed}")
def ctx(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Context:
    return Context(seed=request.param, scratch=tmp_path)


def test_the_gates_need_nothing_but_torch() -> None:
    assert [gate.name for gate in PHASE.gates] == [
        "tree-brute-force",
        "tree-properties",
        "mask-paths",
        "mask-layouts",
        "attention-paths",
        "mla-absorbed",
        "greedy-token-exact",
        "sampled-distribution",
        "compaction-moves",
    ]
    for gate in PHASE.gates:
        assert gate.check is not None
        assert gate.kind is GateKind.CORRECTNESS
        assert gate.requires == ()


CHECKS: dict[str, Callable[[Context], Sequence[Figure]]] = {
    "brute force": lambda ctx: tree_checks.tree_equals_brute_force(
        build_draft_tree, ctx, max_depth=3, max_columns=3, draws=2
    ),
    "properties": lambda ctx: tree_checks.tree_has_properties(build_draft_tree, ctx, examples=30),
    "mask paths": lambda ctx: mask_checks.masks_equal_paths(tree_mask, ctx, draws=1),
    "layouts": lambda ctx: mask_checks.layouts_hold(ctx, draws=5),
    "paths": lambda ctx: attention_equals_paths(
        tree_verify_attention, ctx, cases=path_cases()[::3]
    ),
    "absorbed": lambda ctx: model_checks.absorbed_equals_plain(tree_verify_attention, ctx),
    "tokens": lambda ctx: speculation_equals_plain(ctx, prompts_each=2, new_tokens=12),
    "sampling": lambda ctx: acceptance_checks.sampling_keeps_distribution(
        accept_sampled, ctx, samples=1000
    ),
    "moves": lambda ctx: acceptance_checks.compaction_moves_rows(apply_compaction, ctx, draws=40),
}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())
def test_the_oracle_passes(check: Callable[[Context], Sequence[Figure]], ctx: Context) -> None:
    figures = check(ctx)
    assert figures
    assert len({figure.name for figure in figures}) == len(figures)
    assert not any(figure.unit.is_speed for figure in figures)


def test_two_hundred_prompts_are_decoded() -> None:
    """The default of `prompts_each` over all budgets and batch sizes."""
    each = speculation_equals_plain.__wrapped__.__kwdefaults__["prompts_each"]  # type: ignore[attr-defined]
    assert each * len(BUDGETS) * len(BATCHES) >= 200
    assert BUDGETS == (1, 3, 8, 16, 32, 64)
    assert BATCHES == (1, 4)


def test_progress_ends_at_its_total(tmp_path: pathlib.Path) -> None:
    calls: list[tuple[int, int]] = []
    ctx = Context(1, tmp_path, lambda done, total, note: calls.append((done, total)))
    attention_matches_oracle(
        tree_verify_attention, ctx, dtype=torch.float64, cases=standard_cases((2,))[:3]
    )
    assert calls == [(0, 3), (1, 3), (2, 3), (3, 3)]


# -- each check can fail: the oracle, broken on purpose -------------------------------------------


def fails(check: Callable[[], object], kind: FailureKind, message: str) -> None:
    with pytest.raises(GateFailure, match=message) as failure:
        check()
    assert failure.value.kind is kind


def test_a_mask_without_grandparents_is_caught(ctx: Context) -> None:
    def parents_only(parents: torch.Tensor) -> torch.Tensor:
        mask = torch.eye(len(parents), dtype=torch.bool)
        mask[torch.arange(1, len(parents)), parents[1:]] = True
        return mask

    fails(
        lambda: mask_checks.masks_equal_paths(parents_only, ctx),
        FailureKind.NUMERICAL,
        "node 2 does not see node 0",
    )


def test_a_wrong_conversion_is_caught(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = mask_checks.pack_masks

    def transposed(masks: list[torch.Tensor], *rest: object) -> object:
        return honest([mask.t().contiguous() for mask in masks], *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(mask_checks, "pack_masks", transposed)
    fails(lambda: mask_checks.layouts_hold(ctx), FailureKind.NUMERICAL, "full: request 0")


def test_an_accepted_malformed_mask_is_caught(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = mask_checks.unpack_masks

    def lenient(mask: torch.Tensor, *rest: object) -> object:
        return honest(mask.clamp(max=1) if mask.dtype == torch.uint8 else mask, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(mask_checks, "unpack_masks", lenient)
    fails(lambda: mask_checks.layouts_hold(ctx), FailureKind.NUMERICAL, "a byte of 2 is accepted")


def test_a_wrong_scale_is_caught(ctx: Context) -> None:
    def unscaled(*args: object, sm_scale: float, **options: object) -> object:
        return tree_verify_attention(*args, sm_scale=sm_scale * 1.01, **options)  # type: ignore[arg-type]

    fails(
        lambda: attention_equals_paths(unscaled, ctx, cases=path_cases()[8:9]),
        FailureKind.NUMERICAL,
        "request 0",
    )
    fails(
        lambda: model_checks.absorbed_equals_plain(unscaled, ctx),
        FailureKind.NUMERICAL,
        "sequence 1, token 1",
    )


def test_a_model_without_rotation_is_caught(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = TinyMLA.forward_absorbed

    def unrotated(self: TinyMLA, batch: object, *rest: object) -> torch.Tensor:
        batch.positions.zero_()  # type: ignore[attr-defined]
        return honest(self, batch, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(TinyMLA, "forward_absorbed", unrotated)
    fails(
        lambda: model_checks.absorbed_equals_plain(tree_verify_attention, ctx),
        FailureKind.NUMERICAL,
        "the absorbed form's logits differ",
    )
    fails(
        lambda: speculation_equals_plain(ctx, prompts_each=1, new_tokens=8),
        FailureKind.TOKEN_MISMATCH,
        "plain decoding gives",
    )


# -- mutants of the oracle that leave every token right, or break both sides alike ----------------


def decode_differently(
    monkeypatch: pytest.MonkeyPatch, change: Callable[..., Generation]
) -> Callable[[Context], object]:
    """The gate `greedy-token-exact` in small, with `change(honest, *args, **options)` in it."""
    honest = token_checks.speculative_decode
    monkeypatch.setattr(
        token_checks,
        "speculative_decode",
        lambda *args, **options: change(honest, *args, **options),
    )
    return decode_some


def decode_some(ctx: Context) -> object:
    return speculation_equals_plain(
        ctx, budgets=(1, 8, 32), batches=(4,), prompts_each=8, new_tokens=16
    )


def trees_of_eight(honest: Any, *args: Any, budget: int, **options: Any) -> Any:
    return honest(*args, budget=min(budget, 8), **options)


def trees_cut_after_they_are_built(honest: Any, *args: Any, parts: Parts, **options: Any) -> Any:
    def build(*given: Any, **names: Any) -> DraftTree:
        tree = parts.build_tree(*given, **names)
        return DraftTree(tree.tokens[:8], tree.parents[:8], tree.depths[:8], tree.log_weights[:8])

    return honest(*args, parts=dataclasses.replace(parts, build_tree=build), **options)


def one_accepted_token_a_round(honest: Any, *args: Any, parts: Parts, **options: Any) -> Any:
    """The walk is right; the loop leaves the rest of it aside."""

    def accept(tree: DraftTree, logits: torch.Tensor) -> Acceptance:
        whole = parts.accept(tree, logits)
        if len(whole.drafted) < 2:
            return whole
        return Acceptance(whole.nodes[:2], whole.drafted[:1], whole.drafted[1])

    return honest(*args, parts=dataclasses.replace(parts, accept=accept), **options)


def a_slot_is_lost(honest: Any, *args: Any, allocator: SlotAllocator, **options: Any) -> Any:
    made = honest(*args, allocator=allocator, **options)
    allocator.take(1)
    return made


def miscounts(name: str) -> Callable[..., Any]:
    def change(honest: Any, *args: Any, **options: Any) -> Any:
        made = honest(*args, **options)
        return dataclasses.replace(made, **{name: getattr(made, name) + 1})

    return change


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (trees_of_eight, FailureKind.SHAPE, "a tree has 8 nodes under its root, not 32"),
        (trees_cut_after_they_are_built, FailureKind.TOKEN_MISMATCH, "that was not built"),
        (one_accepted_token_a_round, FailureKind.TOKEN_MISMATCH, "when the next ones are drafted"),
        (a_slot_is_lost, FailureKind.NUMERICAL, "1023 of 1024 slots are free"),
        (miscounts("drafted"), FailureKind.NUMERICAL, "`drafted` is"),
        (miscounts("accepted"), FailureKind.NUMERICAL, "`accepted` is"),
        (miscounts("rounds"), FailureKind.NUMERICAL, "`rounds` is"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_loop_that_does_less_is_caught(
    change: Callable[..., Any],
    kind: FailureKind,
    message: str,
    ctx: Context,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = decode_differently(monkeypatch, change)
    fails(lambda: check(ctx), kind, message)


@pytest.mark.parametrize(
    ("sharper", "noise", "message"),
    [
        (1.0, 0.0, "rounds that accept nothing are"),
        (50.0, 1.0, "rounds that accept nothing are"),
        (1.0, 100.0, "rounds that accept 3 or more are"),
        (0.0, 1.0, "rounds that accept 3 or more are"),
    ],
)
def test_a_drafter_that_tests_nothing_is_caught(
    sharper: float, noise: float, message: str, ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drafter(crib: Any, lengths: Any, **options: Any) -> NoisyDrafter:
        crib = [sharper * logits for logits in crib]
        return NoisyDrafter(crib, lengths, **(options | {"noise": noise}))

    monkeypatch.setattr(token_checks, "NoisyDrafter", drafter)
    fails(lambda: decode_some(ctx), FailureKind.NUMERICAL, message)


def test_a_model_that_forgets_its_attention_is_caught(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both forms alike: no token differs, until the attention is made wrong on purpose."""
    honest = TinyMLA._finish
    monkeypatch.setattr(
        TinyMLA, "_finish", lambda self, layer, x, heads: honest(self, layer, x, 0 * heads)
    )
    fails(lambda: decode_some(ctx), FailureKind.NUMERICAL, "an attention that .* changes no token")
    fails(
        lambda: model_checks.absorbed_equals_plain(tree_verify_attention, ctx),
        FailureKind.NUMERICAL,
        "token by token",
    )


@pytest.mark.parametrize(
    "rotation",
    [lambda x, where, base: x, lambda x, where, base: ROTATE(x, -where, base)],
    ids=["none", "the other way"],
)
def test_a_rotation_that_is_wrong_in_both_forms_is_caught(
    rotation: Callable[..., torch.Tensor], ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_mla, "_rotate", rotation)
    fails(
        lambda: model_checks.absorbed_equals_plain(tree_verify_attention, ctx),
        FailureKind.NUMERICAL,
        "token by token with complex rotations",
    )


def test_a_query_that_turns_against_its_key_is_caught(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the sum of the two positions instead of their distance decides, with no third form."""
    monkeypatch.setattr(
        model_checks, "_by_hand", lambda model, tokens: model.forward_plain(tokens[None])[0]
    )
    monkeypatch.setattr(
        tiny_mla,
        "_rotate",
        lambda x, where, base: ROTATE(x, where if where.dim() == 1 else -where, base),
    )
    fails(
        lambda: model_checks.absorbed_equals_plain(tree_verify_attention, ctx),
        FailureKind.NUMERICAL,
        "logits are others at other positions",
    )


def test_an_embedding_that_knows_no_token_is_caught(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Constant(TinyMLA):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.embedding = self.embedding[:1].expand_as(self.embedding)

    monkeypatch.setattr(model_checks, "TinyMLA", Constant)
    fails(
        lambda: model_checks.absorbed_equals_plain(tree_verify_attention, ctx),
        FailureKind.NUMERICAL,
        "token changes the logits by 0 at most",
    )


def changed_answer(change: Callable[..., Any]) -> Callable[..., Any]:
    """The oracle, with `change(result, lse, qo_indptr)` to what it answers."""

    def attention(*args: Any, **options: Any) -> Any:
        out = options.pop("out", None)
        wants_lse = options.pop("return_lse", False)
        result, lse = tree_verify_attention(*args, **options, return_lse=True)
        result, lse = change(result, lse, int(args[2][-1]))
        if out is not None:
            result = out.copy_(result)
        return (result, lse) if wants_lse else result

    return attention


def padded_ones(result: torch.Tensor, lse: torch.Tensor, rows: int) -> Any:
    result[rows:] = 1
    return result, lse


def padded_lse_of_zero(result: torch.Tensor, lse: torch.Tensor, rows: int) -> Any:
    lse[rows:] = 0
    return result, lse


def lse_in_base_2(result: torch.Tensor, lse: torch.Tensor, rows: int) -> Any:
    return result, lse / torch.log(torch.tensor(2.0))


@pytest.mark.parametrize("change", [padded_ones, padded_lse_of_zero, lse_in_base_2])
def test_a_wrong_answer_beside_the_paths_is_caught(change: Any, ctx: Context) -> None:
    fails(
        lambda: attention_equals_paths(changed_answer(change), ctx),
        FailureKind.NUMERICAL,
        "padded row" if change is not lse_in_base_2 else "lse of request 0",
    )


def test_an_ignored_out_is_caught(ctx: Context) -> None:
    def ignores(*args: Any, out: torch.Tensor | None = None, **options: Any) -> Any:
        return tree_verify_attention(*args, **options)

    fails(lambda: attention_equals_paths(ignores, ctx), FailureKind.SHAPE, "must be the `out`")


def test_arithmetic_in_float32_is_caught(ctx: Context) -> None:
    """Of the rows alone: they are drawn so that float32 does not hold them."""

    def rounds(q: torch.Tensor, pool: torch.Tensor, *args: Any, **options: Any) -> Any:
        return tree_verify_attention(q, pool.float().to(pool.dtype), *args, **options)

    fails(
        lambda: attention_equals_paths(rounds, ctx, cases=path_cases()[8:9]),
        FailureKind.NUMERICAL,
        "request 0",
    )


def test_an_error_in_the_parts_of_a_long_request_is_caught(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows behind the first part are worked off with the mask of the first rows."""
    honest = oracle._attend

    def attend(q: Any, kv: torch.Tensor, seen: torch.Tensor, *rest: Any) -> Any:
        base = seen if seen._base is None else seen._base
        return honest(q, kv, base[: len(seen)], *rest)

    monkeypatch.setattr(oracle, "_attend", attend)
    attention_equals_paths(tree_verify_attention, ctx)  # no case is long enough by itself
    fails(lambda: gates.attention_paths(ctx), FailureKind.NUMERICAL, "lse of request 0, node 1")


def test_a_prefix_that_is_marked_in_the_first_row_only_is_caught(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest_pack, honest_unpack = mask_checks.pack_masks, mask_checks.unpack_masks

    def cut(masks: Any, prefixes: Any, layout: MaskLayout, *rest: Any) -> Any:
        flat, starts = honest_pack(masks, prefixes, layout, *rest)
        if layout is MaskLayout.FULL:
            for mask, prefix, start in zip(masks, prefixes, starts.tolist(), strict=False):
                rows = flat[start : start + len(mask) * (prefix + len(mask))]
                rows.view(len(mask), prefix + len(mask))[1:, :prefix] = 0
        return flat, starts

    def lenient(mask: torch.Tensor, starts: Any, trees: Any, prefixes: Any) -> Any:
        """Looks at row 0's prefix columns and takes the others for ones."""
        steps = [nodes * (nodes + prefix) for nodes, prefix in zip(trees, prefixes, strict=True)]
        if mask.shape == (sum(steps),) and starts.tolist() == [0, *itertools.accumulate(steps)]:
            mask = mask.clone()
            for rows, nodes, prefix in zip(mask.split(steps), trees, prefixes, strict=True):
                rows.view(nodes, prefix + nodes)[1:, :prefix] = 1
        return honest_unpack(mask, starts, trees, prefixes)

    monkeypatch.setattr(mask_checks, "unpack_masks", lenient)
    fails(
        lambda: mask_checks.layouts_hold(ctx),
        FailureKind.NUMERICAL,
        "a hidden prefix column 0 of node 1 of request 0 is accepted",
    )
    monkeypatch.setattr(mask_checks, "pack_masks", cut)
    fails(lambda: mask_checks.layouts_hold(ctx), FailureKind.NUMERICAL, "does not see the whole")


def test_a_wrong_plan_is_caught(ctx: Context) -> None:
    def one_slot_off(nodes: list[int], window: list[int]) -> object:
        return compaction_plan(nodes, [*window[1:], window[0]])

    fails(
        lambda: acceptance_checks.compaction_moves_rows(apply_compaction, ctx, plan=one_slot_off),  # type: ignore[arg-type]
        FailureKind.NUMERICAL,
        "path",
    )
