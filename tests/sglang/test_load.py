"""A load test against the real SGLang on this CPU, and SGLang's own tool beside ours."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess

import pytest
from paced_server import PacedServer

from kdtree_engine.machine import read_machine
from phases.bench_load import Plan, bench_load
from phases.checkout import Checkout
from phases.gate import Context
from phases.load_client import Order, running
from phases.load_plot import LineScreen
from phases.load_point import Point
from phases.load_prompts import drawn
from phases.service import server_python
from phases.service_scale import CPU, kernel, plain

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

_TOKENIZER = """
import sys
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
words = Tokenizer(models.WordLevel({str(one): one for one in range(97)}, unk_token="0"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0").save_pretrained(sys.argv[1])
"""


def test_a_sweep_on_the_kernel_and_without_speculation(ctx: Context) -> None:
    """Streams of several tokens a chunk; all tokens are equal in float32, and no slot is lost."""
    with LineScreen(print) as screen:
        bench, file = bench_load(
            Plan((32,), concurrency=(1, 2), seconds=3.0, new_tokens=16, prompts=2),
            checkout=Checkout(ctx.scratch, ctx.scratch / "state"),
            machine=read_machine(),
            command=["kd", "bench", "serve", "--concurrency", "1,2"],
            screen=screen,
            graphs=False,
            chosen=(kernel(9), plain()),
            scale=CPU,
        )
    assert bench.right, (bench.failed, bench.differences)
    assert not bench.differences
    points = json.loads(file.read_text())["points"]
    assert [(one["server"], one["concurrency"]) for one in points] == [
        (server, load) for server in ("kdtree_mla-9", "triton-plain") for load in (1, 2)
    ]
    assert all(one["answers_judged"] for one in points)
    assert points[0]["accept_length"] > 1
    assert points[0]["tokens_a_chunk"] > 1
    assert points[2]["tokens_a_chunk"] == 1.0
    assert bench.leaked == {"kdtree_mla-9": 0, "triton-plain": 0}


def test_sglangs_own_tool_says_the_same_of_one_pace(tmp_path: pathlib.Path) -> None:
    """Of a server with text, which that tool needs: 41 tokens a chunk of 4 each 50 ms.

    Gaps are 10 of 50 ms for 40 tokens, so the mean of inter-token latencies is 12.5 ms, and no
    busy machine makes it less.
    """
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    environment.pop("PYTHONPATH", None)
    tokenizer, file = tmp_path / "tokenizer", tmp_path / "result.jsonl"
    python = server_python()
    subprocess.run([python, "-c", _TOKENIZER, str(tokenizer)], check=True, env=environment)
    with PacedServer(pace_s=0.05, a_chunk=4, model=str(tokenizer)).serving() as server:
        subprocess.run(
            [
                *(python, "-m", "sglang.bench_serving", "--backend", "sglang"),
                *("--base-url", server.url, "--model", str(tokenizer)),
                *("--tokenizer", str(tokenizer), "--dataset-name", "random-ids"),
                *("--tokenize-prompt", "--num-prompts", "6", "--random-input-len", "16"),
                *("--random-output-len", "41", "--random-range-ratio", "1"),
                *("--max-concurrency", "2", "--output-file", str(file)),
            ],
            check=True,
            env=environment,
            timeout=200,
        )
        point = Point("paced", 16, 2, 0.0, 41)
        prompts = drawn([tuple(range(2, 18))], fresh=False, vocabulary=97, seed=1)
        with running(Order(server.url, prompts, 41, 2.0, concurrency=2)) as client:
            for tick in client.ticks():
                point.add(tick)
    theirs = json.loads(file.read_text().splitlines()[-1])
    ours = point.inter_token.mean
    assert ours is not None
    assert 0.0120 < ours < 0.0250
    assert 12.0 < theirs["mean_itl_ms"] < 25.0
    middle = point.inter_token.percentile(50)
    assert middle is not None
    assert 1e3 * middle == pytest.approx(theirs["median_itl_ms"], rel=0.3)
    # What a reader waits for the next piece is four times that, which their tool does not tell.
    assert point.chunk_gap.mean == pytest.approx(4 * ours, rel=0.05)
