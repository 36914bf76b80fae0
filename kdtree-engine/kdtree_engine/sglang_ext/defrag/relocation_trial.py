"""Random operations with relocations between them, on SGLang's structures, with a shadow of the KV.

    python -m kdtree_engine.sglang_ext.defrag.relocation_trial < REQUEST.json  (the server's Python)

The requests, batches, request table, prefix cache and allocator are those of `churn`, driven in
random order: arrivals whose prompts begin alike, prefill, decode, ends, clients that leave,
retraction, eviction, idle points, relocation. The KV pools are SGLang's as well: of three layers of
latent rows, and of a drafter's layer of K and V, on the same slots.

A row is written when a batch computes its token, with what no other prefix has: a sum over all
tokens up to it, its position and its layer. The shadow is these values computed anew from tokens
alone. After each relocation, and every 50 operations, what all live requests and all of the prefix
cache read has to be that; each slot has to be in one place. After a relocation every row that is
not in use is overwritten, so that whoever reads an old slot finds nothing there.

`forget` leaves one update out, to show that the trial notices.
"""

from __future__ import annotations

import array
import dataclasses
import json
import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from kdtree_engine.errors import ConfigError
from kdtree_engine.sglang_ext.defrag.churn import OWN, Churn, Settings
from kdtree_engine.sglang_ext.defrag.releases import evict, tree_nodes
from kdtree_engine.sglang_ext.defrag.relocation import Outcome, Relocation, Service

__all__ = ["FORGETS", "Asked", "Trial", "main", "try_relocation"]

