"""What an acceptance walk and the KV moves behind it must pass."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import NoReturn, Protocol

import torch

from kdtree_engine.reference.acceptance import (
    Acceptance,
    Compaction,
    accept_greedy,
    compaction_plan,
)
from kdtree_engine.reference.slots import SlotAllocator
from kdtree_engine.reference.speculative import TreeBuilder
from kdtree_engine.reference.tiny_mla import TinyMLA, TinyMLAConfig
from kdtree_engine.reference.tree import DraftTree, build_draft_tree
from phases.attention_cases import Shape, random_parents
from phases.gate import Context, FailureKind, Figure, GateFailure, Unit
from phases.threads import single_threaded

__all__ = ["AcceptSampled", "compaction_moves_rows", "sampling_keeps_distribution"]

_LEAST_P_VALUE = 1e-4
"""A right walk falls below this once in 10,000 seeds; the cheats reach 1e-30 and less."""
_LEAST_EXPECTED = 5.0
"""Cells with a smaller expectation are pooled, as the chi-square approximation asks."""
_MOST_SIGMAS = 4.5
"""A right walk lies further off once in 150,000 seeds. Drafted tokens 5 % too likely: some 8."""
_WALKS_A_SAMPLE = 4
"""Walks that only count accepted tokens, for each sample; cheaper, and 5 % must show in them."""


class AcceptSampled(Protocol):
    """`accept_sampled`, or a candidate in its place."""

    def __call__(
        self, tree: DraftTree, target_probs: torch.Tensor, generator: torch.Generator
    ) -> Acceptance: ...


@single_threaded
def sampling_keeps_distribution(
    accept: AcceptSampled,
    ctx: Context,
    *,
    build: TreeBuilder = build_draft_tree,
    samples: int = 20000,
    length: int = 3,
) -> list[Figure]:
    """Pearson's chi-square test of `length` tokens against the target's own joint distribution.

    The target is a TinyMLA with a vocabulary of 4, so all 4^length continuations of a prompt can be
    counted. The drafter is wrong on purpose: it proposes from a distribution of its own. Trees of
    changing budget are verified until `length` tokens are there.

    The joint distribution has many cells, over which a slight taste for drafted tokens spreads
    thin. So that one number is also tested alone: how many drafted tokens walks accept, against
    the exact expectation and variance from the trees and the target.
    """
    config = TinyMLAConfig(vocabulary=4, hidden=16, layers=1, mlp=16)
    model = TinyMLA(config, seed=ctx.seed)
    generator = torch.Generator().manual_seed(ctx.seed)
    prompt = [0, 1, 2]
    behind = _all_continuations(model, prompt, length)
    joint = {
        tokens: float(
            torch.tensor([behind[tokens[:at]][tokens[at]] for at in range(length)]).prod()
        )
        for tokens in itertools.product(range(config.vocabulary), repeat=length)
    }
    trees: dict[tuple[tuple[int, ...], int], tuple[DraftTree, torch.Tensor]] = {}
    counts: Counter[tuple[int, ...]] = Counter()
    drafted = 0
    for sample in range(samples):
        if sample % 500 == 0:
            ctx.progress(sample, samples, "sampled continuations")
        tokens: tuple[int, ...] = ()
        while len(tokens) < length:
            key = (tokens, sample % 3)
            if key not in trees:
                trees[key] = _tree_and_probs(build, behind, tokens, length, ctx.seed, sample % 3)
            acceptance = accept(*trees[key], generator)
            drafted += len(acceptance.drafted)
            tokens = (*tokens, *acceptance.tokens)
        counts[tokens[:length]] += 1
    sigmas, walks = _accepted_in_sigmas(accept, build, behind, length, ctx, samples)
    ctx.progress(samples, samples, "done")
    statistic, freedom = _chi_square(counts, joint, samples)
    p_value = float(
        torch.special.gammaincc(
            torch.tensor(freedom / 2, dtype=torch.float64),
            torch.tensor(statistic / 2, dtype=torch.float64),
        )
    )
    figures = [
        Figure("p-value", p_value, Unit.PROBABILITY),
        Figure("samples", samples, Unit.COUNT),
        Figure("accepted draft tokens", drafted, Unit.TOKENS),
        Figure("degrees of freedom", freedom, Unit.COUNT),
        Figure("accepted tokens off their expectation, in sigmas", sigmas, Unit.RATIO),
        Figure("walks counted", walks, Unit.COUNT),
    ]
    if p_value < _LEAST_P_VALUE:
        worst = max(joint, key=lambda cell: abs(counts[cell] - samples * joint[cell]))
        raise GateFailure(
            FailureKind.NUMERICAL,
            f"chi-square {statistic:.1f} at {freedom} degrees of freedom, p-value {p_value:.3g}; "
            f"furthest off: tokens {worst} came {counts[worst]} times of {samples}, expected are "
            f"{samples * joint[worst]:.1f}",
            figures,
        )
    if not abs(sigmas) <= _MOST_SIGMAS:
        raise GateFailure(
            FailureKind.NUMERICAL,
            f"the number of accepted draft tokens is {sigmas:+.1f} sigmas off its expectation over "
            f"{walks} walks, allowed are {_MOST_SIGMAS}",
            figures,
        )
    return figures


@single_threaded
def compaction_moves_rows(
    apply: Callable[[torch.Tensor, Compaction], None],
    ctx: Context,
    *,
    plan: Callable[..., Compaction] = compaction_plan,
    slots: Callable[[int, torch.Generator | None], SlotAllocator] = SlotAllocator,
    draws: int = 200,
) -> list[Figure]:
    """The accepted path's rows end at the window's front, in order; no other row changes.

    Random trees and walks in random slots. The plan must also be right when it is followed one
    move after the other, and `apply` whatever the order in which it writes.

    And the slots that windows are made of are handed out as said: free ones, in the lowest run
    that is long enough or scattered, and free again when their last holder gives them back.
    """
    moves = 0
    for draw in range(draws):
        ctx.progress(draw, draws, "accepted paths")
        generator = torch.Generator().manual_seed(ctx.seed * 1000 + draw)
        nodes = 1 + int(torch.randint(65, (1,), generator=generator))
        parents = torch.tensor(random_parents(nodes, Shape.MIXED, generator, branching=0.3))
        path = _walked_path(parents, generator)
        window = torch.randperm(3 * nodes, generator=generator)[:nodes].tolist()
        made = plan(path, window)
        before = torch.randn(3 * nodes, 4, generator=generator, dtype=torch.float64)
        wanted = before.clone()
        for place, node in enumerate(path):
            wanted[window[place]] = before[window[node]]
        # Slots that are given back may hold anything.
        free = torch.ones(len(before), dtype=torch.bool)
        free[window[len(path) :]] = False
        in_turn, at_once = before.clone(), before.clone()
        for source, destination in zip(made.source, made.destination, strict=True):
            in_turn[destination] = in_turn[source]
        apply(at_once, made)
        for pool, how in ((in_turn, "one move after the other"), (at_once, "applied at once")):
            wrong = ((pool != wanted).any(1) & free).nonzero()
            if len(wrong):
                raise GateFailure(
                    FailureKind.NUMERICAL,
                    f"{how}: slot {int(wrong[0])} holds the wrong row (path {path}, window "
                    f"{window})",
                )
        if list(made.kept) != window[: len(path)] or list(made.freed) != window[len(path) :]:
            raise GateFailure(
                FailureKind.NUMERICAL, f"kept and freed are wrong (path {path}, window {window})"
            )
        moves += len(made.source)
    ctx.progress(draws, draws, "done")
    return [
        Figure("moves", moves, Unit.COUNT),
        Figure("accepted paths", draws, Unit.COUNT),
        Figure("slots handed out", _slots_are_handed_out(slots, ctx, draws), Unit.COUNT),
    ]


def _slots_are_handed_out(
    make: Callable[[int, torch.Generator | None], SlotAllocator], ctx: Context, draws: int
) -> int:
    """Random takes, shares and gives against holders counted here; how many slots there were."""
    handed = 0
    for draw in range(draws):
        generator = torch.Generator().manual_seed(ctx.seed * 1000 + draw)
        scattered, size = draw % 2 == 1, 6 + draw % 9
        allocator = make(size, torch.Generator().manual_seed(draw) if scattered else None)
        holders = [0] * size
        for _ in range(20):
            free = [slot for slot in range(size) if not holders[slot]]
            if allocator.free_slots != len(free):
                _fail(f"{allocator.free_slots} slots are said to be free, they are {free}")
            count = 1 + int(torch.randint(4, (1,), generator=generator))
            if count <= len(free):
                taken = allocator.take(count)
                runs = [list(range(at, at + count)) for at in range(size - count + 1)]
                runs = [run for run in runs if not any(holders[slot] for slot in run)]
                if scattered and (len(set(taken)) != count or not set(taken) <= set(free)):
                    _fail(f"of the free slots {free}, {taken} are handed out for {count}")
                if not scattered and taken != (runs[0] if runs else free[:count]):
                    _fail(f"of the free slots {free}, {taken} are handed out for a run of {count}")
                for slot in taken:
                    holders[slot] = 1
                handed += count
            held = [slot for slot in range(size) if holders[slot]]
            for slot in held:
                turn = float(torch.rand(1, generator=generator))
                if turn < 0.1:
                    allocator.share([slot])
                    holders[slot] += 1
                elif turn < 0.4:
                    allocator.give([slot])
                    holders[slot] -= 1
    return handed


def _fail(problem: str) -> NoReturn:
    raise GateFailure(FailureKind.NUMERICAL, problem)


_Distributions = dict[tuple[int, ...], torch.Tensor]


def _all_continuations(model: TinyMLA, prompt: list[int], length: int) -> _Distributions:
    """The target's distribution behind `prompt` and every continuation shorter than 2 * length."""
    found: _Distributions = {}
    for size in range(2 * length):
        tails = list(itertools.product(range(model.config.vocabulary), repeat=size))
        tokens = torch.tensor([[*prompt, *tail] for tail in tails])
        logits = model.forward_plain(tokens)[:, -1]
        # Scaled alike, so that no seed gives distributions that are nearly flat or nearly sure:
        # the test would not notice a distortion of those.
        probs = ((logits - logits.mean(1, True)) / logits.std(1, keepdim=True)).softmax(-1)
        found.update(zip(tails, probs, strict=True))
    return found


