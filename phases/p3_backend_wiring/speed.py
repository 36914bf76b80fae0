"""Phase 3's speed on a GPU host: eager, so that launches are in it."""

from __future__ import annotations

from collections.abc import Mapping

from phases.gate import Context, Figure
from phases.service import serving
from phases.service_scale import GPU, Scale, Start
from phases.service_speed import NEW_TOKENS, judged_speeds

__all__ = ["TIMES_TRITON", "eager_speed"]

TIMES_TRITON = {16384: 2.0, 65536: 2.0}
"""How many times as fast as trees on Triton, by context. At 1k launches decide, not attention."""
_NODES = 9


def eager_speed(
    ctx: Context,
    *,
    scale: Scale = GPU,
    start: Start = serving,
    new_tokens: int = NEW_TOKENS,
    bars: Mapping[int, float] = TIMES_TRITON,
) -> list[Figure]:
    """Decode tok/s with trees, on the kernel and on Triton, both eager, in the same run.

    Beside them without speculation, whose tokens the kernel's are held against, and plain decode on
    the kernel, which launches decide and which is on record.
    """
    return judged_speeds(
        ctx,
        nodes=_NODES,
        scale=scale,
        graphs=False,
        lengths=sorted({scale.speed_lengths[0], *bars}),
        start=start,
        new_tokens=new_tokens,
        times_triton=bars,
        times_plain={},
        decode_times_plain={},
    )
