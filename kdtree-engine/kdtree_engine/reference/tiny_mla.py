"""TinyMLA: a small, real transformer with Multi-head Latent Attention, in two forms that agree.

The layer follows DeepSeek-V2 (arXiv 2405.04434, section 2.1), which Kimi K2 keeps: queries go
through a low-rank bottleneck; keys and values are one latent row a token, `latent` values that are
normalised plus `rope` values that carry the position, shared by all heads.

- `forward_plain` decompresses the latent into K and V of each head and runs ordinary causal
  attention over whole sequences, with no cache.
- `forward_absorbed` multiplies W_uk into the query and W_uv into the output, so that attention
  runs over the latent rows of a paged pool, through any callable with the signature of
  `kdtree_engine.reference.attention.tree_verify_attention`. This is what a service does, and
  where a kernel goes.

Weights are random and seeded. Their scale is chosen so that greedy decoding wanders through the
vocabulary and does not fall into a short loop, which would hide most errors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from kdtree_engine.reference.masks import MaskLayout, pack_masks

__all__ = ["Attention", "TinyMLA", "TinyMLAConfig", "TreeBatch"]


class Attention(Protocol):
    """A tree-verify attention: the oracle, or a candidate in its place."""

    def __call__(
        self,
        q: torch.Tensor,
        kv_pool: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor | None,
        draft_slots: torch.Tensor,
        mask: torch.Tensor | None = ...,
        mask_indptr: torch.Tensor | None = ...,
        *,
        sm_scale: float,
        v_head_dim: int = ...,
        max_nodes: int | None = ...,
        out: torch.Tensor | None = ...,
        return_lse: bool = ...,
        deterministic: bool = ...,
    ) -> Any: ...


@dataclasses.dataclass(frozen=True)
class TinyMLAConfig:
    """Sizes. `latent=512, rope=64` gives rows of the width that the real kernel takes.

    nope, value: widths of a head's position-free key part and of its decompressed value.
    gain: scale of the random weights against 1 / sqrt(fan-in). attention_gain: scale of the
    query, so that heads look somewhere and not everywhere.
    """

    vocabulary: int = 97
    hidden: int = 48
    layers: int = 2
    heads: int = 4
    query_rank: int = 32
    latent: int = 64
    rope: int = 16
    nope: int = 16
    value: int = 16
    mlp: int = 96
    rope_base: float = 10000.0
    gain: float = 2.0
    attention_gain: float = 8.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) <= 0:
                raise ValueError(f"{field.name}: must be above 0, got {getattr(self, field.name)}")
        if self.rope % 2:
            raise ValueError(f"rope: must be even, got {self.rope}")

    @property
    def row(self) -> int:
        """Values of one latent row: K is all of them, V the first `latent`."""
        return self.latent + self.rope

    @property
    def sm_scale(self) -> float:
        """Factor of the attention scores."""
        return float((self.nope + self.rope) ** -0.5)


@dataclasses.dataclass(frozen=True)
class TreeBatch:
    """Ragged nodes of several requests, as the attention takes them; int64 throughout.

    tokens, positions, draft_slots: [num_tokens]; qo_indptr, kv_indptr: [B+1]; kv_indices:
    [kv_indptr[B]]; mask and mask_indptr: see `kdtree_engine.reference.masks`, None for chains.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    draft_slots: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    mask: torch.Tensor | None
    mask_indptr: torch.Tensor | None

    @classmethod
    def of(
        cls,
        tokens: Sequence[Sequence[int]],
        positions: Sequence[Sequence[int]],
        windows: Sequence[Sequence[int]],
        prefixes: Sequence[Sequence[int]],
        masks: Sequence[torch.Tensor] | None,
        layout: MaskLayout = MaskLayout.FULL,
        device: torch.device | None = None,
    ) -> TreeBatch:
        """From lists, one entry a request.

        tokens, positions, windows: of its nodes (a window is their pool slots); prefixes: the pool
        slots of its prefix; masks: bool [T, T], or None where every request is a causal chain.
        """

        def flat(parts: Sequence[Sequence[int]]) -> torch.Tensor:
            values = [value for part in parts for value in part]
            return torch.tensor(values, dtype=torch.int64, device=device)

        def indptr(parts: Sequence[Sequence[int]]) -> torch.Tensor:
            sizes = torch.tensor([0, *map(len, parts)], dtype=torch.int64, device=device)
            return sizes.cumsum(0)

        mask, starts = None, None
        if masks is not None:
            mask, starts = pack_masks(masks, [len(prefix) for prefix in prefixes], layout)
            mask, starts = mask.to(device), starts.to(device)
        return cls(
            tokens=flat(tokens),
            positions=flat(positions),
            draft_slots=flat(windows),
            qo_indptr=indptr(tokens),
            kv_indptr=indptr(prefixes),
            kv_indices=flat(prefixes),
            mask=mask,
            mask_indptr=starts,
        )


