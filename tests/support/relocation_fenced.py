"""Attempts to relocate where something is not understood, in the Python that has SGLang.

python relocation_fenced.py     writes {case: [reason, whether all is as it was]} as JSON
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.runtime_context import get_disagg, get_observability, get_resources, get_spec

from kdtree_engine.sglang_ext.defrag.churn import Churn, Settings
from kdtree_engine.sglang_ext.defrag.relocation import Relocation, Service
from kdtree_engine.sglang_ext.defrag.relocation_trial import Asked, Trial

Case = Callable[[], AbstractContextManager[Service | None]]
"""What is strange while it is entered; the service that it gives, or the plain one."""


def fragmented() -> Trial:
    """Requests in more runs than they need, some of whose slots are shared."""
    trial = Trial(Asked(reserve=0))
    with mock.patch.object(trial, "relocate"):
        for _ in range(400):
            trial.operate()
    return trial


def state(trial: Trial) -> list[Any]:
    """All that a relocation could change."""
    values = trial.tree.tree_core.all_values_flatten().tolist()
    trial.allocator.settle()
    free = trial.allocator.growth.runs.runs(), trial.allocator.growth.reserves()
    layers = [layer.clone().tolist() for layer in trial.layers]
    return [trial.rows.req_to_token.tolist(), values, free, layers]


def cases(trial: Trial) -> dict[str, Case]:
    plain = service_of(trial)
    tree, core, req = trial.tree, trial.tree.tree_core, plain.requests[0]
    node = next(iter(core.root_node.children.values()))
    stock = TokenToKVPoolAllocator(100, torch.float16, "cpu", None, need_sort=False)
    short = MLATokenToKVPool(100, 1, torch.int64, 1, 1, 3, "cpu", enable_memory_saver=False)
    rust = Churn(Settings("tier0", pool=100), [])

    def given(**other: Any) -> Case:
        return lambda: contextlib.nullcontext(dataclasses.replace(plain, **other))

    def while_(target: Any, name: str, value: Any) -> Case:
        return lambda: mock.patch.object(target, name, value)

    @contextlib.contextmanager
    def open_group() -> Iterator[None]:
        trial.allocator.free_group_begin()
        try:
            yield
        finally:
            trial.allocator.free_group_end()

    @contextlib.contextmanager
    def held_by_nobody() -> Iterator[None]:
        slots = trial.allocator.alloc(1)
        try:
            yield
        finally:
            trial.allocator.free(slots)

    @contextlib.contextmanager
    def another_row() -> Iterator[None]:
        row = trial.rows.req_to_token[req.kv.req_pool_idx]
        was = row[:2].clone()
        row[:2] = was.flip(0)
        try:
            yield
        finally:
            row[:2] = was

    @contextlib.contextmanager
    def failing_copy() -> Iterator[None]:
        with mock.patch.object(Relocation, "_copy", side_effect=MemoryError("no room")):
            yield

    @contextlib.contextmanager
    def locked() -> Iterator[None]:
        lock = tree.lock(node.id)
        try:
            yield
        finally:
            tree.unlock(lock)

    data = node.component_data[0]
    return {
        "in flight": given(in_flight=1),
        "open group": open_group,
        "stock allocator": given(allocator=stock),
        "rust": given(tree=rust.tree),
        "unknown cache": given(tree=object()),
        "unknown pool": given(pools=[object()]),
        "no pool": given(pools=[]),
        "draft pool of another size": given(pools=[*plain.pools, short]),
        "a request is not named": given(requests=plain.requests[1:]),
        "named twice": given(requests=[*plain.requests, req]),
        "hicache": while_(tree, "cache_controller", object()),
        "linker": while_(tree, "linker", object()),
        "session": while_(tree.session, "slots", {"a": object()}),
        "node on the host": while_(data, "host_value", torch.zeros(1)),
        "node being written": while_(node, "write_through_pending_id", 3),
        "beam": while_(req, "beam_group", object()),
        "backup": while_(req.kv, "retraction_backup", object()),
        "page size": while_(trial.allocator, "page_size", 16),
        "disaggregation": lambda: get_disagg().override(disaggregation_mode="prefill"),
        "canary": lambda: get_observability().override(kv_canary="log"),
        "eagle": lambda: get_spec().override(speculative_algorithm="EAGLE"),
        "captured experts": while_(get_resources(), "experts_capturer", object()),
        "held by nobody": held_by_nobody,
        "locked by another": locked,
        "another row": another_row,
        "failing copy": failing_copy,
    }


def service_of(trial: Trial) -> Service:
    return Service(trial.allocator, trial.rows, trial.tree, trial._holders(), trial.pools)


def main() -> None:
    torch.set_num_threads(1)
    trial = fragmented()
    found: dict[str, tuple[str, bool]] = {}
    for name, case in cases(trial).items():
        with case() as other:
            before = state(trial)
            service = other if isinstance(other, Service) else service_of(trial)
            try:
                reason = Relocation(service).run(4096).reason
            except MemoryError as error:
                reason = f"raised {error}"
            found[name] = reason, state(trial) == before
    before = state(trial)
    outcome = Relocation(service_of(trial)).run(4096)
    found["plain"] = outcome.reason, outcome.moves == 0 or state(trial) == before
    print(json.dumps(found))


if __name__ == "__main__":
    main()
