"""Phase 2: what random slots cost against a contiguous view, in one run."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kdtree_engine.attention import tree_verify_attention
from kdtree_engine.reference.tiny_mla import Attention
from kdtree_engine.timing import copy_bandwidth
from phases.gate import Context, FailureKind, Figure, GateFailure, Unit
from phases.regimes import Regime, time_regime

__all__ = ["MOST_OVER_CONTIGUOUS", "paged_speed"]

MOST_OVER_CONTIGUOUS = 1.10
REGIMES = tuple(Regime(1, 8, 9, prefix) for prefix in (4096, 16_384, 65_536, 204_800))
_CUDA = torch.device("cuda")


def paged_speed(
    ctx: Context,
    *,
    device: torch.device = _CUDA,
    candidate: Attention = tree_verify_attention,
    regimes: Sequence[Regime] = REGIMES,
    repeats: int = 50,
    most: float = MOST_OVER_CONTIGUOUS,
) -> list[Figure]:
    """Scattered and contiguous slots, both through kv_indices; the dearest regime decides."""
    bandwidth = copy_bandwidth(device)
    figures: list[Figure] = []
    ratios: list[float] = []
    for done, regime in enumerate(regimes):
        ctx.progress(done, len(regimes), str(regime))
        scattered, contiguous = (
            time_regime(
                regime,
                candidate,
                device=device,
                seed=ctx.seed,
                scattered=scatter,
                copy_bandwidth=bandwidth,
                repeats=repeats,
            ).median_us
            for scatter in (True, False)
        )
        ratios.append(scattered / contiguous)
        figures.append(Figure(f"{regime}, scattered", scattered, Unit.MICROSECONDS))
        figures.append(Figure(f"{regime}, contiguous", contiguous, Unit.MICROSECONDS))
    # Named a speed-up, so that it counts as a figure about speed: below 1 where scattering costs.
    figures.insert(0, Figure("scattered against contiguous", 1 / max(ratios), Unit.SPEEDUP))
    if max(ratios) > most:
        raise GateFailure(
            FailureKind.TOO_SLOW,
            f"random slots take {max(ratios):.3f} of the time of contiguous ones, at most {most} "
            "is allowed",
            figures,
        )
    return figures
