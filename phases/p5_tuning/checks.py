"""Phase 5: what tuning may not change (bits, limits) and what it must reach (times)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from kdtree_engine.attention import tree_verify_attention
from kdtree_engine.build import CompileError, build
from kdtree_engine.reference.tiny_mla import Attention
from kdtree_engine.timing import Method, copy_bandwidth, matmul_rate
from phases.candidates import require_current_library
from phases.gate import Context, FailureKind, Figure, GateFailure, Unit
from phases.regimes import Regime, replays_for, time_regime

__all__ = [
    "TARGETS",
    "Target",
    "deterministic_bits",
    "kernel_regimes",
    "sm120_resources",
]

_CPU = torch.device("cpu")
_CUDA = torch.device("cuda")
_SM_120_SHARED_BYTES = 101_376
_METHODS: tuple[Method, ...] = ("rotated", "cold")


@dataclasses.dataclass(frozen=True)
class Target:
    """A regime's time on one H200, in microseconds: what it must reach, and what it aims for.

    By the rotated method, as the figures of peers are that both were set by.
    """

    regime: Regime
    must_us: float
    aim_us: float


TARGETS = (
    Target(Regime(1, 8, 9, 4096), 18, 10),
    Target(Regime(1, 8, 9, 16_384), 28, 16),
    Target(Regime(1, 8, 9, 65_536), 60, 32),
    Target(Regime(1, 8, 9, 204_800), 140, 80),
    Target(Regime(1, 8, 17, 16_384), 34, 22),
    Target(Regime(1, 8, 33, 16_384), 45, 32),
    Target(Regime(1, 8, 65, 16_384), 80, 60),
    Target(Regime(1, 16, 9, 16_384), 34, 20),
    Target(Regime(1, 64, 9, 16_384), 80, 60),
    Target(Regime(4, 8, 9, 16_384), 55, 35),
    Target(Regime(16, 8, 9, 16_384), 150, 100),
    Target(Regime(1, 8, 1, 65_536), 50, 30),
)


def deterministic_bits(
    ctx: Context,
    *,
    devices: Sequence[torch.device] | None = None,
    candidate: Attention = tree_verify_attention,
    batches: int = 50,
) -> list[Figure]:
    """With deterministic=True a request has the same bits alone, in any batch and in any place.

    On the CPU, and on the GPU where one is: six requests, and `batches` drawn orders of some of
    them, repetitions included. The default schedule must differ somewhere, else nothing is shown.
    """
    if devices is None:
        devices = [_CPU, _CUDA] if torch.cuda.is_available() else [_CPU]
    calls = differing = 0
    for device in devices:
        require_current_library(device)
        requests = _Requests(ctx.seed, device)
        everyone = range(len(requests.prefixes))
        alone = [requests.call(candidate, [one], deterministic=True)[0] for one in everyone]
        free = [requests.call(candidate, [one], deterministic=False)[0] for one in everyone]
        generator = torch.Generator().manual_seed(ctx.seed)
        for number in range(batches):
            ctx.progress(calls, batches * len(devices), str(device))
            size = 1 + number % 8
            drawn = torch.randint(len(everyone), (size,), generator=generator).tolist()
            together = requests.call(candidate, drawn, deterministic=True)
            for place, one in enumerate(drawn):
                if not torch.equal(together[place], alone[one]):
                    raise GateFailure(
                        FailureKind.NUMERICAL,
                        f"{device}: request {one} at place {place} of batch {drawn} has other "
                        "bits than alone",
                    )
            loose = requests.call(candidate, drawn, deterministic=False)
            differing += any(
                not torch.equal(loose[place], free[one]) for place, one in enumerate(drawn)
            )
            calls += 1
    if not differing:
        raise ValueError("the default schedule gave equal bits too: these batches show nothing")
    return [
        Figure(f"batches with equal bits, {' and '.join(map(str, devices))}", calls, Unit.COUNT),
        Figure("of them unequal by default", differing, Unit.COUNT),
    ]


def sm120_resources(ctx: Context) -> list[Figure]:
    """Every tile that sm_120 may pick: no spill, at most 101,376 bytes of shared memory."""
    try:
        report = build(library=ctx.scratch / "libkdtree_engine.so", progress=ctx.progress)
    except CompileError as error:
        raise GateFailure(FailureKind.COMPILE, str(error)) from error
    kernels = [kernel for kernel in report.kernels if kernel.architecture == "sm_120"]
    tiles = [kernel for kernel in kernels if kernel.dynamic_shared_bytes and kernel.fits]
    if not tiles:
        raise GateFailure(FailureKind.COMPILE, "no tile of the kernel fits sm_120")
    for kernel in kernels:
        if kernel.fits and (kernel.spill_bytes or kernel.shared_bytes > _SM_120_SHARED_BYTES):
            raise GateFailure(
                FailureKind.COMPILE,
                f"{kernel.kernel} on sm_120: {kernel.spill_bytes} bytes spilled, "
                f"{kernel.shared_bytes} bytes of shared memory",
            )
    return [
        Figure("tiles", len(tiles), Unit.COUNT),
        Figure("most shared memory", max(tile.shared_bytes for tile in tiles), Unit.BYTES),
        Figure("most registers", max(tile.registers for tile in tiles), Unit.COUNT),
    ]


def kernel_regimes(
    ctx: Context,
    *,
    device: torch.device = _CUDA,
    candidate: Attention = tree_verify_attention,
    targets: Sequence[Target] = TARGETS,
    repeats: int = 50,
    judged: bool | None = None,
) -> list[Figure]:
    """Each regime's median against what it must reach on an H200; slots scattered.

    The rotated method is judged. The cold one stands beside it: nearer to a call between the other
    kernels of a service's step. repeats: cold calls.
    judged: whether a regime above its bar fails the gate; None: on an H200, as the bars are that
        card's. Elsewhere the figures are recorded without a verdict.
    """
    if judged is None:
        judged = device.type == "cuda" and "H200" in torch.cuda.get_device_name(device)
    bandwidth, products = copy_bandwidth(device), matmul_rate(device)
    figures: list[Figure] = []
    late: list[str] = []
    reached = 0
    for done, target in enumerate(targets):
        ctx.progress(done, len(targets), str(target.regime))
        timing, cold = (
            time_regime(
                target.regime,
                candidate,
                device=device,
                seed=ctx.seed,
                method=method,
                copy_bandwidth=bandwidth,
                repeats=repeats if method == "cold" else replays_for(repeats),
            )
            for method in _METHODS
        )
        seconds = timing.median_us * 1e-6
        figures += [
            Figure(f"{target.regime}", timing.median_us, Unit.MICROSECONDS),
            Figure(f"{target.regime}, cold", cold.median_us, Unit.MICROSECONDS),
            Figure(
                f"{target.regime}, of copy",
                target.regime.floor_bytes / seconds / bandwidth,
                Unit.CEILING_FRACTION,
            ),
            Figure(
                f"{target.regime}, of matrix product",
                target.regime.flops / seconds / products,
                Unit.CEILING_FRACTION,
            ),
            Figure(
                f"{target.regime}, against its aim", target.aim_us / timing.median_us, Unit.SPEEDUP
            ),
        ]
        reached += timing.median_us <= target.aim_us
        if timing.median_us > target.must_us:
            late.append(f"{target.regime}: {timing.median_us:.1f} us, must reach {target.must_us}")
    figures += [
        Figure("copy", bandwidth / 1e12, Unit.TERABYTES_PER_SECOND),
        Figure("matrix product", products / 1e12, Unit.TERAFLOPS),
        Figure("aims reached", reached, Unit.COUNT),
    ]
    if late and judged:
        raise GateFailure(FailureKind.TOO_SLOW, "; ".join(late), figures)
    return figures


class _Requests:
    """Six requests with caches of their own, from which batches are put together."""

    prefixes = (700, 0, 3000, 21, 1500, 64)
    trees = (9, 1, 17, 33, 3, 9)

    def __init__(self, seed: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(seed)
        slots = sum(self.prefixes) + sum(self.trees)
        self.pool = torch.randn(slots, 576, generator=generator).bfloat16().to(device)
        self.q = [
            torch.randn(nodes, 8, 576, generator=generator).bfloat16().to(device)
            for nodes in self.trees
        ]
        order = torch.randperm(slots, generator=generator).to(device)
        sizes = list(self.prefixes) + list(self.trees)
        parts = torch.split(order, sizes)
        self.cached, self.own = parts[: len(self.prefixes)], parts[len(self.prefixes) :]

    def call(
        self, candidate: Attention, chosen: Sequence[int], *, deterministic: bool
    ) -> tuple[torch.Tensor, ...]:
        """The outputs of a batch of the chosen requests, in their order."""
        device = self.pool.device
        trees = [self.trees[one] for one in chosen]
        prefixes = [self.prefixes[one] for one in chosen]
        out = candidate(
            torch.cat([self.q[one] for one in chosen]),
            self.pool,
            torch.tensor([0, *trees], device=device).cumsum(0),
            torch.tensor([0, *prefixes], device=device).cumsum(0),
            torch.cat([self.cached[one] for one in chosen]),
            torch.cat([self.own[one] for one in chosen]),
            sm_scale=192**-0.5,
            deterministic=deterministic,
        )
        assert isinstance(out, torch.Tensor)
        return torch.split(out, trees)
