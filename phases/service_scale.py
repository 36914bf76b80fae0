"""Which servers a gate starts, and how much it asks of them, on a GPU host and on a CPU.

A comparison is one code path. What differs by machine is a `Scale`: the lengths, the model, and
what SGLang must be told where it has no GPU. The server is whatever `server_python()` finds: an
environment that SGLang is installed in, or this Python with PYTHONPATH naming a folder that
SGLang was unpacked into. In both, SGLang must see the metadata of `kdtree-engine`, by which it
finds the plugin; its code comes from this checkout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping

import torch

from phases.service import Service
from phases.small_model import write_service_model, write_small_model

__all__ = [
    "CPU",
    "GPU",
    "Scale",
    "Start",
    "Variant",
    "decoding",
    "kernel",
    "launched",
    "plain",
    "triton",
]

Start = Callable[..., contextlib.AbstractContextManager[Service]]

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_CPU, _CUDA = torch.device("cpu"), torch.device("cuda")
_GRAPHS = (1, 2, 4, 8, 16)
"""Requests for which graphs are captured; other batches are padded."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to serve. nodes: of the n-gram draft trees; None: no speculation."""

    backend: str
    nodes: int | None = None

    @property
    def name(self) -> str:
        """As in `kdtree_mla-9` and `triton-plain`; a file may be called so."""
        return f"{self.backend}-{'plain' if self.nodes is None else self.nodes}"

    @property
    def arguments(self) -> tuple[str, ...]:
        if self.nodes is None:
            return ("--attention-backend", self.backend)
        return (
            *("--attention-backend", self.backend),
            *("--speculative-algorithm", "NGRAM"),
            *("--speculative-num-draft-tokens", str(self.nodes)),
        )


def kernel(nodes: int) -> Variant:
    """Trees verified on the kernel."""
    return Variant("kdtree_mla", nodes)


def decoding() -> Variant:
    """No speculation: plain decode on the kernel."""
    return Variant("kdtree_mla")


def triton(nodes: int) -> Variant:
    """Trees verified by stock SGLang."""
    return Variant("triton", nodes)


def plain() -> Variant:
    """Stock SGLang without speculation: whose tokens all others must give."""
    return Variant("triton")


@dataclasses.dataclass(frozen=True)
class Scale:
    """What a machine can be asked for.

    lengths: of the prompts, in tokens. speed_lengths: those that are timed. batches: prompts in one
    request. new_tokens: asked for after each prompt. vocabulary: of the model; small, so that an
    n-gram is often seen again and trees branch. dtype: of model and KV. graphs: whether graphs can
    be captured. distinct: the longest prompts that share nothing; longer ones of one length have
    all but their ends in common, so that they are prefilled once. side_by_side: servers of which
    nothing is timed run at once. passes: of each timed answer, of which the fastest counts: what
    else a host does comes and goes, and a step is the host's as much as the GPU's. device: what the
    servers run on; on `cuda` the kernel library must be the one that csrc as it is makes.
    """

    name: str
    lengths: tuple[int, ...]
    speed_lengths: tuple[int, ...]
    batches: tuple[int, ...]
    new_tokens: int
    vocabulary: int
    dtype: torch.dtype
    graphs: bool
    arguments: tuple[str, ...]
    write_model: Callable[[pathlib.Path, int, int, int], pathlib.Path]
    """(folder, seed, vocabulary, layers)"""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    paths: tuple[pathlib.Path, ...] = ()
    distinct: int = 4096
    limit_s: float = 300.0
    side_by_side: bool = False
    passes: int = 3
    device: torch.device = _CUDA


def _gpu_model(folder: pathlib.Path, seed: int, vocabulary: int, layers: int) -> pathlib.Path:
    return write_service_model(folder, seed=seed, vocabulary=vocabulary, layers=layers)


def _cpu_model(folder: pathlib.Path, seed: int, vocabulary: int, layers: int) -> pathlib.Path:
    return write_small_model(folder, seed=seed, vocabulary=vocabulary, layers=layers)


GPU = Scale(
    name="gpu",
    lengths=(1024, 4096, 16384, 65536, 200_000),
    speed_lengths=(1024, 4096, 16384, 65536),
    batches=(1, 4, 16),
    new_tokens=64,
    vocabulary=512,
    dtype=torch.bfloat16,
    graphs=True,
    arguments=(
        # Neither needs a compiler, a download or a tokenizer: a bare host may have none of them.
        *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
        # Logits in 16 bits would make equals of the two likeliest tokens at one step in twenty.
        "--enable-fp32-lm-head",
        # Of what is free when a server starts, others beside it; it takes what its tokens need.
        *("--dtype", "bfloat16", "--mem-fraction-static", "0.8"),
        # More would only make SGLang copy a longer list of free slots at each step.
        *("--max-total-tokens", "1048576"),
        # As many as the largest graph takes, so that nothing has a reason to run without one.
        *("--max-running-requests", str(max(_GRAPHS)), "--chunked-prefill-size", "8192"),
    ),
    write_model=_gpu_model,
    side_by_side=True,
    passes=8,
)
"""16 prompts of 200,000 tokens fit the pool several times, as they share all but their ends."""

CPU = Scale(
    name="cpu",
    lengths=(32, 64),
    speed_lengths=(32, 64),
    batches=(1, 3),
    new_tokens=16,
    vocabulary=64,
    dtype=torch.float32,
    graphs=False,
    arguments=(
        *("--device", "cpu", "--dtype", "float32", "--disable-overlap-schedule"),
        *("--max-total-tokens", "8192", "--mem-fraction-static", "0.3"),
        *("--max-running-requests", "8"),
        # One split, as each costs the interpreter a pass over its program.
        *("--triton-attention-num-kv-splits", "1"),
    ),
    write_model=_cpu_model,
    environment={
        "TRITON_INTERPRET": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "SGLANG_DISABLE_LEAN_ATTENTION": "1",
    },
    paths=(_ROOT / "tests" / "support" / "sglang_cpu",),
    distinct=48,
    device=_CPU,
)
"""A rehearsal: the same requests, to the real server on a machine without a GPU."""


def launched(
    scale: Scale,
    variant: Variant,
    *,
    model: pathlib.Path,
    log: pathlib.Path,
    start: Start,
    graphs: bool,
    at_once: int = max(_GRAPHS),
    more: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> contextlib.AbstractContextManager[Service]:
    """The server of a variant. graphs: CUDA graphs on, where the machine can have them.

    at_once: the most requests that will run together; graphs of more are not captured, as each
    takes ten seconds.
    Prefill never runs in one: that would take long to capture and change nothing of a verification.
    """
    sizes = [str(size) for size in _GRAPHS if size <= at_once]
    on = ("--cuda-graph-bs-decode", *sizes, "--disable-prefill-cuda-graph")
    paths = [*map(str, scale.paths), str(_ROOT / "kdtree-engine"), os.environ.get("PYTHONPATH", "")]
    return start(
        (
            *("--model-path", str(model), "--skip-tokenizer-init"),
            # Else a scheduler without requests asks for some all the time: a core for each server.
            "--sleep-on-idle",
            *scale.arguments,
            *variant.arguments,
            *(on if graphs and scale.graphs else ("--disable-cuda-graph",)),
            *more,
        ),
        log=log,
        environment={
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            **scale.environment,
            **(environment or {}),
        },
        limit_s=scale.limit_s,
    )
