"""Phase 3's part for a GPU host: eager, bf16, contexts to 200,000 tokens."""

from __future__ import annotations

from phases.gate import Context, FailureKind, Figure, GateFailure, Unit
from phases.service import serving
from phases.service_compared import ask_servers, compared
from phases.service_scale import GPU, Scale, Start, kernel, plain, triton
from phases.service_speed import (
    NEW_TOKENS,
    demand_tokens,
    measure_all,
    ratio,
    speed_bound,
    speed_figures,
    unlike_acceptance,
)
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
    bars: dict[int, float] = TIMES_TRITON,
) -> list[Figure]:
    """Decode tok/s with trees, on the kernel and on Triton, both eager, in the same run.

    Beside them without speculation, whose tokens the kernel's are held against.
    """
    lengths = sorted({scale.speed_lengths[0], *bars})
    ours, alone, stock = measure_all(
        ctx,
        (kernel(_NODES), plain(), triton(_NODES)),
        scale=scale,
        graphs=False,
        lengths=lengths,
        start=start,
        new_tokens=new_tokens,
    )
    figures = [
        Figure(f"times triton at {length}", ratio(ours, stock, length) or 0.0, Unit.SPEEDUP)
        for length in reversed(lengths)
    ]
    figures += [*speed_figures(ours), *speed_figures(alone), *speed_figures(stock)]
    demand_tokens(ours, alone, speed_bound(scale), figures)
    if problem := unlike_acceptance(ours, stock):
        raise GateFailure(FailureKind.TOO_SLOW, problem, figures)
    for length, bar in bars.items():
        reached = ratio(ours, stock, length) or 0.0
        if reached < bar:
            raise GateFailure(
                FailureKind.TOO_SLOW,
                f"at {length} tokens {reached:.2f} times as fast as triton, expected {bar:g}",
                figures,
            )
    return figures
