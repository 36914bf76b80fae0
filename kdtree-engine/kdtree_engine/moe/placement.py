"""Experts on the ranks of expert parallelism.

A placement is a tensor of bool, [layers, ranks, experts]: which ranks have a copy of an expert.
Every expert has at least one.
"""

from __future__ import annotations

import heapq

import torch

from kdtree_engine.errors import ConfigError

__all__ = ["balanced", "contiguous", "loads_of_ranks"]


def contiguous(layers: int, experts: int, ranks: int) -> torch.Tensor:
    """Rank r has experts r * E/R to (r + 1) * E/R - 1: how SGLang places them without EPLB.

    Raises ConfigError where the ranks do not divide the experts.
    """
    if ranks < 1 or experts % ranks:
        raise ConfigError(f"{experts} experts are not to be divided among {ranks} ranks")
    rank_of = torch.arange(experts) // (experts // ranks)
    return (rank_of == torch.arange(ranks)[:, None]).expand(layers, ranks, experts).clone()


def balanced(loads: torch.Tensor, ranks: int, redundant: int) -> torch.Tensor:
    """Copies of the most loaded experts, then all copies packed onto the ranks.

    After the description of DeepSeek's EPLB (github.com/deepseek-ai/EPLB, its global policy, and
    arXiv 2412.19437, 3.4.1), written anew:

    1. `redundant` times, the expert with the most load a copy gets another copy, up to one a rank.
    2. Copies by falling load, each to the least loaded rank that has room and not yet this expert.
       Each rank has room for (experts + redundant) / ranks; a copy that finds no rank is dropped.
    3. A layer whose busiest rank has more load than if contiguous stays contiguous. The packing is
       greedy, and EPLB has no such guard; it makes sure of never being worse on its own loads.

    loads: non-negative numbers [layers, experts], the tokens of each expert so far. A copy is taken
    to get an equal share of its expert's load. Raises ConfigError where ranks do not divide
    the copies.
    """
    layers, experts = loads.shape
    if redundant < 0 or (experts + redundant) % ranks or redundant > experts * (ranks - 1):
        raise ConfigError(
            f"{experts} experts and {redundant} redundant ones are not to be divided among "
            f"{ranks} ranks",
            remedy=f"a multiple of {ranks}, and no more than one copy of an expert a rank",
        )
    plain = contiguous(layers, experts, ranks)
    room = (experts + redundant) // ranks
    hosts = torch.stack(
        [_packed(_copies(one, ranks, redundant), one, ranks, room) for one in loads.tolist()]
    )
    before = loads_of_ranks(loads, plain).amax(1)
    worse = loads_of_ranks(loads, hosts).amax(1) > before
    hosts[worse] = plain[worse]
    return hosts


def loads_of_ranks(loads: torch.Tensor, hosts: torch.Tensor) -> torch.Tensor:
    """float64 [layers, ranks]; an expert's load, of [layers, experts], is shared by its copies."""
    shares = loads.double() / hosts.sum(1)
    return (hosts * shares[:, None]).sum(2)


def _copies(loads: list[float], ranks: int, redundant: int) -> list[int]:
    copies = [1] * len(loads)
    heap = [(-load, expert) for expert, load in enumerate(loads)] if ranks > 1 else []
    heapq.heapify(heap)
    for _ in range(redundant):
        _, expert = heapq.heappop(heap)
        copies[expert] += 1
        if copies[expert] < ranks:
            heapq.heappush(heap, (-loads[expert] / copies[expert], expert))
    return copies


def _packed(copies: list[int], loads: list[float], ranks: int, room: int) -> torch.Tensor:
    """bool [ranks, experts]."""
    hosts = torch.zeros(ranks, len(loads), dtype=torch.bool)
    filled, held = [0] * ranks, [0.0] * ranks
    shares = [
        (load / many, expert) for expert, (load, many) in enumerate(zip(loads, copies, strict=True))
    ]
    for share, expert in sorted(shares, key=lambda one: (-one[0], one[1])):
        free = sorted((held[rank], rank) for rank in range(ranks) if filled[rank] < room)
        # Its copies go to different ranks, so they are placed together.
        for _, rank in free[: copies[expert]]:
            hosts[rank, expert] = True
            filled[rank] += 1
            held[rank] += share
    return hosts
