"""Drives SGLang's own allocator, request pool and prefix cache through traffic, without a model.

    python -m kdtree_engine.sglang_ext.defrag.churn < REQUEST.json        (the server's Python; CPU)

Real, and called as a server calls them: `Req`, `ScheduleBatch.prepare_for_extend`,
`.prepare_for_decode`, `.check_decode_mem`, `.retract_decode`, `.filter_batch`, `.merge_batch`,
`PrefillAdder`, `NewTokenRatioTracker`, `release_kv_cache`, `checkpoint_kv_cache`,
`ReqToTokenPool`, `TokenToKVPoolAllocator` and the radix cache that the release makes by default.
So each slot is allocated, shared, evicted and freed by SGLang's own code.

Imitated, since it needs a model and processes: the order in which the scheduler calls these. Of
SGLang 0.5.23, without overlap, speculation and mixed chunks, first come first served:

    _step       managers/scheduler.py  get_next_batch_to_run
    _prefill    managers/scheduler.py  _get_new_batch_prefill_raw
    _decode     managers/scheduler.py  update_running_batch
    _finish_*   managers/scheduler_components/batch_result_processor.py
                process_batch_result_prefill, process_batch_result_decode

There is no forward pass: its result is a token that no other request has, and its time is a sum,
`decode_ms` for a decode step and the prompt tokens over `prefill_rate` for a prefill.
"""

from __future__ import annotations

import array
import dataclasses
import importlib.metadata
import json
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from kdtree_engine.errors import ConfigError, MissingError
from kdtree_engine.fragmentation.measure import measure

__all__ = ["OWN", "POLICIES", "Churn", "Settings", "main"]

OWN = 1 << 16
"""Request n's answer is the content OWN + n; contents that are only of prompts lie below."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Of one run. pool: slots. running: most requests at once. chunk: tokens of one prefill step.

    decode_ms, prefill_rate (tokens a second): what a step's time is summed from. steps: most steps.
    every: steps between two samples. long: tokens from which a request is counted as a long one.
    """

    policy: str
    pool: int = 1_000_000
    running: int = 48
    chunk: int = 8192
    decode_ms: float = 20.0
    prefill_rate: float = 20_000.0
    steps: int = 1_000_000
    every: int = 500
    long: int = 16384


def _made_by(name: str, **given: Any) -> Callable[[int], Any]:
    def make(size: int) -> Any:
        from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

        from kdtree_engine.sglang_ext.defrag import allocators

        made = {"stock": TokenToKVPoolAllocator, "sort": allocators.SortingAllocator}
        make = made.get(name, allocators.RunAllocator)
        return make(size, dtype=torch.float16, device="cpu", kvcache=None, **given)

    return make


POLICIES: dict[str, Callable[[int], Any]] = {
    "stock": _made_by("stock", need_sort=False),
    "need_sort": _made_by("stock", need_sort=True),
    "sort": _made_by("sort"),
    "best_fit": _made_by("runs", chunk=0),
    "tier0": _made_by("runs", chunk=64),
}
"""By name, what makes the allocator of a pool of so many slots."""


