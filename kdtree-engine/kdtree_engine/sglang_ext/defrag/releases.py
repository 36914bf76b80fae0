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

import dataclasses
from typing import Any

import torch

__all__ = [
    "TreeNode",
    "backends",
    "evict",
    "free_group",
    "node_of",
    "row_of",
    "speculative_modules",
    "tree_nodes",
]


@dataclasses.dataclass(frozen=True)
class TreeNode:
    """A node of SGLang 0.5.23's prefix cache that has slots, as relocation sees it.

    key: its id. value: int64 [n], its slots, the cache's own tensor. parent: the number of its
    parent in `tree_nodes`, None below the root. tokens: of its edge, a RadixKey. locks: held on it.
    elsewhere: whether another tier has it, or is about to.
    """

    key: int
    value: torch.Tensor
    parent: int | None
    tokens: Any
    locks: int
    elsewhere: bool


def tree_nodes(tree: Any) -> list[TreeNode]:
    """All nodes but the root, a parent before its children, in an order equal on all ranks."""
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    found: list[TreeNode] = []
    left: list[tuple[Any, int | None]] = [
        (child, None) for child in tree.tree_core.root_node.children.values()
    ]
    while left:
        node, parent = left.pop()
        data = node.component_data[ComponentType.FULL]
        if data.value is None:
            value, elsewhere = torch.empty(0, dtype=torch.int64), True
        else:
            value = data.value
            elsewhere = (
                node.external_cache_stored
                or data.host_value is not None
                or node.write_through_pending_id is not None
                or node.load_back_pending_id is not None
            )
        left += [(child, len(found)) for child in node.children.values()]
        found.append(TreeNode(node.id, value, parent, node.key, data.lock_ref, elsewhere))
    return found


def node_of(tree: Any, req: Any) -> int | None:
    """The key of the last node of a request's prefix; None where it has none of the cache."""
    if req.last_node is None or req.last_node == tree.tree_core.root_node.id:
        return None
    return int(req.last_node)


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
