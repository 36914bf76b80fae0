"""Timing of honest operations, on the CPU and, where there is one, on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from kdtree_engine import timing
from kdtree_engine.timing import (
    ImplausibleTiming,
    Method,
    Tensors,
    WrongResult,
    copy_bandwidth,
    matmul_rate,
    time_operation,
)

SIDE = 64
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
        ],
    ),
]


METHODS: list[Method] = ["cold", "rotated"]


pytestmark = pytest.mark.usefixtures("small_cpu_cache")


def draw(device: str, side: int = SIDE) -> Callable[[int], Tensors]:
    def make_inputs(seed: int) -> Tensors:
        generator = torch.Generator(device).manual_seed(seed)
        return tuple(torch.randn(side, side, generator=generator, device=device) for _ in range(2))

    return make_inputs


def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left + right


def is_sum(inputs: Tensors, outputs: Tensors) -> str | None:
    left, right = inputs
    return None if torch.equal(outputs[0], left + right) else "not the sum"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("device", DEVICES)
def test_an_honest_operation_has_a_median_between_its_deciles(device: str, method: Method) -> None:
    found = time_operation(
        draw(device), add, device=device, check=is_sum, method=method, repeats=20
    )
    assert 0 < found.p10_us <= found.median_us <= found.p90_us
    assert (found.method, found.repeats) == (method, 20)
    if method == "cold":
        assert (found.calls, found.sets) == (1, 3)
    else:
        assert found.calls == found.sets >= 4
    assert found.mode == ("host" if device == "cpu" else "graph")
    assert found.bytes_per_second is None
    assert found.ceiling_fraction is None


@pytest.mark.parametrize("method", METHODS)
def test_a_sleep_takes_as_long_as_it_sleeps(method: Method) -> None:
    def slow(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return left + right

    found = time_operation(
        draw("cpu"), slow, device="cpu", check=is_sum, method=method, repeats=5, warmup=1
    )
    assert 10_000 <= found.median_us < 30_000


def test_every_call_is_checked_on_inputs_of_its_own() -> None:
    seen = []

    def remember(inputs: Tensors, outputs: Tensors) -> str | None:
        seen.append(inputs[0][0, 0].item())
        return is_sum(inputs, outputs)

    time_operation(draw("cpu"), add, device="cpu", check=remember, repeats=10, warmup=2, sets=2)
    assert len(seen) == len(set(seen)) == 12


def test_rotated_calls_have_inputs_of_their_own_and_the_ends_are_checked_whole() -> None:
    """8 calls a replay: witness, first and last are checked whole, 4 calls of the others."""
    called, seen = [], []

    def remembered(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        called.append((left.data_ptr(), left[0, 0].item()))
        return left + right

    def remember(inputs: Tensors, outputs: Tensors) -> str | None:
        seen.append(inputs[0][0, 0].item())
        return is_sum(inputs, outputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "_FEWEST_CALLS", 8)
        found = time_operation(
            draw("cpu"),
            remembered,
            device="cpu",
            check=remember,
            method="rotated",
            repeats=5,
            warmup=2,
        )
    assert found.calls == 8
    assert len(called) == 8 * (1 + 2 + 5)
    assert len({value for _, value in called}) == len(called)
    assert len({address for address, _ in called}) == 8
    assert len(seen) == len(set(seen)) == 8 * 3 + 4 * 5
    assert set(seen) <= {value for _, value in called}


@pytest.mark.parametrize(
    ("side", "cache", "calls"),
    [(64, 0, 4), (64, 1 << 30, 24), (64, 100 * 1024, 10), (1024, 1 << 20, 4)],
)
def test_rotated_inputs_exceed_the_cache_three_times_where_calls_allow(
    monkeypatch: pytest.MonkeyPatch, side: int, cache: int, calls: int
) -> None:
    monkeypatch.setattr(timing, "_cache_bytes", lambda device: cache)
    inputs = draw("cpu", side)(0)
    assert timing._calls(inputs, torch.device("cpu")) == calls
    size = 2 * 4 * side * side
    assert calls == 24 or calls * size > 3 * cache


def test_operations_may_write_into_a_buffer_that_they_are_given() -> None:
    def make_inputs(seed: int) -> Tensors:
        return (*draw("cpu")(seed), torch.empty(SIDE, SIDE))

    def add_into(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return torch.add(left, right, out=out)

    def check(inputs: Tensors, outputs: Tensors) -> str | None:
        return is_sum(inputs[:2], outputs)

    assert time_operation(make_inputs, add_into, device="cpu", check=check).median_us > 0


def test_integer_and_bool_outputs_are_poisoned_too() -> None:
    """`argmax` and `isfinite` into buffers of their own, which they leave alone from then on."""
    first: list[Tensors] = []

    def once(left: torch.Tensor, right: torch.Tensor) -> Tensors:
        if not first:
            first.append((left.argmax(dim=1), left.isfinite()))
        return first[0]

    poisoned: list[Tensors] = []

    def look(inputs: Tensors, outputs: Tensors) -> str | None:
        poisoned.append(outputs)
        return None

    time_operation(draw("cpu"), once, device="cpu", check=look, repeats=3, warmup=1)
    assert poisoned[1][0].eq(torch.iinfo(torch.int64).max).all()
    assert not poisoned[1][1].any()


def test_bytes_give_a_bandwidth_and_its_share_of_the_ceiling() -> None:
    floor = 3 * 4 * SIDE * SIDE
    found = time_operation(
        draw("cpu"), add, device="cpu", check=is_sum, floor_bytes=floor, copy_bandwidth=1e12
    )
    assert found.bytes_per_second == pytest.approx(floor / (found.median_us * 1e-6))
    assert found.ceiling_fraction == pytest.approx(floor / (found.median_us * 1e-6) / 1e12)


def test_the_ceiling_is_measured_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_measure_copy", lambda device: 8e12)
    found = time_operation(draw("cpu"), add, device="cpu", check=is_sum, floor_bytes=1)
    assert found.bytes_per_second is not None
    assert found.ceiling_fraction == pytest.approx(found.bytes_per_second / 8e12)


@pytest.mark.parametrize("method", METHODS)
def test_faster_than_memory_is_refused(method: Method) -> None:
    """No machine moves a petabyte in the time of a small addition."""
    with pytest.raises(ImplausibleTiming, match=r"GB/s, and this device copies at 100\.0 GB/s"):
        time_operation(
            draw("cpu"),
            add,
            device="cpu",
            check=is_sum,
            method=method,
            floor_bytes=10**15,
            copy_bandwidth=1e11,
        )


@pytest.mark.parametrize("method", METHODS)
def test_a_wrong_output_is_refused_in_the_words_of_the_check(method: Method) -> None:
    with pytest.raises(WrongResult, match="wrong when the clock stopped: not the sum"):
        time_operation(draw("cpu"), torch.sub, device="cpu", check=is_sum, method=method)


@pytest.mark.parametrize("method", METHODS)
def test_clocks_that_disagree_are_refused(monkeypatch: pytest.MonkeyPatch, method: Method) -> None:
    def slow(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        time.sleep(0.005)
        return left + right

    true_clock = time.perf_counter_ns
    monkeypatch.setattr(timing, "_clock_ns", lambda: true_clock() // 10)
    with pytest.raises(ImplausibleTiming, match="two clocks disagree"):
        time_operation(
            draw("cpu"), slow, device="cpu", check=is_sum, method=method, repeats=5, warmup=1
        )


def test_inputs_must_keep_their_shape_and_stand_on_the_device() -> None:
    def growing(seed: int) -> Tensors:
        return torch.ones(seed + 1), torch.ones(seed + 1)

    with pytest.raises(ValueError, match="same shapes and dtypes for every seed"):
        time_operation(growing, add, device="cpu", check=is_sum)
    with pytest.raises(ValueError, match="input 0 is on meta, not on cpu"):
        time_operation(draw_on_meta, add, device="cpu", check=is_sum)


def draw_on_meta(seed: int) -> Tensors:
    return (torch.empty(1, device="meta"),)


@pytest.mark.parametrize(
    "wrong",
    [
        {"repeats": 2},
        {"warmup": 0},
        {"sets": 1},
        {"floor_bytes": 0},
        {"device": "meta"},
        {"method": "lukewarm"},
        {"method": "rotated", "device": "cuda", "capture": False},
    ],
)
def test_arguments_that_make_no_measurement(wrong: dict[str, object]) -> None:
    arguments: dict[str, object] = {"device": "cpu", "check": is_sum} | wrong
    with pytest.raises(ValueError, match=r"takes at least|must be|not on meta"):
        time_operation(draw("cpu"), add, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", DEVICES)
def test_ceilings_are_those_of_a_machine_made_this_century(device: str) -> None:
    assert 1e8 < copy_bandwidth(device, repeats=3) < 1e14
    assert 1e8 < matmul_rate(device, repeats=3) < 1e17


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
class TestGpu:
    """What only a GPU can show. 64 MiB an input, so that the figure is one of memory."""

    side = 4096

    def test_a_streaming_addition_nears_the_copy_bandwidth(self) -> None:
        floor = 3 * 4 * self.side**2
        found = time_operation(
            draw("cuda", self.side), add, device="cuda", check=is_sum, floor_bytes=floor
        )
        assert found.ceiling_fraction is not None
        assert 0.5 < found.ceiling_fraction < 1.15

    def test_events_around_the_call_agree_with_the_graph(self) -> None:
        graph, events = (
            time_operation(
                draw("cuda", self.side), add, device="cuda", check=is_sum, capture=capture
            )
            for capture in (True, False)
        )
        assert (graph.mode, events.mode) == ("graph", "events")
        assert events.median_us == pytest.approx(graph.median_us, rel=0.3)

    def test_a_row_of_large_additions_takes_what_one_takes_cold(self) -> None:
        """Where the time is all memory's, the methods agree: rotated data are as cold."""
        cold, rotated = (
            time_operation(draw("cuda", self.side), add, device="cuda", check=is_sum, method=method)
            for method in METHODS
        )
        assert rotated.mode == "graph"
        assert rotated.median_us == pytest.approx(cold.median_us, rel=0.15)

    def test_a_row_of_small_additions_takes_less_than_one_cold(self) -> None:
        cold, rotated = (
            time_operation(draw("cuda"), add, device="cuda", check=is_sum, method=method)
            for method in METHODS
        )
        assert rotated.calls == 24
        assert rotated.median_us < cold.median_us

    def test_the_cache_is_flushed_before_each_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """4 MiB that were just written stay in the L2 cache; flushed, they come from memory."""

        def biggest(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return left.amax(dim=1)

        def is_biggest(inputs: Tensors, outputs: Tensors) -> str | None:
            return None if torch.equal(outputs[0], biggest(*inputs)) else "not the maximum"

        def median_us() -> float:
            draws = draw("cuda", 1024)
            return time_operation(draws, biggest, device="cuda", check=is_biggest).median_us

        def keep_busy(flush: object) -> None:
            torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]

        cold_us = median_us()
        monkeypatch.setattr(timing._Flush, "__call__", keep_busy)
        assert cold_us > 1.1 * median_us()
