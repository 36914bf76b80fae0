"""What differs for the allocators between the SGLang releases that are supported.

difference                        0.5.17                      0.5.23
an open group of frees            not is_not_in_free_group    free_group is a list
what evicts for an allocation     evict_from_tree_cache       the allocator itself
a cache that shares prefixes      not is_chunk_cache()        supports_prefix_sharing()
a request's row and its length    fields of the request       fields of its `kv`
backends of prefill and decode    of the server's arguments   of the process
what reserves for a verify pass   DFLASH's and EAGLE's        UNO's too
"""

from __future__ import annotations

from typing import Any

__all__ = ["backends", "evict", "free_group", "row_of", "speculative_modules"]


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


def row_of(request: Any) -> tuple[int, int]:
    """A request's row of the request table, and how many of its slots hold tokens for good."""
    if hasattr(request, "req_pool_idx"):
        return request.req_pool_idx, request.kv_committed_len
    return request.kv.req_pool_idx, request.kv.kv_committed_len


def backends(configurator: Any) -> tuple[str, str]:
    """The backends that this process prefills and decodes with. configurator: of its KV pool."""
    arguments = configurator.server_args
    if hasattr(arguments, "get_attention_backends"):
        prefill, decode = arguments.get_attention_backends()
    else:
        from sglang.srt.runtime_context import attention_backends

        prefill, decode = attention_backends()
    return prefill, decode


def speculative_modules() -> list[Any]:
    """The modules that reserve slots for a verify pass, each with a name of its own for it."""
    from sglang.srt.speculative import dflash_info_v2, eagle_utils

    try:
        from sglang.srt.speculative import uno_info
    except ImportError:
        return [dflash_info_v2, eagle_utils]
    return [dflash_info_v2, eagle_utils, uno_info]
