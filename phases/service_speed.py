"""Decode speed of a running server, from outside: tokens a second of one request.

The time of a short answer is taken from that of a long one to the same prompt, which the server has
in its cache: what stays is decoding, without prefill and HTTP. Before anything is timed the long
answer is asked for once, so that the n-gram drafter has seen it: then trees of every server hold
the same continuation, and the servers accept about as many tokens at a step. Where they do not, a
comparison of speeds must look at the step too, and always at the tokens: a server that answers
something else does other work. No ceiling of near-ties holds for them, as there are too few answers
to count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from phases.candidates import require_current_library
from phases.gate import Context, FailureKind, Figure, GateFailure, Unit
from phases.service import (
    Answer,
    Service,
    ServiceFailed,
    Tokens,
    incomplete,
    plain_text,
    serving,
)
from phases.service_compared import log_is_well, saying
from phases.service_graphs import Capture, capture_in
from phases.service_scale import Scale, Start, Variant, decoding, kernel, launched, plain, triton
from phases.service_tokens import LIKELY, Difference, compare_answer, draw_prompts, tie_bound
from phases.side_by_side import entered

__all__ = [
    "LAYERS",
    "NEW_TOKENS",
    "Served",
    "Speed",
    "decode_speed",
    "demand_tokens",
    "differences",
    "judged_speeds",
    "measure",
    "measure_all",
    "ratio",
    "speed_bound",
    "speed_figures",
    "step_ratio",
]

LAYERS = 4
"""Of the model that is timed, as in the stock figures of plan 13."""
NEW_TOKENS = 256

_SHORT = 2


@dataclasses.dataclass(frozen=True)
class Speed:
    """tokens_per_second: of decoding. accept_length: tokens that a verification gave, or 0.

    answer: of the first pass, untimed. timed: the other tokens that timed passes gave, if any.
    """

    length: int
    tokens_per_second: float
    accept_length: float
    answer: Answer
    timed: tuple[Tokens, ...] = ()

    @property
    def step_seconds(self) -> float:
        """Of one verification with all that goes with it; 0 without speculation."""
        return self.accept_length / self.tokens_per_second


def decode_speed(
    service: Service, prompt: Tokens, *, new_tokens: int, repeats: int = 3, likely: int = 0
) -> Speed:
    """By the fastest of `repeats` passes; the answer is that of the first pass, untimed.

    Verifications are counted in the pass that was the fastest: a drafter that has seen a text once
    more accepts more of it, so those of another pass would belong to another time.

    likely: as in `Service.answers`, of the untimed answer alone.
    Raises ServiceFailed where an answer is not as many tokens as were asked for, or where the long
    one takes no longer than the short one, or no more verifications.
    """
    passes = _Passes(service, prompt, new_tokens, likely)
    for _ in range(repeats):
        passes.time_one()
    return passes.speed()


class _Passes:
    """The timed passes of one prompt on one server; the untimed one is made with it."""

    def __init__(self, service: Service, prompt: Tokens, new_tokens: int, likely: int) -> None:
        self._service, self._prompt, self._new_tokens = service, prompt, new_tokens
        self._first = _one(service, prompt, _SHORT + new_tokens, likely)
        self._timed: dict[Tokens, None] = {}
        self._fastest: dict[int, tuple[float, int]] = {}
        """By the tokens of an answer: seconds, and the verifications of the same pass."""

    def time_one(self) -> None:
        """One pass: a short answer and a long one."""
        for count in (_SHORT, _SHORT + self._new_tokens):
            begun = time.perf_counter()
            answer = _one(self._service, self._prompt, count)
            one = (time.perf_counter() - begun, answer.verified)
            self._fastest[count] = min(one, self._fastest.get(count, one))
            if answer.tokens != self._first.tokens[:count]:
                self._timed[answer.tokens] = None

    def speed(self) -> Speed:
        """Of the fastest pass so far. Raises ServiceFailed where nothing was decoded in it."""
        long = _SHORT + self._new_tokens
        (seconds, verified), (before_seconds, before) = self._fastest[long], self._fastest[_SHORT]
        taken = seconds - before_seconds
        if taken <= 0:
            raise ServiceFailed(f"{long} tokens took no longer than {_SHORT}: nothing was decoded")
        # The first token of an answer comes from the prefill.
        accepted = (long - 1) / verified if verified else 0.0
        # A short answer's one verification gives more than it is asked for, which is thrown away:
        # so what the rest took is counted in verifications, and not in tokens.
        decoded = accepted * (verified - before) if verified else self._new_tokens
        if decoded <= 0:
            raise ServiceFailed(
                f"{long} tokens took {verified} verifications and {_SHORT} took {before}, expected "
                "more: nothing was decoded; ask for more new tokens"
            )
        return Speed(len(self._prompt), decoded / taken, accepted, self._first, tuple(self._timed))


def _one(service: Service, prompt: Tokens, count: int, likely: int = 0) -> Answer:
    """The one answer. Raises ServiceFailed where it is not `count` tokens."""
    answers = service.answers([prompt], count, likely=likely)
    if problem := incomplete(answers, count):
        raise ServiceFailed(f"a prompt of {len(prompt)} tokens: {problem}")
    (answer,) = answers
    return answer


@dataclasses.dataclass(frozen=True)
class Served:
    """One server, measured. start_seconds: until it was healthy, graphs and compilers included.

    graph_bytes: what the scheduler says that its graphs hold.
    """

    variant: Variant
    start_seconds: float
    capture: Capture
    graph_bytes: float
    speeds: tuple[Speed, ...] = ()

    def at(self, length: int) -> Speed | None:
        """The speed at a prompt length, where it was measured."""
        return next((speed for speed in self.speeds if speed.length == length), None)


def measure(
    scale: Scale,
    variant: Variant,
    *,
    folder: pathlib.Path,
    seed: int,
    graphs: bool,
    lengths: Sequence[int],
    start: Start = serving,
    new_tokens: int = NEW_TOKENS,
    repeats: int | None = None,
    keep: Callable[[Served], None] = lambda served: None,
    note: Callable[[str], None] = lambda text: None,
) -> Served:
    """One server and its speed at each length. The reference also tells its likely tokens.

    repeats: of each timed answer; None: as often as `scale` says.
    folder: holds the model, which the first of several measurements writes, and the logs.
    keep: called after each length, with what there is.
    """
    _write_model(scale, folder, seed)
    note(f"{variant.name}: starts")
    with _started(scale, variant, folder=folder, graphs=graphs, start=start) as (service, served):
        keep(served)
        for length in lengths:
            note(f"{variant.name}: {length} tokens")
            (prompt,) = draw_prompts(scale, length, 1, seed)
            speed = decode_speed(
                service,
                prompt,
                new_tokens=new_tokens,
                repeats=repeats or scale.passes,
                likely=LIKELY if variant == plain() else 0,
            )
            served = dataclasses.replace(served, speeds=(*served.speeds, speed))
            keep(served)
    return served


def _model(folder: pathlib.Path) -> pathlib.Path:
    return folder / f"model-{LAYERS}"


def _log(folder: pathlib.Path, variant: Variant) -> pathlib.Path:
    return folder / f"{variant.name}.log"


def _write_model(scale: Scale, folder: pathlib.Path, seed: int) -> None:
    if not _model(folder).is_dir():
        scale.write_model(_model(folder), seed, scale.vocabulary, LAYERS)


@contextlib.contextmanager
def _started(
    scale: Scale,
    variant: Variant,
    *,
    folder: pathlib.Path,
    graphs: bool,
    start: Start,
) -> Iterator[tuple[Service, Served]]:
    """A server that can be timed, and what is known of it before."""
    log = _log(folder, variant)
    begun = time.monotonic()
    with launched(
        scale,
        variant,
        model=_model(folder),
        log=log,
        start=start,
        graphs=graphs,
        at_once=1,
    ) as service:
        yield (
            service,
            Served(
                variant,
                start_seconds=time.monotonic() - begun,
                capture=capture_in(plain_text(log)),
                graph_bytes=service.load().graph_bytes,
            ),
        )


def measure_all(
    ctx: Context,
    chosen: Sequence[Variant],
    *,
    scale: Scale,
    graphs: bool,
    lengths: Sequence[int],
    start: Start,
    new_tokens: int,
) -> list[Served]:
    """Each variant of a speed gate, by turns: a pass of each, then the next pass of each.

    A step is the host's as much as the GPU's, and a host is now faster and now slower. One server
    after the other, that would fall to one of them; so all run until the end, and those that are
    not asked sleep. They start one after the other where graphs are captured, as what a capture
    takes is on record; else at once, where `scale` has them side by side.

    Raises GateFailure where the kernel library is not what csrc as it is makes, or where a server's
    log says that it was not on its kernel.
    """
    require_current_library(scale.device)
    _write_model(scale, ctx.scratch, ctx.seed)
    ctx.progress(0, len(lengths), f"{len(chosen)} servers start")
    servers = [
        _started(scale, variant, folder=ctx.scratch, graphs=graphs, start=start)
        for variant in chosen
    ]
    with entered(servers, at_once=scale.side_by_side and not graphs) as begun:
        for variant in chosen:
            log_is_well(variant, plain_text(_log(ctx.scratch, variant)))
        speeds: list[list[Speed]] = [[] for _ in chosen]
        for number, length in enumerate(lengths):
            note = saying(ctx, number, len(lengths))
            (prompt,) = draw_prompts(scale, length, 1, ctx.seed)
            passes = []
            for service, served in begun:
                note(f"{served.variant.name}: {length} tokens")
                likely = LIKELY if served.variant == plain() else 0
                passes.append(_Passes(service, prompt, new_tokens, likely))
            note(f"{length} tokens: {scale.passes} passes of each server")
            for _ in range(scale.passes):
                for one in passes:
                    one.time_one()
            for found, one in zip(speeds, passes, strict=True):
                found.append(one.speed())
    return [
        dataclasses.replace(served, speeds=tuple(found))
        for (_, served), found in zip(begun, speeds, strict=True)
    ]


def speed_bound(scale: Scale) -> float:
    """What is a near-tie of timed answers.

    Rounding is not measured here, as it is where tokens are judged; so what it is at least counts
    twice.
    """
    return 2 * tie_bound(0, scale.dtype)


def differences(served: Served, reference: Served, bound: float) -> list[Difference]:
    """Where a server's answers, timed ones too, leave the reference's to the same prompt."""
    found = []
    for speed in served.speeds:
        if (other := reference.at(speed.length)) is None:
            continue
        where = f"{served.variant.name} L={speed.length}"
        answers = [(where, speed.answer.tokens)]
        answers += [(f"{where} timed", tokens) for tokens in speed.timed]
        for place, tokens in answers:
            # A timed answer may be a short one. That it is as long as was asked for is known.
            wanted = dataclasses.replace(other.answer, tokens=other.answer.tokens[: len(tokens)])
            _, one = compare_answer(place, tokens, wanted, bound)
            found += [one] if one else []
    return found


def demand_tokens(
    served: Served, reference: Served, bound: float, figures: Sequence[Figure] = ()
) -> None:
    """Raises GateFailure where a server was timed at other tokens than the reference's."""
    wrong = [one for one in differences(served, reference, bound) if not one.near_tie]
    if wrong:
        raise GateFailure(
            FailureKind.TOKEN_MISMATCH,
            f"{len(wrong)} timed answers differ beyond rounding; {wrong[0]}",
            figures,
        )


