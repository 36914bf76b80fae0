"""Implementations that report a fake time. Each computes a cumulative sum, or seems to.

The honest one takes SLOW_S. A cheat fools a plain stopwatch around it, which a test of its own
shows, and must not get past `time_operation`, whichever its method: either the result is refused,
or the figure is the true one.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from taped_graphs import use_taped_graphs

from kdtree_engine import timing
from kdtree_engine.timing import Method, Tensors, Timing, WrongResult, time_operation

SLOW_S = 0.02  # long beside a thread's start and a copy of the output, even on a busy machine
SLOW_US = SLOW_S * 1e6
METHODS: list[Method] = ["cold", "rotated"]
CALLS = 4  # of a rotated reading
pytestmark = pytest.mark.usefixtures("small_cpu_cache")

_sleep = time.sleep
_true_clock = time.perf_counter


def make_inputs(seed: int) -> Tensors:
    return (torch.randn(512, generator=torch.Generator().manual_seed(seed)),)


def check(inputs: Tensors, outputs: Tensors) -> str | None:
    return None if torch.equal(outputs[0], inputs[0].cumsum(0)) else "not the cumulative sum"


def honest(values: torch.Tensor) -> torch.Tensor:
    _sleep(SLOW_S)
    return values.cumsum(0)


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> Method:
    chosen: Method = request.param
    return chosen


def judged(operation: Callable[..., object], method: Method) -> Timing:
    return time_operation(
        make_inputs,
        operation,  # type: ignore[arg-type]
        device="cpu",
        check=check,
        method=method,
        repeats=7,
        warmup=2,
    )


def stopwatch_us(operation: Callable[..., object], calls: int = 7) -> float:
    """What a naive benchmark does: one input, a warm-up call, then calls back to back."""
    (values,) = make_inputs(0)
    operation(values)
    begin = time.perf_counter()
    for _ in range(calls):
        operation(values)
    return (time.perf_counter() - begin) / calls * 1e6


def test_the_honest_implementation_is_accepted_with_its_true_time(method: Method) -> None:
    found = judged(honest, method)
    assert SLOW_US <= found.median_us < 3 * SLOW_US
    assert (found.method, found.calls) == (method, 1 if method == "cold" else CALLS)
    assert stopwatch_us(honest) >= SLOW_US


class StopsTheClock:
    """Replaces every clock of the time module by one that stands still."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        for name in ("perf_counter", "monotonic", "time", "process_time"):
            self._patch.setattr(time, name, lambda: 0.0)
            self._patch.setattr(time, f"{name}_ns", lambda: 0)
        self._patch.setattr(time, "clock_gettime_ns", lambda clock: 0)
        return honest(values)


@pytest.fixture
def stops_the_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[StopsTheClock]:
    yield StopsTheClock(monkeypatch)
    monkeypatch.undo()


def test_a_stopped_clock_is_not_looked_at(stops_the_clock: StopsTheClock, method: Method) -> None:
    assert judged(stops_the_clock, method).median_us >= SLOW_US


def test_a_stopped_clock_fools_a_stopwatch(stops_the_clock: StopsTheClock) -> None:
    assert stopwatch_us(stops_the_clock) < SLOW_US


class FinishesLater:
    """Returns its output at once, and fills it in from a thread."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(values)

        def fill() -> None:
            output.copy_(honest(values))

        self.threads.append(threading.Thread(target=fill))
        self.threads[-1].start()
        return output

    def wait(self) -> None:
        for thread in self.threads:
            thread.join()


@pytest.fixture
def finishes_later() -> Iterator[FinishesLater]:
    cheat = FinishesLater()
    yield cheat
    cheat.wait()


def test_an_output_that_is_finished_later_is_refused(
    finishes_later: FinishesLater, method: Method
) -> None:
    """Rotated, the work of a call would overlap the next calls, and end past the last."""
    with pytest.raises(WrongResult, match="wrong when the clock stopped: not the cumulative sum"):
        judged(finishes_later, method)


def test_an_output_that_is_finished_later_looks_right_in_the_end(
    finishes_later: FinishesLater,
) -> None:
    inputs = make_inputs(0)
    output = finishes_later(*inputs)
    finishes_later.wait()
    assert check(inputs, (output,)) is None


class ReturnsAHandle:
    """Returns an object whose result somebody has to ask for."""

    def __call__(self, values: torch.Tensor) -> object:
        class Handle:
            elapsed = 1e-9

            def result(self) -> torch.Tensor:
                return honest(values)

        return Handle()


def test_a_handle_or_an_object_with_its_own_elapsed_is_refused(method: Method) -> None:
    with pytest.raises(WrongResult, match="returned a Handle where a tensor belongs"):
        judged(ReturnsAHandle(), method)


class LazyTensor(torch.Tensor):
    """A tensor that does the work when somebody looks at it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        plain = [arg.as_subclass(torch.Tensor) if isinstance(arg, cls) else arg for arg in args]
        if isinstance(args[0], cls):
            plain[0] = honest(plain[0])
        return func(*plain, **(kwargs or {}))


