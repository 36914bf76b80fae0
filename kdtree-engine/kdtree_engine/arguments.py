"""What `tree_verify_attention` accepts, checked on the host alone.

Nothing here reads a tensor's contents, so that a call never waits for a GPU and can be captured in
a CUDA graph or traced by torch.compile. What only the contents can tell is in `contents`.

A fault raises TypeError (a wrong type or dtype) or ValueError (everything else); its text names
the argument, what was expected and what was got.
"""

from __future__ import annotations

import enum
import math
from typing import Literal, NoReturn

import torch

__all__ = [
    "HEAD_DIM",
    "LATENT_DIM",
    "MAX_NODES",
    "MaskLayout",
    "MaskLayoutName",
    "check_arguments",
    "least_mask_elements",
]

LATENT_DIM = 512
"""Width of V and of the output: the latent part of a row."""
HEAD_DIM = 576
"""Width of q and of a pool row: 512 latent values, then 64 rope values."""

MAX_NODES = 128
"""The most tree nodes of a request: the kernel keeps a node's mask bits on chip."""

MaskLayoutName = Literal["full", "draft", "packed"]


class MaskLayout(enum.IntEnum):
    """How a mask lies in memory; the numbers are those that the kernel takes.

    Each request's part is row-major over its T tree nodes and begins at `mask_indptr[b]`.
    """

    NONE = 0
    """No mask: the nodes are a causal chain."""
    FULL = 1
    """T x (L + T) bytes, SGLang's `custom_mask`; only the last T columns are read."""
    DRAFT = 2
    """T x T bytes."""
    PACKED = 3
    """T x ceil(T / 64) int64 words; bit j % 64 of word j // 64 is column j."""


_BY_NAME = {"full": MaskLayout.FULL, "draft": MaskLayout.DRAFT, "packed": MaskLayout.PACKED}
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
    mask_layout: str | None,
    sm_scale: float,
    v_head_dim: int,
    max_nodes: int | None,
    out: torch.Tensor | None,
) -> MaskLayout:
    """Checks every argument and says which layout the mask has.

    The mask is int64 for "packed" and uint8 or bool for the others. With `mask_layout` None, int64
    means "packed" and bytes mean "full": a rule on dtypes, as it must not depend on contents.
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

    layout = _check_mask(mask, mask_indptr, mask_layout, device, offsets, num_tokens)

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
    return layout


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
    mask_layout: str | None,
    device: torch.device,
    offsets: int,
    num_tokens: int,
) -> MaskLayout:
    if mask_layout is not None and mask_layout not in _BY_NAME:
        raise ValueError(
            f"mask_layout: expected one of {', '.join(_BY_NAME)} or None, got {mask_layout!r}"
        )
    if mask is None:
        if mask_indptr is not None:
            raise ValueError("mask_indptr: expected None where mask is None, got a tensor")
        if mask_layout is not None:
            raise ValueError(f"mask_layout: expected None where mask is None, got {mask_layout!r}")
        return MaskLayout.NONE

    _same("mask", mask, device)
    if mask_indptr is None:
        raise ValueError("mask_indptr: expected a tensor where mask is given, got None")
    if mask.dim() != 1:
        _wrong_shape("mask", "one dimension, the requests' masks end to end", mask)
    _contiguous("mask", mask)
    _indices("mask_indptr", mask_indptr, device)
    if mask_indptr.shape[0] != offsets:
        _wrong_shape("mask_indptr", f"[{offsets}], as qo_indptr", mask_indptr)

    if mask_layout is None:
        layout = MaskLayout.PACKED if mask.dtype is torch.int64 else MaskLayout.FULL
        if layout is MaskLayout.FULL and mask.dtype not in _BYTES:
            _wrong_dtype("mask", (*_BYTES, torch.int64), mask)
    else:
        layout = _BY_NAME[mask_layout]
        allowed = (torch.int64,) if layout is MaskLayout.PACKED else _BYTES
        if mask.dtype not in allowed:
            _wrong_dtype(f"mask (layout '{mask_layout}')", allowed, mask)

    # The CPU implementation reads the offsets and knows exactly; a GPU's cannot be waited for.
    if device.type == "cuda":
        packed = layout is MaskLayout.PACKED
        least = least_mask_elements(num_tokens, offsets - 1, packed=packed)
        if mask.shape[0] < least:
            raise ValueError(
                f"mask: expected at least {least} {'words' if packed else 'bytes'} for "
                f"{num_tokens} rows of q in {offsets - 1} requests, got {mask.shape[0]}: it is "
                "too short"
            )
    return layout


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
