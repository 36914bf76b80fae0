"""The draft tree: DDTree's best-first order under a node budget (arXiv 2604.12989).

A block-diffusion drafter gives one distribution per position, independent of the path taken. A
node at depth d is then a *rank tuple* (r_1, ..., r_d): it continues with the r_i-th most likely
token of depth i, and its weight is the product of those probabilities. The best tree of `budget`
nodes is the `budget` heaviest rank tuples: a parent is never lighter than its child, so that set
is closed under taking the parent.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Sequence

import torch

__all__ = ["DraftTree", "build_draft_tree", "positions", "validate_parents"]


@dataclasses.dataclass(frozen=True, eq=False)
class DraftTree:
    """A tree of N nodes, the root included, in an order in which parents precede children.

    Node 0 is the root: the last committed token, whose KV is not in the cache yet.

    tokens: int64 [N], the token that each node carries.
    parents: int64 [N], parents[0] is -1 and 0 <= parents[n] < n for every other n.
    depths: int64 [N], depths[0] is 0.
    log_weights: float64 [N], natural log of the draft's probability of the path; 0 at the root.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    log_weights: torch.Tensor

    def __len__(self) -> int:
        """The number of nodes, the root included."""
        return int(self.parents.numel())

    def path(self, node: int) -> list[int]:
        """The nodes from the root to `node`, both included."""
        return [*reversed(self.ancestors(node)), node]

    def ancestors(self, node: int) -> list[int]:
        """The proper ancestors of `node`, nearest first; the root comes last and has none."""
        if not 0 <= node < len(self):
            raise ValueError(f"node: {node} is not one of the tree's {len(self)} nodes")
        parents = self.parents.tolist()
        found: list[int] = []
        while parents[node] >= 0:
            node = parents[node]
            found.append(node)
        return found

    def children(self, node: int) -> list[int]:
        """The children of `node`, heaviest first."""
        return [child for child, parent in enumerate(self.parents.tolist()) if parent == node]


def build_draft_tree(
    log_probs: torch.Tensor,
    budget: int,
    top_k: int | None = None,
    *,
    token_ids: torch.Tensor | None = None,
    root_token: int = -1,
) -> DraftTree:
    """The `budget` heaviest nodes under the root, best first.

    A heap holds the frontier: pop the best node, emit it, push its next sibling (same parent,
    next rank) and its rank-0 child. Both are no better than the popped node, so nodes leave the
    heap in the order of a full sort by (-log_weight, rank tuple).

    log_probs: floating [D, K], row d for tree depth d + 1, natural logs. Columns are token
        numbers, or candidates numbered by `token_ids`. Rows need not be normalised (a top-K cut
        is not), but each entry is the log of a probability: above 0, NaN and +inf are refused.
        -inf is a token that is never chosen.
    budget: the most nodes to emit, the root not counted; fewer where the tree has fewer.
    top_k: at most so many ranks per depth.
    token_ids: integer [D, K], the token number of each column of each depth.
    root_token: the token that node 0 carries; -1 where the caller does not say.

    Order: within a depth, rank 0 is the largest log-probability, and equal ones are ranked by the
    lower column first. Weights are summed in float64 from depth 1 downwards. Nodes of equal weight
    leave in the order of their rank tuples as Python compares tuples: the first difference
    decides, and a prefix comes before its extensions.

    The tensors of the result lie on the device of `log_probs`.

    Raises ValueError, naming the argument and the place.
    """
    _check_log_probs(log_probs)
    if budget < 0:
        raise ValueError(f"budget: must be 0 or more, got {budget}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k: must be 1 or more, got {top_k}")
    max_depth, columns = log_probs.shape
    if token_ids is not None:
        _check_token_ids(token_ids, log_probs)

    # No node can have a rank beyond the budget: its better siblings would be emitted before it.
    ranks = min(columns, budget, columns if top_k is None else top_k)
    ordered, order = log_probs.to(torch.float64).sort(dim=1, descending=True, stable=True)
    chosen = order if token_ids is None else token_ids.to(torch.int64).gather(1, order)
    weights = ordered[:, :ranks].tolist()
    numbers = chosen[:, :ranks].tolist()

    nodes: list[tuple[int, int, int, float]] = [(root_token, -1, 0, 0.0)]
    # Entries: (-log weight, rank tuple, parent node, the parent's log weight). Rank tuples are
    # unique, so comparisons never reach the parent.
    frontier: list[tuple[float, tuple[int, ...], int, float]] = []

    def push(ranks_taken: tuple[int, ...], parent: int, parent_weight: float) -> None:
        depth, rank = len(ranks_taken), ranks_taken[-1]
        if depth > max_depth or rank >= ranks or weights[depth - 1][rank] == -torch.inf:
            return
        weight = parent_weight + weights[depth - 1][rank]
        heapq.heappush(frontier, (-weight, ranks_taken, parent, parent_weight))

    push((0,), 0, 0.0)
    while frontier and len(nodes) <= budget:
        negative_weight, taken, parent, parent_weight = heapq.heappop(frontier)
        node, depth, weight = len(nodes), len(taken), -negative_weight
        nodes.append((numbers[depth - 1][taken[-1]], parent, depth, weight))
        push((*taken[:-1], taken[-1] + 1), parent, parent_weight)
        push((*taken, 0), node, weight)

    tokens, parents, depths, log_weights = zip(*nodes, strict=True)
    return DraftTree(
        tokens=torch.tensor(tokens, dtype=torch.int64, device=log_probs.device),
        parents=torch.tensor(parents, dtype=torch.int64, device=log_probs.device),
        depths=torch.tensor(depths, dtype=torch.int64, device=log_probs.device),
        log_weights=torch.tensor(log_weights, dtype=torch.float64, device=log_probs.device),
    )


