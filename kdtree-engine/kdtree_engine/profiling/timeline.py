"""What each GPU of a trace did, in columns: about 50 bytes for a GPU event, 150 for a launch.

Times are microseconds of the trace's clock, as Kineto writes them. As float64 they are exact to a
nanosecond where the trace has `baseTimeNanoseconds`; older ones, counted from 1970, to 0.25 us.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kdtree_engine.errors import ConfigError
from kdtree_engine.profiling.collectives import link_bytes
from kdtree_engine.profiling.reader import Progress, TraceFile
from kdtree_engine.profiling.rules import REPLAY, Rules

__all__ = ["Activity", "Launch", "Span", "Timeline", "read_timelines"]

_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
_HOST = {"cuda_runtime", "cuda_driver", "runtime", "driver"}
_TAKEN = {*_GPU, *_HOST, "user_annotation"}
_LAUNCHES = re.compile(r"launch|memcpy|memset", re.IGNORECASE)
_PROFILER_STEP = re.compile(r"^ProfilerStep#\d+$")
_MERGED = re.compile(r"^\[([^\]]+)\]\s*(.*)$")
_RANKS = re.compile(r"(?<![A-Za-z])(?:TP|DP|PP|EP)-\d+")
_MOST_US = 1e18
"""Of a time: 30,000 years. Sums of such times are finite."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A range on a host thread. parent: the range around it, by number.

    starts: `decode` or `other` where it starts a step, by the rules; `profiler` for one of
    torch.profiler's own steps. label: its name, where it tells what the host does.
    """

    begin: float
    end: float
    stage: str | None
    starts: str | None
    label: str | None = None
    parent: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """A call on the host that put work on the GPU, and when it began.

    span: the innermost range around it, by its number. graph: whether it launched a CUDA graph.
    """

    at: float
    span: int | None
    graph: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Activity:
    """A kernel, copy or fill on the GPU.

    bytes: of a copy or fill, or what a collective sends over a link; 0 where the trace has none.
    """

    begin: float
    end: float
    name: str
    correlation: int
    bytes: int


class Timeline:
    """One GPU. Activities are in order of their beginning; `spans` are of its host threads."""

    def __init__(self, rank: str, spans: Sequence[Span]) -> None:
        self.rank = rank
        self.spans = spans
        self.names: list[str] = []
        self._ids: dict[str, int] = {}
        self._begin = array("d")
        self._end = array("d")
        self._name = array("i")
        self._correlation = array("q")
        self._bytes = array("q")
        self._order: Sequence[int] = ()
        self._launches: _Launches | None = None

    def __len__(self) -> int:
        return len(self._begin)

    def add(self, begin: float, end: float, name: str, correlation: int, nbytes: int) -> None:
        number = self._ids.setdefault(name, len(self.names))
        if number == len(self.names):
            self.names.append(name)
        self._begin.append(begin)
        self._end.append(end)
        self._name.append(number)
        self._correlation.append(correlation)
        self._bytes.append(nbytes)

    def close(self, launches: _Launches, spans: Sequence[Span]) -> None:
        """Once all has been added."""
        self._order = array("q", sorted(range(len(self)), key=self._begin.__getitem__))
        self._launches = launches
        self.spans = spans

    def __iter__(self) -> Iterator[Activity]:
        for at in self._order:
            yield Activity(
                self._begin[at],
                self._end[at],
                self.names[self._name[at]],
                self._correlation[at],
                self._bytes[at],
            )

    def launch(self, activity: Activity) -> Launch | None:
        """The call that launched it; None where the trace has none."""
        assert self._launches is not None
        return self._launches.find(activity.correlation)

    def stage(self, launch: Launch | None) -> str | None:
        """The stage that it was launched in: that of the innermost range that has one."""
        if launch is None:
            return None
        number = launch.span
        while number is not None:
            span = self.spans[number]
            if span.stage is not None:
                return span.stage
            number = span.parent
        return REPLAY if launch.graph else None

    def starter(self, launch: Launch | None, starts: Sequence[str]) -> int | None:
        """The number of the innermost range around a launch that starts a step of these kinds."""
        number = launch.span if launch else None
        while number is not None:
            span = self.spans[number]
            if span.starts is not None and span.starts in starts:
                return number
            number = span.parent
        return None


class _Launches:
    """Launches by correlation id, which is unique within a process."""

    def __init__(self) -> None:
        self._correlation = array("q")
        self._at = array("d")
        self._thread = array("i")  # then the number of the span, -1 for none
        self._graph = array("b")
        self._order: dict[int, int] = {}

    def add(self, correlation: int, at: float, thread: int, graph: bool) -> None:
        self._correlation.append(correlation)
        self._at.append(at)
        self._thread.append(thread)
        self._graph.append(graph)

    def close(self, spans: Sequence[Span], by_thread: Sequence[Sequence[int]]) -> None:
        """by_thread: for each thread the numbers of its spans, in order of their beginning."""
        waiting = [0] * len(by_thread)
        open_span: list[int | None] = [None] * len(by_thread)
        for one in sorted(range(len(self._at)), key=self._at.__getitem__):
            at, thread = self._at[one], self._thread[one]
            numbers = by_thread[thread]
            while waiting[thread] < len(numbers) and spans[numbers[waiting[thread]]].begin <= at:
                open_span[thread] = numbers[waiting[thread]]
                waiting[thread] += 1
            number = open_span[thread]
            while number is not None and spans[number].end < at:
                number = spans[number].parent
            open_span[thread] = number
            self._thread[one] = -1 if number is None else number
            self._order[self._correlation[one]] = one

    def find(self, correlation: int) -> Launch | None:
        one = self._order.get(correlation)
        if one is None:
            return None
        span = self._thread[one]
        return Launch(self._at[one], None if span < 0 else span, bool(self._graph[one]))


class _Process:
    """What one process of a trace said: its GPUs, launches and ranges."""

    def __init__(self, rules: Rules) -> None:
        self.gpus: dict[str, Timeline] = {}
        self.launches = _Launches()
        self._rules = rules
        self._threads: dict[str, int] = {}
        self._spans: list[list[Span]] = []  # of each thread
        self._meanings: dict[str, tuple[str | None, str | None, str | None] | None] = {}

    def take(self, category: str, event: Mapping[str, Any], pid: str) -> None:
        """One event; KeyError, TypeError or ValueError where its fields are not what they must be.

        pid: of a GPU's event the device, unless its arguments name another.
        """
        name = _printable(str(event.get("name", "")))
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        begin = float(event["ts"])
        end = begin if category in _HOST else begin + float(event["dur"])
        if not (-_MOST_US < begin <= end < _MOST_US):
            raise ValueError(f"it lasts from {begin} to {end}")
        if category in _GPU:
            device = str(args.get("device", pid))
            if device not in self.gpus:
                self.gpus[device] = Timeline("", ())
            correlation, nbytes = int(args.get("correlation", -1)), int(args.get("bytes", 0))
            if "Collective name" in args:
                nbytes = link_bytes(args)
            self.gpus[device].add(begin, end, name, correlation, nbytes)
        elif category in _HOST:
            if "correlation" in args and _LAUNCHES.search(name):
                correlation, graph = int(args["correlation"]), "Graph" in name
                self.launches.add(correlation, begin, self._thread(event), graph)
        else:
            if name not in self._meanings:
                self._meanings[name] = _meaning(name, self._rules)
            meaning = self._meanings[name]
            if meaning is not None:
                self._spans[self._thread(event)].append(Span(begin, end, *meaning))

    def _thread(self, event: Mapping[str, Any]) -> int:
        name = f"{event.get('pid')}/{event.get('tid')}"
        number = self._threads.setdefault(name, len(self._threads))
        if number == len(self._spans):
            self._spans.append([])
        return number

    def close(self) -> None:
        spans: list[Span] = []
        by_thread = [_nested(of_thread, spans) for of_thread in self._spans]
        self.launches.close(spans, by_thread)
        for gpu in self.gpus.values():
            gpu.close(self.launches, spans)


def _nested(found: Sequence[Span], spans: list[Span]) -> list[int]:
    """Put a thread's ranges behind `spans`, each with its parent; their numbers there."""
    numbers: list[int] = []
    above: list[int] = []
    for span in sorted(found, key=lambda one: (one.begin, -one.end)):
        while above and spans[above[-1]].end <= span.begin:
            above.pop()
        number = len(spans)
        spans.append(dataclasses.replace(span, parent=above[-1] if above else None))
        numbers.append(number)
        above.append(number)
    return numbers


