"""Drawn scores for the tree operations, for the CPU, the headers under g++ and a GPU alike."""

from __future__ import annotations

import dataclasses
import itertools

import torch

from kdtree_engine.ops import DraftTrees
from kdtree_engine.reference.tree import DraftTree

__all__ = ["KINDS", "TreeCase", "same_tree", "standard_cases"]

KINDS = ("plain", "quantised", "holes", "equal", "scales", "short")
"""How scores are drawn: as they come; on a grid, so that sums tie; with -inf entries; all the same;
of very different size, so that sums round to ties; or with positions that have no candidate."""


@dataclasses.dataclass(frozen=True)
class TreeCase:
    """One batch of scores, drawn from `seed`."""

    kind: str
    batch: int
    depth: int
    columns: int
    budget: int
    top_k: int
    seed: int

    def __str__(self) -> str:
        sizes = f"b{self.batch}-d{self.depth}-v{self.columns}-n{self.budget}-k{self.top_k}"
        return f"{self.kind}-{sizes}"

    def log_probs(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """[B, D, V], at most 0, with some entries of -0."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.batch, self.depth, self.columns)
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64).log_softmax(-1)
        if self.kind == "quantised":
            drawn = -((drawn * 2).round() / 2).abs()
        elif self.kind == "holes":
            drawn[torch.rand(shape, generator=generator) < 0.3] = -torch.inf
            drawn[torch.rand(shape, generator=generator) < 0.05] = -0.0
            drawn[torch.rand(shape, generator=generator) < 0.05] = 0.0
        elif self.kind == "equal":
            drawn = torch.full(shape, -0.25, dtype=torch.float64)
        elif self.kind == "scales":
            # Beside 1e16 float64 does not see 1, and beside 1e8 float32 does not.
            size = torch.randint(-2, 9, shape, generator=generator)
            drawn = (drawn * 4).round() * 10.0 ** (2 * size)
        elif self.kind == "short":
            drawn[torch.rand(shape[:2], generator=generator) < 0.2] = -torch.inf
        return drawn.to(dtype)

    def logits(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """[B, D, V], of either sign; -inf where `log_probs` has it."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        shift = torch.randn(self.batch, self.depth, 1, generator=generator, dtype=torch.float64)
        scores = (
            self.log_probs().clamp(min=-3e4).masked_fill(self.log_probs().isneginf(), -torch.inf)
        )
        return (scores + 4 * shift).to(dtype)


def standard_cases() -> list[TreeCase]:
    """Every kind over the corners of budget, depth and ranks, and drawn sizes between them."""
    cases = [
        TreeCase(kind, 2, depth, columns, budget, min(columns, 64), seed)
        for seed, (kind, (depth, columns, budget)) in enumerate(
            itertools.product(
                KINDS,
                [(1, 1, 1), (16, 64, 128), (16, 2, 127), (7, 16, 63), (15, 16, 64), (3, 64, 65)],
            )
        )
    ]
    generator = torch.Generator().manual_seed(20)
    for seed in range(60):
        batch, depth, columns, budget, top_k = (
            1 + int(torch.randint(most, (1,), generator=generator)) for most in (4, 16, 90, 128, 64)
        )
        kind = KINDS[seed % len(KINDS)]
        cases.append(TreeCase(kind, batch, depth, columns, budget, top_k, 100 + seed))
    return cases


def same_tree(found: DraftTrees, request: int, wanted: DraftTree) -> bool:
    """Whether a request's tree is the oracle's, to the last bit of each weight."""
    tree = found.tree(request)
    return all(
        torch.equal(getattr(tree, name), getattr(wanted, name))
        for name in ("tokens", "parents", "depths", "log_weights")
    )
