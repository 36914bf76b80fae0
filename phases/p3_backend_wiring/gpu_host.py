"""Phase 3's part for a GPU host: eager, bf16, contexts to 200,000 tokens."""

from __future__ import annotations

from collections.abc import Mapping

from phases.gate import Context, Figure
from phases.service import serving
from phases.service_compared import ask_servers, compared
from phases.service_scale import GPU, Scale, Start, kernel, plain, triton
from phases.service_speed import NEW_TOKENS, judged_speeds
from phases.service_tokens import demand, figures_of

__all__ = ["TIMES_TRITON", "eager_speed", "tokens_of_service"]

TIMES_TRITON = {16384: 2.0, 65536: 2.0}
"""How many times as fast as trees on Triton, by context. At 1k launches decide, not attention."""
_NODES = 9


def tokens_of_service(ctx: Context, *, scale: Scale = GPU, start: Start = serving) -> list[Figure]:
    """Trees of 9 and of 33 nodes on the kernel, and of 9 on Triton, against no speculation.

    Four servers. The kernel's first, as there is nothing to compare where it does not start.
    """
    chosen = (kernel(_NODES), plain(), kernel(33), triton(_NODES))
    found = ask_servers(ctx, chosen, scale=scale, graphs=False, start=start)
    comparisons, bounds, figures = compared(found, scale=scale)
    figures = [*figures_of(comparisons, bounds), *figures]
    demand(*comparisons, figures=figures)
    return figures


def eager_speed(
    ctx: Context,
    *,
    scale: Scale = GPU,
    start: Start = serving,
    new_tokens: int = NEW_TOKENS,
    bars: Mapping[int, float] = TIMES_TRITON,
) -> list[Figure]:
    """Decode tok/s with trees, on the kernel and on Triton, both eager, in the same run.

    Beside them without speculation, whose tokens the kernel's are held against.
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
    )
