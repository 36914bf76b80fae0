"""SGLang's page-1 allocator with the policies that keep a churned pool in runs.

    SortingAllocator   sorts the free list when idle, and once enough was freed since it was sorted
    RunAllocator       best-fit runs for each request, and chunks reserved for its decode steps

Both decide by what they were called with and in which order, never by a clock, free memory or load,
so that every rank of a service arrives at the same slot numbers by itself.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

from kdtree_engine.fragmentation.free_runs import FreeRuns, Run
from kdtree_engine.fragmentation.growth import Growing, Growth
from kdtree_engine.sglang_ext.defrag.host_copy import HostCopy
from kdtree_engine.sglang_ext.defrag.releases import (
    evict,
    free_group,
    speculative_modules,
)

__all__ = ["RunAllocator", "SortingAllocator", "plan_batches", "runs_of"]


class SortingAllocator(TokenToKVPoolAllocator):  # type: ignore[misc]
    """Keeps freed slots apart, as need_sort does, and does not wait for a shortage to merge them.

    bound: the part of the pool that may have been freed since the free list was last sorted. Sizes
    of tensors are known without asking the device, so that nothing waits; the sort itself runs
    there.
    """

    def __init__(self, size: int, *, bound: float = 0.01, **given: Any) -> None:
        self.bound = max(1, round(size * bound))
        super().__init__(size, need_sort=True, **given)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        if len(self.release_pages) > self.bound:
            self.merge_and_sort_free()
        slots: torch.Tensor | None = super().alloc(need_size)
        return slots

    def idle(self) -> None:
        """No request runs: the time to sort."""
        self.merge_and_sort_free()


class RunAllocator(TokenToKVPoolAllocator):  # type: ignore[misc]
    """Knows the free runs on the host, and what a batch's slots are for.

    chunk: slots reserved for a request at a time; 0 for none. A batch that was not announced by
    `planned` gets runs for the whole.

    Freed slots arrive as tensors. They are copied to the host without waiting, and are merged into
    the runs by what is freed two allocations later, when a step has ended and the copy with it (a
    step may allocate twice, for a prefill and for decode); they count as free all the while. Only
    an allocation that they are needed for at once waits. So that this is rare, eviction keeps
    `margin` slots free beyond what is asked: the prefill of a full pool gets what was evicted
    before, not what is evicted for it. waits: how often an allocation needed what was freed after
    the one before it, or anything had to wait for a copy.
    """

    def __init__(
        self, size: int, *, chunk: int = 64, margin: int | None = None, **given: Any
    ) -> None:
        self.chunk = chunk
        self._margin = margin
        self.waits = 0
        self.relocating: Any = None  # Tier 1's, of the scheduler that this allocator is of
        self.growth = Growth(FreeRuns(1, 0), chunk)
        self._plan: Sequence[Growing] = ()
        self._arriving: list[_Arriving] = []
        self._old = self._older = (
            0  # of `_arriving`, those there at the last allocation, and before
        )
        super().__init__(size, need_sort=False, **given)

    def clear(self) -> None:
        """All slots but 0 are free; slot 0 takes the writes of padded tokens."""
        super().clear()
        self.free_pages = None  # nothing may read the list that is not kept
        self.growth = Growth(FreeRuns(1, self.size), self.chunk)
        self._arriving, self._old, self._older = [], 0, 0

    @property
    def margin(self) -> int:
        """Slots that eviction keeps free; SGLang may resize a pool."""
        return min(8192, self.size // 64) if self._margin is None else self._margin

    @contextlib.contextmanager
    def planned(self, plan: Sequence[Growing]) -> Iterator[None]:
        """What the next allocation is for, in the order in which its slots are dealt out."""
        self.growth.step()
        self._plan = plan
        try:
            yield
        finally:
            self._plan = ()

    def available_size(self) -> int:
        return self.growth.free + sum(one.count for one in self._arriving)

    def unreserved_size(self) -> int:
        """Without what is reserved."""
        return self.available_size() - self.growth.reserved

    def evict_to_free_tokens(self, tree_cache: Any, num_tokens: int) -> bool | None:
        """SGLang's, which evicts for what is short, but also for the margin and before reserves go.

        Else every prefill of a full pool would break all reserves. The cache loses at most the
        margin and a chunk a request by it; where nothing is left to evict, these are allocated.
        """
        short = num_tokens + self.margin - self.unreserved_size()
        if short > 0:
            evict(tree_cache, short)
        return None

    def alloc(self, need_size: int) -> torch.Tensor | None:
        if need_size > self.growth.runs.free:
            self._arrive(self._old)
        if need_size > self.growth.free and self._arriving:
            self._arrive(len(self._arriving), fresh=True)
        self._older, self._old = self._old, len(self._arriving)
        if need_size > self.growth.free:
            return None
        plan = self._plan
        if sum(count for _, _, count in plan) != need_size:
            return self._tensor(self.growth.take(need_size), need_size)
        return self._tensor(self.growth.extend_all(plan), need_size)

    def free(self, free_index: torch.Tensor) -> None:
        if free_index.numel() == 0:
            return
        if (group := free_group(self)) is not None:
            group.append(free_index.clone())  # a view of a row, which its next owner writes
            return
        self._arrive(self._older)
        self._arriving.append(_Arriving(free_index))

    def idle(self) -> None:
        """No request runs: nothing is reserved any more."""
        self._arrive(len(self._arriving))
        self.growth.forget()

    def settle(self) -> None:
        """What was freed is in the runs from now on; reserves stay. Waits for the device."""
        self._arrive(len(self._arriving))

    def get_all_free_pages(self) -> torch.Tensor:
        """Every free slot, for a census. Changes nothing, and waits for the device.

        SGLang's census of pages does not come here: it passes by an allocator without `free_pages`.
        """
        runs = [*self.growth.runs.runs(), *self.growth.reserves()]
        for one in self._arriving:
            runs += one.runs()
        return self._tensor(runs, self.available_size())

    def _arrive(self, count: int, *, fresh: bool = False) -> None:
        arrived = self._arriving[:count]
        # Before the first of them: one that was free already must not come again with the next.
        del self._arriving[:count]
        self._old, self._older = max(0, self._old - count), max(0, self._older - count)
        self.waits += fresh or not all(one.is_there() for one in arrived)
        for one in arrived:
            for run in one.runs():
                self.growth.runs.give(*run)

    def _tensor(self, runs: Sequence[Run], count: int) -> torch.Tensor:
        """int64 [count] on the device, whose copy there is not waited for. count: their slots."""
        if len(runs) < 5:
            parts = [
                torch.arange(start, start + length, dtype=torch.int64, device=self.device)
                for start, length in runs or [(0, 0)]
            ]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        if len(runs) == count:
            host = torch.tensor([start for start, _ in runs], dtype=torch.int64)
        else:
            starts, lengths = numpy.array(runs, dtype=numpy.int64).T
            before = lengths.cumsum() - lengths
            slots = numpy.arange(count) + numpy.repeat(starts - before, lengths)
            host = torch.from_numpy(slots)
        if torch.device(self.device).type == "cpu":
            return host
        return host.pin_memory().to(self.device, non_blocking=True)


class _Arriving:
    """Freed slots on their way to the host."""

    def __init__(self, slots: torch.Tensor) -> None:
        self.count = slots.numel()
        self._copy = HostCopy(slots)

    def is_there(self) -> bool:
        """Whether `runs` would not wait."""
        return self._copy.is_over()

    def runs(self) -> list[Run]:
        """In the order of the slots, unsorted: where two touch, they merge as they are freed.

        Waits for the copy, if it is not over.
        """
        return runs_of(self._copy.tensor())


def runs_of(slots: torch.Tensor) -> list[Run]:
    """The runs of int64 [n] on the host, n >= 1, in the order of its slots."""
    held = slots.numpy()
    breaks = numpy.flatnonzero(numpy.diff(held) != 1) + 1
    first = numpy.concatenate(([0], breaks))
    lengths = numpy.diff(numpy.append(first, len(held)))
    return list(zip(held[first].tolist(), lengths.tolist(), strict=True))


def plan_batches() -> None:
    """Let SGLang's batches tell a RunAllocator what their slots are for; more calls do nothing."""
    from sglang.srt.managers import schedule_batch
    from sglang.srt.mem_cache import allocation

    if hasattr(schedule_batch.alloc_for_extend, "_kdtree_announced"):
        return

    def extend(batch: Any) -> list[Growing]:
        names = (req.rid for req in batch.reqs)
        return list(zip(names, batch.prefix_lens, batch.extend_lens, strict=True))

    def decode(batch: Any, token_per_req: int) -> list[Growing]:
        return [(req.rid, req.kv.kv_allocated_len, token_per_req) for req in batch.reqs]

    def verify(
        _: Any, __: Any, *, reqs: Any, cur_kv_lens_cpu: Any, nxt_kv_lens_cpu: Any, **___: Any
    ) -> list[Growing]:
        held, wanted = cur_kv_lens_cpu.tolist(), nxt_kv_lens_cpu.tolist()
        return [
            (req.rid, has, then - has) for req, has, then in zip(reqs, held, wanted, strict=True)
        ]

    stock = schedule_batch.alloc_for_extend, schedule_batch.alloc_for_decode
    schedule_batch.alloc_for_extend = _announced(stock[0], extend)
    schedule_batch.alloc_for_decode = _announced(stock[1], decode)
    for module in speculative_modules():
        stock_of = module.alloc_for_spec_decode
        module.alloc_for_spec_decode = _announced(stock_of, verify)
    if hasattr(TokenToKVPoolAllocator, "evict_to_free_tokens"):
        return
    for module in (schedule_batch, allocation):
        module.evict_from_tree_cache = _sparing(module.evict_from_tree_cache)


def _sparing(stock: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    """SGLang's eviction of 0.5.17, which asks the cache and not the allocator."""

    @functools.wraps(stock)
    def evict_from_tree_cache(tree_cache: Any, num_tokens: int) -> Any:
        allocator = getattr(tree_cache, "token_to_kv_pool_allocator", None)
        if isinstance(allocator, RunAllocator):
            return allocator.evict_to_free_tokens(tree_cache, num_tokens)
        return stock(tree_cache, num_tokens)

    return evict_from_tree_cache


def _announced(stock: Callable[..., Any], plan: Callable[..., list[Growing]]) -> Callable[..., Any]:
    """`stock`, of a batch or of a prefix cache, which both know the allocator."""

    @functools.wraps(stock)
    def announced(holder: Any, *given: Any, **named: Any) -> Any:
        allocator = holder.token_to_kv_pool_allocator
        if not isinstance(allocator, RunAllocator):
            return stock(holder, *given, **named)
        with allocator.planned(plan(holder, *given, **named)):
            return stock(holder, *given, **named)

    announced._kdtree_announced = True  # type: ignore[attr-defined]
    return announced
