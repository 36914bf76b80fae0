"""Tree builders, acceptance walks and KV moves that cheat; phase 0's checks must reject each."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from kdtree_engine.reference import slots, tree
from kdtree_engine.reference.acceptance import (
    Acceptance,
    Compaction,
    accept_greedy,
    accept_sampled,
    apply_compaction,
)
from kdtree_engine.reference.slots import SlotAllocator
from kdtree_engine.reference.speculative import Parts
from kdtree_engine.reference.tree import DraftTree, build_draft_tree
from phases.gate import Context, FailureKind, Figure, GateFailure
from phases.p0_oracle.acceptance_checks import compaction_moves_rows, sampling_keeps_distribution
from phases.p0_oracle.tree_checks import tree_equals_brute_force, tree_has_properties
from phases.token_checks import speculation_equals_plain


@pytest.fixture(params=[20261], ids=lambda seed: f"seed={seed}")
def ctx(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Context:
    return Context(seed=request.param, scratch=tmp_path)


def speculate(ctx: Context, parts: Parts) -> None:
    speculation_equals_plain(
        ctx, parts=parts, budgets=(1, 8, 32), batches=(4,), prompts_each=8, new_tokens=16
    )


# -- trees ----------------------------------------------------------------------------------------


def breadth_first(
    log_probs: torch.Tensor,
    budget: int,
    top_k: int | None = None,
    *,
    token_ids: torch.Tensor | None = None,
    root_token: int = -1,
) -> DraftTree:
    """Level by level, whatever the weights: parents precede children, and all sums are right."""
    names = torch.arange(log_probs.shape[1]).expand(log_probs.shape)
    names = names if token_ids is None else token_ids
    nodes = [(root_token, -1, 0, 0.0)]
    for parent, (_, _, depth, weight) in enumerate(nodes):  # it grows while it is walked
        if depth == len(log_probs):
            continue
        row, order = log_probs[depth].sort(descending=True, stable=True)
        for value, column in zip(row[:top_k].tolist(), order[:top_k].tolist(), strict=True):
            if value > -torch.inf and len(nodes) <= budget:
                nodes.append((int(names[depth, column]), parent, depth + 1, weight + value))
    tokens, parents, depths, weights = zip(*nodes, strict=True)
    return DraftTree(
        torch.tensor(tokens),
        torch.tensor(parents),
        torch.tensor(depths),
        torch.tensor(weights, dtype=torch.float64),
    )


def one_node_short(
    log_probs: torch.Tensor,
    budget: int,
    top_k: int | None = None,
    *,
    token_ids: torch.Tensor | None = None,
    root_token: int = -1,
) -> DraftTree:
    """Counts the root in the budget."""
    return build_draft_tree(
        log_probs, max(budget - 1, 0), top_k, token_ids=token_ids, root_token=root_token
    )


def ties_the_other_way(
    log_probs: torch.Tensor,
    budget: int,
    top_k: int | None = None,
    *,
    token_ids: torch.Tensor | None = None,
    root_token: int = -1,
) -> DraftTree:
    """Of equal tokens, the last column first: as heavy a tree, and another one."""
    columns = torch.arange(log_probs.shape[1]).expand(log_probs.shape)
    names = columns if token_ids is None else token_ids
    return build_draft_tree(
        log_probs.flip(1), budget, top_k, token_ids=names.flip(1), root_token=root_token
    )


def drawn_trees_have_properties(build: Callable[..., DraftTree], ctx: Context) -> list[Figure]:
    return tree_has_properties(build, ctx, examples=100, shrink=False)


@pytest.mark.parametrize("check", [tree_equals_brute_force, drawn_trees_have_properties])
@pytest.mark.parametrize("cheat", [breadth_first, one_node_short, ties_the_other_way])
def test_a_wrong_tree_is_rejected(
    cheat: Callable[..., DraftTree], check: Callable[..., object], ctx: Context
) -> None:
    with pytest.raises(GateFailure) as failure:
        check(cheat, ctx)
    assert failure.value.kind is FailureKind.NUMERICAL
    assert "log_probs=" in str(failure.value)


@pytest.mark.parametrize("check", [tree_equals_brute_force, drawn_trees_have_properties])
def test_the_honest_tree_passes(check: Callable[..., list[object]], ctx: Context) -> None:
    assert check(build_draft_tree, ctx)


def test_a_worse_tree_costs_speed_and_no_token(ctx: Context) -> None:
    """Losslessness does not hang on the tree, which is why the tree has gates of its own.

    The loop still tells that no path is deep any more.
    """
    with pytest.raises(GateFailure, match="rounds that accept 3 or more are") as failure:
        speculate(ctx, Parts(build_tree=breadth_first))
    assert failure.value.kind is FailureKind.NUMERICAL


def capped(
    log_probs: torch.Tensor, budget: int, top_k: int | None = None, **names: Any
) -> DraftTree:
    return build_draft_tree(log_probs, min(budget, 7), top_k, **names)


def no_rank_beyond_seven(
    log_probs: torch.Tensor, budget: int, top_k: int | None = None, **names: Any
) -> DraftTree:
    return build_draft_tree(log_probs, budget, min(top_k or 8, 8), **names)


def no_level_beyond_five(
    log_probs: torch.Tensor, budget: int, top_k: int | None = None, **names: Any
) -> DraftTree:
    if names.get("token_ids") is not None:
        names["token_ids"] = names["token_ids"][:5]
    return build_draft_tree(log_probs[:5], budget, top_k, **names)


@pytest.mark.parametrize("check", [tree_equals_brute_force, drawn_trees_have_properties])
@pytest.mark.parametrize("cheat", [capped, no_rank_beyond_seven, no_level_beyond_five])
def test_a_tree_that_is_right_while_it_is_small_is_rejected(
    cheat: Callable[..., DraftTree], check: Callable[..., object], ctx: Context
) -> None:
    with pytest.raises(GateFailure) as failure:
        check(cheat, ctx)
    assert failure.value.kind is FailureKind.NUMERICAL


@pytest.mark.parametrize("cheat", [capped, one_node_short])
def test_the_loop_too_rejects_a_tree_below_its_budget(
    cheat: Callable[..., DraftTree], ctx: Context
) -> None:
    with pytest.raises(GateFailure, match="nodes under its root, not") as failure:
        speculate(ctx, Parts(build_tree=cheat))
    assert failure.value.kind is FailureKind.SHAPE


@pytest.mark.parametrize("last", [1, 2, 3])
def test_a_repeated_token_number_must_be_refused(
    last: int, ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check of token numbers that leaves out some of the sorted row."""
    honest = tree._check_token_ids
    monkeypatch.setattr(
        tree,
        "_check_token_ids",
        lambda ids, log_probs: honest(
            ids.sort(1).values[:, :-last].contiguous(), log_probs[:, :-last]
        ),
    )
    with pytest.raises(GateFailure, match="a token that stands twice at one depth is accepted"):
        drawn_trees_have_properties(build_draft_tree, ctx)