@dataclasses.dataclass(frozen=True)
class _Layer:
    """Weights of one layer, each [in, out] so that rows multiply from the left."""

    query_down: torch.Tensor
    query_up: torch.Tensor
    kv_down: torch.Tensor
    key_up: torch.Tensor
    """W_uk, [heads, nope, latent]: k_nope = W_uk @ c."""
    value_up: torch.Tensor
    """W_uv, [heads, latent, value]: v = c @ W_uv."""
    output: torch.Tensor
    mlp_gate: torch.Tensor
    mlp_up: torch.Tensor
    mlp_down: torch.Tensor


class TinyMLA:
    """The model, with weights drawn from `seed`.

    Everything is float64 but the pools and the absorbed attention, which have the pools' dtype: so
    a candidate in bf16 differs from the oracle over the same pools by its own arithmetic alone.
    """

    def __init__(
        self, config: TinyMLAConfig, *, seed: int = 0, device: torch.device | None = None
    ) -> None:
        self.config = config
        self.device = device or torch.device("cpu")
        generator = torch.Generator().manual_seed(seed)

        def weights(*shape: int, fan_in: int, gain: float = config.gain) -> torch.Tensor:
            drawn: torch.Tensor = torch.randn(*shape, generator=generator, dtype=torch.float64)
            drawn = drawn * (gain * float(fan_in) ** -0.5)
            return drawn.to(self.device)

        sizes = config
        head = sizes.nope + sizes.rope
        # Small against what the layers add: else the last token alone tends to decide the next.
        self.embedding = weights(sizes.vocabulary, sizes.hidden, fan_in=16)
        # Not tied to the embedding: a tied one prefers to repeat the last token.
        self.unembedding = weights(sizes.hidden, sizes.vocabulary, fan_in=sizes.hidden)
        self.layers = [
            _Layer(
                query_down=weights(sizes.hidden, sizes.query_rank, fan_in=sizes.hidden),
                query_up=weights(
                    sizes.query_rank,
                    sizes.heads * head,
                    fan_in=sizes.query_rank,
                    gain=sizes.attention_gain,
                ),
                kv_down=weights(sizes.hidden, sizes.row, fan_in=sizes.hidden),
                key_up=weights(sizes.heads, sizes.nope, sizes.latent, fan_in=sizes.latent),
                value_up=weights(sizes.heads, sizes.latent, sizes.value, fan_in=sizes.latent),
                output=weights(
                    sizes.heads * sizes.value, sizes.hidden, fan_in=sizes.heads * sizes.value
                ),
                mlp_gate=weights(sizes.hidden, sizes.mlp, fan_in=sizes.hidden),
                mlp_up=weights(sizes.hidden, sizes.mlp, fan_in=sizes.hidden),
                mlp_down=weights(sizes.mlp, sizes.hidden, fan_in=sizes.mlp),
            )
            for _ in range(sizes.layers)
        ]

    def new_pools(self, slots: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
        """One latent pool [slots, latent + rope] a layer.

        Full of NaN, so that a slot that is read before it is written shows.
        """
        shape = (slots, self.config.row)
        return [torch.full(shape, torch.nan, dtype=dtype, device=self.device) for _ in self.layers]

    def forward_plain(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits float64 [B, S, vocabulary] of whole sequences, int64 [B, S], causal, no cache.

        Sequences that are shorter may be filled up on the right: a token sees none behind it.
        """
        where = torch.arange(tokens.shape[1], device=self.device)
        causal = where[:, None] >= where
        x = self.embedding[tokens]
        for layer in self.layers:
            normed = _rms_norm(x)
            q_nope, q_rope = self._queries(layer, normed, where)
            rows = self._latent_rows(layer, normed, where)
            latent, k_rope = _split(rows, self.config.latent)
            k_nope = torch.einsum("bsc,hnc->bshn", latent, layer.key_up)
            values = torch.einsum("bsc,hcv->bshv", latent, layer.value_up)
            scores = torch.einsum("bthn,bshn->bhts", q_nope, k_nope)
            scores = scores + torch.einsum("bthr,bsr->bhts", q_rope, k_rope)
            scores = (scores * self.config.sm_scale).masked_fill(~causal, -torch.inf)
            heads = torch.einsum("bhts,bshv->bthv", scores.softmax(-1), values)
            x = self._finish(layer, x, heads)
        return self._logits(x)

    def forward_absorbed(
        self, batch: TreeBatch, pools: Sequence[torch.Tensor], attention: Attention
    ) -> torch.Tensor:
        """Logits float64 [num_tokens, vocabulary] of the nodes of `batch`.

        Writes each node's latent row into `pools` (one a layer) at `draft_slots`, then lets
        `attention` read prefix and nodes from there.
        """
        x = self.embedding[batch.tokens]
        for layer, pool in zip(self.layers, pools, strict=True):
            normed = _rms_norm(x)
            q_nope, q_rope = self._queries(layer, normed, batch.positions)
            rows = self._latent_rows(layer, normed, batch.positions)
            pool[batch.draft_slots] = rows.to(pool.dtype)
            q_latent = torch.einsum("thn,hnc->thc", q_nope, layer.key_up)
            attended = attention(
                torch.cat([q_latent, q_rope], dim=-1).to(pool.dtype),
                pool,
                batch.qo_indptr,
                batch.kv_indptr,
                batch.kv_indices,
                batch.draft_slots,
                batch.mask,
                batch.mask_indptr,
                sm_scale=self.config.sm_scale,
                v_head_dim=self.config.latent,
            )
            heads = torch.einsum("thc,hcv->thv", attended.to(torch.float64), layer.value_up)
            x = self._finish(layer, x, heads)
        return self._logits(x)

    def _queries(
        self, layer: _Layer, normed: torch.Tensor, where: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [..., heads, nope] and, rotated, [..., heads, rope]."""
        config = self.config
        queries = _rms_norm(normed @ layer.query_down) @ layer.query_up
        queries = queries.view(*queries.shape[:-1], config.heads, config.nope + config.rope)
        nope, rope = _split(queries, config.nope)
        return nope, _rotate(rope, where[:, None], config.rope_base)

    def _latent_rows(
        self, layer: _Layer, normed: torch.Tensor, where: torch.Tensor
    ) -> torch.Tensor:
        """What the cache holds, [..., latent + rope]: normalised latent, rotated rope part."""
        latent, rope = _split(normed @ layer.kv_down, self.config.latent)
        return torch.cat([_rms_norm(latent), _rotate(rope, where, self.config.rope_base)], dim=-1)

    def _finish(self, layer: _Layer, x: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        x = x + heads.flatten(-2) @ layer.output
        normed = _rms_norm(x)
        gate = torch.nn.functional.silu(normed @ layer.mlp_gate)
        return x + (gate * (normed @ layer.mlp_up)) @ layer.mlp_down

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return _rms_norm(x) @ self.unembedding


def _split(x: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first so many values of the last axis, and the others."""
    return x[..., :first], x[..., first:]


def _rms_norm(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def _rotate(x: torch.Tensor, where: torch.Tensor, base: float) -> torch.Tensor:
    """Rotary embedding (arXiv 2104.09864): pair i of the last axis turns by where * base^(-2i/n).

    x: [..., n]; where: positions, shape that of x without its last axis, or broadcastable to it.
    """
    width = x.shape[-1]
    frequencies = base ** (-torch.arange(0, width, 2, dtype=torch.float64, device=x.device) / width)
    angles = where[..., None].to(torch.float64) * frequencies
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = torch.stack(
        [even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()], -1
    )
    return turned.flatten(-2)
