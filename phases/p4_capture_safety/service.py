"""Phase 4 in the live service: CUDA graphs on, for the tokens and for mixed traffic."""

from __future__ import annotations

from collections.abc import Sequence

from phases.gate import Context, FailureKind, Figure, GateFailure, Unit
from phases.service import serving
from phases.service_compared import Asked, compared
from phases.service_graphs import ARGUMENTS, ENVIRONMENT, Replays, replays_in
from phases.service_mixed import MixedTraffic
from phases.service_scale import GPU, Scale, Start, decoding, kernel, plain, triton
from phases.service_tokens import demand, figures_of

__all__ = ["graph_tokens"]

_NODES = 9
_PADDED = (3, 11)
"""Batch sizes between those that are captured, asked for at the shortest length."""
_NOT_PADDED = "no graph was replayed with fewer requests than it was captured for"


def graph_tokens(
    ctx: Context,
    *,
    scale: Scale = GPU,
    start: Start = serving,
    seconds: float | None = None,
    longest: int | None = None,
) -> list[Figure]:
    """Trees and plain decode in graphs give the tokens of no speculation, trees in traffic too.

    Five servers: no speculation first, as the traffic on the second is held against its tokens, and
    against what it moves them itself in the same traffic; plain decode on the kernel; trees on
    Triton last, whose near-ties are the measure of how many there may be.
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
        (plain(), kernel(_NODES), kernel(33), decoding(), triton(_NODES)),
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
                Figure(
                    f"{variant.name}: replays in another mode",
                    replays.other + replays.decoded,
                    Unit.COUNT,
                ),
            ]
            if problem := _not_in_graphs(replays, verified, replays_in(asked.whole)):
                raise GateFailure(FailureKind.LAUNCH, f"{variant.name}: {problem}", figures)
        figures += _decoded_in_graphs(found[decoding()], figures)
    demand(*comparisons, figures=figures)
    traffic.demand(figures)
    return figures


def _decoded_in_graphs(asked: Asked, before: Sequence[Figure]) -> list[Figure]:
    """Figures of plain decode. Raises GateFailure, with those of before, where a step was eager.

    A step gives a batch a token, so there is no count in the answers to hold the replays against.
    """
    replays, name = replays_in(asked.whole), asked.variant.name
    figures = [
        Figure(f"{name}: steps in graphs", replays.decoded, Unit.COUNT),
        Figure(f"{name}: padded replays", replays.padded_decodes, Unit.COUNT),
    ]
    problem = _eager_steps(replays)
    if problem is None and not replays.decoded:
        problem = "no graph of plain decode was replayed"
    if problem is None and not replays.padded_decodes:
        problem = _NOT_PADDED
    if problem:
        raise GateFailure(FailureKind.LAUNCH, f"{name}: {problem}", [*before, *figures])
    return figures


def _eager_steps(whole: Replays) -> str | None:
    """What is wrong with the steps of a server that shall take each from a graph."""
    if whole.eager:
        return f"{whole.eager} decode steps ran without a graph"
    if not whole.in_graphs:
        return "its log: expected lines 'Decode batch' with 'cuda graph: True', got none"
    return None


def _not_in_graphs(replays: Replays, verified: int, whole: Replays) -> str | None:
    """Why it cannot be said that every tree was verified in a graph, padded ones among them.

    replays, verified: of the same answers. whole: with what the traffic did.
    """
    if problem := _eager_steps(whole):
        return problem
    if not verified or replays.verified < verified:
        return f"{verified} trees were verified, and {replays.verified} of them in graphs"
    if not replays.padded:
        return _NOT_PADDED
    return None
