"""Which pools get Tier 0, on an SGLang that stands in for both releases."""

from __future__ import annotations

import logging
import sys
import types
from typing import Any

import pytest
from stand_in_modules import without_sglang

from kdtree_engine.errors import MissingError
from kdtree_engine.sglang_ext import plugin
from kdtree_engine.sglang_ext.defrag import releases, service

TARGET = (
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
    "._build_token_to_kv_pool_allocator"
)


class Stock:
    """SGLang's allocator of pages of one token."""

    page_size = 1
    size, dtype, device = 100, "bf16", "cpu"

    def __init__(self, *, need_sort: bool = False) -> None:
        self.need_sort = need_sort

    def get_kvcache(self) -> str:
        return "the KV cache"


class Paged(Stock):
    page_size = 16


class Tier0(Stock):
    def __init__(self, size: int, **given: Any) -> None:
        super().__init__()
        self.given = (size, given)
        self.idles = 0

    def idle(self) -> None:
        self.idles += 1


class Scheduler:
    """As SGLang's: `on_idle` is called whenever there is no batch."""

    def __init__(self, allocator: Any) -> None:
        self.token_to_kv_pool_allocator = allocator
        self.waits = False
        self.called = 0

    def is_fully_idle(self) -> bool:
        return not self.waits

    def on_idle(self) -> None:
        self.called += 1


class Configurator:
    def __init__(self, *backends: str) -> None:
        self.server_args = types.SimpleNamespace(get_attention_backends=lambda: backends)


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was registered with SGLang's registry of hooks."""
    add = without_sglang(monkeypatch)
    registered: list[tuple[Any, ...]] = []
    registry = types.SimpleNamespace(register=lambda *given: registered.append(given))
    kinds = types.SimpleNamespace(BEFORE="before", AFTER="after", AROUND="around")
    add("sglang.srt.plugins.hook_registry", HookRegistry=registry, HookType=kinds)
    add("sglang.srt.mem_cache.allocator", TokenToKVPoolAllocator=Stock)
    add("sglang.srt.managers.scheduler", Scheduler=Scheduler)
    monkeypatch.setattr(Scheduler, "on_idle", Scheduler.on_idle)
    planned: list[str] = []
    made = types.ModuleType("allocators")
    vars(made).update(RunAllocator=Tier0, plan_batches=lambda: planned.append("once"))
    monkeypatch.setitem(sys.modules, "kdtree_engine.sglang_ext.defrag.allocators", made)
    monkeypatch.setattr(
        sys.modules["kdtree_engine.sglang_ext.defrag"], "allocators", made, raising=False
    )
    return registered


def pool(hooks: list[tuple[Any, ...]], stock: Any, *backends: str, shared: Any = None) -> Any:
    """What a pool of a server on these backends gets where SGLang would make `stock`."""
    service.offer("kdtree_mla")
    target, hook, kind = hooks[-1]
    assert (target, kind) == (TARGET, "around")
    return hook(
        lambda configurator, **given: shared or stock,
        Configurator(*backends),
        token_to_kv_pool_allocator=shared,
        sizes=None,
    )


@pytest.mark.parametrize("backends", [("kdtree_mla", "kdtree_mla"), ("fa3", "kdtree_mla")])
def test_a_pool_of_single_tokens_gets_it(
    hooks: list[tuple[Any, ...]], backends: tuple[str, str]
) -> None:
    made = pool(hooks, Stock(), *backends)
    given = {"dtype": "bf16", "device": "cpu", "kvcache": "the KV cache"}
    assert made.given == (100, given)
    assert service.problem(made) is None


