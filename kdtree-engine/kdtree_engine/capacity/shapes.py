"""The sizes of a model of DeepSeek V2's and V3's kind: Kimi K2 built in, or those of a config.json.

Weights are counted in numbers, not bytes. Norms, biases and routers' corrections are left out: they
are a thousandth of the rest.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from kdtree_engine.errors import ConfigError

__all__ = ["KIMI_K2", "ModelShape", "read_shape"]

_LATENT, _ROPE = 512, 64
"""What the kernel takes, and no other."""
_MOST = 1 << 22
"""Every size is below it: products of three then stay below 2^66, and floats take those."""
_MOST_LAYERS, _MOST_EXPERTS = 1 << 10, 1 << 12
_KINDS = ("deepseek_v2", "deepseek_v3", "kimi_k2")


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """Field by field as in config.json; the first `dense_layers` layers have no routed experts.

    query_rank: of the queries' low-rank projection; 0: there is none. nope, rope, value: of a
    head. experts, top_k, expert_intermediate, shared_experts: 0 where no layer has any.
    positions: the longest context.
    """

    name: str
    layers: int
    dense_layers: int
    hidden: int
    intermediate: int
    heads: int
    query_rank: int
    nope: int
    value: int
    vocabulary: int
    positions: int
    experts: int = 0
    top_k: int = 0
    expert_intermediate: int = 0
    shared_experts: int = 0
    tied: bool = False
    latent: int = _LATENT
    rope: int = _ROPE

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers

    @property
    def kv_bytes(self) -> int:
        """Of one token, all layers, bf16: 1,152 a layer.

        Every rank of tensor parallelism has it all, as the latent row belongs to no head.
        """
        return self.layers * 2 * (self.latent + self.rope)

    @property
    def expert_weights(self) -> int:
        """Of one routed expert: SwiGLU of three matrices."""
        return 3 * self.hidden * self.expert_intermediate


KIMI_K2 = ModelShape(
    name="Kimi K2",
    layers=61,
    dense_layers=1,
    hidden=7168,
    intermediate=18432,
    heads=64,
    query_rank=1536,
    nope=128,
    value=128,
    vocabulary=163840,
    positions=262144,
    experts=384,
    top_k=8,
    expert_intermediate=2048,
    shared_experts=1,
)
"""config.json of moonshotai/Kimi-K2-Instruct; K2.6 has the same text model, and these positions."""


def read_shape(folder: pathlib.Path) -> ModelShape:
    """Of `folder`/config.json. ConfigError, in one line, for what is no such model."""
    path = folder / "config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not JSON: {error}") from error
    if isinstance(fields, dict) and isinstance(fields.get("text_config"), dict):
        fields = fields["text_config"]  # a model that sees pictures too, as K2.5 and K2.6
    if not isinstance(fields, dict):
        raise ConfigError(f"{path}: is not an object")
    return _shape(fields, path)


def _shape(fields: dict[str, Any], path: pathlib.Path) -> ModelShape:
    def whole(name: str, least: int = 1, most: int = _MOST) -> int:
        value = fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ConfigError(
                f"{path}: field {name}: expected a whole number, {least}..{most}, got {value!r:.40}"
            )
        return value

    def has(name: str) -> bool:
        return fields.get(name) is not None

    kind = fields.get("model_type")
    if kind not in _KINDS:
        raise ConfigError(
            f"{path}: field model_type: expected one of {', '.join(_KINDS)}, got {kind!r:.40}"
        )
    for name, wanted in (("kv_lora_rank", _LATENT), ("qk_rope_head_dim", _ROPE)):
        if whole(name) != wanted:
            raise ConfigError(
                f"{path}: field {name}: the kernel takes {wanted} alone, got {fields[name]}"
            )
    layers = whole("num_hidden_layers", most=_MOST_LAYERS)
    dense = layers
    if has("n_routed_experts"):
        dense = min(layers, whole("first_k_dense_replace", 0))
    routed = dense < layers
    if routed and fields.get("moe_layer_freq", 1) != 1:
        raise ConfigError(f"{path}: field moe_layer_freq: expected 1, each layer with experts")
    shape = ModelShape(
        name=path.resolve().parent.name,
        layers=layers,
        dense_layers=dense,
        hidden=whole("hidden_size"),
        intermediate=whole("intermediate_size"),
        heads=whole("num_attention_heads"),
        query_rank=whole("q_lora_rank") if has("q_lora_rank") else 0,
        nope=whole("qk_nope_head_dim"),
        value=whole("v_head_dim"),
        vocabulary=whole("vocab_size"),
        positions=whole("max_position_embeddings"),
        experts=whole("n_routed_experts", most=_MOST_EXPERTS) if routed else 0,
        top_k=whole("num_experts_per_tok") if routed else 0,
        expert_intermediate=whole("moe_intermediate_size") if routed else 0,
        shared_experts=whole("n_shared_experts", 0) if routed and has("n_shared_experts") else 0,
        tied=fields.get("tie_word_embeddings") is True,
    )
    if shape.top_k > shape.experts:
        raise ConfigError(
            f"{path}: field num_experts_per_tok: {shape.top_k} of {shape.experts} experts"
        )
    return shape
