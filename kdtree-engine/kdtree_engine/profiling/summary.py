"""Time per decode step by class, for each GPU and as the mean of all.

Two kinds of time, both in microseconds per step:

    us         each instant of a step is shared out: among the kernels that run, in equal parts, or
               to one of the idle classes where none does. So the classes add up to the step.
    kernel_us  the plain sum of the kernels' durations. More than us where kernels overlap.

Idle time before a kernel is `host scheduling` as far as the kernel's launch had not begun, and
`idle gaps` from then on. Without a launch in the trace it is all `idle gaps`.

Of the ceilings, a trace tells bytes for copies and fills, and for collectives whose NCCL arguments
it has: gb_s is those bytes over the time of the kernels that they are of. No fraction of a
bandwidth is given, as the trace does not say over which link or to what memory; bytes and flops of
other kernels depend on shapes that it lacks in CUDA graphs.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from kdtree_engine.errors import ConfigError
from kdtree_engine.profiling.collectives import Collectives, waits
from kdtree_engine.profiling.host import HostWork
from kdtree_engine.profiling.intervals import segments
from kdtree_engine.profiling.rules import (
    COMMUNICATION,
    COPIES,
    HOST,
    IDLE,
    UNKNOWN,
    Rules,
    load_rules,
)
from kdtree_engine.profiling.steps import Steps, find_steps
from kdtree_engine.profiling.timeline import Activity, Launch, Timeline, read_timelines

__all__ = ["ClassTime", "HostTime", "KernelTime", "Profile", "RankProfile", "profile", "summarise"]


@dataclasses.dataclass(frozen=True)
class ClassTime:
    """A class per step. share: of the step. count: kernels.

    bytes: that copies and fills moved, or collectives sent; counted, counted_us: the kernels that
    these are of, and their durations.
    """

    name: str
    us: float
    kernel_us: float
    share: float
    count: float
    bytes: float
    counted: float
    counted_us: float
    lever: str

    @property
    def gb_s(self) -> float | None:
        """10^9 bytes a second while the counted kernels run; None where no bytes are known."""
        return self.bytes / self.counted_us / 1e3 if self.bytes and self.counted_us else None


@dataclasses.dataclass(frozen=True)
class KernelTime:
    """A kernel by name, per step: how often it ran, and the sum of its durations."""

    name: str
    kernel_class: str
    count: float
    kernel_us: float


@dataclasses.dataclass(frozen=True)
class HostTime:
    """What the host did while the GPU waited for a launch, per step: `host scheduling` in parts."""

    name: str
    us: float


@dataclasses.dataclass(frozen=True)
class RankProfile:
    """One GPU. file: its trace's. steps: how many, and told_by: how they were told apart (`steps`).

    step_us, median_us, longest_us: of a step. busy_us: of a step, while at least one kernel runs.
    left_out: passes that were no decode. outside_us: kernel time before, between and behind steps.
    wait_us: of a step, in collectives, until the last rank came; None where that cannot be told.
    """

    rank: str
    file: str
    steps: int
    told_by: str
    left_out: int
    step_us: float
    median_us: float
    longest_us: float
    busy_us: float
    outside_us: float
    classes: tuple[ClassTime, ...]
    kernels: tuple[KernelTime, ...]
    host: tuple[HostTime, ...]
    wait_us: float | None = None

    def class_of(self, name: str) -> ClassTime | None:
        return next((one for one in self.classes if one.name == name), None)


@dataclasses.dataclass(frozen=True)
class Profile:
    """All GPUs of some trace files. classes, kernels and host: means over them, largest first."""

    files: tuple[str, ...]
    ranks: tuple[RankProfile, ...]
    step_us: float
    classes: tuple[ClassTime, ...]
    kernels: tuple[KernelTime, ...]
    host: tuple[HostTime, ...]

    @property
    def unknown(self) -> tuple[KernelTime, ...]:
        """The kernels that no rule fits."""
        return tuple(one for one in self.kernels if one.kernel_class == UNKNOWN)

    @property
    def wait_us(self) -> float | None:
        """Mean of the ranks', in collectives; None where one of them is not told."""
        told = [rank.wait_us for rank in self.ranks if rank.wait_us is not None]
        return sum(told) / len(told) if len(told) == len(self.ranks) else None


