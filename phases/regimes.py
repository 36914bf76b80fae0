"""Regimes of verification, inputs for them that a GPU draws itself, and the time of one call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch

from kdtree_engine import reference
from kdtree_engine.reference.masks import tree_mask
from kdtree_engine.reference.tiny_mla import Attention
from kdtree_engine.timing import Method, Tensors, Timing, WrongResult, time_operation
from phases.attention_cases import Shape, random_parents
from phases.candidates import require_current_library
from phases.gate import FailureKind, GateFailure

__all__ = [
    "FLOPS_PER_ROW_AND_TOKEN",
    "Regime",
    "draw",
    "first_seed",
    "problem_with",
    "replays_for",
    "time_regime",
]

FLOPS_PER_ROW_AND_TOKEN = 2 * (576 + 512)
_ROW_BYTES = 1152
_SEEDS_OF_A_RUN = 100_000


@dataclasses.dataclass(frozen=True)
class Regime:
    """`batch` requests of `nodes` tree nodes behind `prefix` tokens, `heads` heads a rank."""

    batch: int
    heads: int
    nodes: int
    prefix: int

    def __str__(self) -> str:
        return f"B={self.batch} H={self.heads} T={self.nodes} L={self.prefix}"

    @property
    def kv_tokens(self) -> int:
        return self.batch * (self.prefix + self.nodes)

    @property
    def floor_bytes(self) -> int:
        """Bytes that must be moved: each latent row once. q and out are left out."""
        return _ROW_BYTES * self.kv_tokens

    @property
    def flops(self) -> int:
        return FLOPS_PER_ROW_AND_TOKEN * self.heads * self.nodes * self.kv_tokens

    @property
    def sm_scale(self) -> float:
        return float(192**-0.5)


def draw(regime: Regime, seed: int, *, device: torch.device, scattered: bool) -> Tensors:
    """The operation's eight tensors; without `scattered`, entry i of the prefixes is slot i.

    bf16, tree masks in SGLang's full layout, int32 qo_indptr and kv_indptr, int64 slots: what a
    service hands over. Shapes and sizes are the same for every seed.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    rows, slots = regime.batch * regime.nodes, regime.kv_tokens + 16
    q = torch.randn(
        rows, regime.heads, 576, generator=generator, device=device, dtype=torch.bfloat16
    )
    pool = torch.randn(slots, 576, generator=generator, device=device, dtype=torch.bfloat16)
    if scattered:
        order = torch.randperm(slots, generator=generator, device=device)
    else:
        order = torch.arange(slots, device=device)
    prefix_total = regime.batch * regime.prefix
    # Laid out on the device: on the host the prefix's columns alone take a hundred times longer
    # than all the rest of a draw.
    sees = regime.prefix + regime.nodes
    mask = torch.ones(regime.batch, regime.nodes, sees, dtype=torch.uint8, device=device)
    mask[:, :, regime.prefix :] = _trees(regime.batch, regime.nodes, seed).to(device)
    starts = torch.arange(regime.batch + 1, device=device) * (regime.nodes * sees)
    steps = torch.arange(regime.batch + 1, device=device, dtype=torch.int32)
    return (
        q,
        pool,
        steps * regime.nodes,
        steps * regime.prefix,
        order[:prefix_total].contiguous(),
        order[prefix_total : prefix_total + rows].contiguous(),
        mask.flatten(),
        starts,
    )


@functools.lru_cache(maxsize=4096)
def _trees(batch: int, nodes: int, seed: int) -> torch.Tensor:
    """Who sees whom, uint8 [batch, nodes, nodes] on the host; kept, as each kernel draws it anew.

    Every implementation gets the same seeds, so what is kept is theirs alike. Not to be changed.
    """
    generator = torch.Generator().manual_seed(seed)
    parents = [random_parents(nodes, Shape.MIXED, generator) for _ in range(batch)]
    return torch.stack([tree_mask(torch.tensor(tree)) for tree in parents]).to(torch.uint8)


def first_seed(run_seed: int, method: Method) -> int:
    """Where a measurement's seeds begin.

    The methods share none, so what was computed for one is of no use to the other.
    """
    return run_seed * _SEEDS_OF_A_RUN + (_SEEDS_OF_A_RUN // 2 if method == "rotated" else 1)


def replays_for(repeats: int) -> int:
    """Rotated replays that stand beside `repeats` cold calls: half, as each is a mean already."""
    return max(3, repeats // 2)


def problem_with(
    inputs: Tensors, out: torch.Tensor, sm_scale: float, tolerance_factor: float = 2.0
) -> str | None:
    """What is wrong with an output, by the oracle; None where it is as good as rounding allows."""
    exact = reference.tree_verify_attention(*inputs, sm_scale=sm_scale)
    assert isinstance(exact, torch.Tensor)
    rounded = exact.to(out.dtype).double()
    least = 0.2 * torch.finfo(out.dtype).eps
    size = exact.norm()
    allowed = tolerance_factor * max(least, float((rounded - exact).norm() / size))
    error = float((out.double() - exact).norm() / size)
    # Not `error > allowed`, which is false for NaN.
    return None if error <= allowed else f"relative error {error:.3g}, allowed is {allowed:.3g}"


def time_regime(
    regime: Regime,
    candidate: Attention,
    *,
    device: torch.device,
    seed: int,
    method: Method = "cold",
    scattered: bool = True,
    copy_bandwidth: float | None = None,
    repeats: int = 50,
    warmup: int = 5,
    prepare: Callable[[Tensors], Tensors] | None = None,
) -> Timing:
    """Time a call; outputs are held against the oracle. A wrong one fails the gate.

    The layout is named, so that nothing is read back; max_nodes is, as a backend knows it.
    prepare: turns the drawn tensors into those that are called with, None for as they are.
    """
    require_current_library(device)
    make = functools.partial(draw, regime, device=device, scattered=scattered)

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        used = prepare(tensors) if prepare else tensors
        answer = candidate(*used, sm_scale=regime.sm_scale, max_nodes=regime.nodes)
        assert isinstance(answer, torch.Tensor)
        return answer

    def check(inputs: Tensors, outputs: Tensors) -> str | None:
        return problem_with(inputs, outputs[0], regime.sm_scale)

    try:
        return time_operation(
            make,
            call,
            device=device,
            check=check,
            method=method,
            repeats=repeats,
            warmup=warmup,
            seed=first_seed(seed, method),
            floor_bytes=regime.floor_bytes,
            copy_bandwidth=copy_bandwidth,
        )
    except WrongResult as error:
        raise GateFailure(FailureKind.NUMERICAL, f"{regime}: {error}") from error
