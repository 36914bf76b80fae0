"""The split schedule: it covers every stage once, and deterministic mode sees no neighbours."""

from __future__ import annotations

import itertools
import pathlib
import random
import re

import pytest

from kdtree_engine import schedule
from kdtree_engine.schedule import (
    DETERMINISTIC_ROWS,
    Grid,
    splits_of_batch,
    workspace_bytes,
)


def random_batches(count: int) -> list[tuple[list[int], list[int]]]:
    draw = random.Random(0)
    batches = []
    for _ in range(count):
        batch = draw.choice([1, 2, 3, 7, 64])
        prefixes = [draw.choice([0, 1, 21, 1_000, 65_000, 200_000]) for _ in range(batch)]
        nodes = [draw.choice([0, 1, 3, 9, 65, 128]) for _ in range(batch)]
        batches.append((prefixes, nodes))
    return batches


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("groups", [1, 7, 132, 188])
def test_splits_cover_each_request_once_and_in_order(groups: int, deterministic: bool) -> None:
    grid = Grid(groups=groups)
    for prefixes, nodes in random_batches(40):
        cut = splits_of_batch(prefixes, nodes, 8, grid, deterministic=deterministic)
        for prefix, own, splits in zip(prefixes, nodes, cut, strict=True):
            if own == 0:
                assert splits == []
                continue
            edges = [0, *(end for _, end in splits)]
            assert splits == list(itertools.pairwise(edges))
            assert all(begin < end for begin, end in splits)
            assert edges[-1] == -(-(prefix + own) // grid.block_tokens)


def test_no_group_gets_more_than_its_share() -> None:
    grid = Grid(groups=188)
    for prefixes, nodes in random_batches(40):
        cut = splits_of_batch(prefixes, nodes, 8, grid, deterministic=False)
        stages = sum(splits[-1][1] for splits in cut if splits)
        starts = 2 * sum(1 for splits in cut if splits)
        share = max(-(-(stages + starts) // grid.groups), grid.min_blocks)
        assert all(end - begin <= share for splits in cut for begin, end in splits)
        # A group has at most two unfinished requests, so this many splits are of cut requests.
        assert sum(len(splits) for splits in cut if len(splits) > 1) <= 2 * grid.groups


def test_deterministic_splits_are_a_requests_own() -> None:
    prefixes, nodes = [65_000, 21, 200_000, 0], [9, 65, 3, 1]
    together = splits_of_batch(prefixes, nodes, 8, Grid(groups=132), deterministic=True)
    for place, (prefix, own) in enumerate(zip(prefixes, nodes, strict=True)):
        alone = splits_of_batch([prefix], [own], 8, Grid(groups=188), deterministic=True)
        assert alone == [together[place]]
        assert len(together[place]) * own * 8 <= DETERMINISTIC_ROWS


def test_the_default_schedule_does_depend_on_neighbours() -> None:
    """Else deterministic mode would be a promise that costs nothing and proves nothing."""
    alone = splits_of_batch([65_000], [9], 8, Grid(groups=132), deterministic=False)
    beside = splits_of_batch([65_000, 65_000], [9, 9], 8, Grid(groups=132), deterministic=False)
    assert alone[0] != beside[0]


@pytest.mark.parametrize(
    ("rows", "groups"), [(1, 188), (8, 188), (32, 188), (72, 62), (96, 47), (128, 47), (16_384, 1)]
)
def test_the_grid_shares_the_processors_among_tiles_of_rows(rows: int, groups: int) -> None:
    assert Grid.of(rows, 188).groups == groups


@pytest.mark.parametrize("processors", [108, 132, 188])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_workspace_stays_below_256_megabytes(processors: int, deterministic: bool) -> None:
    assert workspace_bytes(64, processors, deterministic=deterministic) < 256_000_000


@pytest.mark.parametrize(
    ("header", "name", "value"),
    [
        ("schedule.cuh", "kPieceCost", schedule.PIECE_COST),
        ("schedule.cuh", "kDeterministicBlocks", schedule.DETERMINISTIC_BLOCKS),
        ("schedule.cuh", "kDeterministicSplits", schedule.DETERMINISTIC_SPLITS),
        ("workspace.h", "kDeterministicRows", schedule.DETERMINISTIC_ROWS),
        ("workspace.h", "kTallestTile", schedule.TALLEST_TILE),
    ],
)
def test_the_constants_are_those_of_the_cuda_sources(
    root: pathlib.Path, header: str, name: str, value: int
) -> None:
    text = (root / "kdtree-engine" / "csrc" / header).read_text()
    found = re.search(rf"constexpr int {name} = (\d+);", text)
    assert found is not None, f"{header} does not declare {name}"
    assert int(found[1]) == value


def test_a_long_request_of_few_rows_has_at_most_so_many_splits() -> None:
    assert len(schedule.deterministic_splits(204_800 // 16, rows=8)) == 128