def profile(
    paths: Sequence[pathlib.Path],
    rules: Rules | None = None,
    progress: Callable[[pathlib.Path, int, int], None] | None = None,
) -> Profile:
    """Read the files, one or more ranks each, and sum them up. Raises what `read_timelines` raises.

    progress: told of each file how many of its bytes have been read. Raises ConfigError where a
    file is named twice, or two are of one rank: a mean would count it twice.
    """
    rules = rules or load_rules()
    _refuse_twice(paths)
    ranks: list[RankProfile] = []
    collectives: list[Collectives] = []
    for path in paths:

        def told(done: int, size: int, path: pathlib.Path = path) -> None:
            if progress:
                progress(path, done, size)

        for one in read_timelines(path, rules, told):
            rank, met = _summed(one, rules)
            ranks.append(dataclasses.replace(rank, file=path.name))
            collectives.append(met)
    _refuse_same_rank(ranks)
    waited = waits([rank.rank for rank in ranks], collectives)
    ranks = [
        rank if us is None else dataclasses.replace(rank, wait_us=us / rank.steps)
        for rank, us in zip(ranks, waited, strict=True)
    ]
    count = len(ranks)
    step_us = sum(rank.step_us for rank in ranks) / count
    return Profile(
        tuple(path.name for path in paths),
        tuple(ranks),
        step_us,
        _mean_classes([rank.classes for rank in ranks], step_us, rules),
        _mean_kernels([rank.kernels for rank in ranks]),
        _mean_host([rank.host for rank in ranks]),
    )


def _refuse_twice(paths: Sequence[pathlib.Path]) -> None:
    seen: dict[tuple[int, int], pathlib.Path] = {}
    for path in paths:
        about = path.stat()
        other = seen.get((about.st_dev, about.st_ino))
        if other is not None:
            raise ConfigError(
                f"{path} is named twice" if other == path else f"{other} and {path} are one file",
                remedy="name each rank's trace once",
            )
        seen[about.st_dev, about.st_ino] = path


def _refuse_same_rank(ranks: Sequence[RankProfile]) -> None:
    seen: dict[str, RankProfile] = {}
    for rank in ranks:
        # SGLang's merger writes TP00 where a rank's own file has TP-0.
        other = seen.setdefault(re.sub(r"(?<=[A-Z])0+(?=\d)", "", rank.rank), rank)
        if other is not rank:
            raise ConfigError(
                f"{other.file} and {rank.file} are both of {rank.rank}",
                remedy="name the files of one recording, one for each rank; files that do not say "
                "their rank need different names",
            )


def summarise(timeline: Timeline, rules: Rules) -> RankProfile:
    """One GPU's decode steps by class."""
    return _summed(timeline, rules)[0]


def _summed(timeline: Timeline, rules: Rules) -> tuple[RankProfile, Collectives]:
    """One GPU's decode steps by class, and its collectives step by step."""
    steps = find_steps(timeline, rules)
    count = len(steps.windows)
    tally = _Tally(timeline, rules, steps)
    for segment in segments(tally.intervals()):
        tally.add(*segment)
    tally.end_idle(None)
    lengths = [end - begin for begin, end in steps.windows]
    step_us = sum(lengths) / count
    classes = [
        ClassTime(
            name,
            us / count,
            tally.kernel_us.get(name, 0.0) / count,
            us / count / step_us if step_us else 0.0,
            tally.count.get(name, 0) / count,
            tally.bytes.get(name, 0) / count,
            tally.counted.get(name, 0) / count,
            tally.counted_us.get(name, 0.0) / count,
            rules.levers[name],
        )
        for name, us in tally.us.items()
    ]
    kernels = [
        KernelTime(name, kind, times / count, us / count)
        for (name, kind), (times, us) in tally.kernels.items()
    ]
    busy = sum(us for name, us in tally.us.items() if name not in (IDLE, HOST))
    found = RankProfile(
        timeline.rank,
        "",
        count,
        steps.told_by,
        steps.left_out,
        step_us,
        statistics.median(lengths),
        max(lengths),
        busy / count,
        tally.outside_us,
        tuple(sorted(classes, key=lambda one: -one.us)),
        tuple(sorted(kernels, key=lambda one: -one.kernel_us)),
        _largest_host({name: us / count for name, us in tally.host.items()}),
    )
    return found, tally.collectives


