"""What fraction of a ceiling a class of kernels reached, where its bytes can be counted.

A trace does not say how long contexts were or what shapes a model has. The note that `kd profile`
writes beside a trace does, so bytes are counted for traces that have one:

    attention over the KV   layers * requests * context rows of latent and rope, each read once; of
                            every rank, as the row belongs to no head. What was decoded before the
                            recording is left out, so this is the least that was read.
    dense GEMM              each weight of the layers and of the head read once, as few tokens share
                            a pass; not counted with experts, whose router is a dense GEMM to a name

The ceiling is what that GPU's DRAM gives, of the table `kdtree_engine.gpus`.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from kdtree_engine.capacity.dense import head, products
from kdtree_engine.capacity.shapes import ModelShape
from kdtree_engine.gpus import GPUS, Gpu
from kdtree_engine.profiling.summary import Profile

__all__ = ["Attained", "Note", "attained", "note_remarks", "read_note"]

_BYTES = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "fp8_e4m3": 1, "fp8_e5m2": 1}
_SLOWED = 1.25
"""From how many times the step's own time on the profiler is remarked on."""


@dataclasses.dataclass(frozen=True)
class Note:
    """What `kd profile` wrote of a trace: requests, context, server, model, and the GPU's name."""

    context: int
    batch: int
    server: Mapping[str, Any]
    model: Mapping[str, Any]
    gpu: str | None
    step_us: float | None
    beside: int
    ended: bool


@dataclasses.dataclass(frozen=True)
class Attained:
    """bytes: that a class must have read in a step. fraction: of what the GPU's DRAM gives."""

    bytes: int
    gb_s: float
    fraction: float
    gpu: str


def read_note(trace: pathlib.Path) -> Note | None:
    """The note beside a trace; None where there is none, or another file is called so."""
    name, marked, _ = trace.name.rpartition("-TP-")
    path = trace.parent / f"{name}.json"
    if not marked or not path.is_file():
        return None
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        gpus = (said.get("machine") or {}).get("gpus") or ()
        step_us = said.get("step_us")
        return Note(
            context=int(said["asked"]["context"]),
            batch=int(said["asked"]["batch"]),
            server=dict(said["server"]),
            model=dict(said["model"]),
            gpu=next((str(one["name"]) for one in gpus if one.get("usable", True)), None),
            step_us=None if step_us is None else float(step_us),
            beside=int(said.get("beside") or 0),
            ended=bool(said.get("ended")),
        )
    except (AttributeError, LookupError, OSError, OverflowError, RecursionError):
        return None
    except (TypeError, ValueError):
        return None


def attained(profile: Profile, note: Note | None) -> dict[str, Attained]:
    """By class; nothing where the note, the GPU or a size is not known."""
    gpu = _gpu(note.gpu) if note is not None else None
    if note is None or gpu is None:
        return {}
    speculates = note.server.get("speculative_algorithm") is not None
    counted = {
        "verify attention" if speculates else "other attention": _attention_bytes(note),
        "dense GEMM": _dense_bytes(note),
    }
    found = {}
    for one in profile.classes:
        read = counted.get(one.name)
        if read and one.kernel_us:
            rate = read / one.kernel_us * 1e6
            found[one.name] = Attained(read, rate / 1e9, rate / gpu.bandwidth, gpu.name)
    return found


def note_remarks(profile: Profile, note: Note | None) -> list[str]:
    """What else the figures have in them, each a line."""
    if note is None:
        return []
    found = []
    where = f"context {note.context}, batch {note.batch}"
    if note.beside:
        found.append(f"{where}: {note.beside} requests of others ran too, and count")
    if note.ended:
        found.append(f"{where}: a request ended before all steps were recorded")
    if note.step_us is None:
        found.append(
            f"{where}: recorded under SGLang's profiler, which slows the host by an amount that "
            "was not measured here: the step and what the host does are overstated, what the GPU "
            "does is not"
        )
    elif profile.step_us > _SLOWED * note.step_us:
        found.append(
            f"{where}: a step took {note.step_us:,.0f} us before the profiler ran and "
            f"{profile.step_us:,.0f} under it: what the host does is overstated by that, what "
            "the GPU does is not"
        )
    return found


def _gpu(name: str | None) -> Gpu | None:
    return next((gpu for gpu in GPUS.values() if name and name.startswith(gpu.device)), None)


def _attention_bytes(note: Note) -> int | None:
    row = _sizes(note.model, "kv_lora_rank", "qk_rope_head_dim", "num_hidden_layers")
    dtype = note.server.get("kv_cache_dtype")
    wide = _BYTES.get(str(note.server.get("dtype") if dtype in (None, "auto") else dtype))
    if row is None or wide is None:
        return None
    latent, rope, layers = row
    return layers * note.batch * note.context * (latent + rope) * wide


def _dense_bytes(note: Note) -> int | None:
    """None for a model with experts, and for weights of another format than the model's dtype."""
    names = (
        *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
        *("qk_nope_head_dim", "v_head_dim", "vocab_size"),
    )
    sizes = _sizes(note.model, *names)
    wide = _BYTES.get(str(note.server.get("dtype")))
    ranks = note.server.get("tp_size")
    dense, experts, query_rank = (
        one if isinstance(one := note.model.get(name), int) else 0
        for name in ("first_k_dense_replace", "n_routed_experts", "q_lora_rank")
    )
    if sizes is None or wide is None or not isinstance(ranks, int) or ranks < 1:
        return None
    layers, hidden, intermediate, heads, nope, value, vocabulary = sizes
    if (experts and dense < layers) or note.server.get("quantization"):
        return None
    shape = ModelShape(
        name="profiled",
        layers=layers,
        dense_layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        query_rank=max(0, query_rank),
        nope=nope,
        value=value,
        vocabulary=vocabulary,
        positions=note.context,
    )
    weights = sum(one.count * one.of_rank(ranks) for one in products(shape))
    return round(wide * (weights + head(shape).of_rank(ranks)))


def _sizes(model: Mapping[str, Any], *names: str) -> tuple[int, ...] | None:
    found = [model.get(name) for name in names]
    whole = [one for one in found if isinstance(one, int) and not isinstance(one, bool) and one > 0]
    return tuple(whole) if len(whole) == len(names) else None
