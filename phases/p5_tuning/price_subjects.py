"""What is timed over scattered and over contiguous slots, and what its output must be.

Every slot of a pool that is not named holds NaN, so a row that is read in place of another shows.
What a call must give is known from its rows as they were drawn, in prefix order, and so does not
depend on how their slots lie.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch

from kdtree_engine.fragmentation.layouts import lay_out
from kdtree_engine.fragmentation.measure import ROW_BYTES
from kdtree_engine.ops import AcceptedPaths, compact_kv
from kdtree_engine.reference.tiny_mla import Attention
from kdtree_engine.timing import Tensors
from phases.p5_tuning.price_figures import Slots, verify
from phases.regimes import Regime, draw, problem_with

__all__ = ["Compaction", "Gather", "Place", "Subject", "Verify"]

_WIDTH = ROW_BYTES // 2
_PATH = 8
"""Accepted nodes of the tree whose rows are moved, beside its root."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the tokens of a request lie in a pool of so many slots. slots: None for contiguous."""

    pool: int
    slots: Slots | None = None

    def lay_out(self, tokens: int, seed: int, device: torch.device) -> torch.Tensor:
        """Their slots in prefix order, int64 [tokens]; drawn anew for each seed."""
        if self.slots is None:
            return lay_out(tokens, tokens, self.pool, seed=seed, device=device)
        length, within = self.slots.run_length, self.slots.within
        window = None if within == self.pool else within
        return lay_out(tokens, length, self.pool, seed=seed, window=window, device=device)


class Subject(Protocol):
    """An operation over the rows of one request.

    name: as its figures call it. tokens: of the prefix, or those that it is about.
    floor_bytes: what it cannot do without moving.
    """

    @property
    def name(self) -> str: ...
    @property
    def tokens(self) -> int: ...
    @property
    def floor_bytes(self) -> int: ...

    def inputs(self, seed: int, place: Place) -> Tensors:
        """Of one call; the rows are the same for the same seed, wherever they lie."""
        ...

    def run(self, *inputs: torch.Tensor) -> torch.Tensor | Tensors: ...

    def problem(self, inputs: Tensors, outputs: Tensors) -> str | None:
        """What is wrong with the outputs, by the rows in prefix order; None where nothing is."""
        ...

    def try_contiguous(self, inputs: Tensors, outputs: Tensors) -> tuple[str | None, bool]:
        """What is wrong with the same call over the same rows, contiguous; whether bits are equal.

        outputs: of the call as it is, over slots.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Verify:
    """The verify pass of one layer. Its nodes' own rows are laid out with the prefix."""

    regime: Regime
    candidate: Attention
    device: torch.device

    @property
    def name(self) -> str:
        return verify(self.regime.nodes)

    @property
    def tokens(self) -> int:
        return self.regime.prefix

    @property
    def floor_bytes(self) -> int:
        return self.regime.floor_bytes

    def inputs(self, seed: int, place: Place) -> Tensors:
        """The operation's eight tensors, then contiguous rows, and the slots in them."""
        q, rows, qo_indptr, kv_indptr, prefix, nodes, mask, starts = draw(
            self.regime, seed, device=self.device, scattered=False
        )
        used = self.regime.kv_tokens
        slots = place.lay_out(used, seed, self.device)
        pool = _poisoned(place.pool, rows)
        pool[slots] = rows[:used]
        first, own = slots[: self.tokens], slots[self.tokens :]
        return q, pool, qo_indptr, kv_indptr, first, own, mask, starts, rows, prefix, nodes

    def run(self, *inputs: torch.Tensor) -> torch.Tensor:
        # The layout is named and max_nodes too, as a backend knows them: nothing is read back.
        answer = self.candidate(
            *inputs[:8], sm_scale=self.regime.sm_scale, max_nodes=self.regime.nodes
        )
        assert isinstance(answer, torch.Tensor)
        return answer

    def problem(self, inputs: Tensors, outputs: Tensors) -> str | None:
        return problem_with(_contiguous(inputs), outputs[0], self.regime.sm_scale)

    def try_contiguous(self, inputs: Tensors, outputs: Tensors) -> tuple[str | None, bool]:
        beside = self.run(*_contiguous(inputs))
        problem = problem_with(_contiguous(inputs), beside, self.regime.sm_scale)
        return problem, torch.equal(beside, outputs[0])


