"""Phase 4 in the live service: CUDA graphs on, for the tokens and for mixed traffic."""

from __future__ import annotations

from phases.gate import Context, FailureKind, Figure, GateFailure, Unit
from phases.service import serving
from phases.service_compared import compared
from phases.service_graphs import ARGUMENTS, ENVIRONMENT, Replays, replays_in
from phases.service_mixed import MixedTraffic
from phases.service_scale import GPU, Scale, Start, kernel, plain, triton
from phases.service_tokens import demand, figures_of

__all__ = ["graph_tokens"]

_NODES = 9
_PADDED = (3, 11)
"""Batch sizes between those that are captured, asked for at the shortest length."""


def graph_tokens(
    ctx: Context,
    *,
    scale: Scale = GPU,
    start: Start = serving,
    seconds: float | None = None,
    longest: int | None = None,
) -> list[Figure]:
    """Trees in graphs give the tokens of no speculation, in batches and in mixed traffic.

    Four servers: no speculation first, as the traffic on the second is held against its tokens, and
    against what it moves them itself in the same traffic; trees on Triton last, whose near-ties are
    the measure of how many there may be.
    seconds: of traffic, for a rehearsal; None, as the gate is run: `traffic_seconds`, and less than
        the full ten minutes fails it. longest: of its prompts, in tokens.
    """
    traffic = MixedTraffic(
        ctx,
        scale,
        kernel(_NODES),
        seconds=seconds,
        longest=longest or scale.distinct,
    )
    found = traffic.ask(
        (plain(), kernel(_NODES), kernel(33), triton(_NODES)),
        graphs=True,
        start=start,
        extra=_PADDED if scale.graphs else (),
        more=ARGUMENTS,
        environment=ENVIRONMENT,
    )
    comparisons, bounds, figures = compared(found, scale=scale)
    mixed, mixed_figures = traffic.judged(bounds)
    comparisons += mixed
    figures = [*figures_of(comparisons, bounds), *figures, *mixed_figures]
    if scale.graphs:
        for variant in (kernel(_NODES), kernel(33)):
            asked = found[variant]
            verified = sum(answer.verified for answer in asked.answers.values())
            replays = replays_in(asked.log)
            figures += [
                Figure(f"{variant.name}: trees verified", verified, Unit.COUNT),
                Figure(f"{variant.name}: trees in graphs", replays.verified, Unit.COUNT),
                Figure(f"{variant.name}: padded replays", replays.padded, Unit.COUNT),
                Figure(f"{variant.name}: replays in another mode", replays.other, Unit.COUNT),
            ]
            if problem := _not_in_graphs(replays, verified, replays_in(asked.whole)):
                raise GateFailure(FailureKind.LAUNCH, f"{variant.name}: {problem}", figures)
    demand(*comparisons, figures=figures)
    traffic.demand(figures)
    return figures


def _not_in_graphs(replays: Replays, verified: int, whole: Replays) -> str | None:
    """Why it cannot be said that every tree was verified in a graph, padded ones among them.

    replays, verified: of the same answers. whole: with what the traffic did.
    """
    if whole.eager:
        return f"{whole.eager} decode steps ran without a graph"
    if not whole.in_graphs:
        return "its log: expected lines 'Decode batch' with 'cuda graph: True', got none"
    if not verified or replays.verified < verified:
        return f"{verified} trees were verified, and {replays.verified} of them in graphs"
    if not replays.padded:
        return "no graph was replayed with fewer requests than it was captured for"
    return None
