"""What a round of DDTREE computes around SGLang's passes, with tensors alone.

Nothing here imports SGLang, so it is tested without it. Nothing is read back from a GPU.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from kdtree_engine.arguments import MAX_NODES
from kdtree_engine.errors import ConfigError
from kdtree_engine.ops import AcceptedPaths, DraftTrees
from kdtree_engine.ops.acceptance import sample_tokens
from kdtree_engine.ops.draft_trees import MAX_DEPTH
from kdtree_engine.ops.target_probs import target_probs
from kdtree_engine.reference.masks import MaskLayout

__all__ = [
    "TreeShape",
    "best_of_all",
    "full_mask",
    "gained_tokens",
    "path_rows",
    "sampled_tokens",
    "tree_shape",
]

_DEFAULT_BUDGET = 32
_VALUES_AT_ONCE = 1 << 25
"""128 MB of float32; what sorts them takes some times as much."""


@dataclasses.dataclass(frozen=True)
class TreeShape:
    """budget: nodes below the root; top_k: tokens of a position; block: positions of a draft."""

    budget: int
    top_k: int
    block: int

    @property
    def nodes(self) -> int:
        """Tokens of a request that are verified at once: the tree and its root."""
        return self.budget + 1

    @property
    def depth(self) -> int:
        """Positions that are drafted: the block's first is the root's."""
        return self.block - 1


def tree_shape(
    *,
    block: int,
    budget: int | None,
    num_draft_tokens: int | None,
    top_k: int,
) -> TreeShape:
    """The shape that arguments ask for.

    budget: of KDTREE_DDTREE_BUDGET or its flag; num_draft_tokens: of SGLang's own argument, the
    root included; None: not given. Raises ConfigError for a shape that cannot be.
    """
    if budget is None:
        budget = _DEFAULT_BUDGET if num_draft_tokens is None else num_draft_tokens - 1
    elif num_draft_tokens not in (None, budget + 1):
        raise ConfigError(
            f"DDTREE: --speculative-num-draft-tokens {num_draft_tokens} and a budget of {budget}, "
            f"expected {budget + 1}: the nodes and their root",
            remedy="leave one of the two out",
        )
    if not 2 <= block <= MAX_DEPTH + 1:
        raise ConfigError(
            f"DDTREE: the drafter's block is {block} positions, expected 2 to {MAX_DEPTH + 1}",
            remedy="--speculative-dflash-block-size says how many to use",
        )
    if not block - 1 <= budget <= MAX_NODES - 1:
        raise ConfigError(
            f"DDTREE: a budget of {budget} nodes, expected {block - 1} (the positions of a draft, "
            f"or its chain would not fit) to {MAX_NODES - 1}",
            remedy="set KDTREE_DDTREE_BUDGET or --speculative-ddtree-budget",
        )
    return TreeShape(budget=budget, top_k=top_k, block=block)


def best_of_all(
    logits: torch.Tensor, top_k: int, first_token: int, group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best tokens of each rank's part of the vocabulary, put together: the same on all ranks.

    logits: [B, D, V / ranks]. Returns log-probabilities, float32 [B, D, ranks * K], and tokens of
    the same shape, int64. Each rank's part is its own alone, so all build one tree.
    """
    own = logits.float()
    values, columns = own.topk(min(top_k, own.shape[-1]), dim=-1)
    weight = own.logsumexp(-1, keepdim=True)
    values, weight = (group.all_gather(part.contiguous(), dim=-1) for part in (values, weight))
    tokens = group.all_gather((columns + first_token).contiguous(), dim=-1)
    # Rounding may lift a token that is all but certain above 0, which no probability is.
    return (values - weight.logsumexp(-1, keepdim=True)).clamp(max=0.0), tokens


def full_mask(trees: DraftTrees, reserved: int) -> torch.Tensor:
    """SGLang's mask of T x (L + T) bytes a request, uint8, from that of T x T.

    reserved: at least as many tokens as all prefixes have, which the host knows. What lies behind
    the last request's part is 1.
    """
    batch, nodes = trees.tokens.shape
    device = trees.tokens.device
    full = torch.ones(nodes * (reserved + batch * nodes), dtype=torch.uint8, device=device)
    step = torch.arange(nodes, device=device)
    starts = trees.mask_indptr(MaskLayout.FULL)[:-1]
    widths = trees.prefix_lengths + nodes
    rows = starts[:, None] + step * widths[:, None] + trees.prefix_lengths[:, None]
    full[(rows[..., None] + step).flatten()] = trees.draft_mask
    return full


def sampled_tokens(logits: torch.Tensor, sampling: Any, most: int | None) -> torch.Tensor:
    """A token behind each node, drawn as its request asks for; int64 [B, N].

    logits: [B, N, V]. sampling: SGLang's SamplingBatchInfo. most: the largest top-k of the batch.
    Some requests at a time, as the distributions of all would take gigabytes.
    """
    requests, nodes, columns = logits.shape
    draws = torch.rand((requests, nodes), device=logits.device)
    at_once = max(1, _VALUES_AT_ONCE // (nodes * columns))
    found = []
    for first in range(0, requests, at_once):
        some = slice(first, first + at_once)
        probs = target_probs(
            logits[some],
            sampling.temperatures.flatten()[some],
            top_ks=sampling.top_ks[some] if sampling.need_top_k_sampling else None,
            top_ps=sampling.top_ps[some] if sampling.need_top_p_sampling else None,
            min_ps=sampling.min_ps[some] if sampling.need_min_p_sampling else None,
            most=most,
        )
        drawn = sample_tokens(probs.flatten(0, 1), draws[some].flatten())
        found.append(drawn.view(-1, nodes))
    return torch.cat(found)


def path_rows(paths: AcceptedPaths, nodes: int) -> torch.Tensor:
    """The rows of the batch's nodes that the paths take, int64 [B, D + 1]; padded with the root's.

    A padded place is not committed, but it is read.
    """
    starts = torch.arange(paths.nodes.shape[0], device=paths.nodes.device)[:, None] * nodes
    return starts + paths.nodes.clamp(min=0)


def gained_tokens(trees: DraftTrees, paths: AcceptedPaths, width: int) -> torch.Tensor:
    """The new tokens of each request, int64 [B, width]: the path's, no root, then the bonus.

    SGLang reads the first `paths.counts` of each row; the others are 0.
    """
    gained = trees.tokens.new_zeros((trees.tokens.shape[0], width))
    below = paths.nodes[:, 1:]
    gained[:, : below.shape[1]] = trees.tokens.gather(1, below.clamp(min=0)) * (below >= 0)
    return gained.scatter(1, paths.counts[:, None] - 1, paths.bonus[:, None])
