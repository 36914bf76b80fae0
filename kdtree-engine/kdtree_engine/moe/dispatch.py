"""The work of each rank in a step: whose weights it reads, and for how many tokens.

Three ways to divide a layer's tokens, counts [samples, layers, experts]:

    sliced  tensor parallelism: every rank has a slice of every expert, and all tokens
    spread  expert parallelism: an expert's tokens are dealt out evenly to its copies, as SGLang's
            dynamic dispatch does, and as EPLB assumes
    joined  expert parallelism: all of an expert's tokens go to one copy, on the rank that has the
            fewest active experts so far; where reading weights is what takes the time, a second
            copy that gets tokens is read for nothing
"""

from __future__ import annotations

import dataclasses

import torch

__all__ = ["Work", "joined", "sliced", "spread"]


@dataclasses.dataclass(frozen=True)
class Work:
    """What the ranks do.

    experts: active experts, int64 [samples, layers, ranks]. pairs: of a token and an expert, the
    same shape. share: what part of an expert's weights, and of its products, a rank has.
    """

    experts: torch.Tensor
    pairs: torch.Tensor
    share: float = 1.0

    @property
    def ranks(self) -> int:
        return self.experts.shape[2]


def sliced(counts: torch.Tensor, ranks: int) -> Work:
    """Every rank has the same: that is why tensor parallelism has no imbalance."""
    active, pairs = (counts > 0).sum(2), counts.sum(2)
    every = (*active.shape, ranks)
    return Work(active[..., None].expand(every), pairs[..., None].expand(every), 1 / ranks)


def spread(counts: torch.Tensor, hosts: torch.Tensor, generator: torch.Generator) -> Work:
    """hosts: of `placement`. Which copy is dealt the first token is drawn for each step and expert.

    Of n tokens and c copies, min(n, c) copies are active.
    """
    copies = hosts.sum(1)
    first = (torch.rand(counts.shape, generator=generator) * copies).long()
    place = hosts.cumsum(1) - 1  # of a copy among its expert's, by rank
    experts, pairs = [], []
    for count, start in zip(counts, first, strict=True):  # one at a time: each is ranks as large
        turn = (place - start[:, None]) % copies[:, None]
        more = turn < (count % copies)[:, None]
        tokens = ((count // copies)[:, None] + more) * hosts
        experts.append((tokens > 0).sum(2))
        pairs.append(tokens.sum(2))
    return Work(torch.stack(experts), torch.stack(pairs))


def joined(counts: torch.Tensor, hosts: torch.Tensor) -> Work:
    """hosts: of `placement`. Experts with several copies are placed by falling tokens."""
    copies = hosts.sum(1)
    only = hosts & (copies == 1)[:, None]
    experts = ((counts > 0)[:, :, None] & only).sum(3)
    pairs = (counts[:, :, None] * only).sum(3)
    movable = counts * (copies > 1)
    samples, layers = torch.meshgrid(*map(torch.arange, counts.shape[:2]), indexing="ij")
    most = int((movable > 0).sum(2).max()) if movable.numel() else 0
    tokens, order = movable.sort(stable=True, dim=2, descending=True)
    for turn in range(most):
        moved, expert = tokens[..., turn], order[..., turn]
        able = hosts[layers, :, expert]
        # By active experts, then by tokens: no rank has as many tokens as 2^32.
        burden = (experts << 32) + pairs
        chosen = burden.masked_fill(~able, torch.iinfo(torch.int64).max).argmin(2)
        experts[samples, layers, chosen] += (moved > 0).long()
        pairs[samples, layers, chosen] += moved
    return Work(experts, pairs)
