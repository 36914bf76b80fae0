"""`kd tune`, dry: on the CPU, with a library that notes its tiles and a timer that is made up."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import tasks
from kdtree_engine.attention import tree_verify_attention
from kdtree_engine.build import CompileError
from kdtree_engine.errors import ConfigError, MissingError
from kdtree_engine.machine import Gpu, Machine
from kdtree_engine.timing import Timing
from kdtree_engine.tuning import (
    BUILT_IN,
    TABLES,
    Configuration,
    Measured,
    Table,
    Unmeasured,
    load_table,
    table_text,
)
from phases import tune as tune_module
from phases.checkout import Checkout
from phases.gate import FailureKind, GateFailure
from phases.p5_tuning.table import tuning_table
from phases.p5_tuning.tiles import declared_tiles
from phases.regimes import Regime, time_regime
from phases.tune import (
    REGIMES,
    Outcome,
    Part,
    candidates,
    predicted_table,
    tune,
    tuned_table,
)
from phases.tune_table import ENTRY_COLUMNS, TRIAL_COLUMNS, entry_rows, trial_rows

CPU = torch.device("cpu")
SHORT, LONG, MANY = Regime(1, 8, 9, 40), Regime(1, 8, 9, 90), Regime(4, 8, 9, 40)
WIDE = Regime(1, 8, 17, 40)
TILES = tuple(declared_tiles()["sm_120"])
PART = Part("a GPU", "sm_120", 188, TILES)
MACHINE = Machine(
    hostname="here", system="Linux", python="3.11", torch="2.9", cuda=None, driver="580", gpus=(),
    nvcc=None, compute_sanitizer=None, sglang=None, ssh=None, rsync=None,
)  # fmt: skip

Times = Callable[[Regime, Configuration], float]


class Library:
    """Notes what is forced: `now` is the configuration that a call would be launched with."""

    def __init__(self) -> None:
        self.now = BUILT_IN
        self.asked: list[Configuration] = []

    def set_tuning(self, *numbers: int) -> None:
        self.now = Configuration(*numbers)
        self.asked.append(self.now)


def timing(us: float) -> Timing:
    fields: dict[str, Any] = {field.name: None for field in dataclasses.fields(Timing)}
    return Timing(**fields | {"median_us": us, "p10_us": us - 1, "p90_us": us + 1})


def run(
    root: pathlib.Path,
    tmp_path: pathlib.Path,
    regimes: list[Regime],
    times: Times,
    **changed: Any,
) -> tuple[Outcome, Library]:
    library = Library()

    def timer(regime: Regime, candidate: Any, **options: Any) -> Timing:
        assert options.keys() == {"device", "seed", "copy_bandwidth", "repeats"}
        return timing(times(regime, library.now))

    (tmp_path / "tables").mkdir(exist_ok=True)
    options: dict[str, Any] = {
        "repeats": 3,
        "checkout": Checkout(root, tmp_path / "state"),
        "machine": MACHINE,
        "command": ["kd", "tune"],
        "progress": lambda done, total, note: None,
        "part": PART,
        "library": library,
        "tables": tmp_path / "tables",
        "evidence": tmp_path / "evidence",
        "device": CPU,
        "timer": timer,
        "bandwidth": 1e12,
    }
    return tune(regimes, **options | changed), library


def ordered(rows: Mapping[int, float]) -> Times:
    """Times by the rows of the tile, a little more for each least stage."""
    return lambda regime, one: rows[one.row_tile] + 0.1 * one.min_blocks


def taken(table: Table | None, rows: int, batch: int) -> str:
    assert table is not None
    entry = table.bodies["mma"].entry(rows, batch, deterministic=False)
    return f"{entry.configuration} {'measured' if entry.measured else 'unmeasured'}"


def test_the_fastest_is_written_with_its_times_and_the_rest_is_left_alone(
    root: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    outcome, library = run(root, tmp_path, [SHORT], ordered({16: 30, 24: 20, 32: 10}))
    assert outcome.file == tmp_path / "tables" / "sm_120.json"
    assert outcome.table == load_table(outcome.file)
    assert taken(outcome.table, 72, 1) == "32x16/1 measured"
    # 72 rows share their entry with 65 to 72; the others were not swept.
    assert taken(outcome.table, 64, 1) == "32x16/0 unmeasured"
    assert taken(outcome.table, 73, 1) == "32x16/0 unmeasured"
    assert isinstance(outcome.table, Table)
    entry = outcome.table.bodies["mma"].entry(72, 1, deterministic=False)
    assert isinstance(entry.provenance, Measured)
    assert entry.provenance.gpu == "a GPU"
    assert [time.us for time in entry.provenance.times] == [10.1]
    # Deterministic mode binds every launch: some regimes alone do not choose for it.
    assert not outcome.table.bodies["mma"].deterministic.measured
    assert library.now == BUILT_IN, "what was forced is taken back"
    assert set(library.asked) == {
        BUILT_IN,
        *(Configuration(rows, 16, least) for rows in (16, 24, 32) for least in (1, 2, 4)),
    }


def test_a_launch_that_is_the_same_is_timed_once(
    root: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Long work is cut by its share of the processors, whatever the least stages of a split."""
    part = dataclasses.replace(PART, processors=2, tiles=TILES[-1:])
    called: list[int] = []

    def timer(regime: Regime, candidate: Any, **options: Any) -> Timing:
        called.append(regime.prefix)
        return timing(10.0)

    outcome, _ = run(
        root, tmp_path, [Regime(1, 4, 3, 40), LONG], ordered({}), part=part, timer=timer
    )
    # 43 tokens are a share of 2 stages: least counts of 1 and 2 are one launch, and 4 is another.
    assert called == [40, 40, 90]
    same = [trial.same_launch for trial in outcome.sweep.trials]
    assert same == [False, True, False, False, True, True]
    rows = json.loads(outcome.record.read_text())["measurements"]
    assert [(row["min_blocks"], row["same_launch"]) for row in rows[3:]] == [
        (1, False),
        (2, True),
        (4, True),
    ]


