"""How decode steps are told apart, by what a trace has."""

from __future__ import annotations

import pathlib

from traces import GEMM, MERGE, NORM, VERIFY, Trace

from kdtree_engine.profiling.rules import load_rules
from kdtree_engine.profiling.steps import find_steps
from kdtree_engine.profiling.summary import profile
from kdtree_engine.profiling.timeline import Timeline, read_timelines


def timeline(trace: Trace, folder: pathlib.Path) -> Timeline:
    (found,) = read_timelines(trace.write(folder / "trace.json"), load_rules())
    return found


def test_a_range_of_prefill_ends_a_step_and_is_none(tmp_path: pathlib.Path) -> None:
    trace = Trace()
    for at, mode in ((0, "VERIFY"), (100, "EXTEND"), (500, "VERIFY"), (600, "VERIFY")):
        trace.span(f"step[{mode} bs=1]", at, at + 50)
        trace.kernel(GEMM, at + 20, 30, trace.launch(at + 10))
        trace.span("step[DRAFT bs=1]", at + 60, at + 80)  # a step of the drafter begins none
        trace.kernel(GEMM, at + 70, 10, trace.launch(at + 65))
    found = find_steps(timeline(trace, tmp_path))
    assert found.told_by == "ranges"
    assert found.windows == ((20, 120), (520, 620))
    assert found.left_out == 1


def test_the_profilers_own_steps_are_second(tmp_path: pathlib.Path) -> None:
    trace = Trace()
    for number in range(3):
        at = 100.0 * number
        trace.span(f"ProfilerStep#{number}", at, at + 99)
        trace.kernel(GEMM, at + 7, 30, trace.launch(at + 1))
    found = find_steps(timeline(trace, tmp_path))
    assert (found.told_by, found.windows) == ("profiler", ((7, 107), (107, 207)))


def replayed(rounds: int) -> Trace:
    """Each round replays a drafter's graph of 10 us and a target's of 100 us.

    The target's has three streams, whose order differs from round to round.
    """
    trace = Trace()
    for number in range(rounds):
        at = 200.0 * number
        draft = trace.launch(at - 20, graph=True)
        trace.kernel(GEMM, at, 10, draft)
        target = trace.launch(at, graph=True)
        trace.kernel(VERIFY, at + 20, 100, target)
        first, second = (NORM, MERGE) if number % 2 else (MERGE, NORM)
        trace.kernel(first, at + 30, 5, target, stream=8)
        trace.kernel(second, at + 35, 5, target, stream=9)
    return trace


def test_without_ranges_the_longest_graph_is_the_targets(tmp_path: pathlib.Path) -> None:
    found = find_steps(timeline(replayed(4), tmp_path))
    assert (found.told_by, found.windows) == ("graphs", ((20, 220), (220, 420), (420, 620)))


def test_with_neither_the_whole_trace_is_one_step_and_says_so(tmp_path: pathlib.Path) -> None:
    trace = Trace()
    trace.kernel(GEMM, 5, 10, trace.launch(1))
    trace.kernel(GEMM, 25, 10)
    found = find_steps(timeline(trace, tmp_path))
    assert (found.told_by, found.windows) == ("whole", ((5, 35),))


def test_the_stage_is_the_innermost_range_around_the_launch_not_the_kernel(
    tmp_path: pathlib.Path,
) -> None:
    """The target's and the drafter's GEMMs have one name: the range on the host tells."""
    trace = Trace()
    for at in (0.0, 1000.0):
        trace.span("step[VERIFY bs=1]", at, at + 10)
        trace.kernel(GEMM, at + 100, 50, trace.launch(at + 5))
        trace.span("draft", at + 10, at + 90)
        trace.span("step[DRAFT bs=1]", at + 20, at + 30)
        trace.span("elsewhere", at + 22, at + 28)  # means nothing, and hides nothing
        trace.kernel(GEMM, at + 150, 10, trace.launch(at + 25))
        trace.kernel(NORM, at + 160, 10, trace.launch(at + 80))
        trace.kernel(NORM, at + 170, 10, trace.launch(at + 85, thread=2))
    found = profile([trace.write(tmp_path / "trace.json")])
    kernels = {(one.name, one.kernel_class): one.kernel_us for one in found.kernels}
    assert kernels == {
        (GEMM, "dense GEMM"): 50,
        (GEMM, "draft model"): 10,
        (NORM, "draft model"): 10,
        (NORM, "norm and elementwise"): 10,
    }
