"""`kd plan-capacity`: steps by context and batch, tokens a second, what bounds them, what fits.

Times come from `kdtree_engine.capacity`, calibrated by `phases.capacity_evidence`. A row that rests
on anything that was not measured on its GPU is labelled a prediction.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from kdtree_engine.capacity.attention import AttentionFit, body_of
from kdtree_engine.capacity.drafting import ACCEPTANCE_SLOPE, assumed_acceptance
from kdtree_engine.capacity.memory import Memory
from kdtree_engine.capacity.step import (
    Load,
    Service,
    Step,
    components_without_host,
    decode_step,
    memory_for,
)
from kdtree_engine.errors import ConfigError
from phases.capacity_evidence import Calibration

__all__ = [
    "COLUMNS",
    "ERROR_COLUMNS",
    "Capacity",
    "error_rows",
    "plan_capacity",
    "remarks",
    "rows",
]

_PARTS = ("attention", "dense", "experts", "all-reduce", "drafting", "host")

COLUMNS = (
    *("context", "batch", "step ms", *_PARTS, "tok/s", "a request"),
    *("bound by", "largest part", "label"),
)
ERROR_COLUMNS = ("kept step", "context", "measured ms", "model ms", "error", "taken for")


@dataclasses.dataclass(frozen=True)
class Capacity:
    """What `plan_capacity` found. assumed: whether the accepted tokens are the assumed law's."""

    service: Service
    calibration: Calibration
    steps: list[Step]
    assumed: bool

    @property
    def fits(self) -> bool:
        return all(one.memory.fits for one in self.steps)

    @property
    def fitting(self) -> list[Step]:
        """The steps that have a row with times."""
        return [one for one in self.steps if one.memory.fits]

    def as_json(self) -> dict[str, Any]:
        """Plain values; seconds, bytes and tokens unless a name says otherwise."""
        return {
            "version": 1,
            "fits": self.fits,
            "service": dataclasses.asdict(self.service),
            "steps": [_step_json(one) for one in self.steps],
            "acceptance": "assumed" if self.assumed else "given",
            "attention": dataclasses.asdict(self.calibration.attention),
            "host": dataclasses.asdict(self.calibration.host),
            "kept_steps": [
                {**dataclasses.asdict(one), "error": one.error} for one in self.calibration.steps
            ],
            "kept_regimes": [dataclasses.asdict(one) for one in self.calibration.regimes],
            "remarks": list(remarks(self)),
        }


def plan_capacity(
    service: Service,
    calibration: Calibration,
    contexts: Sequence[int],
    batches: Sequence[int],
    *,
    nodes: int,
    accepted: float | None,
) -> Capacity:
    """Every context with every batch. accepted: None for the assumed law.

    Raises ConfigError for what cannot be: more accepted than verified, a context beyond the model.
    """
    if accepted is not None and accepted > nodes:
        raise ConfigError(f"{accepted:g} tokens accepted of {nodes} verified", remedy="--nodes")
    if max(contexts) + nodes > service.shape.positions:
        raise ConfigError(
            f"{service.shape.name} has {service.shape.positions} positions: no context of "
            f"{max(contexts)} tokens with a tree of {nodes}"
        )
    tokens = assumed_acceptance(nodes) if accepted is None else accepted
    steps = [
        decode_step(
            service,
            Load(context, batch, nodes, tokens),
            calibration.attention,
            calibration.host,
        )
        for context, batch in itertools.product(contexts, batches)
    ]
    return Capacity(service, calibration, steps, accepted is None and nodes > 1)


def rows(found: Capacity) -> list[tuple[str, ...]]:
    """A row for each context and batch, as COLUMNS; no time where it does not fit."""
    return [_row(one) for one in found.steps]


