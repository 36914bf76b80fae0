"""`kd bench frag`: what it averages, keeps and prints, on churns that are not there."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kdtree_engine.errors import KdError
from kdtree_engine.fragmentation.traffic import Request, Traffic
from kdtree_engine.sglang_ext.defrag.churn import Settings
from phases import bench_frag as bench
from phases.bench_frag import Churned, Sample
from phases.checkout import Checkout

OUTCOME = {
    "finished": 10,
    "leaked": 0,
    "retracted": 0,
    "cached_share": 0.25,
    "alloc_us_median": 4.0,
    "alloc_us_p99": 9.0,
    "alloc_us_max": 90.0,
}


def sample(arrived: int, requests: int, runs: float) -> Sample:
    long = {
        "requests": requests,
        "mean_runs": runs,
        "worst_decile_runs": 2 * runs,
        "mean_tokens": 16384,
        "mean_run_length": 16384 / runs,
        "page_locality": 0.5,
    }
    return {"arrived": arrived, "finished": 0, "long": long, "live": long}


def churned(policy: str, runs: float, **other: Any) -> Churned:
    """Two requests at half of the arrivals, six later; the samples at both ends do not count."""
    samples = [sample(2, 9, 9e9), sample(5, 2, runs), sample(8, 6, 5 * runs), sample(10, 9, 9e9)]
    return Churned(policy, samples, {**OUTCOME, **other})


def benched(tmp_path: pathlib.Path, *found: Churned) -> tuple[bench.FragBench, Any]:
    class Facts:
        def as_json(self) -> dict[str, str]:
            return {"hostname": "here"}

    def run(
        settings: Settings, requests: Sequence[Request], seen: Callable[[Sample], None]
    ) -> Churned:
        one = next(one for one in found if one.policy == settings.policy)
        for each in one.samples:
            seen(each)
        return one

    machine: Any = Facts()
    made, file = bench.bench_frag(
        [one.policy for one in found],
        Traffic(requests=10),
        Settings("stock"),
        seed=7,
        trace=None,
        checkout=Checkout(tmp_path, tmp_path / "state"),
        machine=machine,
        command=["kd", "bench", "frag"],
        progress=lambda done, total, note: None,
        run=run,
    )
    return made, json.loads(file.read_text())


def test_a_request_counts_once_a_sample_while_the_pool_is_churned(tmp_path: pathlib.Path) -> None:
    made, document = benched(tmp_path, churned("stock", 100.0), churned("tier0", 5.0))
    stock, tier0 = bench.rows(made)
    assert stock[:4] == ("stock", "400", "800", "1.000")
    assert tier0[:4] == ("tier0", "20", "40", "0.050")
    assert made.right
    assert document["seed"] == 7
    assert document["traffic"]["prompt"] == "lognormal:12288:0.5"
    assert [one["policy"] for one in document["policies"]] == ["stock", "tier0"]


def test_time_is_told_in_arrivals(tmp_path: pathlib.Path) -> None:
    made, _ = benched(tmp_path, churned("stock", 100.0))
    assert bench.time_columns(made) == ("arrived", "stock")
    assert ("5", "100") in bench.over_time(made)
    assert bench.over_time(made)[-1] == ("10", "")  # the last has arrived: all others leave


def test_without_stock_nothing_is_compared(tmp_path: pathlib.Path) -> None:
    made, _ = benched(tmp_path, churned("tier0", 5.0))
    assert bench.rows(made)[0][3] == ""


@pytest.mark.parametrize("other", [{"leaked": 1}, {"finished": 9}])
def test_a_lost_slot_or_request_is_not_right(tmp_path: pathlib.Path, other: dict[str, int]) -> None:
    made, _ = benched(tmp_path, churned("stock", 9.0), churned("tier0", 9.0, **other))
    assert not made.right


def test_a_churn_that_dies_says_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends at once, as there is no such policy."""
    monkeypatch.setattr(bench, "server_python", lambda: sys.executable)
    with pytest.raises(KdError, match=r"churn of nothing ended with exit code 1: .*ConfigError"):
        bench.run_policy(Settings("nothing"), [], lambda sample: None)