def speed_figures(served: Served) -> list[Figure]:
    """What a speed gate keeps of one server: tok/s, accepted tokens and step at each length."""
    name = served.variant.name
    return [
        *(
            Figure(f"{name} at {one.length}", one.tokens_per_second, Unit.TOKENS_PER_SECOND)
            for one in served.speeds
        ),
        *(
            Figure(f"{name} accepts at {one.length}", one.accept_length, Unit.RATIO)
            for one in served.speeds
        ),
        *(
            Figure(f"{name} step at {one.length}", 1e6 * one.step_seconds, Unit.MICROSECONDS)
            for one in served.speeds
            if one.step_seconds
        ),
    ]


def ratio(ours: Served, other: Served, length: int) -> float | None:
    """How many times as fast `ours` decodes at a length; None where one was not measured."""
    one, two = ours.at(length), other.at(length)
    return one.tokens_per_second / two.tokens_per_second if one and two else None


def _untried(served: Served, nodes: int) -> str | None:
    """Where a server with trees of `nodes` did not accept as such a server does; None: nowhere."""
    for one in served.speeds:
        if not 1 < one.accept_length <= nodes:
            return (
                f"at {one.length} tokens {served.variant.name} accepts {one.accept_length:.2f} "
                f"tokens a verification, expected more than 1 and at most {nodes}: its trees were "
                "not tried"
            )
    return None


