"""The gates of phase 6 that need SGLang, and no GPU: invariants of Tier 0, and what it is for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kdtree_engine.fragmentation.traffic import Traffic, draw
from kdtree_engine.sglang_ext.defrag.churn import Settings
from phases.bench_frag import Churned, Run, Sample, run_policy
from phases.defrag_trial import run_trial
from phases.gate import Context, FailureKind, Figure, GateFailure, Unit

__all__ = [
    "OPERATIONS",
    "RUN_LENGTH",
    "SHARE",
    "TRAFFIC",
    "allocator_invariants",
    "runs_per_request",
]

OPERATIONS = 100_000
TRAFFIC = Traffic(requests=400)
"""What `kd bench frag` has where nothing else is said; the pool is full after 100 of them."""
RUN_LENGTH = "mean run length, {}"
"""The figure of a policy: slots over runs of live long requests, all together."""
SHARE = 0.1
"""Of stock's mean runs of a live request of 16,384 tokens or more."""

Trial = Callable[[Mapping[str, object]], Mapping[str, float]]


def _trial(asked: Mapping[str, object]) -> Mapping[str, float]:
    return run_trial("trial", asked)


def allocator_invariants(ctx: Context, *, trial: Trial = _trial) -> list[Figure]:
    """No slot is lost or given twice, and no allocation refused that stock serves."""
    ctx.progress(0, 1, "random operations")
    tried = trial({"policy": "tier0", "operations": OPERATIONS, "seed": ctx.seed})
    figures = [
        Figure("operations", tried["operations"], Unit.COUNT),
        Figure("allocations", tried["allocations"], Unit.COUNT),
        Figure("refused, as by stock", tried["refused"], Unit.COUNT),
    ]
    if tried["operations"] != OPERATIONS or not tried["allocations"] or not tried["refused"]:
        raise GateFailure(FailureKind.LAUNCH, "the trial did not try what it is for", figures)
    return figures


def runs_per_request(
    ctx: Context, *, run: Run = run_policy, traffic: Traffic = TRAFFIC
) -> list[Figure]:
    """Tier 0's runs of a live long request are at most a tenth of stock's, under the same churn."""
    requests = draw(traffic, ctx.seed)
    found: dict[str, Churned] = {}
    for policy in ("stock", "tier0"):

        def seen(sample: Sample, done: int = len(found)) -> None:
            arrived = done * len(requests) + sample["arrived"]
            ctx.progress(arrived, 2 * len(requests), f"{sample['finished']} finished")

        found[policy] = run(Settings(policy, every=100), requests, seen)
    runs, worst = (
        {policy: one.mean("long", figure) for policy, one in found.items()}
        for figure in ("mean_runs", "worst_decile_runs")
    )
    stock, tier0 = runs["stock"], runs["tier0"]
    if stock is None or tier0 is None:
        raise GateFailure(FailureKind.LAUNCH, "no long request was live in any settled sample")
    lost = sum(one.outcome["leaked"] for one in found.values())
    served = [one.outcome["finished"] for one in found.values()]
    figures = [
        Figure("of stock's runs", tier0 / stock, Unit.RATIO),
        Figure("mean runs, stock", stock, Unit.COUNT),
        Figure("mean runs, tier0", tier0, Unit.COUNT),
        *(
            Figure(f"worst tenth, {policy}", value, Unit.COUNT)
            for policy, value in worst.items()
            if value is not None
        ),
        *(
            Figure(RUN_LENGTH.format(policy), length, Unit.COUNT)
            for policy, one in found.items()
            if (length := one.run_length("long")) is not None
        ),
        Figure("requests", len(requests), Unit.COUNT),
        Figure("slots lost", lost, Unit.COUNT),
    ]
    if lost or len(set(served)) > 1:
        raise GateFailure(FailureKind.NUMERICAL, f"lost {lost} slots; served {served}", figures)
    if tier0 > SHARE * stock:
        raise GateFailure(
            FailureKind.NUMERICAL,
            f"{tier0:.0f} runs of a long request, expected at most {SHARE:g} of {stock:.0f}",
            figures,
        )
    return figures
