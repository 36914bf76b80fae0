"""What `kd profile` shows, and what it exits with."""

from __future__ import annotations

import json
import pathlib

import click.testing
import pytest
from traces import GEMM, Trace, one_of_two_ranks, two_rounds

import tasks
from kdtree_engine.profiling.summary import KernelTime, profile
from phases import profile_table


def kd(*arguments: object) -> click.testing.Result:
    return click.testing.CliRunner().invoke(tasks.cli, ["profile", *map(str, arguments)])


@pytest.fixture
def rounds(tmp_path: pathlib.Path) -> pathlib.Path:
    return two_rounds().write(tmp_path / "1764-TP-0.trace.json.gz")


def test_the_classes_add_up_to_the_step_and_name_their_lever(rounds: pathlib.Path) -> None:
    *rows, step = profile_table.class_rows(profile([rounds]))
    assert all(len(row) == len(profile_table.CLASS_COLUMNS) for row in (*rows, step))
    assert rows[0][:5] == ("verify attention", "90.0", "45.0%", "1.0", "100.0")
    assert sum(float(row[1]) for row in rows) == pytest.approx(float(step[1]))
    assert all(row[-1] for row in rows)


def test_the_command_prints_the_tables_and_every_unknown_kernel(rounds: pathlib.Path) -> None:
    run = kd("--trace", rounds, "--top", 1)
    assert run.exit_code == 0
    assert "TP0   2      ranges   200.0" in run.stdout
    assert "kernels that no rule knows:" in run.stdout
    assert run.stdout.count("mystery_kernel") == 1
    assert run.stdout.count("tree_verify_kernel<") == 1


def test_before_and_after_in_text_and_json(rounds: pathlib.Path, tmp_path: pathlib.Path) -> None:
    before = two_rounds(reduce_us=40).write(tmp_path / "before.json")
    text = kd("--trace", rounds, "--before", before)
    assert text.exit_code == 0
    assert "communication     20.0       10.0      -10.0      -5.0%" in text.stdout
    told = json.loads(kd("--trace", rounds, "--before", before, "--json").stdout)
    changes = {one["name"]: one["change_us"] for one in told["changes"]}
    assert changes["communication"] == pytest.approx(-10)
    assert told["unknown"] == ["mystery_kernel"]
    assert told["ranks"][0]["told_by"] == "ranges"
    assert told["before"]["files"] == ["before.json"]


def test_without_steps_it_says_so_and_exits_3(tmp_path: pathlib.Path) -> None:
    trace = Trace()
    trace.kernel(GEMM, 0, 5)
    run = kd("--trace", trace.write(tmp_path / "trace.json"))
    assert run.exit_code == 3
    assert "no decode steps can be told apart" in run.stderr


