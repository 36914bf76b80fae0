"""A small MLA model with random weights, as files that SGLang loads: config and safetensors.

The weights are real files and not SGLang's `--load-format dummy`, whose greedy output falls into
loops: a loop is predicted by any drafter and hides a wrong mask.
"""

from __future__ import annotations

import json
import pathlib
import struct

import torch

__all__ = ["write_service_model", "write_small_model"]

_NOPE, _ROPE, _VALUE = 128, 64, 128


def write_small_model(
    folder: pathlib.Path,
    *,
    seed: int,
    vocabulary: int = 64,
    hidden: int = 128,
    layers: int = 2,
    latent: int = 512,
    dtype: torch.dtype = torch.float32,
    heads: int = 4,
    positions: int = 4096,
    yarn: int = 4,
    width: float = 2.0,
) -> pathlib.Path:
    """Write a DeepSeek-V2-shaped model (rope 64) and return its folder.

    positions: the longest context, `yarn` times what the rotary embedding is made for. width: of
    the query weights. Attention weights are drawn wide, so that what a token sees decides what
    comes next: then a wrong mask shows within a few tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}

    def matrix(name: str, rows: int, columns: int, width: float = 1.0) -> None:
        drawn = torch.randn(rows, columns, generator=generator) * (width / columns**0.5)
        tensors[f"{name}.weight"] = drawn.to(dtype)

    def norm(name: str, size: int) -> None:
        tensors[f"{name}.weight"] = torch.ones(size, dtype=dtype)

    matrix("model.embed_tokens", vocabulary, hidden, width=hidden**0.5)
    for layer in range(layers):
        place = f"model.layers.{layer}"
        norm(f"{place}.input_layernorm", hidden)
        norm(f"{place}.post_attention_layernorm", hidden)
        matrix(f"{place}.self_attn.q_proj", heads * (_NOPE + _ROPE), hidden, width)
        matrix(f"{place}.self_attn.kv_a_proj_with_mqa", latent + _ROPE, hidden)
        norm(f"{place}.self_attn.kv_a_layernorm", latent)
        matrix(f"{place}.self_attn.kv_b_proj", heads * (_NOPE + _VALUE), latent)
        matrix(f"{place}.self_attn.o_proj", hidden, heads * _VALUE, width=2.0)
        for name, rows, columns in (
            ("gate_proj", 2 * hidden, hidden),
            ("up_proj", 2 * hidden, hidden),
            ("down_proj", hidden, 2 * hidden),
        ):
            matrix(f"{place}.mlp.{name}", rows, columns)
    norm("model.norm", hidden)
    matrix("lm_head", vocabulary, hidden)

    folder.mkdir(parents=True, exist_ok=True)
    _save(folder / "model.safetensors", tensors)
    config = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "torch_dtype": str(dtype).removeprefix("torch."),
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": None,
        "kv_lora_rank": latent,
        "qk_nope_head_dim": _NOPE,
        "qk_rope_head_dim": _ROPE,
        "v_head_dim": _VALUE,
        "first_k_dense_replace": layers,
        "n_routed_experts": 8,  # of the layers after the dense ones: none
        "moe_layer_freq": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": positions,
        "rope_theta": 10000,
        # Without scaling, SGLang's CPU path has no rotary embedding for this kind of model.
        "rope_scaling": {
            "type": "yarn",
            "factor": float(yarn),
            "original_max_position_embeddings": positions // yarn,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def write_service_model(
    folder: pathlib.Path, *, seed: int, vocabulary: int, layers: int
) -> pathlib.Path:
    """A model for a GPU: bf16, 8 heads as one rank of eight has, contexts to 262,144 tokens.

    21 MB a layer. The queries are drawn less wide than the small model's, as yarn's scale for so
    long a context widens the scores again: they spread by 3, so that of 200,000 tokens some tens
    decide.
    """
    return write_small_model(
        folder,
        seed=seed,
        vocabulary=vocabulary,
        hidden=1024,
        layers=layers,
        dtype=torch.bfloat16,
        heads=8,
        positions=262144,
        yarn=64,
        width=1.5,
    )


def _save(path: pathlib.Path, tensors: dict[str, torch.Tensor]) -> None:
    """The safetensors format: header length (8 bytes), a JSON header, then the bytes.

    Written here, as the package that writes it is SGLang's dependency and not this project's.
    """
    names = {torch.float32: "F32", torch.bfloat16: "BF16"}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    parts, end = [], 0
    for name, tensor in tensors.items():
        part = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + len(part)],
        }
        end += len(part)
        parts.append(part)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))
