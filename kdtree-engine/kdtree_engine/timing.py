"""Honest timing: a figure that a cheating or mistaken implementation cannot talk its way into.

`time_operation` has two methods, and a figure says by which it was taken:

- `cold` times one call after a flush of the caches and after the many other kernels that draw and
  check its data. What an operation costs to fetch, its code included, is in the figure: it is near
  to a call between the other kernels of a service's step.
- `rotated` times several calls in a row, each on inputs of its own, and divides: code is warm,
  data are not. This is how figures of kernels are usually given.

It trusts nothing that it times:

- Its clocks are bound when this module is imported; what an implementation says or patches about
  time is not looked at. Two clocks are read, and must agree.
- Every call, warm-up included, gets inputs with contents never seen before, in one of several sets
  of buffers, with the caches flushed since those were written: what was computed, kept or warmed
  up earlier is of no use.
- The output is copied at the moment the clock stops, in the order of the device's own queue, and
  the copy is checked: work that is still going on elsewhere shows as missing. It is checked against
  the inputs as they were drawn, whatever was done to the buffers.
- Every output is poisoned once it has been copied, so an output that is handed out again, or left
  unwritten, is wrong.
- Where several calls share a graph, each must have done its own work before the next begins. On
  the CPU each output is copied before the next call. In the timed graph such copies would cost
  time, so a second graph has them, and its outputs are checked; which of the two is captured first
  is drawn anew each time. An operation that puts work off to a later call, to do it in one go, is
  wrong there, unless it guesses which of the two is which.
- A figure that moves the operation's bytes faster than the device can copy is refused.

On CUDA the operation is captured in a graph and replayed between events: nothing of it can happen
on the host, and the figure is the device's. On the CPU the calls themselves are timed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import random
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch

from kdtree_engine.errors import KdError

__all__ = [
    "ImplausibleTiming",
    "Method",
    "Tensors",
    "Timing",
    "WrongResult",
    "copy_bandwidth",
    "matmul_rate",
    "time_operation",
]

Tensors = tuple[torch.Tensor, ...]
Method = Literal["cold", "rotated"]

# Bound here, once: replacing `time.perf_counter_ns` later changes nothing below.
_clock_ns = time.perf_counter_ns
_new_event: Callable[[], Any] = functools.partial(torch.cuda.Event, enable_timing=True)
_elapsed_ms: Callable[[Any, Any], float] = torch.cuda.Event.elapsed_time
_new_stream: Callable[[torch.device], Any] = torch.cuda.Stream
_synchronize = torch.cuda.synchronize
# No seed that an implementation could set or know decides what is looked at.
_sample = random.SystemRandom().sample
# On Linux perf_counter and monotonic are one clock; the raw one is another, which no NTP adjusts.
if hasattr(time, "CLOCK_MONOTONIC_RAW"):
    _read_clock_ns, _RAW = time.clock_gettime_ns, time.CLOCK_MONOTONIC_RAW

    def _second_clock_ns() -> int:
        return _read_clock_ns(_RAW)

else:
    _second_clock_ns = time.monotonic_ns

_READ_OVER_COPY = 1.15
"""A pure read may beat the bandwidth of a copy, which turns the memory bus around: by 4% on an H200
(4.46 against 4.28 TB/s). Above this factor no honest operation goes."""

_SMALLEST_FLUSH = 32 << 20  # bytes
_FLUSH_FILLS = 10
"""On CUDA. One is over in 35 us on an H200, sooner than the host has queued a graph's replay, and
what is missing then stands between the events: calls of 22 us read 46 that way."""
_ROTATED_CACHES = 3
"""The inputs of one rotated replay exceed the last-level cache this many times, if calls allow."""
_FEWEST_CALLS, _MOST_CALLS = 4, 24
_CHECKED_CALLS = 4
"""Of a rotated replay; of the first and the last, all are checked. One call of 24 that is skipped
in each of 30 replays gets past the other 28 with a probability of (20/24)^28 = 0.6%, were it right
in those two."""
_CLOCKS_MAY_DIFFER = 0.1
_HOST_JITTER_US = 200.0  # between reading one clock and the other, on a busy machine
_LAUNCH_US, _CALL_US = 20.0, 2.0  # what a replay, and each call in it, may cost the host


class ImplausibleTiming(KdError):
    """A figure that cannot be true: the clocks disagree, or memory is not that fast."""


class WrongResult(KdError):
    """A timed call did not compute what it should have when the clock stopped."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """What one call costs.

    median_us, p10_us, p90_us: microseconds of a call, over `repeats` readings of the clock.
    sets: sets of buffers that the calls went over.
    mode: "graph" and "events" are device time (CUDA events around a graph's replay, or around the
        call); "host" is the time of the call.
    method: "cold", one call a reading, or "rotated".
    calls: calls of one reading, which its time was divided by.
    bytes_per_second: `floor_bytes` over the median, None where no bytes were named.
    ceiling_fraction: that over the device's copy bandwidth.
    """

    median_us: float
    p10_us: float
    p90_us: float
    repeats: int
    sets: int
    mode: Literal["graph", "events", "host"]
    method: Method
    calls: int
    bytes_per_second: float | None
    ceiling_fraction: float | None


def time_operation(
    make_inputs: Callable[[int], Tensors],
    operation: Callable[..., torch.Tensor | Tensors],
    *,
    device: torch.device | str,
    check: Callable[[Tensors, Tensors], str | None],
    method: Method = "cold",
    repeats: int = 50,
    warmup: int = 5,
    sets: int = 3,
    seed: int = 0,
    capture: bool = True,
    floor_bytes: int | None = None,
    copy_bandwidth: float | None = None,
) -> Timing:
    """Time `operation(*inputs)`, which returns a tensor or a tuple of tensors.

    make_inputs: `make_inputs(seed)` draws the inputs on `device`: tensors of the same shapes and
        dtypes for every seed. A call gets them in buffers that it may write to (an output passed
        in, a workspace); what it computes has to be among what it returns.
    check: `check(inputs, outputs)` says what is wrong with the outputs, or None, from the inputs
        as drawn and copies of the outputs. Cold, it is called for every call. Rotated, for every
        call of the first and the last replay and of one that is not timed, and for four of each
        other one, drawn by lot once it has run.
    method: "cold" reads the clock around one call. "rotated" reads it around as many calls, each
        on inputs of its own, as it takes for the inputs to exceed the last-level cache three times;
        at least 4 and at most 24. The caches are flushed before both.
    repeats, warmup: timed readings, and readings before them.
    sets: sets of buffers that cold calls go over; a rotated reading has one for each of its calls.
    seed: the first seed; every call uses another: at most 24 * (repeats + warmup + 2) in a row.
    capture: on CUDA, replay a captured graph; False times the call itself, launches included.
    floor_bytes: bytes that the operation cannot do without moving.
    copy_bandwidth: bytes per second that the device can copy; where it is None and bytes are named,
        `copy_bandwidth(device)` is measured here.

    Raises WrongResult, ImplausibleTiming; ValueError for arguments that make no measurement.
    """
    if repeats < 3 or warmup < 1 or sets < 2:
        raise ValueError("a measurement takes at least 3 repeats, 1 warm-up call and 2 input sets")
    if method not in ("cold", "rotated"):
        raise ValueError(f"the method must be cold or rotated, got {method!r}")
    if floor_bytes is not None and floor_bytes < 1:
        raise ValueError(f"floor_bytes must be positive, got {floor_bytes}")
    device = torch.device(device)
    if method == "rotated" and device.type == "cuda" and not capture:
        raise ValueError("rotated calls are timed in a graph: the method must be cold without one")
    seeds = itertools.count(seed)
    with torch.no_grad(), _current(device):
        first = make_inputs(next(seeds))
        if method == "rotated":
            sets = _calls(first, device)
        buffers = [_own(first, device)]
        buffers += [_own(make_inputs(next(seeds)), device) for _ in range(sets - 1)]
        groups: list[list[int]]  # the buffers of the calls between two readings of the clock
        groups = [list(range(sets))] if method == "rotated" else [[slot] for slot in range(sets)]
        runner = _runner(operation, buffers, groups, device, capture)
        flush = _Flush(device)

        def run(read: Callable[[int], _Reading], group: int, checked: int) -> _Reading:
            drawn = [make_inputs(next(seeds)) for _ in groups[group]]
            for slot, inputs in zip(groups[group], drawn, strict=True):
                _refill(buffers[slot], inputs)
            flush()
            reading = read(group)
            for call in _sample(range(len(drawn)), min(checked, len(drawn))):
                problem = check(drawn[call], reading.copies[call])
                if problem is not None:
                    raise WrongResult(f"the output was wrong when the clock stopped: {problem}")
            for outputs in reading.outputs:
                for output in outputs:
                    _poison(output)
            return reading

        if method == "rotated":
            run(runner.witness, 0, sets)
        readings = []
        for number in range(warmup + repeats):
            ends = number in (0, warmup + repeats - 1)
            checked = sets if ends else _CHECKED_CALLS
            reading = run(runner.read, number % len(groups), checked)
            if number >= warmup:
                readings.append(reading)
        runner.compare_clocks(readings)
        if floor_bytes is not None and copy_bandwidth is None:
            copy_bandwidth = _measure_copy(device)
    us = [reading.us for reading in readings]
    return _timing(us, sets, runner.mode, method, len(groups[0]), floor_bytes, copy_bandwidth)


def copy_bandwidth(device: torch.device | str, repeats: int = 20) -> float:
    """Bytes per second, read and written together, of the fastest of some large copies."""
    device = torch.device(device)
    size = 128 << 20
    if device.type == "cuda":
        size = min(1 << 30, torch.cuda.mem_get_info(device)[0] // 8)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / min(_seconds(lambda: target.copy_(source), device, repeats))


_measure_copy = copy_bandwidth  # `time_operation` has an argument of the same name


def matmul_rate(device: torch.device | str, repeats: int = 20) -> float:
    """Flop per second of the fastest of some square matrix products: bf16 on CUDA, else float32."""
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    side = 8192 if on_gpu else 1024
    dtype = torch.bfloat16 if on_gpu else torch.float32
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    durations = _seconds(lambda: torch.matmul(left, right, out=product), device, repeats)
    return 2.0 * side**3 / min(durations)


@dataclasses.dataclass(frozen=True)
class _Reading:
    """Calls between two readings of the clock.

    us: microseconds of one call, their mean. outputs: of each call, its own output tensors.
    copies: of each call, copies of them made as the clock stopped.
    second_us: the same time by another clock, on the CPU.
    """

    us: float
    outputs: Sequence[Tensors]
    copies: Sequence[Tensors]
    second_us: float = 0.0


_Mode = Literal["graph", "events", "host"]
_Operation = Callable[..., "torch.Tensor | Tensors"]


class _Runner(Protocol):
    """Calls the operation on groups of buffers and says how long a call took."""

    @property
    def mode(self) -> _Mode: ...

    def read(self, group: int) -> _Reading: ...

    def witness(self, group: int) -> _Reading:
        """The same calls, each output copied before the next call begins; the time is of no use."""
        ...

    def compare_clocks(self, readings: Sequence[_Reading]) -> None:
        """Raises ImplausibleTiming where another clock contradicts these readings."""
        ...


def _runner(
    operation: _Operation,
    buffers: Sequence[Tensors],
    groups: Sequence[Sequence[int]],
    device: torch.device,
    capture: bool,
) -> _Runner:
    calls = [[buffers[slot] for slot in group] for group in groups]
    if device.type == "cpu":
        return _Host(operation, calls)
    return _Graph(operation, calls, device) if capture else _Events(operation, calls, device)


class _Host:
    """Times calls on the CPU, by two clocks, which stand still between the calls of a group."""

    mode: _Mode = "host"

    def __init__(self, operation: _Operation, groups: Sequence[Sequence[Tensors]]) -> None:
        self._operation, self._groups = operation, groups

    def read(self, group: int) -> _Reading:
        first_ns = second_ns = 0
        outputs, copies = [], []
        for inputs in self._groups[group]:
            second_begin = _second_clock_ns()
            begin = _clock_ns()
            result = self._operation(*inputs)
            end = _clock_ns()
            second_end = _second_clock_ns()
            outputs.append(_tensors(result, "cpu"))
            copies.append(_copies(outputs[-1]))
            first_ns += end - begin
            second_ns += second_end - second_begin
        calls = len(outputs)
        return _Reading(first_ns / 1e3 / calls, outputs, copies, second_ns / 1e3 / calls)

    witness = read  # every output is copied before the next call here

    def compare_clocks(self, readings: Sequence[_Reading]) -> None:
        first = statistics.median(reading.us for reading in readings)
        second = statistics.median(reading.second_us for reading in readings)
        if abs(first - second) > _CLOCKS_MAY_DIFFER * second + _HOST_JITTER_US:
            raise ImplausibleTiming(
                f"two clocks disagree: one says {first:.1f} us a call, the other {second:.1f} us"
            )


class _Events:
    """Times calls on a CUDA device, by events on the current stream."""

    mode: _Mode = "events"

    def __init__(
        self, operation: _Operation, groups: Sequence[Sequence[Tensors]], device: torch.device
    ) -> None:
        self._operation, self._groups, self._device = operation, groups, device

    def launch(self, group: int) -> Sequence[torch.Tensor | Tensors]:
        return [self._operation(*inputs) for inputs in self._groups[group]]

    def read(self, group: int) -> _Reading:
        begin, end = _new_event(), _new_event()
        # The flush that is still running keeps the device busy while the host queues all of this,
        # so the host's own pace does not show between the events.
        begin.record()
        results = self.launch(group)
        end.record()
        # Queued before anything waits: what another stream has not finished by now is missed.
        outputs = [_tensors(result, "cuda") for result in results]
        copies = [_copies(one) for one in outputs]
        _synchronize(self._device)
        return _Reading(_elapsed_ms(begin, end) * 1e3 / len(outputs), outputs, copies)

    def witness(self, group: int) -> _Reading:
        return self.read(group)  # the groups here are of one call

    def compare_clocks(self, readings: Sequence[_Reading]) -> None:
        pass  # a call's launches cost the host time that is not the device's: nothing to compare


@dataclasses.dataclass(frozen=True)
class _Captured:
    """A graph of the calls of one group; copies: made in the graph itself, each after its call."""

    graph: torch.cuda.CUDAGraph
    outputs: Sequence[Tensors]
    copies: Sequence[Tensors]


class _Graph(_Events):
    """The same, around replays of one CUDA graph per group of buffers."""

    mode: _Mode = "graph"

    def __init__(
        self, operation: _Operation, groups: Sequence[Sequence[Tensors]], device: torch.device
    ) -> None:
        super().__init__(operation, groups, device)
        # Compilation, autotuning and first allocations come before the capture, on a side stream.
        side = _new_stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for group in groups:
                for inputs in group:
                    _tensors(operation(*inputs), "cuda")
        torch.cuda.current_stream(device).wait_stream(side)
        self._timed: list[_Captured] = []
        self._witnesses: list[_Captured] = []
        for group in groups:
            # A single call has nothing to put off: what is timed bears witness itself.
            kinds = _sample((False, True), 2) if len(group) > 1 else [False]
            for copying in kinds:
                captured = self._capture(group, copying)
                (self._witnesses if copying else self._timed).append(captured)

    def _capture(self, group: Sequence[Tensors], copying: bool) -> _Captured:
        graph = torch.cuda.CUDAGraph()
        outputs, copies = [], []
        with warnings.catch_warnings():
            # An operation that does nothing is told by its output, which stays poisoned.
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            with torch.cuda.graph(graph):
                for inputs in group:
                    outputs.append(_tensors(self._operation(*inputs), "cuda"))
                    if copying:
                        copies.append(_copies(outputs[-1]))
        # Nothing has run yet: what is not written by a replay stays poisoned.
        for tensors in (*outputs, *copies):
            for tensor in tensors:
                _poison(tensor)
        return _Captured(graph, outputs, copies)

    def launch(self, group: int) -> Sequence[torch.Tensor | Tensors]:
        self._timed[group].graph.replay()
        return self._timed[group].outputs

    def witness(self, group: int) -> _Reading:
        if not self._witnesses:
            return self.read(group)
        captured = self._witnesses[group]
        captured.graph.replay()
        _synchronize(self._device)
        return _Reading(0.0, captured.outputs, captured.copies)

    def compare_clocks(self, readings: Sequence[_Reading]) -> None:
        """Replay back to back by the host's clock: caches are warm, so it may only be faster."""
        median_us = statistics.median(reading.us for reading in readings)
        calls = len(readings[0].outputs)
        count = max(16, len(self._timed))
        _synchronize(self._device)
        begin = _clock_ns()
        for number in range(count):
            self._timed[number % len(self._timed)].graph.replay()
        _synchronize(self._device)
        wall_us = (_clock_ns() - begin) / 1e3 / count / calls
        if wall_us > (1 + _CLOCKS_MAY_DIFFER) * median_us + _LAUNCH_US / calls + _CALL_US:
            raise ImplausibleTiming(
                f"two clocks disagree: events say {median_us:.1f} us a call, "
                f"the host's clock says {wall_us:.1f} us"
            )