# -- acceptance -----------------------------------------------------------------------------------


def always_takes_the_first_child(tree: DraftTree, logits: torch.Tensor) -> Acceptance:
    """Trusts the draft down to a leaf."""
    nodes = [0]
    while children := tree.children(nodes[-1]):
        nodes.append(children[0])
    drafted = tuple(tree.tokens[nodes[1:]].tolist())
    return Acceptance(tuple(nodes), drafted, int(logits[nodes[-1]].argmax()))


def takes_the_bonus_from_the_root(tree: DraftTree, logits: torch.Tensor) -> Acceptance:
    honest = accept_greedy(tree, logits.argmax(-1))
    return Acceptance(honest.nodes, honest.drafted, int(logits[0].argmax()))


def keeps_the_rejected_child(tree: DraftTree, logits: torch.Tensor) -> Acceptance:
    """The right tokens, but the row of a rejected child stays in place of the accepted one's."""
    honest = accept_greedy(tree, logits.argmax(-1))
    nodes = list(honest.nodes)
    for place in range(1, len(nodes)):
        siblings = tree.children(nodes[place - 1])
        if siblings[0] != nodes[place]:
            nodes[place] = siblings[0]
            break
    return Acceptance(tuple(nodes), honest.drafted, honest.bonus)


def stops_at(most: int) -> Callable[[DraftTree, torch.Tensor], Acceptance]:
    """Right tokens, but never more than so many drafted ones at a time."""

    def accept(tree: DraftTree, logits: torch.Tensor) -> Acceptance:
        honest = accept_greedy(tree, logits.argmax(-1))
        if len(honest.drafted) <= most:
            return honest
        return Acceptance(honest.nodes[: most + 1], honest.drafted[:most], honest.drafted[most])

    return accept


