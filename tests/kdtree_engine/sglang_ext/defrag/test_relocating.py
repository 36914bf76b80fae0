"""When a scheduler relocates and what comes of it; what is moved is test_relocation's business."""

from __future__ import annotations

import logging
import types
from typing import Any

import pytest
import torch
from stand_in_modules import without_sglang

from kdtree_engine.sglang_ext.defrag import relocating, relocation
from kdtree_engine.sglang_ext.defrag.relocating import BUDGET, Relocating
from kdtree_engine.sglang_ext.defrag.relocation import Outcome, Service

MOVED = Outcome(runs=20, removed=4, moves=2, rows=100)


class Attempts:
    """Stands in for Relocation: what each attempt was given, and gives as it is told."""

    def __init__(self, *outcomes: Outcome | Exception, writes: bool = False) -> None:
        self.services: list[Service] = []
        self.budgets: list[int] = []
        self.outcomes = list(outcomes)
        self.writes = writes

    def __call__(self, service: Service) -> Any:
        self.services.append(service)
        return self

    def run(self, budget: int) -> Outcome:
        self.budgets.append(budget)
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def request(holds: bool = True) -> Any:
    return types.SimpleNamespace(kv=types.SimpleNamespace(holds_kv=holds))


class Batch:
    def __init__(self, *requests: Any) -> None:
        self.reqs = list(requests)

    def is_empty(self) -> bool:
        return not self.reqs


def scheduler(running: Batch, last: Batch | None = None, chunked: Any = None) -> Any:
    return types.SimpleNamespace(
        running_batch=running,
        last_batch=last,
        chunked_req=chunked,
        token_to_kv_pool_allocator=types.SimpleNamespace(get_kvcache=lambda: "pool"),
        req_to_token_pool=types.SimpleNamespace(req_to_token=torch.zeros(2, 2)),
        tree_cache="tree",
    )


def looks(relocating_: Relocating, attempts: Attempts, batches: int) -> list[int]:
    """At which of so many batches it looked."""
    found = []
    for number in range(1, batches + 1):
        before = len(attempts.budgets)
        relocating_.before_batch(scheduler(Batch(request())))
        found += [number] * (len(attempts.budgets) - before)
    return found


def test_every_so_many_batches_while_there_is_something_to_move() -> None:
    attempts = Attempts(MOVED, MOVED, MOVED)
    one = Relocating(5, attempts)
    assert looks(one, attempts, 17) == [5, 10, 15]
    assert (one.looks, one.relocations, one.rows) == (3, 3, 300)
    assert attempts.budgets == [BUDGET] * 3


def test_pauses_grow_where_there_is_nothing_and_end_where_there_is() -> None:
    nothing = Outcome(runs=20)
    attempts = Attempts(nothing, nothing, MOVED, *[nothing] * 9)
    one = Relocating(1, attempts)
    assert looks(one, attempts, 50) == [1, 3, 7, 8, 10, 14, 22, 30, 38, 46], "8 at most"
    assert (one.relocations, one.rows) == (1, 100)


def test_without_a_running_request_no_batch_is_counted() -> None:
    attempts = Attempts(MOVED)
    one = Relocating(2, attempts)
    for _ in range(9):
        one.before_batch(scheduler(Batch()))
    one.before_batch(scheduler(Batch(request())))
    assert attempts.budgets == []
    one.before_batch(scheduler(Batch(request())))
    assert attempts.budgets == [BUDGET]


def test_every_request_with_a_row_is_named_once() -> None:
    """Running, of the last batch, a part of a long prompt; not those that hold nothing."""
    running, prefilled, chunked = request(), request(), request()
    attempts = Attempts(MOVED)
    held = scheduler(Batch(running, request(False)), Batch(running, prefilled), chunked)
    held.result_queue = ["a result"]
    Relocating(1, attempts).before_batch(held)
    (service,) = attempts.services
    assert {id(req) for req in service.requests} == {id(running), id(prefilled), id(chunked)}
    assert len(service.requests) == 3
    assert service.in_flight == 1
    assert service.pools == ["pool"]


def test_why_nothing_moves_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    fenced = Outcome(reason="a streaming session is open")
    attempts = Attempts(fenced, fenced, Outcome(reason="a free group is open"))
    one = Relocating(1, attempts)
    with caplog.at_level(logging.WARNING):
        looks(one, attempts, 7)
    assert caplog.text.count("nothing moves: a streaming session is open") == 1
    assert caplog.text.count("nothing moves: a free group is open") == 1
    assert one.relocations == 0


