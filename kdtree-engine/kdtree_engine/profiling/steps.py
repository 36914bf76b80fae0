"""Where the decode steps of a GPU's timeline begin and end.

A step lasts from the first kernel that a forward pass of the target model launched until the first
one of the next pass. So what comes after the pass is its own: acceptance, KV moves, the drafter's
work for the next tree, and idle time. The last pass has no next one and is left out, and so is what
comes before the first.

Passes are told apart by the best of these that a trace has:

    ranges    SGLang's `step[...]` ranges on the host; those of prefill end a step and are none
    profiler  torch.profiler's own `ProfilerStep#N`
    graphs    replays of CUDA graphs that take at least half as long as the longest, by medians:
              the target's; shorter ones are taken for the drafter's
    whole     none of them: the whole timeline is one step, and its figures are no step's

Gaps between kernels are not used: in eager mode those within a step are as long as those between.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence

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


def find_steps(timeline: Timeline) -> Steps:
    """The decode steps. With fewer than two passes of a kind the next kind is tried."""
    for told_by, starts in (("ranges", ("decode", "other")), ("profiler", ("profiler",))):
        found = _by_spans(timeline, told_by, starts)
        if found.windows:
            return found
    found = _by_graphs(timeline)
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


def _by_graphs(timeline: Timeline) -> Steps:
    replays: dict[int, _Replay] = {}
    for activity in timeline:
        launch = timeline.launch(activity)
        if launch is None or not launch.graph:
            continue
        replay = replays.setdefault(activity.correlation, _Replay(activity.begin, activity.end))
        replay.end = max(replay.end, activity.end)
        replay.kernels[activity.name] = replay.kernels.get(activity.name, 0) + 1
    # The same kernels as often: the same graph, whatever order its branches ran in.
    alike: dict[frozenset[tuple[str, int]], list[_Replay]] = {}
    for replay in replays.values():
        alike.setdefault(frozenset(replay.kernels.items()), []).append(replay)
    medians = [(statistics.median(r.end - r.begin for r in same), same) for same in alike.values()]
    longest = max((median for median, _ in medians), default=0.0)
    begun = [(r.begin, False) for median, same in medians if 2 * median >= longest for r in same]
    return _between("graphs", sorted(begun))


@dataclasses.dataclass
class _Replay:
    begin: float
    end: float
    kernels: dict[str, int] = dataclasses.field(default_factory=dict)


def _between(told_by: str, begun: Sequence[tuple[float, bool]]) -> Steps:
    """begun: when each pass began, and whether it is no decode."""
    windows = tuple(
        (begin, after) for (begin, other), (after, _) in itertools.pairwise(begun) if not other
    )
    return Steps(told_by, windows, sum(other for _, other in begun))
