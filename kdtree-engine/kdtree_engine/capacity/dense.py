"""The products that every token takes part in, and the small kernels between them.

A product takes launch + max(bytes / bandwidth, flops / peak), each ceiling times `REACH`. Bytes
are those of its weights, read once a pass; flops are 2 a weight and token. Activations are left
out: 144 tokens of hidden 7168 are 2 MB. Of MLA in absorbed form, as SGLang 0.5.17 and 0.5.23 run
it, the first product (queries down, latent row and rope) is on every rank whole, as a router is;
the rest is divided by heads, columns or vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from kdtree_engine.capacity.parts import Bound
from kdtree_engine.capacity.shapes import ModelShape
from kdtree_engine.gpus import Gpu

__all__ = [
    "END_BYTES",
    "LAUNCH",
    "REACH",
    "Product",
    "end_weights",
    "head",
    "parts_of",
    "products",
    "weights_of_products",
]

LAUNCH = 2.5e-6
"""Seconds of a kernel in a CUDA graph with nothing to do. Assumed, as plan 41's 10 us are of 4."""
REACH = 0.8
"""Share of memory bandwidth and of bf16 flops that products of weights reach. Assumed."""
END_BYTES = 2.0
"""Of a weight of head and embedding: bf16 in DeepSeek V3's fp8 and Kimi K2.6's int4 checkpoints."""
SMALL_KERNELS = 7
"""A layer: four norms, rotary embedding, the KV row's store, an activation. Counted, not traced."""


@dataclasses.dataclass(frozen=True)
class Product:
    """One matrix product of a pass.

    weights: of one. count: how often a pass has it, each time with weights of its own. sliced:
    divided among the ranks; else every rank has the whole.
    """

    name: str
    weights: int
    count: int
    sliced: bool = True

    def of_rank(self, ranks: int) -> float:
        """Weights of one of them on a rank."""
        return self.weights / ranks if self.sliced else float(self.weights)


def products(shape: ModelShape) -> Iterator[Product]:
    """All of a pass but routed experts and the head."""
    hidden, heads, layers = shape.hidden, shape.heads, shape.layers
    row = shape.latent + shape.rope
    query = heads * (shape.nope + shape.rope)
    if shape.query_rank:
        down = Product("queries and row, down", hidden * (shape.query_rank + row), layers, False)
        up = Product("queries, up", shape.query_rank * query, layers)
    else:
        down = Product("row, down", hidden * row, layers, False)
        up = Product("queries", hidden * query, layers)
    yield from (down, up)
    yield Product("queries, absorbed", heads * shape.nope * shape.latent, layers)
    yield Product("values, absorbed", heads * shape.latent * shape.value, layers)
    yield Product("output", heads * shape.value * hidden, layers)
    yield from _mlp("dense", hidden, shape.intermediate, shape.dense_layers)
    if shape.moe_layers:
        yield Product("router", hidden * shape.experts, shape.moe_layers, False)
        width = shape.shared_experts * shape.expert_intermediate
        yield from _mlp("shared", hidden, width, shape.moe_layers if width else 0)


def _mlp(name: str, hidden: int, width: int, count: int) -> Iterator[Product]:
    if count:
        yield Product(f"{name}, gate and up", 2 * hidden * width, count)
        yield Product(f"{name}, down", hidden * width, count)


def head(shape: ModelShape) -> Product:
    """Hidden to logits, of every node of a tree."""
    return Product("head", shape.hidden * shape.vocabulary, 1)


def weights_of_products(shape: ModelShape, ranks: int) -> float:
    """Weights on one rank of `products`: without the ends."""
    return sum(one.count * one.of_rank(ranks) for one in products(shape))


def end_weights(shape: ModelShape, ranks: int) -> float:
    """Weights on one rank of the head and the embedding, which may be the same."""
    return head(shape).of_rank(ranks) * (1 if shape.tied else 2)


def parts_of(
    taken: Iterable[Product],
    gpu: Gpu,
    *,
    tokens: int,
    ranks: int,
    bytes_per_weight: float,
    reach: float,
    small_kernels: int = 0,
) -> dict[Bound, float]:
    """Seconds of products for `tokens` tokens, one after the other, by what bounds each."""
    parts: dict[Bound, float] = {"latency": small_kernels * LAUNCH, "bytes": 0.0, "flops": 0.0}
    for one in taken:
        weights = one.of_rank(ranks)
        read = weights * bytes_per_weight / (gpu.bandwidth * reach)
        product = 2 * weights * tokens / (gpu.flops * reach)
        parts["latency"] += one.count * LAUNCH
        parts["bytes" if read >= product else "flops"] += one.count * max(read, product)
    return parts