class _Flush:
    """Drives everything else out of the caches."""

    def __init__(self, device: torch.device) -> None:
        size = max(_SMALLEST_FLUSH, 2 * _cache_bytes(device))
        self._written = torch.empty(size // 4, dtype=torch.float32, device=device)
        self._read = torch.ones_like(self._written)
        self._fills = _FLUSH_FILLS if device.type == "cuda" else 1

    def __call__(self) -> None:
        for _ in range(self._fills):
            self._written.fill_(1.0)
        # A read comes last, as lines that were only written would be written back to memory
        # during the call that is timed, and at its expense. Reading 16 MiB on an H200 took 9.1 us
        # unflushed, 12.8 us after this, and 14.4 us after the write alone.
        self._read.sum()


def _cache_bytes(device: torch.device) -> int:
    """Size of the last cache before memory, 0 where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    names = getattr(os, "sysconf_names", {})
    return os.sysconf("SC_LEVEL3_CACHE_SIZE") if "SC_LEVEL3_CACHE_SIZE" in names else 0


def _calls(inputs: Tensors, device: torch.device) -> int:
    """How many calls a rotated reading takes.

    The flush has driven the inputs of all of them out; their number keeps out of the caches what
    the calls before one leave there, and spreads what the ends of a reading cost.
    """
    size = max(1, sum(tensor.numel() * tensor.element_size() for tensor in inputs))
    wanted = _ROTATED_CACHES * _cache_bytes(device) // size + 1
    return min(max(wanted, _FEWEST_CALLS), _MOST_CALLS)


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """`device` as the current one. Raises ValueError for a device that nothing here can time."""
    if device.type == "cuda":
        return torch.cuda.device(device)
    if device.type == "cpu":
        return contextlib.nullcontext()
    raise ValueError(f"operations are timed on cpu and cuda, not on {device.type}")


def _own(inputs: Tensors, device: torch.device) -> Tensors:
    for number, tensor in enumerate(inputs):
        if tensor.device.type != device.type:
            raise ValueError(f"input {number} is on {tensor.device}, not on {device}")
    return tuple(tensor.clone() for tensor in inputs)


def _refill(buffers: Tensors, drawn: Tensors) -> None:
    kept = [(buffer.shape, buffer.dtype) for buffer in buffers]
    if kept != [(tensor.shape, tensor.dtype) for tensor in drawn]:
        raise ValueError("make_inputs must give the same shapes and dtypes for every seed")
    for buffer, tensor in zip(buffers, drawn, strict=True):
        buffer.copy_(tensor)


def _tensors(result: object, device_type: str) -> Tensors:
    """What an operation returned, as plain tensors on the device, which hold values now.

    Not a subclass: it could put the work off until somebody looks.
    """
    outputs = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    if not outputs:
        raise WrongResult("the operation returned no output")
    for output in outputs:
        if type(output) is not torch.Tensor:
            raise WrongResult(
                f"the operation returned a {type(output).__name__} where a tensor belongs"
            )
        if output.device.type != device_type:
            raise WrongResult(
                f"the operation returned a tensor on {output.device}, not on {device_type}"
            )
    return outputs


def _copies(outputs: Tensors) -> Tensors:
    return tuple(output.clone() for output in outputs)


def _poison(output: torch.Tensor) -> None:
    """Values that no right answer is made of."""
    if output.dtype is torch.bool:
        output.logical_not_()
    elif output.is_floating_point() or output.is_complex():
        output.fill_(float("nan"))
    else:
        output.fill_(torch.iinfo(output.dtype).max)


def _seconds(run: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    durations = []
    with torch.no_grad(), _current(device):
        for number in range(3 + repeats):
            if device.type == "cuda":
                begin, end = _new_event(), _new_event()
                begin.record()
                run()
                end.record()
                _synchronize(device)
                seconds = _elapsed_ms(begin, end) / 1e3
            else:
                before = _clock_ns()
                run()
                seconds = (_clock_ns() - before) / 1e9
            if number >= 3:  # the first ones find cold clocks and fresh pages
                durations.append(seconds)
    return durations


def _timing(
    us: Sequence[float],
    sets: int,
    mode: _Mode,
    method: Method,
    calls: int,
    floor_bytes: int | None,
    ceiling: float | None,
) -> Timing:
    median_us = statistics.median(us)
    if median_us <= 0:
        raise ImplausibleTiming(f"a call took {median_us} us")
    rate = None if floor_bytes is None else floor_bytes / (median_us * 1e-6)
    if rate is not None and ceiling is not None and rate > _READ_OVER_COPY * ceiling:
        raise ImplausibleTiming(
            f"{median_us:.1f} us for {floor_bytes} bytes is {rate / 1e9:.1f} GB/s, "
            f"and this device copies at {ceiling / 1e9:.1f} GB/s"
        )
    deciles = statistics.quantiles(us, n=10, method="inclusive")
    return Timing(
        median_us=median_us,
        p10_us=deciles[0],
        p90_us=deciles[-1],
        repeats=len(us),
        sets=sets,
        mode=mode,
        method=method,
        calls=calls,
        bytes_per_second=rate,
        ceiling_fraction=None if rate is None or ceiling is None else rate / ceiling,
    )
