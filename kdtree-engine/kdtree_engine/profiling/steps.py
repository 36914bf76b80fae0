"""Where the decode steps of a GPU's timeline begin and end.

A step lasts from the first kernel that a forward pass of the target model launched until the first
one of the next pass. So what comes after the pass is its own: acceptance, KV moves, the drafter's
work for the next tree, and idle time. The last pass has no next one and is left out, and so is what
comes before the first.

Passes are told apart by the best of these that a trace has:

    ranges    SGLang's `step[...]` ranges on the host; those of prefill end a step and are none
    profiler  torch.profiler's own `ProfilerStep#N`
    graphs    replays of CUDA graphs: the round of graphs that comes again and again is a step, be
              it one graph, the target's and a drafter's, or the pieces of a pass
    whole     none of them: the whole timeline is one step, and its figures are no step's

Gaps between kernels are not used: in eager mode those within a step are as long as those between.

Of a graph nothing but its kernels is known. Graphs of one model at several batch sizes have other
kernels by name, and hardly other numbers of each class: those that differ by less than a quarter
are one kind. A kind of which replays cut the trace into pieces that are alike, each with the same
kinds as often, may begin a step; of several the one whose like pieces have most of the time is
taken, and among those that have about as much the one that takes longest, which is the target's.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import statistics
from collections.abc import Sequence

from kdtree_engine.profiling.rules import Rules
from kdtree_engine.profiling.timeline import Timeline

__all__ = ["Steps", "find_steps"]


@dataclasses.dataclass(frozen=True)
class Steps:
    """(begin, end) of each decode step in order of time, in us. told_by: as in this module's list.

    left_out: passes that were no decode, such as prefill, and are left out.
    """

    told_by: str
    windows: tuple[tuple[float, float], ...]
    left_out: int = 0


_ALIKE = 0.25
"""Of the kernels of the larger of two graphs: that so many are of other classes makes two kinds."""
_AS_MUCH = 0.9
"""Of the time that the best kind's like pieces have."""


def find_steps(timeline: Timeline, rules: Rules) -> Steps:
    """The decode steps. With fewer than two passes of a kind the next kind is tried."""
    for told_by, starts in (("ranges", ("decode", "other")), ("profiler", ("profiler",))):
        found = _by_spans(timeline, told_by, starts)
        if found.windows:
            return found
    found = _by_graphs(timeline, rules)
    if found.windows:
        return found
    last = max(activity.end for activity in timeline)
    return Steps("whole", ((next(iter(timeline)).begin, last),))


def _by_spans(timeline: Timeline, told_by: str, starts: Sequence[str]) -> Steps:
    first: dict[int, float] = {}
    for activity in timeline:
        number = timeline.starter(timeline.launch(activity), starts)
        if number is not None:
            first.setdefault(number, activity.begin)
    begun = sorted((at, timeline.spans[number].starts == "other") for number, at in first.items())
    return _between(told_by, begun)


def _by_graphs(timeline: Timeline, rules: Rules) -> Steps:
    replays: dict[int, _Replay] = {}
    for activity in timeline:
        launch = timeline.launch(activity)
        if launch is None or not launch.graph:
            continue
        replay = replays.setdefault(activity.correlation, _Replay(activity.begin, activity.end))
        replay.end = max(replay.end, activity.end)
        replay.kernels[activity.name] += 1
    in_order = sorted(replays.values(), key=lambda one: one.begin)
    kinds = _kinds(in_order, rules)
    cuts = [_cut(in_order, kinds, kind) for kind in dict.fromkeys(kinds)]
    most = max((cut.alike for cut in cuts), default=0.0)
    if not most:
        return Steps("graphs", ())
    best = max((cut for cut in cuts if cut.alike >= _AS_MUCH * most), key=lambda cut: cut.median)
    return _between("graphs", [(begin, False) for begin in best.begins])


@dataclasses.dataclass
class _Replay:
    begin: float
    end: float
    kernels: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


@dataclasses.dataclass(frozen=True)
class _Cut:
    """A trace cut where replays of one kind begin. median: us of such a replay.

    alike: us of the pieces that have the kinds, as often, that most of the time's pieces have.
    """

    begins: tuple[float, ...]
    alike: float
    median: float


def _kinds(replays: Sequence[_Replay], rules: Rules) -> list[int]:
    """The kind of each replay, as a number."""
    classes: list[collections.Counter[str]] = []  # of each kind: kernels by class
    known: dict[frozenset[tuple[str, int]], int] = {}
    found: list[int] = []
    for replay in replays:
        # The same kernels as often: the same graph, whatever order its branches ran in.
        graph = frozenset(replay.kernels.items())
        if graph not in known:
            of_classes: collections.Counter[str] = collections.Counter()
            for name, count in graph:
                of_classes[rules.classify(name)] += count
            near = (n for n, other in enumerate(classes) if _alike(of_classes, other))
            known[graph] = next(near, len(classes))
            if known[graph] == len(classes):
                classes.append(of_classes)
        found.append(known[graph])
    return found


def _alike(one: collections.Counter[str], other: collections.Counter[str]) -> bool:
    apart = max((one - other).total(), (other - one).total())
    return apart < _ALIKE * max(one.total(), other.total())


def _cut(replays: Sequence[_Replay], kinds: Sequence[int], kind: int) -> _Cut:
    places = [number for number, one in enumerate(kinds) if one == kind]
    time: dict[frozenset[tuple[int, int]], float] = {}
    for place, after in itertools.pairwise(places):
        content = frozenset(collections.Counter(kinds[place:after]).items())
        took = replays[after].begin - replays[place].begin
        time[content] = time.get(content, 0.0) + took
    return _Cut(
        tuple(replays[place].begin for place in places),
        max(time.values(), default=0.0),
        statistics.median(replays[place].end - replays[place].begin for place in places),
    )


def _between(told_by: str, begun: Sequence[tuple[float, bool]]) -> Steps:
    """begun: when each pass began, and whether it is no decode."""
    windows = tuple(
        (begin, after) for (begin, other), (after, _) in itertools.pairwise(begun) if not other
    )
    return Steps(told_by, windows, sum(other for _, other in begun))
