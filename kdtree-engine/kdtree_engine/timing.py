"""Honest timing: a figure that a cheating or mistaken implementation cannot talk its way into.

`time_operation` trusts nothing that it times:

- Its clocks are bound when this module is imported; what an implementation says or patches about
  time is not looked at. Two clocks are read, and must agree.
- Every call, warm-up included, gets inputs with contents never seen before, in one of several sets
  of buffers, with the caches flushed: what was computed, kept or warmed up earlier is of no use.
- The output is copied at the moment the clock stops, in the order of the device's own queue, and
  the copy is checked: work that is still going on elsewhere shows as missing. It is checked against
  the inputs as they were drawn, whatever was done to the buffers.
- Every output is poisoned once it has been copied, so an output that is handed out again, or left
  unwritten, is wrong.
- A figure that moves the operation's bytes faster than the device can copy is refused.

On CUDA the operation is captured in a graph and replayed between events: nothing of it can happen
on the host, and the figure is the device's. On the CPU the call itself is timed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch

from kdtree_engine.errors import KdError

__all__ = [
    "ImplausibleTiming",
    "Tensors",
    "Timing",
    "WrongResult",
    "copy_bandwidth",
    "matmul_rate",
    "time_operation",
]

Tensors = tuple[torch.Tensor, ...]

# Bound here, once: replacing `time.perf_counter_ns` later changes nothing below.
_clock_ns = time.perf_counter_ns
_new_event: Callable[[], Any] = functools.partial(torch.cuda.Event, enable_timing=True)
_elapsed_ms: Callable[[Any, Any], float] = torch.cuda.Event.elapsed_time
_new_stream: Callable[[torch.device], Any] = torch.cuda.Stream
_synchronize = torch.cuda.synchronize
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
_CLOCKS_MAY_DIFFER = 0.1
_HOST_JITTER_US = 200.0  # between reading one clock and the other, on a busy machine
_LAUNCH_US = 20.0  # what a replay may cost the host


class ImplausibleTiming(KdError):
    """A figure that cannot be true: the clocks disagree, or memory is not that fast."""


class WrongResult(KdError):
    """A timed call did not compute what it should have when the clock stopped."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """What one call costs, with cold caches.

    median_us, p10_us, p90_us: microseconds over `repeats` calls.
    mode: "graph" and "events" are device time (CUDA events around a graph's replay, or around the
        call); "host" is the time of the call.
    bytes_per_second: `floor_bytes` over the median, None where no bytes were named.
    ceiling_fraction: that over the device's copy bandwidth.
    """

    median_us: float
    p10_us: float
    p90_us: float
    repeats: int
    sets: int
    mode: Literal["graph", "events", "host"]
    bytes_per_second: float | None
    ceiling_fraction: float | None


def time_operation(
    make_inputs: Callable[[int], Tensors],
    operation: Callable[..., torch.Tensor | Tensors],
    *,
    device: torch.device | str,
    check: Callable[[Tensors, Tensors], str | None],
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
    check: `check(inputs, outputs)` says what is wrong with the outputs, or None. Called once for
        every call, with the inputs as drawn and copies of the outputs.
    repeats, warmup: timed calls, and calls before them.
    sets: sets of buffers that the calls rotate over.
    seed: the first seed; every call uses another.
    capture: on CUDA, replay a captured graph; False times the call itself, launches included.
    floor_bytes: bytes that the operation cannot do without moving.
    copy_bandwidth: bytes per second that the device can copy; where it is None and bytes are named,
        `copy_bandwidth(device)` is measured here.

    Raises WrongResult, ImplausibleTiming; ValueError for arguments that make no measurement.
    """
    if repeats < 3 or warmup < 1 or sets < 2:
        raise ValueError("a measurement takes at least 3 repeats, 1 warm-up call and 2 input sets")
    if floor_bytes is not None and floor_bytes < 1:
        raise ValueError(f"floor_bytes must be positive, got {floor_bytes}")
    device = torch.device(device)
    with torch.no_grad(), _current(device):
        buffers = [_own(make_inputs(seed + number), device) for number in range(sets)]
        runner = _runner(operation, buffers, device, capture)
        flush = _Flush(device)
        calls = []
        for number in range(warmup + repeats):
            drawn = make_inputs(seed + sets + number)
            slot = number % sets
            _refill(buffers[slot], drawn)
            flush()
            call = runner.call(slot)
            problem = check(drawn, call.copies)
            if problem is not None:
                raise WrongResult(f"the output was wrong when the clock stopped: {problem}")
            for output in call.outputs:
                _poison(output)
            if number >= warmup:
                calls.append(call)
        runner.compare_clocks(calls)
        if floor_bytes is not None and copy_bandwidth is None:
            copy_bandwidth = _measure_copy(device)
    return _timing([call.us for call in calls], sets, runner.mode, floor_bytes, copy_bandwidth)


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
class _Call:
    """One call: its time, its own output tensors, and copies made as the clock stopped."""

    us: float
    outputs: Tensors
    copies: Tensors
    second_us: float = 0.0
    """The same time by another clock, on the CPU."""


_Mode = Literal["graph", "events", "host"]
_Operation = Callable[..., "torch.Tensor | Tensors"]


class _Runner(Protocol):
    """Calls the operation on one set of buffers and says how long that took."""

    @property
    def mode(self) -> _Mode: ...

    def call(self, slot: int) -> _Call: ...

    def compare_clocks(self, calls: Sequence[_Call]) -> None:
        """Raises ImplausibleTiming where another clock contradicts these calls."""
        ...