def test_one_configuration_has_to_do_for_all_lengths(
    root: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """24 wins two lengths and the mean; 32 is never further than 20% from the best."""
    middle = Regime(1, 8, 9, 60)
    us = {
        SHORT: {16: 30.0, 24: 10.0, 32: 12.0},
        middle: {16: 90.0, 24: 20.0, 32: 24.0},
        LONG: {16: 90.0, 24: 39.0, 32: 30.0},
    }
    outcome, _ = run(root, tmp_path, list(us), lambda at, one: us[at][one.row_tile])
    assert taken(outcome.table, 72, 1).startswith("32x16")


def test_batches_that_want_another_tile_get_an_entry(
    root: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    def times(regime: Regime, one: Configuration) -> float:
        wanted = 24 if regime.batch == 1 else 32
        return 10.0 + abs(one.row_tile - wanted) + one.min_blocks

    outcome, _ = run(root, tmp_path, [SHORT, MANY, Regime(16, 8, 9, 20)], times)
    assert [taken(outcome.table, 72, batch)[:7] for batch in (1, 2, 4, 16, 64)] == [
        "24x16/1",
        *["32x16/1"] * 4,
    ]


def test_one_request_has_no_cost_of_its_own_in_the_share(
    root: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """13 tokens of one request are one stage: each least count is a launch of its own."""
    part = dataclasses.replace(PART, processors=2, tiles=TILES[-1:])
    outcome, _ = run(root, tmp_path, [Regime(1, 4, 3, 10)], ordered({32: 9}), part=part)
    assert [trial.same_launch for trial in outcome.sweep.trials] == [False] * 3


def test_other_batches_keep_what_they_were_measured_with(
    root: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    def times(regime: Regime, one: Configuration) -> float:
        return 10.0 + abs(one.row_tile - (24 if regime.batch == 1 else 32)) + one.min_blocks

    run(root, tmp_path, [SHORT, MANY], times)
    outcome, _ = run(root, tmp_path, [MANY], ordered({16: 10, 24: 20, 32: 30}))
    assert [taken(outcome.table, 72, batch) for batch in (1, 2, 4, 64)] == [
        "24x16/1 measured",
        *["16x16/1 measured"] * 3,
    ]
    more, _ = run(root, tmp_path, [Regime(64, 8, 9, 40)], ordered({16: 30, 24: 20, 32: 10}))
    assert [taken(more.table, 72, batch)[:7] for batch in (1, 4, 5, 64, 99)] == [
        "24x16/1",
        "16x16/1",
        *["32x16/1"] * 3,
    ]
    assert more.table == load_table(more.file or pathlib.Path())


def test_one_length_does_not_choose_for_the_others_of_its_batch(
    root: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    run(root, tmp_path, [SHORT, LONG], ordered({16: 30, 24: 20, 32: 10}))
    with pytest.raises(ConfigError, match="measured at more lengths") as caught:
        run(root, tmp_path, [SHORT], ordered({16: 10, 24: 20, 32: 30}))
    assert caught.value.remedy == "add --regime 1,8,9,90"


@pytest.mark.parametrize("us", [math.nan, math.inf, -1.0, 0.0])
def test_a_time_that_is_none_writes_no_table(
    root: pathlib.Path, tmp_path: pathlib.Path, us: float
) -> None:
    outcome, _ = run(root, tmp_path, [SHORT], lambda at, one: us)
    assert outcome.file is None
    assert {trial.status for trial in outcome.sweep.trials} == {"failed"}
    assert not list((tmp_path / "tables").iterdir())


def test_one_hiccup_of_the_clock_is_taken_again(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    hiccups = iter([math.nan])
    by_rows = ordered({16: 30, 24: 20, 32: 10})
    outcome, _ = run(root, tmp_path, [SHORT], lambda at, one: next(hiccups, by_rows(at, one)))
    assert outcome.sweep.right
    assert taken(outcome.table, 72, 1) == "32x16/1 measured"


def test_a_full_sweep_chooses_for_deterministic_mode_too(
    root: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_module, "REGIMES", (SHORT, WIDE))
    outcome, _ = run(root, tmp_path, [], ordered({16: 10, 24: 30, 32: 20}))
    assert outcome.table is not None
    fixed = outcome.table.bodies["mma"].deterministic
    assert fixed.configuration == Configuration(16, 16, 0)
    assert isinstance(fixed.provenance, Measured)
    assert len(fixed.provenance.times) == 2


def test_what_is_written_passes_the_gate(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The record is there, has the times that the table names, and the tiles are compiled."""
    from phases.gate import Context

    for path in TABLES.glob("*.json"):
        (tmp_path / "tables").mkdir(exist_ok=True)
        (tmp_path / "tables" / path.name).write_bytes(path.read_bytes())
    outcome, _ = run(root, tmp_path, [SHORT, WIDE], ordered({16: 30, 24: 20, 32: 10}))
    record = json.loads(outcome.record.read_text())
    assert record["gpu"] == "a GPU"
    assert record["refused"] == []
    assert len(record["measurements"]) == 2 * 9
    figures = tuning_table(Context(1, tmp_path), tables=tmp_path / "tables")
    before = sum(path.read_text().count('"measured":') for path in TABLES.glob("*.json"))
    assert {figure.name: figure.value for figure in figures}["of them measured"] == before + 2


def test_a_wrong_tile_has_no_time_and_ends_the_writing_of_a_table(
    root: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    library = Library()

    def operation(*tensors: Any, **options: Any) -> Any:
        out = tree_verify_attention(*tensors, **options)
        assert isinstance(out, torch.Tensor)
        return out * (1.1 if library.now.row_tile == 24 else 1.0)

    def timer(regime: Regime, candidate: Any, **options: Any) -> Timing:
        assert library.now.row_tile != 24, "a wrong one is not timed"
        return timing(10.0)

    outcome, _ = run(
        root, tmp_path, [SHORT], ordered({}), library=library, operation=operation, timer=timer
    )
    assert (outcome.table, outcome.file) == (None, None)
    assert list((tmp_path / "tables").iterdir()) == []
    assert not (tmp_path / "evidence").exists()
    assert {trial.candidate.configuration.row_tile for trial in outcome.sweep.trials
            if trial.status == "wrong"} == {24}  # fmt: skip
    # What was measured is kept all the same, below the state folder.
    record = json.loads(outcome.record.read_text())
    assert outcome.record.is_relative_to(tmp_path / "state")
    assert [row["row_tile"] for row in record["refused"]] == [24] * 3
    rows = trial_rows(outcome.sweep.trials)
    assert len(rows) == 3
    assert rows[0][:3] == (str(SHORT), "24x16/1", "wrong")
    assert len(rows[0]) == len(TRIAL_COLUMNS)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (GateFailure(FailureKind.NUMERICAL, "wrong when the clock stopped"), "wrong"),
        (RuntimeError("cannot be launched"), "failed"),
    ],
)
def test_what_turns_out_wrong_under_the_clock_is_told(
    root: pathlib.Path, tmp_path: pathlib.Path, error: Exception, status: str
) -> None:
    def timer(*_: Any, **__: Any) -> Timing:
        raise error

    outcome, _ = run(root, tmp_path, [SHORT], ordered({}), timer=timer)
    assert {trial.status for trial in outcome.sweep.trials} == {status}
    assert outcome.table is None
    assert str(error) in str(outcome.sweep.trials[0].why)


def test_deterministic_mode_is_asked_of_the_operation(
    root: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = []

    def operation(*tensors: Any, **options: Any) -> Any:
        modes.append(options["deterministic"])
        return tree_verify_attention(*tensors, **options)

    monkeypatch.setattr(tune_module, "REGIMES", (SHORT,))
    run(root, tmp_path, [], ordered({16: 1, 24: 1, 32: 1}), operation=operation)
    assert modes == [False, False, False, True] * 3


def test_the_times_are_those_of_time_regime(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The default timer, for once, on the CPU: it takes what the sweep hands it."""
    small = dataclasses.replace(PART, tiles=TILES[:1])
    outcome, _ = run(
        root, tmp_path, [Regime(1, 2, 3, 20)], ordered({}), timer=time_regime, part=small
    )
    assert outcome.sweep.right
    assert all(trial.timing and trial.timing.median_us > 0 for trial in outcome.sweep.trials)


def test_a_sweep_needs_a_library_of_the_sources_as_they_are(
    root: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old.so").touch()
    monkeypatch.setenv("KDTREE_LIBRARY", str(tmp_path / "old.so"))
    with pytest.raises(CompileError, match=r"was not built from .* \(run `kd build`\)"):
        run(root, tmp_path, [SHORT], ordered({}), library=None)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_89", "sm_120"])
def test_the_tables_that_were_never_measured_are_the_predicted_ones(architecture: str) -> None:
    table = predicted_table(architecture, declared_tiles()[architecture])
    assert table_text(table) == (TABLES / f"{architecture}.json").read_text()


def test_a_prediction_of_all_tiles_has_both_bodies() -> None:
    table = predicted_table("sm_90", declared_tiles()["sm_90"])
    assert set(table.bodies) == {"mma", "wgmma"}
    assert taken(table, 72, 1) == "72x32/0 unmeasured", "the longest stages of the same rows"
    assert table.bodies["wgmma"].deterministic.configuration == Configuration(72, 64, 0)


def test_the_body_that_is_taken_is_not_the_sweeps_business(
    root: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    outcome, _ = run(root, tmp_path, [SHORT], ordered({16: 30, 24: 20, 32: 10}))
    old = load_table(TABLES / "sm_90.json")
    new = tuned_table(dataclasses.replace(old, body="wgmma"), outcome.sweep, "a.json")
    assert new.body == "wgmma"
    assert new.bodies["wgmma"] == old.bodies["wgmma"], "no wgmma tile was swept"
    assert new.bodies["mma"] != old.bodies["mma"]


def test_the_sweep_covers_the_plans_regimes_and_every_tile() -> None:
    assert len(REGIMES) == len(set(REGIMES)) == 19
    assert {regime.batch for regime in REGIMES} == {1, 4, 16, 64}
    tried = candidates(declared_tiles()["sm_90"], deterministic=True)
    assert len(tried) == 11 * (3 + 1)
    assert {candidate.body for candidate in tried} == {"mma", "wgmma"}


def test_a_table_is_shown_a_row_for_each_entry() -> None:
    measured = entry_rows(dataclasses.replace(load_table(TABLES / "sm_90.json"), body="mma"))
    table = load_table(TABLES / "sm_120.json")
    rows = entry_rows(table)
    assert all(len(row) == len(ENTRY_COLUMNS) for row in (*measured, *rows))
    assert measured[0] == (
        "sm_90", "mma", "16", "any", "16x32", "1", "2 regimes on NVIDIA H200, 2026-11-29"
    )  # fmt: skip
    assert rows[0][:6] == ("sm_120", "mma", "16", "any", "16x16", "the library's")
    assert rows[-1][2] == "deterministic"
    fixed = table.bodies["mma"].deterministic.provenance
    assert isinstance(fixed, Unmeasured)
    assert rows[-1][-1] == f"no: {fixed.reason}"


# ---------------------------------------------------------------------------------------------
# The command.

H200 = Gpu("NVIDIA H200", (9, 0), 0, 132, True)


def kd(*arguments: str) -> Any:
    return tasks.cli.main(list(arguments), prog_name="kd", standalone_mode=False)


def test_without_a_gpu_the_command_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_this_machine", lambda: MACHINE)
    for arguments in (["tune"], ["tune", "--dry-run"]):
        with pytest.raises(MissingError, match="no CUDA GPU"):
            kd(*arguments)


def test_a_dry_run_prints_what_would_be_swept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = dataclasses.replace(MACHINE, gpus=(H200,))
    monkeypatch.setattr(tasks, "_this_machine", lambda: machine)
    monkeypatch.setattr("kdtree_engine.library.kernels", Library)
    monkeypatch.setattr(tune_module, "this_part", lambda library: PART)
    kd("tune", "--dry-run", "--regime", "1,8,9,4096")
    said = capsys.readouterr().out
    assert "32x16/4" in said
    assert "deterministic" not in said
    assert said.endswith("9 trials for the table of sm_120\n")
    kd("tune", "--dry-run", "--json")
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["regimes"]) == 19
    assert len(answer["configurations"]) == 12


@pytest.mark.parametrize(("right", "code"), [(True, 0), (False, 1)])
def test_the_command_says_what_was_written_and_exits_by_it(
    root: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    right: bool,
    code: int,
) -> None:
    def times(regime: Regime, one: Configuration) -> float:
        if not right:
            raise RuntimeError("cannot be launched")
        return float(one.row_tile)

    outcome, _ = run(root, tmp_path, [SHORT], times)
    machine = dataclasses.replace(MACHINE, gpus=(H200,))
    monkeypatch.setattr(tasks, "_this_machine", lambda: machine)
    monkeypatch.setattr(tune_module, "tune", lambda *_, **__: outcome)
    assert kd("tune", "--regime", "1,8,9,40") == code
    said = capsys.readouterr().out.splitlines()
    assert said[0].split("  ")[0] == ("tuning of" if right else "regime")
    assert said[-1].endswith(str(outcome.record))
    assert ("no table was written" in said[-1]) is not right
    assert kd("tune", "--json") == code
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)["measurements"]) == (9 if right else 0)
    assert str(outcome.record) in captured.err


@pytest.mark.parametrize(
    ("gpu", "said"),
    [
        (H200, "regimes on NVIDIA H200"),
        (dataclasses.replace(H200, capability=(12, 0)), "predicted by plan 15"),
        (dataclasses.replace(H200, capability=(8, 6)), "sm_86 has no tuning table"),
    ],
)
def test_doctor_says_which_entries_apply_and_whether_they_were_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], gpu: Gpu, said: str
) -> None:
    machine = dataclasses.replace(MACHINE, gpus=(gpu,))
    monkeypatch.setattr(tasks, "_machine_of", lambda host: machine)
    kd("doctor")
    assert said in capsys.readouterr().out
    kd("doctor", "--json")
    tuning = json.loads(capsys.readouterr().out)["tuning"]
    assert list(tuning) == [f"sm_{gpu.capability[0]}{gpu.capability[1]}"]
