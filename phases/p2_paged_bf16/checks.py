"""Phase 2: the same algorithm and kernel through kv_indices, one slot a token, in bf16."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from kdtree_engine import reference
from kdtree_engine.attention import tree_verify_attention
from kdtree_engine.errors import MissingError
from kdtree_engine.library import kernels
from kdtree_engine.reference.masks import MaskLayout
from kdtree_engine.reference.tiny_mla import Attention
from kdtree_engine.schedule import workspace_bytes
from phases.attention_cases import AttentionCase, huge_slot_case
from phases.attention_checks import attention_matches_oracle
from phases.candidates import (
    operation,
    with_poisoned_memory,
    with_stale_buffers,
)
from phases.gate import Context, FailureKind, Figure, GateFailure, Unit
from phases.p1_offline_kernel.checks import (
    kernel_matches_oracle,
    merged,
    split_kv_matches_oracle,
    trap_cases,
)
from phases.regimes import problem_with
from phases.token_checks import tokens_equal_oracle

__all__ = [
    "MOST_WORKSPACE_BYTES",
    "many_tokens",
    "paged_matches_oracle",
    "paged_split_kv_matches_oracle",
    "paged_traps",
    "tinymla_tokens",
    "workspace_bound",
]

MOST_WORKSPACE_BYTES = 256_000_000
_PROCESSORS = (82, 108, 128, 132, 144, 170, 188)
"""Streaming multiprocessors of GPUs of sm_80 to sm_120 that serve models."""
_CPU = torch.device("cpu")
_CUDA = torch.device("cuda")


def paged_split_kv_matches_oracle(ctx: Context) -> list[Figure]:
    """The CPU implementation over scattered and shared slots, every index dtype and layout."""
    return split_kv_matches_oracle(ctx, contiguous_view=False)


def paged_matches_oracle(ctx: Context, *, device: torch.device = _CUDA) -> list[Figure]:
    """The kernel over the same cases as the contiguous gate, slots in random order."""
    return kernel_matches_oracle(ctx, device=device, contiguous_view=False)


def paged_traps(
    ctx: Context,
    *,
    device: torch.device = _CUDA,
    candidate: Attention = operation,
    cases: Sequence[AttentionCase] | None = None,
    counts: Sequence[tuple[int, int, int]] = ((480, 64, 128), (1025, 128, 8)),
) -> list[Figure]:
    """Slots and token counts beyond int32 arithmetic, stale buffers, poisoned memory.

    counts: (requests, nodes, heads) of the calls with many tokens: 30,720 tokens whose offset in q
    leaves int32 at 128 heads, and 131,200 tokens.
    """
    if device.type == "cuda":
        candidate = with_poisoned_memory(candidate)
    candidate = with_stale_buffers(candidate)
    cases = [*trap_cases(), *_shared_prefixes(), huge_slot_case()] if cases is None else cases
    return merged(
        attention_matches_oracle(
            candidate,
            ctx,
            dtype=torch.bfloat16,
            device=device,
            cases=cases,
        ),
        *(
            many_tokens(ctx, candidate, device=device, requests=requests, nodes=nodes, heads=heads)
            for requests, nodes, heads in counts
        ),
    )


def many_tokens(
    ctx: Context,
    candidate: Attention,
    *,
    device: torch.device,
    requests: int,
    nodes: int,
    heads: int,
    prefix: int = 3,
) -> list[Figure]:
    """So many rows of q that their offsets leave int32; the first and last requests are judged.

    Only those, as the float64 answer to all of them would not fit beside them.
    """
    generator = torch.Generator(device=device).manual_seed(ctx.seed)
    rows = requests * nodes
    slots = rows + requests * prefix
    q = torch.randn(rows, heads, 576, generator=generator, device=device, dtype=torch.bfloat16)
    pool = torch.randn(slots, 576, generator=generator, device=device, dtype=torch.bfloat16)
    order = torch.randperm(slots, generator=generator, device=device)
    steps = torch.arange(requests + 1, device=device, dtype=torch.int32)
    inputs = (q, pool, steps * nodes, steps * prefix, order[rows:], order[:rows], None, None)
    scale = 192**-0.5
    found = candidate(*inputs, sm_scale=scale, max_nodes=nodes)
    for begin in (0, requests - 2):
        own, cached = slice(begin * nodes, (begin + 2) * nodes), begin * prefix
        part = (
            q[own],
            pool,
            steps[:3] * nodes,
            steps[:3] * prefix,
            order[rows:][cached : cached + 2 * prefix],
            order[own],
        )
        problem = problem_with(part, found[own], scale)
        if problem:
            raise GateFailure(
                FailureKind.NUMERICAL, f"{rows} tokens, requests {begin} and {begin + 1}: {problem}"
            )
    return [Figure(f"tokens in a call, {heads} heads", rows, Unit.TOKENS)]


def workspace_bound(ctx: Context, *, device: torch.device | None = None) -> list[Figure]:
    """The workspace's formula stays below 256 MB at batch 64, and it is the truth.

    Where this machine has the library, its own answers are compared; where it has a GPU, what a
    call takes of it.
    """
    if device is None and torch.cuda.is_available():
        device = _CUDA
    try:
        library = kernels()
    except MissingError:
        if device is not None:
            raise
        library = None
    largest, compared = 0, 0
    for batch, processors, deterministic in itertools.product(
        range(65), _PROCESSORS, (False, True)
    ):
        needed = workspace_bytes(batch, processors, deterministic=deterministic)
        largest = max(largest, needed)
        for nodes, heads in ((1, 8), (9, 8), (65, 8), (128, 128)) if library else ():
            assert library is not None
            said = library.workspace_bytes(
                batch * nodes, batch, heads, nodes, processors, deterministic
            )
            compared += 1
            if said != needed:
                raise GateFailure(
                    FailureKind.SHAPE,
                    f"batch {batch}, {nodes} nodes, {heads} heads, {processors} processors, "
                    f"deterministic={deterministic}: the library wants {said} bytes, the "
                    f"documented formula gives {needed}",
                )
    figures = [
        Figure("largest workspace", largest, Unit.BYTES),
        Figure("answers of the library", compared, Unit.COUNT),
    ]
    if largest >= MOST_WORKSPACE_BYTES:
        raise GateFailure(
            FailureKind.SHAPE, f"{largest} bytes, below {MOST_WORKSPACE_BYTES} are allowed", figures
        )
    if device is not None:
        figures.append(Figure("taken by a call", _taken_by_a_call(device), Unit.BYTES))
    return figures


def tinymla_tokens(
    ctx: Context, *, device: torch.device | None = None, prompts_each: int = 8
) -> list[Figure]:
    """TinyMLA's greedy tokens in bf16: the CPU implementation, and the kernel where a GPU is."""
    devices = [_CPU] if device is None else [device]
    if device is None and torch.cuda.is_available():
        devices.append(_CUDA)
    return merged(
        *(
            tokens_equal_oracle(
                operation, ctx, dtype=torch.bfloat16, device=one, prompts_each=prompts_each
            )
            for one in devices
        )
    )


