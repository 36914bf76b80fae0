"""What a test must know of a running server: that trees branched, and rows were moved.

KD_TEST_OBSERVED   a JSON file that is kept up to date with the counts
KD_TEST_WRONG_MASK a file; while it is there, every node sees every node of its tree: the tokens
                   must come out wrong
KD_TEST_WRONG_SLOTS a file; while it is there, a prompt's KV is written to other slots of its own
                   than are read: the tokens must come out wrong
"""

from __future__ import annotations

import collections
import itertools
import json
import os
import pathlib
import sys
from typing import Any

import torch

_counts: collections.Counter[str] = collections.Counter()


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("kdtree_engine.sglang_ext.start_up.made", _watch, HookType.AFTER)


def seen() -> dict[str, int]:
    """The counts of this process."""
    return dict(_counts)


def accepted(index: torch.Tensor, count: torch.Tensor, candidates: torch.Tensor) -> None:
    """Count accepted nodes, and those whose KV row the server must move to the front.

    index: [batch, depth], rows of q of the accepted path, root first; count: [batch], without the
    root; candidates: [batch, nodes].
    """
    nodes = candidates.shape[1]
    for request, (path, length) in enumerate(zip(index.tolist(), count.tolist(), strict=True)):
        _counts["accepted"] += length
        _counts["moved"] += sum(
            path[depth] != request * nodes + depth for depth in range(1, length + 1)
        )
    _save()


def _watch(backend: Any, *_: Any, **__: Any) -> None:
    """Wrap the one method through which every call of the kernel goes."""
    cls = type(backend)
    if not hasattr(cls, "_attend") or hasattr(cls, "_kd_watched"):
        return
    attend = cls._attend

    def observed(self: Any, q: torch.Tensor, layer: Any, batch: Any, **rest: Any) -> torch.Tensor:
        verify = rest["qo_indptr"] is not self._one_each and rest["max_nodes"] > 1
        if layer.layer_id == 0:
            _counts["verify" if verify else "decode"] += rest["qo_indptr"].shape[0] - 1
            if verify:
                _counts["spoiled"] += len(rest["qo_indptr"]) - 1 if _spoils() else 0
                _counts["branching"] += sum(map(_branches, _trees(rest)))
                sizes = rest["qo_indptr"].diff()
                _counts["short_masks"] += int((rest["mask_indptr"].diff() == sizes * sizes).sum())
            _save()
        if verify and _spoils():
            rest["mask"] = torch.ones_like(rest["mask"])
        out: torch.Tensor = attend(self, q, layer, batch, **rest)
        return out

    cls._attend = observed
    cls._kd_watched = True
    _watch_ddtree()
    _watch_slots()


def _watch_slots() -> None:
    """Where wrong slots may be asked for, have the scheduler's prefill write to them."""
    if "KD_TEST_WRONG_SLOTS" not in os.environ:
        return
    from sglang.srt.managers import schedule_batch

    stock = schedule_batch.alloc_for_extend

    def written(batch: Any, *given: Any, **named: Any) -> Any:
        slots, *rest = stock(batch, *given, **named)
        if pathlib.Path(os.environ["KD_TEST_WRONG_SLOTS"]).exists():
            slots = slots.roll(1)
        return slots, *rest

    schedule_batch.alloc_for_extend = written


def _watch_ddtree() -> None:
    """Count what DDTREE accepts, where the server has it: its worker walks the trees itself."""
    worker = sys.modules.get("kdtree_engine.sglang_ext.ddtree_worker")
    if worker is None:
        return
    accept = worker.accept_trees

    def counted(trees: Any, **given: Any) -> Any:
        paths = accept(trees, **given)
        starts = torch.arange(len(paths.counts))[:, None] * trees.nodes
        accepted(paths.nodes + starts, paths.counts - 1, trees.tokens)
        return paths

    worker.accept_trees = counted


def _spoils() -> bool:
    """Read at each call, so that one server can be right first and wrong then."""
    path = os.environ.get("KD_TEST_WRONG_MASK")
    return path is not None and pathlib.Path(path).exists()


def _trees(call: dict[str, Any]) -> list[torch.Tensor]:
    """The T x T part of each request's mask of T x T or T x (L + T) bytes."""
    trees = []
    counts = call["qo_indptr"].diff().tolist()
    for (start, end), count in zip(
        itertools.pairwise(call["mask_indptr"].tolist()), counts, strict=True
    ):
        trees.append(call["mask"][start:end].view(count, -1)[:, -count:].bool())
    return trees


def _branches(tree: torch.Tensor) -> bool:
    """Whether two nodes have one parent. tree: [T, T], who sees whom; parents come first."""
    columns = torch.arange(tree.shape[0])
    parents = torch.where(tree.tril(-1), columns, -1).amax(dim=1)[1:].tolist()
    return len(set(parents)) < len(parents)


def _save() -> None:
    path = os.environ.get("KD_TEST_OBSERVED")
    if path:
        new = pathlib.Path(f"{path}.{os.getpid()}")
        new.write_text(json.dumps(_counts))
        new.replace(path)
