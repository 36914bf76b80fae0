"""What a server's log says of its CUDA graphs: which were captured, and which were replayed.

The replays are lines of SGLang's own, in both releases, switched on by SGLANG_LOG_DECODE_GRAPH_KEY:
its graph runner prints one just before it replays, with the mode, the batch and the padded size. A
step that falls back to eager mode goes another way and prints none. Beside them stands, for each
decode step, whether its result came from a graph.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Mapping

__all__ = ["ARGUMENTS", "ENVIRONMENT", "Capture", "Replays", "capture_in", "replays_in"]

ENVIRONMENT = {"SGLANG_LOG_DECODE_GRAPH_KEY": "1"}
ARGUMENTS = ("--decode-log-interval", "1")

_REPLAY = re.compile(
    r"Decode graph replay: worker=target key_size=(\d+) \(bs\) mode=(\w+) raw_bs=(\d+)"
)
_STEP = re.compile(r"Decode batch.*(?:cuda|cpu|npu) graph: (True|False)")
_CAPTURE = re.compile(
    r"Capture (.*?) (?:CUDA|CPU) graph end\. elapsed=([\d.]+) s, mem usage=([\d.-]+) GB"
)


@dataclasses.dataclass(frozen=True)
class Replays:
    """Replays by mode, and decode steps with and without one.

    sizes, decodes: how many of target-verify and of plain decode there were, by (padded, real)
        number of requests.
    other: replays in another mode. eager: decode steps without a graph. in_graphs: those with one;
        with neither, the log does not tell of its steps as is expected here.
    """

    sizes: Mapping[tuple[int, int], int]
    other: int
    eager: int
    in_graphs: int
    decodes: Mapping[tuple[int, int], int] = dataclasses.field(default_factory=dict)

    @property
    def verified(self) -> int:
        """Trees that were verified in graphs: one for each request of each replay."""
        return sum(real * count for (_, real), count in self.sizes.items())

    @property
    def padded(self) -> int:
        """Replays of target-verify with fewer requests than their graph was captured for."""
        return _padded(self.sizes)

    @property
    def decoded(self) -> int:
        """Replays of plain decode."""
        return sum(self.decodes.values())

    @property
    def padded_decodes(self) -> int:
        """Replays of plain decode with fewer requests than their graph was captured for."""
        return _padded(self.decodes)


def _padded(sizes: Mapping[tuple[int, int], int]) -> int:
    return sum(count for (size, real), count in sizes.items() if real < size)


@dataclasses.dataclass(frozen=True)
class Capture:
    """Seconds and bytes that the graphs took, of all models and phases together."""

    seconds: float
    memory_bytes: float
    graphs: int


def replays_in(log: str) -> Replays:
    """From a log without colour codes."""
    modes: dict[str, collections.Counter[tuple[int, int]]]
    modes = collections.defaultdict(collections.Counter)
    for size, mode, real in _REPLAY.findall(log):
        modes[mode][int(size), int(real)] += 1
    sizes = modes.pop("TARGET_VERIFY", collections.Counter())
    decodes = modes.pop("DECODE", collections.Counter())
    steps = collections.Counter(_STEP.findall(log))
    return Replays(
        sizes,
        other=sum(one.total() for one in modes.values()),
        eager=steps["False"],
        in_graphs=steps["True"],
        decodes=decodes,
    )


def capture_in(log: str) -> Capture:
    """From a log without colour codes; zeros where nothing was captured."""
    found = _CAPTURE.findall(log)
    return Capture(
        seconds=sum(float(seconds) for _, seconds, _ in found),
        memory_bytes=sum(float(memory) * 1e9 for _, _, memory in found),
        graphs=len(found),
    )
