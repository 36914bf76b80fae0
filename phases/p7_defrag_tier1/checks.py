"""The gate of phase 7 that needs SGLang, and no GPU: rows are right wherever they are moved."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from phases.defrag_trial import run_trial
from phases.gate import Context, FailureKind, Figure, GateFailure, Unit

__all__ = ["OPERATIONS", "relocation_bytes_exact"]

OPERATIONS = 100_000

Trial = Callable[[Mapping[str, object]], Mapping[str, float]]

_SHOWN = {
    "rows_moved": "rows moved",
    "relocated": "relocations that moved rows",
    "shared_rows_moved": "moved rows that several requests read",
    "hits_after_moves": "radix hits on moved rows",
    "hits": "radix hits",
    "runs_removed": "runs removed",
    "ended": "requests ended",
    "retracted": "requests retracted",
    "aborted": "clients that left",
    "evictions": "evictions",
    "verified": "rows read back",
}
"""By the trial's count, what it is called; none may be 0, as then something was not tried."""


def _trial(asked: Mapping[str, object]) -> Mapping[str, float]:
    return run_trial("relocation_trial", asked)


def relocation_bytes_exact(ctx: Context, *, trial: Trial = _trial) -> list[Figure]:
    """Live requests and the cache read the right bytes after each move; no slot is lost or double.

    And the trial can fail: where one of the three updates is left out, it does.
    """
    forgets = ("rows", "nodes", "release")
    for number, forget in enumerate(forgets):
        ctx.progress(number, len(forgets) + 1, f"without the update of {forget}")
        _must_fail(trial, ctx.seed, forget)
    ctx.progress(len(forgets), len(forgets) + 1, "random operations")
    tried = trial({"operations": OPERATIONS, "seed": ctx.seed})
    figures = [
        Figure("operations", tried["operations"], Unit.COUNT),
        *(Figure(name, tried[count], Unit.COUNT) for count, name in _SHOWN.items()),
    ]
    if tried["operations"] != OPERATIONS or not all(tried[count] for count in _SHOWN):
        raise GateFailure(FailureKind.LAUNCH, "the trial did not try what it is for", figures)
    return figures


def _must_fail(trial: Trial, seed: int, forget: str) -> None:
    try:
        trial({"operations": OPERATIONS, "seed": seed, "forget": forget})
    except GateFailure as failure:
        if failure.kind is FailureKind.NUMERICAL:
            return
        raise
    raise GateFailure(FailureKind.LAUNCH, f"the trial does not notice that {forget} is not updated")
