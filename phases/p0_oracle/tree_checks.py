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
    build: TreeBuilder,
    ctx: Context,
    *,
    max_depth: int = 4,
    max_columns: int = 4,
    draws: int = 3,
    large: bool = True,
) -> list[Figure]:
    """All depths D, columns K and budgets of small sizes, with ties and impossible tokens.

    Two independent answers: the full list of rank tuples sorted by weight, of which the tree must
    be the first `budget`, in that order; and, where there are at most 14 nodes, every one of the
    2^nodes subsets that holds each node's parent, none of which may have a larger sum of
    probabilities (the expected number of accepted tokens) than the tree of that size.

    large: also trees of the sizes that a service builds, up to 12 deep, 100 wide and 128 nodes.
    There the list holds every rank tuple that may be among the first `budget`, and no other.
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
    deepest = widest = 0
    for number, (depth, columns, budget) in enumerate(_LARGE if large else ()):
        ctx.progress(len(sizes), len(sizes), f"depth {depth}, {columns} columns, {budget} nodes")
        for rows in _ROWS:
            log_probs = _large(rows, depth, columns, ctx.seed * 1000 + number)
            tree = build(log_probs, budget, None, root_token=7)
            wanted = _enumerate(log_probs, None, most=budget)[:budget]
            _equals_list(tree, wanted, f"{rows} log_probs {depth} x {columns}, budget={budget}")
            deepest = max(deepest, *(len(ranks) for _, ranks, _ in wanted))
            widest = max(widest, *(max(ranks) + 1 for _, ranks, _ in wanted))
            trees += 1
    ctx.progress(len(sizes), len(sizes), "done")
    return [
        Figure("trees", trees, Unit.COUNT),
        Figure("subsets tried", subsets, Unit.COUNT),
        Figure("levels of the deepest tree", deepest, Unit.COUNT),
        Figure("ranks of the widest tree", widest, Unit.COUNT),
    ]


@single_threaded
def tree_has_properties(
    build: TreeBuilder, ctx: Context, *, examples: int = 300, shrink: bool = True
) -> list[Figure]:
    """What holds for every tree, on inputs that hypothesis draws and, where it fails, shrinks.

    The budget is used up as far as there are nodes; parents precede children and lie one level up;
    weights are path sums; ranks have no holes; nodes come by weight and then by rank tuple, and no
    node that is left out comes before one that is in; a larger budget only appends; impossible
    tokens are absent; `token_ids` renames and changes nothing else. A third of the inputs has the
    sizes that a service uses. `token_ids` that name one token twice at a depth must be refused.

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
    refused = _repeated_names_are_refused(build)
    return [
        Figure("drawn trees", seen, Unit.COUNT),
        Figure("repeated token numbers refused", refused, Unit.COUNT),
    ]


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


_LARGE = ((8, 100, 64), (12, 40, 96), (10, 100, 128))
"""Depth, columns, budget."""
_ROWS = ("flat", "random", "peaked", "tied", "equal")