def test_a_tensor_that_computes_when_it_is_read_is_refused(method: Method) -> None:
    lazy = LazyTensor.__new__(LazyTensor, torch.ones(3))
    assert (lazy + 0).tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(WrongResult, match="returned a LazyTensor where a tensor belongs"):
        judged(lambda values: values.as_subclass(LazyTensor), method)


class ReturnsItsCache:
    """Computes once and returns that output ever after."""

    def __init__(self) -> None:
        self.output: torch.Tensor | None = None

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        if self.output is None:
            self.output = honest(values)
        return self.output


class ReturnsACopyOfItsCache(ReturnsItsCache):
    """So that nobody can spoil what it keeps."""

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return super().__call__(values).clone()


class KeepsOneOutputPerBuffer:
    """Knows each buffer again by its address: input sets that rotate do not show it up."""

    def __init__(self) -> None:
        self.outputs: dict[int, torch.Tensor] = {}

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        address = values.data_ptr()
        if address not in self.outputs:
            self.outputs[address] = honest(values)
        return self.outputs[address].clone()


class SkipsRepeatedShapes:
    """Works for the first input of each shape, and leaves the output as it is for the others."""

    def __init__(self) -> None:
        self.outputs: dict[torch.Size, torch.Tensor] = {}

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        if values.shape not in self.outputs:
            self.outputs[values.shape] = honest(values)
        return self.outputs[values.shape]


class MakesTheInputsFit:
    """Changes the inputs so that its cheap output is right for them."""

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return values.zero_().clone()


class SkipsEverySecondCall:
    """Works half of the time, and returns what it had in the other half."""

    def __init__(self) -> None:
        self.calls = 0
        self.output = torch.empty(0)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls % 2:
            self.output = honest(values)
        return self.output.clone()


class WorksForTheFirstReadings:
    """Honest while it is young: a check of the first readings alone would be content."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return honest(values) if self.calls <= 2 * CALLS else torch.empty_like(values)


class ComputesTheLastCallOfARow:
    """Returns at once, and works for the last of a row alone, which it counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.empty_like(values) if self.calls % CALLS else honest(values)


class PutsWorkOff:
    """Collects calls, and does the work of all of them in one go, with the last of a row.

    In the end every output is right, at the price of one: a check after the row would be content.
    """

    def __init__(self) -> None:
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        self.waiting.append((values, torch.empty_like(values)))
        output = self.waiting[-1][1]
        if len(self.waiting) == CALLS:
            _sleep(SLOW_S)
            for earlier, target in self.waiting:
                torch.cumsum(earlier, 0, out=target)
            self.waiting.clear()
        return output


Cheat = Callable[[], Callable[..., object]]
CACHES: list[Cheat] = [
    ReturnsItsCache,
    ReturnsACopyOfItsCache,
    KeepsOneOutputPerBuffer,
    SkipsRepeatedShapes,
]
LAZY: list[Cheat] = [
    SkipsEverySecondCall,
    WorksForTheFirstReadings,
    ComputesTheLastCallOfARow,
    PutsWorkOff,
]


@pytest.mark.parametrize("cheat", [*CACHES, *LAZY, MakesTheInputsFit])
def test_work_that_is_not_done_is_refused(cheat: Cheat, method: Method) -> None:
    with pytest.raises(WrongResult, match="wrong when the clock stopped: not the cumulative sum"):
        judged(cheat(), method)


def test_work_that_was_put_off_looks_right_after_the_row() -> None:
    cheat = PutsWorkOff()
    rows = [make_inputs(seed) for seed in range(CALLS)]
    outputs = [cheat(*inputs) for inputs in rows]
    assert all(
        check(inputs, (output,)) is None for inputs, output in zip(rows, outputs, strict=True)
    )


class KnowsEqualInputs:
    """Keeps an output for each content, and works for contents that it has not seen."""

    def __init__(self) -> None:
        self.outputs: dict[bytes, torch.Tensor] = {}

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        content = values.numpy().tobytes()
        if content not in self.outputs:
            self.outputs[content] = honest(values)
        return self.outputs[content].clone()


def test_no_two_calls_have_equal_inputs(method: Method) -> None:
    assert judged(KnowsEqualInputs(), method).median_us >= SLOW_US
    assert stopwatch_us(KnowsEqualInputs()) < SLOW_US


