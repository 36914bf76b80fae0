"""How many nodes of a draft tree to verify: as many as pay for the time that they take.

A tree of best-first order has every smaller tree of its kind as its first nodes, so one tree is
built and its first `width` nodes are verified. What they gain is known before: a path is accepted
with about the drafter's own probability of it, so the expected tokens of a round are 1 and the
probabilities of all paths (arXiv 2604.12989 selects nodes by this sum). What they cost is measured:
the time of whole rounds, by width and by how many requests run at once.

At one request a pass over many nodes takes little longer than one over few, and the widest tree
wins; with many requests each node costs, and the choice falls towards the chain by itself.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Sequence

import torch

__all__ = ["RoundCosts", "WidthChooser", "candidate_widths", "expected_tokens"]

_SETTLED = 3
"""Rounds of a width that are timed before its time is believed; the first may have compiled."""
_KEPT = 5
"""Times of a width, of which the middle one counts: a round that was held up says nothing."""
_WEIGHT = 0.2
"""Of new expected tokens against those before."""
_PROBE_EVERY = 256
"""Rounds of a batch size after which another width is timed again: contexts grow."""
_PROBES = 3
"""Rounds of it in a row, more than half of the times that are kept."""


def candidate_widths(block: int, nodes: int) -> tuple[int, ...]:
    """The widths to choose from, rising, the root included: `nodes`, its halves, not below `block`.

    Each width takes CUDA graphs of its own, so there are few. `block` positions of a draft, the
    root included, are as many nodes as its chain has.
    """
    widths = [nodes]
    while (widths[0] + 1) // 2 >= block:
        widths.insert(0, (widths[0] + 1) // 2)
    return tuple(widths)


def expected_tokens(log_weights: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
    """Expected tokens of a round, the mean of its requests, float64 [len(widths)].

    log_weights: float64 [B, N] of `DraftTrees`, padded with -inf. The root's 1 stands for the
    bonus, which a round gains in any case. Reads nothing back from a GPU.
    """
    gained = log_weights.exp().cumsum(-1).mean(0)
    # One by one: a list as an index would be copied to the GPU, and waited for.
    return torch.stack([gained[width - 1] for width in widths])


@dataclasses.dataclass
class RoundCosts:
    """Seconds of a round, for each width and size of batch; sizes are counted in powers of two.

    Ranks must choose alike, so what a rank measures is put aside (`measured`) until all take over
    one rank's `table`.
    """

    widths: tuple[int, ...]
    table: dict[int, list[tuple[int, float]]] = dataclasses.field(default_factory=dict)
    """For each size: rounds and seconds of each width."""
    _new: dict[int, list[list[float]]] = dataclasses.field(default_factory=dict)
    _rounds: collections.Counter[tuple[int, int]] = dataclasses.field(
        default_factory=collections.Counter
    )

    def measured(self, width: int, batch: int, seconds: float) -> None:
        """A round of `batch` requests took so long."""
        size, place = _size(batch), self.widths.index(width)
        kept = self._new.setdefault(size, [[] for _ in self.widths])[place]
        kept.append(seconds)
        del kept[:-_KEPT]
        self._rounds[size, place] += 1

    def told(self) -> dict[int, list[tuple[int, float]]]:
        """What was measured here, to be handed to all ranks."""
        return {
            size: [
                (self._rounds[size, place], statistics.median_low(kept) if kept else 0.0)
                for place, kept in enumerate(known)
            ]
            for size, known in self._new.items()
        }

    def take_over(self, table: dict[int, list[tuple[int, float]]]) -> None:
        """Go by this table from now on."""
        self.table = table

    def of(self, batch: int) -> list[tuple[int, float]]:
        """Rounds and seconds of each width, for so many requests."""
        return self.table.get(_size(batch), [(0, 0.0)] * len(self.widths))


class WidthChooser:
    """Chooses the width of each round. Calls in one order on all ranks give one choice on all."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        self.widths = widths
        self.costs = RoundCosts(widths)
        self.chosen = dict.fromkeys(widths, 0)
        """How often each width was taken."""
        self._gains: list[float] | None = None
        self._rounds: dict[int, int] = {}

    def gained(self, expected: Sequence[float]) -> None:
        """The expected tokens of a recent round, one value a width."""
        if self._gains is None:
            self._gains = [float(value) for value in expected]
            return
        self._gains = [
            old + _WEIGHT * (float(new) - old)
            for old, new in zip(self._gains, expected, strict=True)
        ]

    def choose(self, batch: int) -> int:
        """The width of the next round of so many requests.

        Widths whose time is not known are tried in turn. Then the one with the most expected
        tokens a second is taken, but for 3 rounds in 256, which time another again.
        """
        size = _size(batch)
        number = self._rounds[size] = self._rounds.get(size, -1) + 1
        known = self.costs.of(batch)
        untried = [place for place, (rounds, _) in enumerate(known) if rounds < _SETTLED]
        if untried:
            place = untried[number % len(untried)]
        elif number % _PROBE_EVERY >= _PROBE_EVERY - _PROBES:
            place = number // _PROBE_EVERY % len(self.widths)
        else:
            place = self._best(known)
        width = self.widths[place]
        self.chosen[width] += 1
        return width

    def _best(self, known: Sequence[tuple[int, float]]) -> int:
        if self._gains is None:
            return len(self.widths) - 1
        rates = [gain / cost for gain, (_, cost) in zip(self._gains, known, strict=True)]
        return rates.index(max(rates))


def _size(batch: int) -> int:
    """The power of two that a batch is counted under: 1, 2, 4 (of 3 and 4), 8 (of 5 to 8), ..."""
    return 1 << (batch - 1).bit_length()
