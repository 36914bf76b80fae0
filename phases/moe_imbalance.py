"""`kd moe`: what imbalance of experts costs a step, by batch and placement, and what that says.

Every time is a prediction of `kdtree_engine.moe.costs`. A placement by load is made of the earlier
half of the steps; all placements are tried on the later half.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from kdtree_engine.errors import ConfigError
from kdtree_engine.gpus import Gpu, Link
from kdtree_engine.moe.costs import ExpertShape, busy, reduce_seconds
from kdtree_engine.moe.dispatch import Work, joined, sliced, spread
from kdtree_engine.moe.placement import balanced, contiguous
from kdtree_engine.moe.routing import Routing

__all__ = [
    "BY_LAYER",
    "COLUMNS",
    "Imbalance",
    "Outcome",
    "findings",
    "require_divided",
    "rows",
    "study",
]

COLUMNS = (
    *("batch", "tokens", "placement", "layer us", "all-reduce us", "step ms", "us a token"),
    *("busiest reads", "mean reads", "ranks idle", "waiting"),
)

BY_LAYER = ("layer", "experts", "pairs", "us")
"""Of `Outcome.by_layer`: the layer's number, and then a figure of each rank."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A placement at a batch; means over the samples, and over the layers where it says "a layer".

    placement: tp, ep, eplb or eplb-joined. tokens: a step. layer_us: the slowest rank's experts, a
    layer. reduce_us: its all-reduce. busiest, mean: experts whose weights the rank with the most
    reads, and the mean rank, a layer; slices count as parts. idle: share of ranks without any
    active expert. waiting: share of all ranks' time in experts, launches left out, that is spent
    waiting for the slowest. by_layer: as BY_LAYER says.
    """

    batch: int
    placement: str
    tokens: float
    layers: int
    layer_us: float
    reduce_us: float
    busiest: float
    mean: float
    idle: float
    waiting: float
    by_layer: list[tuple[int, list[float], list[float], list[float]]]

    @property
    def step_us(self) -> float:
        """All MoE layers of a step: experts and all-reduce."""
        return self.layers * (self.layer_us + self.reduce_us)


@dataclasses.dataclass(frozen=True)
class Imbalance:
    """What `study` found, and of what."""

    source: str
    steps: int
    ranks: int
    redundant: int
    experts: int
    top_k: int
    seed: int
    shape: ExpertShape
    gpu: Gpu
    link: Link
    outcomes: list[Outcome]

    def as_json(self) -> dict[str, Any]:
        """Plain values, and what they are."""
        return {
            "version": 1,
            "measured": False,
            "by_layer": BY_LAYER,
            **dataclasses.asdict(self),
            "findings": findings(self),
        }

    def outcome(self, batch: int, placement: str) -> Outcome:
        return next(
            one for one in self.outcomes if (one.batch, one.placement) == (batch, placement)
        )


def require_divided(experts: int, ranks: int) -> None:
    """ConfigError where experts cannot be placed alike on ranks; before minutes of drawing."""
    if experts % ranks:
        raise ConfigError(f"{experts} experts are not to be divided among {ranks} ranks")


def study(
    routing: Routing,
    batches: Sequence[int],
    *,
    ranks: int,
    redundant: int,
    shape: ExpertShape,
    gpu: Gpu,
    link: Link,
    samples: int,
    seed: int,
) -> Imbalance:
    """Every placement at every batch. ConfigError where they do not fit the routing."""
    require_divided(routing.experts, ranks)
    before, after = routing.split()
    layers = len(routing.layers)
    plain = contiguous(layers, routing.experts, ranks)
    by_load = balanced(before.counts.sum(0), ranks, redundant)
    outcomes = []
    for batch in batches:
        # Of the batch and the seed alone: a batch's figures do not hang on the others asked for.
        generator = torch.Generator().manual_seed(seed * 1_000_003 + batch)
        counts, tokens = after.batches(batch, samples, generator)
        works = {
            "tp": sliced(counts, ranks),
            "ep": spread(counts, plain, generator),
            "eplb": spread(counts, by_load, generator),
            "eplb-joined": joined(counts, by_load),
        }
        for name, work in works.items():
            outcomes.append(_outcome(batch, name, work, tokens, routing.layers, shape, gpu, link))
    return Imbalance(
        routing.source,
        routing.steps,
        ranks,
        redundant,
        routing.experts,
        routing.top_k,
        seed,
        shape,
        gpu,
        link,
        outcomes,
    )


def _outcome(
    batch: int,
    name: str,
    work: Work,
    tokens: torch.Tensor,
    layers: tuple[int, ...],
    shape: ExpertShape,
    gpu: Gpu,
    link: Link,
) -> Outcome:
    times = busy(gpu, work, shape)
    slowest = times.amax(2)
    reads = work.experts.double() * work.share
    of_layers = (
        one.double().mean(0).mul(scale).round(decimals=3).tolist()
        for one, scale in ((work.experts, 1), (work.pairs, 1), (times + gpu.launch, 1e6))
    )
    return Outcome(
        batch=batch,
        placement=name,
        tokens=float(tokens.double().mean()),
        layers=len(layers),
        layer_us=float(slowest.mean() + gpu.launch) * 1e6,
        reduce_us=float(reduce_seconds(link, tokens, shape.hidden, work.ranks).mean()) * 1e6,
        busiest=float(reads.amax(2).mean()),
        mean=float(reads.mean()),
        idle=float((work.experts == 0).double().mean()),
        waiting=max(0.0, float(1 - times.sum() / (work.ranks * slowest.sum()))),
        by_layer=list(zip(layers, *of_layers, strict=True)),
    )


def rows(found: Imbalance) -> list[tuple[str, ...]]:
    """A row for each batch and placement, as COLUMNS."""
    return [
        (
            str(one.batch),
            f"{one.tokens:.0f}",
            one.placement,
            f"{one.layer_us:.0f}",
            f"{one.reduce_us:.0f}",
            f"{one.step_us / 1e3:.2f}",
            f"{one.step_us / one.tokens:.0f}",
            f"{one.busiest:.1f}",
            f"{one.mean:.1f}",
            f"{one.idle:.3f}",
            f"{one.waiting:.3f}",
        )
        for one in found.outcomes
    ]


def findings(found: Imbalance) -> list[str]:
    """Sentences, each of them computed from the figures."""
    batches = sorted({one.batch for one in found.outcomes})
    least, most = (found.outcome(batch, "ep") for batch in (batches[0], batches[-1]))
    tp_least, tp_most = (found.outcome(one.batch, "tp") for one in (least, most))
    said = [
        f"Batch {least.batch}: {least.tokens:.0f} tokens activate {found.ranks * least.mean:.0f} "
        f"of {found.experts} experts a layer. Under ep the busiest of {found.ranks} ranks reads "
        f"{least.busiest:.1f}, the mean {least.mean:.1f}, and {least.idle:.1%} of the ranks none: "
        f"{least.waiting:.0%} of the ranks' time in experts is waiting. tp reads a slice of each "
        f"on every rank, waits for none, and needs {_by(tp_least, least)} of ep's step.",
        f"All-reduce is {_reduce(least):.0%} of ep's step at batch {least.batch}"
        + (f" and {_reduce(most):.0%} at batch {most.batch}." if most is not least else "."),
    ]
    if most is not least:
        said.append(
            f"Batching: from batch {least.batch} to {most.batch} ep's step takes "
            f"{most.step_us / least.step_us:.1f} times as long for "
            f"{most.tokens / least.tokens:.0f} times the tokens, so a token costs "
            f"{_by(most, least, most.tokens / least.tokens)} of what it did. Waiting goes from "
            f"{least.waiting:.0%} to {most.waiting:.0%}; tp's step from {_by(tp_least, least)} "
            f"to {_by(tp_most, most)} of ep's."
        )
    for batch in dict.fromkeys((least.batch, most.batch)):
        ways = {one.placement: one for one in found.outcomes if one.batch == batch}
        shortest = min(one.step_us for one in ways.values())
        near = [name for name, one in ways.items() if one.step_us <= 1.01 * shortest]
        takes = (
            f"{name} takes {_by(ways[name], ways['ep'])} of ep's step "
            f"(waiting {ways[name].waiting:.0%})"
            for name in ("eplb", "eplb-joined")
        )
        said.append(
            f"Placement at batch {batch}: with {found.redundant} redundant experts "
            f"{' and '.join(takes)}; the shortest, within 1%: {', '.join(near)}."
        )
    return [*said, _memory(found)]


def _memory(found: Imbalance) -> str:
    """What the experts of all layers take, beside what the GPU has for all things."""
    one = found.outcomes[0].layers * found.shape.bytes / found.ranks / 1e9
    plain, copied = (one * (found.experts + more) for more in (0, found.redundant))
    takes = f"Memory: the experts take {plain:,.0f} GB a rank, {copied:,.0f} with the copies"
    whole = f"{found.gpu.memory / 1e9:.0f} GB of one {found.gpu.name}."
    fits = copied * 1e9 <= found.gpu.memory
    return f"{takes}, of the {whole}" if fits else f"{takes}: they are more than the {whole}"


def _by(one: Outcome, other: Outcome, tokens: float = 1) -> str:
    return f"{one.step_us / other.step_us / tokens:.1%}"


def _reduce(one: Outcome) -> float:
    return one.layers * one.reduce_us / one.step_us