def positions(depths: torch.Tensor, prefix_length: int) -> torch.Tensor:
    """Rotary positions of the nodes: the root stands right behind the prefix, siblings share one.

    depths: int64 [N]. Returns int64 [N].
    """
    if prefix_length < 0:
        raise ValueError(f"prefix_length: must be 0 or more, got {prefix_length}")
    return depths + prefix_length


def validate_parents(parents: torch.Tensor | Sequence[int]) -> list[int]:
    """`parents` as a list, once it is sure that parents precede children and only node 0 is a root.

    An empty list is a tree of no nodes (a padded request). Raises ValueError, naming the node.
    """
    values = parents.tolist() if isinstance(parents, torch.Tensor) else list(parents)
    for node, parent in enumerate(values):
        if node == 0 and parent != -1:
            raise ValueError(f"parents: node 0 is the root and has parent -1, got {parent}")
        if node > 0 and not 0 <= parent < node:
            raise ValueError(
                f"parents: node {node} must have a parent in 0..{node - 1}, got {parent}"
            )
    return values


def _check_log_probs(log_probs: torch.Tensor) -> None:
    if log_probs.dim() != 2 or not log_probs.dtype.is_floating_point:
        raise ValueError(
            "log_probs: must be floating [depth, candidates], "
            f"got {log_probs.dtype} {list(log_probs.shape)}"
        )
    for wrong, what in (
        (log_probs.isnan(), "NaN"),
        (log_probs == torch.inf, "+inf"),
        (log_probs > 0, "a log-probability above 0"),
    ):
        places = wrong.nonzero()
        if len(places):
            depth, column = places[0].tolist()
            raise ValueError(
                f"log_probs[{depth}, {column}]: {what} ({float(log_probs[depth, column])})"
            )


def _check_token_ids(token_ids: torch.Tensor, log_probs: torch.Tensor) -> None:
    if token_ids.shape != log_probs.shape or token_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"token_ids: must be int32 or int64 {list(log_probs.shape)} like log_probs, "
            f"got {token_ids.dtype} {list(token_ids.shape)}"
        )
    for depth, row in enumerate(token_ids.sort(dim=1).values.tolist()):
        # Two siblings that carry one token would make the acceptance walk ambiguous.
        for left, right in itertools.pairwise(row):
            if left == right:
                raise ValueError(f"token_ids[{depth}]: token {left} stands there twice")
