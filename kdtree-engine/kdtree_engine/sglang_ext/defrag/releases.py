"""What differs for the allocators between the SGLang releases that are supported.

difference                        0.5.17                      0.5.23
an open group of frees            not is_not_in_free_group    free_group is a list
what evicts for an allocation     evict_from_tree_cache       the allocator itself
a cache that shares prefixes      not is_chunk_cache()        supports_prefix_sharing()
"""

from __future__ import annotations

from typing import Any

__all__ = ["evict", "free_group"]


def free_group(allocator: Any) -> list[Any] | None:
    """The frees that wait for the end of their group; None where no group is open."""
    if getattr(allocator, "is_not_in_free_group", False):
        return None
    group: list[Any] | None = allocator.free_group
    return group


def evict(tree_cache: Any, count: int) -> None:
    """Evict `count` slots from the cache, or as many as it has that nobody uses."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    if tree_cache is None:
        return
    if hasattr(tree_cache, "supports_prefix_sharing"):
        if tree_cache.supports_prefix_sharing():
            tree_cache.evict_for_alloc(EvictParams(num_tokens=count))
    elif not tree_cache.is_chunk_cache():
        tree_cache.evict(EvictParams(num_tokens=count))
