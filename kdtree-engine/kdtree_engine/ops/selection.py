"""Best-first selection on the CPU, as the union of per-depth beams, and what follows from parents.

Vectorised over requests and nodes; the loops are over depths. Plan 20, "Selection", says why the
beams hold every node of the oracle's tree, in its order.
"""

from __future__ import annotations

import dataclasses

import torch

__all__ = ["Selection", "first_children", "select_nodes", "visible_nodes"]

_DIGIT_BITS = 7
_DIGITS_A_WORD = 8


@dataclasses.dataclass(frozen=True)
class Selection:
    """The chosen nodes of B trees, the root first, best first behind it; N = budget + 1.

    parents, depths, ranks: int64 [B, N]; parent -1 at the root and behind the last node, where
        depth and rank are 0 too. log_weights: float64 [B, N], -inf behind the last node.
    counts: int64 [B].
    """

    parents: torch.Tensor
    depths: torch.Tensor
    ranks: torch.Tensor
    log_weights: torch.Tensor
    counts: torch.Tensor


@dataclasses.dataclass
class _Beam:
    """The best nodes of one depth, in the order of their rank tuples; each tensor [B, W].

    words: the rank tuples, digits of 7 bits (rank + 1; 0 is none), first digit highest, in two
    integers. above: where the parent stands in the beam of the depth above.
    """

    weights: torch.Tensor
    valid: torch.Tensor
    words: tuple[torch.Tensor, torch.Tensor]
    above: torch.Tensor
    ranks: torch.Tensor


def select_nodes(log_probs: torch.Tensor, budget: int) -> Selection:
    """The `budget` heaviest nodes of each request, in the oracle's order.

    log_probs: float64 [B, D, R], each row falling, -inf where there is no candidate. D is at most
        16 and R at most 64.
    """
    batch, depth, _ = log_probs.shape
    none = torch.zeros(batch, 1, dtype=torch.int64)
    beam = _Beam(none.to(torch.float64), none == 0, (none, none), none, none)
    beams: list[_Beam] = []
    for level in range(depth):
        beam = _next_beam(beam, log_probs[:, level], level, budget)
        beams.append(beam)

    def joined(name: str) -> torch.Tensor:
        return torch.cat([getattr(one, name) for one in beams], dim=1)

    weights, valid, ranks = joined("weights"), joined("valid"), joined("ranks")
    order = torch.arange(weights.shape[1]).expand(batch, -1)
    # Stable sorts, the last one deciding first: valid, then weight, then the tuple's two words.
    for keys, falling in (
        (torch.cat([one.words[1] for one in beams], dim=1), False),
        (torch.cat([one.words[0] for one in beams], dim=1), False),
        (weights, True),
        (valid.to(torch.int8), True),
    ):
        again = keys.gather(1, order).sort(dim=1, descending=falling, stable=True).indices
        order = order.gather(1, again)
    numbers = torch.empty_like(order).scatter_(
        1, order, torch.arange(1, order.shape[1] + 1).expand(batch, -1)
    )

    # Each parent's node number: that of its place in the beam above, whose first place is `offset`.
    parents, depths, offset = [], [], 0
    for level, one in enumerate(beams):
        parents.append(one.above if level == 0 else numbers.gather(1, one.above + offset))
        depths.append(torch.full_like(one.ranks, level + 1))
        offset += beams[level - 1].weights.shape[1] if level else 0

    kept = order[:, :budget]
    real = valid.gather(1, kept)

    def nodes(values: torch.Tensor, root: float, missing: float) -> torch.Tensor:
        """[B, budget + 1]: the root's value, those of the chosen nodes, then `missing`."""
        chosen = values.gather(1, kept).masked_fill(~real, missing)
        full = torch.full((batch, budget + 1), missing, dtype=values.dtype)
        full[:, 0] = root
        full[:, 1 : 1 + chosen.shape[1]] = chosen
        return full

    return Selection(
        parents=nodes(torch.cat(parents, dim=1), -1, -1),
        depths=nodes(torch.cat(depths, dim=1), 0, 0),
        ranks=nodes(ranks, 0, 0),
        log_weights=nodes(weights, 0.0, -torch.inf),
        counts=real.sum(1) + 1,
    )


def visible_nodes(parents: torch.Tensor, depth: int) -> torch.Tensor:
    """Who sees whom, bool [B, N, N]: a node sees itself and its ancestors, padding itself alone.

    parents: int64 [B, N], -1 for none. depth: the most ancestors that a node has.
    """
    batch, nodes = parents.shape
    # One column more takes what would be written for a node without such an ancestor.
    seen = torch.eye(nodes, nodes + 1, dtype=torch.bool).repeat(batch, 1, 1)
    ancestor = parents
    for _ in range(depth):
        place = ancestor.masked_fill(ancestor < 0, nodes)
        seen.scatter_(2, place[..., None], True)
        above = parents.gather(1, ancestor.clamp(min=0))
        ancestor = above.masked_fill(ancestor < 0, -1)
    return seen[..., :nodes].contiguous()


def first_children(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first child and the next sibling of each node, int64 [B, N], -1 where there is none.

    parents: int64 [B, N], -1 for none. Children in the order of their numbers, as SGLang's
    `build_tree_kernel_efficient` links them.
    """
    nodes = parents.shape[1]
    number = torch.arange(nodes)
    child = parents[:, None, :] == number[:, None]  # [B, node, other]: other is node's child
    sibling = (
        (parents[:, None, :] == parents[:, :, None])
        & (parents[:, :, None] >= 0)
        & (number > number[:, None])
    )

    def first(found: torch.Tensor) -> torch.Tensor:
        return found.to(torch.uint8).argmax(-1).masked_fill(~found.any(-1), -1)

    return first(child), first(sibling)


def _next_beam(beam: _Beam, row: torch.Tensor, level: int, budget: int) -> _Beam:
    """The best `budget` children of `beam`, whose ranks have the log-probabilities `row` [B, R]."""
    ranks = row.shape[1]
    digit = torch.arange(1, ranks + 1) << (
        _DIGIT_BITS * (_DIGITS_A_WORD - 1 - level % _DIGITS_A_WORD)
    )
    zero = torch.zeros_like(digit)
    digits = (digit, zero) if level < _DIGITS_A_WORD else (zero, digit)
    # Parents in the order of their tuples and ranks rising: so are the children, flattened.
    weights = (beam.weights[:, :, None] + row[:, None, :]).flatten(1)
    valid = (beam.valid[:, :, None] & (row > -torch.inf)[:, None, :]).flatten(1)
    order = weights.sort(dim=1, descending=True, stable=True).indices
    order = order.gather(
        1, valid.gather(1, order).to(torch.int8).sort(dim=1, descending=True, stable=True).indices
    )
    kept = order[:, :budget].sort(dim=1).values
    return _Beam(
        weights=weights.gather(1, kept),
        valid=valid.gather(1, kept),
        words=tuple(  # type: ignore[arg-type]
            (word[:, :, None] + more).flatten(1).gather(1, kept)
            for word, more in zip(beam.words, digits, strict=True)
        ),
        above=kept // ranks,
        ranks=kept % ranks,
    )
