"""Phase 1: the kernel's time against the naive kernel's, in one run."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kdtree_engine.attention import tree_verify_attention
from kdtree_engine.reference.tiny_mla import Attention
from kdtree_engine.timing import Tensors, copy_bandwidth
from phases.candidates import naive_kernel
from phases.gate import Context, FailureKind, Figure, GateFailure, Unit
from phases.regimes import Regime, time_regime

__all__ = ["LEAST_SPEEDUP", "kernel_speed"]

LEAST_SPEEDUP = 1.7
"""What the first kernel of this kind reached over its naive one, at the least."""
REGIMES = tuple(Regime(1, 8, 9, prefix) for prefix in (4096, 16_384, 65_536))
_CUDA = torch.device("cuda")


def kernel_speed(
    ctx: Context,
    *,
    device: torch.device = _CUDA,
    candidate: Attention = tree_verify_attention,
    baseline: Attention = naive_kernel,
    regimes: Sequence[Regime] = REGIMES,
    repeats: int = 50,
) -> list[Figure]:
    """Both kernels over a contiguous view; the slowest speed-up decides."""
    bandwidth = copy_bandwidth(device)
    figures: list[Figure] = []
    speedups: list[float] = []
    for done, regime in enumerate(regimes):
        ctx.progress(done, len(regimes), str(regime))
        fast, naive = (
            time_regime(
                regime,
                implementation,
                device=device,
                seed=ctx.seed,
                scattered=False,
                copy_bandwidth=bandwidth,
                repeats=repeats,
                prepare=_contiguous_view,
            )
            for implementation in (candidate, baseline)
        )
        speedups.append(naive.median_us / fast.median_us)
        figures.append(Figure(f"{regime}", fast.median_us, Unit.MICROSECONDS))
        figures.append(Figure(f"{regime}, naive", naive.median_us, Unit.MICROSECONDS))
        if fast.ceiling_fraction is not None:
            figures.append(
                Figure(f"{regime}, of copy", fast.ceiling_fraction, Unit.CEILING_FRACTION)
            )
    figures.insert(0, Figure("least speed-up over naive", min(speedups), Unit.SPEEDUP))
    if min(speedups) < LEAST_SPEEDUP:
        raise GateFailure(
            FailureKind.TOO_SLOW,
            f"{min(speedups):.2f}x faster than the naive kernel, at least {LEAST_SPEEDUP}x is due",
            figures,
        )
    return figures


def _contiguous_view(tensors: Tensors) -> Tensors:
    """The same call without kv_indices: what `draw` gives where nothing is scattered."""
    return (*tensors[:4], None, *tensors[5:])  # type: ignore[arg-type]
