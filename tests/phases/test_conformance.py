"""What the results of SGLang's kit mean, and that a process which ends early never passes."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import types
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from taped_graphs import use_taped_graphs

from kdtree_engine import library
from kdtree_engine.errors import MissingError
from phases import conformance
from phases.conformance import Form, KitCase, Outcome, Result
from phases.gate import Context, FailureKind, GateFailure
from phases.p3_backend_wiring.kit import EAGER_CASES, conformance_kit_eager
from phases.p4_capture_safety.kit import GRAPH_CASES, conformance_kit_graph

TREES = conformance.tree_cases(Form.EAGER, prefixes=((7, 16),), own_nodes=(9,))
CASES = (*TREES, *conformance.spoiled_cases(TREES))
SHIPPED = conformance.tree_cases(Form.SHIPPED, prefixes=((7,), (64,)), own_nodes=())


class FakeKit:
    """A kit in which all is right, but for what `changes` says of a case on a backend."""

    def __init__(self, **changes: Mapping[str, object]) -> None:
        self.changes = changes

    def __call__(
        self, backend: str, cases: Sequence[KitCase], seen: Callable[[str], None]
    ) -> dict[str, Result]:
        results = {}
        for case in cases:
            result = Result(
                Outcome.DIFFERS if case.spoiled else Outcome.PASSED,
                calls=int(backend == "kdtree_mla"),
                replays=int(case.form is Form.CAPTURED),
            )
            results[case.name] = dataclasses.replace(result, **self.changes.get(backend, {}))
            seen(case.name)
        return results


@pytest.fixture
def ctx(tmp_path: pathlib.Path) -> Context:
    return Context(seed=1, scratch=tmp_path)


def figures_of(figures: Sequence[object]) -> dict[str, float]:
    return {figure.name: figure.value for figure in figures}  # type: ignore[attr-defined]


def test_the_cases_are_those_of_the_plan() -> None:
    for cases, forms in (
        (EAGER_CASES, {Form.EAGER, Form.DECODE}),
        (GRAPH_CASES, {Form.CAPTURED, Form.SHIPPED}),
    ):
        assert {case.form for case in cases} == forms
        assert {case.topk for case in cases} == {1, 3}
        assert {case.kind for case in cases} == {"eagle", "ngram"}
        assert {case.page for case in cases} == {1, 16}
        assert {case.nodes for case in cases if case.drawn} == {9, 33, 64}
        assert len({case.name for case in cases}) == len(cases)
        assert all(max(case.prefixes) + case.nodes <= case.context for case in cases)
    assert [len(EAGER_CASES), len(GRAPH_CASES)] == [100 + 4 + 40, 100 + 40 + 40]


def test_all_right_passes_with_counts(ctx: Context) -> None:
    steps: list[tuple[int, int]] = []
    ctx = dataclasses.replace(ctx, progress=lambda done, total, note: steps.append((done, total)))
    figures = conformance_kit_eager(ctx, run=FakeKit(), cases=CASES)
    assert figures_of(figures) == {
        "cases": len(TREES),
        "failures of kdtree_mla": 0,
        "failures of triton": 0,
        "skips": 0,
        "cases with a mask of ones, which fail": len(TREES),
        "calls of the kernel": len(TREES),
    }
    total = 3 * len(TREES)
    assert sorted(steps) == [(done, total) for done in range(total + 1)]


FAILED = {"outcome": Outcome.DIFFERS, "says": "not close", "misread": 0}


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        (
            {"kdtree_mla": FAILED},
            FailureKind.NUMERICAL,
            r"12 of 12 cases .* not close \(triton: pa",
        ),
        # Failing together is no excuse by itself: it might be a fault of both.
        (
            {"kdtree_mla": FAILED, "triton": FAILED},
            FailureKind.NUMERICAL,
            r"does not explain it.*triton: differs",
        ),
        (
            {"kdtree_mla": FAILED | {"outcome": Outcome.ERROR, "misread": 3}},
            FailureKind.NUMERICAL,
            "does not explain it",
        ),
        (
            {"triton": {"outcome": Outcome.SKIPPED}},
            FailureKind.LAUNCH,
            "triton: 12 cases were skip",
        ),
        ({"kdtree_mla": {"outcome": Outcome.SKIPPED}}, FailureKind.LAUNCH, "24 cases were skip"),
        ({"kdtree_mla": {"calls": 0}}, FailureKind.LAUNCH, "its parent served them"),
        ({"triton": {"calls": 1}}, FailureKind.LAUNCH, "triton called the kernel"),
        (
            {"kdtree_mla": {"outcome": Outcome.PASSED}},
            FailureKind.NUMERICAL,
            "12 of 12 cases do not see a mask of ones",
        ),
    ],
)
def test_a_fault_fails(
    ctx: Context, changes: Mapping[str, Mapping[str, object]], kind: FailureKind, says: str
) -> None:
    with pytest.raises(GateFailure, match=says) as caught:
        conformance_kit_eager(ctx, run=FakeKit(**changes), cases=CASES)
    assert caught.value.kind is kind


def test_an_error_under_a_mask_of_ones_is_no_sight_of_it(ctx: Context) -> None:
    results = FakeKit()("kdtree_mla", CASES, lambda name: None)
    spoiled = next(case.name for case in CASES if case.spoiled)
    results[spoiled] = Result(Outcome.ERROR, "RuntimeError: no memory")
    stock = FakeKit()("triton", TREES, lambda name: None)
    with pytest.raises(GateFailure, match=r"1 of 12 cases do not see .* error RuntimeError"):
        conformance.judge(CASES, results, stock)


def test_what_the_kit_hides_from_both_is_excused_and_each_case_is_listed(ctx: Context) -> None:
    both = {"outcome": Outcome.DIFFERS, "misread": 5}
    figures = figures_of(
        conformance_kit_graph(
            ctx, run=FakeKit(kdtree_mla=both, triton=both), cases=SHIPPED, graphs=False
        )
    )
    assert figures["failures of kdtree_mla"] == figures["failures of triton"] == len(SHIPPED)
    for case in SHIPPED:
        assert figures[f"both fail: {case.name}: tokens that the kit hides"] == 5


def test_a_failure_of_stock_alone_is_listed(ctx: Context) -> None:
    figures = conformance_kit_eager(ctx, run=FakeKit(triton=FAILED), cases=TREES)
    assert figures_of(figures)["failures of triton"] == len(TREES)
    assert sum(figure.name.startswith("triton fails: ") for figure in figures) == len(TREES)


def test_a_graph_that_was_not_replayed_fails(ctx: Context) -> None:
    cases = conformance.tree_cases(Form.CAPTURED, prefixes=((7,),), own_nodes=())
    replays = {"replays of captured graphs": len(cases)}
    figures = figures_of(conformance_kit_graph(ctx, run=FakeKit(), cases=cases))
    assert replays.items() <= figures.items()
    with pytest.raises(GateFailure, match=r"8 captured cases replayed 0 graphs"):
        conformance_kit_graph(ctx, run=FakeKit(kdtree_mla={"replays": 0}), cases=cases)


def test_no_case_is_no_pass() -> None:
    with pytest.raises(GateFailure, match="0 of 0 cases have no result"):
        conformance.judge([], {}, {})


def script(body: str) -> list[str]:
    """A process in place of the kit's: `say` prints a result."""
    head = (
        "import json, os, sys\n"
        "request = json.load(sys.stdin)\n"
        "names = [case['name'] for case in request['cases']]\n"
        "def say(name, **rest):\n"
        "    print(json.dumps({'begins': name}))\n"
        "    print(json.dumps({'case': name, 'outcome': 'passed', **rest}), flush=True)\n"
    )
    return [sys.executable, "-c", head + body]


