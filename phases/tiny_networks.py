"""A small MLA target and a DFlash drafter for it, in plain torch, for training.

The parameters have the names and shapes of the checkpoints that SGLang loads, so that a state
dict is a checkpoint: the target is DeepSeek-V2's attention (arXiv 2405.04434, section 2.1) with
dense layers, the drafter that of DFlash (arXiv 2602.06036) as SGLang's `DFlashDraftModel` has it.

The drafter has no embedding and no head but the target's. It reads the target's hidden states, of
some layers, at every committed token, and from them alone makes its keys and values of these
tokens. Its queries are a block: the last token, whose hidden states are not known yet, and mask
tokens behind it, which all see the whole context and each other. At each mask token comes out a
distribution of the token in that place, all in one pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional

__all__ = ["Cache", "Drafter", "DrafterConfig", "Target", "TargetConfig"]

_EPSILON = 1e-6
_ROPE_BASE = 10000.0

_Angles: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, [..., width / 2], broadcastable to [B, heads, S, width / 2]."""


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """Sizes. The latent row, 512 + 64, is the one that the project's kernel takes."""

    vocabulary: int
    hidden: int = 128
    layers: int = 3
    heads: int = 4
    latent: int = 512
    rope: int = 64
    nope: int = 32
    value: int = 32
    mlp: int = 256
    positions: int = 4096

    def hugging_face(self) -> dict[str, Any]:
        """What goes into `config.json`."""
        return {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "torch_dtype": "float32",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "q_lora_rank": None,
            "kv_lora_rank": self.latent,
            "qk_nope_head_dim": self.nope,
            "qk_rope_head_dim": self.rope,
            "v_head_dim": self.value,
            "first_k_dense_replace": self.layers,
            "n_routed_experts": 8,  # of the layers after the dense ones: none
            "moe_layer_freq": 1,
            "hidden_act": "silu",
            "rms_norm_eps": _EPSILON,
            "max_position_embeddings": self.positions,
            "rope_theta": int(_ROPE_BASE),
            # SGLang's CPU path has no other rotary embedding for this kind of model than yarn;
            # with a factor of 1 that is the plain one.
            "rope_scaling": {
                "type": "yarn",
                "factor": 1.0,
                "original_max_position_embeddings": self.positions,
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


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """Sizes; vocabulary and hidden are the target's.

    block: tokens of a draft block, the last committed one included. mask: the token that fills it.
    features: the target's layers whose outputs the drafter reads, rising. The last layer's is not
        to be had: SGLang takes a layer's output from the input of the next one.
    """

    vocabulary: int
    target_layers: int
    mask: int
    features: tuple[int, ...]
    block: int = 8
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head: int = 64
    mlp: int = 256
    positions: int = 4096

    def __post_init__(self) -> None:
        rising = sorted(set(self.features))
        if list(self.features) != rising or not rising:
            raise ValueError(f"features: must rise, got {self.features}")
        if not 0 <= rising[0] <= rising[-1] < self.target_layers - 1:
            raise ValueError(
                f"features: must be layers 0..{self.target_layers - 2}, got {self.features}"
            )

    def hugging_face(self) -> dict[str, Any]:
        """What goes into `config.json`."""
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "torch_dtype": "float32",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head,
            "layer_types": ["full_attention"] * self.layers,
            "hidden_act": "silu",
            "rms_norm_eps": _EPSILON,
            "max_position_embeddings": self.positions,
            "rope_theta": _ROPE_BASE,
            "rope_scaling": None,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "block_size": self.block,
            "num_target_layers": self.target_layers,
            # SGLang 0.5.17 reads the mask token here alone.
            "dflash_config": {
                "mask_token_id": self.mask,
                "target_layer_ids": list(self.features),
            },
        }


class Cache:
    """Keys and values of all layers of the target, filled from the front.

    keys: [layers, B, heads, length, nope + rope]; values: [layers, B, heads, length, value].
    """

    def __init__(self, config: TargetConfig, batch: int, length: int, device: torch.device) -> None:
        shape = (config.layers, batch, config.heads, length)
        self.keys = torch.zeros(*shape, config.nope + config.rope, device=device)
        self.values = torch.zeros(*shape, config.value, device=device)
        self.length = 0

    def append(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put these behind the others of `layer`; all of its keys and values so far."""
        end = self.length + keys.shape[2]
        self.keys[layer, :, :, self.length : end] = keys
        self.values[layer, :, :, self.length : end] = values
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


class Target(nn.Module):
    """DeepSeek-V2 with dense layers, for whole sequences or with a `Cache`."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _TargetBody(config)
        self.lm_head = _linear(config.hidden, config.vocabulary)
        nn.init.normal_(self.lm_head.weight, std=config.hidden**-0.5)

    def forward(
        self, tokens: torch.Tensor, cache: Cache | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Logits float32 [B, S, vocabulary], and each layer's output, [B, S, hidden].

        tokens: int64 [B, S], behind what `cache` holds already, which then holds them too.
        """
        start = cache.length if cache else 0
        where = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        turn = _angles(where, self.config.rope)
        x = self.model.embed_tokens(tokens)
        outputs = []
        for number, layer in enumerate(self.model.layers):
            x = layer(x, where, turn, number, cache)
            outputs.append(x)
        if cache:
            cache.length += tokens.shape[1]
        return self.lm_head(self.model.norm(x)), outputs


class _TargetBody(nn.Module):
    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(_TargetLayer(config) for _ in range(config.layers))
        self.norm = _norm(config.hidden)


class _TargetLayer(nn.Module):
    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.input_layernorm = _norm(config.hidden)
        self.self_attn = _LatentAttention(config)
        self.post_attention_layernorm = _norm(config.hidden)
        self.mlp = _GatedMLP(config.hidden, config.mlp)

    def forward(
        self, x: torch.Tensor, where: torch.Tensor, turn: _Angles, number: int, cache: Cache | None
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), where, turn, number, cache)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _LatentAttention(nn.Module):
    """Keys and values of all heads come from one latent row a token; here they are written out."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.sizes = config
        heads, latent = config.heads, config.latent
        self.q_proj = _linear(config.hidden, heads * (config.nope + config.rope))
        self.kv_a_proj_with_mqa = _linear(config.hidden, latent + config.rope)
        self.kv_a_layernorm = _norm(latent)
        self.kv_b_proj = _linear(latent, heads * (config.nope + config.value))
        self.o_proj = _linear(heads * config.value, config.hidden)

    def forward(
        self, x: torch.Tensor, where: torch.Tensor, turn: _Angles, number: int, cache: Cache | None
    ) -> torch.Tensor:
        sizes = self.sizes
        batch, length, _ = x.shape
        q_nope, q_rope = (
            self.q_proj(x)
            .view(batch, length, sizes.heads, -1)
            .transpose(1, 2)
            .split([sizes.nope, sizes.rope], dim=-1)
        )
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([sizes.latent, sizes.rope], dim=-1)
        k_nope, values = (
            self.kv_b_proj(self.kv_a_layernorm(latent))
            .view(batch, length, sizes.heads, -1)
            .transpose(1, 2)
            .split([sizes.nope, sizes.value], dim=-1)
        )
        k_rope = _rotate_pairs(k_rope[:, None], turn).expand(-1, sizes.heads, -1, -1)
        queries = torch.cat([q_nope, _rotate_pairs(q_rope, turn)], dim=-1)
        keys = torch.cat([k_nope, k_rope], dim=-1)
        if cache:
            keys, values = cache.append(number, keys, values)
        seen = torch.arange(keys.shape[2], device=x.device) <= where[:, None]
        heads = functional.scaled_dot_product_attention(queries, keys, values, seen)
        out: torch.Tensor = self.o_proj(heads.transpose(1, 2).flatten(2))
        return out


class Drafter(nn.Module):
    """DFlash's drafter: several blocks of each sequence at once, as training wants them."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = _linear(len(config.features) * config.hidden, config.hidden)
        self.hidden_norm = _norm(config.hidden)
        self.layers = nn.ModuleList(_DrafterLayer(config) for _ in range(config.layers))
        self.norm = _norm(config.hidden)

    def forward(
        self,
        context: torch.Tensor,
        anchors: torch.Tensor,
        blocks: torch.Tensor,
    ) -> torch.Tensor:
        """Hidden states [B, A, block, hidden] of `blocks`; the target's head makes logits of them.

        Row i of a block is of the token in place anchor + i; row 0, of the token that is known,
        means nothing.

        context: [B, S, features * hidden], the target's hidden states of the sequences, those of
            `features` side by side (`features_of`).
        anchors: int64 [B, A], the place of the last known token of each block: it sees the context
            before that.
        blocks: [B, A, block, hidden], embeddings of that token and of mask tokens.
        """
        batch, count, block, hidden = blocks.shape
        places = torch.arange(context.shape[1], device=context.device)
        where = anchors[:, :, None] + torch.arange(block, device=anchors.device)
        of_block = torch.arange(count, device=anchors.device).repeat_interleave(block)
        seen = torch.cat(
            [
                (places < anchors[:, :, None]).repeat_interleave(block, dim=1),
                (of_block[:, None] == of_block).expand(batch, -1, -1),
            ],
            dim=2,
        )
        known = self.hidden_norm(self.fc(context))
        turn = _angles(where.flatten(1)[:, None], self.config.head)
        turn_known = _angles(places, self.config.head)
        x = blocks.reshape(batch, count * block, hidden)
        for layer in self.layers:
            x = layer(x, turn, known, turn_known, seen[:, None])
        out: torch.Tensor = self.norm(x).view(batch, count, block, hidden)
        return out

    def features_of(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """`context`, of the outputs of all layers of the target."""
        return torch.cat([outputs[layer] for layer in self.config.features], dim=-1)


class _DrafterLayer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = _norm(config.hidden)
        self.self_attn = _BlockAttention(config)
        self.post_attention_layernorm = _norm(config.hidden)
        self.mlp = _GatedMLP(config.hidden, config.mlp)

    def forward(
        self,
        x: torch.Tensor,
        turn: _Angles,
        known: torch.Tensor,
        turn_known: _Angles,
        seen: torch.Tensor,
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turn, known, turn_known, seen)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _BlockAttention(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.sizes = config
        self.q_proj = _linear(config.hidden, config.heads * config.head)
        self.k_proj = _linear(config.hidden, config.kv_heads * config.head)
        self.v_proj = _linear(config.hidden, config.kv_heads * config.head)
        self.o_proj = _linear(config.heads * config.head, config.hidden)
        self.q_norm = _norm(config.head)
        self.k_norm = _norm(config.head)

    def forward(
        self,
        x: torch.Tensor,
        turn: _Angles,
        known: torch.Tensor,
        turn_known: _Angles,
        seen: torch.Tensor,
    ) -> torch.Tensor:
        """x: [B, T, hidden], rotated by `turn`; known: [B, S, hidden], rotated by `turn_known`.

        seen: bool [B, 1, T, S + T].
        """

        def heads(rows: torch.Tensor) -> torch.Tensor:
            return rows.view(*rows.shape[:2], -1, self.sizes.head).transpose(1, 2)

        queries = _rotate_halves(self.q_norm(heads(self.q_proj(x))), turn)
        keys = torch.cat(
            [
                _rotate_halves(self.k_norm(heads(self.k_proj(known))), turn_known),
                _rotate_halves(self.k_norm(heads(self.k_proj(x))), turn),
            ],
            dim=2,
        )
        values = torch.cat([heads(self.v_proj(known)), heads(self.v_proj(x))], dim=2)
        group = self.sizes.heads // self.sizes.kv_heads
        attended = functional.scaled_dot_product_attention(
            queries,
            keys.repeat_interleave(group, dim=1),
            values.repeat_interleave(group, dim=1),
            seen,
        )
        out: torch.Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return out


class _GatedMLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = _linear(hidden, inner)
        self.up_proj = _linear(hidden, inner)
        self.down_proj = _linear(inner, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def _linear(columns: int, rows: int) -> nn.Linear:
    return nn.Linear(columns, rows, bias=False)


def _norm(size: int) -> nn.RMSNorm:
    return nn.RMSNorm(size, eps=_EPSILON)


def _angles(where: torch.Tensor, width: int) -> _Angles:
    """Of the rotary embedding (arXiv 2104.09864) of `width` values at the places `where`."""
    exponents = torch.arange(0, width, 2, device=where.device, dtype=torch.float32) / width
    angles = where[..., None].float() * (1.0 / _ROPE_BASE**exponents)
    return angles.cos(), angles.sin()


def _rotate_pairs(x: torch.Tensor, turn: _Angles) -> torch.Tensor:
    """Neighbours are a pair, as DeepSeek-V2 has it. x: [B, heads, S, width]."""
    cosines, sines = turn
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cosines - odd * sines, even * sines + odd * cosines], -1).flatten(-2)


def _rotate_halves(x: torch.Tensor, turn: _Angles) -> torch.Tensor:
    """A pair has one value in each half, as Qwen3 has it. x: [B, heads, S, width]."""
    cosines, sines = turn
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cosines - right * sines, right * cosines + left * sines], dim=-1)