class Churn:
    """One pool under traffic. requests: [arrival_s, prompt pieces, output, abort_after or None]."""

    tree_core: str | None = None
    """Whose nodes the prefix cache has, `python` or `rust`; None for the release's choice."""

    def __init__(self, settings: Settings, requests: Sequence[Sequence[Any]]) -> None:
        if (release := importlib.metadata.version("sglang")) != "0.5.23":
            raise MissingError(
                f"SGLang {release} is not what the churn imitates",
                remedy="name a Python with SGLang 0.5.23 in KD_SGLANG_PYTHON",
            )
        self.settings = settings
        fits = settings.pool // 2
        self.requests = [one for one in requests if _tokens(one) <= fits]
        self.refused = len(requests) - len(self.requests)
        self.width = max((_tokens(one) for one in self.requests), default=1) + 8
        self._publish()
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import (
            NewTokenRatioTracker,
        )
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

        from kdtree_engine.sglang_ext.defrag.allocators import plan_batches

        self.rows = ReqToTokenPool(settings.running, self.width, "cpu", enable_memory_saver=False)
        plan_batches()
        self.allocator = POLICIES[settings.policy](settings.pool)
        self.alloc_us: list[float] = []
        self._time_allocations()
        self.tree = self._tree()
        self.ratio = NewTokenRatioTracker.from_config()
        self.model = types.SimpleNamespace(vocab_size=1 << 60, is_encoder_decoder=False)
        self.running: Any = ScheduleBatch(reqs=[])
        self.last: Any = None
        self.chunked: Any = None
        self.waiting: list[Any] = []
        self.leaving: dict[str, int] = {}
        self.arrived = self.finished = self.aborted = self.retracted = 0
        self.cached_tokens = self.prompt_tokens = 0
        self.clock, self.step, self.idles = 0.0, 0, 0

    def run(self) -> Iterator[dict[str, Any]]:
        """Samples while it runs, then one line with `done`."""
        from sglang.srt.managers.schedule_batch import ScheduleBatch

        began = time.perf_counter()
        while self.step < self.settings.steps:
            self._arrive()
            batch = self._step()
            if batch is None:
                self.last = None
                self.running = ScheduleBatch(reqs=[])
                if self.waiting:
                    raise RuntimeError(f"{self.waiting[0].rid} is never admitted by an idle pool")
                if self.arrived == len(self.requests):
                    break
                self.clock = max(self.clock, self.requests[self.arrived][0])
                self.idles += 1
                if hasattr(self.allocator, "idle"):
                    self.allocator.idle()
                continue
            self.step += 1
            if self.step % self.settings.every == 0:
                yield self.sample()
        ended = time.perf_counter() - began
        yield {"done": True, "seconds": ended, **self._outcome()}

    def sample(self) -> dict[str, Any]:
        """Fragmentation of the requests that decode now, of all and of the long ones."""
        live = [req for req in self.running.reqs if not req.finished()]
        rows = torch.tensor([req.kv.req_pool_idx for req in live], dtype=torch.int64)
        lengths = torch.tensor([req.kv.kv_committed_len for req in live], dtype=torch.int64)
        table = self.rows.req_to_token[rows]
        is_long = lengths >= self.settings.long
        return {
            "step": self.step,
            "seconds": self.clock,
            "arrived": self.arrived,
            "finished": self.finished,
            "free": self.allocator.available_size() / self.settings.pool,
            "cached": self.tree.evictable_size() / self.settings.pool,
            "live": dataclasses.asdict(measure(table, lengths).summary()),
            "long": dataclasses.asdict(measure(table[is_long], lengths[is_long]).summary()),
        }

    def _outcome(self) -> dict[str, Any]:
        took = sorted(self.alloc_us) or [0.0]
        held = sum(req.kv.kv_allocated_len - req.kv.cache_protected_len for req in self._holders())
        tree = self.tree.evictable_size() + self.tree.protected_size()
        return {
            "steps": self.step,
            "finished": self.finished,
            "aborted": self.aborted,
            "retracted": self.retracted,
            "refused": self.refused,
            "idles": self.idles,
            "cached_share": self.cached_tokens / max(self.prompt_tokens, 1),
            "leaked": self.settings.pool - self.allocator.available_size() - tree - held,
            "allocations": len(self.alloc_us),
            "waits": getattr(self.allocator, "waits", 0),
            "alloc_us_median": took[len(took) // 2],
            "alloc_us_p99": took[len(took) * 99 // 100],
            "alloc_us_max": took[-1],
        }

    def _holders(self) -> list[Any]:
        found = {id(req): req for req in self.running.reqs if req.kv.holds_kv}
        if self.last is not None:
            found |= {id(req): req for req in self.last.reqs if req.kv.holds_kv}
        if self.chunked is not None and self.chunked.kv.holds_kv:
            found[id(self.chunked)] = self.chunked
        return list(found.values())

    def _arrive(self) -> None:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        while self.arrived < len(self.requests):
            at, prompt, output, abort_after = self.requests[self.arrived]
            if at > self.clock:
                return
            tokens = array.array("q")
            for content, length in prompt:
                tokens.extend(range(content << 24, (content << 24) + length))
            rid = f"r{self.arrived}"
            sampling = SamplingParams(max_new_tokens=output, temperature=0.0)
            sampling.normalize(None)
            req = Req(rid, "", tokens, sampling, vocab_size=self.model.vocab_size)
            req.tokenizer = None
            self.waiting.append(req)
            if abort_after is not None:
                self.leaving[rid] = abort_after
            self.arrived += 1

    def _step(self) -> Any:
        """One batch, run to its end; None where there is nothing to run."""
        from sglang.srt.mem_cache.common import checkpoint_kv_cache

        left_out = set()
        if self.chunked is not None:
            left_out.add(self.chunked)
            if self.chunked.extend_end > self.chunked.prefix_len:
                checkpoint_kv_cache(self.chunked, self.tree)
        if self.last is not None and self.last.forward_mode.is_extend():
            if self.last.chunked_req is not None:
                left_out.add(self.last.chunked_req)
            before = self.last.batch_size()
            self.last.filter_batch(reqs_to_exclude=list(left_out))
            if self.last.batch_size() < before:
                self.running.batch_is_full = False
            if not self.last.is_empty():
                if self.running.is_empty():
                    self.running = self.last
                else:
                    self.running.merge_batch(self.last)
        before = self.running.batch_size()
        self.running.filter_batch()
        if self.running.batch_size() < before:
            self.running.batch_is_full = False
        batch = self._prefill()
        if batch is not None:
            self._finish_prefill(batch)
        elif not self.running.is_empty():
            batch = self._decode(self.running)
            if batch is not None:
                self._finish_decode(batch)
        self.last = batch
        return batch

    def _prefill(self) -> Any:
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        if self.running.is_empty():
            self.running.batch_is_full = False
        if (self.running.batch_is_full or not self.waiting) and self.chunked is None:
            return None
        if self.rows.available_size() <= 0 and self.chunked is None:
            self.running.batch_is_full = True
            return None
        adder = PrefillAdder(
            1,
            self.tree,
            self.allocator,
            self.running,
            self.ratio.current,
            self.settings.chunk,
            self.settings.chunk,
            max_running_requests=self.settings.running,
            waiting_queue_len=len(self.waiting),
        )
        if self.chunked is not None:
            self.chunked.init_next_round_input()
            self.chunked = adder.add_chunked_req(self.chunked)
        for req in self.waiting:
            if adder.budget_state() == AddReqResult.OTHER:
                break
            holds = sum(one.kv.holds_kv for one in adder.can_run_list)
            if len(adder.can_run_list) >= self.rows.available_size() + holds:
                self.running.batch_is_full = True
                break
            req.init_next_round_input(self.tree)
            result = adder.add_one_req(
                req, has_chunked_req=self.chunked is not None, truncation_align_size=None
            )
            if result != AddReqResult.CONTINUE:
                if result == AddReqResult.NO_TOKEN:
                    self.running.batch_is_full = bool(
                        adder.can_run_list or not self.running.is_empty()
                    )
                break
        chosen = adder.can_run_list
        if not chosen:
            return None
        taken = set(chosen)
        self.waiting = [req for req in self.waiting if req not in taken]
        if adder.new_chunked_req is not None:
            self.chunked = adder.new_chunked_req
        if self.chunked is not None:
            self.chunked.inflight_middle_chunks += 1
        batch = ScheduleBatch.init_new(
            chosen,
            self.rows,
            self.allocator,
            self.tree,
            self.model,
            False,
            SpeculativeAlgorithm.NONE,
            chunked_req=self.chunked,
        )
        batch.prepare_for_extend()
        batch.decoding_reqs = None
        self.clock += batch.extend_num_tokens / self.settings.prefill_rate
        return batch

    def _decode(self, batch: Any) -> Any:
        before = batch.batch_size()
        if not batch.check_decode_mem():
            retracted, ratio, to_abort = batch.retract_decode()
            self.ratio.current = ratio
            self.retracted += len(retracted)
            self.aborted += len(to_abort)
            self.waiting.extend(retracted)
        else:
            self.ratio.decay_step()
        if batch.batch_size() < before:
            batch.batch_is_full = False
        if batch.is_empty():
            return None
        batch.prepare_for_decode()
        self.clock += self.settings.decode_ms / 1000
        return batch

    def _finish_prefill(self, batch: Any) -> None:
        from sglang.srt.mem_cache.common import checkpoint_kv_cache

        self.allocator.free_group_begin()
        for req in batch.reqs:
            if req.inflight_middle_chunks > 0:
                req.inflight_middle_chunks -= 1
                continue
            if not req.finished():
                self.prompt_tokens += len(req.origin_input_ids)
                self.cached_tokens += req.cached_tokens
                self._token(req)
                if req.finished():
                    self._release(req)
                else:
                    checkpoint_kv_cache(req, self.tree)
        self.allocator.free_group_end()

    def _finish_decode(self, batch: Any) -> None:
        self.allocator.free_group_begin()
        for req in batch.reqs:
            self._token(req)
            if req.finished():
                self._release(req)
        self.allocator.free_group_end()

    def _token(self, req: Any) -> None:
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        number = int(req.rid[1:])
        req.output_ids.append((OWN + number << 24) + len(req.output_ids))
        if len(req.output_ids) >= self.leaving.get(req.rid, sys.maxsize):
            req.to_finish = FINISH_ABORT()
            self.aborted += 1
        req.update_finish_state()

    def _release(self, req: Any) -> None:
        from sglang.srt.mem_cache.common import release_kv_cache

        release_kv_cache(req, self.tree, checkpoint=True)
        self.finished += 1

    def _time_allocations(self) -> None:
        alloc, took = self.allocator.alloc, self.alloc_us

        def timed(need: int) -> Any:
            began = time.thread_time_ns()  # not what other processes of this machine took meanwhile
            slots = alloc(need)
            took.append((time.thread_time_ns() - began) / 1000)
            return slots

        self.allocator.alloc = timed

    def _publish(self) -> None:
        """SGLang reads its settings from the process; torch_native needs no Triton on a CPU."""
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import ServerArgs

        arguments = ServerArgs(model_path="none", device="cpu", attention_backend="torch_native")
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0))

    def _tree(self) -> Any:
        """The cache that `mem_cache/registry.py:create_unified_radix_cache` makes by default."""
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        return UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=1,
                tree_components=(ComponentType.FULL,),
                tree_core_backend=self.tree_core,
            )
        )


def _tokens(request: Sequence[Any]) -> int:
    _, prompt, output, _ = request
    return int(sum(length for _, length in prompt) + output)


def main() -> None:
    """Reads {"settings": {}, "requests": []}, writes one JSON line for each sample and the end."""
    asked = json.load(sys.stdin)
    settings = Settings(**asked["settings"])
    if settings.policy not in POLICIES:
        raise ConfigError(f"policy {settings.policy!r} is none of {', '.join(POLICIES)}")
    torch.set_num_threads(1)
    for line in Churn(settings, asked["requests"]).run():
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
