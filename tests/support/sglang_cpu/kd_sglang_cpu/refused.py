"""What the plugin says of servers and layers that it cannot serve, without starting a server.

    python -m kd_sglang_cpu.refused      prints one JSON object

The runner is that of SGLang's attention kit, with one thing about it changed at a time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import torch


def runner_of_the_kit() -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.test.kits.attention_unittest.attention_methods import mla_attention as mla

    return mla.MockMLAModelRunner(
        case=mla.MLAAttentionCase("one", "kdtree_mla", ForwardMode.DECODE, 4, 1, (3,)),
        model_config=mla.TinyMLAModelConfig(
            num_heads=4, kv_lora_rank=512, qk_rope_head_dim=64, hidden_size=64, context_len=64
        ),
        dtype=torch.float32,
        device="cpu",
        max_context_len=64,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
    )


def main() -> dict[str, dict[str, Any]]:
    from sglang.srt.runtime_context import SpawnRanks, get_context, get_parallel, publish
    from sglang.srt.server_args import ServerArgs

    publish(
        ServerArgs(model_path="none", device="cpu", attention_backend="triton"),
        role="scheduler",
        ranks=SpawnRanks(world_rank=0),
    )
    from kd_sglang_cpu import standins

    standins.install()
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

    from kdtree_engine.sglang_ext import start_up

    def said(change: Callable[[Any], object]) -> list[str]:
        runner = runner_of_the_kit()
        change(runner)
        return start_up.refusals("0.5.23", runner)

    def with_settings(**changed: Any) -> list[str]:
        runner = runner_of_the_kit()
        with get_context().override_server_args(**changed):
            return start_up.refusals("0.5.23", runner)

    def with_prefill_by(other: str, mode: str) -> list[str]:
        runner = runner_of_the_kit()
        runner.prefill_attention_backend_str = other
        with get_context().override_server_args(
            speculative_algorithm="NGRAM", speculative_attention_mode=mode
        ):
            return start_up.refusals("0.5.23", runner)

    def with_dcp() -> list[str]:
        runner = runner_of_the_kit()
        with get_parallel().override(attn_dcp_size=2):
            return start_up.refusals("0.5.23", runner)

    def sparse(runner: Any) -> None:
        runner.model_config.hf_config.architectures = ["DeepseekV32ForCausalLM"]
        runner.model_config.hf_config.index_topk = 64

    servers: dict[str, Any] = {
        "right": said(lambda runner: None),
        "fp8 KV": said(lambda runner: setattr(runner, "kv_cache_dtype", torch.float8_e4m3fn)),
        "not MLA": said(
            lambda runner: setattr(runner.model_config, "attention_arch", AttentionArch.MHA)
        ),
        "other widths": said(lambda runner: setattr(runner.model_config, "kv_lora_rank", 256)),
        "encoder": said(lambda runner: setattr(runner.model_config, "is_encoder_decoder", True)),
        "sparse": said(sparse),
        "context parallel": with_dcp(),
        "verified by another": with_prefill_by("fa3", "prefill"),
        "prefilled by another": with_prefill_by("fa3", "decode"),
        "too many nodes": with_settings(speculative_num_draft_tokens=129),
    }

    def layer(**changed: Any) -> Any:
        made = RadixAttention(4, 576, 1.0, 1, 0, v_head_dim=512)
        vars(made).update(changed)
        return start_up.layer_reason(made)

    layers = {
        "right": layer(),
        "dense MHA": layer(qk_head_dim=192, v_head_dim=128),
        "logit cap": layer(logit_cap=30.0),
        "sliding window": layer(sliding_window_size=128),
        "encoder": layer(attn_type=AttentionType.ENCODER_ONLY),
        "cross": layer(is_cross_attention=True),
        "scaled": layer(k_scale=2.0),
        "temperature": layer(xai_temperature_len=8),
    }

    def kind(**changed: Any) -> str:
        runner = runner_of_the_kit()
        vars(runner).update(changed)
        return type(start_up.made(runner)).__name__

    kinds = {"target": kind(), "draft": kind(is_draft_worker=True)}
    os.environ |= {"KDTREE_VERIFY": "0", "KDTREE_DECODE": "0", "KDTREE_GRAPH_BUFFERS": "0"}
    kinds["all off"] = kind()
    return {"servers": servers, "layers": layers, "kinds": kinds}


if __name__ == "__main__":
    print(json.dumps(main()))
