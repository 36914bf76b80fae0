"""A router that was made up: the shapes of a model, and two assumptions that can be set."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from kdtree_engine.errors import ConfigError
from kdtree_engine.moe.routing import Routing, counts_of_choices, routing_of

__all__ = ["SyntheticRouter"]

_CHUNK = 32
"""Steps drawn at once: 60 layers of 384 experts then take 3 MB of random numbers a token."""


@dataclasses.dataclass(frozen=True)
class SyntheticRouter:
    """Kimi K2's shapes by default.

    experts, top_k, layers, dense_layers: of the model, whose first `dense_layers` layers have no
        experts. 384, 8, 61 and 1 are in the model card of moonshotai/Kimi-K2-Instruct, and K2.6 is
        of the same architecture.
    skew: the i-th most popular expert of a layer is drawn in proportion to i^-skew (Zipf); which
        one that is, differs from layer to layer at random. 0: all alike. 0.4, with which the most
        popular has 6.5 times the mean, is assumed. That loads are uneven, differ between layers
        and follow the domain is reported of DeepSeek V3 (arXiv 2604.23150); this shape is not.
    reuse: each expert of a token is one of the next token's with this probability, whatever else
        it draws. 0.35, with chance, is near the 38% that Cohere reported of consecutive tokens
        (cohere.com/blog/mixture-of-experts-models-get-more-from-speculative-decoding, its own
        models). A tree is taken for a chain here: no figure of siblings is known.
    """

    experts: int = 384
    top_k: int = 8
    layers: int = 61
    dense_layers: int = 1
    skew: float = 0.4
    reuse: float = 0.35

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.experts or not 0 <= self.dense_layers < self.layers:
            raise ConfigError(
                f"a router of {self.top_k} of {self.experts} experts in {self.layers} layers, "
                f"{self.dense_layers} of them dense, cannot be"
            )
        if not 0 <= self.skew <= 4 or not 0 <= self.reuse <= 1:
            raise ConfigError(f"skew {self.skew} is not in 0..4, or reuse {self.reuse} not in 0..1")

    def draw(
        self,
        steps: int,
        tokens: int,
        seed: int,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Routing:
        """Steps of one request each, with `tokens` tokens: the same for the same arguments.

        progress: told how many of the steps are drawn.

        Draws without replacement, in proportion to popularity: the top_k smallest of exponential
        variables, each divided by its expert's popularity.
        """
        generator = torch.Generator().manual_seed(seed)
        popularity = self.popularity(generator)
        chunks = []
        for start in range(0, steps, _CHUNK):
            shape = (min(_CHUNK, steps - start), *popularity.shape)
            chosen: list[torch.Tensor] = []
            for _ in range(tokens):
                times = torch.empty(shape).exponential_(generator=generator) / popularity
                if chosen:
                    kept = torch.rand(chosen[-1].shape, generator=generator) < self.reuse
                    first = torch.where(kept, -1.0, times.gather(2, chosen[-1]))
                    times.scatter_(2, chosen[-1], first)
                chosen.append(times.topk(self.top_k, largest=False).indices)
            chunks.append(counts_of_choices(torch.stack(chosen, 2), self.experts))
            progress(start + shape[0], steps)
        return routing_of(
            torch.cat(chunks),
            top_k=self.top_k,
            layers=range(self.dense_layers, self.layers),
            source=f"synthetic router, skew {self.skew:g}, reuse {self.reuse:g}, seed {seed}",
        )

    def popularity(self, generator: torch.Generator) -> torch.Tensor:
        """float32 [MoE layers, experts], 1 for the most popular expert of a layer."""
        zipf = torch.arange(1, self.experts + 1, dtype=torch.float32) ** -self.skew
        places = [
            torch.randperm(self.experts, generator=generator)
            for _ in range(self.layers - self.dense_layers)
        ]
        return torch.stack([zipf[place] for place in places])
