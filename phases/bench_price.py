"""`kd bench price`: what the gate `run-length-price` times, without the gates that come before it.

A gate of speed waits until its phase is correct on the same host, and phase 6 takes SGLang for
that. What runs cost the kernel does not depend on it. Here each output is checked as in the gate;
what comes out is no evidence.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Sequence

from kdtree_engine.atomic import write_atomically
from kdtree_engine.machine import Machine
from phases.checkout import Checkout
from phases.evidence import FigureRecord, new_run_id, now
from phases.gate import Context, Figure
from phases.p6_defrag_tier0.price import PLAN, run_length_price
from phases.p6_defrag_tier0.price_figures import price_series, price_series_json
from phases.runner import engine_environment

__all__ = ["COLUMNS", "bench_price", "rows"]

COLUMNS = (
    *("operation", "tokens", "within slots", "contiguous us", "apart"),
    *(f"runs of {length}" for length in PLAN.run_lengths),
)

Measure = Callable[[Context], Sequence[Figure]]


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

    Raises what the gate does: GateFailure where an output was wrong, ImplausibleTiming for a time
    that cannot be true, MissingError where the GPU's memory is too small.
    """
    started = now().isoformat()
    figures = list(measure(Context(seed=seed, scratch=checkout.scratch, progress=progress)))
    run = new_run_id()
    revision, dirty = checkout.revision()
    document = {
        "version": 1,
        "run": run,
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
    file = checkout.state / "bench" / f"{run}.json"
    write_atomically(file, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
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
