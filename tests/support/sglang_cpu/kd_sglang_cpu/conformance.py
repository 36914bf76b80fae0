"""SGLang's own attention kit, run against `kdtree_mla` on the CPU, eager, in float32.

    python -m kd_sglang_cpu.conformance [BACKEND]

prints one JSON object: what each case gave, "passed" or the first line of what went wrong, and
how many trees and decoded tokens the kernel was given (`observe`, which can also spoil the mask).
Beside the kit's trees (chains, and a root with two leaves) it runs this project's: up to 64 nodes,
drawn from a seed. The last case runs the metadata of CUDA graphs, without a graph.

The kit's oracle is its own, in torch, over dense masks.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import sys
import unittest
from typing import Any

import torch

WIDTHS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "dtype": torch.float32, "device": "cpu"}
PREFIXES = ((1,), (7, 16, 40), (0, 33))


def drawn_tree(nodes: int, seed: int) -> torch.Tensor:
    """Who sees whom in a random tree, parents first: [nodes, nodes] bool."""
    draw = random.Random(seed)
    sees = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        sees[node] |= sees[draw.randrange(node)]
    return sees


def main(backend: str) -> dict[str, Any]:
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    publish(
        ServerArgs(model_path="none", device="cpu", attention_backend="triton"),
        role="scheduler",
        ranks=SpawnRanks(world_rank=0),
    )
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.test.kits.attention_unittest.attention_methods import mla_attention
    from sglang.test.kits.attention_unittest.runner_modes import (
        speculative_target_verify_runner as verify,
    )

    results: dict[str, str] = {}

    def attempt(name: str, run: Any) -> None:
        try:
            with torch.no_grad():
                run()
            results[name] = "passed"
        except Exception as error:
            results[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"

    def case(page: int, prefixes: tuple[int, ...], nodes: int) -> Any:
        return mla_attention.MLAAttentionCase(
            name="verify",
            backend=backend,
            forward_mode=ForwardMode.TARGET_VERIFY,
            num_heads=4,
            page_size=page,
            prefix_lens=prefixes,
            extend_lens=(nodes,) * len(prefixes),
        )

    for page, prefixes, topk, kind in itertools.product(
        (1, 16), PREFIXES, (1, 3), ("eagle", "ngram")
    ):
        attempt(
            f"{kind} topk {topk} page {page} prefixes {prefixes}",
            lambda page=page, prefixes=prefixes, topk=topk, kind=kind: (
                verify.run_mla_eagle_verify_case(
                    unittest.TestCase(),
                    case(page, prefixes, 3),
                    topk=topk,
                    spec_kind=kind,
                    **WIDTHS,
                )
            ),
        )
    for nodes, prefixes in itertools.product((9, 33, 64), PREFIXES):
        verify._draft_tree_mask = lambda draft_token_num, topk, device: drawn_tree(
            draft_token_num, draft_token_num
        )
        attempt(
            f"drawn tree of {nodes} nodes, prefixes {prefixes}",
            lambda nodes=nodes, prefixes=prefixes: verify.run_mla_eagle_verify_case(
                unittest.TestCase(),
                case(1, prefixes, nodes),
                topk=1,
                spec_kind="ngram",
                max_context_len=128,
                **WIDTHS,
            ),
        )
    for page, prefixes in itertools.product((1, 16), ((6,), (14, 15, 16))):
        decode = dataclasses.replace(
            case(page, prefixes, 1), forward_mode=ForwardMode.DECODE, extend_lens=()
        )
        attempt(
            f"decode page {page} prefixes {prefixes}",
            lambda decode=decode: mla_attention.run_mla_attention_case(
                unittest.TestCase(), decode, **WIDTHS
            ),
        )
    attempt("graph metadata", lambda: graph_metadata(verify, mla_attention, case))
    from kd_sglang_cpu import observe

    return {"cases": results, "seen": observe.seen()}


def graph_metadata(verify: Any, mla: Any, case: Any) -> None:
    """The buffers of CUDA graphs, with a stale mask behind this batch's, give the eager output."""
    nodes, most = 9, 128
    fixture = mla.build_mla_attention_fixture(
        unittest.TestCase(),
        case(1, (7, 16, 40), nodes),
        max_context_len=most,
        hidden_size=64,
        **WIDTHS,
    )
    backend, batch = fixture.backend, fixture.forward_batch
    backend.init_cuda_graph_state(max_bs=3, max_num_tokens=3 * nodes)
    assert backend.cuda_graph_kv_indices.numel() == 3 * most  # and not 3 * nodes * most
    verify._prepare_target_verify_batch(batch, fixture.case, "cpu")
    batch.spec_info = verify._make_spec_verify_input(
        fixture.case, batch, topk=1, device="cpu", spec_kind="ngram"
    )
    inputs = verify.mla_fixture_inputs(fixture)
    with verify.forward_context(verify.ForwardContext(attn_backend=backend)):
        backend.init_forward_metadata(batch)
        eager = verify.run_mla_forward(fixture, batch, inputs).clone()
        batch.encoder_lens = None
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        backend._verify_mask.buffer[batch.spec_info.custom_mask.numel() :].fill_(1)  # stale
        captured = verify.run_mla_forward(fixture, batch, inputs)
    torch.testing.assert_close(captured, eager, rtol=0.0, atol=0.0)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1] if len(sys.argv) > 1 else "kdtree_mla")))
