"""Fragmentation of the KV pool: runs of a request's slots over time, by allocation policy."""

from __future__ import annotations

from typing import Any

import pydantic

from phases.bench_frag import Churned, FragBench, over_time, time_columns
from phases.p5_tuning.price_figures import price_series
from phases.reporting.kept import Document, Kept, documents
from phases.reporting.model import (
    Block,
    Headline,
    Line,
    Lines,
    Missing,
    Section,
    Table,
    Text,
    number,
)

__all__ = ["FOLDER", "slots_headline", "slots_section"]

FOLDER = "frag"
RUNS, PRICE, DEFERRAL = "runs-per-request", "run-length-price", "deferral-figures"
_SIDES = ("stock", "tier0")
_MEASURES = (
    ("mean runs of a long request", "mean runs, {}"),
    ("runs in the worst tenth", "worst tenth, {}"),
    ("mean run length, slots", "mean run length, {}"),
)


class _Live(pydantic.BaseModel):
    """Requests that are running at a sample; some of them are long."""

    requests: int = pydantic.Field(ge=0)
    mean_runs: float = pydantic.Field(ge=0, allow_inf_nan=False)


class _Sample(pydantic.BaseModel):
    arrived: int = pydantic.Field(ge=0)
    long: _Live


class _Policy(pydantic.BaseModel):
    policy: str
    samples: tuple[_Sample, ...]


class _Bench(pydantic.BaseModel):
    """What is read of a document of `kd bench frag`."""

    seed: int
    requests: int = pydantic.Field(gt=0)
    traffic: dict[str, Any]
    settings: dict[str, Any]
    sglang: str | None = None
    policies: tuple[_Policy, ...] = pydantic.Field(min_length=1)


def slots_section(kept: Kept) -> Section:
    found, broken = documents(kept, FOLDER, _Bench)
    blocks: list[Block] = []
    for one in found:
        blocks += [_lines(one), Text((_traffic(one.content),))]
    if not found:
        blocks.append(Missing("runs over time", "no run of kd bench frag is kept"))
    blocks.append(_stock_and_tier0(kept) or Missing(f"{RUNS}, figures", kept.why_not(RUNS)))
    blocks += _price(kept) or [
        Missing("what scattered slots cost the kernel on a GPU", kept.why_not(PRICE))
    ]
    if kept.measured(DEFERRAL) is None:
        blocks.append(Missing("the figures of the deferral of Tier 1", kept.why_not(DEFERRAL)))
    return Section(
        "fragmentation",
        "Fragmentation over time",
        "A run is a piece of a request's KV slots that lies in one piece in the pool; a long "
        "request has 16,384 tokens or more. Requests come and go on SGLang's own allocator and "
        "prefix cache, on a CPU: how slots lie does not hang on a GPU, what that costs does.",
        (*blocks, *broken),
    )


def slots_headline(kept: Kept) -> Headline | None:
    one = kept.measured(RUNS)
    if one is None or not {f"mean runs, {side}" for side in _SIDES} <= one.figures.keys():
        return None
    stock, tier0 = (one.figures[f"mean runs, {side}"] for side in _SIDES)
    told = f"KV runs of a long request under churn, stock's {number(stock)}"
    return Headline(number(tier0), told, "fragmentation", one.source)


def _lines(one: Document[_Bench]) -> Lines | Missing:
    content = one.content
    bench = FragBench(
        content.seed,
        content.traffic,
        content.settings,
        content.requests,
        content.sglang,
        [
            Churned(part.policy, [sample.model_dump() for sample in part.samples], {})
            for part in content.policies
        ],
    )
    rows = over_time(bench, points=20)
    lines = (
        Line(
            name,
            tuple((float(row[0]), float(row[at])) for row in rows if row[at] and float(row[at])),
        )
        for at, name in enumerate(time_columns(bench))
        if at
    )
    shown = tuple(line for line in lines if line.points)
    if not shown:
        return Missing(one.source.file, "no long request was live in any of its samples")
    return Lines(
        f"Runs of a live long request, {one.stem}",
        "requests arrived",
        "mean runs",
        shown,
        one.source,
        log_x=False,
    )


def _traffic(content: _Bench) -> str:
    told = ", ".join(f"{name} {value}" for name, value in content.traffic.items())
    pool = content.settings.get("pool", "an unknown number of")
    return f"Traffic: {told}; seed {content.seed}; a pool of {pool} slots; SGLang {content.sglang}."


def _stock_and_tier0(kept: Kept) -> Table | None:
    one = kept.measured(RUNS)
    if one is None:
        return None
    figures = one.figures
    rows = [
        (
            name,
            *(
                number(figures[label.format(side)]) if label.format(side) in figures else ""
                for side in _SIDES
            ),
        )
        for name, label in _MEASURES
    ]
    return Table.of(
        f"Gate {RUNS}: the same churn under both policies",
        ("long requests", "#stock", "#Tier 0"),
        rows,
        source=one.source,
    )


def _price(kept: Kept) -> list[Block]:
    """What runs of a length cost over contiguous slots, on a GPU."""
    one = kept.measured(PRICE)
    if one is None:
        return []
    series = price_series(one.entry.figures)
    lengths = sorted({length for part in series for length in part.us})
    rows = [
        (
            part.operation,
            f"{part.tokens:,}",
            f"{part.within:,}",
            number(part.contiguous_us),
            *(f"{part.price_us[length]:+.2f}" if length in part.us else "" for length in lengths),
        )
        for part in series
    ]
    return [
        Table.of(
            f"Gate {PRICE}: us over contiguous slots, by run length in slots",
            (
                *("operation", "#tokens", "#within slots", "#contiguous us"),
                *(f"#runs of {length}" for length in lengths),
            ),
            rows,
            source=one.source,
        )
    ]