def asked(body: str) -> dict[str, Result]:
    return conformance.run_backend(
        "triton", TREES, lambda name: None, device="cpu", command=script(body)
    )


def test_each_line_of_the_process_is_a_result() -> None:
    found = asked("for name in names: say(name, calls=len(request['cases'][0]['prefixes']))")
    assert found == {case.name: Result(Outcome.PASSED, calls=2) for case in TREES}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("say(names[0]); os.abort()", r"exit code -6 after 1 of 12 cases, in eager, eagle, topk 1"),
        ("say(names[0]); sys.exit(3)", "exit code 3 after 1 of 12"),
        ("import nowhere", "exit code 1 after 0 of 12 cases, in SGLang's import"),
    ],
)
def test_a_process_that_crashes_fails(body: str, says: str) -> None:
    with pytest.raises(GateFailure, match=says) as caught:
        asked(body)
    assert caught.value.kind is FailureKind.LAUNCH


def test_a_process_that_ends_well_but_early_fails(ctx: Context) -> None:
    def run(
        backend: str, cases: Sequence[KitCase], seen: Callable[[str], None]
    ) -> Mapping[str, Result]:
        return conformance.run_backend(
            backend, cases, seen, device="cpu", command=script("say(names[0])")
        )

    with pytest.raises(GateFailure, match="kdtree_mla: 23 of 24 cases have no result"):
        conformance_kit_eager(ctx, run=run, cases=CASES)


