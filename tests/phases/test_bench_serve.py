"""`kd bench serve`: what it measures, keeps and prints, on servers that are not there."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest
import torch
from fake_service import FAST, SCALE, FakeStart
from machines import HERE

import tasks
from kdtree_engine.build import CompileError, sources_digest
from kdtree_engine.errors import MissingError
from kdtree_engine.machine import Gpu
from phases import bench_serve as bench
from phases.checkout import Checkout
from phases.service_scale import Scale
from phases.service_speed import NEW_TOKENS


def benched(
    tmp_path: pathlib.Path, start: FakeStart, scale: Scale = SCALE, new_tokens: int = 20
) -> tuple[bench.ServeBench, Any]:
    class Facts:
        def as_json(self) -> dict[str, str]:
            return {"hostname": "here"}

    machine: Any = Facts()
    found, file = bench.bench_serve(
        (32, 64),
        checkout=Checkout(tmp_path, tmp_path / "state"),
        machine=machine,
        command=["kd", "bench", "serve"],
        new_tokens=new_tokens,
        repeats=1,
        scale=scale,
        start=start,
    )
    return found, json.loads(file.read_text())


def test_a_bench_says_how_many_times_as_fast(tmp_path: pathlib.Path) -> None:
    found, document = benched(tmp_path, FakeStart(seconds=FAST))
    assert found.right
    assert document["right"]
    assert [server["name"] for server in document["servers"]] == [
        *("kdtree_mla-9", "triton-plain", "triton-9", "kdtree_mla-plain")
    ]
    assert [times["length"] for times in document["times"]] == [32, 64]
    assert all(times["triton"] > times["plain"] > 1 for times in document["times"])
    table = bench.rows(found)
    assert len(table) == 8
    assert all(len(row) == len(bench.COLUMNS) for row in table)
    assert table[0][-1] == "equal"
    logs = tmp_path / "state" / "bench" / found.run
    assert {path.name for path in logs.iterdir()} == {
        *("kdtree_mla-9.log", "triton-plain.log", "triton-9.log", "kdtree_mla-plain.log")
    }


def test_a_bench_keeps_what_it_has_where_a_server_fails(tmp_path: pathlib.Path) -> None:
    start = FakeStart("triton-trees does not start", seconds=FAST)
    found, document = benched(tmp_path, start)
    assert not found.right
    assert "no such thing" in document["failed"]["triton-9"]
    assert document["times"][0]["triton"] is None
    assert document["times"][0]["plain"] > 1
    assert bench.rows(found)[-1] == ("triton-9", "", "failed", "", "", "", "", "no such thing")
    found.failed["triton-9"] = ""
    assert bench.rows(found)[-1][-1] == "no message"


def test_servers_that_answer_nothing_are_not_right(tmp_path: pathlib.Path) -> None:
    found, document = benched(tmp_path, FakeStart("empty", seconds=FAST))
    assert not found.right
    assert not document["right"]
    assert set(document["failed"]) == {
        *("kdtree_mla-9", "triton-plain", "triton-9", "kdtree_mla-plain")
    }
    assert "expected 22 tokens and ending 'length', got 0" in document["failed"]["triton-9"]


def test_a_bench_that_measured_less_than_it_was_asked_for_is_not_right(
    tmp_path: pathlib.Path,
) -> None:
    found, _ = benched(tmp_path, FakeStart(seconds=FAST))
    assert found.right
    served = found.served.pop("triton-9")
    assert not found.right
    found.served["triton-9"] = dataclasses.replace(served, speeds=served.speeds[:1])
    assert not found.right


def test_few_new_tokens_divide_by_nothing(tmp_path: pathlib.Path) -> None:
    found, _ = benched(tmp_path, FakeStart("all accepted", seconds=FAST), new_tokens=8)
    assert "nothing was decoded" in found.failed["kdtree_mla-9"]
    assert not found.right


def test_a_library_of_other_sources_starts_no_server(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "lib.so"
    monkeypatch.setattr(bench, "library_path", lambda: library)
    on_gpu = dataclasses.replace(SCALE, device=torch.device("cuda"))
    start = FakeStart(seconds=FAST)
    with pytest.raises(CompileError, match=r"lib\.so was not built from"):
        benched(tmp_path, start, on_gpu)
    assert not start.started
    origin = {"sources": sources_digest(), "nvcc": "13.0", "seconds": 9.0}
    library.with_suffix(".json").write_text(json.dumps(origin))
    assert benched(tmp_path, start, on_gpu)[1]["library"] == {"file": "lib.so", **origin}


def test_a_bench_with_other_tokens_is_not_right(tmp_path: pathlib.Path) -> None:
    paced = {**FAST, "kdtree_mla-trees": 0.003}  # long beside what a busy machine puts in between
    found, document = benched(tmp_path, FakeStart("late token", seconds=paced))
    assert not found.right
    assert document["servers"][0]["differences"][0]["step"] == 21
    assert bench.rows(found)[0][-1] == "differs at 21"
    near, _ = benched(tmp_path, FakeStart("near-tie", seconds=paced))
    assert near.right
    assert bench.rows(near)[0][-1] == "near-tie at 2"


def test_the_command_and_the_gates_time_the_same(root: pathlib.Path) -> None:
    assert f'"--new-tokens",\n    type=click.IntRange(8, 4096),\n    default={NEW_TOKENS}' in (
        root / "tasks.py"
    ).read_text(encoding="utf-8")


def test_without_a_gpu_the_command_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_this_machine", lambda: HERE)
    with pytest.raises(MissingError, match="no CUDA GPU"):
        tasks.cli.main(["bench", "serve"], prog_name="kd", standalone_mode=False)


def test_the_command_prints_a_table_or_the_file(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = Gpu("some GPU", (9, 0), 1, 1, usable=True)
    machine = dataclasses.replace(HERE, gpus=(gpu,))
    monkeypatch.setattr(tasks, "_this_machine", lambda: machine)
    monkeypatch.setattr("phases.serve.require_sglang", lambda python: None)
    asked: list[Any] = []
    result = benched(tmp_path, FakeStart(seconds=FAST))[0]

    def measured(lengths: Any, **options: Any) -> Any:
        asked.append((lengths, options["nodes"], options["graphs"]))
        return result, tmp_path / "state" / "bench" / f"{result.run}.json"

    monkeypatch.setattr(bench, "bench_serve", measured)
    line = ["bench", "serve", "--length", "64", "--length", "64", "--nodes", "33", "--eager"]
    assert tasks.cli.main(line, prog_name="kd", standalone_mode=False) == 0
    assert "times triton" in capsys.readouterr().out
    assert tasks.cli.main([*line[:2], "--json"], prog_name="kd", standalone_mode=False) == 0
    assert json.loads(capsys.readouterr().out)["right"]
    assert asked == [([64], 33, False), ((1024, 4096, 16384, 65536), 9, True)]