class _Tally:
    """Sums over the steps, while the segments of a timeline go by in order of time."""

    def __init__(self, timeline: Timeline, rules: Rules, steps: Steps) -> None:
        self._timeline = timeline
        self._rules = rules
        self._windows = steps.windows
        self._window = 0  # the first that is not over
        self._idle: list[tuple[float, float]] = []
        self._classes: dict[tuple[str, str | None], str] = {}
        self.us: dict[str, float] = {}
        self.kernel_us: dict[str, float] = {}
        self.count: dict[str, int] = {}
        self.bytes: dict[str, int] = {}
        self.counted: dict[str, int] = {}
        self.counted_us: dict[str, float] = {}
        self.collectives: list[list[tuple[str, float]]] = [[] for _ in steps.windows]
        self.kernels: dict[tuple[str, str], tuple[int, float]] = {}
        self.host: dict[str, float] = {}
        self._host_work = HostWork(timeline.spans)
        self.outside_us = 0.0

    def intervals(self) -> Iterator[tuple[float, float, str, Launch | None]]:
        """Each activity with its class and launch; it is counted where it begins."""
        window = 0
        for activity in self._timeline:
            launch = self._timeline.launch(activity)
            kind = self._class(activity.name, self._timeline.stage(launch))
            while window < len(self._windows) and self._windows[window][1] <= activity.begin:
                window += 1
            if window < len(self._windows) and self._windows[window][0] <= activity.begin:
                self._count(activity, kind)
                if kind == COMMUNICATION:
                    took = activity.end - activity.begin
                    self.collectives[window].append((activity.name, took))
            else:
                self.outside_us += activity.end - activity.begin
            yield activity.begin, activity.end, kind, launch

    def add(
        self,
        begin: float,
        end: float,
        running: Mapping[str, int],
        begun: Sequence[Launch | None],
    ) -> None:
        """A segment. Windows begin and end where kernels begin, so none lies across an edge."""
        if not running:
            self._idle.append((begin, end))
            return
        if self._idle:
            # Of those that end the gap, the one launched first could have ended it first.
            self.end_idle(min((one.at for one in begun if one is not None), default=None))
        if self._inside(begin):
            share = (end - begin) / sum(running.values())
            for kind, count in running.items():
                self._spend(kind, count * share)

    def end_idle(self, launched: float | None) -> None:
        """The gap before what was launched then is over. Kernels of no length cut it in pieces."""
        for begin, end in self._idle:
            if self._inside(begin):
                host = 0.0 if launched is None else min(max(launched - begin, 0.0), end - begin)
                self._spend(HOST, host)
                for name, us in self._host_work.during(begin, begin + host):
                    self.host[name] = self.host.get(name, 0.0) + us
                self._spend(IDLE, end - begin - host)
        self._idle.clear()

    def _inside(self, at: float) -> bool:
        windows = self._windows
        while self._window < len(windows) and windows[self._window][1] <= at:
            self._window += 1
        return self._window < len(windows) and windows[self._window][0] <= at

    def _spend(self, kind: str, us: float) -> None:
        self.us[kind] = self.us.get(kind, 0.0) + us

    def _count(self, activity: Activity, kind: str) -> None:
        took = activity.end - activity.begin
        self.us.setdefault(kind, 0.0)
        self.kernel_us[kind] = self.kernel_us.get(kind, 0.0) + took
        self.count[kind] = self.count.get(kind, 0) + 1
        # A drafter's collectives have bytes too, and its other kernels have none.
        if activity.bytes and kind in (COPIES, COMMUNICATION):
            self.bytes[kind] = self.bytes.get(kind, 0) + activity.bytes
            self.counted[kind] = self.counted.get(kind, 0) + 1
            self.counted_us[kind] = self.counted_us.get(kind, 0.0) + took
        times, us = self.kernels.get((activity.name, kind), (0, 0.0))
        self.kernels[activity.name, kind] = times + 1, us + took

    def _class(self, name: str, stage: str | None) -> str:
        found = self._classes.get((name, stage))
        if found is None:
            found = self._classes[name, stage] = self._rules.classify(name, stage)
        return found


def _mean_classes(
    of_ranks: Sequence[Iterable[ClassTime]], step_us: float, rules: Rules
) -> tuple[ClassTime, ...]:
    found: dict[str, list[ClassTime]] = {}
    for classes in of_ranks:
        for one in classes:
            found.setdefault(one.name, []).append(one)
    count = len(of_ranks)
    means = [
        ClassTime(
            name,
            us := sum(one.us for one in same) / count,
            sum(one.kernel_us for one in same) / count,
            us / step_us if step_us else 0.0,
            sum(one.count for one in same) / count,
            sum(one.bytes for one in same) / count,
            sum(one.counted for one in same) / count,
            sum(one.counted_us for one in same) / count,
            rules.levers[name],
        )
        for name, same in found.items()
    ]
    return tuple(sorted(means, key=lambda one: -one.us))


def _mean_kernels(of_ranks: Sequence[Iterable[KernelTime]]) -> tuple[KernelTime, ...]:
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for kernels in of_ranks:
        for one in kernels:
            count, us = found.get((one.name, one.kernel_class), (0.0, 0.0))
            found[one.name, one.kernel_class] = count + one.count, us + one.kernel_us
    ranks = len(of_ranks)
    means = [
        KernelTime(name, kind, count / ranks, us / ranks)
        for (name, kind), (count, us) in found.items()
    ]
    return tuple(sorted(means, key=lambda one: -one.kernel_us))


def _mean_host(of_ranks: Sequence[Iterable[HostTime]]) -> tuple[HostTime, ...]:
    found: dict[str, float] = {}
    for parts in of_ranks:
        for one in parts:
            found[one.name] = found.get(one.name, 0.0) + one.us / len(of_ranks)
    return _largest_host(found)


def _largest_host(found: dict[str, float]) -> tuple[HostTime, ...]:
    parts = [HostTime(name, us) for name, us in found.items()]
    return tuple(sorted(parts, key=lambda one: -one.us))