def _shared_prefixes() -> list[AttentionCase]:
    return [
        AttentionCase(
            f"shared prefix, {layout.value} mask",
            (9, 17, 3),
            (900, 700, 650),
            shared_prefix=640,
            layout=layout,
        )
        for layout in MaskLayout
    ]


def _taken_by_a_call(device: torch.device) -> int:
    """Bytes that torch allocates for a call at batch 64, 65 nodes, 200k tokens, at its peak.

    All requests share one prefix: the formula does not know of lengths, and so need not the pool.
    """
    batch, nodes, prefix = 64, 65, 204_800
    rows = batch * nodes
    pool = torch.randn(prefix + rows, 576, device=device, dtype=torch.bfloat16)
    q = torch.randn(rows, 8, 576, device=device, dtype=torch.bfloat16)
    out = torch.empty(rows, 8, 512, device=device, dtype=torch.bfloat16)
    steps = torch.arange(batch + 1, device=device)
    slots = torch.arange(prefix, device=device).repeat(batch)
    own = torch.arange(prefix, prefix + rows, device=device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    most = 0
    for deterministic in (False, True):
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        tree_verify_attention(
            q,
            pool,
            steps * nodes,
            steps * prefix,
            slots,
            own,
            sm_scale=0.07,
            max_nodes=nodes,
            out=out,
            deterministic=deterministic,
        )
        torch.cuda.synchronize(device)
        taken = torch.cuda.max_memory_allocated(device) - before
        needed = workspace_bytes(batch, processors, deterministic=deterministic)
        # The allocator rounds up; the two offset tensors of the call are small.
        if taken > needed + (4 << 20):
            raise GateFailure(
                FailureKind.SHAPE, f"a call takes {taken} bytes, the formula gives {needed}"
            )
        most = max(most, taken)
    last = out[-nodes:]
    part = (q[-nodes:], pool, steps[:2] * nodes, steps[:2] * prefix, slots[:prefix], own[-nodes:])
    exact = reference.tree_verify_attention(*part, sm_scale=0.07)
    assert isinstance(exact, torch.Tensor)
    if not float((last.double() - exact).norm() / exact.norm()) < 0.01:
        raise GateFailure(FailureKind.NUMERICAL, "the last request's output is wrong")
    return most
