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

from kdtree_engine.errors import UnknownName
from kdtree_engine.moe.dispatch import Work

__all__ = ["BYTES_PER_WEIGHT", "GPUS", "LINKS", "ExpertShape", "Gpu", "Link", "find_gpu"]

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


@dataclasses.dataclass(frozen=True)
class Link:
    """An all-reduce over 8 GPUs: latency in seconds, bandwidth in bytes of its message a second."""

    name: str
    latency: float
    bandwidth: float
    source: str

    def seconds(self, tokens: torch.Tensor, hidden: int) -> torch.Tensor:
        """tokens: any shape, and the answer's."""
        return self.latency + tokens.double() * (2 * hidden / self.bandwidth)


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Rates of one GPU.

    bandwidth: bytes/s of reads from DRAM. flops: flop/s of bf16 products, which weights of fewer
    bits are widened for. memory: bytes. link: a name in LINKS. source: where these are from.
    launch: seconds of a layer's kernels with nothing to do.
    """

    name: str
    bandwidth: float
    flops: float
    memory: float
    link: str
    source: str
    launch: float = 10e-6
    """Assumed: sorting tokens, two grouped products, the activation; 2.5 us each in a graph."""

    def busy(self, work: Work, shape: ExpertShape) -> torch.Tensor:
        """Seconds without the launch, float64 [samples, layers, ranks]; 0: no active expert."""
        read = work.experts.double() * (work.share * shape.bytes / self.bandwidth)
        product = work.pairs.double() * (work.share * shape.flops / self.flops)
        return torch.maximum(read, product)


LINKS = {
    one.name: one
    for one in (
        Link(
            "nvlink",
            20e-6,
            145e9,
            "NCCL on 8 H100s, started from the host: 19 us at 128 B, 136 us at 16 MB "
            "(github.com/ByteDance-Seed/Triton-distributed issue 57); in a graph less",
        ),
        Link(
            "pcie",
            24e-6,
            22.5e9,
            "NCCL on 8 RTX PRO 6000: 24 us up to 64 KB, a bus bandwidth of 38 to 41 GB/s from 8 MB "
            "on, of which 4/7 is the message's (github.com/voipmonitor/rtx6kpro, "
            "hardware/pcie-bandwidth.md; 28 us at 256 KB there, 36 by this)",
        ),
    )
}

GPUS = {
    one.name: one
    for one in (
        Gpu(
            "h200",
            4.46e12,
            989e12,
            141e9,
            "nvlink",
            "bandwidth measured on one H200 (bare reads, plan 16); the vendor's dense flops, not "
            "measured",
        ),
        Gpu(
            "rtx-pro-6000",
            1.792e12,
            1024 * 188 * 2.6e9,
            96e9,
            "pcie",
            "not measured: the vendor's bandwidth; flops from 188 SMs at 2.6 GHz, 1,024 a cycle "
            "(plan 15)",
        ),
        Gpu(
            "rtx-5090",
            1.792e12,
            209.5e12,
            32e9,
            "pcie",
            "not measured: the vendor's bandwidth and dense bf16 flops with float32 sums; its link "
            "is assumed to be as RTX PRO 6000's",
        ),
    )
}


def find_gpu(name: str) -> Gpu:
    """UnknownName, with the nearest, for one that is not in GPUS."""
    if name not in GPUS:
        raise UnknownName("GPU", name, GPUS)
    return GPUS[name]
