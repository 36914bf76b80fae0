"""`accept_trees`: which nodes of a batch's draft trees the target accepts, greedy or sampled."""

from __future__ import annotations

import dataclasses

import torch

from kdtree_engine.ops.arguments import check_tensor
from kdtree_engine.ops.draft_trees import DraftTrees
from kdtree_engine.ops.library import may_read, tree_kernels
from kdtree_engine.ops.registry import register

__all__ = ["AcceptedPaths", "accept_trees", "sample_tokens"]

_WEIGHT_BITS = 40
_DRAW_BITS = 31
_MOST_WEIGHT = 2.0
"""Above any probability, rounding included; a sum over 262,144 columns is then below 2^59."""
_CPU_VALUES_AT_ONCE = 1 << 22


@dataclasses.dataclass(frozen=True, eq=False)
class AcceptedPaths:
    """What one verification commits, for B requests.

    nodes: int64 [B, D + 1], the accepted path from the root (node 0) down, then -1.
    counts: int64 [B], nodes on the path, the root included: 1 to D + 1. That is also the number of
        tokens that a request gains: the path's without the root, and the bonus.
    bonus: int64 [B], the target's own token behind the path, which no child carried.
    """

    nodes: torch.Tensor
    counts: torch.Tensor
    bonus: torch.Tensor


def accept_trees(
    trees: DraftTrees,
    *,
    target_tokens: torch.Tensor | None = None,
    target_probs: torch.Tensor | None = None,
    draws: torch.Tensor | None = None,
) -> AcceptedPaths:
    """Walks each tree down from the root while a child carries the target's own next token.

    Lossless as `reference.acceptance`: greedy it is `accept_greedy` itself; sampled, the target's
    token behind each node is drawn by `sample_tokens`, and the walk goes by those tokens. Reads
    nothing back from a GPU, so it can be captured.

    target_tokens: int64 [B, N], the target's token behind each node (its argmax, when greedy).
    target_probs: float32 [B, N, V], contiguous, the target's distribution behind each node, and
        draws: float32 [B, N], uniform in [0, 1), independent of the tree. Instead of target_tokens.

    Raises TypeError or ValueError that names the argument, and what `sample_tokens` raises.
    """
    batch, nodes = trees.tokens.shape
    like = ("trees", trees.tokens.device)
    if (target_tokens is None) == (target_probs is None):
        raise ValueError("target_tokens: expected either it or target_probs, got both or neither")
    if (target_probs is None) != (draws is None):
        raise ValueError("draws: expected a tensor where target_probs is given, and only there")
    if target_probs is not None and draws is not None:
        check_tensor("target_probs", target_probs, (batch, nodes, "vocabulary"), (torch.float32,))
        check_tensor("draws", draws, (batch, nodes), (torch.float32,))
        target_tokens = sample_tokens(target_probs.flatten(0, 1), draws.flatten()).view(
            batch, nodes
        )
    check_tensor("target_tokens", target_tokens, (batch, nodes), (torch.int64,), like=like)
    made = AcceptedPaths(
        nodes=trees.tokens.new_empty((batch, trees.max_depth + 1)),
        counts=trees.tokens.new_empty(batch),
        bonus=trees.tokens.new_empty(batch),
    )
    torch.ops.kdtree_engine.accept_trees.default(
        trees.tokens, trees.parents, target_tokens, made.nodes, made.counts, made.bonus
    )
    return made


