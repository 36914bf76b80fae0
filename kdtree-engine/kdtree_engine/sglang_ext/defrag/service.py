"""Tier 0 in a server: its KV pool gets a RunAllocator where SGLang would have made its own.

Tier 1 is the same with `relocating.py` on top.

`offer` is called where the plugin is loaded, before any pool exists. Whether the pool that is then
made is one for Tier 0 is seen there and said by `problem`, which the start-up check asks: a server
that was asked for Tier 0 and has not got it stops.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from kdtree_engine.sglang_ext import compat
from kdtree_engine.sglang_ext.defrag import releases

__all__ = ["offer", "problem"]

_log = logging.getLogger(__name__)


def offer(backend: str, *, relocate_every: int | None = None) -> None:
    """Have the KV pool of a server on `backend` allocated by Tier 0.

    relocate_every: Tier 1's, in batches; None without it.
    Raises MissingError where this SGLang takes no hooks.
    """
    compat.around_allocator(functools.partial(_made, backend, relocate_every))
    if relocate_every is not None:
        from kdtree_engine.sglang_ext.defrag import relocating

        relocating.read_python_nodes()


def problem(allocator: Any) -> str | None:
    """Why this pool's allocator is not Tier 0's, in words for a log; None where it is."""
    from kdtree_engine.sglang_ext.defrag.allocators import RunAllocator

    if isinstance(allocator, RunAllocator):
        return None
    return _unfit(allocator) or "SGLang made its own allocator, past the plugin's hook"


def _made(
    backend: str, relocate_every: int | None, stock: Any, configurator: Any, **given: Any
) -> Any:
    """What `_build_token_to_kv_pool_allocator` returns; a draft model is given its target's."""
    made = stock(configurator, **given)
    if given["token_to_kv_pool_allocator"] is not None:
        return made
    if backend not in releases.backends(configurator):
        _log.warning("KDTREE_DEFRAG is for servers on %s: this one keeps its allocator", backend)
        return made
    if _unfit(made) is not None:
        return made  # the start-up check stops the server and says why
    from kdtree_engine.sglang_ext.defrag import allocators

    allocators.plan_batches()
    _tidy_when_idle()
    allocator = allocators.RunAllocator(
        made.size, dtype=made.dtype, device=made.device, kvcache=made.get_kvcache()
    )
    if relocate_every is not None:
        from kdtree_engine.sglang_ext.defrag import relocating

        relocating.between_batches()
        allocator.relocating = relocating.Relocating(relocate_every)
    return allocator


def _unfit(allocator: Any) -> str | None:
    """Why a pool that SGLang has made an allocator for is none for Tier 0."""
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

    if type(allocator) is not TokenToKVPoolAllocator:
        return (
            f"the KV pool has a {type(allocator).__name__} with pages of {allocator.page_size}, "
            "expected a TokenToKVPoolAllocator with pages of 1"
        )
    if allocator.need_sort:
        return "prefill and decode are on servers of their own, expected one server for both"
    return None


def _tidy_when_idle() -> None:
    """Have the scheduler of this process call the allocator's `idle` when no request is there."""
    from sglang.srt.managers.scheduler import Scheduler

    stock = Scheduler.on_idle

    @functools.wraps(stock)
    def on_idle(scheduler: Any) -> None:
        allocator = scheduler.token_to_kv_pool_allocator
        if hasattr(allocator, "idle") and scheduler.is_fully_idle():
            allocator.idle()
        stock(scheduler)

    Scheduler.on_idle = on_idle
