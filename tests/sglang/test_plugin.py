"""The plugin inside the real SGLang, without a server: SGLang's attention kit, and refusals."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
from typing import Any

import pytest

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


def test_sglangs_own_attention_kit(root: pathlib.Path) -> None:
    found = answer(root, "conformance", KDTREE_DECODE="1")
    assert {name: said for name, said in found["cases"].items() if said != "passed"} == {}
    assert len(found["cases"]) == 38
    # Counted, as a case that the parent served passes too.
    assert found["seen"] == {"verify": 72, "branching": 48, "decode": 8}


def test_sglangs_own_attention_kit_sees_a_wrong_mask(root: pathlib.Path) -> None:
    found = answer(root, "conformance", KDTREE_DECODE="1", KD_TEST_WRONG_MASK="1")
    cases = found["cases"]
    trees = {name: said for name, said in cases.items() if "tree" in name or "topk" in name}
    assert len(trees) == 33
    assert "passed" not in trees.values()


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