def test_a_process_that_never_reads_its_request_fails() -> None:
    with pytest.raises(GateFailure, match="exit code 5"):
        conformance.run_backend(
            "triton",
            conformance.tree_cases(Form.EAGER) * 20,
            lambda name: None,
            device="cpu",
            command=[sys.executable, "-c", "raise SystemExit(5)"],
        )


def test_without_a_kernel_library_a_gpu_host_is_told_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.delenv("KDTREE_LIBRARY", raising=False)
    monkeypatch.setattr(library, "PACKAGED_LIBRARY", tmp_path / "absent")
    with pytest.raises(MissingError, match="not built"):
        conformance.run_backend("triton", TREES, lambda name: None, command=script(""))


def test_the_process_imports_this_checkout_first(
    root: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    body = (
        "for name in names: say(name, says=json.dumps([os.environ['PYTHONPATH'],"
        " os.environ.get('TRITON_INTERPRET')]))"
    )
    paths, interpreted = json.loads(asked(body)[TREES[0].name].says)
    assert paths.split(":") == [
        str(root / "tests/support/sglang_kit"),
        str(root / "kdtree-engine"),
        "elsewhere",
    ]
    assert interpreted == "1"


def test_the_third_pass_of_a_captured_case_is_a_replay_over_the_captured_tensors(
    root: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tape for a CUDA graph, and a module whose answer tells which tensors it read."""
    monkeypatch.syspath_prepend(root / "tests/support/sglang_kit")
    from kd_sglang_kit.graph import Passes

    use_taped_graphs(monkeypatch)
    monkeypatch.setattr(torch.cuda, "Stream", torch.cuda.current_stream)
    ran = []

    def module(hidden: torch.Tensor, batch: types.SimpleNamespace) -> torch.Tensor:
        ran.append(batch.name)
        return hidden * 2 + batch.out_cache_loc.unsqueeze(1)

    def forward(name: str, hidden: float, slot: int) -> torch.Tensor:
        batch = types.SimpleNamespace(name=name, out_cache_loc=torch.full((3,), slot))
        inputs = {"input_hidden": torch.full((3, 2), hidden)}
        return passes.forward(types.SimpleNamespace(actual_module=module), batch, inputs)

    passes = Passes(captures=True)
    assert not passes.second
    assert forward("eager", 1.0, 10).unique().tolist() == [12.0]
    assert passes.second
    assert forward("capture", 2.0, 20).isnan().all()
    assert forward("replay", 3.0, 30).unique().tolist() == [36.0]
    assert passes.replays == 1
    assert "replay" not in ran

    plain = Passes(captures=False)
    passes = plain
    for name in ("eager", "capture", "replay"):
        assert forward(name, 1.0, 0).unique().tolist() == [2.0]
    assert (plain.replays, ran[-1]) == (0, "replay")