def _contiguous(inputs: Tensors) -> Tensors:
    q, _, qo_indptr, kv_indptr, _, _, mask, starts, rows, prefix, nodes = inputs
    return q, rows, qo_indptr, kv_indptr, prefix, nodes, mask, starts


@dataclasses.dataclass(frozen=True)
class Gather:
    """The same rows read and written elsewhere in prefix order, by torch, and nothing else."""

    tokens: int
    device: torch.device
    name: str = "gather"

    @property
    def floor_bytes(self) -> int:
        """Each row read once: what is written may stay in the cache."""
        return ROW_BYTES * self.tokens

    def inputs(self, seed: int, place: Place) -> Tensors:
        generator = torch.Generator(device=self.device).manual_seed(seed)
        rows = torch.randn(
            self.tokens, _WIDTH, generator=generator, device=self.device, dtype=torch.bfloat16
        )
        slots = place.lay_out(self.tokens, seed, self.device)
        pool = _poisoned(place.pool, rows)
        pool[slots] = rows
        return pool, slots, rows

    def run(self, *inputs: torch.Tensor) -> torch.Tensor:
        pool, slots, _ = inputs
        return pool.index_select(0, slots)

    def problem(self, inputs: Tensors, outputs: Tensors) -> str | None:
        return None if torch.equal(outputs[0], inputs[2]) else "rows are not those of the slots"

    def try_contiguous(self, inputs: Tensors, outputs: Tensors) -> tuple[str | None, bool]:
        return None, torch.equal(outputs[0], inputs[2])


@dataclasses.dataclass(frozen=True)
class Compaction:
    """The rows of a tree's accepted path, moved to the front of its slots, in all layers at once.

    Its tokens are the tree's nodes. Every layer has a pool of its own, and the same slots.
    """

    layers: int
    tokens: int
    device: torch.device

    @property
    def name(self) -> str:
        return f"compaction of {self.layers} layers"

    @property
    def floor_bytes(self) -> int:
        """Each moved row read once and written once."""
        return 2 * ROW_BYTES * self.layers * _PATH

    def inputs(self, seed: int, place: Place) -> Tensors:
        generator = torch.Generator(device=self.device).manual_seed(seed)
        shape = (self.layers, self.tokens, _WIDTH)
        rows = torch.randn(shape, generator=generator, device=self.device, dtype=torch.bfloat16)
        # From node 2 on: every accepted row moves.
        order = torch.randperm(self.tokens - 2, generator=generator, device=self.device)
        accepted = (order[:_PATH] + 2).sort().values
        path = torch.cat([accepted.new_zeros(1), accepted])[None]
        window = place.lay_out(self.tokens, seed, self.device)
        pools = torch.full(
            (self.layers, place.pool, _WIDTH), torch.nan, device=self.device, dtype=rows.dtype
        )
        pools[:, window] = rows
        return pools, path, path.new_full((1,), _PATH + 1), window[None], rows

    def run(self, *inputs: torch.Tensor) -> torch.Tensor:
        pools, path, counts, window, _ = inputs
        compact_kv(pools, AcceptedPaths(nodes=path, counts=counts, bonus=counts), window)
        return pools

    def problem(self, inputs: Tensors, outputs: Tensors) -> str | None:
        pools, path, _, window, rows = inputs
        expected = pools.clone()
        expected[:, window[0, : _PATH + 1]] = rows[:, path[0]]
        # As bits, since NaN is no equal of itself.
        same = torch.equal(outputs[0].view(torch.int16), expected.view(torch.int16))
        return None if same else "pools are not those with the accepted rows in front"

    def try_contiguous(self, inputs: Tensors, outputs: Tensors) -> tuple[str | None, bool]:
        _, path, counts, window, rows = inputs
        inside = torch.arange(self.tokens, device=self.device)[None]
        beside = self.run(rows.clone(), path, counts, inside, rows)
        return None, torch.equal(beside, outputs[0][:, window[0]])


def _poisoned(slots: int, like: torch.Tensor) -> torch.Tensor:
    return torch.full((slots, _WIDTH), torch.nan, device=like.device, dtype=like.dtype)
