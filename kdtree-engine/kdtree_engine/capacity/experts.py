"""Routed experts of a step, by `kdtree_engine.moe`: a drawn router, its work, its seconds.

All layers of a drawn router are alike but for which expert is the popular one, so a few are drawn
and stand for all: four, and fewer for large batches, whose layers differ less.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from kdtree_engine.capacity.parts import Bound
from kdtree_engine.capacity.shapes import ModelShape
from kdtree_engine.errors import UnknownName
from kdtree_engine.gpus import Gpu
from kdtree_engine.moe.costs import ExpertShape, busy
from kdtree_engine.moe.dispatch import Work, sliced, spread
from kdtree_engine.moe.placement import contiguous
from kdtree_engine.moe.routing import Routing
from kdtree_engine.moe.synthetic import SyntheticRouter

__all__ = ["PLACEMENTS", "expert_parts"]

PLACEMENTS = ("tp", "ep")
"""tp: each expert is sliced over all ranks. ep: experts are divided, contiguous."""
_LAYERS, _SAMPLES, _STEPS = 4, 16, 64
"""Layers and steps that are drawn, and batches that are taken of them."""


def expert_parts(
    shape: ModelShape,
    gpu: Gpu,
    *,
    batch: int,
    nodes: int,
    ranks: int,
    placement: str,
    bytes_per_weight: float,
    reach: float,
    seed: int = 1,
) -> dict[Bound, float]:
    """Seconds of all MoE layers of a step; none where the model has no experts.

    Of each layer it is the slowest rank that counts. reach: as in `dense`.
    """
    if not shape.moe_layers:
        return {}
    work = _work(shape.experts, shape.top_k, batch, nodes, ranks, placement, seed)
    expert = ExpertShape(shape.hidden, shape.expert_intermediate, bytes_per_weight)
    real = dataclasses.replace(gpu, bandwidth=gpu.bandwidth * reach, flops=gpu.flops * reach)
    slowest = float(busy(real, work, expert).amax(2).mean())
    endless = dataclasses.replace(real, flops=float("inf"))
    read = float(busy(endless, work, expert).amax(2).mean())
    bound: Bound = "bytes" if 2 * read >= slowest else "flops"
    return {"latency": shape.moe_layers * gpu.launch, bound: shape.moe_layers * slowest}


@functools.lru_cache(maxsize=256)
def _work(
    experts: int, top_k: int, batch: int, nodes: int, ranks: int, placement: str, seed: int
) -> Work:
    """The same for the same arguments, as kd moe draws them: a batch is steps taken together."""
    generator = torch.Generator().manual_seed(seed)
    routing = _routing(experts, top_k, nodes, max(_STEPS, batch), seed)
    counts, _ = routing.batches(batch, _SAMPLES, generator)
    if placement == "tp":
        return sliced(counts, ranks)
    if placement == "ep":
        return spread(counts, contiguous(counts.shape[1], experts, ranks), generator)
    raise UnknownName("placement", placement, PLACEMENTS)


@functools.lru_cache(maxsize=16)
def _routing(experts: int, top_k: int, nodes: int, steps: int, seed: int) -> Routing:
    """Steps of one request each; what takes most of the model's time."""
    layers = max(1, _LAYERS * _STEPS // steps)
    router = SyntheticRouter(experts=experts, top_k=top_k, layers=layers, dense_layers=0)
    return router.draw(steps, nodes, seed)
