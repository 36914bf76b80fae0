"""The plugin inside the real SGLang, without a server: SGLang's attention kit, and refusals."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import subprocess
from typing import Any

import pytest

from phases.conformance import (
    Form,
    KitCase,
    decode_cases,
    kit_environment,
    run_backend,
    spoiled_cases,
    tree_cases,
)
from phases.gate import Context
from phases.p3_backend_wiring.kit import conformance_kit_eager
from phases.p4_capture_safety.kit import conformance_kit_graph
from phases.service import server_python

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


def answer(root: pathlib.Path, module: str, **environment: str) -> dict[str, Any]:
    """What a module of the CPU support prints, as JSON, in the Python that has SGLang."""
    paths = [root / "tests/support/sglang_cpu", root / "kdtree-engine"]
    done = subprocess.run(
        [server_python(), "-W", "ignore", "-m", f"kd_sglang_cpu.{module}"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "TRITON_INTERPRET": "1",
            "TORCHDYNAMO_DISABLE": "1",
        }
        | environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def few(form: Form) -> list[KitCase]:
    """A case of each tree, small enough for SGLang's kernels in the interpreter."""
    trees = tree_cases(form, prefixes=((7, 16),), pages=(16,), kinds=("ngram",), own_nodes=(9,))
    for nodes, lengths in ((33, (40,)), (64, (1,))):
        wide = tree_cases(
            form, prefixes=(lengths,), pages=(1,), kinds=("eagle",), own_nodes=(nodes,)
        )
        trees += [case for case in wide if case.drawn]
    return [*trees, *spoiled_cases(trees)]


ON_CPU = functools.partial(run_backend, device="cpu")


def test_sglangs_own_attention_kit(ctx: Context) -> None:
    """In float32: both backends pass, and the kernel fails with a mask of ones."""
    figures = conformance_kit_eager(ctx, run=ON_CPU, cases=[*few(Form.EAGER), *decode_cases()])
    found = {figure.name: figure.value for figure in figures}
    assert found == {
        "cases": 9,
        "failures of kdtree_mla": 0,
        "failures of triton": 0,
        "skips": 0,
        "cases with a mask of ones, which fail": 5,
        "calls of the kernel": 9,
    }


def test_sglangs_own_attention_kit_in_graph_mode(ctx: Context) -> None:
    """The metadata of graphs, without a graph; and the kit's own runner, whose fault is excused."""
    shipped = tree_cases(
        Form.SHIPPED, prefixes=((7, 16), (61, 64)), pages=(1,), kinds=("eagle",), own_nodes=()
    )
    figures = conformance_kit_graph(
        ctx, run=ON_CPU, cases=[*few(Form.CAPTURED), *shipped], graphs=False
    )
    found = {figure.name: figure.value for figure in figures}
    assert found["cases"] == 9
    assert found["failures of kdtree_mla"] == found["failures of triton"] == 2
    assert found["cases with a mask of ones, which fail"] == 5
    hidden = {name: value for name, value in found.items() if name.startswith("both fail")}
    assert set(hidden.values()) == {4}
    assert all("prefixes 61+64" in name for name in hidden)


def test_stock_triton_is_right_where_the_kit_fails_it() -> None:
    done = subprocess.run(
        [server_python(), "-W", "ignore", "-m", "kd_sglang_kit.hidden", "cpu"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | kit_environment("cpu"),
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "verdict: triton is right and the kit is wrong" in done.stdout


def test_what_cannot_be_served_is_refused_or_left_to_triton(root: pathlib.Path) -> None:
    found = answer(root, "refused")
    assert found["servers"] == {
        "right": [],
        "fp8 KV": [
            "the KV cache is float8_e4m3fn for a model in float32 on cpu, expected the same of "
            "bfloat16 or float32 for both"
        ],
        "not MLA": ["the model's attention is MHA, expected MLA"],
        "other widths": ["kv_lora_rank 256 and qk_rope_head_dim 64, expected 512 and 64"],
        "encoder": ["the model is an encoder-decoder, expected a decoder"],
        "sparse": ["the model's attention is sparse (DSA), expected dense MLA"],
        "context parallel": ["decode context parallelism of 2, expected none"],
        "verified by another": [
            "trees would be verified by fa3, expected kdtree_mla: "
            "add --speculative-attention-mode decode"
        ],
        "prefilled by another": [],
        "too many nodes": ["129 draft tokens, expected at most 128"],
    }
    assert found["layers"] == {
        "right": None,
        "dense MHA": "not absorbed MLA",
        "logit cap": "logit cap",
        "sliding window": "sliding window",
        "encoder": "encoder attention",
        "cross": "encoder attention",
        "scaled": "scaled KV",
        "temperature": "attention temperature",
    }
    assert found["kinds"] == {
        "target": "KdtreeMlaBackend",
        "draft": "TritonAttnBackend",
        "all off": "TritonAttnBackend",
    }


def test_trees_of_a_draft_model_in_each_form_of_mask(root: pathlib.Path) -> None:
    found = answer(root, "trees")
    assert {"mask", "positions"} <= set(found.pop("another tree"))
    (says,) = found.pop("a graph without room")
    assert "(81) must match the existing size (90)" in says
    assert found == {
        "T x T": [],
        "T x T in the plugin's buffer": [],
        "full": [],
        "full in a buffer": [],
        "a graph": [],
    }
