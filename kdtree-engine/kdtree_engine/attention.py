"""The one operation: attention of a tree of draft tokens over a paged MLA latent cache.

`tree_verify_attention` checks its arguments, allocates the output and calls the torch operation
`kdtree_engine::tree_verify_attention`, which has a CUDA, a CPU and a meta implementation: it works
under torch.compile, in CUDA graphs and with fake tensors. The operation writes into `out`, so that
a framework's static buffers need no copy.

The tile of a CUDA launch comes from the tuning table of the GPU's architecture (`tuning`), by what
a captured graph freezes: packed rows, batch, deterministic mode or not.

On compute capability 9.0 there are two sets of kernels, on mma.sync and on wgmma. The table says
which is taken; KDTREE_WGMMA=1 asks for wgmma and KDTREE_WGMMA=0 for mma.sync, as it is set when the
library is loaded. Where wgmma is asked for and cannot be had (another capability, a library without
sm_90a code), a call raises RuntimeError that says so. The wgmma kernels are launched cooperatively,
as their blocks wait for each other before they merge: such a launch waits until the whole grid, a
block a processor, fits the GPU at once.

It is registered through `torch.library.Library` and not `torch.library.custom_op`, as the latter
adds about 100 us of Python to every call (the former about 5 us).
"""

from __future__ import annotations

import functools

import torch

from kdtree_engine.arguments import (
    LATENT_DIM,
    MAX_NODES,
    check_arguments,
)
from kdtree_engine.contents import check_contents, checks_wanted
from kdtree_engine.library import asked_body, kernels
from kdtree_engine.split_kv import split_kv_attention
from kdtree_engine.tuning import architecture_of, choice

__all__ = ["tree_verify_attention"]

