"""Phase 4: the operation in CUDA graphs over a server's static buffers, and under torch.compile."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from kdtree_engine import reference
from kdtree_engine.attention import tree_verify_attention
from kdtree_engine.reference.masks import MaskLayout
from phases.attention_cases import AttentionCase, make_inputs
from phases.candidates import require_current_library
from phases.gate import Context, FailureKind, Figure, GateFailure, Unit
from phases.p4_capture_safety.buffers import Capacity, StaticBuffers, draw_batch

__all__ = ["graph_replay_bits", "no_host_sync", "op_check"]

_CUDA = torch.device("cuda")
_KERNELS_OF_A_CALL = (
    ("tree_verify_wgmma_kernel",),
    ("tree_verify_kernel", "merge_kernel"),
)
"""What a call launches: on wgmma one kernel that merges in itself, on mma.sync a merge after it."""


def op_check(ctx: Context, *, device: torch.device | None = None) -> list[Figure]:
    """torch's own checks of an operation, and torch.compile against eager.

    The CPU implementation and the fake one; on a machine with a GPU, the CUDA one too.
    """
    devices = [device or torch.device("cpu")]
    if device is None and torch.cuda.is_available():
        devices.append(_CUDA)
    checks = 0
    for number, (one, layout) in enumerate(itertools.product(devices, (None, *MaskLayout))):
        ctx.progress(number, 4 * len(devices), f"{one}, {layout.value if layout else 'no'} mask")
        case = AttentionCase("small", (3, 2), (20, 5), layout=layout)
        inputs = make_inputs(
            case,
            dtype=torch.bfloat16,
            device=one,
            generator=torch.Generator().manual_seed(ctx.seed),
        )
        out = torch.empty(5, 8, 512, dtype=torch.bfloat16, device=one)
        for lse in (None, torch.empty(5, 8, device=one)):
            try:
                torch.library.opcheck(
                    torch.ops.kdtree_engine.tree_verify_attention.default,
                    (*inputs.tensors(), case.sm_scale, 3, False, out, lse),
                )
            except Exception as error:
                raise GateFailure(
                    FailureKind.LAUNCH, f"{one}, {case.name}: {type(error).__name__}: {error}"
                ) from error
            checks += 1

        def step(*tensors: torch.Tensor | None, case: AttentionCase = case) -> torch.Tensor:
            answer = tree_verify_attention(
                *tensors,  # type: ignore[arg-type]
                sm_scale=case.sm_scale,
            )
            assert isinstance(answer, torch.Tensor)
            return answer + 1

        torch.compiler.reset()
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        if not torch.equal(compiled(*inputs.tensors()), step(*inputs.tensors())):
            raise GateFailure(
                FailureKind.NUMERICAL, f"{one}, {case.name}: compiled and eager bits differ"
            )
        checks += 1
    return [Figure("checks", checks, Unit.COUNT)]


def graph_replay_bits(
    ctx: Context,
    *,
    device: torch.device = _CUDA,
    draws: int = 60,
    capacity: Capacity | None = None,
) -> list[Figure]:
    """One captured graph for each layout, dtype of offsets and schedule, each over many batches.

    A replay must give, bit for bit, what an eager call on the same buffers gives, and what the
    oracle gives as near as rounding allows. Outputs are poisoned before each; what an earlier,
    larger batch left in the buffers stays there.
    """
    settings = [
        (MaskLayout.FULL, torch.int32, torch.int64, False),
        (MaskLayout.FULL, torch.int64, torch.int64, False),
        (MaskLayout.DRAFT, torch.int32, torch.int32, True),
        (MaskLayout.PACKED, torch.int64, torch.int32, False),
    ]
    require_current_library(device)
    replays = smaller = 0
    worst = 0.0
    for place, (layout, indptr_dtype, slot_dtype, deterministic) in enumerate(settings):
        size = capacity or Capacity(layout=layout)
        if size.layout is not layout:
            size = Capacity(size.requests, size.nodes, size.prefix, size.heads, layout)
        static = StaticBuffers(
            size, device=device, indptr_dtype=indptr_dtype, slot_dtype=slot_dtype
        )
        generator = torch.Generator().manual_seed(ctx.seed * 100 + place)
        _, inputs = draw_batch(size, generator, device)
        static.fill(inputs)

        def call(
            static: StaticBuffers = static,
            deterministic: bool = deterministic,
        ) -> None:
            _verify(static, deterministic)

        replay = _captured(call, device)
        for number in range(draws):
            ctx.progress(place * draws + number, len(settings) * draws, layout.value)
            case, inputs = draw_batch(size, generator, device)
            static.fill(inputs)
            static.poison_outputs()
            replay()
            replayed = static.out.clone(), static.lse.clone()
            static.poison_outputs()
            call()
            what = f"{layout.value} mask, replay {number}, {case.name}"
            for name, ours, eager in zip(
                ("out", "lse"), replayed, (static.out, static.lse), strict=True
            ):
                if not torch.equal(ours, eager):
                    raise GateFailure(
                        FailureKind.NUMERICAL, f"{what}: {name} of replay and eager differ"
                    )
            worst = max(worst, _against_oracle(what, case, inputs, *replayed))
            replays += 1
            smaller += len(case.trees) < size.requests
    return [
        Figure("replays with equal bits", replays, Unit.COUNT),
        Figure("of smaller batches", smaller, Unit.COUNT),
        Figure("graphs", len(settings), Unit.COUNT),
        Figure("worst relative error", worst, Unit.RELATIVE_ERROR),
    ]


def no_host_sync(ctx: Context, *, device: torch.device = _CUDA) -> list[Figure]:
    """A call waits for nothing, takes no new memory, is captured, launches what is documented."""
    require_current_library(device)
    size = Capacity()
    static = StaticBuffers(size, device=device, indptr_dtype=torch.int32, slot_dtype=torch.int64)
    _, inputs = draw_batch(size, torch.Generator().manual_seed(ctx.seed), device)
    static.fill(inputs)
    for deterministic in (False, True):
        _verify(static, deterministic)  # loads the library, takes the first memory
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_stats(device)["num_device_alloc"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for deterministic in (False, True):
            _verify(static, deterministic)
        tree_verify_attention(*static.tensors(), sm_scale=0.07, out=static.out)
    except RuntimeError as error:
        raise GateFailure(FailureKind.LAUNCH, f"a call waits for the GPU: {error}") from error
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize(device)
    grown = torch.cuda.memory_stats(device)["num_device_alloc"] - before
    if grown:
        raise GateFailure(FailureKind.LAUNCH, f"calls took memory from the driver {grown} times")
    replay = _captured(lambda: _verify(static, False), device)
    replay()
    launched = _launched(lambda: _verify(static, False))
    if not launched:
        raise ValueError("the profiler saw nothing of the GPU: what a call launches is not known")
    if not _documented(launched):
        documented = ", or ".join(" and ".join(names) for names in _KERNELS_OF_A_CALL)
        raise GateFailure(
            FailureKind.LAUNCH,
            f"a call puts on the GPU {', '.join(launched)}, documented is {documented}",
        )
    return [
        Figure("operations of a call", len(launched), Unit.COUNT),
        Figure("allocations of the driver", grown, Unit.COUNT),
    ]


def _verify(static: StaticBuffers, deterministic: bool) -> None:
    """The operation over static buffers, as a backend calls it: outputs given, nothing derived."""
    size = static.capacity
    torch.ops.kdtree_engine.tree_verify_attention.default(
        *static.tensors(),
        192**-0.5,
        size.nodes,
        deterministic,
        static.out,
        static.lse,
    )


def _captured(call: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """What replays `call` from a graph; on a CPU, which has none, `call` itself."""
    if device.type != "cuda":
        return call
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _against_oracle(
    what: str,
    case: AttentionCase,
    inputs: object,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> float:
    """The relative error of a batch at the front of static outputs; the rows behind must be 0."""
    tensors = inputs.tensors()  # type: ignore[attr-defined]
    exact, exact_lse = reference.tree_verify_attention(
        *tensors, sm_scale=case.sm_scale, return_lse=True
    )
    rows = sum(case.trees)
    if bool(out[rows:].count_nonzero()) or not bool((lse[rows:] == -torch.inf).all()):
        raise GateFailure(FailureKind.NUMERICAL, f"{what}: rows without a request are not zero")
    rounded = float((exact.bfloat16().double() - exact).norm() / exact.norm())
    error = float((out[:rows].double() - exact).norm() / exact.norm())
    apart = float((lse[:rows].double() - exact_lse).abs().max())
    if not (error <= 2 * rounded and apart <= 1e-3):
        raise GateFailure(
            FailureKind.NUMERICAL,
            f"{what}: relative error {error:.3g}, allowed is {2 * rounded:.3g}; lse is off by "
            f"{apart:.3g}, allowed is 0.001",
        )
    return error


def _documented(launched: Sequence[str]) -> bool:
    """Whether these are the operations that a call is documented to put on the GPU, in order."""
    return any(
        len(launched) == len(names)
        and all(f"::{name}<" in one for name, one in zip(names, launched, strict=True))
        for names in _KERNELS_OF_A_CALL
    )


def _launched(call: Callable[[], None]) -> list[str]:
    """Names of the kernels, copies and fills that a call puts on the GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type.name == "CUDA"]
