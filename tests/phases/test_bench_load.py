"""`kd bench serve` under load: what it measures, judges, keeps and prints, on paced servers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from fake_service import SCALE
from machines import HERE
from paced_server import PacedServer

import tasks
from kdtree_engine.errors import ConfigError, MissingError
from kdtree_engine.machine import Gpu
from phases import bench_load as bench
from phases import load_table
from phases.bench_load import LoadBench, Plan
from phases.checkout import Checkout
from phases.load_client import MEASURED, OTHER_PROMPT, TOO_MANY, Tick
from phases.load_live import Live, vocabulary
from phases.load_point import Point
from phases.service import Service, ServiceFailed

SWEEP = Plan((32,), concurrency=(1, 2), seconds=0.3, new_tokens=8, prompts=3, silence_s=60.0)
PLAN = dataclasses.replace(SWEEP, concurrency=(2,))


class Screen:
    """Keeps what it is told. interrupts: Ctrl-C once a token was measured."""

    def __init__(self, *, interrupts: bool = False) -> None:
        self.notes: list[str] = []
        self.points: list[Point] = []
        self._interrupts = interrupts

    def note(self, text: str) -> None:
        self.notes.append(text)

    def tick(self, point: Point, tick: Tick) -> None:
        if self._interrupts and tick.stage == MEASURED and tick.tokens:
            self._interrupts = False
            raise KeyboardInterrupt

    def ended(self, point: Point) -> None:
        self.points.append(point)


class PacedStart:
    """`serving` for paced servers. servers: by backend and trees; one without is right."""

    def __init__(self, **servers: PacedServer) -> None:
        self.servers = servers
        self.started: list[tuple[str, ...]] = []
        self.ended = 0

    @contextlib.contextmanager
    def __call__(
        self,
        arguments: Sequence[str],
        *,
        log: pathlib.Path,
        environment: Mapping[str, str],
        limit_s: float,
    ) -> Iterator[Service]:
        self.started.append(tuple(arguments))
        log.write_text("well\n")
        backend = arguments[arguments.index("--attention-backend") + 1]
        name = backend + ("_trees" if "NGRAM" in arguments else "")
        try:
            if name in self.servers and "does not start" in self.servers[name].faults:
                raise ServiceFailed("the server ended before it was healthy\nno such thing")
            with self.servers.get(name, PacedServer(a_chunk=4)).serving() as server:
                yield Service(server.port, log)
        finally:
            self.ended += 1


def benched(
    tmp_path: pathlib.Path, start: PacedStart, plan: Plan = PLAN, screen: Screen | None = None
) -> tuple[LoadBench, Any]:
    found, file = bench.bench_load(
        plan,
        checkout=Checkout(tmp_path, tmp_path / "state"),
        machine=HERE,
        command=["kd", "bench", "serve", "--concurrency", "1,2"],
        screen=screen or Screen(),
        scale=SCALE,
        start=start,
    )
    return found, json.loads(file.read_text())


def live(tmp_path: pathlib.Path, server: PacedServer, plan: Plan = PLAN) -> tuple[LoadBench, Any]:
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text('{"vocab_size": 97}')
    server.model = str(model)
    with server.serving():
        found, file = bench.bench_live(
            server.url,
            plan,
            checkout=Checkout(tmp_path, tmp_path / "state"),
            machine=HERE,
            command=["kd"],
            screen=Screen(),
        )
    return found, json.loads(file.read_text())


def test_every_server_is_measured_under_every_load(tmp_path: pathlib.Path) -> None:
    start, screen = PacedStart(), Screen()
    found, document = benched(tmp_path, start, SWEEP, screen)
    assert found.right
    assert document["right"]
    assert [(one["server"], one["concurrency"]) for one in document["points"]] == [
        (server, load) for server in ("kdtree_mla-9", "triton-plain", "triton-9") for load in (1, 2)
    ]
    assert [point.load for point in screen.points] == ["c=1", "c=2"] * 3
    for one in document["points"]:
        assert one["answers"] > 0
        assert one["answers_judged"] > 0
        assert one["errors"] == {}
        assert one["most_in_flight"] == one["concurrency"]
        assert one["inter_token_seconds"]["p99"] > 0
        assert one["chunk_gap_seconds"]["p50"] > one["inter_token_seconds"]["p50"]
        assert one["accept_length"] == pytest.approx(7 / 2)
        assert one["windows"] == []
    assert document["leaked_slots"] == {"kdtree_mla-9": 0, "triton-plain": 0, "triton-9": 0}
    table = load_table.rows(found)
    assert len(table) == 6
    assert all(len(row) == len(load_table.COLUMNS) for row in table)
    assert {row[-1] for row in table} == {"equal"}
    logs = tmp_path / "state" / "bench" / found.run
    assert {path.name for path in logs.iterdir()} == {
        *("kdtree_mla-9.log", "triton-plain.log", "triton-9.log")
    }


def test_the_document_says_what_was_measured_on_what(tmp_path: pathlib.Path) -> None:
    _, document = benched(tmp_path, PacedStart(), SWEEP)
    assert document["kind"] == "load"
    assert document["machine"]["sglang"] == "0.5.23"
    assert document["command"][:3] == ["kd", "bench", "serve"]
    assert document["plan"] == {
        "lengths": [32],
        "concurrency": [1, 2],
        "rates": [],
        "seconds": 0.3,
        "soak": False,
        "new_tokens": 8,
        "prompts": 3,
        "fresh": False,
        "file": None,
        "seed": 1,
        "silence_s": 60.0,
        "window_s": None,
    }
    assert document.keys() >= {
        *("version", "run", "started", "revision", "dirty", "library", "environment", "scale"),
        *("nodes", "graphs", "layers", "near_tie_bound", "kv_slots", "failed", "interrupted"),
    }


def test_a_server_with_other_tokens_is_not_right(tmp_path: pathlib.Path) -> None:
    wrong = PacedStart(kdtree_mla_trees=PacedServer("wrong"))
    found, document = benched(tmp_path, wrong)
    assert not found.right
    assert document["points"][0]["differences"][0]["step"] == 7
    assert "differ of" in load_table.rows(found)[0][-1]
    near, document = benched(tmp_path, PacedStart(kdtree_mla_trees=PacedServer("near-tie")))
    assert near.right
    assert document["points"][0]["differences"][0]["near_tie"]
    assert "near-ties of" in load_table.rows(near)[0][-1]


def test_more_different_answers_than_are_kept_are_not_right(tmp_path: pathlib.Path) -> None:
    """Those that are kept are near-ties; nobody looked at the others."""
    found, _ = benched(tmp_path, PacedStart(kdtree_mla_trees=PacedServer("near-tie")))
    assert found.right
    found.points[0].unjudged[TOO_MANY] += 3
    assert not found.right
    assert "3 answers were not judged: they differ from the 64" in " ".join(
        load_table.remarks(found)
    )
    assert found.points[0].as_json()["answers_not_judged"] == {TOO_MANY: 3}


def test_what_was_held_against_nothing_is_not_right(tmp_path: pathlib.Path) -> None:
    found, document = benched(tmp_path, PacedStart(kdtree_mla_trees=PacedServer("no ids")))
    assert document["points"][0]["answers_judged"] == 0
    assert not found.right
    assert not document["right"]


@pytest.mark.parametrize("fault", ["closes", "short", "error"])
def test_errors_and_short_answers_are_not_right(tmp_path: pathlib.Path, fault: str) -> None:
    start = PacedStart(triton_trees=PacedServer(fault, every=2))
    found, document = benched(tmp_path, start)
    assert not found.right
    last = document["points"][-1]
    assert sum(last["errors"].values()) > 0
    assert not last["right"]
    assert "failed" in load_table.rows(found)[-1][-2]
    assert any(fault[:5] in line for line in load_table.remarks(found))


def test_a_server_that_does_not_start_is_on_record_and_the_others_go_on(
    tmp_path: pathlib.Path,
) -> None:
    start = PacedStart(kdtree_mla_trees=PacedServer("does not start"))
    found, document = benched(tmp_path, start)
    assert not found.right
    assert "no such thing" in document["failed"]["kdtree_mla-9"]
    assert {one["server"] for one in document["points"]} == {"triton-plain", "triton-9"}
    assert load_table.rows(found)[-1][-1] == "no such thing"
    assert all(len(row) == len(load_table.COLUMNS) for row in load_table.rows(found))


def test_slots_that_stay_in_use_are_not_right(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_IDLE_S", 0.5)
    found, document = benched(tmp_path, PacedStart(triton=PacedServer("leaks")))
    assert not found.right
    assert document["leaked_slots"]["triton-plain"] == 7
    assert "triton-plain: 7 KV slots are in use with no request" in load_table.remarks(found)[-1]


def test_a_request_that_never_ends_is_not_right(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_IDLE_S", 0.5)
    found, document = benched(tmp_path, PacedStart(triton=PacedServer("runs on")))
    assert not found.right
    assert "requests run on" in document["failed"]["triton-plain"]
    others, _ = live(tmp_path, PacedServer("runs on"))  # there they may be another caller's
    assert others.right
    assert "cannot be told" in load_table.remarks(others)[-1]


def test_a_soak_has_windows(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_LEAST_WINDOW_S", 0.5)
    plan = dataclasses.replace(PLAN, seconds=2.5, soak=True)
    found, document = benched(tmp_path, PacedStart(), plan)
    assert found.right
    (one, *_) = document["points"]
    assert document["plan"]["window_s"] == 0.5
    assert one["seconds"] >= 2.5
    assert len(one["windows"]) >= 2
    assert all(window["used_slots"] == 0 for window in one["windows"][:-1])
    assert sum(window["seconds"] for window in one["windows"]) == pytest.approx(one["seconds"])
    table = load_table.window_rows(found)
    assert all(len(row) == len(load_table.WINDOW_COLUMNS) for row in table)
    assert len(table) >= 6
    assert any("from the first third to the last" in line for line in load_table.remarks(found))


def test_fresh_prompts_are_new_to_every_request_and_the_first_are_judged(
    tmp_path: pathlib.Path,
) -> None:
    servers = {"kdtree_mla_trees": PacedServer(), "triton": PacedServer()}
    plan = dataclasses.replace(SWEEP, fresh=True)
    found, document = benched(tmp_path, PacedStart(**servers), plan)
    assert found.right
    assert all(one["answers_judged"] > 0 for one in document["points"])
    assert {why for one in document["points"] for why in one["answers_not_judged"]} <= {
        OTHER_PROMPT
    }
    for server in servers.values():
        sent = [tuple(body["input_ids"]) for body in server.streamed]
        assert len(set(sent)) == len(sent)
    ours, plain = (servers[name].streamed for name in ("kdtree_mla_trees", "triton"))
    assert ours[0]["input_ids"] == plain[0]["input_ids"]


def test_rates_are_points_too(tmp_path: pathlib.Path) -> None:
    plan = dataclasses.replace(PLAN, concurrency=(), rates=(20.0,), seconds=1.0)
    found, document = benched(tmp_path, PacedStart(), plan)
    assert found.right
    assert [one["rate"] for one in document["points"]] == [20.0] * 3
    assert document["points"][0]["concurrency"] is None
    assert load_table.rows(found)[0][2] == "20/s"


def test_an_interrupt_keeps_what_was_measured_and_ends_the_server(tmp_path: pathlib.Path) -> None:
    start = PacedStart(kdtree_mla_trees=PacedServer(pace_s=0.05))
    plan = dataclasses.replace(PLAN, seconds=600.0, new_tokens=64)
    found, document = benched(tmp_path, start, plan, Screen(interrupts=True))
    assert found.interrupted
    assert not document["right"]
    assert document["interrupted"]
    (one,) = document["points"]
    assert one["tokens"] > 0
    assert one["ended_early"] == "interrupted"
    assert (len(start.started), start.ended) == (1, 1)


def test_more_at_once_than_the_gates_have_makes_room(tmp_path: pathlib.Path) -> None:
    start = PacedStart(kdtree_mla_trees=PacedServer("does not start"),
                       triton=PacedServer("does not start"),
                       triton_trees=PacedServer("does not start"))  # fmt: skip
    benched(tmp_path, start, dataclasses.replace(PLAN, concurrency=(1, 40)))
    first = start.started[0]
    last = len(first) - 1 - first[::-1].index("--max-running-requests")
    assert first[last + 1] == "64"
    assert first[last + 2 :] == ("--cuda-graph-bs-decode", *map(str, (1, 2, 4, 8, 16, 32, 64)))


def test_a_live_server_is_measured_and_not_ended(tmp_path: pathlib.Path) -> None:
    server = PacedServer(a_chunk=4)
    found, document = live(tmp_path, server)
    assert found.right
    assert document["server"]["model"] == str(tmp_path / "model")
    assert document["server"]["sglang"] == "0.5.23"
    assert {one["server"] for one in document["points"]} == {"live"}
    assert all(one["answers_judged"] for one in document["points"])
    assert server.seen["/flush_cache"] == 0


@pytest.mark.parametrize("more", [(), ("no probabilities",)])
def test_what_load_moves_of_a_live_server_is_told_and_decides_nothing(
    tmp_path: pathlib.Path, more: tuple[str, ...]
) -> None:
    found, _ = live(tmp_path, PacedServer("wrong", *more))
    assert found.right
    assert "differ of" in load_table.rows(found)[0][-1]
    assert not live(tmp_path, PacedServer("short", every=2))[0].right


def test_a_live_server_is_asked_for_the_prompts_of_a_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "once upon"}\n{"text": "a time"}\n')
    server = PacedServer()
    plan = dataclasses.replace(PLAN, lengths=(0,), file=file)
    found, document = live(tmp_path, server, plan)
    assert found.right
    assert {body["text"] for body in server.streamed} == {"once upon", "a time"}
    assert load_table.rows(found)[0][1] == "file"
    assert document["plan"]["file"] == str(file)


def test_a_model_that_is_not_here_needs_a_file(tmp_path: pathlib.Path) -> None:
    server = PacedServer(model="somebody/some-model")
    options: dict[str, Any] = {
        "checkout": Checkout(tmp_path, tmp_path),
        "machine": HERE,
        "command": [],
        "screen": Screen(),
    }
    with server.serving(), pytest.raises(ConfigError, match="--prompts FILE"):
        bench.bench_live(server.url, PLAN, **options)
    with pytest.raises(ServiceFailed, match=r"no answer from http://127\.0\.0\.1:1"):
        bench.bench_live("http://127.0.0.1:1", PLAN, **options)


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:30000", "ftp://a", "http://", "http://a:b", "http://u@a"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        Live.at(url)


@pytest.mark.parametrize("text", ["", "0", "a", "1,,2", "-1", "1.5", "1e9"])
def test_what_is_no_list_of_numbers_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--concurrency: expected positive whole numbers"):
        bench.parse_numbers(text, "--concurrency", whole=True)
    assert bench.parse_numbers("4,1,4", "--concurrency", whole=True) == (1, 4)
    assert bench.parse_numbers("0.5", "--rate", whole=False) == (0.5,)


def kd(*arguments: str) -> int:
    code: int = tasks.cli.main(["bench", "serve", *arguments], "kd", standalone_mode=False)
    return code


@pytest.mark.parametrize(
    "line",
    [
        ("--concurrency", "1", "--rate", "2"),
        ("--soak", "5", "--concurrency", "1,2"),
        ("--fresh",),
        ("--concurrency", "1", "--prompts", __file__),
        ("--url", "http://127.0.0.1:1", "--length", "64", "--prompts", __file__),
    ],
)
def test_options_that_contradict_each_other(line: tuple[str, ...]) -> None:
    with pytest.raises(tasks.click.UsageError):
        kd(*line)


def test_without_a_gpu_only_a_live_server_can_be_loaded(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tasks, "_this_machine", lambda: HERE)
    monkeypatch.setattr(tasks, "_checkout", lambda: Checkout(tmp_path, tmp_path / "state"))
    with pytest.raises(MissingError, match="no CUDA GPU"):
        kd("--concurrency", "1,2")
    (tmp_path / "config.json").write_text('{"vocab_size": 97}')
    line = ["--concurrency", "2", "--seconds", "1", "--length", "64", "--new-tokens", "8"]
    with PacedServer(model=str(tmp_path)).serving() as server:
        assert kd("--url", server.url, *line) == 0
        table = capsys.readouterr()
        assert kd("--url", server.url, *line, "--json") == 0
        document = json.loads(capsys.readouterr().out)
    assert table.out.splitlines()[0].split()[:3] == ["server", "context", "load"]
    assert "live: 0 of 4 prompts of 64 asked once" in table.err
    assert document["right"]
    with PacedServer("short", every=2, model=str(tmp_path)).serving() as server:
        assert kd("--url", server.url, *line) == 1


def test_the_command_loads_the_three_servers(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = Gpu("some GPU", (9, 0), 1, 1, usable=True)
    monkeypatch.setattr(tasks, "_this_machine", lambda: dataclasses.replace(HERE, gpus=(gpu,)))
    monkeypatch.setattr("phases.serve.require_sglang", lambda python: None)
    asked: list[Any] = []
    result = LoadBench(PLAN, "gpu", 9, True, ("live",), 0.1, interrupted=True)

    def measured(plan: Plan, **options: Any) -> Any:
        asked.append((plan, options["nodes"], options["graphs"]))
        return result, tmp_path / "file.json"

    monkeypatch.setattr(bench, "bench_load", measured)
    with pytest.raises(tasks.click.Abort):  # what click makes of an interrupt
        kd("--soak", "30", "--eager", "--length", "64", "--fresh")
    result.interrupted = False
    assert kd("--concurrency", "32,2") == 1
    assert "file.json; the servers' logs are in" in capsys.readouterr().out
    (soak, *eager), (sweep, *usual) = asked
    assert (soak.concurrency, soak.seconds, soak.soak, soak.lengths) == ((16,), 30.0, True, (64,))
    assert soak.fresh
    assert (sweep.concurrency, sweep.prompts, sweep.lengths) == ((2, 32), 32, (1024,))
    assert (eager, usual) == ([9, False], [9, True])


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ('{"vocab_size": 97}', 97),
        ('{"text_config": {"vocab_size": 64}}', 64),
        ('{"vocab_size": 97, "text_config": {"vocab_size": 64}}', 64),
        ('{"vocab_size": 0, "text_config": null}', None),
        ("[97]", None),
    ],
)
def test_ids_are_drawn_of_those_that_the_model_surely_has(
    tmp_path: pathlib.Path, config: str, size: int | None
) -> None:
    (tmp_path / "config.json").write_text(config)
    asked = {"model": str(tmp_path), "url": "http://127.0.0.1:1"}
    if size is None:
        with pytest.raises(ConfigError, match="does not tell how many tokens"):
            vocabulary(asked)
    else:
        assert vocabulary(asked) == size


def test_ctrl_c_ends_the_command_with_what_it_has(
    root: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 97}')
    with PacedServer(pace_s=0.02, model=str(tmp_path)).serving() as server:
        command = [sys.executable, "tasks.py", "bench", "serve", "--url", server.url]
        running = subprocess.Popen(
            [*command, "--concurrency", "2", "--seconds", "600", "--new-tokens", "64"],
            cwd=root,
            env=os.environ | {"KD_STATE": str(tmp_path / "state")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        deadline = time.monotonic() + 60
        while len(server.streamed) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(running.pid, signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert running.returncode == 130, err
    assert "interrupted" in out
    assert err.rstrip().endswith("kd: interrupted")
    (file,) = (tmp_path / "state" / "bench").glob("*.json")
    document = json.loads(file.read_text())
    assert document["interrupted"]
    assert document["points"][0]["tokens"] > 0