def test_a_call_that_is_skipped_now_and_then_is_found_by_lot() -> None:
    """It skips one call of 24 in each replay but the first and the last, which are all checked."""
    calls, readings = 24, 30 + 2
    done = 0

    def skipping(values: torch.Tensor) -> torch.Tensor:
        nonlocal done
        reading, call = divmod(done, calls)
        done += 1
        skips = call == 5 and 1 < reading < readings
        return torch.zeros_like(values) if skips else values.cumsum(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "_FEWEST_CALLS", calls)
        with pytest.raises(WrongResult, match="not the cumulative sum"):
            time_operation(
                make_inputs,
                skipping,
                device="cpu",
                check=check,
                method="rotated",
                repeats=30,
                warmup=2,
            )
    assert done > 2 * calls, "the first readings were right"


def test_a_lot_that_an_implementation_seeds_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which calls are checked differs between runs, whatever state the generators are set to."""
    drawn = set()
    for _ in range(8):
        random.seed(0)
        torch.manual_seed(0)
        drawn.add(tuple(timing._sample(range(24), 4)))
    assert len(drawn) > 1


@pytest.mark.parametrize("cheat", CACHES)
def test_work_that_is_not_done_fools_a_stopwatch(
    cheat: Cheat,
) -> None:
    assert stopwatch_us(cheat()) < SLOW_US


class FastWhileWarm:
    """Fast only right after the call before: it needs a moment to wake up."""

    def __init__(self) -> None:
        self.last = 0.0

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        warm = _true_clock() - self.last < 0.0005
        output = values.cumsum(0) if warm else honest(values)
        self.last = _true_clock()
        return output


def test_what_is_fast_only_while_it_is_warm_is_timed_cold() -> None:
    """And by the other method, which says so, a row of calls is paid for by its first one."""
    assert judged(FastWhileWarm(), "cold").median_us >= SLOW_US
    assert judged(FastWhileWarm(), "rotated").median_us >= SLOW_US / CALLS


def test_what_is_fast_only_while_it_is_warm_fools_a_stopwatch() -> None:
    """Best of some attempts: on a busy machine a call may be kept waiting and go cold."""
    assert min(stopwatch_us(FastWhileWarm()) for _ in range(20)) < SLOW_US / 2


class Batches:
    """Collects calls and does the work of all of them with the last: one product for many."""

    def __init__(self, together: int, honest_calls: int = 0) -> None:
        self.together, self.honest_calls = together, honest_calls
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        self.honest_calls -= 1
        if self.honest_calls >= 0:
            return values.cumsum(0)
        self.waiting.append((values, torch.empty_like(values)))
        output = self.waiting[-1][1]
        if len(self.waiting) == self.together:
            sums = torch.stack([earlier for earlier, _ in self.waiting]).cumsum(1)
            for (_, target), found in zip(self.waiting, sums, strict=True):
                target.copy_(found)
            self.waiting.clear()
        return output


class TestGraphs:
    """Where calls share a graph that nobody looks into while it is replayed.

    Every call here is captured: a cheat acts while it is captured, and its graph is what is timed.
    """

    @pytest.fixture(autouse=True)
    def taped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        use_taped_graphs(monkeypatch)

    @staticmethod
    def times(operation: Callable[..., object], method: Method = "rotated") -> Timing:
        return time_operation(
            make_inputs,
            operation,  # type: ignore[arg-type]
            device="cpu",
            check=check,
            method=method,
            repeats=5,
            warmup=2,
        )

    def test_the_honest_one_is_accepted(self, method: Method) -> None:
        found = self.times(lambda values: values.cumsum(0), method)
        assert (found.mode, found.calls) == ("graph", 1 if method == "cold" else CALLS)

    def test_the_time_of_a_replay_is_divided_by_its_calls(
        self, monkeypatch: pytest.MonkeyPatch, method: Method
    ) -> None:
        monkeypatch.setattr(timing, "_elapsed_ms", lambda begin, end: 0.096)
        found = self.times(lambda values: values.cumsum(0), method)
        assert found.median_us == pytest.approx(96 / found.calls)

    @pytest.mark.parametrize("together", [2, CALLS])
    def test_work_that_is_put_off_to_a_later_call_is_refused(self, together: int) -> None:
        """In the graph that is timed every output is right once all of it has run."""
        for _ in range(4):  # whichever of the two graphs is captured first
            with pytest.raises(WrongResult, match="not the cumulative sum"):
                self.times(Batches(together))

    def test_a_guess_at_the_timed_graph_is_wrong_half_of_the_time(self) -> None:
        """It is honest in the warm-up and the first capture, and puts work off in the second."""
        accepted = 0
        for _ in range(24):
            with contextlib.suppress(WrongResult):
                self.times(Batches(CALLS, honest_calls=2 * CALLS))
                accepted += 1
        assert 0 < accepted < 24

    def test_one_output_for_all_calls_is_refused(self) -> None:
        """Each call is right when it ends, and what the next one overwrites was no result."""
        shared = torch.empty(512)
        with pytest.raises(WrongResult, match="not the cumulative sum"):
            self.times(lambda values: torch.cumsum(values, 0, out=shared))

    @pytest.mark.parametrize("skipped", range(CALLS))
    def test_a_call_that_is_left_out_of_the_graph_is_refused(self, skipped: int) -> None:
        calls = 0

        def skipping(values: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return torch.empty_like(values) if calls % CALLS == skipped else values.cumsum(0)

        with pytest.raises(WrongResult, match="not the cumulative sum"):
            self.times(skipping)

    @pytest.mark.parametrize("cheat", [KeepsOneOutputPerBuffer, ReturnsItsCache])
    def test_what_was_computed_before_the_capture_is_refused(
        self, cheat: Cheat, method: Method
    ) -> None:
        with pytest.raises(WrongResult, match="not the cumulative sum"):
            self.times(cheat(), method)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
class TestGpu:
    """The same on a GPU, where work is queued and the host does not wait for it."""

    @staticmethod
    def draw(seed: int) -> Tensors:
        generator = torch.Generator("cuda").manual_seed(seed)
        return (torch.randn(2048, 2048, generator=generator, device="cuda"),)

    @staticmethod
    def check(inputs: Tensors, outputs: Tensors) -> str | None:
        return None if torch.equal(outputs[0], inputs[0] @ inputs[0]) else "not the square"

    @staticmethod
    def square(values: torch.Tensor) -> torch.Tensor:
        return values @ values

    WAYS = (("cold", True), ("cold", False), ("rotated", True))

    @pytest.mark.parametrize(("method", "capture"), WAYS)
    def test_the_honest_one_is_accepted(self, method: Method, capture: bool) -> None:
        found = time_operation(
            self.draw, self.square, device="cuda", check=self.check, method=method, capture=capture
        )
        assert found.median_us > 1

    def test_work_on_another_stream_is_missed_by_the_copy(self) -> None:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

        def elsewhere(values: torch.Tensor) -> torch.Tensor:
            output = torch.empty_like(values)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
                torch.matmul(values, values, out=output)
            return output

        with pytest.raises(WrongResult, match="not the square"):
            time_operation(self.draw, elsewhere, device="cuda", check=self.check, capture=False)

    def test_work_that_is_put_off_to_a_later_call_is_refused(self) -> None:
        """Two calls in one product: each second call of a graph does the work of both."""
        waiting: list[tuple[torch.Tensor, torch.Tensor]] = []

        def batched(values: torch.Tensor) -> torch.Tensor:
            waiting.append((values, torch.empty_like(values)))
            output = waiting[-1][1]
            if len(waiting) == 2:
                both = torch.stack([earlier for earlier, _ in waiting])
                for (_, target), square in zip(waiting, both @ both, strict=True):
                    target.copy_(square)
                waiting.clear()
            return output

        with pytest.raises(WrongResult, match="not the square"):
            time_operation(self.draw, batched, device="cuda", check=self.check, method="rotated")

    def test_one_output_for_all_calls_of_a_graph_is_refused(self) -> None:
        shared = torch.empty(2048, 2048, device="cuda")

        def sharing(values: torch.Tensor) -> torch.Tensor:
            return torch.matmul(values, values, out=shared)

        with pytest.raises(WrongResult, match="not the square"):
            time_operation(self.draw, sharing, device="cuda", check=self.check, method="rotated")

    @pytest.mark.parametrize(("method", "capture"), WAYS)
    def test_a_cached_output_is_refused(self, method: Method, capture: bool) -> None:
        kept: list[torch.Tensor] = []

        def cached(values: torch.Tensor) -> torch.Tensor:
            if not kept:
                kept.append(values @ values)
            return kept[0]

        with pytest.raises(WrongResult, match="not the square"):
            time_operation(
                self.draw, cached, device="cuda", check=self.check, method=method, capture=capture
            )

    def test_patched_events_are_not_looked_at(
        self, monkeypatch: pytest.MonkeyPatch, method: Method
    ) -> None:
        monkeypatch.setattr(torch.cuda.Event, "elapsed_time", lambda *events: 1e-6)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
        found = time_operation(
            self.draw, self.square, device="cuda", check=self.check, method=method
        )
        assert found.median_us > 1
