"""What drafting costs, and how many tokens a step gives.

An n-gram drafter works on the host; its time is in the host's share of a step, which was measured
with it. A drafter of DFlash's kind is a small transformer that fills a block in one pass.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from kdtree_engine.capacity.collectives import reduces
from kdtree_engine.capacity.dense import LAUNCH, Product, head, parts_of
from kdtree_engine.capacity.parts import Bound
from kdtree_engine.capacity.shapes import ModelShape
from kdtree_engine.gpus import Gpu, Link

__all__ = ["ACCEPTANCE_SLOPE", "DFLASH", "TREE", "Drafter", "assumed_acceptance", "drafter_parts"]

ACCEPTANCE_SLOPE = 0.55
"""Of the assumed law below. phases.draft_acceptance, a tiny trained model and its drafter, drawn at
temperature 1: 2.91, 3.32 and 3.72 tokens with trees of 8, 16 and 32 nodes below the root (plan 20),
which are 0.60, 0.57 and 0.54. No figure of Kimi K2 with such trees is known."""

TREE: dict[Bound, float] = {"latency": 45e-6 + 20e-6}
"""Building a tree from logits, then walk and compaction: what plan 20 aims at; none was timed."""


def assumed_acceptance(nodes: int) -> float:
    """Tokens that a verification of `nodes` nodes gives: 1 + slope * log2(nodes).

    The root is one of the nodes: one node gives one token, and each doubling adds as many again.
    """
    return 1 + ACCEPTANCE_SLOPE * math.log2(nodes)


@dataclasses.dataclass(frozen=True)
class Drafter:
    """A block-diffusion drafter with grouped-query attention; bf16, hidden and MLP as the target's.

    layers, kv_heads, head: six layers, 8 heads of 128 (the Kimi drafter, as tenstorrent/tt-metal
    pull request 50235 describes it). heads: assumed. taps: layers of the target whose features it
    takes. block: positions of a pass (SGLang's default where a drafter's config does not say).
    """

    layers: int = 6
    heads: int = 64
    kv_heads: int = 8
    head: int = 128
    taps: int = 6
    block: int = 16

    def products(self, shape: ModelShape) -> Iterator[Product]:
        hidden, layers = shape.hidden, self.layers
        own, shared = self.heads * self.head, 2 * self.kv_heads * self.head
        yield Product("features", self.taps * hidden * hidden, 1)
        yield Product("queries, keys, values", hidden * (own + shared), layers)
        yield Product("output", own * hidden, layers)
        yield Product("gate and up", 2 * hidden * shape.intermediate, layers)
        yield Product("down", hidden * shape.intermediate, layers)

    def weights(self, shape: ModelShape, ranks: int) -> float:
        """On one rank. It has no embedding and no head of its own."""
        return sum(one.count * one.of_rank(ranks) for one in self.products(shape))

    def kv_bytes(self, ranks: int) -> float:
        """Of one token on one rank, bf16; a rank has one head at least."""
        return self.layers * 2 * 2 * self.head * max(1.0, self.kv_heads / ranks)


DFLASH = Drafter()


def drafter_parts(
    drafter: Drafter,
    shape: ModelShape,
    gpu: Gpu,
    link: Link,
    *,
    context: int,
    batch: int,
    ranks: int,
    reach: float,
) -> dict[Bound, float]:
    """Seconds of one pass over `batch` blocks: products, head, its KV of the context, all-reduces.

    It is taken to see the whole context; some are made to see a window.
    """
    tokens = batch * drafter.block
    parts = parts_of(
        (*drafter.products(shape), head(shape)),
        gpu,
        tokens=tokens,
        ranks=ranks,
        bytes_per_weight=2.0,
        reach=reach,
        small_kernels=5 * drafter.layers,  # two norms, rotary embedding, activation, store
    )
    parts["latency"] += drafter.layers * LAUNCH  # attention
    parts["bytes"] += batch * context * drafter.kv_bytes(ranks) / (gpu.bandwidth * reach)
    messages = reduces(link, 2 * drafter.layers, 2.0 * tokens * shape.hidden, ranks)
    logits = reduces(link, 1, 1.0 * tokens * shape.vocabulary, ranks)
    for more in (messages, logits):
        for bound, seconds in more.items():
            parts[bound] = parts.get(bound, 0.0) + seconds
    return parts
