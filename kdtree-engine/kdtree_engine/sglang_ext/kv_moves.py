"""The rows of accepted tree nodes, moved in all layers by one launch.

What a verification accepts, SGLang moves to the front of each request's window layer by layer, by
an index and an index_put each: 122 launches a step in a model of 61 layers. `compact_kv` moves the
same rows to the same slots at once. What stands here is called in the place of SGLang's function;
for a pool or a batch of another form it calls that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from kdtree_engine.ops.compaction import MAX_LAYERS, Compaction

__all__ = ["at_once", "can_move", "is_at_once"]

_MARK = "_kdtree_at_once"


def can_move(pool: Any) -> bool:
    """Whether `pool` is a plain pool of latent rows, which alone is read by the slots as they are.

    A subclass keeps more beside the rows (scales, an index), which would have to move too.
    """
    rows = getattr(pool, "kv_buffer", None)
    return type(pool).__name__ == "MLATokenToKVPool" and rows is not None and len(rows) > 0


def at_once(stock: Callable[..., None]) -> Callable[..., None]:
    """SGLang's `move_accept_tokens_to_target_kvcache`, or `compact_kv` where that does the same."""
    mover = _Mover()

    @functools.wraps(stock)
    def moved(batch: Any, accept_index: Any, num_correct_drafts: Any, allocator: Any) -> None:
        if not mover.move(allocator.get_kvcache(), batch, accept_index, num_correct_drafts):
            stock(batch, accept_index, num_correct_drafts, allocator)

    setattr(moved, _MARK, True)
    return moved


def is_at_once(function: Any) -> bool:
    """Whether `function` comes from `at_once` itself."""
    return hasattr(function, _MARK)


class _Mover:
    """The pool that was moved in last, checked once, and the first node of each request."""

    def __init__(self) -> None:
        self._rows: Any = None
        self._layers: list[Compaction] = []
        self._first: dict[int, torch.Tensor] = {}

    def move(self, pool: Any, batch: Any, path: torch.Tensor, correct: torch.Tensor) -> bool:
        """Whether the rows were moved.

        path: int [B, steps], the accepted nodes of each request as rows of the batch, root first,
            -1 behind them. correct: int [B], how many without the root.
        """
        slots, requests = batch.out_cache_loc, len(batch.seq_lens)
        nodes = slots.shape[0] // requests if requests else 0
        fits = nodes > 0 and nodes * requests == len(slots) and slots.dtype == torch.int64
        if not can_move(pool) or not fits or path.dim() != 2 or len(path) != requests:
            return False
        if self._rows is not pool.kv_buffer:
            rows = list(pool.kv_buffer)
            self._layers = [
                Compaction(rows[at : at + MAX_LAYERS]) for at in range(0, len(rows), MAX_LAYERS)
            ]
            self._rows = pool.kv_buffer
        first = self._firsts(requests, nodes, path.device)
        # Two launches: a sum with an int64 tensor is one.
        in_window = (path - first).contiguous()
        counts = correct + self._one(path.device)
        windows = slots.contiguous().view(requests, nodes)
        for layers in self._layers:
            layers.move(in_window, counts, windows)
        return True

    def _firsts(self, requests: int, nodes: int, device: torch.device) -> torch.Tensor:
        """int64 [B, 1], the batch's row of each request's root; kept, as each step asks for it."""
        known = self._first.get(nodes)
        if known is None or len(known) < requests or known.device != device:
            known = torch.arange(0, requests * nodes, nodes, device=device)[:, None]
            self._first[nodes] = known
        return known[:requests]

    def _one(self, device: torch.device) -> torch.Tensor:
        """int64 [1]: one."""
        known = self._first.get(0)
        if known is None or known.device != device:
            known = torch.ones(1, dtype=torch.int64, device=device)
            self._first[0] = known
        return known
