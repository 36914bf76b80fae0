"""Phase 3: SGLang's own attention kit in eager mode."""

from __future__ import annotations

from collections.abc import Sequence

from phases.conformance import (
    Form,
    KitCase,
    Run,
    decode_cases,
    run_backend,
    run_both,
    spoiled_cases,
    tree_cases,
)
from phases.gate import Context, Figure

__all__ = ["EAGER_CASES", "conformance_kit_eager"]

_TREES = tree_cases(Form.EAGER)
EAGER_CASES = (*_TREES, *decode_cases(), *spoiled_cases(_TREES))


def conformance_kit_eager(
    ctx: Context, *, run: Run = run_backend, cases: Sequence[KitCase] = EAGER_CASES
) -> list[Figure]:
    """Every case of the kit passes on the kernel, none is skipped, and a wrong mask shows."""
    return run_both(cases, ctx.progress, run)
