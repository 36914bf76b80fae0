"""What `tree_verify_attention` accepts, checked on the host alone.

Nothing here reads a tensor's contents, so that a call never waits for a GPU and can be captured in
a CUDA graph or traced by torch.compile. What only the contents can tell is in `contents`.

A fault raises TypeError (a wrong type or dtype) or ValueError (everything else); its text names
the argument, what was expected and what was got.
"""

from __future__ import annotations

import math
from typing import NoReturn

import torch

__all__ = [
    "HEAD_DIM",
    "LATENT_DIM",
    "MAX_NODES",
    "check_arguments",
    "least_mask_elements",
]

LATENT_DIM = 512
"""Width of V and of the output: the latent part of a row."""
HEAD_DIM = 576
"""Width of q and of a pool row: 512 latent values, then 64 rope values."""

MAX_NODES = 128
"""The most tree nodes of a request: the kernel keeps a node's mask bits on chip."""

_GPU_FLOATS = (torch.bfloat16, torch.float16)
_CPU_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_INDEX = (torch.int32, torch.int64)
_BYTES = (torch.uint8, torch.bool)


def check_arguments(
    q: torch.Tensor,
    kv_pool: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor | None,
    draft_slots: torch.Tensor,
    mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    sm_scale: float,
    v_head_dim: int,
    max_nodes: int | None,
    out: torch.Tensor | None,
) -> None:
    """Checks every argument.

    A mask of int64 is packed words, one of uint8 or bool is bytes. Which of the two byte layouts
    it has is told by its offsets, which the kernel reads: nothing here may depend on contents.
    """
    _tensor("q", q)
    device = q.device
    if q.dim() != 3 or q.shape[2] != HEAD_DIM or q.shape[1] < 1:
        _wrong_shape("q", f"[num_tokens, heads >= 1, {HEAD_DIM}]", q)
    floats = _GPU_FLOATS if device.type == "cuda" else _CPU_FLOATS
    if q.dtype not in floats:
        _wrong_dtype("q", floats, q)
    _contiguous("q", q)

    _same("kv_pool", kv_pool, device)
    if not (
        (kv_pool.dim() == 2 and kv_pool.shape[1] == HEAD_DIM)
        or (kv_pool.dim() == 3 and kv_pool.shape[1] == 1 and kv_pool.shape[2] == HEAD_DIM)
    ):
        _wrong_shape("kv_pool", f"[num_slots, {HEAD_DIM}] or [num_slots, 1, {HEAD_DIM}]", kv_pool)
    if kv_pool.dtype is not q.dtype:
        _wrong_dtype("kv_pool", (q.dtype,), kv_pool)
    _contiguous("kv_pool", kv_pool)

    if v_head_dim != LATENT_DIM:
        raise ValueError(f"v_head_dim: expected {LATENT_DIM}, got {v_head_dim!r}")

    num_tokens = q.shape[0]
    _indices("qo_indptr", qo_indptr, device)
    offsets = qo_indptr.shape[0]
    if offsets < 1:
        _wrong_shape("qo_indptr", "[batch + 1]", qo_indptr)
    _indices("kv_indptr", kv_indptr, device)
    if kv_indptr.shape[0] != offsets:
        _wrong_shape("kv_indptr", f"[{offsets}], as qo_indptr", kv_indptr)
    if kv_indices is not None:
        _indices("kv_indices", kv_indices, device)
    _indices("draft_slots", draft_slots, device)
    if draft_slots.shape[0] != num_tokens:
        _wrong_shape("draft_slots", f"[{num_tokens}], one slot for each row of q", draft_slots)

    _check_mask(mask, mask_indptr, device, offsets, num_tokens)

    if not isinstance(sm_scale, (float, int)) or isinstance(sm_scale, bool):
        raise TypeError(f"sm_scale: expected a float, got {type(sm_scale).__name__}")
    if not math.isfinite(sm_scale):
        raise ValueError(f"sm_scale: expected a finite number, got {sm_scale}")
    if max_nodes is not None:
        if not isinstance(max_nodes, int) or isinstance(max_nodes, bool):
            raise TypeError(f"max_nodes: expected an int or None, got {type(max_nodes).__name__}")
        if not 1 <= max_nodes <= MAX_NODES:
            raise ValueError(f"max_nodes: expected 1..{MAX_NODES}, got {max_nodes}")

    if out is not None:
        _same("out", out, device)
        if tuple(out.shape) != (num_tokens, q.shape[1], LATENT_DIM):
            _wrong_shape("out", f"[{num_tokens}, {q.shape[1]}, {LATENT_DIM}]", out)
        if out.dtype is not q.dtype:
            _wrong_dtype("out", (q.dtype,), out)
        _contiguous("out", out)


