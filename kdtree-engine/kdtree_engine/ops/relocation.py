"""`move_rows`: any KV rows to any others, in all layers by one launch of `compact_kv`.

A move becomes two nodes of a window, the destination early and the source late: `compact_kv` moves
the row of the k-th node of a path to the k-th place of its window, and a path may go from node 0
to the sources at once.

    window    unused, destinations d_1 .. d_n, sources s_1 .. s_n
    path      0, n + 1, .. 2n

A launch has a block for each layer and window, so the moves are cut into windows of 64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kdtree_engine.ops.acceptance import AcceptedPaths
from kdtree_engine.ops.arguments import check_tensor
from kdtree_engine.ops.compaction import compact_kv

__all__ = ["as_windows", "move_rows"]

_AT_ONCE = 64


def move_rows(
    pools: Sequence[torch.Tensor] | torch.Tensor,
    sources: torch.Tensor,
    destinations: torch.Tensor,
) -> None:
    """Copies row `sources[i]` of every pool to row `destinations[i]`, for all i at once.

    pools: as of `compact_kv`: one a layer, [slots, ...], of one shape and dtype, at most 256.
    sources, destinations: int64 [N] on the pools' device, all of them different: no destination is
        a source. N is 1 to 4,194,240, which are 65,535 windows.

    Raises TypeError or ValueError that names the argument; slots outside the pools are found where
    `compact_kv` finds them, equal ones nowhere.
    """
    first = pools[0]
    like = ("pools", first.device)
    check_tensor("sources", sources, ("moves",), (torch.int64,), like=like)
    check_tensor("destinations", destinations, tuple(sources.shape), (torch.int64,), like=like)
    paths, slots = as_windows(sources, destinations)
    compact_kv(pools, paths, slots)


def as_windows(
    sources: torch.Tensor, destinations: torch.Tensor
) -> tuple[AcceptedPaths, torch.Tensor]:
    """The moves as paths and windows of `compact_kv`, on their device; nothing is waited for."""
    device, moves = sources.device, sources.shape[0]
    wide = min(moves, _AT_ONCE)
    windows = -(-moves // wide)
    # The last window's places without a move have slot 0 and lie beyond its count.
    filled = torch.zeros(2, windows * wide, dtype=torch.int64, device=device)
    filled[0, :moves], filled[1, :moves] = destinations, sources
    unused = torch.zeros(windows, 1, dtype=torch.int64, device=device)
    slots = torch.cat([unused, filled[0].view(windows, wide), filled[1].view(windows, wide)], 1)
    path = torch.arange(wide, 2 * wide + 1, device=device)
    path[0] = 0
    counts = torch.full((windows,), wide + 1, dtype=torch.int64, device=device)
    counts[-1] = moves - (windows - 1) * wide + 1
    return AcceptedPaths(path.repeat(windows, 1), counts, torch.zeros_like(counts)), slots
