"""The accepted rows of all layers at once: those that SGLang would move, and where it may not."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from kdtree_engine.errors import MissingError
from kdtree_engine.sglang_ext import compat
from kdtree_engine.sglang_ext.kv_moves import at_once, can_move, is_at_once

NODES, STEPS = 9, 5


class MLATokenToKVPool:
    """As much of SGLang's pool as is read: three layers of small rows."""

    def __init__(self, seed: int, layers: int = 3) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.kv_buffer = [torch.randn(64, 1, 8, generator=generator) for _ in range(layers)]


class DSATokenToKVPool(MLATokenToKVPool):
    """A pool with an index beside its rows."""


class Stock:
    """SGLang's function, by its documentation; and how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, batch: Any, accept_index: Any, num_correct_drafts: Any, pools: Any) -> None:
        self.calls += 1
        nodes = len(batch.out_cache_loc) // len(batch.seq_lens)
        wanted, source = [], []
        for request, correct in enumerate(num_correct_drafts.tolist()):
            for step in range(correct + 1):
                wanted.append(int(batch.out_cache_loc[request * nodes + step]))
                source.append(int(batch.out_cache_loc[int(accept_index[request, step])]))
        for rows in pools.get_kvcache().kv_buffer:
            rows[wanted] = rows[source]


def drawn(
    seed: int, requests: int = 3, nodes: int = NODES
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A batch, its accepted rows of q [B, steps] and how many are correct [B]: SGLang's words."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(64, generator=generator)[: requests * nodes]
    path = torch.full((requests, STEPS), -1, dtype=torch.int32)
    correct = torch.randint(STEPS, (requests,), generator=generator).int()
    for request, count in enumerate(correct.tolist()):
        others = torch.randperm(nodes - 1, generator=generator)[:count] + 1
        steps = torch.cat([torch.zeros(1, dtype=torch.int64), others.sort().values])
        path[request, : count + 1] = (steps + request * nodes).int()
    batch = types.SimpleNamespace(out_cache_loc=slots, seq_lens=torch.full((requests,), 40))
    return batch, path, correct


def pools_of(pool: Any) -> Any:
    return types.SimpleNamespace(get_kvcache=lambda: pool)


def test_every_layer_has_the_rows_that_sglang_would_move() -> None:
    stock = Stock()
    move = at_once(stock)
    assert is_at_once(move)
    assert not is_at_once(stock)
    ours, theirs = MLATokenToKVPool(1), MLATokenToKVPool(1)
    for seed in range(30):  # one pool, batches of other sizes: what is kept between steps is right
        batch, path, correct = drawn(seed, requests=1 + seed % 4, nodes=(9, 6, 15)[seed % 3])
        move(batch, path, correct, pools_of(ours))
        stock(batch, path, correct, pools_of(theirs))
        for mine, other in zip(ours.kv_buffer, theirs.kv_buffer, strict=True):
            assert torch.equal(mine, other), seed
    assert stock.calls == 30, "it was not asked in our place"


def test_another_pool_is_taken_up() -> None:
    move = at_once(Stock())
    for seed in (1, 2):
        pool, wanted = MLATokenToKVPool(seed), MLATokenToKVPool(seed)
        batch, path, correct = drawn(seed)
        move(batch, path, correct, pools_of(pool))
        Stock()(batch, path, correct, pools_of(wanted))
        assert all(map(torch.equal, pool.kv_buffer, wanted.kv_buffer))


def test_more_layers_than_a_launch_takes_are_moved_by_several() -> None:
    ours, theirs = MLATokenToKVPool(1, layers=259), MLATokenToKVPool(1, layers=259)
    batch, path, correct = drawn(3)
    assert int(correct.max()) > 0
    at_once(Stock())(batch, path, correct, pools_of(ours))
    Stock()(batch, path, correct, pools_of(theirs))
    assert all(map(torch.equal, ours.kv_buffer, theirs.kv_buffer))


def _other_pool(batch: Any, pool: Any) -> Any:
    return DSATokenToKVPool(1)


def _no_window(batch: Any, pool: Any) -> Any:
    batch.out_cache_loc = batch.out_cache_loc[:-1]
    return pool


def _no_request(batch: Any, pool: Any) -> Any:
    batch.seq_lens = batch.seq_lens[:0]
    return pool


def _short_slots(batch: Any, pool: Any) -> Any:
    batch.out_cache_loc = batch.out_cache_loc.int()
    return pool


def test_a_path_of_another_form_is_sglangs() -> None:
    calls: list[Any] = []
    move = at_once(lambda *given: calls.append(given))
    batch, path, correct = drawn(1)
    pools = pools_of(MLATokenToKVPool(1))
    for other in (path.flatten(), path[:2]):
        move(batch, other, correct, pools)
    assert len(calls) == 2


@pytest.mark.parametrize("change", [_other_pool, _no_window, _no_request, _short_slots])
def test_what_it_does_not_know_is_sglangs(change: Any) -> None:
    calls: list[Any] = []
    move = at_once(lambda *given: calls.append(given))
    batch, path, correct = drawn(1)
    pools = pools_of(change(batch, MLATokenToKVPool(1)))
    move(batch, path, correct, pools)
    assert calls == [(batch, path, correct, pools)]


def test_what_can_be_moved_in() -> None:
    assert can_move(MLATokenToKVPool(1))
    assert not can_move(DSATokenToKVPool(1))
    assert not can_move(None)
    empty = MLATokenToKVPool(1)
    empty.kv_buffer = []
    assert not can_move(empty)


@pytest.mark.parametrize("algorithm", ["NGRAM", "EAGLE", "STANDALONE"])
def test_the_workers_function_is_replaced_once(
    monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    home, stock = types.ModuleType("home"), Stock()
    monkeypatch.setattr(home, compat._MOVES, stock, raising=False)
    monkeypatch.setitem(sys.modules, compat._MOVERS[algorithm], home)
    assert compat.move_at_once(algorithm)
    placed = getattr(home, compat._MOVES)
    assert is_at_once(placed)
    assert compat.move_at_once(algorithm)
    assert getattr(home, compat._MOVES) is placed
    monkeypatch.delattr(home, compat._MOVES)
    with pytest.raises(MissingError, match=f"lacks {compat._MOVERS[algorithm]}:"):
        compat.move_at_once(algorithm)


@pytest.mark.parametrize("algorithm", ["DFLASH", "DDTREE", "None"])
def test_an_algorithm_that_moves_nothing_or_by_itself_is_left(algorithm: str) -> None:
    assert not compat.move_at_once(algorithm)
