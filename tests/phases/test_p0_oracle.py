"""Phase 0's gates on reduced cases; the whole of them runs with `kd phase run 0`."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence

import pytest
import torch

from kdtree_engine.reference import build_draft_tree, tree_verify_attention
from kdtree_engine.reference.acceptance import accept_sampled, apply_compaction, compaction_plan
from kdtree_engine.reference.masks import tree_mask
from kdtree_engine.reference.tiny_mla import TinyMLA
from phases.attention_cases import standard_cases
from phases.attention_checks import attention_equals_paths, attention_matches_oracle, path_cases
from phases.gate import Context, FailureKind, Figure, GateFailure, GateKind
from phases.p0_oracle import PHASE, acceptance_checks, mask_checks, model_checks, tree_checks
from phases.token_checks import BATCHES, BUDGETS, speculation_equals_plain


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


def test_a_wrong_plan_is_caught(ctx: Context) -> None:
    def one_slot_off(nodes: list[int], window: list[int]) -> object:
        return compaction_plan(nodes, [*window[1:], window[0]])

    fails(
        lambda: acceptance_checks.compaction_moves_rows(apply_compaction, ctx, plan=one_slot_off),  # type: ignore[arg-type]
        FailureKind.NUMERICAL,
        "path",
    )
