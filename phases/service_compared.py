"""Servers one after the other, asked the same, and their tokens compared.

Both phases that serve do this: eager in phase 3, in graphs in phase 4. A server costs its start,
so each is started once and asked everything that is to be known of it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence

from phases.candidates import require_current_library
from phases.gate import Context, FailureKind, Figure, GateFailure, Unit
from phases.service import Answer, Service, failures_in, plain_text, serving
from phases.service_scale import Scale, Start, Variant, decoding, launched, plain
from phases.service_tokens import (
    LIKELY,
    Comparison,
    Key,
    ask_all,
    compare,
    rounding,
    tie_bounds,
)

__all__ = ["LAYERS", "Asked", "Turn", "ask_servers", "compared", "log_is_well", "saying"]

LAYERS = 2
"""Of the model whose tokens are compared: what prefills 200,000 tokens on each server."""
_BACKEND = decoding().backend
_SERVES = f"{_BACKEND}: SGLang "
_ON_KERNEL = "verify: kernel; decode: kernel"


@dataclasses.dataclass(frozen=True)
class Asked:
    """What one server answered, and its log: `log` when it had answered, `whole` when it ended."""

    variant: Variant
    answers: Mapping[Key, Answer]
    log: str
    whole: str = ""


@dataclasses.dataclass(frozen=True)
class Turn:
    """A server that has answered and still runs.

    note: tells its progress, and raises where another server has failed: so call it often.
    """

    variant: Variant
    service: Service
    note: Callable[[str], None]


def ask_servers(
    ctx: Context,
    chosen: Sequence[Variant],
    *,
    scale: Scale,
    graphs: bool,
    start: Start = serving,
    extra: Sequence[int] = (),
    more: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
    then: Callable[[Turn], None] | None = None,
) -> dict[Variant, Asked]:
    """Start each server, ask it the prompts of `scale`, and do `then` before it ends.

    They run one after the other, or all at once where `scale` says so, as nothing is timed.

    Raises GateFailure where the kernel library is not what csrc as it is makes, where a server's
    log says that a plugin failed, or where one that was asked for the kernel does not say in its
    line that it verifies and decodes on it. Of several failures it is the first one's; the other
    servers end at their next request.
    """
    require_current_library(scale.device)
    model = scale.write_model(ctx.scratch / "model", ctx.seed, scale.vocabulary, LAYERS)
    together = _Together(ctx, chosen)

    def ask(variant: Variant) -> Asked:
        note = together.note(variant)
        note("starts")
        log = ctx.scratch / f"{variant.name}.log"
        with launched(
            scale,
            variant,
            model=model,
            log=log,
            start=start,
            graphs=graphs,
            more=more,
            environment=environment,
        ) as service:
            answers = ask_all(
                service,
                scale,
                seed=ctx.seed,
                likely=LIKELY if variant == plain() else 0,
                extra=extra,
                note=note,
            )
            asked = Asked(variant, answers, plain_text(log))
            if then is not None:
                then(Turn(variant, service, note))
            together.done[variant].set_result(asked)
        log_is_well(variant, plain_text(log))
        return dataclasses.replace(asked, whole=plain_text(log))

    return together.run(ask, at_once=len(chosen) if scale.side_by_side else 1)


class _Together:
    """Servers that may be asked at the same time, and end together where one of them fails.

    done: what each answered, once its turn is over.
    """

    def __init__(self, ctx: Context, chosen: Sequence[Variant]) -> None:
        self.done: dict[Variant, concurrent.futures.Future[Asked]] = {
            variant: concurrent.futures.Future() for variant in chosen
        }
        self._ctx = ctx
        self._lock = threading.Lock()
        self._failed: list[BaseException] = []

    def run(self, ask: Callable[[Variant], Asked], *, at_once: int) -> dict[Variant, Asked]:
        """`ask` of each variant; raises what the first one raised."""

        def guarded(variant: Variant) -> Asked:
            try:
                return ask(variant)
            except BaseException as error:
                self._fail(error)
                if not self.done[variant].done():
                    self.done[variant].set_exception(error)
                raise

        with concurrent.futures.ThreadPoolExecutor(max_workers=at_once) as pool:
            asked = {variant: pool.submit(guarded, variant) for variant in self.done}
            try:
                concurrent.futures.wait(asked.values())
            except BaseException as error:  # Ctrl-C ends the servers as a failure does
                self._fail(error)
                raise
        if self._failed:
            raise self._failed[0]
        return {variant: one.result() for variant, one in asked.items()}

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failed.append(error)

    def note(self, variant: Variant) -> Callable[[str], None]:
        """What tells the progress of one server, and ends it where another has failed."""

        def say(text: str) -> None:
            with self._lock:
                if self._failed:
                    raise _Ended(f"{variant.name}: ended, as another server failed")
                ended = sum(one.done() for one in self.done.values())
                self._ctx.progress(ended, len(self.done), f"{variant.name}: {text}")

        return say


class _Ended(Exception):
    """Of a server whose fate another one decided."""


def saying(ctx: Context, number: int, total: int, what: str = "") -> Callable[[str], None]:
    """What tells the progress of server `number` of a gate."""
    before = f"{what}: " if what else ""
    return lambda text: ctx.progress(number, total, f"{before}{text}")


def compared(
    found: Mapping[Variant, Asked], *, scale: Scale
) -> tuple[list[Comparison], dict[int, float], list[Figure]]:
    """Every server against the one without speculation; the bounds; figures of the reference.

    Raises GateFailure where no tree was ever accepted or none was ever refused: then trees were not
    tried.
    """
    reference = found[plain()].answers
    noise = rounding(reference)
    bounds = tie_bounds(noise, scale.dtype)
    comparisons = []
    for variant, asked in found.items():
        if variant == plain():
            continue
        stock = variant.backend != _BACKEND
        one = compare(variant.name, asked.answers, reference, bounds, stock=stock)
        if variant.nodes is not None and not 1 < one.accept_length < variant.nodes:
            raise GateFailure(
                FailureKind.TOKEN_MISMATCH,
                f"{one.what}: a verification gave {one.accept_length:.2f} tokens on average, "
                f"expected more than 1 and less than {variant.nodes}: its trees were not tried",
            )
        comparisons.append(one)
    return (
        comparisons,
        bounds,
        [
            Figure(f"rounding at {length}, log probability", one, Unit.RATIO)
            for length, one in noise.items()
        ],
    )


def log_is_well(variant: Variant, text: str) -> None:
    """Raises GateFailure where a plugin failed, or not all of a variant is on its kernel.

    text: the server's log. KDTREE_ variables of whoever runs the gate reach the server too.
    """
    # SGLang says "Failed to" of much that a host need not have; a plugin is what is asked for here.
    failures = [
        line for line in failures_in(text) if "plugin" in line.lower() or "hook" in line.lower()
    ]
    if failures:
        raise GateFailure(FailureKind.LAUNCH, f"{variant.name}: its log says: {failures[0]}")
    if variant.backend != _BACKEND:
        return
    said = [line for line in text.splitlines() if _SERVES in line]
    if not said or not all(_ON_KERNEL in line for line in said):
        raise GateFailure(
            FailureKind.LAUNCH,
            f"{variant.name}: expected a line with '{_SERVES}' and '{_ON_KERNEL}', got {said}",
        )
