"""Bytes and flops that a class of kernels must have taken in a step, by the note beside a trace.

A trace does not say how long contexts were or what shapes a model has. The note that `kd profile`
writes beside a trace does. Of each rank, in one pass of the target:

    attention over the KV   layers * requests * context rows of latent and rope, each read once; of
                            every rank, as the row belongs to no head. Flops are those of its heads
                            over every node. What was decoded before the recording is left out, so
                            this is the least that was read.
    dense GEMM              each weight of the layers and of the head read once, 2 flops a weight
                            and token. In a model with experts the router, which is a dense GEMM to
                            a name, and shared experts, which SGLang may fuse with the routed ones,
                            are left out: the least again.
    MoE GEMM                of each layer the weights of the active experts, 2 flops a weight and
                            token that has it, divided among the ranks by tensor or by expert
                            parallelism: the mean rank's. Where tokens choose alike, E experts of
                            which a token takes k, n tokens leave one idle with (1 - k / E)^n. A
                            router that prefers some experts activates fewer, so without recorded
                            routing this is rather too many than too few.

Nothing is counted under DP attention or with pipeline stages, whose ranks differ, and no flops of
fp8 weights, whose products may run at another rate than bf16's.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kdtree_engine.capacity.dense import head, products
from kdtree_engine.capacity.shapes import ModelShape
from kdtree_engine.moe.routing import Routing
from phases.profile_note import Note

__all__ = ["Counted", "Uncounted", "counted"]

_BYTES = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "fp8_e4m3": 1, "fp8_e5m2": 1}
_SCALE_BYTES = 2
"""Of a group of weights of few bits: bf16, as in Kimi K2.6's checkpoint."""
_SAMPLES = 16
"""Batches that are drawn of recorded routing."""
_MOST = 1 << 31


@dataclasses.dataclass(frozen=True)
class Counted:
    """Of a rank's step. flops: None where their rate is not known. basis: what else it rests on."""

    bytes: float
    flops: float | None
    basis: str = ""


@dataclasses.dataclass(frozen=True)
class Uncounted:
    """why: in words that follow `not counted: `."""

    why: str


def counted(note: Note, routing: Routing | None = None) -> dict[str, Counted | Uncounted]:
    """By class, in the words of the rule table. routing: recorded of this model, if any was."""
    speculates = note.server.get("speculative_algorithm") is not None
    counts: dict[str, Callable[[Note], Counted]] = {
        "verify attention" if speculates else "other attention": _attention,
        "dense GEMM": _dense,
        "MoE GEMM": lambda note: _experts(note, routing),
    }
    found: dict[str, Counted | Uncounted] = {}
    for name, count in counts.items():
        try:
            _refuse_uneven(note)
            found[name] = count(note)
        except _Lacking as lacking:
            found[name] = Uncounted(str(lacking))
    return found


class _Lacking(Exception):
    """What a note does not say, or what of it cannot be counted by."""


def _refuse_uneven(note: Note) -> None:
    if note.server.get("enable_dp_attention"):
        raise _Lacking("ranks differ under DP attention")
    if (_whole(note.server, "pp_size", 1) or 1) > 1:
        raise _Lacking("ranks differ with pipeline stages")


def _attention(note: Note) -> Counted:
    latent, rope, layers = _sizes(
        note.model, "kv_lora_rank", "qk_rope_head_dim", "num_hidden_layers"
    )
    dtype = note.server.get("kv_cache_dtype")
    wide = _BYTES.get(str(note.server.get("dtype") if dtype in (None, "auto") else dtype))
    if wide is None:
        raise _Lacking("the note does not say what type the KV has")
    rows = layers * note.batch * note.context
    flops = None
    with contextlib.suppress(_Lacking):
        (heads,) = _sizes(note.model, "num_attention_heads")
        if wide > 1:
            flops = rows * 2 * (2 * latent + rope) * heads / _ranks(note) * _nodes(note)
    return Counted(rows * (latent + rope) * wide, flops)


def _dense(note: Note) -> Counted:
    layers, hidden, intermediate, heads, nope, value, vocabulary = _sizes(
        note.model,
        *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
        *("qk_nope_head_dim", "v_head_dim", "vocab_size"),
    )
    wide, flops = _format(note, "dense")
    routed = _moe_layers(note, layers)
    shape = ModelShape(
        name="profiled",
        layers=layers,
        dense_layers=layers - routed,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        query_rank=_whole(note.model, "q_lora_rank", 0) or 0,
        nope=nope,
        value=value,
        vocabulary=vocabulary,
        positions=note.context,
        experts=_whole(note.model, "n_routed_experts", 0) or 0,
    )
    ranks = _ranks(note)
    weights = head(shape).of_rank(ranks)
    taken = (one for one in products(shape) if one.name != "router")
    weights += sum(one.count * one.of_rank(ranks) for one in taken)
    basis = "without the router and shared experts" if routed else ""
    return Counted(wide * weights, 2 * weights * _tokens(note) if flops else None, basis)