def test_another_server_keeps_its_own_and_is_told(
    hooks: list[tuple[Any, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    stock = Stock()
    with caplog.at_level(logging.WARNING):
        assert pool(hooks, stock, "triton", "triton") is stock
    assert "KDTREE_DEFRAG is for servers on kdtree_mla" in caplog.text


@pytest.mark.parametrize(
    ("stock", "says"),
    [
        (Paged(), "the KV pool has a Paged with pages of 16, expected"),
        (Stock(need_sort=True), "prefill and decode are on servers of their own"),
    ],
)
def test_another_pool_keeps_its_own_and_the_check_says_why(
    hooks: list[tuple[Any, ...]], stock: Stock, says: str
) -> None:
    made = pool(hooks, stock, "kdtree_mla", "kdtree_mla")
    assert made is stock
    assert says in str(service.problem(made))


def test_a_hook_that_sglang_did_not_take_is_a_problem(hooks: list[tuple[Any, ...]]) -> None:
    assert "past the plugin's hook" in str(service.problem(Stock()))


def test_a_draft_model_shares_its_targets(hooks: list[tuple[Any, ...]]) -> None:
    shared = Tier0(100)
    assert pool(hooks, Stock(), "kdtree_mla", "kdtree_mla", shared=shared) is shared


def test_it_is_tidied_when_no_request_is_there(hooks: list[tuple[Any, ...]]) -> None:
    made = pool(hooks, Stock(), "kdtree_mla", "kdtree_mla")
    scheduler = Scheduler(made)
    scheduler.on_idle()
    assert made.idles == scheduler.called == 1
    scheduler.waits = True
    scheduler.on_idle()
    assert (made.idles, scheduler.called) == (1, 2)


def test_without_hooks_it_says_so(
    hooks: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sys.modules["sglang.srt.plugins.hook_registry"], "HookRegistry")
    with pytest.raises(MissingError, match="KDTREE_DEFRAG needs sglang"):
        service.offer("kdtree_mla")


def test_tier1_is_tier0_with_an_allocator_that_relocates(
    hooks: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "rust")
    monkeypatch.setattr(Scheduler, "get_next_batch_to_run", lambda _: "plan", raising=False)
    stock = Scheduler.get_next_batch_to_run  # type: ignore[attr-defined]
    service.offer("kdtree_mla", relocate_every=7)
    made = hooks[-1][1](
        lambda configurator, **given: Stock(),
        Configurator("kdtree_mla", "kdtree_mla"),
        token_to_kv_pool_allocator=None,
        sizes=None,
    )
    assert made.relocating._every == 7
    assert Scheduler.get_next_batch_to_run is not stock  # type: ignore[attr-defined]
    assert not hasattr(pool(hooks, Stock(), "kdtree_mla", "kdtree_mla"), "relocating")


@pytest.mark.parametrize("tier", ["off", "tier0", "tier1", "", None])
def test_the_plugin_offers_it_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tier: str | None
) -> None:
    offered: list[tuple[str, int | None]] = []
    monkeypatch.setattr(
        service, "offer", lambda name, relocate_every: offered.append((name, relocate_every))
    )
    monkeypatch.setenv("KDTREE_DEFRAG_EVERY", "32")
    for name in ("register_backend", "draft_on_triton"):
        monkeypatch.setattr(plugin.compat, name, lambda *_: None)
    monkeypatch.setattr(plugin.compat, "sglang_version", lambda: "0.5.23")
    monkeypatch.setattr(plugin.compat, "can_register_algorithms", lambda: False)
    monkeypatch.delenv("KDTREE_DEFRAG", raising=False)
    if tier is not None:
        monkeypatch.setenv("KDTREE_DEFRAG", tier)
    plugin.register()
    wanted = {"tier0": [("kdtree_mla", None)], "tier1": [("kdtree_mla", 32)]}
    assert offered == wanted.get(tier or "", [])


def test_a_request_has_its_row_in_either_release() -> None:
    old = types.SimpleNamespace(req_pool_idx=3, kv_committed_len=40, kv=None)
    new = types.SimpleNamespace(kv=types.SimpleNamespace(req_pool_idx=3, kv_committed_len=40))
    assert releases.row_of(old) == releases.row_of(new) == (3, 40)


def test_backends_are_of_the_arguments_or_of_the_process(
    hooks: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert releases.backends(Configurator("a", "b")) == ("a", "b")
    context = types.ModuleType("sglang.srt.runtime_context")
    vars(context)["attention_backends"] = lambda: ("c", "d")
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    newer = types.SimpleNamespace(server_args=types.SimpleNamespace())
    assert releases.backends(newer) == ("c", "d")
