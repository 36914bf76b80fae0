"""CUDA graphs on a machine without a GPU: a tape of torch's operations, which a replay runs again.

So the bookkeeping of `kdtree_engine.timing` around graphs is tried everywhere. What only a device
can show (streams, overlap, time) is left to the tests marked `gpu`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from kdtree_engine import timing

__all__ = ["TapedGraph", "use_taped_graphs"]


class _Tape(TorchDispatchMode):
    def __init__(self, graph: TapedGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        self._graph.tape.append((func, args, kwargs or {}, result))
        return result


class TapedGraph:
    """Replays write into the tensors that the capture gave out, as a CUDA graph's do."""

    def __init__(self) -> None:
        self.tape: list[tuple[Any, Any, Any, Any]] = []

    def replay(self) -> None:
        for func, args, kwargs, result in self.tape:
            again = func(*args, **kwargs)
            for old, new in zip(tree_flatten(result)[0], tree_flatten(again)[0], strict=True):
                if old is not new and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class _Stream:
    def wait_stream(self, other: object) -> None:
        pass


class _Event:
    def record(self) -> None:
        self.at = time.perf_counter()

    def ms_until(self, end: _Event) -> float:
        return (end.at - self.at) * 1e3


def use_taped_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on `time_operation` on the CPU takes the path of a GPU."""
    true_tensors = timing._tensors

    @contextlib.contextmanager
    def capture(graph: TapedGraph) -> Iterator[None]:
        with _Tape(graph):
            yield

    def runner(operation: Any, buffers: Any, groups: Any, device: torch.device, _: bool) -> Any:
        return timing._Graph(operation, [[buffers[slot] for slot in one] for one in groups], device)

    monkeypatch.setattr(timing, "_runner", runner)
    monkeypatch.setattr(timing, "_tensors", lambda result, device_type: true_tensors(result, "cpu"))
    monkeypatch.setattr(timing, "_new_event", _Event)
    monkeypatch.setattr(timing, "_elapsed_ms", _Event.ms_until)
    monkeypatch.setattr(timing, "_LAUNCH_US", 1e6)  # a tape is the host's work from end to end
    monkeypatch.setattr(timing, "_new_stream", lambda device: _Stream())
    monkeypatch.setattr(timing, "_synchronize", lambda *device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: _Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", TapedGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