def _row(step: Step) -> tuple[str, ...]:
    head = (str(step.load.context), str(step.load.batch))
    if not step.memory.fits:
        blank = ("-",) * (len(COLUMNS) - len(head) - 1)
        return (*head, *blank, f"does not fit: {_needs(step.memory)}")
    parts = {one.name: one.seconds for one in step.components}
    parts["drafting"] = parts.get("drafting", 0.0) + parts.get("tree", 0.0)
    kind, share = max(step.shares.items(), key=lambda one: one[1])
    total = step.tokens_per_second
    return (
        *head,
        f"{step.seconds * 1e3:.2f}",
        *(f"{parts.get(name, 0.0) * 1e3:.2f}" for name in _PARTS),
        *(f"{total:.0f}", f"{total / step.load.batch:.1f}"),
        f"{kind} {share:.0%}",
        f"{step.largest.name} ({step.largest.bound})",
        step.basis,
    )


def error_rows(found: Capacity) -> list[tuple[str, ...]]:
    """Each kept step beside the model's, as ERROR_COLUMNS."""
    return [
        (
            f"{one.step.served}, {one.step.source.rpartition('/')[2]}",
            str(one.step.context),
            f"{one.step.seconds * 1e3:.2f}",
            f"{one.model_seconds * 1e3:.2f}",
            f"{one.error:+.1%}",
            "fit" if one.step.fitted else "held out",
        )
        for one in found.calibration.steps
    ]


def remarks(found: Capacity) -> Iterator[str]:
    """Sentences: what fits, what the figures rest on, and what was assumed."""
    service, first = found.service, found.steps[0]
    where = f"{service.gpus} x {service.gpu.name}"
    if not first.memory.holds_weights:
        yield f"{service.shape.name} does not fit on {where}: {_weights(service, first.memory)}"
    elif not found.fits:
        most = max(one.memory.tokens for one in found.steps if not one.memory.fits)
        yield (
            f"some rows do not fit on {where}: beside the weights there is room for "
            f"{first.memory.room:,} tokens of KV on each GPU, and {most:,} are asked for"
        )
    yield (
        f"memory a GPU: weights {first.memory.weights / 1e9:.1f} GB, KV {first.memory.token:,.0f} "
        f"bytes a token on every rank, {service.usable:.0%} of {service.gpu.memory / 1e9:.0f} GB "
        f"usable (assumed); room for {first.memory.room:,} tokens"
    )
    yield _label(found)
    yield from _extrapolated(found)
    yield _accepted(found)
    yield from _calibrated(found)
    yield (
        f"products of weights reach {service.reach:.0%} of memory bandwidth and of bf16 flops "
        "(assumed); routing is drawn, as kd moe draws it"
    )
    yield f"rates of {service.gpu.name}: {service.gpu.source}"
    if service.ranks > 1:
        yield f"all-reduce over {service.link.name}: {service.link.source}"
    if service.ranks not in (1, 8):
        yield f"the latency of an all-reduce is that of 8 ranks, not of {service.ranks}"


def _needs(memory: Memory) -> str:
    whole = (memory.weights + memory.kv) / 1e9
    return f"needs {whole:.0f} GB of {memory.usable / 1e9:.0f} usable"


def _weights(service: Service, memory: Memory) -> str:
    return (
        f"its weights take {memory.weights / 1e9:.1f} GB on each of {service.ranks} ranks, and "
        f"{memory.usable / 1e9:.1f} GB of {service.gpu.memory / 1e9:.0f} are usable; "
        f"{_enough(service)}"
    )


def _enough(service: Service) -> str:
    """The fewest ranks that would hold the weights, of those that divide the heads."""
    for ranks in range(service.ranks + 1, service.shape.heads + 1):
        if service.shape.heads % ranks == 0:
            other = dataclasses.replace(service, gpus=ranks, ranks=ranks, placement="tp")
            if memory_for(other, Load(1, 1, 2, 1.0)).holds_weights:
                return f"{ranks} ranks would hold them"
    return "no number of ranks would hold them"


def _label(found: Capacity) -> str:
    service = found.service
    what = f"a step of {service.shape.name} on {service.gpus} x {service.gpu.name}"
    shares = [one.rests_on_measurement for one in found.fitting or found.steps]
    parts = f"{min(shares):.0%} to {max(shares):.0%} of it are parts that were calibrated there"
    if not max(shares):
        parts = "no part of it was calibrated there"
    if any(one.basis == "prediction" for one in found.steps):
        return f"prediction: {what} was never measured; {parts}"
    if any(one.basis == "extrapolated" for one in found.steps):
        return f"extrapolated: {what} was measured, and its attention in no regime around these"
    return f"calibrated: {what} was measured, at other contexts or these"