def _runner(
    operation: _Operation, buffers: Sequence[Tensors], device: torch.device, capture: bool
) -> _Runner:
    if device.type == "cpu":
        return _Host(operation, buffers)
    return _Graph(operation, buffers, device) if capture else _Events(operation, buffers, device)


class _Host:
    """Times calls on the CPU, by two clocks."""

    mode: _Mode = "host"

    def __init__(self, operation: _Operation, buffers: Sequence[Tensors]) -> None:
        self._operation, self._buffers = operation, buffers

    def call(self, slot: int) -> _Call:
        inputs = self._buffers[slot]
        second_begin = _second_clock_ns()
        begin = _clock_ns()
        result = self._operation(*inputs)
        end = _clock_ns()
        second_end = _second_clock_ns()
        outputs = _tensors(result, "cpu")
        copies = tuple(output.clone() for output in outputs)
        return _Call((end - begin) / 1e3, outputs, copies, (second_end - second_begin) / 1e3)

    def compare_clocks(self, calls: Sequence[_Call]) -> None:
        first = statistics.median(call.us for call in calls)
        second = statistics.median(call.second_us for call in calls)
        if abs(first - second) > _CLOCKS_MAY_DIFFER * second + _HOST_JITTER_US:
            raise ImplausibleTiming(
                f"two clocks disagree: one says {first:.1f} us a call, the other {second:.1f} us"
            )


class _Events:
    """Times calls on a CUDA device, by events on the current stream."""

    mode: _Mode = "events"

    def __init__(
        self, operation: _Operation, buffers: Sequence[Tensors], device: torch.device
    ) -> None:
        self._operation, self._buffers, self._device = operation, buffers, device

    def launch(self, slot: int) -> torch.Tensor | Tensors:
        return self._operation(*self._buffers[slot])

    def call(self, slot: int) -> _Call:
        begin, end = _new_event(), _new_event()
        # The flush that is still running keeps the device busy while the host queues all of this,
        # so the host's own pace does not show between the events.
        begin.record()
        result = self.launch(slot)
        end.record()
        # Queued before anything waits: what another stream has not finished by now is missed.
        outputs = _tensors(result, "cuda")
        copies = tuple(output.clone() for output in outputs)
        _synchronize(self._device)
        return _Call(_elapsed_ms(begin, end) * 1e3, outputs, copies)

    def compare_clocks(self, calls: Sequence[_Call]) -> None:
        pass  # a call's launches cost the host time that is not the device's: nothing to compare


class _Graph(_Events):
    """The same, around replays of one CUDA graph per set of buffers."""

    mode: _Mode = "graph"

    def __init__(
        self, operation: _Operation, buffers: Sequence[Tensors], device: torch.device
    ) -> None:
        super().__init__(operation, buffers, device)
        # Compilation, autotuning and first allocations come before the capture, on a side stream.
        side = _new_stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for inputs in buffers:
                operation(*inputs)
        torch.cuda.current_stream(device).wait_stream(side)
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._outputs: list[torch.Tensor | Tensors] = []
        for inputs in buffers:
            graph = torch.cuda.CUDAGraph()
            with warnings.catch_warnings():
                # An operation that does nothing is told by its output, which stays poisoned.
                warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
                with torch.cuda.graph(graph):
                    outputs = operation(*inputs)
            self._graphs.append(graph)
            self._outputs.append(outputs)
            # Nothing has run yet: what is not written by a replay stays poisoned.
            for output in _tensors(outputs, "cuda"):
                _poison(output)

    def launch(self, slot: int) -> torch.Tensor | Tensors:
        self._graphs[slot].replay()
        return self._outputs[slot]

    def compare_clocks(self, calls: Sequence[_Call]) -> None:
        """Replay back to back by the host's clock: caches are warm, so it may only be faster."""
        median_us = statistics.median(call.us for call in calls)
        count = max(16, len(self._graphs))
        _synchronize(self._device)
        begin = _clock_ns()
        for number in range(count):
            self._graphs[number % len(self._graphs)].replay()
        _synchronize(self._device)
        wall_us = (_clock_ns() - begin) / 1e3 / count
        if wall_us > (1 + _CLOCKS_MAY_DIFFER) * median_us + _LAUNCH_US:
            raise ImplausibleTiming(
                f"two clocks disagree: events say {median_us:.1f} us a call, "
                f"the host's clock says {wall_us:.1f} us"
            )


class _Flush:
    """Drives everything else out of the caches."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda":
            cache = torch.cuda.get_device_properties(device).L2_cache_size
        else:
            names = getattr(os, "sysconf_names", {})
            cache = os.sysconf("SC_LEVEL3_CACHE_SIZE") if "SC_LEVEL3_CACHE_SIZE" in names else 0
        size = max(_SMALLEST_FLUSH, 2 * cache)
        self._written = torch.empty(size // 4, dtype=torch.float32, device=device)
        self._read = torch.ones_like(self._written)

    def __call__(self) -> None:
        self._written.fill_(1.0)
        # A read comes last, as lines that were only written would be written back to memory
        # during the call that is timed, and at its expense. Reading 16 MiB on an H200 took 9.1 us
        # unflushed, 12.8 us after this, and 14.4 us after the write alone.
        self._read.sum()


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
        bytes_per_second=rate,
        ceiling_fraction=None if rate is None or ceiling is None else rate / ceiling,
    )
