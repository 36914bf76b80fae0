"""Phase 4 in the live service: CUDA graphs on, for the tokens and for mixed traffic."""

from __future__ import annotations

import os
import threading

from kdtree_engine.errors import ConfigError
from phases.gate import Context, FailureKind, Figure, GateFailure, Unit
from phases.service import Answer, ServiceFailed, incomplete, serving
from phases.service_compared import Turn, ask_servers, compared
from phases.service_graphs import ARGUMENTS, ENVIRONMENT, Replays, replays_in
from phases.service_scale import GPU, Scale, Start, kernel, plain, triton
from phases.service_tokens import LIKELY, demand, figures_of, tie_bound
from phases.service_traffic import (
    Traffic,
    demand_traffic,
    mixed_prompts,
    room_for_aborted,
    run_traffic,
    traffic_rounding,
)

__all__ = ["LONGEST_TRAFFIC_S", "graph_tokens", "traffic_seconds"]

_NODES = 9
_PADDED = (3, 11)
"""Batch sizes between those that are captured, asked for at the shortest length."""
_PROMPTS = 32
_TRAFFIC_S = "KD_TRAFFIC_S"
_FULL_TRAFFIC_S = 600.0
LONGEST_TRAFFIC_S = 1800.0
"""Of KD_TRAFFIC_S: with what four servers take beside it, below the gate's time limit."""


def traffic_seconds() -> float:
    """How long the mixed traffic lasts: 600 s, or what KD_TRAFFIC_S says."""
    said = os.environ.get(_TRAFFIC_S) or f"{_FULL_TRAFFIC_S:g}"
    try:
        seconds = float(said)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= LONGEST_TRAFFIC_S:
        raise ConfigError(
            f"{_TRAFFIC_S}: expected seconds, up to {LONGEST_TRAFFIC_S:g}, got {said!r}",
            remedy="unset it for ten minutes",
        )
    return seconds


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
    lasting = traffic_seconds() if seconds is None else seconds
    least = _FULL_TRAFFIC_S if seconds is None else seconds
    prompts = mixed_prompts(scale.vocabulary, longest or scale.distinct, _PROMPTS, ctx.seed)
    chosen = (plain(), kernel(_NODES), kernel(33), triton(_NODES))
    longest_answer = scale.new_tokens + room_for_aborted(_NODES)
    expected: list[Answer] = []
    traffic: list[Traffic] = []
    moved: list[float] = []
    answered = threading.Event()
    broken: list[GateFailure] = []

    def then(turn: Turn) -> None:
        if turn.variant == plain():
            for first in range(0, len(prompts), max(scale.batches)):
                some = prompts[first : first + max(scale.batches)]
                answers = turn.service.answers(some, longest_answer, likely=LIKELY)
                if problem := incomplete(answers, longest_answer):
                    raise GateFailure(
                        FailureKind.TOKEN_MISMATCH,
                        f"{turn.variant.name}, prompts of traffic: {problem}",
                    )
                expected.extend(answers)
            answered.set()
            moved.append(
                traffic_rounding(
                    turn.service,
                    prompts,
                    expected,
                    seconds=lasting,
                    seed=ctx.seed,
                    note=turn.note,
                )
            )
        elif turn.variant == kernel(_NODES):
            while not answered.wait(1.0):  # beside this one, or long ago
                turn.note("waits for what no speculation says")
            try:
                traffic.append(
                    run_traffic(
                        turn.service,
                        prompts,
                        expected,
                        seconds=lasting,
                        bound=0.0,  # it is known when both have ended
                        seed=ctx.seed,
                        nodes=_NODES,
                        note=lambda text: turn.note(f"traffic: {text}"),
                    )
                )
            except GateFailure as failure:  # said at the end, with what the servers answered
                broken.append(failure)
            except ServiceFailed as error:
                broken.append(GateFailure(FailureKind.LAUNCH, f"traffic: {error}"))

    try:
        found = ask_servers(
            ctx,
            chosen,
            scale=scale,
            graphs=True,
            start=start,
            extra=_PADDED if scale.graphs else (),
            more=ARGUMENTS,
            environment=ENVIRONMENT,
            then=then,
        )
    except Exception as error:
        if broken:  # a leak, say, tells more than what another server died of
            raise broken[0] from error
        raise
    comparisons, bounds, figures = compared(found, scale=scale)
    bound = max(tie_bound(max(moved), scale.dtype), *bounds.values())
    comparisons += [mixed.comparison.judged_by(bound) for mixed in traffic]
    figures = [
        *figures_of(comparisons, bounds),
        *figures,
        Figure("traffic: rounding, log probability", max(moved), Unit.RATIO),
        Figure("traffic: gap that is a near-tie, log probability", bound, Unit.RATIO),
    ]
    for mixed in traffic:
        figures += [
            Figure("seconds of mixed traffic", round(mixed.seconds), Unit.COUNT),
            Figure("traffic: requests", mixed.requests, Unit.COUNT),
            Figure("traffic: aborted", mixed.aborted, Unit.COUNT),
            Figure("traffic: callers that hung up", mixed.hung_up, Unit.COUNT),
            Figure("traffic: KV slots leaked", 0, Unit.COUNT),  # or it would have failed
        ]
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
    for failure in broken:
        raise GateFailure(failure.kind, str(failure), figures)
    for mixed in traffic:
        demand_traffic(mixed, figures)
        if mixed.seconds < least:
            raise GateFailure(
                FailureKind.TIMEOUT,
                f"traffic: expected {least:g} s, got {mixed.seconds:.0f} s, as {_TRAFFIC_S} asks "
                "for: all else is right, and this is no pass",
                figures,
            )
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
