"""Tier 1 in a server: now and then, between two batches, rows of running requests move.

An experiment, off by default, on top of Tier 0. The safe point is where SGLang's plain scheduler
loop plans its next batch: the results of the last one are processed, and nothing is in flight. The
loop that overlaps both has no such point, so a server with it is refused.

Which batch it is, is counted: no clock decides, so that the ranks of a server do the same.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from kdtree_engine.sglang_ext.defrag.relocation import (
    Relocation,
    Service,
    fences_before_start,
)

__all__ = ["BUDGET", "Relocating", "between_batches", "problem", "read_python_nodes"]

BUDGET = 4096
"""Rows that are moved at a time, at most: 0.3 GB read and written in 61 layers."""
_LONGEST_PAUSE = 8
"""Times `every`: the pause grows to that where there is nothing to move."""
_MOST_SAID = 20
"""Reasons that the log gets: some name a request, or count slots, and would never end."""
_CORE = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"
_log = logging.getLogger(__name__)


class Relocating:
    """What one scheduler relocates, and when.

    every: batches from one look to the next, with requests running; twice as many after each look
        that finds nothing to gain, up to 8 times, and so many again after one that moves rows.
    looks: so far. relocations, rows: those that moved something, and the rows that they moved.
    """

    def __init__(self, every: int, attempt: Callable[[Service], Relocation] = Relocation) -> None:
        self.looks = self.relocations = self.rows = 0
        self._every = self._pause = self._left = every
        self._attempt = attempt
        self._said: set[str] = set()
        self._is_off = False

    def before_batch(self, scheduler: Any) -> None:
        """Called where a batch is planned. What it raises comes of a move that is half written."""
        if self._is_off or scheduler.running_batch.is_empty():
            return
        self._left -= 1
        if self._left > 0:
            return
        self.looks += 1
        _wait_for(scheduler.req_to_token_pool.req_to_token)
        attempt = self._attempt(_service_of(scheduler))
        try:
            outcome = attempt.run(BUDGET)
        except Exception:
            if attempt.writes:
                raise  # a holder may have an old slot: better no server than another's context
            self._is_off = True
            _log.exception("kdtree_mla: tier1: off from now on; nothing was moved")
            return
        if outcome.moves:
            _wait_for(scheduler.req_to_token_pool.req_to_token)  # the forward pass has a stream
            self.relocations += 1
            self.rows += outcome.rows
            _log.info(
                "kdtree_mla: tier1: %d rows moved, %d runs fewer of %d",
                *(outcome.rows, outcome.removed, outcome.runs),
            )
        elif outcome.reason:
            self._say(outcome.reason)
        longest = _LONGEST_PAUSE * self._every
        self._pause = self._every if outcome.moves else min(2 * self._pause, longest)
        self._left = self._pause

    def _say(self, reason: str) -> None:
        if reason in self._said or len(self._said) == _MOST_SAID:
            return
        self._said.add(reason)
        ends = "; no other reason is told" if len(self._said) == _MOST_SAID else ""
        _log.warning("kdtree_mla: tier1: nothing moves: %s%s", reason, ends)


def between_batches() -> None:
    """Have the scheduler of this process call its allocator's `relocating` before each batch."""
    from sglang.srt.managers.scheduler import Scheduler

    stock = Scheduler.get_next_batch_to_run

    @functools.wraps(stock)
    def get_next_batch_to_run(scheduler: Any, *given: Any, **named: Any) -> Any:
        relocating = getattr(scheduler.token_to_kv_pool_allocator, "relocating", None)
        if relocating is not None:
            relocating.before_batch(scheduler)
        return stock(scheduler, *given, **named)

    Scheduler.get_next_batch_to_run = get_next_batch_to_run


def read_python_nodes() -> None:
    """Have SGLang keep the nodes of its prefix cache in Python, unless it is told otherwise."""
    os.environ.setdefault(_CORE, "python")


def problem() -> str | None:
    """Why this server cannot relocate, in words for a log, as far as it shows before its start."""
    reasons = list(fences_before_start())
    if not reasons:
        from sglang.srt.runtime_context import get_schedule

        if not get_schedule().disable_overlap_schedule:
            reasons.append("a batch is always in flight, expected --disable-overlap-schedule")
    if (core := os.environ.get(_CORE)) != "python":
        reasons.append(f"{_CORE} is {core or 'unset'}, expected python")
    return "; ".join(reasons) or None


def _service_of(scheduler: Any) -> Service:
    """Where this scheduler has slot numbers, with all requests that may have a row."""
    batches = (scheduler.running_batch, scheduler.last_batch)
    requests = [req for batch in batches if batch is not None for req in batch.reqs]
    requests += [scheduler.chunked_req] if scheduler.chunked_req is not None else []
    held = {id(req): req for req in requests if req.kv.holds_kv}
    allocator = scheduler.token_to_kv_pool_allocator
    return Service(
        allocator=allocator,
        table=scheduler.req_to_token_pool,
        tree=scheduler.tree_cache,
        requests=list(held.values()),
        pools=[allocator.get_kvcache()],
        in_flight=len(getattr(scheduler, "result_queue", ())),
    )


def _wait_for(tensor: torch.Tensor) -> None:
    """Until all streams of its device have ended."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
