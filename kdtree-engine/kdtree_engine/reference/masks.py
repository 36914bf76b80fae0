"""The tree mask and its three layouts.

Node t of a draft tree sees the whole prefix, itself and its ancestors. A batch of B requests with
T_b nodes and L_b prefix tokens carries its masks in one flat tensor, request after request, with
`mask_indptr` int [B+1] saying where each begins:

| layout | dtype | step of `mask_indptr` | node t sees node j iff |
|---|---|---|---|
| full (SGLang's) | bool or uint8 | T * (L + T) | `mask[start + t * (L + T) + L + j]` |
| draft | bool or uint8 | T * T | `mask[start + t * T + j]` |
| packed | int64 | T * ceil(T / 64) | bit j % 64 of word `start + t * ceil(T / 64) + j // 64` |

The prefix columns of the full layout are all ones, so only its T x T tail carries anything.

**How layouts are told apart** (`mask_layout`; every implementation of the operation follows it):
int64 is packed. bool and uint8 are full where every step is T * (L + T), and draft where every
step is T * T. Where both hold (each request has L = 0 or T = 0) the bytes are the same too. Device
code needs no flag for it: with stride = step / T, node t sees node j iff
`mask[start + (t + 1) * stride - T + j]`, in both byte layouts.

A mask may be longer than `mask_indptr[B]` (a persistent buffer), never shorter.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence

import torch

from kdtree_engine.reference.tree import validate_parents

__all__ = [
    "WORD_BITS",
    "MaskLayout",
    "chain_mask",
    "mask_indptr",
    "mask_layout",
    "pack_masks",
    "parents_from_mask",
    "tree_mask",
    "unpack_masks",
    "words_per_node",
]

WORD_BITS = 64


class MaskLayout(enum.Enum):
    """How a batch's masks are laid out; the table at the top of this module."""

    FULL = "full"
    DRAFT = "draft"
    PACKED = "packed"


def tree_mask(parents: torch.Tensor) -> torch.Tensor:
    """Who sees whom: bool [T, T], node t sees node j iff j is t or one of its ancestors.

    parents: int64 [T], parents[0] = -1, parents before children. Raises ValueError otherwise.
    """
    values = validate_parents(parents)
    mask = torch.eye(len(values), dtype=torch.bool, device=parents.device)
    for node, parent in enumerate(values):
        if parent >= 0:
            # The parent's row is complete already, as parents precede children.
            mask[node] |= mask[parent]
    return mask


def chain_mask(nodes: int, device: torch.device | None = None) -> torch.Tensor:
    """The mask of a causal chain, bool [nodes, nodes]: what `mask=None` stands for."""
    return torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril()


def parents_from_mask(mask: torch.Tensor) -> torch.Tensor:
    """The parents int64 [T] of the tree whose mask this is: the inverse of `tree_mask`.

    Raises ValueError, naming the first node whose row is no tree node's row.
    """
    if mask.dim() != 2 or mask.shape[0] != mask.shape[1] or mask.dtype != torch.bool:
        raise ValueError(f"mask: must be bool [T, T], got {mask.dtype} {list(mask.shape)}")
    parents: list[int] = []
    for node, row in enumerate(mask.cpu()):
        seen = row.nonzero().flatten().tolist()
        if not seen or seen[-1] != node:
            raise ValueError(f"mask: node {node} must see itself and no later node")
        parent = seen[-2] if len(seen) > 1 else -1
        parents.append(parent)
        if (parent == -1) != (node == 0):
            raise ValueError(f"mask: node {node} does not descend from the root, node 0")
        if parent >= 0 and seen[:-1] != mask[parent].cpu().nonzero().flatten().tolist():
            raise ValueError(
                f"mask: node {node} does not see exactly what its parent {parent} sees"
            )
    return torch.tensor(parents, dtype=torch.int64, device=mask.device)


