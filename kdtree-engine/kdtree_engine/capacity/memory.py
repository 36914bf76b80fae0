"""Bytes on each GPU: weights, and the KV of a batch at a context. Whether they fit."""

from __future__ import annotations

import dataclasses

from kdtree_engine.capacity.dense import END_BYTES, end_weights, weights_of_products
from kdtree_engine.capacity.drafting import Drafter
from kdtree_engine.capacity.shapes import ModelShape
from kdtree_engine.gpus import Gpu

__all__ = ["USABLE", "Memory", "memory_of"]

USABLE = 0.94
"""Share of a GPU's memory, as sold, for weights and KV; the rest is for activations, graphs and the
communicator. Assumed. On 8 RTX PRO 6000 it leaves Kimi K2 200,000 tokens of bf16 KV; deployments
report 170,000 to 232,000 (github.com/voipmonitor/rtx6kpro, models/kimi-k25.md)."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one GPU.

    token: of one token's KV, the drafter's too. tokens: that the batch asks for at once. usable:
    for weights and KV together.
    """

    weights: float
    token: float
    tokens: int
    usable: float

    @property
    def kv(self) -> float:
        return self.token * self.tokens

    @property
    def holds_weights(self) -> bool:
        return self.weights <= self.usable

    @property
    def fits(self) -> bool:
        return self.weights + self.kv <= self.usable

    @property
    def room(self) -> int:
        """Tokens of KV that fit beside the weights; 0 where the weights alone do not fit."""
        return max(0, int((self.usable - self.weights) // self.token))


def memory_of(
    shape: ModelShape,
    gpu: Gpu,
    *,
    context: int,
    batch: int,
    nodes: int,
    ranks: int,
    expert_bytes: float,
    dense_bytes: float,
    drafter: Drafter | None,
    usable: float = USABLE,
) -> Memory:
    """Of one replica. expert_bytes, dense_bytes: of a weight.

    Head and embedding are bf16 whatever the others are.
    KV is bf16, and whole on every rank: MLA's latent row has no heads to divide. A request takes
    its context and the tree in flight.
    """
    experts = shape.moe_layers * shape.experts * shape.expert_weights / ranks
    weights = experts * expert_bytes + weights_of_products(shape, ranks) * dense_bytes
    weights += end_weights(shape, ranks) * END_BYTES
    token = float(shape.kv_bytes)
    if drafter is not None:
        weights += 2 * drafter.weights(shape, ranks)
        token += drafter.kv_bytes(ranks)
    return Memory(weights, token, batch * (context + nodes), gpu.memory * usable)
