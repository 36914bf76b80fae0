"""Tokens of each expert, by step and MoE layer: what a router chose, without which token it was.

A step is one forward pass of the target model. The unit that is recorded or drawn is best a pass
of one request: then B steps taken together are a pass at batch B.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from kdtree_engine.errors import ConfigError

__all__ = ["Routing", "counts_of_choices", "routing_of"]


@dataclasses.dataclass(frozen=True)
class Routing:
    """What `routing_of` makes, which checks it.

    counts: int32 [steps, layers, experts], tokens that chose an expert.
    tokens: int64 [steps]. top_k: experts of a token.
    layers: the model's numbers of the layers that have experts, ascending.
    source: what it was read or drawn from, in words.
    """

    counts: torch.Tensor
    tokens: torch.Tensor
    top_k: int
    layers: tuple[int, ...]
    source: str

    @property
    def steps(self) -> int:
        return self.counts.shape[0]

    @property
    def experts(self) -> int:
        return self.counts.shape[2]

    def split(self) -> tuple[Routing, Routing]:
        """The earlier half of the steps and the later: a placement is made of what was before.

        Raises ConfigError where there is one step alone.
        """
        half = self.steps // 2
        if not half:
            raise ConfigError(f"{self.source}: one step; a placement and its trial need two")
        return (
            dataclasses.replace(self, counts=self.counts[:half], tokens=self.tokens[:half]),
            dataclasses.replace(self, counts=self.counts[half:], tokens=self.tokens[half:]),
        )

    def at_most(self, tokens: int) -> Routing:
        """Without the steps of more tokens, as prefills are. ConfigError where none is left."""
        kept = self.tokens <= tokens
        if not kept.any():
            raise ConfigError(f"{self.source}: no step of {tokens} tokens or fewer")
        return dataclasses.replace(self, counts=self.counts[kept], tokens=self.tokens[kept])

    def batches(
        self, batch: int, samples: int, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`samples` times `batch` different steps taken together, as if their requests met.

        Returns int32 [samples, layers, experts] and the tokens, int64 [samples]. Steps of one
        recording are taken for independent of each other. Raises ConfigError where there are fewer
        steps than `batch`.
        """
        if batch > self.steps:
            raise ConfigError(
                f"{self.source}: {self.steps} steps to draw from, a batch of {batch} takes as many",
                remedy="a longer recording, or smaller batches",
            )
        drawn = [
            torch.randperm(self.steps, generator=generator)[:batch].sort().values
            for _ in range(samples)
        ]
        counts = torch.stack([self.counts[one].sum(0, dtype=torch.int64) for one in drawn])
        return counts, torch.stack([self.tokens[one].sum() for one in drawn])


def routing_of(
    counts: torch.Tensor, *, top_k: int, layers: Sequence[int] | None, source: str
) -> Routing:
    """Routing of counts that have been read. counts: integers [steps, model layers, experts].

    layers: the model's numbers of the layers in `counts`; None: 0, 1, 2 and so on. Steps and
    layers without any count are left out: an unused place of a ring buffer, and a dense layer.

    Raises ConfigError where the counts are no whole tokens: a layer's counts must add up to
    top_k times the step's tokens, the same in all layers, and no expert have more than the tokens.
    """
    numbers = tuple(range(counts.shape[1])) if layers is None else tuple(layers)
    if (counts < 0).any():
        raise ConfigError(f"{source}: a count is negative")
    used = counts.sum((0, 2)) > 0
    counts = counts[counts.sum((1, 2)) > 0][:, used]
    if not counts.numel():
        raise ConfigError(f"{source}: no token chose any expert")
    sums = counts.sum(2)
    uneven = (sums != sums[:, :1]).any(1).nonzero()
    if len(uneven):
        step = int(uneven[0])
        low, high = int(sums[step].min()), int(sums[step].max())
        raise ConfigError(
            f"{source}: step {step}: its layers count {low} to {high} choices, and all must agree",
            remedy="counts of one rank's own experts, or approximate ones (stat_approx), do not do",
        )
    if (sums % top_k).any() or (counts * top_k > sums[:, :, None]).any():
        raise ConfigError(f"{source}: its counts are not of tokens with {top_k} experts each")
    kept = tuple(number for number, use in zip(numbers, used.tolist(), strict=True) if use)
    return Routing(counts.to(torch.int32), sums[:, 0].to(torch.int64) // top_k, top_k, kept, source)


def counts_of_choices(choices: torch.Tensor, experts: int) -> torch.Tensor:
    """Tokens of each expert. choices: integers [..., tokens, top_k], -1 for none.

    Returns int32 [..., experts]. Raises ConfigError for a choice that is no expert, or where one
    token chose an expert twice.
    """
    if choices.numel() and (int(choices.min()) < -1 or int(choices.max()) >= experts):
        raise ConfigError(f"a choice is not among {experts} experts")
    ordered = choices.sort(-1).values
    if ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any():
        raise ConfigError("a token chose one expert twice")
    flat = choices.flatten(-2).long() + 1
    counts = torch.zeros(*flat.shape[:-1], experts + 1, dtype=torch.int32)
    counts.scatter_add_(-1, flat, torch.ones_like(flat, dtype=torch.int32))
    return counts[..., 1:]
