"""Tree builders, acceptance walks and KV moves that cheat; phase 0's checks must reject each."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest
import torch

from kdtree_engine.reference.acceptance import (
    Acceptance,
    Compaction,
    accept_greedy,
    accept_sampled,
    apply_compaction,
)
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
        ctx, parts=parts, budgets=(8, 32), batches=(4,), prompts_each=8, new_tokens=16
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
    """Losslessness does not hang on the tree, which is why the tree has gates of its own."""
    speculate(ctx, Parts(build_tree=breadth_first))


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


def test_the_honest_walk_keeps_the_distribution(ctx: Context) -> None:
    p_value = sampling_keeps_distribution(accept_sampled, ctx, samples=6000)[0]
    assert p_value.value > 1e-4
