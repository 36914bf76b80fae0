"""How the KV of a batch is cut into splits, and what workspace the partial results take.

The arithmetic of csrc/schedule.cuh and csrc/workspace.h, in Python: the CPU implementation runs
it. Tests hold its constants to those of the sources, and its workspace to what the library says. A
*stage* is `block_tokens` tokens, the unit of splitting; a split is a run [begin, end) of a
request's stages, which cover its prefix and then its tree nodes.

The default lays the batch on one line, a request being PIECE_COST and its stages long (its stages
alone where it is the only one), and cuts the line into equal runs, one for each group of thread
blocks. Deterministic mode cuts a request
by its own length and node count alone, so that its neighbours do not show in its bits.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

__all__ = [
    "DETERMINISTIC_ROWS",
    "Grid",
    "deterministic_splits",
    "shared_splits",
    "splits_of_batch",
    "workspace_bytes",
]

PIECE_COST = 2
"""What starting a request costs, in stages, where there are others to balance it against."""
DETERMINISTIC_BLOCKS = 8
"""The least stages of a split in deterministic mode."""
DETERMINISTIC_SPLITS = 128
"""The most splits of a request in deterministic mode."""
DETERMINISTIC_ROWS = 1920
"""The most partial rows of a request in deterministic mode."""
TALLEST_TILE = 72
"""The most packed rows (nodes times heads) that a thread block attends for at once."""
_TILES = (16, 24, 32)
"""Packed rows of the tiles that sm_120 can pick."""
PARTIAL_ROW_BYTES = 512 * 4 + 8
"""512 float32 of unnormalised output, a float32 maximum and a float32 sum."""

Splits = list[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Grid:
    """What a launch fixes: `groups` runs of the line, in stages of `block_tokens` tokens.

    min_blocks: the least stages of a run; below, merging costs more than it saves.
    """

    groups: int
    block_tokens: int = 16
    min_blocks: int = 2

    @classmethod
    def of(cls, rows: int, processors: int) -> Grid:
        """The grid of the library's own choice where a block gets 99 KB of shared memory (sm_120).

        rows: the most packed rows of a request, max_nodes times heads. They are attended for by
        `lanes` blocks, a tile each, that walk the same run of the line at the same time.
        """
        tile = next((tile for tile in _TILES if tile >= rows), None)
        if tile is None:
            tile = 24 if rows % 24 == 0 and rows <= 96 else _TILES[-1]
        lanes = min(-(-rows // tile), processors)
        return cls(groups=processors // lanes)


def splits_of_batch(
    prefixes: Sequence[int],
    nodes: Sequence[int],
    heads: int,
    grid: Grid,
    *,
    deterministic: bool,
) -> list[Splits]:
    """The splits of each request, in order and never empty; none for a request without nodes.

    prefixes, nodes: L and T of each request.
    """
    blocks = [
        -(-(prefix + own) // grid.block_tokens) if own else 0
        for prefix, own in zip(prefixes, nodes, strict=True)
    ]
    if deterministic:
        return [
            deterministic_splits(count, own * heads)
            for count, own in zip(blocks, nodes, strict=True)
        ]
    return shared_splits(blocks, grid)


def shared_splits(blocks: Sequence[int], grid: Grid) -> list[Splits]:
    """The line cut into equal runs. blocks: stages of each request, 0 for one that has no work."""
    cost = PIECE_COST if len(blocks) > 1 else 0
    widths = [cost + count if count else 0 for count in blocks]
    length = sum(widths)
    share = max(-(-length // grid.groups), grid.min_blocks)
    cut: list[Splits] = []
    for count, start in zip(blocks, itertools.accumulate(widths, initial=0), strict=False):
        if count == 0:
            cut.append([])
            continue
        first = start + cost
        groups = range(first // share, (first + count - 1) // share + 1)
        cut.append(
            [
                (max(group * share - first, 0), min((group + 1) * share - first, count))
                for group in groups
            ]
        )
    return cut


def deterministic_splits(blocks: int, rows: int) -> Splits:
    """A request cut by itself. blocks: its stages. rows: its packed rows, nodes times heads."""
    if blocks == 0 or rows == 0:
        return []
    most = min(max(1, DETERMINISTIC_ROWS // rows), DETERMINISTIC_SPLITS)
    wanted = min(most, max(1, blocks // DETERMINISTIC_BLOCKS))
    step = -(-blocks // wanted)
    return [(begin, min(begin + step, blocks)) for begin in range(0, blocks, step)]


def workspace_bytes(batch: int, processors: int, *, deterministic: bool) -> int:
    """Bytes of workspace that a launch needs, whatever its lengths, heads and nodes.

    By default a thread block leaves at most two unfinished tiles, one at either end of its run, so
    the batch does not count: 55.7 MB on 188 processors. Deterministic: DETERMINISTIC_ROWS rows a
    request, 252.6 MB at batch 64.
    """
    rows = batch * DETERMINISTIC_ROWS if deterministic else 2 * processors * TALLEST_TILE
    return rows * PARTIAL_ROW_BYTES
