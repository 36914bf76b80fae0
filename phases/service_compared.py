"""Servers one after the other, asked the same, and their tokens compared.

Both phases that serve do this: eager in phase 3, in graphs in phase 4. A server costs its start,
so each is started once and asked everything that is to be known of it.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence

from phases.candidates import require_current_library
from phases.gate import Context, FailureKind, Figure, GateFailure, Unit
from phases.service import Answer, Service, failures_in, plain_text, serving
from phases.service_scale import Scale, Start, Variant, kernel, launched, plain
from phases.service_tokens import (
    LIKELY,
    Comparison,
    Key,
    ask_all,
    compare,
    rounding,
    tie_bounds,
)

__all__ = ["LAYERS", "Asked", "ask_servers", "compared", "saying"]

LAYERS = 2
"""Of the model whose tokens are compared: what prefills 200,000 tokens on each server."""
_BACKEND = kernel(1).backend
_SERVES = f"{_BACKEND}: SGLang "


@dataclasses.dataclass(frozen=True)
class Asked:
    """What one server answered, and its log: `log` when it had answered, `whole` when it ended."""

    variant: Variant
    answers: Mapping[Key, Answer]
    log: str
    whole: str = ""


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
    then: Callable[[Variant, Service, Mapping[Variant, Asked]], None] | None = None,
) -> dict[Variant, Asked]:
    """Start each server, ask it the prompts of `scale`, and do `then` before it ends.

    Raises GateFailure where the kernel library is not what csrc as it is makes, where a server's
    log says that a plugin failed, or where one that was asked for the kernel does not say in its
    line that trees are verified on it.
    """
    require_current_library(scale.device)
    model = scale.write_model(ctx.scratch / "model", ctx.seed, scale.vocabulary, LAYERS)
    found: dict[Variant, Asked] = {}
    for number, variant in enumerate(chosen):
        ctx.progress(number, len(chosen), f"{variant.name}: starts")
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
                note=saying(ctx, number, len(chosen), variant.name),
            )
            found[variant] = Asked(variant, answers, plain_text(log))
            if then is not None:
                then(variant, service, found)
        _log_is_well(variant, log)
        found[variant] = dataclasses.replace(found[variant], whole=plain_text(log))
    return found


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


def _log_is_well(variant: Variant, log: pathlib.Path) -> None:
    text = plain_text(log)
    # SGLang says "Failed to" of much that a host need not have; a plugin is what is asked for here.
    failures = [
        line for line in failures_in(text) if "plugin" in line.lower() or "hook" in line.lower()
    ]
    if failures:
        raise GateFailure(FailureKind.LAUNCH, f"{variant.name}: its log says: {failures[0]}")
    if variant.backend != _BACKEND:
        return
    said = [line for line in text.splitlines() if _SERVES in line]
    if not said or not all("verify: kernel" in line for line in said):
        raise GateFailure(
            FailureKind.LAUNCH,
            f"{variant.name}: expected a line with '{_SERVES}' and 'verify: kernel', got {said}",
        )
