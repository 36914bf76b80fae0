"""`kd bench frag`: how a policy of the KV allocator scatters requests, on SGLang's own structures.

Every policy gets the same requests, in a process of its own in the server's Python, which needs no
GPU: `kdtree_engine.sglang_ext.defrag.churn` says what is real there and what is imitated. The
figures of a policy are means over its samples between half of the arrivals and the last one, when
the pool is full and still churned, each live request of each sample counting once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdtree_engine.atomic import write_atomically
from kdtree_engine.errors import ConfigError, KdError
from kdtree_engine.fragmentation.traffic import Request, Traffic, draw, read_trace
from kdtree_engine.machine import Machine
from kdtree_engine.sglang_ext.defrag.churn import POLICIES, Settings
from phases.checkout import Checkout
from phases.evidence import new_run_id, now
from phases.service import server_python, server_sglang

__all__ = [
    "COLUMNS",
    "POLICIES",
    "Churned",
    "FragBench",
    "bench_frag",
    "churn_environment",
    "over_time",
    "requests_of",
    "rows",
    "run_policy",
    "time_columns",
]

_ROOT = pathlib.Path(__file__).resolve().parents[1]

COLUMNS = (
    *("policy", "runs long", "worst tenth", "of stock", "run length", "page locality"),
    *("runs all", "alloc us", "p99", "max", "cached", "retracted", "leaked"),
)

Sample = Mapping[str, Any]
Run = Callable[[Settings, Sequence[Request], Callable[[Sample], None]], "Churned"]


@dataclasses.dataclass(frozen=True)
class Churned:
    """One policy under the traffic. samples: while it ran. outcome: at its end, as churn says."""

    policy: str
    samples: list[Sample]
    outcome: Mapping[str, Any]

    def settled(self) -> list[Sample]:
        """From half of the arrivals on, while there are arrivals to come."""
        last = max((sample["arrived"] for sample in self.samples), default=0)
        return [one for one in self.samples if last / 2 <= one["arrived"] < last]

    def mean(self, of: str, figure: str) -> float | None:
        """Over the live requests of all settled samples. of: `live` or `long`."""
        weights = [sample[of]["requests"] for sample in self.settled()]
        if not sum(weights):
            return None
        values = (sample[of][figure] for sample in self.settled())
        weighed = sum(w * v for w, v in zip(weights, values, strict=True))
        return float(weighed / sum(weights))

    def run_length(self, of: str) -> float | None:
        """Slots over runs, of the live requests of all settled samples together.

        Not the mean of the samples' own: a sample with long runs would hide many with short ones.
        """
        tokens, runs = self.mean(of, "mean_tokens"), self.mean(of, "mean_runs")
        return tokens / runs if tokens is not None and runs else None


@dataclasses.dataclass
class FragBench:
    """One run. traffic: what the requests were drawn from, or the trace they were read from."""

    seed: int
    traffic: Mapping[str, Any]
    settings: Mapping[str, Any]
    requests: int
    sglang: str | None = None
    policies: list[Churned] = dataclasses.field(default_factory=list)
    run: str = dataclasses.field(default_factory=new_run_id)
    started: str = dataclasses.field(default_factory=lambda: now().isoformat())

    @property
    def right(self) -> bool:
        """Whether no policy lost a slot, and all served the same number of requests, and some."""
        served = {one.outcome["finished"] for one in self.policies}
        lost = any(one.outcome["leaked"] for one in self.policies)
        return len(served) == 1 and 0 not in served and not lost


def requests_of(traffic: Traffic, trace: pathlib.Path | None, seed: int) -> list[Request]:
    """Of the trace, as many as the traffic wants of it; drawn, where there is no trace."""
    if trace is None:
        return draw(traffic, seed)
    return read_trace(trace)[: traffic.requests]


def bench_frag(
    policies: Sequence[str],
    traffic: Traffic,
    settings: Settings,
    *,
    seed: int,
    trace: pathlib.Path | None,
    checkout: Checkout,
    machine: Machine,
    command: Sequence[str],
    progress: Callable[[int, int, str], None],
    run: Run | None = None,
) -> tuple[FragBench, pathlib.Path]:
    """Churn each policy with the same requests; the outcome, and the file that holds it."""
    requests = requests_of(traffic, trace, seed)
    if not any(one.prompt_tokens + one.output <= settings.pool // 2 for one in requests):
        raise ConfigError(
            f"none of {len(requests)} requests fits half of a pool of {settings.pool} slots",
            remedy="a larger --pool, or shorter --prompt and --output",
        )
    bench = FragBench(
        seed,
        {"trace": trace.name} if trace else _plain(traffic),
        {name: value for name, value in _plain(settings).items() if name != "policy"},
        len(requests),
        server_sglang(),
    )
    file = checkout.state / "bench" / f"{bench.run}.json"
    commit, dirty = checkout.revision()
    for number, policy in enumerate(policies):

        def seen(sample: Sample, policy: str = policy, number: int = number) -> None:
            done = number * len(requests) + sample["arrived"]
            runs = sample["long"]["mean_runs"]
            note = f"{policy}: {sample['finished']} finished, {runs:.0f} runs of a long request"
            progress(done, len(policies) * len(requests), note)

        progress(number * len(requests), len(policies) * len(requests), f"{policy}: starts")
        one = (run or run_policy)(dataclasses.replace(settings, policy=policy), requests, seen)
        bench.policies.append(one)
        document = {
            "version": 1,
            "command": list(command),
            "revision": commit,
            "dirty": dirty,
            "machine": machine.as_json(),
            **dataclasses.asdict(bench),
        }
        write_atomically(file, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    return bench, file


def run_policy(
    settings: Settings, requests: Sequence[Request], seen: Callable[[Sample], None]
) -> Churned:
    """In a process of the server's Python. KdError, with what it said last, where that fails."""
    asked = {
        "settings": dataclasses.asdict(settings),
        "requests": [dataclasses.astuple(request) for request in requests],
    }
    samples: list[Sample] = []
    outcome: Sample | None = None
    with tempfile.TemporaryFile("w+") as given, tempfile.TemporaryFile("w+") as said:
        json.dump(asked, given)
        given.seek(0)
        process = subprocess.Popen(
            [server_python(), "-W", "ignore", "-m", "kdtree_engine.sglang_ext.defrag.churn"],
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            cwd=_ROOT,
            env=os.environ | churn_environment(),
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if not line.startswith("{"):
                    continue  # what SGLang prints while it is imported
                told = json.loads(line)
                if told.pop("done", False):
                    outcome = told
                else:
                    samples.append(told)
                    seen(told)
            code = process.wait()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        if code or outcome is None:
            said.seek(0)
            last = (said.read().strip() or "no message").splitlines()[-1]
            raise KdError(f"the churn of {settings.policy} ended with exit code {code}: {last}")
    return Churned(settings.policy, samples, outcome)


def rows(bench: FragBench) -> list[tuple[str, ...]]:
    """A row for each policy; `of stock` is its mean runs of a long request over stock's."""
    stock = next(
        (one.mean("long", "mean_runs") for one in bench.policies if one.policy == "stock"), None
    )
    found: list[tuple[str, ...]] = []
    for one in bench.policies:
        runs, out = one.mean("long", "mean_runs"), one.outcome
        found.append(
            (
                one.policy,
                _number(runs, ".0f"),
                _number(one.mean("long", "worst_decile_runs"), ".0f"),
                _number(runs / stock if runs is not None and stock else None, ".3f"),
                _number(one.run_length("long"), ".1f"),
                _number(one.mean("long", "page_locality"), ".4f"),
                _number(one.mean("live", "mean_runs"), ".0f"),
                f"{out['alloc_us_median']:.0f}",
                f"{out['alloc_us_p99']:.0f}",
                f"{out['alloc_us_max']:.0f}",
                f"{out['cached_share']:.3f}",
                str(out["retracted"]),
                str(out["leaked"]),
            )
        )
    return found


def time_columns(bench: FragBench) -> tuple[str, ...]:
    """Of `over_time`."""
    return ("arrived", *(one.policy for one in bench.policies))


def over_time(bench: FragBench, points: int = 10) -> list[tuple[str, ...]]:
    """Mean runs of a live long request, policy by policy, as requests arrive; blank: no sample."""
    found: list[tuple[str, ...]] = []
    for point in range(1, points + 1):
        low, high = (bench.requests * at / points for at in (point - 1, point))
        cells = []
        for one in bench.policies:
            long = [s["long"] for s in one.samples if low < s["arrived"] <= high]
            if point == points:  # the last to arrive are there while all others leave
                long = [s["long"] for s in one.samples if low < s["arrived"] < high]
            weight = sum(each["requests"] for each in long)
            total = sum(each["requests"] * each["mean_runs"] for each in long)
            cells.append(_number(total / weight if weight else None, ".0f"))
        found.append((f"{high:.0f}", *cells))
    return found


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _plain(given: Traffic | Settings) -> dict[str, Any]:
    """Fields by name; a distribution as it is written on the command line."""
    fields = dataclasses.fields(given)
    values = {field.name: getattr(given, field.name) for field in fields}
    return {
        name: str(value) if dataclasses.is_dataclass(value) else value
        for name, value in values.items()
    }


def churn_environment() -> dict[str, str]:
    """What a process of `kdtree_engine.sglang_ext.defrag` needs beside this one's."""
    given = os.environ.get("PYTHONPATH", "")
    paths = os.pathsep.join(filter(None, (str(_ROOT / "kdtree-engine"), given)))
    return {"PYTHONPATH": paths, "TORCHDYNAMO_DISABLE": "1"}
