"""Moves KV rows of running requests to where they are in fewer runs, on SGLang's structures.

An experiment (KDTREE_DEFRAG=tier1, `relocating.py`). Who calls it has to be at a safe point, at
which no batch is in flight and the forward stream has ended, and has to name every request that may
hold slots. It then fences what it cannot move, reads who holds which slot, plans, copies the rows
of all layers, writes the new slots to every holder, and only then releases the old ones. Where
anything is not understood it moves nothing, and says what.

Who holds slot numbers in SGLang 0.5.23, by its own source:

    ReqToTokenPool.req_to_token, [0, kv_allocated_len) of a     rewritten, over-allocated tails too
        row: prefix from the tree, then the request's own
    UnifiedTreeNode.component_data[FULL].value                  rewritten in place, once a node
    the allocator's free slots, its reserves, slots freed a     settled before, claimed and freed
        moment ago (RunAllocator)
    where a request grows next (Growth)                         follows its last row
    the allocator's open free group                             fenced
    Req.last_node, .last_host_node, .best_match_node, .lock     node ids, no slots
    Req.prefix_len, .kv.cache_protected_len                     lengths, no slots; prefix_indices
                                                                of 0.5.17 is no more
    ScheduleBatch.out_cache_loc, ForwardBatch, a result on its  of one step: fenced with it, and
        way (overlap), kv_indices of backends and graphs        written anew by the next
    the target's KV pool, a drafter's on the same slots         rows move; other pools are fenced
    SessionSlot.kv (streaming sessions)                         fenced
    BeamGroup.member_rows, rows without a request               fenced
    node.host_value, HiCacheController, BackupKV, linkers       fenced
    ReqKvInfo.retraction_backup, KV sender and receiver (PD)    fenced
    routed experts' and indexer's host caches, by slot          fenced
    the canary's tags, which say of a slot what precedes it     fenced
    RustUnifiedTreeCore's nodes, the default core's             fenced
    HiSparse's maps, SWA, Mamba, C128, paged and DCP pools      fenced
    DSPARK's deferred commits, EAGLE's and DFLASH's workers     fenced: not read by us

What is held by someone who is not in this list shows: the census has to find each slot of the pool
exactly once, every row in use has to be a named request's, a request's prefix has to be what its
nodes hold, and a node has to be locked as often as it has such readers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kdtree_engine.fragmentation.relocation import Move, Part, Plan, plan_moves, total_runs
from kdtree_engine.ops.compaction import MAX_LAYERS
from kdtree_engine.ops.relocation import move_rows
from kdtree_engine.sglang_ext.defrag.releases import (
    TreeNode,
    free_group,
    node_of,
    tree_nodes,
)

__all__ = ["Outcome", "Relocation", "Service", "fences", "fences_before_start"]

RELEASE = "0.5.23"
"""Whose holders are listed above."""
_OTHER_RELEASE = f"SGLang {{}}: the holders of {RELEASE} are known"

_SETTINGS: tuple[tuple[str, str, object], ...] = (
    ("get_disagg", "disaggregation_mode", "null"),
    ("get_disagg", "enable_pdmux", False),
    ("get_memory", "disable_radix_cache", False),
    ("get_memory", "enable_flexkv", False),
    ("get_memory", "enable_hierarchical_cache", False),
    ("get_memory", "enable_hisparse", False),
    ("get_memory", "enable_lmcache", False),
    ("get_observability", "kv_canary", "none"),
    ("get_parallel", "dcp_size", 1),
    ("get_parallel", "pp_size", 1),
    ("get_server_args", "dllm_algorithm", None),
    ("get_server_args", "enable_return_indexer_topk", False),
    ("get_server_args", "enable_return_routed_experts", False),
    ("get_serving", "enable_streaming_session", False),
)
"""What the server is set to where no other holder exists, the loop has the safe point, and the
prefix cache is one that is known: by which function of SGLang's `runtime_context` it is read, its
name, and the value. A server may change its role as it runs, so that they are read each time."""
_ALGORITHMS = (None, "NGRAM")
"""Whose workers keep no slots from one step to the next."""
_POOLS = {"MLATokenToKVPool": ("kv_buffer",), "MHATokenToKVPool": ("k_buffer", "v_buffer")}
"""By class, what holds their rows: lists of tensors [slots, ...], one a layer."""


@dataclasses.dataclass(frozen=True)
class Service:
    """Where one rank has slot numbers, as its scheduler knows it.

    allocator, table, tree: RunAllocator, ReqToTokenPool and prefix cache.
    requests: all that may have a row, wherever they are: running, just prefilled, chunked.
    pools: the KV pools that these slots are of: the target's, and a drafter's if it has one.
    in_flight: batches that were launched and whose results are not processed.
    """

    allocator: Any
    table: Any
    tree: Any
    requests: Sequence[Any]
    pools: Sequence[Any]
    in_flight: int = 0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """runs: of all requests, before. removed: of them. shared: rows that several requests read.

    reason: why nothing may move; empty if it may.
    """

    runs: int = 0
    removed: int = 0
    moves: int = 0
    rows: int = 0
    shared: int = 0
    reason: str = ""


class _FencedError(Exception):
    """Something is not understood, so nothing moves."""


def fences(service: Service) -> list[str]:
    """Why nothing may move, as far as it can be told without reading slots; empty if it may."""
    return list(_fences(service))


def fences_before_start() -> Iterator[str]:
    """Why nothing may move in a server of these settings, before it has any structure."""
    if importlib.metadata.version("sglang") == RELEASE:
        yield from _fences_of_settings()
    else:
        yield _OTHER_RELEASE.format(importlib.metadata.version("sglang"))


def _fences(service: Service) -> Iterator[str]:
    yield from fences_before_start()
    if importlib.metadata.version("sglang") != RELEASE:
        return
    if service.in_flight:
        yield f"{service.in_flight} batches are in flight"
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    from kdtree_engine.sglang_ext.defrag.allocators import RunAllocator

    if type(service.allocator) is not RunAllocator:
        yield f"the allocator is a {type(service.allocator).__name__}, expected RunAllocator"
        return
    if service.allocator.page_size != 1:
        yield f"page size {service.allocator.page_size}, expected 1"
    if free_group(service.allocator) is not None:
        yield "a free group is open"
    if type(service.table) is not ReqToTokenPool or service.table._aux_cache is not None:
        yield f"the request table is a {type(service.table).__name__}, expected a ReqToTokenPool"
    yield from _fences_of_tree(service.tree)
    yield from _fences_of_pools(service)
    for req in service.requests:
        yield from _fences_of_request(req)


def _fences_of_settings() -> Iterator[str]:
    from sglang.srt import runtime_context

    for getter, name, expected in _SETTINGS:
        found = getattr(getattr(runtime_context, getter)(), name, "no setting of this release")
        if found != expected:
            yield f"{name} is {found}, expected {expected}"
    if (algorithm := runtime_context.get_spec().speculative_algorithm) not in _ALGORITHMS:
        yield f"the speculative algorithm is {algorithm}, whose workers may keep slots"
    resources = runtime_context.get_resources()
    for name in ("experts_capturer", "indexer_capturer"):
        if getattr(resources, name) is not None:
            yield f"{name} keeps what it captured by slot"


def _fences_of_tree(tree: Any) -> Iterator[str]:
    from sglang.srt.mem_cache.unified_cache.components import ComponentType
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    if type(tree) is not UnifiedRadixCache:
        yield f"the prefix cache is a {type(tree).__name__}, expected UnifiedRadixCache"
        return
    if type(tree.tree_core) is not UnifiedTreeCore:
        yield (
            f"the prefix cache's nodes are in a {type(tree.tree_core).__name__}, expected "
            "UnifiedTreeCore (SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python)"
        )
        return
    if tree.tree_core.page_size != 1:
        yield f"page size {tree.tree_core.page_size} of the prefix cache, expected 1"
    if tree.tree_components != (ComponentType.FULL,):
        yield "the prefix cache has other components than full attention"
    outside = ("cache_controller", "host_pool_group", "linker", "buffer_pipeline")
    for name in outside:
        if getattr(tree, name) is not None:
            yield f"the prefix cache has a {name}: other tiers may hold its slots"
    if tree.session.slots:
        yield "a streaming session is open"
    if tree.tree_core.has_ongoing_insert():
        yield "an insertion in the prefix cache is suspended"


def _fences_of_pools(service: Service) -> Iterator[str]:
    wanted = service.allocator.size + service.allocator.page_size
    if not service.pools:
        yield "no KV pool is named"
    target = service.allocator.get_kvcache()
    if target is not None and all(pool is not target for pool in service.pools):
        yield "the KV pool that the allocator is for is not among those that are named"
    for pool in service.pools:
        if (names := _POOLS.get(type(pool).__name__)) is None:
            yield f"a KV pool is a {type(pool).__name__}, expected {' or '.join(_POOLS)}"
            continue
        for name in ("k_scale_buffer", "kv_scale_buffer"):
            if getattr(pool, name, None) is not None:
                yield f"a KV pool has a {name}, whose rows are not known"
        for layer in (each for name in names for each in getattr(pool, name)):
            if layer.dim() < 2 or layer.shape[0] != wanted or not layer.is_contiguous():
                yield f"a KV pool has layers {list(layer.shape)}, expected {wanted} slots in order"
                break


def _fences_of_request(req: Any) -> Iterator[str]:
    if req.beam_group is not None:
        yield f"request {req.rid} is a beam search: rows without a request share its slots"
    if req.kv.retraction_backup is not None:
        yield f"request {req.rid} has a backup on the host"
    if req.kv.holds_mamba or req.kv.max_evicted_seqlen:
        yield f"request {req.rid} has other state than full attention"


@dataclasses.dataclass(frozen=True)
class _Held:
    """Who holds what.

    parts: what may move: the nodes', then the requests' own. nodes: of the first parts.
    requests: with a row, by row. rows: int64 [B], their rows, on the device.
    lengths: kv_allocated_len of each.
    """

    parts: list[Part]
    nodes: list[TreeNode]
    requests: list[Any]
    rows: torch.Tensor
    lengths: list[int]


class Relocation:
    """One attempt to relocate rows of a service, at a safe point.

    writes: whether holders are being told; what is raised before leaves all as it was.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        self.writes = False

    def run(self, budget: int) -> Outcome:
        """Move at most `budget` rows. Waits for the device. What it raises, it raises unmoved."""
        if reasons := fences(self.service):
            return Outcome(reason="; ".join(reasons))
        allocator = self.service.allocator
        allocator.settle()
        try:
            held = self._read()
        except _FencedError as error:
            return Outcome(reason=str(error))
        plan = plan_moves(held.parts, allocator.growth.runs, budget)
        runs = total_runs(held.parts)
        if plan.moves:
            self._carry_out(held, plan)
        shared = sum(move.count for move in plan.moves if held.parts[move.part].readers > 1)
        return Outcome(runs, plan.removed, len(plan.moves), plan.rows, shared)

    def _read(self) -> _Held:
        """Raises _FencedError where a slot is held by nobody, or twice, or in another order."""
        service = self.service
        nodes = tree_nodes(service.tree)
        for node in nodes:
            if node.elsewhere:
                raise _FencedError("a node of the prefix cache is in another tier as well")
        of_node = _on_host([node.value for node in nodes])
        requests = sorted(
            (req for req in service.requests if req.kv.holds_kv),
            key=lambda req: int(req.kv.req_pool_idx),
        )
        numbers = [req.kv.req_pool_idx for req in requests]
        if len(set(numbers)) != len(numbers):
            raise _FencedError("two requests have one row")
        if len(numbers) != service.table.size - len(service.table.free_slots):
            raise _FencedError("a row is in use by a request that is not named")
        device = service.table.req_to_token.device
        rows = torch.tensor(numbers, dtype=torch.int64, device=device)
        lengths = [req.kv.kv_allocated_len for req in requests]
        table = service.table.req_to_token[rows, : max(lengths, default=0)].long().cpu()
        readers = [0] * len(nodes)
        where = {node.key: number for number, node in enumerate(nodes)}
        own: list[tuple[torch.Tensor, int | None]] = []
        for req, row, length in zip(requests, table, lengths, strict=True):
            key = node_of(service.tree, req)
            if key is not None and key not in where:
                raise _FencedError(f"request {req.rid} ends at a node that is not in the cache")
            last = None if key is None else where[key]
            path, at = [], last
            while at is not None:
                readers[at] += 1
                path.append(of_node[at])
                at = nodes[at].parent
            protected = req.kv.cache_protected_len
            prefix = torch.cat(path[::-1]) if path else row[:0]
            if not 0 <= protected <= length or not length:
                raise _FencedError(f"request {req.rid} has {protected} of {length} slots protected")
            if not torch.equal(prefix, row[:protected]):
                raise _FencedError(f"request {req.rid} has another prefix than its nodes")
            own.append((row[protected:length], last))
        # Nobody else may read a node: its slots would not show in the census.
        if any(node.locks != count for node, count in zip(nodes, readers, strict=True)):
            raise _FencedError("a node is locked by others than the requests that read it")
        self._census([*of_node, *(each for each, _ in own)])
        return _Held(self._parts(nodes, of_node, readers, own), nodes, requests, rows, lengths)

    def _parts(
        self,
        nodes: Sequence[TreeNode],
        of_node: Sequence[torch.Tensor],
        readers: Sequence[int],
        own: Sequence[tuple[torch.Tensor, int | None]],
    ) -> list[Part]:
        """The nodes' parts have the nodes' numbers, so that a part is after its parent."""
        from kdtree_engine.sglang_ext.defrag.allocators import runs_of

        chunk = self.service.allocator.chunk
        parts = [
            Part(runs_of(slots), count, node.parent)
            for node, slots, count in zip(nodes, of_node, readers, strict=True)
        ]
        return parts + [Part(runs_of(slots), 1, last, chunk) for slots, last in own if len(slots)]

    def _census(self, held: Sequence[torch.Tensor]) -> None:
        """Each slot of the pool is free, reserved or held, and that once."""
        allocator = self.service.allocator
        slots = torch.cat([*held, torch.zeros(1, dtype=torch.int64)])  # and slot 0, of padding
        if bool(((slots < 0) | (slots > allocator.size)).any()):
            raise _FencedError("a slot outside of the pool is held")
        seen = torch.bincount(slots, minlength=allocator.size + 1)
        for start, length in (*allocator.growth.runs.runs(), *allocator.growth.reserves()):
            seen[start : start + length] += 1
        if not bool((seen == 1).all()):
            lost, double = int((seen == 0).sum()), int((seen > 1).sum())
            raise _FencedError(f"{lost} slots are held by nobody known, {double} more than once")

    def _carry_out(self, held: _Held, plan: Plan) -> None:
        """Nothing that a holder sees changes before all is prepared that could fail."""
        allocator = self.service.allocator
        sources, destinations = self._slots(held.parts, plan.moves)
        with self._claimed(plan.moves):
            self._copy(sources, destinations)
            now = torch.arange(allocator.size + 1, device=sources.device)
            now[sources] = destinations
            rows = self._new_rows(held, now)
            touched = {move.part for move in plan.moves}
            values = [(node.value, now[node.value]) for node in self._of(held.nodes, touched)]
            tails = self._new_tails(held, rows)
        self.writes = True
        self._write_rows(held, rows)
        self._write_nodes(values)
        for rid, end in tails:
            allocator.growth.moved(rid, end)
        self._release(sources)

    def _of(self, nodes: Sequence[TreeNode], parts: set[int]) -> list[TreeNode]:
        return [node for number, node in enumerate(nodes) if number in parts]

    def _slots(
        self, parts: Sequence[Part], moves: Sequence[Move]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [rows] each, on the pool's device: where rows are, and where they go."""
        sources, destinations = [], []
        held: dict[int, torch.Tensor] = {}
        for move in moves:
            if move.part not in held:
                held[move.part] = torch.cat([_range(*run) for run in parts[move.part].runs])
            sources.append(held[move.part][move.first : move.first + move.count])
            destinations.append(_range(move.to, move.count))
        device = self.service.table.req_to_token.device
        return torch.cat(sources).to(device), torch.cat(destinations).to(device)

    @contextlib.contextmanager
    def _claimed(self, moves: Sequence[Move]) -> Iterator[None]:
        """The destinations are in use; not so any more where the copy fails."""
        runs = self.service.allocator.growth.runs
        for move in moves:
            runs.claim(move.to, move.count)
        try:
            yield
        except BaseException:
            for move in moves:
                runs.give(move.to, move.count)
            raise

    def _copy(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """A launch for each shape of rows, and for every 256 layers of it."""
        alike: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}
        for pool in self.service.pools:
            for name in _POOLS[type(pool).__name__]:
                for layer in getattr(pool, name):
                    alike.setdefault((layer.shape, layer.dtype), []).append(layer)
        for layers in alike.values():
            for at in range(0, len(layers), MAX_LAYERS):
                move_rows(layers[at : at + MAX_LAYERS], sources, destinations)

    def _new_rows(self, held: _Held, now: torch.Tensor) -> torch.Tensor:
        """The rows of `held` with new slots, [B, longest]; what is behind a row's end stays."""
        longest = max(held.lengths, default=0)
        old = self.service.table.req_to_token[held.rows, :longest]
        places = torch.arange(longest, device=old.device)
        inside = places < torch.tensor(held.lengths, device=old.device)[:, None]
        return torch.where(inside, now[torch.where(inside, old, 0).long()].to(old.dtype), old)

    def _new_tails(self, held: _Held, rows: torch.Tensor) -> list[tuple[str, int]]:
        """The requests whose last row moved, each with the slot behind it now."""
        if not held.requests:
            return []
        last = torch.tensor(held.lengths, device=rows.device)[:, None] - 1
        longest = rows.shape[1]
        old = self.service.table.req_to_token[held.rows, :longest].gather(1, last).flatten()
        new = rows.gather(1, last).flatten()
        pairs = zip(held.requests, old.tolist(), new.tolist(), strict=True)
        return [(req.rid, now + 1) for req, was, now in pairs if was != now]

    def _write_rows(self, held: _Held, rows: torch.Tensor) -> None:
        self.service.table.req_to_token[held.rows, : rows.shape[1]] = rows

    def _write_nodes(self, values: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """In place: whoever else has the tensor has the new slots as well."""
        for old, new in values:
            old.copy_(new)

    def _release(self, sources: torch.Tensor) -> None:
        self.service.allocator.free(sources)


def _on_host(slots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """All of them by one copy."""
    if not slots:
        return []
    lengths = torch.tensor([len(each) for each in slots])
    return list(torch.cat(list(slots)).cpu().tensor_split(lengths.cumsum(0)[:-1]))


def _range(start: int, count: int) -> torch.Tensor:
    return torch.arange(start, start + count)
