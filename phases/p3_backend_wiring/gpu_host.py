"""Phase 3's part for a GPU host: eager, bf16, contexts to 200,000 tokens."""

from __future__ import annotations

from phases.gate import Context, Figure
from phases.service import serving
from phases.service_compared import ask_servers, compared
from phases.service_scale import GPU, Scale, Start, decoding, kernel, plain, triton
from phases.service_tokens import demand, figures_of

__all__ = ["tokens_of_service"]

_NODES = 9


def tokens_of_service(ctx: Context, *, scale: Scale = GPU, start: Start = serving) -> list[Figure]:
    """Five servers, of which the four others are held against no speculation on Triton.

    Trees of 9 and of 33 nodes and plain decode on the kernel, and trees of 9 on Triton. The
    kernel's first, as there is nothing to compare where it does not start.
    """
    chosen = (kernel(_NODES), plain(), kernel(33), triton(_NODES), decoding())
    found = ask_servers(ctx, chosen, scale=scale, graphs=False, start=start)
    comparisons, bounds, figures = compared(found, scale=scale)
    figures = [*figures_of(comparisons, bounds), *figures]
    demand(*comparisons, figures=figures)
    return figures
