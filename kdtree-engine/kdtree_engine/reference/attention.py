"""Tree-verify MLA attention in float64: the definition that every kernel is judged by."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from kdtree_engine.reference.masks import chain_mask, unpack_masks

__all__ = ["tree_verify_attention"]

_INDEX_DTYPES = (torch.int32, torch.int64)
_MOST_SCORES = 1 << 26
"""Scores held at once, 512 MB: rows of a long request are worked off in parts."""


def tree_verify_attention(
    q: torch.Tensor,
    kv_pool: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor | None,
    draft_slots: torch.Tensor,
    mask: torch.Tensor | None = None,
    mask_indptr: torch.Tensor | None = None,
    *,
    sm_scale: float,
    v_head_dim: int = 512,
    max_nodes: int | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Absorbed MLA attention of the nodes of draft trees to their prefix and their ancestors.

    With kv the latent rows of request b's prefix (length L) followed by those of its T nodes:

        score[h, t, j] = sm_scale * q[t, h, :] . kv[j, :]
        out[t, h, :] = softmax_j(score) . kv[j, :v_head_dim]
        lse[t, h] = log sum_j exp(score[h, t, j])

    over the j that node t sees: the whole prefix, and those nodes that the mask grants. A row that
    sees nothing gives zeros and an lse of -inf.

    q: floating [num_tokens, H, D]: absorbed queries, latent then rope (D = 576 for Kimi K2.6).
        Rows from qo_indptr[B] on belong to no request (padding): they see nothing.
    kv_pool: [num_slots, D] or [num_slots, 1, D], dtype of q. Slots that no index names are never
        read, whatever they hold.
    qo_indptr: int32 or int64 [B+1], from 0: rows of q of each request.
    kv_indptr: int32 or int64 [B+1], from 0: prefix lengths, cumulative.
    kv_indices: int32 or int64 [>= kv_indptr[B]]: pool slots of the prefixes. Requests may share.
        None: a contiguous view, in which entry i of the prefixes lies in slot i.
    draft_slots: int32 or int64 [num_tokens]: pool slots of the nodes' own rows.
    mask, mask_indptr: who sees whom, in one of three layouts, told apart by dtype and steps as
        `kdtree_engine.reference.masks` says: int64 is packed; bytes are full where every step is
        T * (L + T) and draft where it is T * T. Both None: each request is a causal chain.
    sm_scale: factor of the scores, 1 / sqrt(qk_nope + rope) times any yarn factor.
    v_head_dim: V is the first so many values of a row.
    max_nodes: the most nodes that a request has; a promise that kernels size their grid by.
    out: floating [num_tokens, H, v_head_dim], written in full, in its own dtype.
    return_lse: return (out, lse) with lse float64 [num_tokens, H], natural log.
    deterministic: accepted; the oracle always is.

    Returns float64 [num_tokens, H, v_head_dim], or `out`. Kernels return the dtype of q and a
    float32 lse.

    Raises ValueError, naming the argument and what was expected.
    """
    if kv_indices is None:
        kv_indices = torch.arange(kv_pool.shape[0], device=kv_pool.device)
    pool = _check_tensors(q, kv_pool, kv_indices, draft_slots, v_head_dim)
    rows_of = _offsets("qo_indptr", qo_indptr, "rows of q", q.shape[0])
    prefix_of = _offsets("kv_indptr", kv_indptr, "kv_indices", kv_indices.numel())
    if len(rows_of) != len(prefix_of):
        raise ValueError(
            f"kv_indptr: must have {len(rows_of)} values like qo_indptr, got {len(prefix_of)}"
        )
    tree_sizes, prefix_lengths = _steps(rows_of), _steps(prefix_of)
    if max_nodes is not None and max(tree_sizes, default=0) > max_nodes:
        request = tree_sizes.index(max(tree_sizes))
        raise ValueError(
            f"max_nodes: is {max_nodes}, but request {request} has {tree_sizes[request]} nodes"
        )
    _check_slots("kv_indices", kv_indices[: prefix_of[-1]], pool)
    _check_slots("draft_slots", draft_slots[: rows_of[-1]], pool)
    sees = _masks(mask, mask_indptr, tree_sizes, prefix_lengths, q.device)
    result_shape = (*q.shape[:2], v_head_dim)
    if out is not None and (
        out.shape != result_shape or out.device != q.device or not out.dtype.is_floating_point
    ):
        raise ValueError(
            f"out: must be floating {list(result_shape)} on {q.device}, "
            f"got {out.dtype} {list(out.shape)} on {out.device}"
        )

    result = torch.zeros(result_shape, dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64, device=q.device)
    for request, nodes in enumerate(tree_sizes):
        first, prefix = rows_of[request], prefix_lengths[request]
        slots = torch.cat(
            [
                kv_indices[prefix_of[request] : prefix_of[request + 1]].to(torch.int64),
                draft_slots[first : first + nodes].to(torch.int64),
            ]
        )
        kv = pool[slots].to(torch.float64)
        seen = torch.ones(nodes, prefix + nodes, dtype=torch.bool, device=q.device)
        seen[:, prefix:] = sees[request]
        step = max(1, _MOST_SCORES // (q.shape[1] * max(1, len(slots))))
        for start in range(0, nodes, step):
            end = min(start + step, nodes)
            rows = slice(first + start, first + end)
            result[rows], lse[rows] = _attend(
                q[rows].to(torch.float64), kv, seen[start:end], sm_scale, v_head_dim
            )
    if out is not None:
        result = out.copy_(result)
    return (result, lse) if return_lse else result


def _attend(
    q: torch.Tensor, kv: torch.Tensor, seen: torch.Tensor, sm_scale: float, v_head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows q [t, H, D] over kv [n, D], row by row what `seen` [t, n] grants: out and lse."""
    scores = sm_scale * torch.einsum("thd,nd->thn", q, kv)
    scores = scores.masked_fill(~seen[:, None, :], -torch.inf)
    lse = scores.logsumexp(dim=2)
    # exp(-inf - -inf) is NaN: a row that sees nothing has no weights at all.
    weights = (scores - lse[:, :, None]).exp().masked_fill(~seen[:, None, :], 0.0)
    return torch.einsum("thn,nd->thd", weights, kv[:, :v_head_dim]), lse


def _masks(
    mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    tree_sizes: list[int],
    prefix_lengths: list[int],
    device: torch.device,
) -> list[torch.Tensor]:
    if mask is None and mask_indptr is None:
        return [chain_mask(nodes, device) for nodes in tree_sizes]
    if mask is None or mask_indptr is None:
        raise ValueError("mask_indptr: must be given where mask is, and only there")
    if mask.device != device:
        raise ValueError(f"mask: must be on {device} like q, got {mask.device}")
    _check_indices("mask_indptr", mask_indptr)
    return unpack_masks(mask, mask_indptr, tree_sizes, prefix_lengths)


def _check_tensors(
    q: torch.Tensor,
    kv_pool: torch.Tensor,
    kv_indices: torch.Tensor,
    draft_slots: torch.Tensor,
    v_head_dim: int,
) -> torch.Tensor:
    """The pool as [num_slots, D], once the shapes and dtypes fit together."""
    if q.dim() != 3 or not q.dtype.is_floating_point:
        raise ValueError(
            f"q: must be floating [num_tokens, heads, dim], got {q.dtype} {list(q.shape)}"
        )
    dim = q.shape[2]
    pool = kv_pool
    if pool.dim() == 3 and pool.shape[1] == 1:
        pool = pool.squeeze(1)
    if pool.dim() != 2 or pool.shape[1] != dim or pool.dtype != q.dtype:
        raise ValueError(
            f"kv_pool: must be {q.dtype} [num_slots, {dim}] or [num_slots, 1, {dim}] like q, "
            f"got {kv_pool.dtype} {list(kv_pool.shape)}"
        )
    if pool.device != q.device:
        raise ValueError(f"kv_pool: must be on {q.device} like q, got {pool.device}")
    if not 0 < v_head_dim <= dim:
        raise ValueError(f"v_head_dim: must be in 1..{dim}, got {v_head_dim}")
    for name, indices in (("kv_indices", kv_indices), ("draft_slots", draft_slots)):
        _check_indices(name, indices)
        if indices.device != q.device:
            raise ValueError(f"{name}: must be on {q.device} like q, got {indices.device}")
    if draft_slots.numel() != q.shape[0]:
        raise ValueError(
            f"draft_slots: must have {q.shape[0]} values, one a row of q, got {draft_slots.numel()}"
        )
    return pool


def _check_indices(name: str, values: torch.Tensor) -> None:
    if values.dim() != 1 or values.dtype not in _INDEX_DTYPES:
        raise ValueError(
            f"{name}: must be int32 or int64 and flat, got {values.dtype} {list(values.shape)}"
        )


def _check_slots(name: str, slots: torch.Tensor, pool: torch.Tensor) -> None:
    places = ((slots < 0) | (slots >= pool.shape[0])).nonzero()
    if len(places):
        place = int(places[0])
        raise ValueError(
            f"{name}[{place}]: slot {int(slots[place])} is not one of the pool's {pool.shape[0]}"
        )


def _offsets(name: str, indptr: torch.Tensor, what: str, most: int) -> list[int]:
    """`indptr` as a list, once it starts at 0, never falls, and ends within `most`."""
    _check_indices(name, indptr)
    values: list[int] = indptr.tolist()
    if not values or values[0] != 0:
        raise ValueError(f"{name}: must start at 0, got {values[:1]}")
    for request, step in enumerate(_steps(values)):
        if step < 0:
            raise ValueError(f"{name}: falls at request {request}, by {-step}")
    if values[-1] > most:
        raise ValueError(f"{name}: ends at {values[-1]}, but there are only {most} {what}")
    return values


def _steps(offsets: Sequence[int]) -> list[int]:
    return [end - start for start, end in itertools.pairwise(offsets)]