def test_profiles_of_other_ranks_or_steps_are_remarked(
    rounds: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    one = profile([rounds])
    both = profile([rounds, two_rounds().write(tmp_path / "1764-TP-1.trace.json")])
    assert profile_table.remarks(one, one) == []
    assert "differ in their ranks" in profile_table.remarks(one, both)[0]


def test_only_files_without_steps_are_named_as_such(
    rounds: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    trace = Trace()
    trace.kernel(GEMM, 0, 5)
    found = profile([rounds, trace.write(tmp_path / "1764-TP-1.trace.json")])
    (said,) = (line for line in profile_table.remarks(found) if "no decode steps" in line)
    assert said.startswith("1764-TP-1.trace.json: no decode steps can be told apart")


def test_what_before_left_out_is_said(rounds: pathlib.Path, tmp_path: pathlib.Path) -> None:
    trace = Trace()
    for at, mode in ((0.0, "DECODE"), (10.0, "EXTEND"), (50.0, "DECODE"), (60.0, "DECODE")):
        trace.span(f"step[{mode} bs=1]", at, at + 5)
        trace.kernel(GEMM, at + 2, 5, trace.launch(at + 1))
    before = trace.write(tmp_path / "before.json")
    run = kd("--trace", rounds, "--before", before)
    assert "kd: before: 1 passes that were no decode are left out" in run.stderr
    both = profile([before])
    said = "1 passes that were no decode are left out"
    assert profile_table.remarks(both, both) == [said, f"before: {said}"]


def test_ranks_are_shown_each_with_what_it_waits_for_the_others(tmp_path: pathlib.Path) -> None:
    paths = [
        one_of_two_ranks(rank).write(tmp_path / f"1764-TP-{rank}.trace.json.gz") for rank in (0, 1)
    ]
    run = kd("--trace", paths[0], "--trace", paths[1])
    assert run.exit_code == 0
    rows = [line.split() for line in run.stdout.splitlines() if line.startswith("TP")]
    assert [(row[0], *row[-2:]) for row in rows] == [
        ("TP0", "40.0", "20.0"),
        ("TP1", "22.0", "2.0"),
    ]
    assert "ranks wait 11.0 us of a step in collectives, TP1 the least (2.0)" in run.stderr
    told = json.loads(kd("--trace", paths[0], "--trace", paths[1], "--json").stdout)
    assert [rank["wait_us"] for rank in told["ranks"]] == [20, 2]


def test_the_link_is_named_by_the_caller(tmp_path: pathlib.Path) -> None:
    paths = [
        one_of_two_ranks(rank).write(tmp_path / f"1764-TP-{rank}.trace.json.gz") for rank in (0, 1)
    ]
    both = ("--trace", paths[0], "--trace", paths[1])
    run = kd(*both)
    assert "not counted" in run.stdout
    assert "communication: not counted: what the link gives is not known" in run.stderr
    run = kd(*both, "--link-bandwidth", 3.6864)
    assert "50.0% link" in run.stdout
    assert "the link, 3.7 GB/s a direction: as given; no waiting" in run.stderr
    told = json.loads(kd(*both, "--link", "pcie", "--json").stdout)
    assert told["ceilings"]["communication"]["of"] == "pcie"
    assert told["not_counted"] == {}
    assert "rtx6kpro" in told["ceilings"]["communication"]["basis"]
    assert kd(*both, "--link", "pcie", "--link-bandwidth", 1).exit_code == 2
    assert "did you mean pcie?" in str(kd(*both, "--link", "pci").exception)


def test_ranks_whose_collectives_differ_are_not_compared(tmp_path: pathlib.Path) -> None:
    found = profile(
        [
            one_of_two_ranks(0).write(tmp_path / "1764-TP-0.trace.json"),
            two_rounds().write(tmp_path / "1764-TP-1.trace.json"),
        ]
    )
    assert all(row[-1] == "" for row in profile_table.rank_rows(found))
    assert "wait for each other in collectives is not told" in profile_table.remarks(found)[-1]


def test_a_trace_named_twice_is_wrong_usage(rounds: pathlib.Path) -> None:
    run = kd("--trace", rounds, "--trace", rounds)
    assert run.exit_code != 0
    assert "is named twice" in str(run.exception)


def test_a_pause_in_a_step_is_remarked(tmp_path: pathlib.Path) -> None:
    """Nobody asked for five seconds: the last decode step lasts until the next pass begins."""
    trace = Trace()
    for at in (0.0, 10.0, 20.0, 30.0, 40.0, 5_000_000.0):
        trace.span("step[DECODE bs=1]", at, at + 5)
        trace.kernel(GEMM, at + 2, 5, trace.launch(at + 1))
    path = trace.write(tmp_path / "1764-TP-0.trace.json")
    (said,) = profile_table.remarks(profile([path]))
    assert "TP0: its longest step took 4,999,960.0 us, the median 10.0" in said
    assert said in kd("--trace", path).stderr


def test_steps_told_by_graphs_alone_are_remarked(tmp_path: pathlib.Path) -> None:
    trace = Trace()
    for at in (0.0, 10.0, 20.0):
        trace.kernel(GEMM, at + 2, 5, trace.launch(at + 1, graph=True))
    (said,) = profile_table.remarks(profile([trace.write(tmp_path / "trace.json")]))
    assert "steps are told by replays of graphs alone" in said


def test_a_long_name_keeps_its_ends() -> None:
    ((*_, shown),) = profile_table.kernel_rows([KernelTime("a" * 500 + "z", "unknown", 1, 1)])
    assert len(shown) == 120
    assert (shown[0], shown[-1]) == ("a", "z")


def test_recorded_routing_is_read_from_its_file(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The note of a real trace, of a model with two layers of eight experts, two of a token."""
    note = json.loads((root / "tests/data/profile/plain-4096-1.json").read_text())
    note["model"] |= {"num_hidden_layers": 2, "first_k_dense_replace": 0}
    note["model"] |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    (tmp_path / "run.json").write_text(json.dumps(note))
    trace = Trace()
    trace.kernel("fused_moe_kernel", 0, 100)
    path = trace.write(tmp_path / "run-TP-0.trace.json")
    routing = tmp_path / "router.jsonl"
    lines = [{"format": "router-trace", "version": 1, "experts": 8, "top_k": 2}]
    lines += [{"step": step, "layer": 1, "experts": [[0, 1]]} for step in range(4)]
    routing.write_text("".join(json.dumps(line) + "\n" for line in lines))
    bytes_read = 2 * 2 * (3 * 1024 * 64) * 2  # layers, experts, weights, bf16
    for more in ((), ("--routing", routing)):
        told = json.loads(kd("--trace", path, "--json", *more).stdout)["ceilings"]["MoE GEMM"]
        assert told["bytes"] == pytest.approx(bytes_read)
        assert ("router.jsonl" in told["basis"]) == bool(more)
    routing.write_text("none")
    assert "router.jsonl" in str(kd("--trace", path, "--routing", routing).exception)
