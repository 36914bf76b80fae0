"""A server in SGLang's place, in this process, for gates that compare servers and time them.

It answers greedily by a rule, is as fast as its variant says, and can be wrong in ways that a gate
must see.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from phases.service import Answer, Load, ServiceFailed, Tokens
from phases.service_scale import GPU

SCALE = dataclasses.replace(
    GPU,
    lengths=(32, 64),
    speed_lengths=(32, 64),
    batches=(1, 3),
    new_tokens=12,
    distinct=48,
    device=torch.device("cpu"),
    write_model=lambda folder, seed, vocabulary, layers: folder,
)
"""A GPU host for servers that are not there: nothing is long, no model is written, and there is no
kernel library to be held against its sources."""
FAST = {
    "kdtree_mla-trees": 0.0002,
    "kdtree_mla": 0.003,
    "triton": 0.004,
    "triton-trees": 0.008,
}
"""Seconds of a token, so that the kernel is the fastest and trees on Triton are the slowest."""
LINE = "kdtree_mla: SGLang 0.5.23; fake; verify: kernel; decode: kernel\n"


_EVERYWHERE = frozenset({"empty", "cut short"})
"""Faults of every server; the others are of trees on the kernel alone, and of plain decode on it
where they begin with `decode: `."""
_DECODE = "decode: "
_BEYOND = 3
"""Tokens that an aborted answer may have more than was asked for."""
_ONCE = 62
"""The length of one prompt of `SCALE`, that of the fault `near-tie once`."""


class FakeStart:
    """`serving` for a gate. faults: what is wrong; seconds: of a token, by backend and trees."""

    def __init__(self, *faults: str, seconds: Mapping[str, float] | None = None) -> None:
        self.faults = faults
        self.seconds = seconds or {}
        self.started: list[tuple[tuple[str, ...], Mapping[str, str]]] = []

    @contextlib.contextmanager
    def __call__(
        self,
        arguments: Sequence[str],
        *,
        log: pathlib.Path,
        environment: Mapping[str, str],
        limit_s: float,
    ) -> Iterator[Any]:
        self.started.append((tuple(arguments), environment))
        backend = arguments[arguments.index("--attention-backend") + 1]
        trees = "NGRAM" in arguments
        name = f"{backend}{'-trees' if trees else ''}"
        if f"{name} does not start" in self.faults:
            raise ServiceFailed("the server ended before it was healthy\nno such thing")
        line = LINE
        tier = environment.get("KDTREE_DEFRAG", "off")
        if tier != "off" and f"no {tier}" not in self.faults:
            line = line.replace("\n", f"; defrag: {tier}\n")
        log.write_text(
            line if backend == "kdtree_mla" and "silent" not in self.faults else "well\n"
        )
        nodes = 1
        if trees:
            nodes = int(arguments[arguments.index("--speculative-num-draft-tokens") + 1])
        yield FakeService(log, name, nodes, self.faults, self.seconds.get(name, 0.0))


class FakeService:
    """The answers of one server. Token n after a prompt is drawn from what stands before it."""

    def __init__(
        self, log: pathlib.Path, name: str, nodes: int, faults: Sequence[str], seconds: float
    ) -> None:
        self.log = log
        ours, decodes = name == "kdtree_mla-trees", name == "kdtree_mla"
        self.faults = tuple(
            fault.removeprefix(_DECODE)
            for fault in faults
            if fault in _EVERYWHERE or (decodes if fault.startswith(_DECODE) else ours)
        )
        self._name, self._nodes, self._seconds = name, nodes, seconds
        self._aborted: set[str] = set()
        self._lock = threading.Lock()
        self._leaked = 0
        self._seen: set[tuple[Tokens, int]] = set()
        self._flushed = False

    def answers(
        self,
        prompts: Sequence[Tokens],
        new_tokens: int,
        *,
        likely: int = 0,
        names: Sequence[str] | None = None,
        limit_s: float | None = None,
    ) -> list[Answer]:
        seconds = self._seconds * new_tokens
        if limit_s is not None and limit_s < 0.05:
            raise ServiceFailed("timed out") from TimeoutError()
        time.sleep(seconds)
        if "breaks" in self.faults and names is not None:
            raise ServiceFailed("no answer from the server: 500")
        if names is not None:  # such an answer is a slow one, so that an abort can come in time
            deadline = time.monotonic() + 0.4
            while names[0] not in self._aborted and time.monotonic() < deadline:
                time.sleep(0.005)
        if names is not None and "leaks" in self.faults:
            self._leaked += 3
        return [self._answer(prompt, new_tokens, likely, names) for prompt in prompts]

    def abort(self, name: str) -> None:
        if "aborts fail" in self.faults:
            raise ServiceFailed("no answer from the server: 404")
        if "no abort" not in self.faults:
            self._aborted.add(name)

    def metrics(self) -> dict[str, float]:
        evicted = 0.0 if "no eviction" in self.faults else 1e6
        runs = {"kdtree:kv_mean_runs": 2.0, "kdtree:kv_measured_requests": 3.0}
        runs = {} if "no gauge" in self.faults else runs
        moved = {} if "no move" in self.faults else {"kdtree:kv_relocated_rows": 50.0}
        return {"sglang:evicted_tokens_total": evicted, **runs, **moved}

    def flush(self) -> None:
        self._flushed = True

    def generate(self, prompts: Sequence[Tokens], new_tokens: int) -> list[Tokens]:
        """Wrong after a flush, as that is where a gate has asked for wrong slots."""
        found = [answer.tokens for answer in self.answers(prompts, new_tokens)]
        if not self._flushed or "right slots" in self.faults:
            return found
        return [(*tokens[:-1], tokens[-1] + 1) for tokens in found]

    def load(self) -> Load:
        return Load(requests=0, used_slots=self._leaked, slots=1000, graph_bytes=1e6)

    def _answer(
        self, prompt: Tokens, count: int, likely: int, names: Sequence[str] | None
    ) -> Answer:
        again = (prompt, count) in self._seen
        self._seen.add((prompt, count))
        draw = random.Random(str(prompt))
        tokens, told = [], []
        for step in range(count + _BEYOND):
            first, second, gap = draw.randrange(100), 100 + draw.randrange(100), draw.random()
            told.append(((-1.0, first), (-1.0 - (1e-9 if step == 2 else 0.5 + gap), second)))
            wrong = ("late token" in self.faults and step == count - 1) or (
                "near-tie" in self.faults and step == 2
            )
            wrong |= "near-tie once" in self.faults and step == 2 and len(prompt) == _ONCE
            wrong |= "timed" in self.faults and step == 5 and again
            tokens.append(second if wrong else first)
        steps = 0
        if self._nodes > 1:
            accepted = self._nodes if "most accepted" in self.faults else (1 + self._nodes) / 2
            accepted = 1 if "none accepted" in self.faults else accepted
            steps = max(1, math.ceil((count - 1) / accepted))
            if "all accepted" in self.faults:
                steps = max(1, (count - 1) // self._nodes)
            self._print("TARGET_VERIFY", steps)
            steps = 0 if "not counted" in self.faults else steps
        else:
            self._print("DECODE", count - 1)
        beyond, tokens, told = tokens, tokens[:count], told[:count]
        if "empty" in self.faults:
            return Answer((), verified=steps)
        if "cut short" in self.faults:
            return Answer(tuple(tokens), steps, tuple(told) if likely else (), ending="abort")
        aborted = names is not None and names[0] in self._aborted
        if aborted:  # now in the middle, now in a step whose tree goes beyond what was asked for
            tokens = beyond if len(prompt) % 2 else tokens[: count // 2]
        return Answer(
            tuple(tokens),
            verified=steps,
            likely=tuple(told) if likely else (),
            ending="abort" if aborted else "length",
        )

    def _print(self, mode: str, steps: int) -> None:
        padded = 1 if "no padding" in self.faults else 2
        lines = f"Decode graph replay: worker=target key_size={padded} (bs) "
        lines += f"mode={mode} raw_bs=1\n"
        graph = "False" if "eager" in self.faults else "True"
        graph = "on" if "other log" in self.faults else graph
        steps = 0 if "no replay" in self.faults else steps
        with self._lock, self.log.open("a") as log:
            log.write(lines * steps + f"Decode batch, cuda graph: {graph}, gen\n")
