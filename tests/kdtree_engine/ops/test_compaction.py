"""The batched compaction: the oracle's plan, carried out in all layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kdtree_engine.ops import AcceptedPaths, compact_kv
from kdtree_engine.reference.acceptance import apply_compaction, compaction_plan


def drawn_paths(batch: int, nodes: int, steps: int, seed: int) -> AcceptedPaths:
    """Rising random paths from 0, of random length."""
    generator = torch.Generator().manual_seed(seed)
    rows, counts = [], []
    for _ in range(batch):
        count = 1 + int(torch.randint(min(steps, nodes), (1,), generator=generator))
        others = torch.randperm(nodes - 1, generator=generator)[: count - 1] + 1
        rows.append([0, *others.sort().values.tolist(), *[-1] * (steps - count)])
        counts.append(count)
    return AcceptedPaths(torch.tensor(rows), torch.tensor(counts), torch.zeros(batch).long())


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float64])
@pytest.mark.parametrize("as_list", [True, False])
def test_it_is_the_oracles_plan_carried_out(seed: int, dtype: torch.dtype, as_list: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch, nodes = 4, 3 + 5 * seed
    paths = drawn_paths(batch, nodes, 17, seed)
    windows = torch.randperm(3 * batch * nodes, generator=generator)[: batch * nodes]
    windows = windows.view(batch, nodes)
    pools = torch.randint(0, 200, (3, 3 * batch * nodes, 1, 24), generator=generator).to(dtype)
    wanted = pools.clone()
    for request in range(batch):
        path = paths.nodes[request, : int(paths.counts[request])].tolist()
        plan = compaction_plan(path, windows[request].tolist())
        for pool in wanted:
            apply_compaction(pool, plan)
    compact_kv(list(pools) if as_list else pools, paths, windows)
    assert torch.equal(pools, wanted)


def test_a_destination_may_be_another_moves_source() -> None:
    pool = torch.arange(5.0)[:, None].repeat(1, 4)
    path = AcceptedPaths(torch.tensor([[0, 2, 3, 4]]), torch.tensor([4]), torch.tensor([0]))
    compact_kv([pool], path, torch.arange(5)[None].to(torch.int32))
    assert pool[:, 0].tolist() == [0, 2, 3, 4, 4]


@pytest.mark.parametrize("count", [0, 1])
def test_a_path_without_moves_changes_nothing(count: int) -> None:
    pool = torch.arange(5.0)[:, None]
    path = AcceptedPaths(torch.tensor([[0, -1]]), torch.tensor([count]), torch.tensor([0]))
    compact_kv([pool], path, torch.tensor([[3, 4]]))
    assert pool.flatten().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"pools": []}, ValueError, r"pools: expected 1\.\.256 layers, got 0"),
        ({"pools": [torch.zeros(4)]}, ValueError, r"pools\[0\]: expected shape \[slots, \.\.\.\]"),
        (
            {"pools": [torch.zeros(4, 2), torch.zeros(4, 3)]},
            ValueError,
            r"pools\[1\]: expected shape \[4, 2\], got \[4, 3\]",
        ),
        (
            {"pools": [torch.zeros(4, 2), torch.zeros(4, 2).half()]},
            TypeError,
            r"pools\[1\]: expected dtype float32, got float16",
        ),
        ({"windows": torch.zeros(1, 3)}, TypeError, "windows: expected dtype int64 or int32"),
        (
            {"windows": torch.zeros(2, 3).long()},
            ValueError,
            r"paths\.nodes: expected shape \[2, st",
        ),
        ({"windows": torch.tensor([[0, 1, 9]])}, ValueError, r"windows\[0\]: .*0\.\.3.* got 9"),
        ({"nodes": [[0, 2, 1]]}, ValueError, r"paths\.nodes\[0\]: .*rise from 0, got \[0, 2, 1\]"),
        ({"nodes": [[0, 1, 3]]}, ValueError, r"paths\.nodes\[0\]: expected nodes below 3 that"),
        ({"counts": [4]}, ValueError, r"paths\.counts\[0\]: expected 0\.\.3, .*got 4"),
    ],
)
def test_a_wrong_argument_is_named(
    change: dict[str, Any], error: type[Exception], text: str
) -> None:
    given: dict[str, Any] = {
        "pools": [torch.zeros(4, 2)],
        "nodes": [[0, 1, 2]],
        "counts": [3],
        "windows": torch.tensor([[0, 1, 2]]),
    } | change
    paths = AcceptedPaths(
        torch.tensor(given["nodes"]), torch.tensor(given["counts"]), torch.tensor([0])
    )
    with pytest.raises(error, match=text):
        compact_kv(given["pools"], paths, given["windows"])


def test_opcheck() -> None:
    paths = drawn_paths(2, 9, 5, 1)
    torch.library.opcheck(
        torch.ops.kdtree_engine.compact_kv.default,
        (
            [torch.randn(40, 8), torch.randn(40, 8)],
            paths.nodes,
            paths.counts,
            torch.arange(18).view(2, 9),
        ),
    )
