"""What a draft tree builder must pass: brute force on small inputs, properties on drawn ones."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import hypothesis
import hypothesis.configuration
import hypothesis.strategies as st
import torch

from kdtree_engine.reference.speculative import TreeBuilder
from kdtree_engine.reference.tree import DraftTree
from phases.gate import Context, FailureKind, Figure, GateFailure, Unit
from phases.threads import single_threaded

__all__ = ["tree_equals_brute_force", "tree_has_properties"]

_MOST_SUBSETS = 1 << 14


@single_threaded
def tree_equals_brute_force(
    build: TreeBuilder, ctx: Context, *, max_depth: int = 4, max_columns: int = 4, draws: int = 3
) -> list[Figure]:
    """All depths D, columns K and budgets of small sizes, with ties and impossible tokens.

    Two independent answers: the full list of rank tuples sorted by weight, of which the tree must
    be the first `budget`, in that order; and, where there are at most 14 nodes, every one of the
    2^nodes subsets that holds each node's parent, none of which may have a larger sum of
    probabilities (the expected number of accepted tokens) than the tree of that size.
    """
    sizes = [
        (depth, columns)
        for depth, columns in itertools.product(range(max_depth + 1), range(1, max_columns + 1))
        if columns**depth <= 81
    ]
    trees = subsets = 0
    for done, (depth, columns) in enumerate(sizes):
        ctx.progress(done, len(sizes), f"depth {depth}, {columns} columns")
        generator = torch.Generator().manual_seed(ctx.seed * 1000 + done)
        for draw in range(draws):
            log_probs = _draw(depth, columns, draw, generator)
            for top_k in (None, *range(1, columns)):
                ranked = _enumerate(log_probs, top_k)
                best = _best_sums(ranked) if 2 ** len(ranked) <= _MOST_SUBSETS else None
                for budget in _budgets(len(ranked)):
                    what = f"log_probs={log_probs.tolist()}, budget={budget}, top_k={top_k}"
                    tree = build(log_probs, budget, top_k, root_token=7)
                    _equals_list(tree, ranked[:budget], what)
                    trees += 1
                    if best is not None:
                        made = float(tree.log_weights[1:].exp().sum())
                        _not_beaten(made, best[min(budget, len(ranked))], what)
                        subsets += 2 ** len(ranked)
    ctx.progress(len(sizes), len(sizes), "done")
    return [
        Figure("trees", trees, Unit.COUNT),
        Figure("subsets tried", subsets, Unit.COUNT),
    ]


@single_threaded
def tree_has_properties(
    build: TreeBuilder, ctx: Context, *, examples: int = 300, shrink: bool = True
) -> list[Figure]:
    """What holds for every tree, on inputs that hypothesis draws and, where it fails, shrinks.

    The budget is used up as far as there are nodes; parents precede children and lie one level up;
    weights are path sums and never rise; ranks have no holes; a larger budget only appends;
    impossible tokens are absent; `token_ids` renames and changes nothing else.

    shrink: look for a smaller input that fails too, which takes some seconds.
    """
    seen = 0
    steps = [hypothesis.Phase.generate, *([hypothesis.Phase.shrink] if shrink else [])]

    @hypothesis.seed(ctx.seed)
    @hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        phases=steps,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(_INPUTS)
    def holds(drawn: dict[str, Any]) -> None:
        nonlocal seen
        seen += 1
        ctx.progress(min(seen, examples), examples, "drawn trees")
        _check_properties(build, **drawn)

    # Hypothesis keeps notes in a folder; a gate writes nowhere but in its scratch.
    hypothesis.configuration.set_hypothesis_home_dir(ctx.scratch / "hypothesis")
    try:
        holds()
    finally:
        hypothesis.configuration.set_hypothesis_home_dir(None)
    return [Figure("drawn trees", seen, Unit.COUNT)]


def _draw(depth: int, columns: int, draw: int, generator: torch.Generator) -> torch.Tensor:
    """Log-probabilities [depth, columns]: distinct ones, then tied ones, then with holes."""
    logits = torch.randn(depth, columns, generator=generator, dtype=torch.float64)
    if draw == 0:
        return logits.log_softmax(-1)
    # Multiples of 1/4 are exact, so that sums tie exactly.
    tied = -torch.randint(1, 4, (depth, columns), generator=generator).to(torch.float64) / 4
    if draw == 2:
        holes = torch.rand(depth, columns, generator=generator) < 0.3
        tied = tied.masked_fill(holes, -torch.inf)
    return tied


_Node = tuple[float, tuple[int, ...], tuple[int, ...]]
"""Minus the log weight, rank tuple, tokens of the path."""


def _enumerate(log_probs: torch.Tensor, top_k: int | None) -> list[_Node]:
    """Every node of the full tree, best first, equal ones by rank tuple."""
    rows: list[list[tuple[float, int]]] = []
    for row in log_probs.tolist():
        ordered = sorted((-value, column) for column, value in enumerate(row))[:top_k]
        rows.append([(minus, column) for minus, column in ordered if minus < math.inf])
    nodes: list[_Node] = []
    for depth in range(1, len(rows) + 1):
        for ranks in itertools.product(*(range(len(row)) for row in rows[:depth])):
            path = [rows[level][rank] for level, rank in enumerate(ranks)]
            minus = 0.0
            for value, _ in path:
                minus += value
            nodes.append((minus, ranks, tuple(column for _, column in path)))
    return sorted(nodes)


def _best_sums(nodes: Sequence[_Node]) -> list[float]:
    """Of all subsets that hold each member's parent: the largest sum of probabilities by size."""
    place = {ranks: bit for bit, (_, ranks, _) in enumerate(nodes)}
    subsets = torch.arange(2 ** len(nodes))
    closed = torch.ones(len(subsets), dtype=torch.bool)
    total = torch.zeros(len(subsets), dtype=torch.float64)
    size = torch.zeros(len(subsets), dtype=torch.int64)
    for bit, (minus, ranks, _) in enumerate(nodes):
        member = (subsets >> bit & 1).to(torch.bool)
        if len(ranks) > 1:
            closed &= ~member | (subsets >> place[ranks[:-1]] & 1).to(torch.bool)
        total += member.to(torch.float64) * math.exp(-minus)
        size += member
    return [float(total[closed & (size == count)].max()) for count in range(len(nodes) + 1)]


