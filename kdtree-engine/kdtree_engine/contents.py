"""Checks of what the index tensors and the mask hold, which needs to wait for the device.

The CPU implementation always makes them. For a GPU they are made where KDTREE_CHECK=1 is set, as
they stop the stream; never during capture, when nothing may be read.
"""

from __future__ import annotations

import bisect
import itertools
import os

import torch

from kdtree_engine.arguments import MaskLayout

__all__ = ["check_contents", "checks_wanted"]


def checks_wanted() -> bool:
    """Whether KDTREE_CHECK=1 asks for the checks. Read at each call, so that a test can set it."""
    return os.environ.get("KDTREE_CHECK", "") == "1"


def check_contents(
    num_tokens: int,
    num_slots: int,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor | None,
    draft_slots: torch.Tensor,
    mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    layout: MaskLayout,
    max_nodes: int | None,
) -> tuple[list[int], list[int], list[int] | None]:
    """Reads the index tensors and checks them; ValueError names the argument, request and slot.

    Returns qo_indptr, kv_indptr and mask_indptr as lists, so that a caller need not read twice.
    """
    qo = _offsets("qo_indptr", qo_indptr)
    kv = _offsets("kv_indptr", kv_indptr)
    if qo[-1] > num_tokens:
        raise ValueError(
            f"qo_indptr: expected at most {num_tokens} tokens, the rows of q, got {qo[-1]}"
        )
    for request in range(len(qo) - 1):
        nodes = qo[request + 1] - qo[request]
        if max_nodes is not None and nodes > max_nodes:
            raise ValueError(
                f"max_nodes: expected at least the {nodes} tree nodes of request {request}, "
                f"got {max_nodes}"
            )
    if kv_indices is None:
        if kv[-1] > num_slots:
            raise ValueError(
                f"kv_indptr: expected at most {num_slots} rows, those of kv_pool, in a contiguous "
                f"view, got {kv[-1]}"
            )
    else:
        if kv[-1] > kv_indices.shape[0]:
            raise ValueError(
                f"kv_indices: expected at least {kv[-1]} slots, the end of kv_indptr, "
                f"got {kv_indices.shape[0]}"
            )
        _slots("kv_indices", kv_indices[: kv[-1]], kv, num_slots)
    _slots("draft_slots", draft_slots[: qo[-1]], qo, num_slots)
    starts: list[int] | None = None
    if mask is not None and mask_indptr is not None:
        starts = mask_indptr.tolist()
        _mask_room(mask.shape[0], starts, qo, kv, layout)
    return qo, kv, starts


def _offsets(name: str, indptr: torch.Tensor) -> list[int]:
    offsets: list[int] = indptr.tolist()
    if offsets[0] != 0:
        raise ValueError(f"{name}: expected offsets from 0 on, got {offsets[0]} first")
    for request, (begin, end) in enumerate(itertools.pairwise(offsets)):
        if end < begin:
            raise ValueError(
                f"{name}: expected offsets that never fall, got {begin} then {end} "
                f"at request {request}"
            )
    return offsets


def _slots(name: str, slots: torch.Tensor, offsets: list[int], num_slots: int) -> None:
    if slots.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(slots))
    if low >= 0 and high < num_slots:
        return
    outside = (slots < 0) | (slots >= num_slots)
    place = int(outside.nonzero()[0])
    request = bisect.bisect_right(offsets, place) - 1
    raise ValueError(
        f"{name}: expected slots in 0..{num_slots - 1}, the rows of kv_pool, got slot "
        f"{int(slots[place])} at index {place}, request {request}"
    )


def _mask_room(
    elements: int, starts: list[int], qo: list[int], kv: list[int], layout: MaskLayout
) -> None:
    for request in range(len(qo) - 1):
        nodes = qo[request + 1] - qo[request]
        prefix = kv[request + 1] - kv[request]
        if layout is MaskLayout.FULL:
            needed = nodes * (prefix + nodes)
        elif layout is MaskLayout.DRAFT:
            needed = nodes * nodes
        else:
            needed = nodes * -(-nodes // 64)
        start = starts[request]
        if start < 0:
            raise ValueError(
                f"mask_indptr: expected offsets of at least 0, got {start} at request {request}"
            )
        step = starts[request + 1] - start
        if layout is MaskLayout.FULL and step < needed and step == nodes * nodes:
            raise ValueError(
                f"mask_indptr: expected a step of {needed} for layout 'full' (the one meant by "
                f"mask_layout=None) at request {request}, got {step}, which is that of layout "
                "'draft': pass mask_layout='draft'"
            )
        if nodes and start + needed > elements:
            raise ValueError(
                f"mask: expected at least {start + needed} elements for request {request} "
                f"({nodes} tree nodes, prefix {prefix}, layout '{layout.name.lower()}'), "
                f"got {elements}: it is too short"
            )
