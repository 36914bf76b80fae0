"""`kd bench price`: what the gate `run-length-price` times, without the gates that come before it.

A gate of speed waits until its phase is correct on the same host, and phase 6 takes SGLang for
that. What runs cost the kernel does not depend on it. Here each output is checked as in the gate;
what comes out is no evidence.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Protocol

from kdtree_engine.atomic import write_atomically
from kdtree_engine.machine import Machine
from phases.checkout import Checkout
from phases.evidence import FigureRecord, new_run_id, now
from phases.gate import Context, Figure
from phases.p5_tuning.price import PLAN, run_length_price
from phases.p5_tuning.price_figures import price_series, price_series_json
from phases.runner import engine_environment

__all__ = ["COLUMNS", "bench_price", "rows"]

COLUMNS = (
    *("operation", "tokens", "within slots", "contiguous us", "apart"),
    *(f"runs of {length}" for length in PLAN.run_lengths),
)

Keep = Callable[[Sequence[Figure]], None]


class Measure(Protocol):
    """What is timed: `run_length_price`, which calls `keep` with the figures so far."""

    def __call__(self, ctx: Context, /, *, keep: Keep) -> Sequence[Figure]: ...


def bench_price(
    *,
    seed: int,
    checkout: Checkout,
    machine: Machine,
    command: Sequence[str],
    progress: Callable[[int, int, str], None],
    measure: Measure = run_length_price,
) -> tuple[list[Figure], pathlib.Path]:
    """The figures of the gate, and the file that holds them beside what they say by run length.

    The file is written after each series, so that one which fails leaves those before it; `whole`
    in it is true once all are there.

    Raises what the gate does: GateFailure where an output was wrong, ImplausibleTiming for a time
    that cannot be true, MissingError where the GPU's memory is too small.
    """
    run, started = new_run_id(), now().isoformat()
    revision, dirty = checkout.revision()
    file = checkout.state / "bench" / f"{run}.json"

    def write(figures: Sequence[Figure], whole: bool) -> None:
        document = {
            "version": 1,
            "run": run,
            "whole": whole,
            "command": list(command),
            "started": started,
            "seed": seed,
            "revision": revision,
            "dirty": dirty,
            "machine": machine.as_json(),
            "environment": engine_environment(),
            "series": price_series_json(price_series(figures)),
            "figures": [FigureRecord.of(figure).model_dump(mode="json") for figure in figures],
        }
        write_atomically(file, json.dumps(document, indent=1, ensure_ascii=False) + "\n")

    ctx = Context(seed=seed, scratch=checkout.scratch, progress=progress)
    figures = list(measure(ctx, keep=lambda figures: write(figures, False)))
    write(figures, True)
    return figures, file


def rows(figures: Sequence[Figure]) -> list[tuple[str, ...]]:
    """A row for each series: the contiguous time, its noise, and the price of each run length."""
    named = {figure.name: figure.value for figure in figures}
    found = []
    for one in price_series(figures):
        noise = named[f"{one.operation}, {one.tokens} tokens, contiguous: its times apart by"]
        prices = one.price_us
        found.append(
            (
                *(one.operation, str(one.tokens), str(one.within)),
                *(f"{one.contiguous_us:.1f}", f"{noise:.2f}"),
                *(f"{prices[n]:+.2f}" if n in prices else "" for n in PLAN.run_lengths),
            )
        )
    return found
