"""At which loads a service is profiled, and what is kept of it."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import click.testing
import pytest
from fake_sglang import fake_sglang
from traces import two_rounds

import tasks
from kdtree_engine.errors import ConfigError, MissingError
from phases.profile_run import VARIANTS, Point, profile_points


def run(drive: Any, points: list[Point], folder: pathlib.Path) -> list[Any]:
    return list(
        profile_points(
            drive,
            points,
            folder=folder,
            steps=6,
            seed=3,
            machine=None,
            command=["kd", "profile"],
            revision=("abc", False),
            what="kernel",
        )
    )


def test_each_point_has_a_note_beside_its_traces(tmp_path: pathlib.Path) -> None:
    asked = []

    def drive(request: Mapping[str, Any]) -> Mapping[str, Any]:
        asked.append(request)
        trace = tmp_path / f"{request['name']}-TP-0.trace.json.gz"
        trace.write_bytes(b"")
        return {"traces": [str(trace)], "server": {"version": "1"}, "model": {}, "step_us": 7.5}

    first, second = run(drive, [Point(64, 1), Point(64, 2)], tmp_path)
    assert [(one["context"], one["batch"], one["steps"]) for one in asked] == [
        (64, 1, 6),
        (64, 2, 6),
    ]
    assert first.traces[0].name.startswith("kernel-64-1-")
    note = json.loads(second.note.read_text())
    assert second.note.name == second.traces[0].name.replace("-TP-0.trace.json.gz", ".json")
    assert (note["asked"]["batch"], note["step_us"], note["revision"]) == (2, 7.5, "abc")
    assert note["traces"] == [second.traces[0].name]


def test_what_was_recorded_before_a_point_fails_stays(tmp_path: pathlib.Path) -> None:
    def drive(request: Mapping[str, Any]) -> Mapping[str, Any]:
        if request["batch"] == 2:
            raise MissingError("no room")
        return {"traces": []}

    with pytest.raises(MissingError):
        run(drive, [Point(64, 1), Point(64, 2)], tmp_path)
    assert [path.name[:12] for path in tmp_path.glob("*.json")] == ["kernel-64-1-"]


def test_the_servers_that_can_be_started() -> None:
    names = {name: make(9).name for name, make in VARIANTS.items()}
    assert names == {
        "kernel": "kdtree_mla-9",
        "triton": "triton-9",
        "plain": "triton-plain",
        "decode": "kdtree_mla-plain",
    }


@pytest.fixture
def kd(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("KD_STATE", str(tmp_path / "state"))

    def call(*arguments: object) -> click.testing.Result:
        return click.testing.CliRunner().invoke(tasks.cli, ["profile", *map(str, arguments)])

    return call


def test_a_server_at_a_port_is_profiled_point_by_point(kd: Any, tmp_path: pathlib.Path) -> None:
    text = two_rounds().write(tmp_path / "trace.json").read_text()
    with fake_sglang(trace=text, others=1) as fake:
        run = kd("--port", fake.port, "--context", "64,100", "--steps", 4)
    assert run.exit_code == 0, run.output
    assert run.stdout.count("verify attention") >= 2
    assert run.stdout.startswith("context 64, batch 1\n")
    assert "[1/2] port-" in run.stderr
    assert "kd: context 64, batch 1: 1 requests of others ran too, and count" in run.stderr
    assert len(list((tmp_path / "state" / "profile").glob("*.trace.json.gz"))) == 2


def test_json_is_a_list_with_what_was_profiled(kd: Any, tmp_path: pathlib.Path) -> None:
    text = two_rounds().write(tmp_path / "trace.json").read_text()
    with fake_sglang(trace=text) as fake:
        run = kd("--port", fake.port, "--context", 64, "--batch", "1,2", "--steps", 4, "--json")
    found = json.loads(run.stdout)
    assert [(one["of"]["context"], one["of"]["batch"]) for one in found] == [(64, 1), (64, 2)]
    assert all(one["classes"] for one in found)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "name one of --trace, --host, --port and --serve"),
        (("--port", 1, "--serve", "plain"), "name only one of --trace"),
        (("--trace", __file__, "--context", "4k"), "--context says nothing beside --trace"),
    ],
)
def test_one_service_is_named(kd: Any, arguments: tuple[object, ...], says: str) -> None:
    run = kd(*arguments)
    assert run.exit_code == 2
    assert says in run.stderr


def test_a_context_that_is_no_number(kd: Any) -> None:
    assert isinstance(kd("--port", 1, "--context", "4q").exception, ConfigError)


def test_a_server_that_is_not_there(kd: Any) -> None:
    with fake_sglang() as fake:
        pass
    found = kd("--port", fake.port, "--context", 64).exception
    assert isinstance(found, MissingError)  # exit code 3
    assert f"127.0.0.1:{fake.port}/server_info: no answer" in str(found)
