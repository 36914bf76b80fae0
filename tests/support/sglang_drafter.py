"""SGLang's own DFlash draft model, loaded from a folder, over one block; no server, no KV pool.

    python sglang_drafter.py ASKED ANSWERED          with sglang_cpu/ on PYTHONPATH

ASKED, of torch.save: `folder` of the drafter; `features` [S, features * hidden] of the context;
`embeddings` [block, hidden] of the block, whose first token stands at place S. ANSWERED gets the
block's hidden states, [block, hidden].

Only the attention itself is another one: SGLang's wants a KV pool. What its worker writes there,
the context's keys and values, is made by the calls that the worker makes.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import torch


class _Attention(torch.nn.Module):
    """Of a block over the context and itself, not causal, as the layer asks its backend to be."""

    def __init__(self, layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        from sglang.srt.layers.radix_attention import AttentionType

        assert layer.attn_type == AttentionType.ENCODER_ONLY
        assert layer.sliding_window_size == -1
        self.heads, self.kv_heads = layer.tp_q_head_num, layer.tp_k_head_num
        self.scale, self.keys, self.values = layer.scaling, keys, values

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: Any) -> torch.Tensor:
        def by_head(rows: torch.Tensor, heads: int) -> torch.Tensor:
            of_head = rows.view(rows.shape[0], heads, -1).transpose(0, 1)
            return of_head.repeat_interleave(self.heads // heads, dim=0)

        keys = by_head(torch.cat([self.keys, k]), self.kv_heads)
        values = by_head(torch.cat([self.values, v]), self.kv_heads)
        scores = by_head(q, self.heads) @ keys.transpose(1, 2) * self.scale
        return (scores.softmax(-1) @ values).transpose(0, 1).flatten(1)


def main(asked: str, answered: str) -> None:
    request = torch.load(asked)
    folder = pathlib.Path(request["folder"])
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.weight_utils import safetensors_weights_iterator
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(model_path=str(folder), device="cpu", attention_backend="triton")
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0))
    from kd_sglang_cpu import standins

    standins.install()
    from sglang.srt.distributed.parallel_state import (
        init_distributed_environment,
        initialize_model_parallel,
    )

    where = f"file://{answered}.rendezvous"
    init_distributed_environment(
        world_size=1, rank=0, local_rank=0, distributed_init_method=where, backend="gloo"
    )
    initialize_model_parallel(backend="gloo")

    config = ModelConfig(str(folder), is_draft_model=True).hf_config
    cls, _ = ModelRegistry.resolve_model_cls(config.architectures)
    model = cls(config)
    loaded = dict(safetensors_weights_iterator([str(folder / "model.safetensors")]))
    model.load_weights(loaded.items())

    with torch.inference_mode():
        context = model.project_target_hidden(request["features"])
        places = torch.arange(context.shape[0])
        for layer in model.layers:
            attention = layer.self_attn
            keys, values = attention.kv_proj_only(
                model.prepare_context_hidden_for_kv(layer, context)
            )
            keys = attention.apply_k_rope(places, attention.apply_k_norm(keys))
            attention.attn = _Attention(attention.attn, keys, values)
        block = request["embeddings"]
        out = model(None, torch.arange(len(block)) + len(places), None, input_embeds=block)
    torch.save(out.hidden_states.clone(), answered)


if __name__ == "__main__":
    main(*sys.argv[1:])