def step_ratio(ours: Served, other: Served, length: int) -> float:
    """How many times as fast `ours` verifies a tree at a length; 0 where one verifies none.

    Tokens a second alone would count a drafter's luck too: an answer that comes out otherwise from
    time to time, as stock Triton's do, leaves several texts with the drafter, and less is accepted.
    """
    one, two = ours.at(length), other.at(length)
    if one is None or two is None or not (one.step_seconds and two.step_seconds):
        return 0.0
    return two.step_seconds / one.step_seconds


def judged_speeds(
    ctx: Context,
    *,
    nodes: int,
    scale: Scale,
    graphs: bool,
    lengths: Sequence[int],
    start: Start,
    new_tokens: int,
    times_triton: Mapping[int, float],
    times_plain: Mapping[int, float],
    decode_times_plain: Mapping[int, float],
) -> list[Figure]:
    """A speed gate: trees on the kernel, on Triton, and no speculation on both, in one run.

    times_triton, times_plain: how many times as fast as those the kernel's trees must be, by
        length. Trees on Triton are held against by tokens a second and by verifications a second.
    decode_times_plain: how many times as fast as no speculation on Triton it must be on the kernel.
    Raises GateFailure where it is slower, or was timed at other tokens than the reference's.
    """
    chosen = (kernel(nodes), plain(), triton(nodes), decoding())
    ours, alone, stock, decodes = measure_all(
        ctx,
        chosen,
        scale=scale,
        graphs=graphs,
        lengths=lengths,
        start=start,
        new_tokens=new_tokens,
    )
    against = (("triton", stock, times_triton), ("no speculation", alone, times_plain))
    figures = [
        Figure(f"times {what} at {length}", ratio(ours, other, length) or 0.0, Unit.SPEEDUP)
        for length in reversed(lengths)
        for what, other, _ in against
    ]
    figures += [
        Figure(f"plain decode: times triton at {length}", times, Unit.SPEEDUP)
        for length in reversed(lengths)
        for times in (ratio(decodes, alone, length) or 0.0,)
    ]
    for served in (ours, alone, stock, decodes):
        figures += speed_figures(served)
        if graphs:
            name = served.variant.name
            figures += [
                Figure(f"{name}: capture", served.capture.seconds, Unit.SECONDS),
                Figure(f"{name}: capture memory", served.capture.memory_bytes, Unit.BYTES),
            ]
    for served in (ours, decodes):
        demand_tokens(served, alone, speed_bound(scale), figures)
    for served in (ours, stock):
        if problem := _untried(served, nodes):
            raise GateFailure(FailureKind.TOKEN_MISMATCH, problem, figures)
    missed = [
        f"at {length} tokens {reached:.2f} times as fast as {what}{how}, expected {bar:g}"
        for what, other, bars in against
        for length, bar in bars.items()
        for how, reached in (
            ("", ratio(ours, other, length) or 0.0),
            *(((" by the step", step_ratio(ours, other, length)),) if other is stock else ()),
        )
        if not reached >= bar
    ]
    missed += [
        f"at {length} tokens {reached:.2f} times as fast as triton's plain decode, expected {bar:g}"
        for length, bar in decode_times_plain.items()
        for reached in (ratio(decodes, alone, length) or 0.0,)
        if not reached >= bar
    ]
    if missed:
        raise GateFailure(FailureKind.TOO_SLOW, "; ".join(missed), figures)
    return figures