def _tree_and_probs(
    build: TreeBuilder,
    behind: _Distributions,
    tokens: tuple[int, ...],
    length: int,
    seed: int,
    kind: int,
) -> tuple[DraftTree, torch.Tensor]:
    """A draft tree behind `tokens`, of budget 2, 6 or 11, and the target's probabilities there."""
    generator = torch.Generator().manual_seed(seed * 1000 + 10 * len(tokens) + kind)
    vocabulary = len(behind[()])
    logits = torch.randn(length, vocabulary, generator=generator, dtype=torch.float64)
    tree = build(logits.log_softmax(-1), (2, 6, 11)[kind], None, root_token=0)
    return tree, _probs(tree, behind, tokens)


def _probs(tree: DraftTree, behind: _Distributions, tokens: tuple[int, ...]) -> torch.Tensor:
    """The target's probabilities behind each node of a tree behind `tokens`."""
    carried = tree.tokens.tolist()
    paths = [
        (*tokens, *(carried[step] for step in tree.path(node)[1:])) for node in range(len(tree))
    ]
    return torch.stack([behind[path] for path in paths])


def _accepted_in_sigmas(
    accept: AcceptSampled,
    build: TreeBuilder,
    behind: _Distributions,
    length: int,
    ctx: Context,
    samples: int,
) -> tuple[float, int]:
    """How far the number of accepted draft tokens is off its expectation, and the walks made.

    A walk tells most where every node's children carry about half of the target's probability.
    So behind each of some texts the best of drawn binary trees is walked.
    """
    generator = torch.Generator().manual_seed(ctx.seed + 1)
    texts: list[tuple[int, ...]] = [(), (0,), (1,), (2,)]
    each = _WALKS_A_SAMPLE * samples // len(texts)
    off = variance = 0.0
    for number, text in enumerate(texts):
        ctx.progress(samples, samples, f"accepted tokens, text {number + 1} of {len(texts)}")
        drawn = []
        for _ in range(16):
            logits = torch.randn(length, len(behind[()]), generator=generator, dtype=torch.float64)
            tree = build(logits.log_softmax(-1), 2 ** (length + 1) - 2, 2, root_token=0)
            drawn.append((tree, _probs(tree, behind, text)))
        tree, probs = max(drawn, key=lambda one: _telling(*one))
        mean, spread = _accepted_moments(tree, probs)
        made = sum(len(accept(tree, probs, generator).drafted) for _ in range(each))
        off, variance = off + made - each * mean, variance + each * spread
    return off / variance**0.5, each * len(texts)


