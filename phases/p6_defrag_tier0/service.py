"""Phase 6 in the live service: Tier 0 under churn, for the tokens."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

import torch

from kdtree_engine.fragmentation.exported import PREFIX
from phases.gate import Context, FailureKind, Figure, GateFailure, Unit
from phases.service import Answer, serving
from phases.service_compared import Turn, compared
from phases.service_mixed import MixedTraffic
from phases.service_scale import CPU, GPU, Scale, Start, kernel, plain, triton
from phases.service_tokens import demand, figures_of

__all__ = ["TIER0", "Churn", "Tier", "churn_tokens"]

_NODES = 9
_ROUNDING_S = {torch.float32: 30.0}
"""Of the reference's own traffic at most, where its tokens hardly move."""
_SPOILED, _SPOILED_TOKENS = 4, 12
"""The longest prompts, and how many tokens of each: where slots that are not read show."""
_EVICTED = "sglang:evicted_tokens_total"
_MEASURED, _WAITS = f"{PREFIX}measured_requests", f"{PREFIX}allocation_waits"
_GAUGES = {f"{PREFIX}mean_runs": "runs", f"{PREFIX}mean_run_length": "run length"}


@dataclasses.dataclass(frozen=True)
class Tier:
    """What defragments: KDTREE_DEFRAG, and what its server needs beside it.

    moved: what the server's metrics count where it does something, and how it is called; it must.
    """

    name: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    moved: tuple[str, str] | None = None


TIER0 = Tier("tier0")


@dataclasses.dataclass(frozen=True)
class Churn:
    """What churns a pool of `slots`: prompts of up to `longest` tokens, more than it can hold.

    rounds: tokens part by near-ties, so stock trees are served too, to say how often theirs do.
    """

    scale: Scale
    slots: int
    longest: int
    rounds: bool = False


_ON_CPU = Churn(CPU, slots=768, longest=160)
_ON_GPU = Churn(
    dataclasses.replace(GPU, lengths=(1024, 4096), batches=(1, 4)),
    slots=24_576,
    longest=8192,
    rounds=True,
)


def churn_tokens(
    ctx: Context,
    *,
    start: Start = serving,
    seconds: float | None = None,
    churn: Churn | None = None,
    tier: Tier = TIER0,
) -> list[Figure]:
    """Ten minutes of mixed traffic in a pool that is always full: a tier's tokens are stock's.

    Two servers: stock Triton without speculation, on SGLang's allocator; and trees on the kernel,
    on that tier, whose slots come and go with accepted tokens, aborts and evictions. On a CPU, the
    latter then answers once more while it writes to other slots than it reads, which must show. On
    a GPU, trees on Triton are a third one.
    seconds: of traffic, for a rehearsal; None: as the gate is run.
    """
    on_gpu = torch.cuda.is_available()
    churn = churn or (_ON_GPU if on_gpu else _ON_CPU)
    spoils = None if churn.scale.device.type == "cuda" else ctx.scratch / "wrong-slots"
    metrics: dict[str, float] = {}
    seen: list[Mapping[str, float]] = []
    different: list[int] = []

    def during(turn: Turn) -> None:
        found = turn.service.metrics()
        if found.get(_MEASURED, 0):
            seen.append(found)

    def after(turn: Turn, expected: Sequence[Answer]) -> None:
        metrics.update(turn.service.metrics())
        if spoils is not None:
            different.append(_spoiled(turn, traffic.prompts, expected, spoils))

    traffic = MixedTraffic(
        ctx,
        churn.scale,
        kernel(_NODES),
        seconds=seconds,
        most_rounding_s=_ROUNDING_S.get(churn.scale.dtype),
        longest=churn.longest,
        during=during,
        after=after,
    )
    environment = {"KDTREE_DEFRAG": tier.name, **tier.environment}
    if spoils is not None:
        environment["KD_TEST_WRONG_SLOTS"] = str(spoils)
    found = traffic.ask(
        (plain(), kernel(_NODES), *([triton(_NODES)] if churn.rounds else [])),
        graphs=churn.scale.graphs,
        start=start,
        more=("--enable-metrics", *tier.arguments, "--max-total-tokens", str(churn.slots)),
        environment=environment,
    )
    comparisons, bounds, figures = compared(found, scale=churn.scale)
    mixed, mixed_figures = traffic.judged(bounds)
    comparisons += mixed
    figures = [
        *figures_of(comparisons, bounds),
        *figures,
        *mixed_figures,
        *_shown(metrics, seen, tier),
        *(Figure("answers that wrong slots change", one, Unit.COUNT) for one in different),
    ]
    demand(*comparisons, figures=figures)
    traffic.demand(figures)
    says = f"defrag: {tier.name}"
    if says not in found[kernel(_NODES)].log:
        raise GateFailure(FailureKind.LAUNCH, f"its log does not say '{says}'", figures)
    if tier.moved is not None and not metrics.get(tier.moved[0], 0) > 0:
        raise GateFailure(
            FailureKind.LAUNCH, f"{tier.name} did nothing: no {tier.moved[1]}", figures
        )
    if not metrics.get(_EVICTED, 0) > churn.slots:
        raise GateFailure(
            FailureKind.LAUNCH,
            f"{metrics.get(_EVICTED, 0):g} slots were evicted, expected more than the pool's "
            f"{churn.slots}: it was not churned",
            figures,
        )
    if not seen:
        raise GateFailure(
            FailureKind.LAUNCH, "no gauge of fragmentation told of a request", figures
        )
    if spoils is not None and not any(different):
        raise GateFailure(
            FailureKind.TOKEN_MISMATCH,
            "wrong slots change no token: the check sees nothing",
            figures,
        )
    return figures


def _spoiled(
    turn: Turn, prompts: Sequence[tuple[int, ...]], expected: Sequence[Answer], spoils: pathlib.Path
) -> int:
    """How many answers differ where KV is written to other slots than are read."""
    turn.note("wrong slots")
    turn.service.flush()
    spoils.touch()
    longest = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))[-_SPOILED:]
    tokens = turn.service.generate([prompts[number] for number in longest], _SPOILED_TOKENS)
    return sum(
        got != expected[number].tokens[:_SPOILED_TOKENS]
        for number, got in zip(longest, tokens, strict=True)
    )


def _shown(
    metrics: Mapping[str, float], seen: Sequence[Mapping[str, float]], tier: Tier
) -> list[Figure]:
    """metrics: at the end. seen: while requests ran."""
    counted = [(_EVICTED, "slots evicted"), (_WAITS, "allocations that waited")]
    counted += [tier.moved] if tier.moved is not None else []
    figures = [Figure(what, metrics[name], Unit.COUNT) for name, what in counted if name in metrics]
    return figures + [
        Figure(f"{what}, mean of {len(seen)} looks", sum(values) / len(values), Unit.COUNT)
        for name, what in _GAUGES.items()
        if (values := [one[name] for one in seen if name in one])
    ]