def _budgets(nodes: int) -> Sequence[int]:
    """Every budget up to one beyond what there is, thinned out where there is much."""
    return sorted({*range(min(nodes, 16) + 2), nodes // 2, max(nodes - 1, 0), nodes, nodes + 1})


def _equals_list(tree: DraftTree, wanted: Sequence[_Node], what: str) -> None:
    if len(tree) != len(wanted) + 1:
        _fail(f"the tree has {len(tree) - 1} nodes, not {len(wanted)}", what)
    tokens, log_weights = tree.tokens.tolist(), tree.log_weights.tolist()
    if (tokens[0], int(tree.parents[0]), int(tree.depths[0]), log_weights[0]) != (7, -1, 0, 0.0):
        _fail("node 0 is not the root with the root's token", what)
    for node, (minus, ranks, path) in enumerate(wanted, start=1):
        found = tuple(tokens[step] for step in tree.path(node)[1:])
        if found != path:
            _fail(f"node {node} ends the path {found}, brute force has {path} there", what)
        if int(tree.depths[node]) != len(ranks):
            _fail(f"node {node} has depth {int(tree.depths[node])}, not {len(ranks)}", what)
        if log_weights[node] != -minus:
            _fail(f"node {node} has log weight {log_weights[node]}, not {-minus}", what)


def _not_beaten(made: float, best: float, what: str) -> None:
    if made < best - 1e-12:
        _fail(f"its probabilities sum to {made}, another set of that size has {best}", what)


@st.composite
def _inputs(draw: st.DrawFn) -> dict[str, Any]:
    depth, columns = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    exact = st.integers(-8, 0).map(lambda quarters: quarters / 4)
    value = st.one_of(exact, st.floats(-50.0, 0.0), st.just(-math.inf))
    row = st.lists(value, min_size=columns, max_size=columns)
    names = st.permutations(range(100, 100 + columns))
    return {
        "log_probs": torch.tensor(
            draw(st.lists(row, min_size=depth, max_size=depth)), dtype=torch.float64
        ),
        "token_ids": torch.tensor([draw(names) for _ in range(depth)]),
        "budget": draw(st.integers(0, 40)),
        "top_k": draw(st.one_of(st.none(), st.integers(1, 7))),
    }


_INPUTS = _inputs()


def _check_properties(
    build: TreeBuilder,
    log_probs: torch.Tensor,
    token_ids: torch.Tensor,
    budget: int,
    top_k: int | None,
) -> None:
    what = f"log_probs={log_probs.tolist()}, budget={budget}, top_k={top_k}"
    tree = build(log_probs, budget, top_k, root_token=0)
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    depths, log_weights = tree.depths.tolist(), tree.log_weights.tolist()
    wide = [min(int(row.isfinite().sum()), top_k or len(row)) for row in log_probs]
    there = sum(itertools.accumulate(wide, operator.mul))
    if len(tree) - 1 != min(budget, there):
        _fail(f"there are {len(tree) - 1} nodes, of {there} that the budget is for", what)
    taken: dict[int, list[int]] = {}
    for node in range(1, len(tree)):
        parent, column, level = parents[node], tokens[node], depths[node] - 1
        if not 0 <= parent < node or depths[parent] != level:
            _fail(f"node {node} at depth {depths[node]} has parent {parent}", what)
        own = float(log_probs[level, column])
        if own == -math.inf:
            _fail(f"node {node} carries a token of probability 0", what)
        if log_weights[node] != log_weights[parent] + own:
            _fail(f"node {node} weighs {log_weights[node]}, not its path's sum", what)
        if node > 1 and log_weights[node] > log_weights[node - 1]:
            _fail(f"node {node} is heavier than node {node - 1}", what)
        taken.setdefault(parent, []).append(column)
    for parent, columns in taken.items():
        ranked = log_probs[depths[parent]].sort(descending=True, stable=True).indices.tolist()
        if columns != ranked[: len(columns)]:
            _fail(f"the children of node {parent} carry {columns}, not the best ranks", what)
        if top_k is not None and len(columns) > top_k:
            _fail(f"node {parent} has {len(columns)} children, more than top_k", what)

    larger = build(log_probs, budget + 1, top_k, root_token=0)
    if larger.tokens[: len(tree)].tolist() != tokens or len(larger) - len(tree) > 1:
        _fail("one more node of budget changes more than one node", what)
    named = build(log_probs, budget, top_k, root_token=0, token_ids=token_ids)
    wanted = [0] + [
        int(token_ids[depth - 1, token])
        for depth, token in zip(depths[1:], tokens[1:], strict=True)
    ]
    if named.tokens.tolist() != wanted or named.parents.tolist() != parents:
        _fail("token_ids changes more than the tokens' names", what)


def _fail(problem: str, what: str) -> None:
    raise GateFailure(FailureKind.NUMERICAL, f"{problem} ({what})")
