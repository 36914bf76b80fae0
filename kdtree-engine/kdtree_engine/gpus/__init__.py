"""What GPUs and the links between them can do: the one table that every model of costs goes by.

The gate `roofline-model` keeps rates of its own, as kept evidence goes by its content.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import torch

from kdtree_engine.errors import UnknownName

__all__ = ["GPUS", "LINKS", "Gpu", "Link", "find_gpu"]

_RANKS = 8
"""What every figure of LINKS was taken on."""

_Bytes = TypeVar("_Bytes", float, torch.Tensor)


@dataclasses.dataclass(frozen=True)
class Link:
    """An all-reduce over 8 GPUs: latency in seconds, bandwidth in bytes of its message a second."""

    name: str
    latency: float
    bandwidth: float
    source: str

    @property
    def sent(self) -> float:
        """Bytes a second that each rank sends then: 2 * 7 / 8 of a message, in a ring of 8.

        nccl-tests calls it the bus bandwidth (its doc/PERFORMANCE.md).
        """
        return self.bandwidth * 2 * (1 - 1 / _RANKS)

    def seconds(self, message: _Bytes, ranks: int = _RANKS) -> _Bytes:
        """message: bytes, any shape, and the answer's.

        In a ring each of n ranks sends 2 * (n - 1) / n of a message, so fewer ranks send less. The
        latency is that of 8 ranks whatever there are: no other was found. One rank has nobody to
        wait for.
        """
        if ranks == 1:
            return message * 0.0
        share = (1 - 1 / ranks) / (1 - 1 / _RANKS)
        return self.latency + message * (share / self.bandwidth)


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Rates of one GPU.

    device: what CUDA's name of it begins with. architecture: sm_90 and so on. processors: SMs.
    bandwidth: bytes/s of reads from DRAM. flops: flop/s of bf16 products, which weights of fewer
        bits are widened for. mma_flops: of those by mma.sync, which every architecture has.
    memory: bytes, as sold; a driver shows up to 7% more.
    link: a name in LINKS. source: where these are from.
    launch: seconds of a MoE layer's kernels with nothing to do.
    """

    name: str
    device: str
    architecture: str
    processors: int
    bandwidth: float
    flops: float
    mma_flops: float
    memory: float
    link: str
    source: str
    launch: float = 10e-6
    """Assumed: sorting tokens, two grouped products, the activation; 2.5 us each in a graph."""


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

_SM_120_RATE = 1024 * 2.6e9
"""flop/s of one SM, bf16 with float32 sums: 1,024 a cycle at 2.6 GHz (plan 15)."""

GPUS = {
    one.name: one
    for one in (
        Gpu(
            name="h200",
            device="NVIDIA H200",
            architecture="sm_90",
            processors=132,
            bandwidth=4.46e12,
            flops=989e12,
            mma_flops=635e12,
            memory=141e9,
            link="nvlink",
            source="bandwidth measured on one H200 (bare reads, plan 16), mma.sync too (plan 15); "
            "the vendor's dense flops, not measured",
        ),
        Gpu(
            name="rtx-pro-6000",
            device="NVIDIA RTX PRO 6000",
            architecture="sm_120",
            processors=188,
            bandwidth=1.792e12,
            flops=188 * _SM_120_RATE,
            mma_flops=188 * _SM_120_RATE,
            memory=96e9,
            link="pcie",
            source="not measured: the vendor's bandwidth; flops from 188 SMs at 2.6 GHz, 1,024 a "
            "cycle (plan 15)",
        ),
        Gpu(
            name="rtx-5090",
            device="NVIDIA GeForce RTX 5090",
            architecture="sm_120",
            processors=170,
            bandwidth=1.792e12,
            flops=209.5e12,
            mma_flops=209.5e12,
            memory=32e9,
            link="pcie",
            source="not measured: the vendor's bandwidth and dense bf16 flops with float32 sums; "
            "its link is assumed to be as RTX PRO 6000's",
        ),
    )
}


def find_gpu(name: str) -> Gpu:
    """UnknownName, with the nearest, for one that is not in GPUS."""
    if name not in GPUS:
        raise UnknownName("GPU", name, GPUS)
    return GPUS[name]
