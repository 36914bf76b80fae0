"""Phase 4: SGLang's own attention kit in graph mode, and in real CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence

from phases.conformance import Form, KitCase, Run, run_backend, run_both, spoiled_cases, tree_cases
from phases.gate import Context, FailureKind, Figure, GateFailure

__all__ = ["GRAPH_CASES", "conformance_kit_graph"]

_CAPTURED = tree_cases(Form.CAPTURED)
# As shipped, the kit's own trees are enough: what this form adds is its runner.
_SHIPPED = tree_cases(Form.SHIPPED, own_nodes=())
GRAPH_CASES = (*_CAPTURED, *_SHIPPED, *spoiled_cases(_CAPTURED))


def conformance_kit_graph(
    ctx: Context,
    *,
    run: Run = run_backend,
    cases: Sequence[KitCase] = GRAPH_CASES,
    graphs: bool = True,
) -> list[Figure]:
    """Every captured graph replays to the oracle's output; the kit's own form as far as it can.

    graphs: whether each captured case must have replayed a real graph; a CPU has none.
    """
    figures = run_both(cases, ctx.progress, run)
    captured = sum(case.form is Form.CAPTURED and not case.spoiled for case in cases)
    replays = next((f.value for f in figures if f.name == "replays of captured graphs"), 0)
    if graphs and replays != captured:
        raise GateFailure(
            FailureKind.LAUNCH,
            f"{captured} captured cases replayed {replays:g} graphs, expected one each",
            figures,
        )
    return figures
