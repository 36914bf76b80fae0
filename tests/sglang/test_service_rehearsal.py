"""The gates of a GPU host, rehearsed: the same code, on the real server of this machine's CPU.

Prompts are short and there are no graphs. What is tried is what asks, compares and measures: the
log probabilities, aborts, callers that hang up, the load that the scheduler tells, the log.
"""

from __future__ import annotations

import pytest

from kdtree_engine.machine import read_machine
from phases.bench_serve import bench_serve
from phases.checkout import Checkout
from phases.gate import Context
from phases.p3_backend_wiring.speed import eager_speed
from phases.p4_capture_safety import service as graphs
from phases.service_scale import CPU

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


def test_tokens_and_traffic(ctx: Context) -> None:
    """No speculation, trees of 9 and 33 nodes and stock's; all tokens are equal in float32."""
    figures = graphs.graph_tokens(ctx, scale=CPU, seconds=20.0, longest=48)
    found = {figure.name: figure.value for figure in figures}
    for name in ("kdtree_mla-9", "kdtree_mla-33"):
        assert found[f"{name}: tokens equal"] == 2 * 4 * 16
        assert found[f"{name}: near-ties accepted"] == 0
    assert found["traffic: near-ties accepted"] == 0
    assert found["traffic: aborted"] > 0
    assert found["traffic: callers that hung up"] > 0


def test_eager_speed(ctx: Context) -> None:
    figures = eager_speed(ctx, scale=CPU, new_tokens=64, bars={})
    found = {figure.name: figure.value for figure in figures}
    assert found["kdtree_mla-9 at 32"] > 0
    assert found["triton-9 accepts at 32"] > 4


def test_a_bench(ctx: Context) -> None:
    """Three servers, which all give the tokens of the one without speculation."""
    bench, file = bench_serve(
        (32,),
        checkout=Checkout(ctx.scratch, ctx.scratch / "state"),
        machine=read_machine(),
        command=["kd", "bench", "serve"],
        scale=CPU,
        graphs=False,
        new_tokens=64,
        repeats=1,
    )
    assert bench.right, bench.failed
    assert file.is_file()
    assert not bench.differences["kdtree_mla-9"]
