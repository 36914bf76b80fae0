"""Whether live relocation is worth building into the service: computed from kept evidence.

Relocation makes runs of slots longer, and nothing else. So what it can win of a decode step is at
most what the verify kernel loses to the run lengths that requests have, were the whole step verify:

    gain = (t(run length) - t(contiguous)) / t(run length)

Each t is a verify pass of one layer for one request, from the gate `run-length-price` on a GPU. The
run length is that of long requests under churn, from `runs-per-request`: all their slots over all
their runs, after Tier 0 for what Tier 1 would add, and stock's beside it. Of the measured lengths
the longest that is no longer counts.

What it does not know: requests of other lengths together in a batch, and requests below 16,384
tokens, where a run length may cost another share.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from kdtree_engine.errors import MissingError
from phases.evidence import Evidence, FigureRecord, Record, Store
from phases.gate import Context, FailureKind, Figure, GateFailure, Status, Unit
from phases.p5_tuning import PHASE as PRICED
from phases.p5_tuning.price_figures import PriceSeries, price_series, verify
from phases.p6_defrag_tier0 import PHASE as CHURNED
from phases.p6_defrag_tier0.checks import RUN_LENGTH
from phases.plan import PlanStatus, find_plan, load_plans

__all__ = ["RESTS_ON", "THRESHOLD", "Gain", "deferral_figures", "gains", "kept_evidence"]

THRESHOLD = 0.05
"""Of a decode step; below it, the difference is within what batch composition moves."""
_PLAN = "17"
_PRICE, _CHURN = "run-length-price", "runs-per-request"
RESTS_ON = (_PRICE, _CHURN)
"""The gates, of phases 5 and 6, whose figures decide."""
_ROOT = pathlib.Path(__file__).resolve().parents[2]
_EVIDENCE = _ROOT / "plans" / "evidence"


@dataclasses.dataclass(frozen=True)
class Gain:
    """At most what relocation wins of a step, at a context and with requests' runs of a policy.

    run_length: the measured one that stands for them. share: of the step, 0 to 1.
    """

    policy: str
    series: PriceSeries
    run_length: int
    share: float

    def __str__(self) -> str:
        return (
            f"{self.policy}: {self.series.operation}, {self.series.tokens} tokens, "
            f"runs of {self.run_length} within {self.series.within} slots"
        )


def gains(series: Iterable[PriceSeries], run_lengths: Mapping[str, float]) -> list[Gain]:
    """For each series of a verify pass, and each policy by the run length that it leaves.

    Raises ValueError where a run length is shorter than all that were measured, or where no series
    is of a verify pass.
    """
    found = []
    for one in series:
        if not one.operation.startswith(verify(0).partition("0")[0]):
            continue
        for policy, run_length in run_lengths.items():
            shorter = [length for length in one.us if length <= run_length]
            if not shorter:
                raise ValueError(
                    f"runs of {run_length:g} slots are shorter than all that were priced: "
                    f"{sorted(one.us)}"
                )
            stands_for = max(shorter)
            price = max(0.0, one.price_us[stands_for])
            found.append(Gain(policy, one, stands_for, price / one.us[stands_for]))
    if not found:
        raise ValueError("no time is of a verify pass")
    return found


def kept_evidence(kept: pathlib.Path = _EVIDENCE) -> dict[str, Evidence]:
    """The newest kept evidence of the gates of phases 5 and 6, of those that ran to their end."""
    store = Store(kept, kept, _ROOT)
    records = [_ended(record) for record in store.kept_records().values()]
    return store.among(records, [PRICED, CHURNED])


def deferral_figures(
    ctx: Context,
    *,
    evidence: Callable[[], Mapping[str, Evidence]] = kept_evidence,
    status: PlanStatus | None = None,
) -> list[Figure]:
    """The gain by kept evidence, held against what plan 17 says.

    evidence: by gate. status: of the plan; None: as it stands in plans/.
    Raises MissingError where evidence of one of the two gates is not kept, GateFailure where it is
    stale or where it says otherwise than the plan.
    """
    ctx.progress(0, 1, "kept evidence")
    known = evidence()
    for name in RESTS_ON:
        if name not in known:
            raise MissingError(
                f"no run of {name} is kept in plans/evidence",
                remedy="run phases 5 (the price, on a GPU) and 6 and keep them: "
                "kd evidence keep --help",
            )
    failed = [name for name in RESTS_ON if known[name].gate.status is not Status.PASSED]
    if failed:
        raise GateFailure(
            FailureKind.LAUNCH, f"the newest kept run of {' and of '.join(failed)} did not pass"
        )
    stale = [name for name in RESTS_ON if known[name].stale]
    if stale:
        raise GateFailure(
            FailureKind.LAUNCH,
            f"the code has changed since {' and '.join(stale)} passed: run phases 5 and 6 again",
        )
    try:
        found = gains(
            price_series(known[_PRICE].gate.figures), _run_lengths(known[_CHURN].gate.figures)
        )
    except ValueError as error:
        raise GateFailure(FailureKind.LAUNCH, str(error)) from error
    after = max((one for one in found if one.policy == "tier0"), key=lambda one: one.share)
    before = max((one for one in found if one.policy == "stock"), key=lambda one: one.share)
    worth = after.share > THRESHOLD
    figures = [
        Figure("gain of Tier 1 at most, of a step", after.share, Unit.RATIO),
        Figure("beside SGLang's own allocator instead", before.share, Unit.RATIO),
        Figure("threshold", THRESHOLD, Unit.RATIO),
        Figure("worth it", int(worth), Unit.COUNT),
        *(Figure(str(one), one.share, Unit.RATIO) for one in found),
    ]
    said = status or find_plan(load_plans(_ROOT / "plans"), _PLAN).status
    if worth == (said is PlanStatus.DEFERRED):
        verdict = "could be worth it" if worth else "is not worth it"
        raise GateFailure(
            FailureKind.NUMERICAL,
            f"Tier 1 {verdict}: at most {after.share:.1%} of a step ({after}), threshold "
            f"{THRESHOLD:.0%}; plan {_PLAN} says '{said}'",
            figures,
        )
    return figures


def _ended(record: Record) -> Record:
    ended = (Status.PASSED, Status.FAILED)
    gates = tuple(entry for entry in record.gates if entry.status in ended)
    return record.model_copy(update={"gates": gates})


def _run_lengths(figures: Sequence[FigureRecord]) -> dict[str, float]:
    """By policy. Raises ValueError where one is missing."""
    values = {figure.name: figure.value for figure in figures}
    try:
        return {policy: values[RUN_LENGTH.format(policy)] for policy in ("stock", "tier0")}
    except KeyError as error:
        raise ValueError(f"{_CHURN} has no figure {error}") from None
