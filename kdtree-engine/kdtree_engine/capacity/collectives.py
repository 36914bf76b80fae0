"""All-reduces of a step under tensor parallelism, by the links of `kdtree_engine.gpus`."""

from __future__ import annotations

from kdtree_engine.capacity.parts import Bound
from kdtree_engine.capacity.shapes import ModelShape
from kdtree_engine.gpus import Link

__all__ = ["collective_parts", "reduces"]


def reduces(link: Link, count: int, message: float, ranks: int) -> dict[Bound, float]:
    """`count` all-reduces of `message` bytes each, one after the other."""
    if ranks == 1:
        return {}
    whole = link.seconds(message, ranks)
    return {"latency": count * link.latency, "link": count * (whole - link.latency)}


def collective_parts(
    shape: ModelShape, link: Link, *, tokens: int, ranks: int
) -> dict[Bound, float]:
    """Of a pass of the target.

    Two all-reduces a layer (attention's output, and the MLP's or the experts') and one of the
    embedding, each of bf16 [tokens, hidden]; and the gathering of bf16 logits [tokens, vocabulary],
    which sends half of what an all-reduce of them would.
    """
    layers = reduces(link, 2 * shape.layers + 1, 2.0 * tokens * shape.hidden, ranks)
    logits = reduces(link, 1, 1.0 * tokens * shape.vocabulary, ranks)
    return {bound: layers[bound] + logits[bound] for bound in layers}
