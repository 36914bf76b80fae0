"""Results of `kd bench serve` that are kept, and those that are not."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from kdtree_engine.errors import ConfigError
from phases.bench_kept import keep_bench
from phases.checkout import Checkout

RIGHT: dict[str, Any] = {"version": 1, "kind": "load", "right": True, "points": []}


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> Checkout:
    (tmp_path / ".kd/bench").mkdir(parents=True)
    (tmp_path / "plans/evidence").mkdir(parents=True)
    return Checkout(tmp_path, tmp_path / ".kd")


def wrote(checkout: Checkout, run: str, document: object) -> str:
    text = json.dumps(document, indent=1)
    (checkout.state / "bench" / f"{run}.json").write_text(text)
    return text


def test_the_newest_run_is_kept_as_it_is(checkout: Checkout) -> None:
    wrote(checkout, "20261129T000000Z-aaaaaa", {"right": True, "servers": []})
    text = wrote(checkout, "20261130T000000Z-bbbbbb", RIGHT)
    kept = keep_bench(checkout, "latest", "cpu-load")
    assert kept == checkout.root / "plans/evidence/serve/cpu-load.json"
    assert kept.read_text() == text
    assert keep_bench(checkout, "20261130", "cpu-load") == kept, "again the same"
    assert keep_bench(checkout, "20261129", None).stem == "20261129T000000Z-aaaaaa"
    with pytest.raises(ConfigError, match="keeps another run"):
        keep_bench(checkout, "20261129", "cpu-load")


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (RIGHT | {"right": False}, "was not right"),
        (RIGHT | {"interrupted": True}, "was interrupted"),
        ({"right": True, "measurements": []}, "expected what kd bench serve wrote"),
        ([], "expected what kd bench serve wrote"),
    ],
)
def test_what_is_worth_nothing_is_not_kept(checkout: Checkout, document: object, said: str) -> None:
    wrote(checkout, "20261130T000000Z-bbbbbb", document)
    with pytest.raises(ConfigError, match=said):
        keep_bench(checkout, "latest", None)
    assert not (checkout.kept_evidence / "serve").exists()


def test_a_run_must_be_told_from_others(checkout: Checkout) -> None:
    with pytest.raises(ConfigError, match="no run begins with 'latest'"):
        keep_bench(checkout, "latest", None)
    for run in ("20261130T000000Z-bbbbbb", "20261130T000001Z-cccccc"):
        wrote(checkout, run, RIGHT)
    with pytest.raises(ConfigError, match="several runs begin with '20261130'"):
        keep_bench(checkout, "20261130", None)
    for wrong in ("../x", "", "a b"):
        with pytest.raises(ConfigError, match="cannot name kept evidence"):
            keep_bench(checkout, "20261130T000001Z", wrong)