FORGETS = {"nodes": "_write_nodes", "rows": "_write_rows", "release": "_release"}
"""What can be left out, and the step that does it."""
_COUNTED = (
    "arrivals",
    "prefills",
    "decodes",
    "evictions",
    "relocations",
    "relocated",
    "moves",
    "rows_moved",
    "shared_rows_moved",
    "runs_removed",
    "hits",
    "hits_after_moves",
    "verified",
)
_KINDS = 8
"""Beginnings that new prompts share."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """pool: slots. running: most requests at once. chunk: tokens of one prefill step.

    prompt, output: most tokens of a request. reserve: slots a request has ahead for decode; fewer
    than a service has, so that there is something to relocate. forget: None, or one of FORGETS.
    """

    operations: int = 100_000
    pool: int = 6000
    running: int = 12
    chunk: int = 512
    prompt: int = 600
    output: int = 60
    reserve: int = 2
    seed: int = 1
    forget: str | None = None


class _Watched(Relocation):
    """Marks where rows went."""

    def __init__(self, service: Service, was_moved: torch.Tensor) -> None:
        super().__init__(service)
        self.was_moved = was_moved

    def _copy(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        super()._copy(sources, destinations)
        self.was_moved[destinations] = True


class Trial(Churn):
    """A pool, its requests and its cache, one random operation at a time."""

    tree_core = "python"  # the release's choice is written in Rust, which relocation fences

    def __init__(self, asked: Asked) -> None:
        settings = Settings("tier0", pool=asked.pool, running=asked.running, chunk=asked.chunk)
        first = [0.0, [[_KINDS, asked.prompt]], asked.output, None]  # sets the table's width
        super().__init__(settings, [first])
        self.requests = list(self.requests)
        self.allocator.chunk = self.allocator.growth.chunk = asked.reserve
        self.asked = asked
        self.random = random.Random(asked.seed)
        self.pools = _pools(asked.pool)
        self.layers = [*self.pools[0].kv_buffer, *self.pools[1].k_buffer, *self.pools[1].v_buffer]
        self.sums: dict[str, int] = {}  # of the tokens whose rows a request has written
        self.admitted: dict[str, int] = {}  # how often it had been retracted
        self.was_moved = torch.zeros(asked.pool + 1, dtype=torch.bool)
        self.said: dict[int, int] = {}  # of the last requests that ended, how many tokens
        self.counts = dict.fromkeys(_COUNTED, 0)

    def operate(self) -> None:
        """One operation."""
        act = self.random.random()
        if act < 0.09 and len(self.waiting) < 6:
            self.arrive()
        elif act < 0.84:
            self.step_once()
        elif act < 0.87:
            self.leave()
        elif act < 0.91:
            evict(self.tree, self.random.randint(1, self.asked.pool // 8))
            self.counts["evictions"] += 1
        elif act < 0.92:
            self.retract()
        elif act < 0.93:
            self.allocator.idle()
        else:
            self.relocate()

    def arrive(self) -> None:
        """One to three requests of one prompt, which goes on from an earlier one or begins anew."""
        if self.said and self.random.random() < 0.5:
            number = self.random.choice(list(self.said))
            begins = [
                *(list(piece) for piece in self.requests[number][1]),
                [OWN + number, self.random.randint(0, self.said[number])],
            ]
        else:
            begins = [
                [self.random.randrange(_KINDS), self.random.randint(1, self.asked.prompt // 3)]
            ]
        goes_on = [_KINDS + 1 + self.arrived, self.random.randint(1, self.asked.prompt // 3)]
        prompt: list[list[int]] = []
        for content, length in (*begins, goes_on):
            room = self.asked.prompt - sum(tokens for _, tokens in prompt)
            if min(length, room):
                prompt.append([content, min(length, room)])
        for _ in range(self.random.choice((1, 1, 3))):
            output = self.random.randint(1, self.asked.output)
            self.requests.append([0.0, prompt, output, None])
            self._arrive()
            self.counts["arrivals"] += 1

    def step_once(self) -> None:
        """One batch of the scheduler; without one, the pool is idle."""
        from sglang.srt.managers.schedule_batch import ScheduleBatch

        if self._step() is None:
            self.running = ScheduleBatch(reqs=[])
            self.allocator.idle()

    def leave(self) -> None:
        """The client of a running request; it ends with its next token."""
        if live := [req for req in self.running.reqs if not req.finished()]:
            req = self.random.choice(live)
            self.leaving[req.rid] = len(req.output_ids) + 1

    def retract(self) -> None:
        """As if memory were short."""
        self.running.filter_batch()
        if self.running.batch_size() > 1:
            retracted, ratio, _ = self.running.retract_decode()
            self.ratio.current = ratio
            self.retracted += len(retracted)
            self.waiting.extend(retracted)
            self.running.batch_is_full = False

    def relocate(self) -> None:
        """With slots allocated ahead, as a tree of drafts has them, and prompts matched before."""
        ahead = self._allocate_ahead()
        asked = [self._key(self.requests[number][1]) for number in list(self.said)[-2:]]
        before = [self._match(key) for key in asked]
        service = Service(
            self.allocator, self.rows, self.tree, self._holders(), self.pools, in_flight=0
        )
        attempt = _Watched(service, self.was_moved)
        if self.asked.forget is not None:
            setattr(attempt, FORGETS[self.asked.forget], lambda *given: None)
        outcome = attempt.run(self.random.choice((8, 128, 4096)))
        _require(not outcome.reason, f"relocation gives up: {outcome.reason}")
        self._count(outcome)
        self._overwrite_free()
        self.verify()
        if outcome.moves:
            again = Relocation(service).run(0)
            _require(not again.reason, f"relocation gives up after itself: {again.reason}")
            _require(again.runs == outcome.runs - outcome.removed, "other runs than were promised")
        _require([self._match(key) for key in asked] == before, "a prefix is not found any more")
        self._free_ahead(ahead)

    def _count(self, outcome: Outcome) -> None:
        self.counts["relocations"] += 1
        self.counts["relocated"] += bool(outcome.moves)
        self.counts["moves"] += outcome.moves
        self.counts["rows_moved"] += outcome.rows
        self.counts["shared_rows_moved"] += outcome.shared
        self.counts["runs_removed"] += outcome.removed

    def _allocate_ahead(self) -> list[tuple[Any, int]]:
        """Slots behind the last token of some requests; each with how many."""
        given = []
        for req in self.running.reqs:
            count = self.random.randint(1, 4)
            if req.finished() or self.random.random() < 0.7:
                continue
            held = req.kv.kv_allocated_len
            with self.allocator.planned([(req.rid, held, count)]):
                slots = self.allocator.alloc(count)
            if slots is None:
                break
            place = slice(held, held + count)
            self.rows.write((req.kv.req_pool_idx, place), slots.to(torch.int32))
            req.kv.kv_allocated_len += count
            given.append((req, count))
        return given

    def _free_ahead(self, given: Sequence[tuple[Any, int]]) -> None:
        for req, count in given:
            end = req.kv.kv_allocated_len
            self.allocator.free(self._row(req, end - count, end))
            req.kv.kv_allocated_len -= count

    def _overwrite_free(self) -> None:
        """The rows of all free slots."""
        free = torch.zeros(self.asked.pool + 1, dtype=torch.bool)
        for start, length in (*self._free_runs(), *self.allocator.growth.reserves()):
            free[start : start + length] = True
        for layer in self.layers:
            layer[free] = -1

    def _free_runs(self) -> list[tuple[int, int]]:
        self.allocator.settle()
        return list(self.allocator.growth.runs.runs())

    def _finish_prefill(self, batch: Any) -> None:
        """The batch is computed: it reads its prefixes and writes what follows them."""
        at = 0
        for req, prefix, count in zip(
            batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True
        ):
            tokens = _tokens(req)
            row = self._row(req, 0, prefix)
            sums = _sums(tokens[: prefix + count], 0, 0)
            self._check(row, sums[:prefix], 0, f"the prefix of {req.rid}")
            if prefix and self.admitted.get(req.rid) != req.retraction_count:
                self.counts["hits"] += 1
                self.counts["hits_after_moves"] += bool(self.was_moved[row].any())
            self.admitted[req.rid] = req.retraction_count
            slots = batch.out_cache_loc[at : at + count]
            self._write(slots, sums[prefix:], numpy.arange(prefix, prefix + count))
            self.sums[req.rid] = int(sums[-1])
            at += count
        _require(at == len(batch.out_cache_loc), "a batch has other slots than its tokens")
        self.counts["prefills"] += 1
        super()._finish_prefill(batch)

    def _finish_decode(self, batch: Any) -> None:
        """Each request writes the row of the token that it got last."""
        places = numpy.array([req.kv.kv_committed_len - 1 for req in batch.reqs])
        tokens = numpy.array([req.output_ids[-1] for req in batch.reqs])
        before = numpy.array([self.sums[req.rid] for req in batch.reqs], dtype=numpy.int64)
        sums = before + _mixed(tokens, places)
        self._write(batch.out_cache_loc, sums, places)
        for req, now in zip(batch.reqs, sums.tolist(), strict=True):
            self.sums[req.rid] = now
        self.counts["decodes"] += 1
        super()._finish_decode(batch)

    def _release(self, req: Any) -> None:
        self.said[int(req.rid[1:])] = len(req.output_ids)
        if len(self.said) > 20:
            del self.said[next(iter(self.said))]
        super()._release(req)

    def _write(self, slots: torch.Tensor, sums: numpy.ndarray, places: numpy.ndarray) -> None:
        rows = torch.from_numpy(_rows(sums, places))
        for number, layer in enumerate(self.layers):
            layer[slots, 0] = rows + number
        self.was_moved[slots] = False

    def _check(self, slots: torch.Tensor, sums: numpy.ndarray, first: int, whose: str) -> None:
        """These slots have the rows of the positions from `first` on, in every layer."""
        wanted = torch.from_numpy(_rows(sums, numpy.arange(first, first + len(sums))))
        for number, layer in enumerate(self.layers):
            _require(torch.equal(layer[slots, 0], wanted + number), f"{whose}: other rows")
        self.counts["verified"] += len(sums)

    def verify(self) -> None:
        """All that live requests and the prefix cache read, and where every slot is."""
        used = torch.zeros(self.asked.pool + 1, dtype=torch.int64)
        used[0] = 1
        for req in self._holders():
            committed, allocated = req.kv.kv_committed_len, req.kv.kv_allocated_len
            row = self._row(req, 0, allocated)
            self._check(row[:committed], _sums(_tokens(req)[:committed], 0, 0), 0, req.rid)
            used += torch.bincount(row[req.kv.cache_protected_len :], minlength=len(used))
        depths: list[int] = []
        sums: list[int] = []
        for node in tree_nodes(self.tree):
            depth = 0 if node.parent is None else depths[node.parent]
            before = 0 if node.parent is None else sums[node.parent]
            tokens = numpy.array(node.tokens.token_ids[: len(node.value)], dtype=numpy.int64)
            held = _sums(tokens, depth, before)
            self._check(node.value, held, depth, f"node {node.key}")
            used[node.value] += 1
            depths.append(depth + len(tokens))
            sums.append(int(held[-1]))
        for start, length in (*self._free_runs(), *self.allocator.growth.reserves()):
            used[start : start + length] += 1
        _require(bool((used == 1).all()), "a slot is lost or in two places")

    def _row(self, req: Any, first: int, end: int) -> torch.Tensor:
        row: torch.Tensor = self.rows.req_to_token[req.kv.req_pool_idx, first:end].long()
        return row

    def _key(self, prompt: Sequence[Sequence[int]]) -> Any:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        tokens = array.array("q")
        for content, length in prompt:
            tokens.extend(range(content << 24, (content << 24) + length))
        return RadixKey(tokens)

    def _match(self, key: Any) -> int:
        """Tokens of the prefix that the cache has; their rows have to be right."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        found = self.tree.match_prefix(MatchPrefixParams(key=key))
        length = int(found.device_prefix_len)
        slots = self.tree.path_device_indices(found.last_device_node)[:length]
        tokens = numpy.array(key.token_ids[:length], dtype=numpy.int64)
        self._check(slots, _sums(tokens, 0, 0), 0, "a matched prefix")
        return length

    def census(self) -> None:
        """As many slots as the pool has are free, cached or held by a request."""
        held = sum(req.kv.kv_allocated_len - req.kv.cache_protected_len for req in self._holders())
        cached = self.tree.evictable_size() + self.tree.protected_size()
        found = self.allocator.available_size() + cached + held
        _require(found == self.asked.pool, f"{found} slots of {self.asked.pool}")