def _large(rows: str, depth: int, columns: int, seed: int) -> torch.Tensor:
    """Log-probabilities [depth, columns]: flat rows give wide fans, peaked ones deep chains."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(depth, columns, generator=generator, dtype=torch.float64)
    if rows == "equal":
        # Probability 1 everywhere: all nodes weigh the same, and rank tuples alone decide.
        return torch.zeros_like(drawn)
    if rows == "tied":
        # Eighths are exact, so that sums tie exactly.
        return -torch.randint(0, 9, (depth, columns), generator=generator).to(torch.float64) / 8
    return (drawn * {"flat": 0.05, "random": 2.0, "peaked": 12.0}[rows]).log_softmax(-1)


_Node = tuple[float, tuple[int, ...], tuple[int, ...]]
"""Minus the log weight, rank tuple, tokens of the path."""


def _enumerate(log_probs: torch.Tensor, top_k: int | None, most: int | None = None) -> list[_Node]:
    """The nodes of the full tree, best first, equal ones by rank tuple.

    most: leave out nodes that cannot be among the first so many. In front of the tuple
    (r_1, ..., r_d) stand all tuples no longer than it and nowhere of a higher rank, itself included
    sum over k of (r_1 + 1) * ... * (r_k + 1).
    """
    rows: list[list[tuple[float, int]]] = []
    for row in log_probs.tolist():
        ordered = sorted((-value, column) for column, value in enumerate(row))[:top_k]
        rows.append([(minus, column) for minus, column in ordered if minus < math.inf])
    nodes: list[_Node] = []
    # Rank tuple, tokens, weight, and of the tuples in front: all, and those as long as it.
    level: list[tuple[_Node, int, int]] = [((0.0, (), ()), 0, 1)]
    for row in rows:
        deeper = []
        for (minus, ranks, path), in_front, as_long in level:
            for rank, (value, column) in enumerate(row):
                longest = as_long * (rank + 1)
                if most is not None and in_front + longest > most:
                    break
                node = (minus + value, (*ranks, rank), (*path, column))
                deeper.append((node, in_front + longest, longest))
        level = deeper
        nodes += [node for node, _, _ in level]
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
    large = draw(st.integers(0, 2)) == 2
    if large:
        depth, columns = draw(st.integers(6, 12)), draw(st.integers(10, 100))
        log_probs = _large(draw(st.sampled_from(_ROWS)), depth, columns, draw(st.integers(0, 999)))
        names = 100 + torch.arange(columns).flip(0).expand(depth, columns)
    else:
        depth, columns = draw(st.integers(1, 5)), draw(st.integers(1, 6))
        exact = st.integers(-8, 0).map(lambda quarters: quarters / 4)
        value = st.one_of(exact, st.floats(-50.0, 0.0), st.just(-math.inf))
        row = st.lists(value, min_size=columns, max_size=columns)
        rows = draw(st.lists(row, min_size=depth, max_size=depth))
        log_probs = torch.tensor(rows, dtype=torch.float64)
        permuted = st.permutations(range(100, 100 + columns))
        names = torch.tensor([draw(permuted) for _ in range(depth)])
    return {
        "log_probs": log_probs,
        "token_ids": names,
        "budget": draw(st.integers(0, 128 if large else 40)),
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
    shown = log_probs.tolist() if log_probs.numel() <= 30 else list(log_probs.shape)
    what = f"log_probs={shown}, budget={budget}, top_k={top_k}"
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
        taken.setdefault(parent, []).append(column)
    ordered = log_probs.sort(dim=1, descending=True, stable=True)
    ranked_columns, ranked_weights = ordered.indices.tolist(), ordered.values.tolist()
    for parent, columns in taken.items():
        ranked = ranked_columns[depths[parent]]
        if columns != ranked[: len(columns)]:
            _fail(f"the children of node {parent} carry {columns}, not the best ranks", what)
        if top_k is not None and len(columns) > top_k:
            _fail(f"node {parent} has {len(columns)} children, more than top_k", what)
    _in_order(parents, depths, log_weights, ranked_weights, wide, what)

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


def _in_order(
    parents: Sequence[int],
    depths: Sequence[int],
    log_weights: Sequence[float],
    ranked: Sequence[Sequence[float]],
    wide: Sequence[int],
    what: str,
) -> None:
    """Nodes come by (-weight, rank tuple), and what is left out comes behind all of them.

    It is enough to look at each node's best child that is not in: all others are no better.
    """
    children = [0] * len(parents)
    ranks: list[tuple[int, ...]] = [()]
    keys = []
    for node, parent in enumerate(parents[1:], start=1):
        ranks.append((*ranks[parent], children[parent]))
        children[parent] += 1
        keys.append((-log_weights[node], ranks[node]))
        if node > 1 and keys[-1] <= keys[-2]:
            _fail(f"node {node} belongs before node {node - 1}", what)
    for node, count in enumerate(children):
        if keys and depths[node] < len(ranked) and count < wide[depths[node]]:
            weight = log_weights[node] + ranked[depths[node]][count]
            if (-weight, (*ranks[node], count)) <= keys[-1]:
                _fail(f"a child of node {node} of rank {count} is missing", what)


def _repeated_names_are_refused(build: TreeBuilder) -> int:
    """One token twice among siblings would make the walk ambiguous, wherever it stands."""
    columns, tried = 4, 0
    for depth, (first, second) in itertools.product(
        range(2), itertools.combinations(range(columns), 2)
    ):
        names = torch.arange(2 * columns).view(2, columns)
        names[depth, second] = names[depth, first]
        tried += 1
        try:
            build(torch.full((2, columns), -1.0), 3, None, token_ids=names)
        except ValueError:
            continue
        _fail("a token that stands twice at one depth is accepted", f"token_ids={names.tolist()}")
    return tried


def _fail(problem: str, what: str) -> None:
    raise GateFailure(FailureKind.NUMERICAL, f"{problem} ({what})")
