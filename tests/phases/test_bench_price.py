"""`kd bench price`: what it keeps and prints, of times that are not there."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import pytest
from machines import HERE

import tasks
from kdtree_engine.errors import MissingError
from kdtree_engine.machine import Gpu
from kdtree_engine.timing import ImplausibleTiming
from phases import bench_price as bench
from phases.checkout import Checkout
from phases.exit_code import ExitCode
from phases.gate import Context, FailureKind, Figure, GateFailure, Unit

BENCH = bench.bench_price  # one test replaces it
WITH_GPU = dataclasses.replace(HERE, gpus=(Gpu("some GPU", (9, 0), 1, 1, usable=True),))
TITLE = "verify of 9 nodes, 65536 tokens"
FIGURES = [
    Figure("most that contiguity saves in verify, a layer", 0.4, Unit.MICROSECONDS),
    Figure(f"{TITLE}, contiguous", 38.4, Unit.MICROSECONDS),
    Figure(f"{TITLE}, contiguous: its times apart by", 0.05, Unit.MICROSECONDS),
    Figure(f"{TITLE}, runs of 1 within 4000000 slots", 38.8, Unit.MICROSECONDS),
    Figure(f"{TITLE}, runs of 8 within 4000000 slots", 38.3, Unit.MICROSECONDS),
]


def benched(root: pathlib.Path, state: pathlib.Path, **options: Any) -> Any:
    def measure(ctx: Context, *, keep: bench.Keep) -> Sequence[Figure]:
        assert ctx.seed == 7
        return FIGURES

    given = {"measure": measure} | options
    return BENCH(
        seed=7,
        checkout=Checkout(root, state),
        machine=HERE,
        command=["kd", "bench", "price"],
        progress=lambda done, total, note: None,
        **given,
    )


def test_the_file_holds_prices_by_run_length_and_all_figures(
    root: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    figures, file = benched(root, tmp_path)
    document = json.loads(file.read_text())
    assert file == tmp_path / "bench" / f"{document['run']}.json"
    (series,) = document["series"]
    assert (series["tokens"], series["within_slots"]) == (65536, 4_000_000)
    assert series["price_us"] == pytest.approx({"1": 0.4, "8": -0.1})
    assert [one["name"] for one in document["figures"]] == [figure.name for figure in figures]
    assert (document["machine"]["hostname"], document["seed"]) == ("here", 7)
    assert document["whole"]


def test_what_was_timed_before_a_failure_is_kept(
    root: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Figures without the headline, which needs all of them."""

    def measure(ctx: Context, *, keep: bench.Keep) -> Sequence[Figure]:
        keep(FIGURES[1:])
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        benched(root, tmp_path, measure=measure)
    (file,) = (tmp_path / "bench").glob("*.json")
    document = json.loads(file.read_text())
    assert not document["whole"]
    assert document["series"][0]["price_us"] == pytest.approx({"1": 0.4, "8": -0.1})


def test_a_row_has_a_column_for_each_run_length() -> None:
    (row,) = bench.rows(FIGURES)
    assert row[:7] == ("verify of 9 nodes", "65536", "4000000", "38.4", "0.05", "+0.40", "")
    assert len(row) == len(bench.COLUMNS)
    assert row[bench.COLUMNS.index("runs of 8")] == "-0.10"


WRONG = GateFailure(FailureKind.NUMERICAL, "verify of 9 nodes: over slots: relative error 1")
FAST = ImplausibleTiming("1.0 us for 9 bytes is 9 GB/s, and this device copies at 1 GB/s")


@pytest.mark.parametrize("failure", [WRONG, FAST])
def test_a_wrong_output_leaves_no_file_and_fails(
    root: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failure: Exception,
) -> None:
    def measure(ctx: Context, *, keep: bench.Keep) -> Sequence[Figure]:
        raise failure

    def command(**_: Any) -> Any:
        return benched(root, tmp_path, measure=measure)

    monkeypatch.setattr(bench, "bench_price", command)
    monkeypatch.setattr(tasks, "_this_machine", lambda: WITH_GPU)
    code = tasks.cli.main(["bench", "price"], prog_name="kd", standalone_mode=False)
    assert code == ExitCode.FAILED
    assert str(failure) in capsys.readouterr().err
    assert not (tmp_path / "bench").exists()


def test_without_a_gpu_the_command_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_this_machine", lambda: HERE)
    with pytest.raises(MissingError, match="no CUDA GPU"):
        tasks.cli.main(["bench", "price"], prog_name="kd", standalone_mode=False)
