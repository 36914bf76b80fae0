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
    found = find_steps(timeline(trace, tmp_path), load_rules())
    assert found.told_by == "ranges"
    assert found.windows == ((20, 120), (520, 620))
    assert found.left_out == 1


def test_the_profilers_own_steps_are_second(tmp_path: pathlib.Path) -> None:
    trace = Trace()
    for number in range(3):
        at = 100.0 * number
        trace.span(f"ProfilerStep#{number}", at, at + 99)
        trace.kernel(GEMM, at + 7, 30, trace.launch(at + 1))
    found = find_steps(timeline(trace, tmp_path), load_rules())
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
    found = find_steps(timeline(replayed(4), tmp_path), load_rules())
    assert (found.told_by, found.windows) == ("graphs", ((20, 220), (220, 420), (420, 620)))


def graph(trace: Trace, at: float, *kernels: tuple[str, float]) -> float:
    """A replay of these kernels, one after the other from `at` on; when it has ended."""
    launch = trace.launch(at - 5, graph=True)
    for name, took in kernels:
        trace.kernel(name, at, took, launch)
        at += took
    return at


def test_a_step_is_a_step_whatever_the_batch_of_its_graph(tmp_path: pathlib.Path) -> None:
    """Graphs of batch 1 and 64: other products by name, ten times the time."""
    trace = Trace()
    for number in range(8):
        wide = number >= 4
        product = (GEMM.replace("64x8", "64x64"), 100.0) if wide else (GEMM, 10.0)
        graph(trace, 1000.0 * number, product, (VERIFY, 20), product, (NORM, 5))
    found = find_steps(timeline(trace, tmp_path), load_rules())
    assert found.told_by == "graphs"
    assert found.windows == tuple((1000.0 * n, 1000.0 * n + 1000) for n in range(7))


def test_a_pass_in_pieces_is_one_step(tmp_path: pathlib.Path) -> None:
    """A graph before the first attention, one between two, one behind the last; eager between."""
    trace = Trace()
    for number in range(4):
        at = graph(trace, 1000.0 * number, (NORM, 2), (GEMM, 5))
        for _ in range(5):
            trace.kernel(VERIFY, at, 20, trace.launch(at - 1))
            at = graph(trace, at + 20, (GEMM, 10), (NORM, 2), (GEMM, 20), (NORM, 2), (GEMM, 5))
        trace.kernel(VERIFY, at, 20, trace.launch(at - 1))
        graph(trace, at + 20, (GEMM, 10), (NORM, 2), (GEMM, 30))
    found = find_steps(timeline(trace, tmp_path), load_rules())
    assert {round(end - begin) for begin, end in found.windows} == {1000}
    assert len(found.windows) == 3


def test_a_drafter_that_takes_long_begins_no_step(tmp_path: pathlib.Path) -> None:
    """Of three layers where the target has four, two replays a step: more than half its time."""
    trace = Trace()
    for number in range(4):
        at = 1000.0 * number
        layer = [(GEMM, 20.0), (NORM, 5.0)]
        graph(trace, at, *layer * 3)
        graph(trace, at + 100, *layer * 3)
        graph(trace, at + 200, *[*layer, (VERIFY, 2.0)] * 4)
    found = find_steps(timeline(trace, tmp_path), load_rules())
    assert found.windows == tuple((1000.0 * n + 200, 1000.0 * n + 1200) for n in range(3))


def test_a_prefill_in_pieces_does_not_make_steps_of_its_pieces(tmp_path: pathlib.Path) -> None:
    """It lies within a step, the longest: that is remarked on, and the others are right."""
    trace = Trace()
    at = 0.0
    for number in range(8):
        graph(trace, at, *[(GEMM, 20.0), (VERIFY, 5.0), (NORM, 5.0)] * 4)
        if number == 3:
            for piece in range(30):
                graph(trace, at + 200 + 20 * piece, (GEMM, 10), (NORM, 2), (GEMM, 5))
            at += 600
        at += 200
    found = find_steps(timeline(trace, tmp_path), load_rules())
    assert sorted(end - begin for begin, end in found.windows) == [200] * 6 + [800]


def test_with_neither_the_whole_trace_is_one_step_and_says_so(tmp_path: pathlib.Path) -> None:
    trace = Trace()
    trace.kernel(GEMM, 5, 10, trace.launch(1))
    trace.kernel(GEMM, 25, 10)
    found = find_steps(timeline(trace, tmp_path), load_rules())
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