def _extrapolated(found: Capacity) -> Iterator[str]:
    """Which rows ask the attention's fit for what was not measured around."""
    rows = [
        f"{step.load.context} x {step.load.batch}"
        for step in found.steps
        if any((one.name, one.basis) == ("attention", "extrapolated") for one in step.components)
    ]
    if rows:
        yield (
            f"attention is extrapolated at {', '.join(rows)} (context x batch): the regimes that "
            "were measured on that GPU do not lie around it"
        )


def _accepted(found: Capacity) -> str:
    load = found.steps[0].load
    if load.nodes == 1:
        return (
            "no speculation: a step gives one token a request; its attention is this kernel's, "
            "which decodes unless KDTREE_DECODE=0"
        )
    if not found.assumed:
        return f"{load.accepted:g} tokens accepted of {load.nodes} verified, as given"
    return (
        f"{load.accepted:.2f} tokens accepted of {load.nodes} verified: assumed, 1 + "
        f"{ACCEPTANCE_SLOPE} * log2(nodes), the law of a tiny trained model (plan 20) and of no "
        "Kimi K2; tok/s is in proportion to it, so give --accepted"
    )


def _calibrated(found: Capacity) -> Iterator[str]:
    calibration, gpu = found.calibration, found.service.gpu
    fit, host = calibration.attention, calibration.host
    regimes, steps = calibration.worst(fitted=False)
    yield (
        f"attention: {fit.fixed * 1e6:.1f} us a launch, {fit.bandwidth_share:.0%} of memory "
        f"bandwidth, {fit.flops_share:.0%} of {_ceiling(fit)}, fitted on {fit.device}; held-out "
        f"regimes are up to {regimes:.0%} off"
        + ("" if fit.device == gpu.device else f"; {_taken_over(found)}")
    )
    yield (
        f"host: {host.trees * 1e3:.2f} ms a step with trees, {host.plain * 1e3:.2f} without, of a "
        f"model of {host.shape.layers} layers on one {host.device}, SGLang 0.5.17 with its n-gram "
        f"drafter; held-out steps are up to {steps:.0%} off. Taken for any other service too"
    )


def _taken_over(found: Capacity) -> str:
    """What a GPU that was not measured is taken for, and what that decides: at most so much."""
    gpu, longest = found.service.gpu, (found.fitting or found.steps)[-1].load
    whole = dataclasses.replace(found.calibration.attention, bandwidth_share=1.0, flops_share=1.0)
    own, least = (
        components_without_host(found.service, longest, fit)[0].seconds * 1e3
        for fit in (found.calibration.attention, whole)
    )
    return (
        f"{gpu.name} is taken to reach the same shares of its own ceilings: {own:.1f} ms a step at "
        f"context {longest.context}, batch {longest.batch}, where the whole ceilings would give "
        f"{least:.1f}"
    )


def _ceiling(fit: AttentionFit) -> str:
    own = body_of(fit.architecture) == "wgmma"
    return f"{'bf16' if own else 'mma.sync'} flops, with the tiles of {fit.architecture}"


def _step_json(step: Step) -> dict[str, Any]:
    return {
        **dataclasses.asdict(step.load),
        "fits": step.memory.fits,
        "seconds": step.seconds,
        "tokens_per_second": step.tokens_per_second if step.memory.fits else None,
        "label": step.basis,
        "rests_on_measurement": step.rests_on_measurement,
        "by_bound": step.shares,
        "components": [
            {
                "name": one.name,
                "seconds": one.seconds,
                "bound": one.bound,
                "parts": dict(one.parts),
                "label": one.basis,
            }
            for one in step.components
        ],
        "memory": {**dataclasses.asdict(step.memory), "room": step.memory.room},
    }
