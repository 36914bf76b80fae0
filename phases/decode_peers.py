"""SGLang's plain decode, as its Triton backend calls it: a peer where a tree has one node.

By the sources of sglang 0.5.17 and 0.5.23. A service counts its splits once a step and decodes
every layer with them, so that count is not timed; the two kernels of a layer are.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from kdtree_engine.timing import Tensors
from phases.peers import Operation, Peer
from phases.regimes import Regime

__all__ = ["DECODE_PEERS"]

_LATENT = 512
_CONTEXT = 262_144
"""Of the service, which bounds the splits of a request: Kimi K2's."""
_LEAST_BLOCK = 32
_LEAST_SPLITS = 8
"""--triton-attention-num-kv-splits, by default."""


def _load() -> Any:
    return importlib.import_module("sglang.kernels.ops.attention.decode_attention")


def _about(device: torch.device) -> tuple[int, bool]:
    """Multiprocessors, and whether a launch can depend on another's end (sm_90 and up)."""
    if device.type != "cuda":
        return 1, False
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.major >= 9


def _most_splits(processors: int) -> int:
    """As the backend bounds them for MLA; a power of two."""
    bounds = (processors, -(-_CONTEXT // _LEAST_BLOCK))
    return max(_LEAST_SPLITS, min(1 << (bound - 1).bit_length() for bound in bounds))


def _splits(regime: Regime, device: torch.device, most: int, processors: int) -> torch.Tensor:
    """int32 [batch], counted on the device by SGLang's own kernel."""
    metadata = importlib.import_module("sglang.kernels.ops.attention.metadata")
    splits = torch.empty(regime.batch, dtype=torch.int32, device=device)
    lengths = torch.full_like(splits, regime.prefix + 1, dtype=torch.int64)
    metadata.get_num_kv_splits_triton[(1,)](
        splits,
        lengths,
        regime.batch,
        1,  # rows of a request
        regime.heads,
        1,  # heads of the latent
        most,
        processors,
        MAX_NUM_SEQ=max(256, 1 << (regime.batch - 1).bit_length()),
    )
    return splits


def _rows(regime: Regime, drawn: Tensors) -> Tensors:
    """The lengths and slots of requests that count their new token: [batch + 1], [rows]."""
    cached = drawn[4].view(regime.batch, regime.prefix)
    slots = torch.cat((cached, drawn[5].view(regime.batch, 1)), dim=1).flatten()
    steps = torch.arange(regime.batch + 1, dtype=torch.int32, device=slots.device)
    return steps * (regime.prefix + 1), slots


def _decode(kernel: Any, regime: Regime) -> Operation:
    if regime.nodes != 1:
        raise ValueError(f"plain decode has one node a request, got {regime}")
    buffers: dict[torch.device, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def prepared(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        processors, _ = _about(device)
        most = _most_splits(processors)
        partial = (regime.batch, regime.heads, most)
        return (
            torch.empty(*partial, _LATENT, dtype=torch.float32, device=device),
            torch.empty(partial, dtype=torch.float32, device=device),
            _splits(regime, device, most, processors),
        )

    def operation(q: torch.Tensor, pool: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        kv_indptr, kv_indices = rest[-2:]
        if q.device not in buffers:  # the first call, before anything is captured
            buffers[q.device] = prepared(q.device)
        partial, sums, splits = buffers[q.device]
        rows = pool.unsqueeze(1)
        out = q.new_empty((*q.shape[:2], _LATENT))
        kernel.decode_attention_fwd(
            q,
            rows,
            rows[..., :_LATENT],
            out,
            kv_indptr,
            kv_indices,
            partial,
            sums,
            splits,
            partial.shape[2],
            regime.sm_scale,
            1.0,  # k_scale
            1.0,  # v_scale
            has_mla=True,
            use_pdl=_about(q.device)[1],
        )
        return out

    return operation


DECODE_PEERS = (Peer("sglang-decode", _load, _decode, _rows),)
