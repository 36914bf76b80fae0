"""Random operations on a policy's allocator, beside SGLang's own and a model of the pool.

    python -m kdtree_engine.sglang_ext.defrag.trial < REQUEST.json  (the server's Python; CPU)

After every operation: each slot that was given was free, none was given twice, and as many are free
as the model says. SGLang's allocator does the same operations: none may be refused that it serves.
Every thousand operations the free slots themselves are held against the model.

The operations are those of a scheduler: prefill of a batch, decode steps of all that live, the end
of a request inside a free group, with its slots freed or handed to a cache, and eviction from it.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import time
from typing import Any

import numpy
import torch

from kdtree_engine.sglang_ext.defrag.churn import POLICIES

__all__ = ["Asked", "main", "try_allocator"]


@dataclasses.dataclass(frozen=True)
class Asked:
    """pool: slots. running: most requests at once. prompt: most tokens of one prefill.

    beside: whether SGLang's allocator does the same. Of a large pool it copies 32 MB for each free,
    which leaves nothing in a cache: times are taken without it.
    """

    policy: str
    operations: int = 100_000
    pool: int = 20_000
    running: int = 24
    prompt: int = 1500
    seed: int = 1
    beside: bool = True


class _Trial:
    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.random = random.Random(asked.seed)
        self.tried = POLICIES[asked.policy](asked.pool)
        self.stock = POLICIES["stock"](asked.pool) if asked.beside else None
        self.both = [each for each in (self.tried, self.stock) if each is not None]
        self.is_free = numpy.ones(asked.pool + 1, dtype=bool)
        self.is_free[0] = False
        self.free = asked.pool
        self.live: dict[str, list[torch.Tensor]] = {}
        self.held: dict[str, int] = {}
        self.cached: list[torch.Tensor] = []
        self.names = 0
        self.refused = self.served = 0
        self.took: dict[str, list[float]] = {"prefill": [], "decode": []}

    def operate(self) -> None:
        """One operation."""
        act = self.random.random()
        if act < 0.6 and self.live:
            self.decode()
        elif act < 0.75:
            self.prefill()
        elif act < 0.87 and self.live:
            self.end()
        elif act < 0.98 and self.cached:
            self.evict()
        elif hasattr(self.tried, "idle"):
            self.tried.idle()

    def prefill(self) -> None:
        """Of one to three requests; some go on where their last chunk ended."""
        names = []
        for _ in range(self.random.randint(1, 3)):
            if self.live and (len(self.live) >= self.asked.running or self.random.random() < 0.2):
                names.append(self.random.choice(list(self.live)))
            else:
                names.append(f"r{self.names}")
                self.names += 1
        counts = {name: self.random.randint(1, self.asked.prompt) for name in names}
        self.allocate("prefill", counts)

    def decode(self) -> None:
        """One token for each that lives; or what a verify pass wants, which may be none."""
        counts = dict.fromkeys(self.live, 1)
        if self.random.random() < 0.3:
            counts = {name: self.random.randint(0, 9) for name in self.live}
        if any(counts.values()):
            self.allocate("decode", counts)

    def allocate(self, kind: str, counts: dict[str, int]) -> None:
        """Slots for all of `counts` at once, dealt out in their order."""
        total = sum(counts.values())
        plan = [(name, self.held.get(name, 0), count) for name, count in counts.items()]
        began = time.thread_time_ns()
        if hasattr(self.tried, "planned"):
            with self.tried.planned(plan):
                given = self.tried.alloc(total)
        else:
            given = self.tried.alloc(total)
        self.took[kind].append((time.thread_time_ns() - began) / 1000)
        serves = self.free >= total if self.stock is None else self.stock.alloc(total) is not None
        _require((given is not None) == serves, f"served {given is not None}, stock {serves}")
        if given is None:
            self.refused += 1
            return
        self.served += 1
        slots = given.numpy()
        _require(len(slots) == total and given.dtype == torch.int64, "another number of slots")
        _require(bool(self.is_free[slots].all()), "a slot was given that is in use")
        self.is_free[slots] = False
        self.free -= total
        _require(len(numpy.unique(slots)) == total, "a slot was given twice")
        for (name, held, count), part in zip(plan, given.split(list(counts.values())), strict=True):
            self.live.setdefault(name, []).append(part.clone())
            self.held[name] = held + count

    def end(self) -> None:
        """Up to three requests, in one free group; a cache takes the beginning of some."""
        for each in self.both:
            each.free_group_begin()
        for name in self.random.sample(list(self.live), min(3, len(self.live))):
            slots = torch.cat(self.live.pop(name))
            del self.held[name]
            kept = self.random.choice((0, len(slots), self.random.randint(0, len(slots))))
            if kept:
                self.cached.append(slots[:kept])
            self.give(slots[kept:])
        for each in self.both:
            each.free_group_end()

    def evict(self) -> None:
        """One cached piece, or a part of one, outside of a group."""
        piece = self.cached.pop(self.random.randrange(len(self.cached)))
        at = self.random.choice((0, self.random.randint(0, len(piece))))
        if at:
            self.cached.append(piece[:at])
        self.give(piece[at:])

    def give(self, slots: torch.Tensor) -> None:
        """Free `slots` in both, and in the model.

        The tried one gets a view of a row, as a scheduler's frees are, which then has other slots.
        """
        _require(not self.is_free[slots.numpy()].any(), "the trial frees what is free")
        self.is_free[slots.numpy()] = True
        self.free += len(slots)
        row = slots.clone()
        self.tried.free(row[:])
        row.zero_()
        if self.stock is not None:
            self.stock.free(slots)

    def census(self, *, whole: bool) -> None:
        """As many free slots as the model has; with `whole`, the same ones."""
        for each in self.both:
            _require(each.available_size() == self.free, "slots are lost or doubled")
        if whole:
            every = numpy.sort(self.tried.get_all_free_pages().numpy())
            _require(numpy.array_equal(every, numpy.flatnonzero(self.is_free)), "other free slots")


def try_allocator(asked: Asked) -> dict[str, Any]:
    """Raises AssertionError at the first violation, with the seed and the operation."""
    trial = _Trial(asked)
    for number in range(asked.operations):
        try:
            trial.operate()
            trial.census(whole=number % 1000 == 999)
        except AssertionError as error:
            raise AssertionError(f"seed {asked.seed}, operation {number}: {error}") from error
    return {
        "operations": asked.operations,
        "allocations": trial.served,
        "refused": trial.refused,
        **{
            f"{kind}_us_{name}": sorted(took or [0.0])[len(took) * share // 1000]
            for kind, took in trial.took.items()
            for name, share in (("median", 500), ("p99", 990))
        },
        **{f"{kind}_us_max": max(took, default=0.0) for kind, took in trial.took.items()},
    }


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def main() -> None:
    """Reads the fields of `Asked`, writes the figures as JSON."""
    torch.set_num_threads(1)
    print(json.dumps(try_allocator(Asked(**json.load(sys.stdin)))))


if __name__ == "__main__":
    main()