def read_timelines(
    path: pathlib.Path, rules: Rules, progress: Progress | None = None
) -> list[Timeline]:
    """Every GPU of a trace file, in order of ranks.

    A file that SGLang merged of several ranks gives one for each. Raises what `TraceFile` raises,
    and ConfigError where an event of the GPU has no time, or there is none at all.
    """
    trace = TraceFile(path)
    processes: dict[str, _Process] = {}
    for event in trace.events(progress):
        category = str(event.get("cat", "")).lower()
        if event.get("ph") != "X" or category not in _TAKEN:
            continue
        # SGLang's merger writes "[TP00] 0" where the process's own trace has 0.
        merged = _MERGED.match(str(event.get("pid")))
        label, pid = (merged[1], merged[2]) if merged else ("", str(event.get("pid")))
        process = processes.get(label)
        if process is None:
            process = processes[label] = _Process(rules)
        try:
            process.take(category, event, pid)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            told = f"no {error}" if isinstance(error, KeyError) else str(error)
            name = _printable(str(event.get("name")))[:60]
            raise trace.fault(f"has a bad event '{name}' ({told})") from None
    found: list[Timeline] = []
    for label, process in sorted(processes.items()):
        process.close()
        for device, gpu in sorted(process.gpus.items(), key=lambda one: (len(one[0]), one[0])):
            gpu.rank = label or _rank(path, trace.header)
            if len(process.gpus) > 1:
                gpu.rank += f" GPU {device}"
            found.append(gpu)
    if not found:
        raise ConfigError(
            f"{path} has no activity of a GPU",
            remedy="profile with the activity GPU (SGLang's default) on a host that has one",
        )
    return found


@functools.cache
def _printable(name: str) -> str:
    """A name as a terminal may be given it: what moves a cursor, or is no character, is a `?`."""
    return "".join(char if char.isprintable() else "?" for char in name)


def _meaning(name: str, rules: Rules) -> tuple[str | None, str | None, str | None] | None:
    """(stage, starts, label) of a host range; None where it says nothing."""
    if _PROFILER_STEP.match(name):
        return None, "profiler", None
    if rules.tells_host_work(name):
        return None, None, name
    stage = rules.stage(name)
    return None if stage is None else (stage.name, stage.starts, None)


def _rank(path: pathlib.Path, header: Mapping[str, Any]) -> str:
    """From the file's name as SGLang gives it, else from what the trace says, else the name."""
    ranks = _RANKS.findall(path.name)
    if ranks:
        return "-".join(rank.replace("-", "") for rank in ranks)
    told = header.get("distributedInfo")
    if isinstance(told, dict) and "rank" in told:
        return _printable(f"rank {told['rank']}")
    return path.name.partition(".")[0]
