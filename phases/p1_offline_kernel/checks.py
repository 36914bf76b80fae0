"""Phase 1: the split-KV algorithm and the CUDA kernel over a contiguous view of the cache.

Each check names its device, so that all but the kernel itself can be tried without a GPU.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence

import torch

from kdtree_engine.build import ARCHITECTURES, CompileError, build
from kdtree_engine.library import load
from kdtree_engine.reference.masks import MaskLayout
from kdtree_engine.reference.tiny_mla import Attention
from phases.attention_cases import AttentionCase, Content, Shape
from phases.attention_checks import attention_matches_oracle
from phases.candidates import (
    operation,
    require_current_library,
    with_poisoned_memory,
    with_stale_buffers,
)
from phases.gate import Context, FailureKind, Figure, GateFailure, Unit

__all__ = [
    "HEADS",
    "kernel_matches_oracle",
    "kernel_memcheck",
    "kernel_traps",
    "large_cases",
    "library_builds",
    "long_cases",
    "merged",
    "split_kv_matches_oracle",
    "trap_cases",
]

HEADS = (8, 16, 32, 64, 128)
"""Heads of a rank: TP8, TP4, TP2, TP1 of Kimi K2.6, TP1 of DeepSeek V3."""
_CPU = torch.device("cpu")
_CUDA = torch.device("cuda")


def library_builds(ctx: Context) -> list[Figure]:
    """csrc compiles for every architecture without a warning, within its limits, and loads.

    Objects of an earlier build are used again where nothing that goes into them has changed.
    """
    try:
        report = build(library=ctx.scratch / "libkdtree_engine.so", progress=ctx.progress)
    except CompileError as error:
        raise GateFailure(FailureKind.COMPILE, str(error)) from error
    missing = set(ARCHITECTURES) - {kernel.architecture for kernel in report.kernels}
    if missing:
        raise GateFailure(FailureKind.COMPILE, f"no kernel for {', '.join(sorted(missing))}")
    library = load(report.library)
    said = str(library.build_info())
    if not all(architecture in said for architecture in ARCHITECTURES):
        raise GateFailure(FailureKind.COMPILE, f"the library says of itself: {said}")
    return [
        Figure("kernels", len({kernel.kernel for kernel in report.kernels}), Unit.COUNT),
        Figure("architectures", len(ARCHITECTURES), Unit.COUNT),
        Figure("library", report.library.stat().st_size, Unit.BYTES),
    ]


def split_kv_matches_oracle(ctx: Context, *, contiguous_view: bool = True) -> list[Figure]:
    """The CPU implementation: exact in float64, as good as rounding allows in 16 bits."""
    cases = long_cases()
    return merged(
        attention_matches_oracle(
            operation, ctx, dtype=torch.float64, contiguous_view=contiguous_view
        ),
        attention_matches_oracle(
            operation, ctx, dtype=torch.float64, contiguous_view=contiguous_view, cases=cases
        ),
        attention_matches_oracle(
            operation, ctx, dtype=torch.bfloat16, contiguous_view=contiguous_view
        ),
        attention_matches_oracle(
            operation, ctx, dtype=torch.float16, contiguous_view=contiguous_view, cases=cases
        ),
    )


def kernel_matches_oracle(
    ctx: Context,
    *,
    device: torch.device = _CUDA,
    candidate: Attention = operation,
    contiguous_view: bool = True,
    cases: Sequence[AttentionCase] | None = None,
) -> list[Figure]:
    """The kernel against the oracle: every standard case over the heads, then the large ones."""
    require_current_library(device)
    if device.type == "cuda":
        candidate = with_poisoned_memory(candidate)
    groups: list[tuple[torch.dtype, tuple[int, ...], Sequence[AttentionCase] | None]]
    if cases is None:
        groups = [(torch.bfloat16, (heads,), None) for heads in HEADS]
        groups += [(torch.float16, (8,), None), (torch.bfloat16, (8,), large_cases())]
    else:
        groups = [(torch.bfloat16, (8,), cases)]
    return merged(
        *(
            attention_matches_oracle(
                candidate,
                ctx,
                dtype=dtype,
                device=device,
                heads=heads,
                contiguous_view=contiguous_view,
                cases=chosen,
            )
            for dtype, heads, chosen in groups
        )
    )


def kernel_traps(
    ctx: Context,
    *,
    device: torch.device = _CUDA,
    candidate: Attention = operation,
    cases: Sequence[AttentionCase] | None = None,
) -> list[Figure]:
    """Cases that public reports of other kernels name, with stale buffers and poisoned memory."""
    require_current_library(device)
    if device.type == "cuda":
        candidate = with_poisoned_memory(candidate)
    return attention_matches_oracle(
        with_stale_buffers(candidate),
        ctx,
        dtype=torch.bfloat16,
        device=device,
        contiguous_view=True,
        cases=trap_cases() if cases is None else cases,
    )


def kernel_memcheck(ctx: Context) -> list[Figure]:
    """compute-sanitizer finds nothing in a reduced set of calls, run in a process of its own."""
    require_current_library(_CUDA)
    tools = ("memcheck", "racecheck")
    for done, tool in enumerate(tools):
        ctx.progress(done, len(tools), tool)
        answer = subprocess.run(
            [
                "compute-sanitizer",
                f"--tool={tool}",
                "--error-exitcode=9",
                sys.executable,
                "-m",
                "phases.p1_offline_kernel.sanitized",
            ],
            capture_output=True,
            text=True,
            check=False,
            # torch's allocator would hide what lies beyond the end of a tensor.
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
            },
        )
        if answer.returncode:
            lines = [line for line in answer.stdout.splitlines() if line.startswith("=====")]
            raise GateFailure(
                FailureKind.LAUNCH,
                f"{tool}: " + " | ".join((lines or answer.stderr.splitlines()[-3:])[:6]),
            )
    return [Figure("tools without a report", len(tools), Unit.COUNT)]


def long_cases() -> list[AttentionCase]:
    """Prefixes that are cut into many splits, at sizes that a CPU can follow."""
    return [
        AttentionCase("T=9 L=4096", (9,), (4096,)),
        AttentionCase("T=3 L=8000", (3,), (8000,), layout=MaskLayout.DRAFT),
        AttentionCase("long among short", (9, 17, 1), (3000, 1, 700), layout=MaskLayout.PACKED),
        AttentionCase("uniform, long", (17,), (3001,), content=Content.UNIFORM),
    ]


def large_cases() -> list[AttentionCase]:
    """The far ends of the regimes: 200k tokens, 64 requests, 65 and 128 nodes."""
    return [
        AttentionCase("T=9 L=200k", (9,), (204_800,)),
        AttentionCase("T=65 L=65k", (65,), (65_000,), layout=MaskLayout.PACKED),
        AttentionCase("T=1 L=65k", (1,), (65_000,), layout=None, shape=Shape.CHAIN),
        AttentionCase("T=128 L=16k", (128,), (16_000,), layout=MaskLayout.DRAFT),
        AttentionCase("16 requests of 16k", (9,) * 16, (16_000,) * 16),
        AttentionCase(
            "64 ragged requests",
            tuple(1 + 7 * request % 33 for request in range(64)),
            tuple(97 * request * request % 9001 for request in range(64)),
        ),
        AttentionCase("200k among short ones", (9,) * 8, (204_800, *range(7))),
    ]


def trap_cases() -> list[AttentionCase]:
    """One case for each trap that shows in one call over a contiguous view."""
    return [
        # An empty split pollutes the merge: fewer tokens than thread blocks, down to one.
        AttentionCase("one token in all", (1,), (0,)),
        AttentionCase("two tokens", (1,), (1,)),
        AttentionCase("64 requests of one stage", (3,) * 64, (5,) * 64),
        AttentionCase("many empty requests", (0, 0, 9, 0, 3, 0), (40, 0, 0, 9, 1, 0)),
        AttentionCase("one token more than a stage", (1,), (32,)),
        AttentionCase("no prefix at all", (9, 33, 1), (0, 0, 0)),
        # Padded rows of a captured graph must not emit NaN.
        AttentionCase("padded rows", (9, 9), (21, 300), padded_rows=30),
        AttentionCase("nothing but padding", (), (), padded_rows=9),
        # Sizes that are no power of two.
        *(
            AttentionCase(f"T={nodes}", (nodes,), (129,), content=Content.UNIFORM)
            for nodes in (2, 3, 5, 7, 9, 31, 33, 63, 65, 127)
        ),
        # The mask ignored, or read as position-causal, which random data do not show.
        AttentionCase("siblings", (33,), (7,), content=Content.UNIFORM, shape=Shape.FAN),
        AttentionCase(
            "siblings, packed",
            (128,),
            (1,),
            content=Content.UNIFORM,
            shape=Shape.FAN,
            layout=MaskLayout.PACKED,
        ),
        # More tiles of rows than thread blocks.
        AttentionCase("128 heads, 128 nodes", (128,), (50,), heads=128),
        AttentionCase("an odd number of heads", (9, 3), (300, 2), heads=5),
        AttentionCase("one head", (9,), (300,), heads=1),
        # The most nodes that a request may have, far more than most have.
        AttentionCase("one large tree among small", (128, 1, 3), (20, 300, 0)),
    ]


def merged(*runs: Sequence[Figure]) -> list[Figure]:
    """Figures of several runs of one check: errors as the worst, counts as sums."""
    joined: dict[str, Figure] = {}
    for figure in (figure for run in runs for figure in run):
        before = joined.get(figure.name)
        if before is None:
            joined[figure.name] = figure
            continue
        counts = figure.unit in (Unit.COUNT, Unit.TOKENS)
        value = before.value + figure.value if counts else max(before.value, figure.value)
        joined[figure.name] = dataclasses.replace(figure, value=value)
    return list(joined.values())