def _experts(note: Note, routing: Routing | None) -> Counted:
    layers, hidden, width, experts, top_k = _sizes(
        note.model,
        *("num_hidden_layers", "hidden_size", "moe_intermediate_size"),
        *("n_routed_experts", "num_experts_per_tok"),
    )
    routed = _moe_layers(note, layers)
    if not routed:
        raise _Lacking("no layer of the model has experts")
    if top_k > experts:
        raise _Lacking(f"a token takes {top_k} of {experts} experts")
    wide, flops = _format(note, "experts")
    tokens = _tokens(note)
    active, how = experts * (1 - (1 - top_k / experts) ** tokens), "uniform routing, assumed"
    if routing is not None:
        active, how = _recorded(routing, experts, top_k, tokens)
    weights = 3 * hidden * width / _ranks(note)
    return Counted(
        routed * active * weights * wide,
        2 * routed * tokens * top_k * weights if flops else None,
        f"{active:.1f} of {experts} experts active a layer by {tokens} tokens ({how})",
    )


def _recorded(routing: Routing, experts: int, top_k: int, tokens: int) -> tuple[float, str]:
    """Active experts a layer where recorded steps together have about as many tokens."""
    if (routing.experts, routing.top_k) != (experts, top_k):
        raise _Lacking(
            f"{routing.source} is of {routing.experts} experts, {routing.top_k} a token, and the "
            f"model has {experts}, {top_k}"
        )
    steps = max(1, round(tokens / float(routing.tokens.double().mean())))
    if steps > routing.steps:
        raise _Lacking(f"{routing.source} has {routing.steps} steps, and it takes {steps}")
    generator = torch.Generator().manual_seed(1)
    counts, drawn = routing.batches(steps, _SAMPLES, generator)
    active = float((counts > 0).sum(2).double().mean())
    return active, f"{routing.source}, {float(drawn.double().mean()):.0f} tokens at a time"


def _moe_layers(note: Note, layers: int) -> int:
    """How many layers have experts; config.json's `first_k_dense_replace` layers have none."""
    if not _whole(note.model, "n_routed_experts", 0):
        return 0
    if _whole(note.model, "moe_layer_freq", 1) != 1:
        raise _Lacking("not every layer has experts (moe_layer_freq)")
    return max(0, layers - (_whole(note.model, "first_k_dense_replace", 0) or 0))


def _format(note: Note, part: str) -> tuple[float, bool]:
    """Bytes of a weight, scales among them, and whether its flops are bf16's."""
    wide = _BYTES.get(str(note.server.get("dtype")))
    method = note.server.get("quantization") or note.model.get("quant_method")
    if wide is None:
        raise _Lacking("the note does not say what type weights have")
    if method is None:
        return wide, True
    if method == "fp8":
        return 1, False
    bits, group = (_whole(note.model, name, 0) for name in ("weight_bits", "weight_group"))
    if part == "experts" and bits and group:
        return bits / 8 + _SCALE_BYTES / group, True
    raise _Lacking(f"weights are quantised by {method!s:.40}: which of them, and how, is not told")


def _ranks(note: Note) -> int:
    ranks = _whole(note.server, "tp_size")
    if not ranks:
        raise _Lacking("the note does not say how many ranks there are")
    return ranks


def _nodes(note: Note) -> int:
    """Tokens of a request in a pass: of its tree, or one."""
    if note.server.get("speculative_algorithm") is None:
        return 1
    nodes = _whole(note.server, "speculative_num_draft_tokens")
    if not nodes:
        raise _Lacking("the note does not say how many tokens are verified")
    return nodes


def _tokens(note: Note) -> int:
    return note.batch * _nodes(note)


def _sizes(model: Mapping[str, Any], *names: str) -> tuple[int, ...]:
    found = {name: _whole(model, name) for name in names}
    lacking = [name for name, size in found.items() if not size]
    if lacking:
        raise _Lacking(f"the note has no {', '.join(lacking)} of the model")
    return tuple(size for size in found.values() if size)


def _whole(fields: Mapping[str, Any], name: str, default: int | None = None) -> int | None:
    """A field that is a count; `default` where it is not there or is none."""
    value = fields.get(name)
    good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST
    return value if good else default