def _reach(tree: DraftTree, probs: torch.Tensor) -> list[float]:
    """How probable it is that a right walk comes to each node."""
    reach = [1.0]
    tokens = tree.tokens.tolist()
    for node, parent in enumerate(tree.parents.tolist()[1:], start=1):
        reach.append(reach[parent] * float(probs[parent, tokens[node]]))
    return reach


def _accepted_moments(tree: DraftTree, probs: torch.Tensor) -> tuple[float, float]:
    """Mean and variance of the number of tokens that a walk accepts."""
    reach, depths = _reach(tree, probs), tree.depths.tolist()
    mean = sum(reach[1:])
    # A walk that ends at depth d has come through d nodes: d^2 is the sum of 2 * depth - 1 of them.
    square = sum(
        (2 * depth - 1) * share for depth, share in zip(depths[1:], reach[1:], strict=True)
    )
    return mean, square - mean**2


def _telling(tree: DraftTree, probs: torch.Tensor) -> float:
    """The sum over nodes of P(reached) * P(walk goes on) * P(walk stops)."""
    reach = _reach(tree, probs)
    on = [0.0] * len(reach)
    for node, parent in enumerate(tree.parents.tolist()[1:], start=1):
        on[parent] += reach[node]
    return sum(further * (1 - further / here) for further, here in zip(on, reach, strict=True))


def _chi_square(
    counts: Counter[tuple[int, ...]], joint: dict[tuple[int, ...], float], samples: int
) -> tuple[float, int]:
    statistic, cells = 0.0, 0
    rare_count, rare_expected = 0, 0.0
    for cell, probability in joint.items():
        expected = samples * probability
        if expected < _LEAST_EXPECTED:
            rare_count, rare_expected = rare_count + counts[cell], rare_expected + expected
        else:
            statistic += (counts[cell] - expected) ** 2 / expected
            cells += 1
    if rare_expected:
        statistic += (rare_count - rare_expected) ** 2 / rare_expected
        cells += 1
    return statistic, cells - 1


def _walked_path(parents: torch.Tensor, generator: torch.Generator) -> list[int]:
    """An accepted path: a greedy walk towards a random node."""
    nodes = len(parents)
    tree = DraftTree(torch.arange(nodes), parents, parents, parents.to(torch.float64))
    goal = tree.path(int(torch.randint(nodes, (1,), generator=generator)))
    choices = torch.full((nodes,), -1)
    for node, child in itertools.pairwise(goal):
        choices[node] = child
    return list(accept_greedy(tree, choices).nodes)
