"""Traffic that is the same for a seed, and traces in the two public formats."""

from __future__ import annotations

import json
import pathlib
import random
import time

import pytest

from kdtree_engine.errors import ConfigError
from kdtree_engine.fragmentation.traffic import Lengths, Request, Traffic, draw, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


def test_a_seed_is_a_traffic() -> None:
    traffic = Traffic(requests=200)
    assert draw(traffic, 3) == draw(traffic, 3) != draw(traffic, 4)


def test_shares_and_lengths_are_what_was_asked() -> None:
    traffic = Traffic(requests=2000, rate=4.0, shared=0.25, aborts=0.1)
    drawn = draw(traffic, 1)
    assert sum(len(one.prompt) == 2 for one in drawn) / 2000 == pytest.approx(0.25, abs=0.03)
    assert sum(one.abort_after is not None for one in drawn) / 2000 == pytest.approx(0.1, abs=0.02)
    assert 2000 / drawn[-1].arrival_s == pytest.approx(4.0, rel=0.1)
    lengths = sorted(one.prompt_tokens for one in drawn)
    assert lengths[1000] == pytest.approx(12288, rel=0.1)
    assert all(one.abort_after is None or 1 <= one.abort_after <= one.output for one in drawn)


@pytest.mark.parametrize("text", ["fixed:512", "uniform:10:20", "lognormal:4096:0.5"])
def test_a_distribution_is_written_as_it_is_read(text: str) -> None:
    assert str(Lengths.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fixed",
        "fixed:0",
        "uniform:9:3",
        "lognormal:9",
        "normal:1:2",
        "fixed:nan",
        "fixed:1e308",
    ],
)
def test_other_distributions_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Lengths.parse(text)


def test_a_wide_distribution_is_held_within_its_bounds() -> None:
    drawn = {Lengths.parse("lognormal:100:1000").draw(random.Random(seed)) for seed in range(50)}
    assert drawn == {6, 1600}


def test_an_azure_trace(tmp_path: pathlib.Path) -> None:
    (tmp_path / "code.csv").write_text(AZURE)
    first, second = read_trace(tmp_path / "code.csv")
    assert first == Request(0.0, ((0, 374),), 44)
    assert second.arrival_s == pytest.approx(4.314579)


def test_a_mooncake_trace_shares_blocks(tmp_path: pathlib.Path) -> None:
    lines = [
        {"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [46, 48]},
        {"timestamp": 0, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]},
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert read_trace(tmp_path / "trace.jsonl") == [
        Request(0.0, ((46, 512), (47, 88)), 52),
        Request(3.0, ((46, 512), (48, 188)), 5),
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "time,in,out\n1,2,3\n"),
        ("a.csv", ""),
        ("a.jsonl", '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}'),
        ("a.jsonl", "no json"),
    ],
)
def test_another_file_is_refused(tmp_path: pathlib.Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError):
        read_trace(tmp_path / name)


def test_arrivals_are_the_same_in_every_zone(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour that a zone leaves out in spring is an hour of the trace all the same."""
    path = tmp_path / "spring.csv"
    rows = ("2024-03-31 02:00:00.1,5,5", "2024-03-31 03:00:00.2,5,5")
    path.write_text("\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *rows)))
    for zone in ("UTC", "Europe/Berlin"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        assert read_trace(path)[1].arrival_s == pytest.approx(3600.1)
    monkeypatch.undo()
    time.tzset()


def mooncake(**changed: object) -> str:
    line = {"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [1]}
    return json.dumps(line | changed)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (mooncake(timestamp=float("nan")), "timestamp: expected milliseconds, got nan"),
        (mooncake(timestamp=float("-inf")), "timestamp: expected milliseconds"),
        (mooncake(timestamp=10**400), "timestamp: expected milliseconds, got 1000"),
        (mooncake(timestamp=True), "timestamp: expected milliseconds"),
        (mooncake(input_length=-5), "input_length: expected a whole number below 16777216"),
        (mooncake(input_length=float("inf")), "input_length: expected a whole number"),
        (mooncake(output_length=-5), "output_length: expected a whole number"),
        (mooncake(output_length="5"), "output_length: expected a whole number"),
        (mooncake(hash_ids=[-1]), "hash_ids: expected a whole number"),
        (mooncake(hash_ids=[2**40]), "hash_ids: expected a whole number below 549755813888"),
        (mooncake(hash_ids=["a"]), "hash_ids: expected a whole number"),
        ("[" * 100_000, "RecursionError"),
        ("[1]", "TypeError"),
    ],
)
def test_damaged_lines_are_named(tmp_path: pathlib.Path, text: str, says: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{mooncake()}\n{text}\n")
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert says in str(caught.value)
    assert str(caught.value).startswith(f"{path} is no trace: ")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("2023-11-16 18:17:03.97,-5,5", "request 1: ContextTokens: expected a whole number"),
        ("2023-11-16 18:17:03.97,5,-5", "request 1: GeneratedTokens: expected a whole number"),
        (f"2023-11-16 18:17:03.97,5,{10**20}", "GeneratedTokens: expected a whole number"),
        ("2023-11-16 18:17:03.97,5", "TypeError"),
        ("soon,5,5", "Invalid isoformat"),
        (f"{'a' * 200_000},5,5", "field larger than field limit"),
    ],
)
def test_damaged_rows_are_named(tmp_path: pathlib.Path, row: str, says: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{row}\n")
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert says in str(caught.value)