def try_relocation(asked: Asked) -> dict[str, int]:
    """Counts of what was done. AssertionError at the first violation, with seed and operation."""
    if asked.forget is not None and asked.forget not in FORGETS:
        raise ConfigError(f"forget {asked.forget!r} is none of {', '.join(FORGETS)}")
    trial = Trial(asked)
    for number in range(asked.operations):
        try:
            trial.operate()
            trial.census()
            if number % 50 == 49:
                trial.verify()
        except (AssertionError, ValueError) as error:
            said = f"seed {asked.seed}, operation {number}: {error}"
            raise AssertionError(said) from error
    return {
        "operations": asked.operations,
        **trial.counts,
        "ended": trial.finished,
        "aborted": trial.aborted,
        "retracted": trial.retracted,
    }


def _pools(size: int) -> tuple[Any, Any]:
    """SGLang's, tiny: a target's three layers of latent rows, a drafter's layer of K and V."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    latent = MLATokenToKVPool(size, 1, torch.int64, 1, 1, 3, "cpu", enable_memory_saver=False)
    draft = MHATokenToKVPool(size, 1, torch.int64, 1, 2, 1, "cpu", enable_memory_saver=False)
    return latent, draft


def _tokens(req: Any) -> numpy.ndarray:
    return numpy.array(req.origin_input_ids + req.output_ids, dtype=numpy.int64)


def _mixed(tokens: numpy.ndarray, places: numpy.ndarray) -> numpy.ndarray:
    """A number for each token at its place, int64; sums of them wrap around."""
    mixed = tokens.astype(numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15)
    mixed += places.astype(numpy.uint64) * numpy.uint64(0xC2B2AE3D27D4EB4F)
    mixed ^= mixed >> numpy.uint64(31)
    mixed *= numpy.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> numpy.uint64(29))).astype(numpy.int64)


def _sums(tokens: numpy.ndarray, first: int, before: int) -> numpy.ndarray:
    """int64 [n]: of all tokens of the prefix up to each; `before` is the sum of the first ones."""
    sums = _mixed(tokens, numpy.arange(first, first + len(tokens))).cumsum()
    return sums + numpy.int64(before)


def _rows(sums: numpy.ndarray, places: numpy.ndarray) -> numpy.ndarray:
    """int64 [n, 2]: what layer 0 has of these tokens; layer l has l more."""
    return numpy.stack([sums, 16 * places.astype(numpy.int64)], axis=1)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def main() -> None:
    """Reads the fields of `Asked`, writes the counts as JSON."""
    torch.set_num_threads(1)
    print(json.dumps(try_relocation(Asked(**json.load(sys.stdin)))))


if __name__ == "__main__":
    main()
