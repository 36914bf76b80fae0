"""Which drafted tokens are accepted, and where their KV rows have to move.

The walk is lossless by construction: at every node the *target's own* next token is taken, and the
draft only decides whether the walk can go on from there. Its output has the target's distribution
whatever the draft is, greedy or sampled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from kdtree_engine.reference.tree import DraftTree

__all__ = [
    "Acceptance",
    "Compaction",
    "accept_greedy",
    "accept_sampled",
    "apply_compaction",
    "compaction_plan",
]


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """What one verification commits.

    nodes: the accepted path, from the root (node 0) down; each node but the first is the child of
        the one before. Their KV rows stay in the cache.
    drafted: the tokens of the path's nodes below the root.
    bonus: the target's own token behind the path, which no child carried: the next root. Its KV
        is not in the cache yet.
    """

    nodes: tuple[int, ...]
    drafted: tuple[int, ...]
    bonus: int

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens that the request gains: at least the bonus."""
        return (*self.drafted, self.bonus)


def accept_greedy(tree: DraftTree, target_argmax: torch.Tensor) -> Acceptance:
    """Walk down from the root while a child carries the target's most likely token.

    target_argmax: int64 [N], the target's token behind each node of `tree`.
    Raises ValueError where there is not one token for each node.
    """
    if target_argmax.shape != (len(tree),):
        raise ValueError(
            f"target_argmax: must be [{len(tree)}], one token a node, "
            f"got {list(target_argmax.shape)}"
        )
    choices = target_argmax.tolist()
    return _walk(tree, lambda node: int(choices[node]))


def accept_sampled(
    tree: DraftTree, target_probs: torch.Tensor, generator: torch.Generator
) -> Acceptance:
    """Walk down from the root while a child carries the token that the target samples there.

    target_probs: floating [N, V], the target's distribution behind each node; rows need not sum
        to 1 (they are weights), but hold no NaN and nothing negative.
    generator: where the draws come from, one draw for each node that the walk visits.
    Raises ValueError for probabilities of another shape or not usable as weights.
    """
    if target_probs.dim() != 2 or target_probs.shape[0] != len(tree):
        raise ValueError(
            f"target_probs: must be [{len(tree)}, vocabulary], one row a node, "
            f"got {list(target_probs.shape)}"
        )
    usable = target_probs.isfinite().all(1) & (target_probs >= 0).all(1) & target_probs.any(1)
    if not bool(usable.all()):
        node = int((~usable).nonzero()[0])
        raise ValueError(f"target_probs: the row of node {node} is no distribution")
    return _walk(
        tree, lambda node: int(torch.multinomial(target_probs[node], 1, generator=generator))
    )


def _walk(tree: DraftTree, choose: Callable[[int], int]) -> Acceptance:
    tokens = tree.tokens.tolist()
    child_of = {
        (parent, tokens[node]): node for node, parent in enumerate(tree.parents.tolist()) if node
    }
    nodes, drafted = [0], list[int]()
    while True:
        choice = choose(nodes[-1])
        child = child_of.get((nodes[-1], choice))
        if child is None:
            return Acceptance(tuple(nodes), tuple(drafted), choice)
        nodes.append(child)
        drafted.append(choice)


@dataclasses.dataclass(frozen=True)
class Compaction:
    """Moves of KV rows after a verification, and what becomes of the window's slots.

    A request's window is the slots of its tree nodes, in node order. The accepted nodes' rows end
    in the window's first slots, in path order, so that the path follows the prefix.

    source, destination: pool slots, move by move; rows that stay where they are have no move.
        A destination is never the source of a *later* move, because node numbers rise along a
        path: one move after the other is safe. All at once is only safe if every row is read
        before any is written, as a destination may be the source of an earlier move.
    kept: the window's slots that hold the accepted path afterwards, in path order.
    freed: the window's other slots.
    """

    source: tuple[int, ...]
    destination: tuple[int, ...]
    kept: tuple[int, ...]
    freed: tuple[int, ...]


def compaction_plan(nodes: Sequence[int], window: Sequence[int]) -> Compaction:
    """How to bring the accepted nodes' rows to the front of the window.

    nodes: the accepted path, rising node numbers from 0. window: the pool slot of each tree node.
    Raises ValueError for a path that does not rise or a window that names a slot twice.
    """
    if len(set(window)) != len(window):
        raise ValueError("window: names a slot twice")
    if not nodes or nodes[0] != 0 or list(nodes) != sorted(set(nodes)):
        raise ValueError(f"nodes: must rise from 0, got {list(nodes)}")
    if nodes[-1] >= len(window):
        raise ValueError(f"nodes: {nodes[-1]} is beyond the window's {len(window)} slots")
    moves = [(window[node], window[place]) for place, node in enumerate(nodes) if node != place]
    return Compaction(
        source=tuple(source for source, _ in moves),
        destination=tuple(destination for _, destination in moves),
        kept=tuple(window[: len(nodes)]),
        freed=tuple(window[len(nodes) :]),
    )


def apply_compaction(pool: torch.Tensor, plan: Compaction) -> None:
    """Move rows of `pool` [num_slots, ...] in place; all are read before any is written."""
    if plan.source:
        source = torch.tensor(plan.source, device=pool.device)
        destination = torch.tensor(plan.destination, device=pool.device)
        pool[destination] = pool[source]
