"""The allocation policies on SGLang's own structures."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
from typing import Any

import pytest

from kdtree_engine.fragmentation.traffic import Lengths, Traffic, draw
from kdtree_engine.sglang_ext.defrag.churn import Settings
from phases.bench_frag import Churned, run_policy
from phases.service import server_python

SMALL = Traffic(60, 3.0, Lengths("lognormal", 1024, 0.5), Lengths("lognormal", 64, 0.8), 0.5, 4)
"""Of a pool that holds about thirty of these requests: it is full after half of them."""
SETTINGS = Settings("stock", pool=40_000, running=16, chunk=2048, every=10, long=1024)


def tried(root: pathlib.Path, **asked: Any) -> dict[str, float]:
    done = subprocess.run(
        [server_python(), "-W", "ignore", "-m", "kdtree_engine.sglang_ext.defrag.trial"],
        input=json.dumps(asked),
        env=os.environ | {"PYTHONPATH": str(root / "kdtree-engine"), "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


@pytest.mark.parametrize("policy", ["tier0", "best_fit", "sort"])
def test_random_operations_lose_no_slot(root: pathlib.Path, policy: str) -> None:
    """The trial names its seed and operation where it fails."""
    figures = tried(root, policy=policy, operations=5000, seed=3)
    assert figures["allocations"] > 1000
    assert figures["refused"] > 100  # so that "none is refused that stock serves" was tried


@pytest.mark.slow
def test_a_hundred_thousand_operations(root: pathlib.Path) -> None:
    assert tried(root, policy="tier0", operations=100_000)["operations"] == 100_000


def churned(policy: str) -> Churned:
    settings = dataclasses.replace(SETTINGS, policy=policy)
    return run_policy(settings, draw(SMALL, 1), lambda sample: None)


def test_tier0_scatters_less_and_costs_no_request() -> None:
    stock, tier0 = churned("stock"), churned("tier0")
    for one in (stock, tier0):
        assert one.outcome["leaked"] == 0
        assert one.outcome["finished"] == 60
    assert min(sample["free"] for sample in stock.samples) < 0.05  # the pool was full
    theirs, ours = (one.mean("long", "mean_runs") for one in (stock, tier0))
    assert ours is not None
    assert theirs is not None
    assert ours * 5 < theirs