def sample_tokens(probs: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """One token of each row, int64 [R]: the one that the row's draw picks, the same everywhere.

    A weight is floor(p * 2^40), and S their sum. With U = floor(draw * 2^31) the token is the
    lowest whose cumulative weight is above floor(U * S / 2^31). All integers, so no order of sums
    matters.

    probs: float32 [R, V], contiguous, V at most 262,144; rows need not sum to 1 exactly.
    draws: float32 [R], in [0, 1).

    Raises TypeError or ValueError that names the argument. On the CPU, and on a GPU with
    KDTREE_CHECK=1 outside of captures, also ValueError for a row that holds NaN, a negative entry
    or one above 2, or that has no weight, and for a draw outside [0, 1). Where that is not checked
    such entries weigh nothing, a row without weight gives -1, and a draw is brought into [0, 1).
    """
    check_tensor("probs", probs, ("rows", "vocabulary"), (torch.float32,))
    if probs.shape[1] > 1 << 18:
        raise ValueError(f"probs: expected at most {1 << 18} columns, got {probs.shape[1]}")
    like = ("probs", probs.device)
    check_tensor("draws", draws, (probs.shape[0],), (torch.float32,), like=like)
    tokens = torch.empty(probs.shape[0], dtype=torch.int64, device=probs.device)
    torch.ops.kdtree_engine.sample_tokens.default(probs, draws, tokens)
    return tokens


def _sample_cuda(probs: torch.Tensor, draws: torch.Tensor, tokens: torch.Tensor) -> None:
    if may_read(probs.device):
        _check_rows(probs, draws)
    tree_kernels().sample_tokens(probs, draws, tokens)


def _sample_cpu(probs: torch.Tensor, draws: torch.Tensor, tokens: torch.Tensor) -> None:
    _check_rows(probs, draws)
    rows = max(1, _CPU_VALUES_AT_ONCE // probs.shape[1])
    for begin in range(0, probs.shape[0], rows):
        part = slice(begin, begin + rows)
        tokens[part] = _picked(probs[part], draws[part])


def _picked(probs: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    usable = (probs >= 0) & (probs <= _MOST_WEIGHT)
    weights = (probs.masked_fill(~usable, 0.0) * 2.0**_WEIGHT_BITS).to(torch.int64)
    sums = weights.cumsum(1)
    total = sums[:, -1]
    draw = (draws.nan_to_num(0.0) * 2.0**_DRAW_BITS).to(torch.int64)
    draw = draw.clamp(0, (1 << _DRAW_BITS) - 1)
    # floor(draw * total / 2^31) in 64 bits: the high 32 bits of the total give a whole number.
    reach = 2 * draw * (total >> 32) + ((draw * (total & 0xFFFFFFFF)) >> _DRAW_BITS)
    token = torch.searchsorted(sums, reach[:, None], right=True).squeeze(1)
    return token.masked_fill(total == 0, -1)


def _check_rows(probs: torch.Tensor, draws: torch.Tensor) -> None:
    """Raises ValueError for a row that is no distribution, or a draw that is none. Reads all."""
    fine = ((probs >= 0) & (probs <= _MOST_WEIGHT)).all(1)
    fine &= probs.amax(1) >= 2.0**-_WEIGHT_BITS
    if not bool(fine.all()):
        row = int((~fine).nonzero()[0])
        raise ValueError(
            f"probs: row {row} is no distribution: expected entries in 0..1 that are not all 0"
        )
    drawn = (draws >= 0) & (draws < 1)
    if not bool(drawn.all()):
        row = int((~drawn).nonzero()[0])
        raise ValueError(f"draws[{row}]: expected a number in [0, 1), got {float(draws[row])}")


def _accept_cuda(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    targets: torch.Tensor,
    nodes: torch.Tensor,
    counts: torch.Tensor,
    bonus: torch.Tensor,
) -> None:
    tree_kernels().accept_trees(tokens, parents, targets, nodes, counts, bonus)


def _accept_cpu(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    targets: torch.Tensor,
    nodes: torch.Tensor,
    counts: torch.Tensor,
    bonus: torch.Tensor,
) -> None:
    batch, steps = nodes.shape
    here = torch.zeros(batch, 1, dtype=torch.int64)
    going = torch.ones(batch, 1, dtype=torch.bool)
    nodes.fill_(-1)
    nodes[:, :1] = here
    for step in range(1, steps):
        fits = (parents == here) & (tokens == targets.gather(1, here)) & going
        going = fits.any(1, keepdim=True)
        here = torch.where(going, fits.to(torch.uint8).argmax(1, keepdim=True), here)
        nodes[:, step : step + 1] = here.masked_fill(~going, -1)
    counts.copy_((nodes >= 0).sum(1))
    bonus.copy_(targets.gather(1, here).squeeze(1))


register(
    "sample_tokens(Tensor probs, Tensor draws, Tensor(a!) tokens) -> ()",
    cpu=_sample_cpu,
    cuda=_sample_cuda,
)
register(
    "accept_trees(Tensor tokens, Tensor parents, Tensor targets, Tensor(a!) nodes, "
    "Tensor(b!) counts, Tensor(c!) bonus) -> ()",
    cpu=_accept_cpu,
    cuda=_accept_cuda,
)