def words_per_node(nodes: int) -> int:
    """64-bit words that one row of a packed mask of `nodes` nodes takes."""
    return -(-nodes // WORD_BITS)


def mask_indptr(
    layout: MaskLayout, tree_sizes: Sequence[int], prefix_lengths: Sequence[int]
) -> list[int]:
    """Where each request's mask begins, in elements, and where the last one ends: B + 1 values."""
    _check_sizes(tree_sizes, prefix_lengths)
    steps = (
        _step(layout, nodes, prefix)
        for nodes, prefix in zip(tree_sizes, prefix_lengths, strict=True)
    )
    return list(itertools.accumulate(steps, initial=0))


def mask_layout(
    dtype: torch.dtype,
    indptr: Sequence[int],
    tree_sizes: Sequence[int],
    prefix_lengths: Sequence[int],
) -> MaskLayout:
    """Which layout a mask of this dtype and these offsets has: the rule at the top of this module.

    Where full and draft are the same bytes, the answer is DRAFT.

    Raises ValueError where the offsets fit no layout, naming the first request that does not fit.
    """
    _check_sizes(tree_sizes, prefix_lengths)
    if len(indptr) != len(tree_sizes) + 1:
        raise ValueError(
            f"mask_indptr: must have {len(tree_sizes) + 1} values for {len(tree_sizes)} requests, "
            f"got {len(indptr)}"
        )
    if indptr[0] < 0:
        raise ValueError(f"mask_indptr[0]: must be 0 or more, got {indptr[0]}")
    steps = [end - start for start, end in itertools.pairwise(indptr)]
    if dtype == torch.int64:
        candidates = [MaskLayout.PACKED]
    elif dtype in (torch.bool, torch.uint8):
        candidates = [MaskLayout.DRAFT, MaskLayout.FULL]
    else:
        raise ValueError(f"mask: must be bool, uint8 (bytes) or int64 (packed words), got {dtype}")
    for request, step in enumerate(steps):
        nodes, prefix = tree_sizes[request], prefix_lengths[request]
        fitting = [layout for layout in candidates if _step(layout, nodes, prefix) == step]
        if not fitting:
            wanted = " or ".join(
                f"{_step(layout, nodes, prefix)} ({layout.value})" for layout in candidates
            )
            raise ValueError(
                f"mask_indptr: request {request} has {nodes} nodes and {prefix} prefix tokens, so "
                f"its step must be {wanted}, got {step}"
            )
        candidates = fitting
    return candidates[0]


def pack_masks(
    masks: Sequence[torch.Tensor],
    prefix_lengths: Sequence[int],
    layout: MaskLayout,
    byte_dtype: torch.dtype = torch.uint8,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch's masks in one layout: the flat mask and its `mask_indptr` (int64 [B+1]).

    masks: one bool [T_b, T_b] per request. byte_dtype: bool or uint8, for the byte layouts.
    Raises ValueError for a mask that is not square and bool.
    """
    for request, mask in enumerate(masks):
        if mask.dim() != 2 or mask.shape[0] != mask.shape[1] or mask.dtype != torch.bool:
            raise ValueError(
                f"masks[{request}]: must be bool [T, T], got {mask.dtype} {list(mask.shape)}"
            )
    if byte_dtype not in (torch.bool, torch.uint8):
        raise ValueError(f"byte_dtype: must be bool or uint8, got {byte_dtype}")
    sizes = [mask.shape[0] for mask in masks]
    indptr = mask_indptr(layout, sizes, prefix_lengths)
    device = masks[0].device if masks else None
    dtype = torch.int64 if layout is MaskLayout.PACKED else byte_dtype
    parts = [torch.empty(0, dtype=dtype, device=device)]
    for mask, prefix in zip(masks, prefix_lengths, strict=True):
        if layout is MaskLayout.PACKED:
            parts.append(_to_words(mask).flatten())
        elif layout is MaskLayout.FULL:
            ones = torch.ones(mask.shape[0], prefix, dtype=torch.bool, device=device)
            parts.append(torch.cat([ones, mask], dim=1).flatten().to(dtype))
        else:
            parts.append(mask.flatten().to(dtype))
    return torch.cat(parts), torch.tensor(indptr, dtype=torch.int64, device=device)


def unpack_masks(
    mask: torch.Tensor,
    indptr: torch.Tensor | Sequence[int],
    tree_sizes: Sequence[int],
    prefix_lengths: Sequence[int],
) -> list[torch.Tensor]:
    """One bool [T_b, T_b] per request, from a flat mask in any layout: the inverse of `pack_masks`.

    Stricter than a kernel, which cannot look: raises ValueError for a mask that is too short, a
    byte that is neither 0 nor 1, a full mask whose prefix columns are not all ones, or a packed
    one with a bit beyond the last node. Any T x T content is fine, tree or not.
    """
    starts = indptr.tolist() if isinstance(indptr, torch.Tensor) else list(indptr)
    if mask.dim() != 1:
        raise ValueError(f"mask: must be flat, got {list(mask.shape)}")
    layout = mask_layout(mask.dtype, starts, tree_sizes, prefix_lengths)
    if mask.numel() < starts[-1]:
        raise ValueError(
            f"mask: too short, has {mask.numel()} elements of the {starts[-1]} that "
            "mask_indptr ends at"
        )
    found: list[torch.Tensor] = []
    for request, nodes in enumerate(tree_sizes):
        part = mask[starts[request] : starts[request + 1]]
        if layout is MaskLayout.PACKED:
            found.append(_from_words(part.view(nodes, words_per_node(nodes)), request))
            continue
        if mask.dtype == torch.uint8 and bool((part > 1).any()):
            raise ValueError(f"mask: request {request} holds a byte that is neither 0 nor 1")
        prefix = prefix_lengths[request] if layout is MaskLayout.FULL else 0
        rows = part.view(nodes, prefix + nodes).to(torch.bool)
        if not bool(rows[:, :prefix].all()):
            raise ValueError(f"mask: request {request} hides part of its prefix")
        found.append(rows[:, prefix:].clone())
    return found


def _step(layout: MaskLayout, nodes: int, prefix: int) -> int:
    if layout is MaskLayout.FULL:
        return nodes * (prefix + nodes)
    if layout is MaskLayout.DRAFT:
        return nodes * nodes
    return nodes * words_per_node(nodes)


def _check_sizes(tree_sizes: Sequence[int], prefix_lengths: Sequence[int]) -> None:
    if len(tree_sizes) != len(prefix_lengths):
        raise ValueError(
            f"prefix_lengths: must have one value for each of the {len(tree_sizes)} requests, "
            f"got {len(prefix_lengths)}"
        )
    for name, values in (("tree_sizes", tree_sizes), ("prefix_lengths", prefix_lengths)):
        for request, value in enumerate(values):
            if value < 0:
                raise ValueError(f"{name}[{request}]: must be 0 or more, got {value}")


def _to_words(mask: torch.Tensor) -> torch.Tensor:
    nodes = mask.shape[0]
    words = torch.zeros(nodes, words_per_node(nodes), dtype=torch.int64, device=mask.device)
    for column in range(nodes):
        # A shift by 63 reaches the sign bit, which is as good a bit as any other.
        words[:, column // WORD_BITS] |= mask[:, column].to(torch.int64) << (column % WORD_BITS)
    return words


def _from_words(words: torch.Tensor, request: int) -> torch.Tensor:
    nodes = words.shape[0]
    bits = torch.arange(WORD_BITS, device=words.device)
    # `>>` on int64 copies the sign, which `& 1` cuts off again.
    seen = ((words[:, :, None] >> bits) & 1).to(torch.bool).flatten(1)
    if bool(seen[:, nodes:].any()):
        raise ValueError(f"mask: request {request} has a bit beyond its {nodes} nodes")
    return seen[:, :nodes].clone()
