"""Trace files as a stream: real ones, large ones in little memory, and damaged ones in one line."""

from __future__ import annotations

import gzip
import json
import pathlib
import subprocess
import sys

import pytest
import torch
from traces import two_rounds

from kdtree_engine.errors import ConfigError
from kdtree_engine.profiling import reader
from kdtree_engine.profiling.reader import TraceFile

EVENTS = [{"ph": "X", "name": 'a, ] \\ " }', "ts": 1.5}, {"args": {"nested": [1, {}]}}, {}]


def read(path: pathlib.Path) -> list[dict[str, object]]:
    return list(TraceFile(path).events())


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz", "gzip_without_its_name"])
def test_both_forms_packed_or_not(tmp_path: pathlib.Path, name: str) -> None:
    path = tmp_path / name
    for document in ({"a": 1, "traceEvents": EVENTS, "b": [2]}, EVENTS):
        data = json.dumps(document).encode()
        path.write_bytes(data if path.suffix == ".json" else gzip.compress(data))
        trace = TraceFile(path)
        assert list(trace.events()) == EVENTS
        assert trace.header == ({"a": 1, "b": [2]} if isinstance(document, dict) else {})


def test_wherever_the_window_ends_the_events_are_the_same(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = {"number": 12345, "word": "å", "true": True, "traceEvents": EVENTS, "last": -1.5e3}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document, ensure_ascii=False, indent=1))
    for size in range(1, 40):
        monkeypatch.setattr(reader, "_CHUNK", size)
        trace = TraceFile(path)
        assert {"traceEvents": list(trace.events()), **trace.header} == document


def test_a_real_trace_of_torch_profiler(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "real.trace.json"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        for _ in range(3):
            with torch.profiler.record_function("step[VERIFY bs=1]"):
                torch.ones(8, 8) @ torch.ones(8, 8)
    recorded.export_chrome_trace(str(path))
    trace = TraceFile(path)
    events = list(trace.events())
    assert events == json.loads(path.read_text())["traceEvents"]
    spans = [one for one in events if one.get("cat") == "user_annotation"]
    assert [one["name"] for one in spans if "step" in one["name"]] == ["step[VERIFY bs=1]"] * 3
    assert sum(one.get("name") == "aten::mm" for one in events) == 3
    assert trace.header["schemaVersion"] == 1


def test_progress_ends_at_the_size_of_the_file(tmp_path: pathlib.Path) -> None:
    path = two_rounds().write(tmp_path / "trace.json.gz")
    seen: list[tuple[int, int]] = []
    list(TraceFile(path).events(lambda done, size: seen.append((done, size))))
    assert seen[-1] == (path.stat().st_size, path.stat().st_size)
    assert seen == sorted(seen)


WHOLE = json.dumps({"schemaVersion": 1, "traceEvents": EVENTS}, indent=1)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is empty, line 1"),
        (" \n\n", "is empty, line 3"),
        ("hello", "is no JSON of a trace, line 1"),
        ('"text"', "is no JSON of a trace"),
        ('{"name": "someone"}', "has no traceEvents"),
        ("{}", "has no traceEvents"),
        ('{"traceEvents": 3}', "has traceEvents that are no list"),
        ('{"traceEvents": [1]}', "has an event that is no JSON object"),
        ('{"traceEvents": [{} {}]}', "has no ',' between two events"),
        ('{"traceEvents": [{}]} x', "goes on after the end of its JSON"),
        ('{"a" 1}', "has no ':' after 'a'"),
        ('{"a": 1 "b": 2}', "has no ',' after the value of 'a'"),
        ("{1: 2}", "has no name of a field"),
        ('{"traceEvents": [\n{},\n{"a": nothing},\n{}]}', "is damaged: Expecting value, line 3"),
        ('{"traceEvents": [\n{},\n{"a": "cut', "is cut off, line 3"),
        ('{"traceEvents": [\n{},\n{"a": 1', "is cut off, line 3"),
        ('{"traceEvents": [' + '{"a":' * 100_000, "nests its JSON too deep"),
    ],
)
def test_what_is_no_trace_is_one_line_with_its_place(
    tmp_path: pathlib.Path, text: str, complaint: str
) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert complaint in str(caught.value)


def test_wherever_a_file_is_cut_off_it_says_so(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "trace.json"
    for length in range(1, len(WHOLE)):
        path.write_text(WHOLE[:length])
        with pytest.raises(ConfigError, match=r"is cut off|is damaged: Expecting"):
            read(path)


def test_damaged_gzip_and_other_bytes(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "trace.json.gz"
    packed = gzip.compress(json.dumps({"traceEvents": EVENTS * 100}).encode())
    path.write_bytes(packed[:-20])
    with pytest.raises(ConfigError, match="is cut off: its gzip has no end"):
        read(path)
    path.write_bytes(packed[:30] + b"\xff\xff\xff\xff" + packed[34:])
    with pytest.raises(ConfigError, match="is damaged gzip"):
        read(path)
    path.write_bytes(b'{"traceEvents": [\n{"a": "\xff"}]}')
    with pytest.raises(ConfigError, match="is not UTF-8"):
        read(path)


def test_a_value_that_never_ends_is_refused_before_it_fills_the_memory(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "MOST_CHARACTERS", 1000)
    monkeypatch.setattr(reader, "_CHUNK", 100)
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": [\n{"a": "' + "x" * 100_000)
    with pytest.raises(ConfigError, match="is damaged: Unterminated string"):
        read(path)


MEASURE = """
import pathlib, resource, sys
from kdtree_engine.profiling.reader import TraceFile
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
count = sum(1 for _ in TraceFile(pathlib.Path(sys.argv[1])).events())
print(count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_a_hundred_megabytes_take_a_few(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "large.json"
    arguments = {"External id": 1, "grid": [132, 1, 1], "block": [384, 1, 1], "stream": 7}
    event = {"ph": "X", "cat": "kernel", "name": "k" * 200, "ts": 1.25, "dur": 2, "args": arguments}
    line = json.dumps(event, indent=1) + ",\n"
    count = 100_000_000 // len(line) + 1
    with path.open("w") as file:
        file.write('{"traceEvents": [')
        file.writelines(line for _ in range(count))
        file.write("{}]}")
    assert path.stat().st_size > 100_000_000
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True
    )
    events, kilobytes = map(int, done.stdout.split())
    assert events == count + 1
    assert kilobytes < 20_000