@pytest.mark.parametrize("most", [0, 1, 5])
def test_a_walk_that_stops_early_is_rejected(most: int, ctx: Context) -> None:
    """No token is wrong: only what the walk left lying shows."""
    with pytest.raises(GateFailure, match="the walk stops at node") as failure:
        speculate(ctx, Parts(accept=stops_at(most)))
    assert failure.value.kind is FailureKind.TOKEN_MISMATCH


def skips_the_move(pool: torch.Tensor, plan: Compaction) -> None:
    pass


def moves_backwards(pool: torch.Tensor, plan: Compaction) -> None:
    """One after the other, last move first: overwrites rows that are still to be read."""
    for source, destination in reversed(list(zip(plan.source, plan.destination, strict=True))):
        pool[destination] = pool[source]


def swaps_source_and_destination(pool: torch.Tensor, plan: Compaction) -> None:
    for source, destination in zip(plan.source, plan.destination, strict=True):
        pool[source] = pool[destination]


@pytest.mark.parametrize("accept", [always_takes_the_first_child, takes_the_bonus_from_the_root])
def test_a_wrong_walk_is_rejected(
    accept: Callable[[DraftTree, torch.Tensor], Acceptance], ctx: Context
) -> None:
    with pytest.raises(GateFailure) as failure:
        speculate(ctx, Parts(accept=accept))
    assert failure.value.kind is FailureKind.TOKEN_MISMATCH


def test_a_wrong_row_is_rejected(ctx: Context) -> None:
    with pytest.raises(GateFailure) as failure:
        speculate(ctx, Parts(accept=keeps_the_rejected_child))
    assert failure.value.kind in (FailureKind.TOKEN_MISMATCH, FailureKind.NUMERICAL)


@pytest.mark.parametrize("move", [skips_the_move, moves_backwards, swaps_source_and_destination])
def test_a_wrong_move_is_rejected(
    move: Callable[[torch.Tensor, Compaction], None], ctx: Context
) -> None:
    with pytest.raises(GateFailure) as failure:
        compaction_moves_rows(move, ctx)
    assert failure.value.kind is FailureKind.NUMERICAL
    with pytest.raises(GateFailure) as failure:
        speculate(ctx, Parts(compact=move))
    assert failure.value.kind in (FailureKind.TOKEN_MISMATCH, FailureKind.NUMERICAL)


def test_the_honest_loop_passes(ctx: Context) -> None:
    speculate(ctx, Parts())
    compaction_moves_rows(apply_compaction, ctx)


def allocates_like(first_run: Callable[[list[int], int], list[int]]) -> type[SlotAllocator]:
    class Allocator(SlotAllocator):
        def take(self, count: int) -> list[int]:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(slots, "_first_run", first_run)
                return super().take(count)

    return Allocator


