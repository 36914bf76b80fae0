"""The implementations that the gates of phases 1, 2, 4 and 5 judge, in the oracle's signature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kdtree_engine.attention import tree_verify_attention
from kdtree_engine.build import CompileError, require_current
from kdtree_engine.library import kernels, library_path
from kdtree_engine.reference.masks import mask_layout
from phases.gate import FailureKind, GateFailure

__all__ = [
    "naive_kernel",
    "naive_kernel_with_full_mask",
    "operation",
    "require_current_library",
    "with_poisoned_memory",
    "with_stale_buffers",
]

_LAYOUT_CODES = {None: 0, "full": 1, "draft": 2, "packed": 3}
_POISON_BYTES = 320_000_000
"""More than any workspace, so that torch's allocator has no clean block to hand out."""


def require_current_library(device: torch.device) -> None:
    """Fails the gate where a GPU is judged with a library that csrc, as it is, did not make."""
    if device.type != "cuda":
        return
    try:
        require_current(library_path())
    except CompileError as error:
        raise GateFailure(FailureKind.COMPILE, str(error)) from error


def operation(*tensors: torch.Tensor | None, **options: Any) -> Any:
    """The public operation. It wants byte masks named, where the oracle reads the offsets."""
    return tree_verify_attention(*tensors, **options, mask_layout=_layout(tensors))  # type: ignore[arg-type]


def naive_kernel(*tensors: torch.Tensor | None, **options: Any) -> Any:
    """The naive CUDA kernel, which the fast one is compared with; reads the offsets, as above."""
    return _naive(tensors, _LAYOUT_CODES[_layout(tensors)], **options)


def naive_kernel_with_full_mask(*tensors: torch.Tensor | None, **options: Any) -> Any:
    """The naive CUDA kernel where the mask has SGLang's layout: reads nothing, can be captured."""
    return _naive(tensors, _LAYOUT_CODES["full"], **options)


def _naive(
    tensors: tuple[torch.Tensor | None, ...],
    layout: int,
    *,
    sm_scale: float,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    max_nodes: int | None = None,
    v_head_dim: int = 512,
    deterministic: bool = False,
) -> Any:
    q = tensors[0]
    assert q is not None
    assert v_head_dim == 512
    if out is None:
        out = q.new_empty((*q.shape[:2], v_head_dim))
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
    bound = max_nodes or max(1, min(q.shape[0], 128))
    kernels().tree_verify_attention_naive(*tensors, layout, sm_scale, bound, out, lse)
    return out if lse is None else (out, lse)


def with_stale_buffers(candidate: Callable[..., Any]) -> Callable[..., Any]:
    """The candidate with index and mask buffers that go on, as a server's static ones do.

    What follows is what an earlier, larger batch may have left: slots outside the pool and masks
    that hide everything. Nothing there may be read.
    """

    def call(*tensors: torch.Tensor | None, **options: Any) -> Any:
        q, pool, qo_indptr, kv_indptr, kv_indices, draft_slots, mask, starts = tensors
        if kv_indices is not None:
            kv_indices = torch.cat((kv_indices, kv_indices.new_full((4096,), 2**31 - 1)))
        if mask is not None:
            mask = torch.cat((mask, mask.new_zeros(4096)))
        return candidate(
            q, pool, qo_indptr, kv_indptr, kv_indices, draft_slots, mask, starts, **options
        )

    return call


def with_poisoned_memory(candidate: Callable[..., Any]) -> Callable[..., Any]:
    """The candidate on a GPU whose free memory, as torch hands it out, is full of NaN.

    So a partial result that is read before it is written, as an empty split's, shows.
    """

    def call(*tensors: torch.Tensor | None, **options: Any) -> Any:
        q = tensors[0]
        assert q is not None
        poison = torch.full((_POISON_BYTES // 4,), torch.nan, device=q.device)
        del poison  # back to the allocator, which gives this very block to the workspace
        return candidate(*tensors, **options)

    return call


def _layout(tensors: tuple[torch.Tensor | None, ...]) -> Any:
    _, _, qo_indptr, kv_indptr, _, _, mask, starts = tensors
    if mask is None or starts is None:
        return None
    assert qo_indptr is not None
    assert kv_indptr is not None
    sizes, lengths = (indptr.diff().tolist() for indptr in (qo_indptr, kv_indptr))
    return mask_layout(mask.dtype, starts.tolist(), sizes, lengths).value
