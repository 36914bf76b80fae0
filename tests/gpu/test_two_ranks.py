"""Tensor parallel: the real server on two GPUs, each rank with half of the heads, in graphs.

The tokens of no speculation, on two ranks as well, but for near-ties. How many of those there may
be is not asked: these are too few answers, and `graph-service-token-exact` asks it.
"""

from __future__ import annotations

import dataclasses
import pathlib

import pytest
import torch

from phases.gate import Context
from phases.service import server_sglang
from phases.service_compared import ask_servers, compared
from phases.service_graphs import ARGUMENTS, ENVIRONMENT, replays_in
from phases.service_scale import GPU, kernel, plain, triton
from phases.service_tokens import figures_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
SCALE = dataclasses.replace(GPU, lengths=(1024, 16384), batches=(1, 4), new_tokens=24)
RANKS = (
    *("--tp-size", "2"),
    # Sums over the ranks by NCCL: the other ways ask more of a host, and attention has no part.
    "--disable-custom-all-reduce",
    "--enforce-disable-flashinfer-allreduce-fusion",
)


def test_two_ranks_give_the_tokens_of_no_speculation(tmp_path: pathlib.Path) -> None:
    if server_sglang() is None:
        pytest.skip("SGLang is not installed; KD_SGLANG_PYTHON names a Python that has it")
    found = ask_servers(
        Context(seed=1, scratch=tmp_path),
        (plain(), kernel(9), triton(9)),
        scale=SCALE,
        graphs=True,
        more=(*RANKS, *ARGUMENTS),
        environment=ENVIRONMENT,
    )
    comparisons, bounds, figures = compared(found, scale=SCALE)
    figures = [*figures_of(comparisons, bounds), *figures]
    for figure in figures:
        print(f"{figure.name}: {figure.value:g}")
    for one in comparisons:
        if one.stock:
            continue
        assert [str(found) for found in one.differences if not found.near_tie] == []
        assert one.tokens > one.wanted / 2, "too little was compared"
    ours = found[kernel(9)]
    said = [line for line in ours.log.splitlines() if "kdtree_mla: SGLang" in line]
    print("\n".join(said))
    assert [sum(f"TP{rank}" in line for line in said) for rank in (0, 1)] == [1, 1]
    verified = sum(answer.verified for answer in ours.answers.values())
    replays = replays_in(ours.log)
    print(f"trees verified: {verified}; replays, of both ranks: {replays}")
    assert replays.verified >= 2 * verified > 0, "each rank prints its replays"
    assert not replays.eager
