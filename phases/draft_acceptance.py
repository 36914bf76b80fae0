"""How long the accepted drafts of trained models are, offline: as chains and as trees.

The target's own continuation is known, so nothing has to be verified by a forward pass: a node of
a draft tree is accepted if it and its ancestors carry the tokens that the target went on with.
For greedy continuations that is what a greedy verification accepts. For drawn ones it is what
lossless sampling accepts, as there too the walk goes by the target's own draws.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from kdtree_engine.ops import accept_trees, build_draft_trees
from phases.tiny_networks import Drafter, Target
from phases.trained_models import (
    Continuations,
    TrainedModels,
    continuations,
    draft_logits,
    load_models,
)

__all__ = ["Accepted", "accepted", "rounds"]


@dataclasses.dataclass(frozen=True)
class Accepted:
    """Means over draft blocks.

    right: of each position of the block, how often the likeliest token is the target's, given the
        context alone.
    chain: tokens that one verification of the likeliest tokens commits, the target's own one
        behind them included: from 1 to the block's size.
    trees: the same for the best tree of so many nodes, the root not counted.
    """

    right: tuple[float, ...]
    chain: float
    trees: Mapping[int, float]


@torch.no_grad()
def accepted(
    target: Target,
    drafter: Drafter,
    said: Continuations,
    start: int,
    budgets: Sequence[int] = (),
) -> Accepted:
    """Decodes `said` again from its place `start` on, once with each kind of draft."""
    block = drafter.config.block
    count, length = said.tokens.shape
    anchors = torch.arange(start, length - block + 1, device=said.tokens.device)
    ahead = anchors[:, None] + torch.arange(1, block, device=anchors.device)
    actual = said.tokens[:, ahead]
    logits = torch.stack(
        [
            draft_logits(
                target,
                drafter,
                said.features[row : row + 1],
                anchors[None],
                said.tokens[row : row + 1, anchors],
            )[0]
            for row in range(count)
        ]
    )
    right = logits.argmax(-1) == actual
    chains = 1 + right.long().cumprod(-1).sum(-1)
    trees = {}
    for budget in budgets:
        made = build_draft_trees(logits.flatten(0, 1).cpu(), budget, from_logits=True)
        # Behind a node of depth d the target says what stands d + 1 places behind the anchor;
        # nodes off the path have some token here too, but the walk never gets to them.
        behind = torch.cat([actual, actual[:, :, -1:]], dim=-1).flatten(0, 1).cpu()
        paths = accept_trees(made, target_tokens=behind.gather(1, made.depths))
        trees[budget] = _mean_step(paths.counts.view(count, -1))
    return Accepted(
        right=tuple(right.float().mean((0, 1)).tolist()),
        chain=_mean_step(chains),
        trees=trees,
    )


@torch.no_grad()
def rounds(
    models: TrainedModels, prompts: Sequence[Sequence[int]], shape: tuple[int, int], new_tokens: int
) -> list[int]:
    """Verifications of each prompt's greedy answer of `new_tokens` tokens, the first of them free.

    shape: nodes of a tree below its root, and tokens of a position. Each round drafts behind what
    the one before committed, from the features of all that is committed.
    """
    target, drafter = load_models(models)
    block = drafter.config.block
    found = []
    for prompt in prompts:
        length = len(prompt) + new_tokens + block
        said = continuations(target, drafter, torch.tensor([list(prompt)]), length)
        place, count = len(prompt), 0  # of the last token that is known and not in the cache
        while place - len(prompt) + 1 < new_tokens:
            anchor = torch.tensor([[place]])
            logits = draft_logits(target, drafter, said.features, anchor, said.tokens[:, [place]])
            made = build_draft_trees(logits[0], *shape, from_logits=True)
            ahead = said.tokens[0, place + 1 : place + 1 + block]
            paths = accept_trees(made, target_tokens=ahead[made.depths])
            place += int(paths.counts[0])
            count += 1
        found.append(count)
    return found


def _mean_step(lengths: torch.Tensor) -> float:
    """Tokens a verification, where each begins behind what the one before committed.

    lengths: int64 [sequences, places], what a verification at each place would commit.
    """
    steps = tokens = 0
    for row in lengths.tolist():
        place = 0
        while place < len(row):
            steps += 1
            tokens += row[place]
            place += row[place]
    return tokens / steps
