"""Phase 4's speed on a GPU host: CUDA graphs on, as a service runs."""

from __future__ import annotations

from collections.abc import Mapping

from phases.gate import Context, Figure
from phases.service import serving
from phases.service_scale import GPU, Scale, Start
from phases.service_speed import NEW_TOKENS, judged_speeds

__all__ = ["DECODE_TIMES_PLAIN", "TIMES_PLAIN", "TIMES_TRITON", "graph_speed"]

TIMES_TRITON = {1024: 1.0, 65536: 20.0}
TIMES_PLAIN = {65536: 4.0}
"""How many times as fast, by context; plan 14, end-to-end aim."""
DECODE_TIMES_PLAIN = {1024: 0.95, 65536: 1.0}
"""Plain decode on the kernel, against Triton's: on by default, so it must not lose. At 1k a step is
the host's, and 5% is its noise."""
_NODES = 9


def graph_speed(
    ctx: Context,
    *,
    scale: Scale = GPU,
    start: Start = serving,
    new_tokens: int = NEW_TOKENS,
    times_triton: Mapping[int, float] = TIMES_TRITON,
    times_plain: Mapping[int, float] = TIMES_PLAIN,
    decode_times_plain: Mapping[int, float] = DECODE_TIMES_PLAIN,
) -> list[Figure]:
    """Decode tok/s in graphs, in one run, on the kernel and on Triton: trees, and none."""
    return judged_speeds(
        ctx,
        nodes=_NODES,
        scale=scale,
        graphs=True,
        lengths=sorted({*scale.speed_lengths, *times_triton, *times_plain, *decode_times_plain}),
        start=start,
        new_tokens=new_tokens,
        times_triton=times_triton,
        times_plain=times_plain,
        decode_times_plain=decode_times_plain,
    )