def misses_the_last_start(free: list[int], count: int) -> list[int]:
    for start in range(len(free) - count):
        if free[start + count - 1] - free[start] == count - 1:
            return free[start : start + count]
    return []


class NeverGivesTheLastHolderUp(SlotAllocator):
    def give(self, slots: Iterable[int]) -> None:
        super().give(slot for slot in slots if self._holders[slot] > 1)


@pytest.mark.parametrize(
    "cheat",
    [
        allocates_like(misses_the_last_start),
        allocates_like(lambda free, count: free[-count:]),
        NeverGivesTheLastHolderUp,
    ],
    ids=["misses the last start", "takes the highest", "gives nothing back"],
)
def test_a_wrong_allocator_is_rejected(cheat: type[SlotAllocator], ctx: Context) -> None:
    with pytest.raises(GateFailure, match="free") as failure:
        compaction_moves_rows(apply_compaction, ctx, slots=cheat)
    assert failure.value.kind is FailureKind.NUMERICAL


# -- sampling -------------------------------------------------------------------------------------


def always_greedy(
    tree: DraftTree, target_probs: torch.Tensor, generator: torch.Generator
) -> Acceptance:
    return accept_greedy(tree, target_probs.argmax(-1))


def prefers_drafted_tokens(
    tree: DraftTree, target_probs: torch.Tensor, generator: torch.Generator
) -> Acceptance:
    """Tries twice: where the sampled token is not in the tree, it samples once more."""
    first = accept_sampled(tree, target_probs, generator)
    second = accept_sampled(tree, target_probs, generator)
    return max(first, second, key=lambda acceptance: len(acceptance.nodes))


def trusts_the_first_child_sometimes(
    tree: DraftTree, target_probs: torch.Tensor, generator: torch.Generator
) -> Acceptance:
    """In one walk of ten."""
    if float(torch.rand(1, generator=generator)) < 0.1:
        return always_takes_the_first_child(tree, target_probs)
    return accept_sampled(tree, target_probs, generator)


def slightly_sharpened(
    tree: DraftTree, target_probs: torch.Tensor, generator: torch.Generator
) -> Acceptance:
    """A temperature of 0.9 where 1 is asked for."""
    return accept_sampled(tree, target_probs ** (1 / 0.9), generator)


@pytest.mark.parametrize(
    "accept",
    [always_greedy, prefers_drafted_tokens, trusts_the_first_child_sometimes, slightly_sharpened],
)
def test_a_distorted_distribution_is_rejected(
    accept: Callable[..., Acceptance], ctx: Context
) -> None:
    with pytest.raises(GateFailure, match="p-value") as failure:
        sampling_keeps_distribution(accept, ctx, samples=6000)
    assert failure.value.kind is FailureKind.NUMERICAL
    assert failure.value.figures[0].name == "p-value"


def boosts_drafted_tokens(
    tree: DraftTree, target_probs: torch.Tensor, generator: torch.Generator
) -> Acceptance:
    """Every drafted token is 5 % more likely than the target says."""
    boosted = target_probs.clone()
    boosted[tree.parents[1:], tree.tokens[1:]] *= 1.05
    return accept_sampled(tree, boosted, generator)


def test_a_slight_taste_for_drafted_tokens_is_rejected(ctx: Context) -> None:
    """At the gate's own number of samples, where the joint distribution does not show it."""
    with pytest.raises(GateFailure, match="sigmas off its expectation") as failure:
        sampling_keeps_distribution(boosts_drafted_tokens, ctx)
    assert failure.value.kind is FailureKind.NUMERICAL
    figures = {figure.name: figure.value for figure in failure.value.figures}
    assert figures["p-value"] > 1e-4
    assert figures["accepted tokens off their expectation, in sigmas"] > 4.5


def test_the_honest_walk_keeps_the_distribution(ctx: Context) -> None:
    p_value = sampling_keeps_distribution(accept_sampled, ctx, samples=6000)[0]
    assert p_value.value > 1e-4
