"""Seconds of a rank's experts, and of the all-reduce behind a layer: a model, nothing measured.

A rank's time in a layer is

    launch + max(bytes / bandwidth, flops / peak)
    bytes = active experts * 3 * hidden * intermediate * bytes a weight     each is read once
    flops = pairs of token and expert * 2 * 3 * hidden * intermediate

where a rank with a slice of each expert has that part of both. The sums are of the whole rank, as
if reading the weights of one expert were hidden behind the products of another: a lower bound. Left
out are the shared expert and the router, which every placement has alike, activations, which are
small beside weights, and what thin slices cost a matrix product. A layer ends with one all-reduce
of bf16 [tokens, hidden], latency + bytes / bandwidth, under tensor and expert parallelism alike:
so does SGLang without an all-to-all backend.
"""

from __future__ import annotations

import dataclasses

import torch

from kdtree_engine.gpus import Gpu, Link
from kdtree_engine.moe.dispatch import Work

__all__ = ["BYTES_PER_WEIGHT", "ExpertShape", "busy", "reduce_seconds"]

BYTES_PER_WEIGHT = {"int4": 0.5625, "fp8": 1.0, "bf16": 2.0}
"""int4: with a bf16 scale for 32 weights, assumed; 60 layers of 384 experts then have 571 GB of the
about 600 GB that Kimi K2.6's checkpoint has, whose routed experts alone are int4."""


@dataclasses.dataclass(frozen=True)
class ExpertShape:
    """Kimi K2's by default (its model card): SwiGLU of three matrices, hidden x intermediate."""

    hidden: int = 7168
    intermediate: int = 2048
    bytes_per_weight: float = BYTES_PER_WEIGHT["int4"]

    @property
    def weights(self) -> int:
        return 3 * self.hidden * self.intermediate

    @property
    def bytes(self) -> float:
        """Of one expert in one layer."""
        return self.weights * self.bytes_per_weight

    @property
    def flops(self) -> int:
        """Of one token in one expert."""
        return 2 * self.weights


def busy(gpu: Gpu, work: Work, shape: ExpertShape) -> torch.Tensor:
    """Seconds without the launch, float64 [samples, layers, ranks]; 0: no active expert."""
    read = work.experts.double() * (work.share * shape.bytes / gpu.bandwidth)
    product = work.pairs.double() * (work.share * shape.flops / gpu.flops)
    return torch.maximum(read, product)


def reduce_seconds(link: Link, tokens: torch.Tensor, hidden: int, ranks: int) -> torch.Tensor:
    """The all-reduce of bf16 [tokens, hidden] behind a layer. tokens: any shape, the answer's."""
    return link.seconds(tokens.double() * (2 * hidden), ranks)
