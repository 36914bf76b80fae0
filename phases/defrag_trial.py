"""Runs a trial of `kdtree_engine.sglang_ext.defrag` in the server's Python."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
from collections.abc import Mapping

from phases.bench_frag import churn_environment
from phases.gate import FailureKind, GateFailure
from phases.service import server_python

__all__ = ["run_trial"]

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_PACKAGE = "kdtree_engine.sglang_ext.defrag"


def run_trial(module: str, asked: Mapping[str, object]) -> dict[str, float]:
    """Figures of `module` of the package, asked as JSON; GateFailure with what it found wrong."""
    done = subprocess.run(
        [server_python(), "-W", "ignore", "-m", f"{_PACKAGE}.{module}"],
        input=json.dumps(asked),
        env=os.environ | churn_environment(),
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = (done.stderr.strip() or "no message").splitlines()[-1]
        kind = FailureKind.NUMERICAL if "AssertionError" in said else FailureKind.LAUNCH
        raise GateFailure(kind, said)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found