def least_mask_elements(num_tokens: int, batch: int, *, packed: bool) -> int:
    """The fewest mask elements that `num_tokens` tree nodes in `batch` requests can need.

    Bytes: the sum of T_b^2 is least when the trees are equal, num_tokens^2 / batch. It leaves out
    the prefix columns, as lengths are in the device's memory. Words: one for each node.
    """
    if batch == 0:
        return 0
    return num_tokens if packed else -(-num_tokens * num_tokens // batch)


def _check_mask(
    mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    device: torch.device,
    offsets: int,
    num_tokens: int,
) -> None:
    if mask is None:
        if mask_indptr is not None:
            raise ValueError("mask_indptr: expected None where mask is None, got a tensor")
        return

    _same("mask", mask, device)
    if mask_indptr is None:
        raise ValueError("mask_indptr: expected a tensor where mask is given, got None")
    if mask.dim() != 1:
        _wrong_shape("mask", "one dimension, the requests' masks end to end", mask)
    _contiguous("mask", mask)
    _indices("mask_indptr", mask_indptr, device)
    if mask_indptr.shape[0] != offsets:
        _wrong_shape("mask_indptr", f"[{offsets}], as qo_indptr", mask_indptr)

    if mask.dtype not in (*_BYTES, torch.int64):
        _wrong_dtype("mask", (*_BYTES, torch.int64), mask)

    # The CPU implementation reads the offsets and knows exactly; a GPU's cannot be waited for.
    if device.type == "cuda":
        packed = mask.dtype is torch.int64
        least = least_mask_elements(num_tokens, offsets - 1, packed=packed)
        if mask.shape[0] < least:
            raise ValueError(
                f"mask: expected at least {least} {'words' if packed else 'bytes'} for "
                f"{num_tokens} rows of q in {offsets - 1} requests, got {mask.shape[0]}: it is "
                "too short"
            )


def _tensor(name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")


def _same(name: str, value: torch.Tensor, device: torch.device) -> None:
    _tensor(name, value)
    if value.device != device:
        raise ValueError(f"{name}: expected device {device}, that of q, got {value.device}")


def _indices(name: str, value: torch.Tensor, device: torch.device) -> None:
    _same(name, value, device)
    if value.dtype not in _INDEX:
        _wrong_dtype(name, _INDEX, value)
    if value.dim() != 1:
        _wrong_shape(name, "one dimension", value)
    _contiguous(name, value)


def _contiguous(name: str, value: torch.Tensor) -> None:
    if not value.is_contiguous():
        raise ValueError(
            f"{name}: expected contiguous strides, got {tuple(value.stride())} "
            f"for shape {list(value.shape)}"
        )


def _wrong_shape(name: str, expected: str, value: torch.Tensor) -> NoReturn:
    raise ValueError(f"{name}: expected shape {expected}, got {list(value.shape)}")


def _wrong_dtype(name: str, expected: tuple[torch.dtype, ...], value: torch.Tensor) -> NoReturn:
    raise TypeError(
        f"{name}: expected dtype {' or '.join(map(_short, expected))}, got {_short(value.dtype)}"
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
