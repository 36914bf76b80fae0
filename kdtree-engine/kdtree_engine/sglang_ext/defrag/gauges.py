"""Fragmentation of a server's KV pool as Prometheus gauges, beside SGLang's own.

They are there where SGLang's are, with `--enable-metrics`, and change when SGLang's do: every
`--decode-log-interval` decode steps, and when nothing runs any more. What a step launches to
measure is read when the next interval ends, so that no step waits for it.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kdtree_engine.fragmentation.measure import Fragmentation, Summary, steps_of
from kdtree_engine.sglang_ext.defrag.host_copy import HostCopy
from kdtree_engine.sglang_ext.defrag.releases import row_of

__all__ = ["GAUGES", "SAMPLE", "Gauges", "export"]

SAMPLE = 16
"""Requests that are measured at a time: each takes some ten launches."""

GAUGES: Mapping[str, tuple[str, Callable[[Summary], float]]] = {
    "kdtree:kv_measured_requests": (
        f"Running requests whose KV slots were measured, evenly spaced, {SAMPLE} at most.",
        lambda found: found.requests,
    ),
    "kdtree:kv_mean_runs": (
        "Mean contiguous runs of KV slots that a measured request has.",
        lambda found: found.mean_runs,
    ),
    "kdtree:kv_worst_decile_runs": (
        "Mean runs of the tenth of the measured requests that has the most.",
        lambda found: found.worst_decile_runs,
    ),
    "kdtree:kv_mean_run_length": (
        "KV slots of all measured requests over their runs.",
        lambda found: found.mean_run_length,
    ),
    "kdtree:kv_page_locality": (
        "Share of the steps from slot to slot that stay in one 2 MiB page of a layer's pool.",
        lambda found: found.page_locality,
    ),
}
_TIER0: Mapping[str, tuple[str, Callable[[Any], float]]] = {
    "kdtree:kv_free_runs": (
        "Contiguous runs of free KV slots.",
        lambda allocator: len(allocator.growth.runs),
    ),
    "kdtree:kv_reserved_slots": (
        "Free KV slots that are kept for the growth of running requests.",
        lambda allocator: allocator.growth.reserved,
    ),
    "kdtree:kv_allocation_waits": (
        "Allocations since the start that waited for freed slots to reach the host.",
        lambda allocator: allocator.waits,
    ),
}
_TIER1: Mapping[str, tuple[str, Callable[[Any], float]]] = {
    "kdtree:kv_relocation_looks": (
        "Looks for KV rows to move since the start.",
        lambda relocating: relocating.looks,
    ),
    "kdtree:kv_relocations": (
        "Relocations since the start that moved KV rows.",
        lambda relocating: relocating.relocations,
    ),
    "kdtree:kv_relocated_rows": (
        "KV rows that relocations have moved since the start.",
        lambda relocating: relocating.rows,
    ),
}
_NOTHING = Summary(0, 0.0, 0.0, 0.0, 0.0, 1.0)
_log = logging.getLogger(__name__)


class Gauges:
    """The gauges of one scheduler.

    labels: SGLang's, of this scheduler. make: a gauge by its name, help and names of labels, with
    `labels(...).set(value)`.
    """

    def __init__(
        self, labels: Mapping[str, str], make: Callable[[str, str, list[str]], Any]
    ) -> None:
        self._labels = dict(labels)
        self._make = make
        self._made: dict[str, Any] = {}
        self._measured: tuple[torch.Tensor, HostCopy] | None = None
        self._is_idle = False

    def step(self, table: torch.Tensor, held: list[tuple[int, int]], allocator: Any) -> None:
        """Tell what was measured at the last call, where it is there by now; measure again.

        table: the request table. held: row and tokens of each running request.
        """
        self._is_idle = False
        if self._measured is None or self._measured[1].is_over():
            self._tell_measured()
            self._measure(table, held)
        self._tell_of(allocator)

    def idle(self, allocator: Any) -> None:
        """Tell that no request runs; once, as an idle scheduler comes here all the time."""
        if self._is_idle:
            return
        self._is_idle = True
        self._measured = None
        self._tell(_NOTHING)
        self._tell_of(allocator)

    def _tell_of(self, allocator: Any) -> None:
        if hasattr(allocator, "growth"):
            for name, (text, value) in _TIER0.items():
                self._set(name, text, value(allocator))
        if (relocating := getattr(allocator, "relocating", None)) is not None:
            for name, (text, value) in _TIER1.items():
                self._set(name, text, value(relocating))

    def _tell_measured(self) -> None:
        if self._measured is None:
            return
        tokens, steps = self._measured
        breaks, near = steps.tensor().unbind(1)
        self._tell(Fragmentation.of(tokens, breaks, near).summary())

    def _tell(self, summary: Summary) -> None:
        for name, (text, value) in GAUGES.items():
            self._set(name, text, value(summary))

    def _measure(self, table: torch.Tensor, held: list[tuple[int, int]]) -> None:
        held = [(row, tokens) for row, tokens in held if tokens > 0]
        count = min(SAMPLE, len(held))
        chosen = [held[number * len(held) // count] for number in range(count)]
        if not chosen:
            self._measured = None
            return
        # A view of each row: to gather them all at once would take the memory of a long batch.
        steps = [steps_of(table[row, :tokens]) for row, tokens in chosen]
        tokens = torch.tensor([tokens for _, tokens in chosen], dtype=torch.int64)
        self._measured = tokens, HostCopy(torch.stack(steps))

    def _set(self, name: str, text: str, value: float) -> None:
        if name not in self._made:
            self._made[name] = self._make(name, text, list(self._labels))
        self._made[name].labels(**self._labels).set(value)


def export() -> None:
    """Have the scheduler of this process export the gauges, if there is one; once is enough."""
    module: Any = sys.modules.get("sglang.srt.managers.scheduler_components.metrics_reporter")
    if module is None:
        return
    reporters = module.SchedulerMetricsReporter
    stock = reporters.report_decode_stats
    if hasattr(stock, "_kdtree_gauges"):
        return

    @functools.wraps(stock)
    def report_decode_stats(reporter: Any, *given: Any, **named: Any) -> Any:
        told = stock(reporter, *given, **named)
        if (
            reporter.current_scheduler_metrics_enabled
            and reporter.forward_ct_decode % reporter.decode_log_interval == 0
        ):
            _told(reporter, _step)
        return told

    stock_idle = reporters._maybe_log_idle_metrics

    @functools.wraps(stock_idle)
    def maybe_log_idle_metrics(reporter: Any, *given: Any, **named: Any) -> Any:
        told = stock_idle(reporter, *given, **named)
        if reporter.current_scheduler_metrics_enabled:
            _told(reporter, _idle)
        return told

    report_decode_stats._kdtree_gauges = True  # type: ignore[attr-defined]
    reporters.report_decode_stats = report_decode_stats
    reporters._maybe_log_idle_metrics = maybe_log_idle_metrics


def _step(gauges: Gauges, scheduler: Any) -> None:
    requests = [request for request in scheduler.running_batch.reqs if not request.finished()]
    gauges.step(
        scheduler.req_to_token_pool.req_to_token,
        [row_of(request) for request in requests],
        scheduler.token_to_kv_pool_allocator,
    )


def _idle(gauges: Gauges, scheduler: Any) -> None:
    gauges.idle(scheduler.token_to_kv_pool_allocator)


def _told(reporter: Any, tell: Callable[[Gauges, Any], None]) -> None:
    """`tell` with the gauges of a reporter, which it has until telling fails once."""
    gauges = getattr(reporter, "_kdtree_gauges", None)
    if gauges is False:
        return
    try:
        if gauges is None:
            gauges = Gauges(reporter.metrics_collector.labels, _prometheus)
            reporter._kdtree_gauges = gauges
        tell(gauges, reporter.scheduler)
    except Exception:  # what only counts must not end what serves
        reporter._kdtree_gauges = False
        _log.exception("kdtree_mla: the gauges of fragmentation are off from now on")


def _prometheus(name: str, text: str, labels: list[str]) -> Any:
    # SGLang names a folder for the values of all processes before this is imported.
    from prometheus_client import Gauge

    return Gauge(name, text, labelnames=labels, multiprocess_mode="mostrecent")
