"""Mixed traffic on one of several servers, held against what no speculation says of its prompts."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from kdtree_engine.errors import ConfigError
from phases.gate import Context, FailureKind, Figure, GateFailure, Unit
from phases.service import Answer, ServiceFailed, incomplete
from phases.service_compared import Asked, Turn, ask_servers
from phases.service_scale import Scale, Start, Variant, plain
from phases.service_tokens import LIKELY, Comparison, tie_bound
from phases.service_traffic import (
    Traffic,
    demand_traffic,
    mixed_prompts,
    room_for_aborted,
    run_traffic,
    traffic_rounding,
)

__all__ = ["LONGEST_TRAFFIC_S", "MixedTraffic", "traffic_seconds"]

_PROMPTS = 32
_EVERY_S = 3.0
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


class MixedTraffic:
    """Traffic on the server of `variant`, whose reference is the server of `plain()`.

    seconds: of traffic, for a rehearsal; None, as a gate is run: `traffic_seconds`, and less than
        the full ten minutes fails it.
    most_rounding_s: of the same traffic on the reference, for what it moves its own tokens by, at
        most; None: as long as the traffic.
    longest: of the prompts, in tokens.
    during: what is done with the server every few seconds of the traffic. after: when the traffic
        has ended and its server still runs.
    """

    def __init__(
        self,
        ctx: Context,
        scale: Scale,
        variant: Variant,
        *,
        seconds: float | None,
        longest: int,
        most_rounding_s: float | None = None,
        during: Callable[[Turn], None] | None = None,
        after: Callable[[Turn, Sequence[Answer]], None] | None = None,
    ) -> None:
        assert variant.nodes is not None
        self._ctx, self._scale, self._variant = ctx, scale, variant
        self._nodes = variant.nodes
        self._seconds = traffic_seconds() if seconds is None else seconds
        self._least = _FULL_TRAFFIC_S if seconds is None else seconds
        self._rounding_s = min(self._seconds, most_rounding_s or self._seconds)
        self._during, self._after = during, after
        self._looked = 0.0
        self.prompts = mixed_prompts(scale.vocabulary, longest, _PROMPTS, ctx.seed)
        self._expected: list[Answer] = []
        self._answered = threading.Event()
        self._traffic: Traffic | None = None
        self._moved = 0.0
        self._broken: GateFailure | None = None

    def ask(
        self,
        chosen: Sequence[Variant],
        *,
        graphs: bool,
        start: Start,
        extra: Sequence[int] = (),
        more: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
    ) -> dict[Variant, Asked]:
        """`ask_servers`, with the traffic; `plain()` comes first, as all else is held against it.

        What went wrong in the traffic is kept for `demand`, but where another server died of it: it
        tells more than that.
        """
        try:
            return ask_servers(
                self._ctx,
                chosen,
                scale=self._scale,
                graphs=graphs,
                start=start,
                extra=extra,
                more=more,
                environment=environment,
                then=self._then,
            )
        except Exception as error:
            if self._broken is not None:
                raise self._broken from error
            raise

    def judged(self, bounds: Mapping[int, float]) -> tuple[list[Comparison], list[Figure]]:
        """The traffic's comparison, none where it broke, and its figures.

        What is a near-tie in it is what rounding does there, and no less than any of `bounds`.
        """
        bound = max(tie_bound(self._moved, self._scale.dtype), *bounds.values())
        figures = [
            Figure("traffic: rounding, log probability", self._moved, Unit.RATIO),
            Figure("traffic: gap that is a near-tie, log probability", bound, Unit.RATIO),
        ]
        mixed = self._traffic
        if mixed is None:
            return [], figures
        figures += [
            Figure("seconds of mixed traffic", round(mixed.seconds), Unit.COUNT),
            Figure("traffic: requests", mixed.requests, Unit.COUNT),
            Figure("traffic: aborted", mixed.aborted, Unit.COUNT),
            Figure("traffic: callers that hung up", mixed.hung_up, Unit.COUNT),
            Figure("traffic: KV slots leaked", 0, Unit.COUNT),  # or it would have failed
        ]
        return [mixed.comparison.judged_by(bound)], figures

    def demand(self, figures: Sequence[Figure]) -> None:
        """Raises GateFailure where the traffic broke, was not mixed, or was too short."""
        if self._broken is not None:
            raise GateFailure(self._broken.kind, str(self._broken), figures)
        assert self._traffic is not None
        demand_traffic(self._traffic, figures)
        if self._traffic.seconds < self._least:
            raise GateFailure(
                FailureKind.TIMEOUT,
                f"traffic: expected {self._least:g} s, got {self._traffic.seconds:.0f} s, as "
                f"{_TRAFFIC_S} asks for: all else is right, and this is no pass",
                figures,
            )

    def _then(self, turn: Turn) -> None:
        if turn.variant == plain():
            self._answer(turn)
        elif turn.variant == self._variant:
            while not self._answered.wait(1.0):  # beside this one, or long ago
                turn.note("waits for what no speculation says")
            self._run(turn)

    def _answer(self, turn: Turn) -> None:
        longest_answer = self._scale.new_tokens + room_for_aborted(self._nodes)
        most = max(self._scale.batches)
        for first in range(0, len(self.prompts), most):
            some = self.prompts[first : first + most]
            answers = turn.service.answers(some, longest_answer, likely=LIKELY)
            if problem := incomplete(answers, longest_answer):
                raise GateFailure(
                    FailureKind.TOKEN_MISMATCH,
                    f"{turn.variant.name}, prompts of traffic: {problem}",
                )
            self._expected.extend(answers)
        self._answered.set()
        self._moved = traffic_rounding(
            turn.service,
            self.prompts,
            self._expected,
            seconds=self._rounding_s,
            seed=self._ctx.seed,
            note=turn.note,
        )

    def _note(self, turn: Turn, text: str) -> None:
        turn.note(f"traffic: {text}")
        if self._during is not None and time.monotonic() - self._looked > _EVERY_S:
            self._looked = time.monotonic()
            self._during(turn)

    def _run(self, turn: Turn) -> None:
        try:
            self._traffic = run_traffic(
                turn.service,
                self.prompts,
                self._expected,
                seconds=self._seconds,
                bound=0.0,  # it is known when both have ended
                seed=self._ctx.seed,
                nodes=self._nodes,
                note=lambda text: self._note(turn, text),
            )
            if self._after is not None:
                self._after(turn, self._expected)
        except GateFailure as failure:  # said at the end, with what the servers answered
            self._broken = failure
        except ServiceFailed as error:
            self._broken = GateFailure(FailureKind.LAUNCH, f"traffic: {error}")
