"""The implementations that the gates of phases 1, 2, 4 and 5 judge, in the oracle's signature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kdtree_engine.attention import tree_verify_attention
from kdtree_engine.build import CompileError, require_current
from kdtree_engine.library import kernels, library_path
from phases.gate import FailureKind, GateFailure

__all__ = [
    "naive_kernel",
    "operation",
    "require_current_library",
    "with_poisoned_memory",
    "with_stale_buffers",
]

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
    """The public operation."""
    return tree_verify_attention(*tensors, **options)  # type: ignore[arg-type]


def naive_kernel(*tensors: torch.Tensor | None, **options: Any) -> Any:
    """The naive CUDA kernel, which the fast one is compared with, in the oracle's signature."""
    return _naive(*tensors, **options)  # type: ignore[arg-type]


def _naive(
    q: torch.Tensor,
    *tensors: torch.Tensor | None,
    sm_scale: float,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    max_nodes: int | None = None,
    v_head_dim: int = 512,
    deterministic: bool = False,
) -> Any:
    assert v_head_dim == 512
    if out is None:
        out = q.new_empty((*q.shape[:2], v_head_dim))
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
    bound = max_nodes or max(1, min(q.shape[0], 128))
    kernels().tree_verify_attention_naive(q, *tensors, sm_scale, bound, out, lse)
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