_SCHEMA = (
    "tree_verify_attention(Tensor q, Tensor kv_pool, Tensor qo_indptr, Tensor kv_indptr, "
    "Tensor? kv_indices, Tensor draft_slots, Tensor? mask, Tensor? mask_indptr, "
    "float sm_scale, SymInt max_nodes, bool deterministic, Tensor(a!) out, Tensor(b!)? lse) -> ()"
)
_LIBRARY = torch.library.Library("kdtree_engine", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    _SCHEMA, tags=(torch.Tag.needs_exact_strides,)
)


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
    v_head_dim: int = LATENT_DIM,
    max_nodes: int | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of every tree node over its request's prefix, its ancestors and itself.

    q: [num_tokens, H, 576] bfloat16 or float16 (on the CPU also float32 and float64), contiguous:
        the absorbed query, 512 latent values then 64 rope values. Rows past qo_indptr[B] belong to
        no request: their output is zero and their lse -inf.
    kv_pool: [num_slots, 576] or [num_slots, 1, 576], dtype of q, contiguous: the latent pool. K is
        the whole row, V its first 512 values.
    qo_indptr: [B + 1] int32 or int64: rows of q of each request, its T tree nodes, root first.
    kv_indptr: [B + 1] int32 or int64: prefix lengths L, cumulative. A length may be 0.
    kv_indices: [>= kv_indptr[B]] int32 or int64: pool slots of the prefixes. None: a contiguous
        view, in which entry i of the prefixes lies in slot i.
    draft_slots: [num_tokens] int32 or int64: pool slots of the tree nodes' own rows.
    mask, mask_indptr: which nodes a node sees, a row per node; None: a causal chain. mask is
        one-dimensional, mask_indptr is [B + 1] int32 or int64, offsets in elements. int64: packed,
        T x ceil(T / 64) words, bit j % 64 of word j // 64 is column j. Bytes (uint8 or bool, 0 or
        not 0): T x T where the step of mask_indptr is T * T, else T x (L + T), SGLang's, whose
        columns of the prefix count as ones and are not read. The steps are read where the kernel
        runs, so a captured graph may be replayed with either. A mask may be longer than needed (a
        static buffer). On a GPU it is refused where it is too short for as many nodes as q has
        rows, in B equal trees: what shows without reading the offsets.
    sm_scale: factor of the scores, such as (128 + 64) ** -0.5.
    max_nodes: an upper bound of T over the requests, at most 128. It sizes the grid of a CUDA
        launch, so under a captured graph it must cover every replay. None: the rows of q or 128,
        whichever is less: always enough, and for a batch of small trees more than needed.
    out: [num_tokens, H, 512], dtype of q, contiguous: written and returned, instead of a new one.
    return_lse: also return the natural logarithm of each row's softmax sum,
        [num_tokens, H] float32.
    deterministic: give a request the same bits alone, in any batch and in any order of the batch.

    Raises TypeError or ValueError that names the argument, before any launch; MissingError where
    the kernel library or its loader is absent. On the CPU, and on a GPU with KDTREE_CHECK=1, also
    ValueError for contents: offsets that fall, slots outside the pool, a mask that is too short.
    """
    check_arguments(
        q,
        kv_pool,
        qo_indptr,
        kv_indptr,
        kv_indices,
        draft_slots,
        mask,
        mask_indptr,
        sm_scale,
        v_head_dim,
        max_nodes,
        out,
    )
    num_tokens, heads = q.shape[0], q.shape[1]
    if out is None:
        out = q.new_empty((num_tokens, heads, LATENT_DIM))
    lse = q.new_empty((num_tokens, heads), dtype=torch.float32) if return_lse else None
    torch.ops.kdtree_engine.tree_verify_attention.default(
        q,
        kv_pool,
        qo_indptr,
        kv_indptr,
        kv_indices,
        draft_slots,
        mask,
        mask_indptr,
        sm_scale,
        min(max(num_tokens, 1), MAX_NODES) if max_nodes is None else max_nodes,
        deterministic,
        out,
        lse,
    )
    return out if lse is None else (out, lse)


def _cuda(
    q: torch.Tensor,
    kv_pool: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor | None,
    draft_slots: torch.Tensor,
    mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    sm_scale: float,
    max_nodes: int,
    deterministic: bool,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    num_tokens, heads = q.shape[0], q.shape[1]
    if num_tokens == 0:
        return
    if checks_wanted() and not _capturing(q.device):
        check_contents(
            num_tokens,
            kv_pool.shape[0],
            qo_indptr,
            kv_indptr,
            kv_indices,
            draft_slots,
            mask,
            mask_indptr,
            max_nodes,
        )
    library = kernels()
    batch = qo_indptr.shape[0] - 1
    tuned = choice(
        _architecture(q.device.index),
        max_nodes * heads,
        batch,
        deterministic=deterministic,
        body=asked_body(),
    )
    # A fresh tensor for each call: torch's allocator knows the stream, and inside a capture it
    # takes the memory from the graph's own pool, where it stays for every replay. The library
    # makes q's device and torch's current stream there its own.
    workspace = torch.empty(
        library.workspace_bytes(
            num_tokens,
            batch,
            heads,
            max_nodes,
            _processors(q.device.index),
            deterministic,
        ),
        dtype=torch.uint8,
        device=q.device,
    )
    library.tree_verify_attention(
        q,
        kv_pool,
        qo_indptr,
        kv_indptr,
        kv_indices,
        draft_slots,
        mask,
        mask_indptr,
        sm_scale,
        max_nodes,
        out,
        lse,
        workspace,
        deterministic,
        tuned.row_tile,
        tuned.block_tokens,
        tuned.min_blocks,
    )


def _cpu(
    q: torch.Tensor,
    kv_pool: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor | None,
    draft_slots: torch.Tensor,
    mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    sm_scale: float,
    max_nodes: int,
    deterministic: bool,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    split_kv_attention(
        q,
        kv_pool,
        qo_indptr,
        kv_indptr,
        kv_indices,
        draft_slots,
        mask,
        mask_indptr,
        sm_scale,
        max_nodes,
        deterministic,
        out,
        lse,
    )


def _meta(*_: object) -> None:
    """Nothing to infer: the operation returns nothing and writes tensors that its caller made."""


def _capturing(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


@functools.cache
def _processors(device_index: int) -> int:
    """Streaming multiprocessors of a device. Cached, as asking takes longer than the launch."""
    return int(torch.cuda.get_device_properties(device_index).multi_processor_count)


@functools.cache
def _architecture(device_index: int) -> str:
    return architecture_of(torch.cuda.get_device_capability(device_index))


_LIBRARY.impl("tree_verify_attention", _cuda, "CUDA")  # type: ignore[no-untyped-call]
_LIBRARY.impl("tree_verify_attention", _cpu, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("kdtree_engine::tree_verify_attention", _meta, lib=_LIBRARY)