def test_reasons_that_name_a_request_each_end_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """As those of beam searches: a service would say and keep one for each request of its life."""
    attempts = Attempts(*(Outcome(reason=f"request {number} is one") for number in range(50)))
    one = Relocating(1, attempts)
    with caplog.at_level(logging.WARNING):
        looks(one, attempts, 300)
    assert one.looks > 30
    assert caplog.text.count("nothing moves: ") == 20
    assert caplog.text.count("request 19 is one; no other reason is told") == 1


def test_what_fails_before_it_writes_ends_relocation_and_no_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    attempts = Attempts(RuntimeError("out of memory"))
    one = Relocating(1, attempts)
    assert looks(one, attempts, 50) == [1]
    assert "off from now on; nothing was moved" in caplog.text
    assert "out of memory" in caplog.text


def test_what_fails_in_between_ends_the_server() -> None:
    attempts = Attempts(RuntimeError("device lost"), writes=True)
    with pytest.raises(RuntimeError, match="device lost"):
        looks(Relocating(1, attempts), attempts, 1)


def test_the_scheduler_is_asked_before_it_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    add = without_sglang(monkeypatch)
    order: list[Any] = []

    class Scheduler:
        def __init__(self, relocating_: Any) -> None:
            self.token_to_kv_pool_allocator = types.SimpleNamespace(relocating=relocating_)

        def get_next_batch_to_run(self, *given: Any, **named: Any) -> str:
            order.append((given, named))
            return "plan"

    add("sglang.srt.managers.scheduler", Scheduler=Scheduler)
    relocating.between_batches()
    told = types.SimpleNamespace(before_batch=lambda _: order.append("looked"))
    assert Scheduler(told).get_next_batch_to_run(1, last=2) == "plan"
    assert Scheduler(None).get_next_batch_to_run() == "plan"
    assert order == ["looked", ((1,), {"last": 2}), ((), {})]


@pytest.mark.parametrize(
    ("overlaps", "core", "reasons", "says"),
    [
        (False, "python", [], None),
        (True, "python", [], "expected --disable-overlap-schedule"),
        (False, "rust", [], "BACKEND is rust, expected python"),
        (False, "python", ["SGLang 0.5.17: the holders"], "SGLang 0.5.17: the holders"),
    ],
)
def test_a_server_that_cannot_is_told_before_it_starts(
    monkeypatch: pytest.MonkeyPatch,
    overlaps: bool,
    core: str,
    reasons: list[str],
    says: str | None,
) -> None:
    add = without_sglang(monkeypatch)
    schedule = types.SimpleNamespace(disable_overlap_schedule=not overlaps)
    add("sglang.srt.runtime_context", get_schedule=lambda: schedule)
    monkeypatch.setattr(relocating, "fences_before_start", lambda: reasons)
    monkeypatch.setenv("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", core)
    found = relocating.problem()
    assert found is None if says is None else says in str(found)


@pytest.mark.parametrize("name", ["disable_radix_cache", "enable_pdmux", "enable_hisparse"])
def test_settings_under_which_nothing_would_ever_move_are_told(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Such a server would start, say that it has Tier 1, and relocate nothing."""
    add = without_sglang(monkeypatch)
    groups: dict[str, dict[str, object]] = {"get_spec": {"speculative_algorithm": None}}
    for getter, setting, expected in relocation._SETTINGS:
        groups.setdefault(getter, {})[setting] = True if setting == name else expected
    groups["get_resources"] = {"experts_capturer": None, "indexer_capturer": None}
    bags = {getter: types.SimpleNamespace(**group) for getter, group in groups.items()}
    context = {getter: (lambda bag=bag: bag) for getter, bag in bags.items()}
    add("sglang.srt", runtime_context=add("sglang.srt.runtime_context", **context))
    monkeypatch.setattr(relocation.importlib.metadata, "version", lambda _: relocation.RELEASE)
    assert list(relocation.fences_before_start()) == [f"{name} is True, expected False"]


def test_nodes_are_kept_in_python_unless_it_is_said_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"
    monkeypatch.delenv(name, raising=False)
    relocating.read_python_nodes()
    assert relocating.os.environ[name] == "python"
    monkeypatch.setenv(name, "rust")
    relocating.read_python_nodes()
    assert relocating.os.environ[name] == "rust"
