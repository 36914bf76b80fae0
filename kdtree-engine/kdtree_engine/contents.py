"""Checks of what the index tensors and the mask hold, which needs to wait for the device.

The CPU implementation always makes them. For a GPU they are made where KDTREE_CHECK=1 is set, as
they stop the stream; never during capture, when nothing may be read.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import os

import torch

__all__ = ["MaskRows", "check_contents", "checks_wanted"]


@dataclasses.dataclass(frozen=True)
class MaskRows:
    """Where a request's mask lies: element of its first row, and elements from row to row."""

    start: int
    stride: int


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
    max_nodes: int | None,
) -> tuple[list[int], list[int], list[MaskRows] | None]:
    """Reads the index tensors and checks them; ValueError names the argument, request and slot.

    Returns qo_indptr and kv_indptr as lists, and where the requests' masks lie, so that a caller
    need not read twice.
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
    masks: list[MaskRows] | None = None
    if mask is not None and mask_indptr is not None:
        masks = _mask_rows(mask, mask_indptr.tolist(), qo, kv)
    return qo, kv, masks


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


def _mask_rows(
    mask: torch.Tensor, starts: list[int], qo: list[int], kv: list[int]
) -> list[MaskRows]:
    found = []
    for request, (start, end) in enumerate(itertools.pairwise(starts)):
        nodes = qo[request + 1] - qo[request]
        prefix = kv[request + 1] - kv[request]
        if start < 0:
            raise ValueError(
                f"mask_indptr: expected offsets of at least 0, got {start} at request {request}"
            )
        strides = [-(-nodes // 64)] if mask.dtype is torch.int64 else [nodes, prefix + nodes]
        fitting = [stride for stride in strides if nodes * stride == end - start]
        if nodes and not fitting:
            steps = " or ".join(str(nodes * stride) for stride in strides)
            raise ValueError(
                f"mask_indptr: expected a step of {steps} at request {request} ({nodes} tree "
                f"nodes, prefix {prefix}, {mask.dtype} mask), got {end - start}"
            )
        if nodes and end > mask.shape[0]:
            raise ValueError(
                f"mask: expected at least {end} elements for request {request} ({nodes} tree "
                f"nodes, prefix {prefix}), got {mask.shape[0]}: it is too short"
            )
        found.append(MaskRows(start, fitting[0] if fitting else 0))
    return found
