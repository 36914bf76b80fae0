"""How many nodes DDTREE verifies in each round: all of the budget, or as many as pay.

`ops.tree_budget` chooses; here is what it goes by. The expected tokens of a round are copied to the
host without waiting and read two rounds later, when they have long arrived. Rounds are timed on the
GPU. One rank's times are handed to all, at the same round on each, so all choose alike.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.runtime_context import get_context, get_parallel, get_spec

from kdtree_engine.ops import DraftTrees
from kdtree_engine.ops.tree_budget import WidthChooser, candidate_widths, expected_tokens
from kdtree_engine.sglang_ext.ddtree_round import TreeShape

__all__ = ["Widths"]

_LAG = 2
_TOLD_EVERY = 16
"""Rounds after which the ranks take over the times of rank 0."""
_SAID_EVERY = 4096
_log = logging.getLogger(__name__)


class Widths:
    """The widths of one worker's rounds. A fixed budget has one."""

    def __init__(self, worker: Any, shape: TreeShape, *, adaptive: bool) -> None:
        self._worker = worker
        self._chooser = None
        self._nodes = shape.nodes
        widths = candidate_widths(shape.block, shape.nodes)
        if adaptive and len(widths) > 1:
            self._chooser = WidthChooser(widths)
        self._batch = self._width = 0
        self._rounds = 0
        self._gains: collections.deque[tuple[torch.Tensor, Any]] = collections.deque()
        self._timed: collections.deque[tuple[int, int, Any, Any]] = collections.deque()
        self._began: Any = None
        self._runners: dict[int, tuple[Any, Any]] = {}

    @property
    def adaptive(self) -> bool:
        """Whether rounds differ in width."""
        return self._chooser is not None

    def described(self) -> str:
        """For the log."""
        if self._chooser is None:
            return "fixed"
        return f"adaptive by widths of {', '.join(map(str, self._chooser.widths))}"

    def round_begins(self, batch: int) -> None:
        """A round of so many requests begins: its width is chosen."""
        self._width = self._nodes
        if self._chooser is None:
            return
        self._batch = batch
        self._learn()
        self._width = self._chooser.choose(batch)
        self._began = _now(self._worker.device)

    def cut(self, trees: DraftTrees) -> DraftTrees:
        """The part of the trees that this round verifies; the target's graphs are set to it."""
        if self._chooser is None:
            return trees
        gains = expected_tokens(trees.log_weights, self._chooser.widths)
        if gains.is_cuda:
            host = torch.empty(gains.shape, dtype=gains.dtype, pin_memory=True)
            host.copy_(gains, non_blocking=True)
            self._gains.append((host, _now(self._worker.device)))
        else:
            self._gains.append((gains, None))
        if self._runners:
            runner = self._worker.model_runner
            runner.attn_backend, runner.decode_cuda_graph_runner = self._runners[self._width]
        return trees.first(self._width)

    def round_ends(self) -> None:
        """All of the round's work is on its way."""
        if self._chooser is None:
            return
        now = _now(self._worker.device)
        self._timed.append((self._width, self._batch, self._began, now))
        self._rounds += 1
        if self._rounds % _SAID_EVERY == 0 and get_parallel().tp_group.rank_in_group == 0:
            taken = ", ".join(f"{width}: {count}" for width, count in self._chooser.chosen.items())
            _log.info("DDTREE: rounds by width: %s", taken)

    def capture(self) -> None:
        """Graphs of the target's verify pass for each width; those of the widest are there."""
        runner = self._worker.model_runner
        widest = runner.decode_cuda_graph_runner
        if self._chooser is None or widest is None:
            return
        self._runners[self._nodes] = runner.attn_backend, widest
        for width in self._chooser.widths[:-1]:
            with _as_if(width):
                before = runner.init_new_workspace
                try:
                    backend = runner._get_attention_backend(init_new_workspace=True)
                finally:
                    runner.init_new_workspace = before
                graphs = type(widest)(
                    runner,
                    attn_backend=backend,
                    speculative_num_steps=get_spec().speculative_num_steps,
                    speculative_num_draft_tokens=width,
                )
            self._runners[width] = backend, graphs

    def _learn(self) -> None:
        """Take in what rounds before have found. Waits for nothing that is not long done."""
        assert self._chooser is not None
        while len(self._gains) > _LAG:
            gains, arrived = self._gains.popleft()
            if arrived is not None:
                arrived.synchronize()  # of two rounds ago
            self._chooser.gained(gains.tolist())
        costs = self._chooser.costs
        while self._timed and (len(self._timed) > 4 * _LAG or _is_over(self._timed[0][3])):
            width, batch, began, ended = self._timed.popleft()
            costs.measured(width, batch, _between(began, ended))
        if self._rounds % _TOLD_EVERY == 0:
            told = costs.told()
            group = get_parallel().tp_group
            if group.world_size > 1:
                told = group.broadcast_object(told, src=0)
            costs.take_over(told)


@contextlib.contextmanager
def _as_if(width: int) -> Iterator[None]:
    """SGLang's number of draft tokens is `width`, while graphs of that width are captured."""
    nodes = get_spec().speculative_num_draft_tokens
    get_context().override("ddtree.capture", speculative_num_draft_tokens=width)
    try:
        yield
    finally:
        get_context().override("ddtree.capture", speculative_num_draft_tokens=nodes)


def _now(device: Any) -> Any:
    """This moment of the GPU's stream, or of a CPU, which works at once."""
    if torch.device(device).type != "cuda":
        return time.perf_counter()
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _is_over(moment: Any) -> bool:
    return isinstance(moment, float) or bool(moment.query())


def _between(began: Any, ended: Any) -> float:
    if isinstance(began, float):
        return float(ended - began)
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3
