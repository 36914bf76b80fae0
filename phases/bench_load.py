"""`kd bench serve` under load: many requests at once, in a sweep, at a rate, or for a long time.

The servers are those of `phases.bench_serve`, one after the other on one machine, or one that
already runs, such as what `kd promote` made live. What sends the requests is
`phases.load_client`; its docstring defines what is measured.

Load changes which requests run in one step, and nothing else: so every answer must be what
the server without speculation says to that prompt, up to near-ties, and of a server that already
runs, what it says to it alone. Requests repeat a few prompts, which are asked for once before
anything is timed: then the prefix cache has them and the n-gram drafter has seen the answers, of
every server alike, as in `kd bench serve` without load. With `fresh` each request has a prompt of
its own, which is prefilled between the others' decode steps, and nothing has been seen.

What comes out is written to a file after each point and each window, so that what was measured
outlives the machine, and Ctrl-C.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from kdtree_engine.atomic import write_atomically
from kdtree_engine.build import origin_of, require_current
from kdtree_engine.errors import ConfigError, KdError
from kdtree_engine.library import library_path
from kdtree_engine.machine import Machine
from phases.checkout import Checkout
from phases.evidence import new_run_id, now
from phases.load_client import TOO_MANY, ClientFailed, Order, Tick, running
from phases.load_live import Live, told, vocabulary
from phases.load_point import Point
from phases.load_prompts import Prompts, drawn, read_prompts
from phases.service import Answer, Service, ServiceFailed, Tokens, incomplete, serving
from phases.service_scale import GPU, Scale, Start, Variant, kernel, launched, plain, triton
from phases.service_speed import LAYERS, speed_bound
from phases.service_tokens import LIKELY, Difference, compare_answer, draw_prompts, tie_bound

__all__ = [
    "LoadBench",
    "Plan",
    "Screen",
    "bench_live",
    "bench_load",
    "parse_numbers",
]

_JUDGED_FRESH = 8
_AT_ONCE = 16
_IDLE_S = 60.0
_WINDOWS = 60
_LEAST_WINDOW_S = 1.0
_POLL_S = 5.0
_LIVE = "live"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is asked of each server. Either `concurrency` or `rates`; a soak has one of either.

    seconds: of each point, at least. soak: whether the point is exactly so long, in windows.
    prompts: how many are repeated. fresh: none is repeated. file: they come from there.
    silence_s: how long a request may be without a token.
    """

    lengths: tuple[int, ...]
    concurrency: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    seconds: float = 20.0
    soak: bool = False
    new_tokens: int = 256
    prompts: int = 16
    fresh: bool = False
    file: pathlib.Path | None = None
    seed: int = 1
    silence_s: float = 120.0

    @property
    def loads(self) -> tuple[tuple[int, float], ...]:
        """(concurrency, rate) of each point, one of them 0."""
        return (*((one, 0.0) for one in self.concurrency), *((0, one) for one in self.rates))

    @property
    def window_s(self) -> float:
        return max(_LEAST_WINDOW_S, self.seconds / _WINDOWS) if self.soak else 0.0


class Screen(Protocol):
    """Who is told while it is measured."""

    def note(self, text: str) -> None:
        """What is done now."""

    def tick(self, point: Point, tick: Tick) -> None:
        """What came in the last half second; the point has it already."""

    def ended(self, point: Point) -> None:
        """The point is measured."""


@dataclasses.dataclass
class LoadBench:
    """One run. failed: what each server that could not be measured said, by its name.

    references: what each prompt must be answered with, by (length, prompt). bound: how much less
    likely another token may be. leaked: KV slots in use by nothing after the last request, by
    server; None where that could not be told. differences: by the place of a point.
    """

    plan: Plan
    scale: str
    nodes: int | None
    graphs: bool | None
    expected: tuple[str, ...]
    bound: float
    library: dict[str, Any] = dataclasses.field(default_factory=dict)
    server: dict[str, Any] = dataclasses.field(default_factory=dict)
    points: list[Point] = dataclasses.field(default_factory=list)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    leaked: dict[str, int | None] = dataclasses.field(default_factory=dict)
    slots: dict[str, int] = dataclasses.field(default_factory=dict)
    references: dict[tuple[int, int], Answer] = dataclasses.field(default_factory=dict)
    differences: dict[str, list[Difference]] = dataclasses.field(default_factory=dict)
    interrupted: bool = False
    run: str = dataclasses.field(default_factory=new_run_id)
    started: str = dataclasses.field(default_factory=lambda: now().isoformat())

    @property
    def live(self) -> bool:
        """Whether it is of a server that already ran."""
        return self.expected == (_LIVE,)

    @property
    def right(self) -> bool:
        """Whether all was measured, every request answered, no slot lost and no token wrong.

        Where there is a reference, a point of which no answer was held against it is not right, nor
        is one with more different answers to a prompt than are kept: the rest may be anything.

        What a live server's tokens part by under load is on record and does not count here, as how
        much rounding moves that model's is not known.
        """
        every = [one for found in self.differences.values() for one in found]
        points = len(self.expected) * len(self.plan.lengths) * len(self.plan.loads)
        return (
            not self.interrupted
            and not self.failed
            and len(self.points) == points > 0
            and all(point.right for point in self.points)
            and not any(self.leaked.values())
            and (self.live or all(one.near_tie for one in every))
            and (self.live or not self.references or all(map(self._all_judged, self.points)))
        )

    def _all_judged(self, point: Point) -> bool:
        return bool(self.judged(point)) and not point.unjudged[TOO_MANY]

    def judged(self, point: Point) -> int:
        """Answers of a point that there is something to compare with."""
        return sum(
            len(forms)
            for prompt, forms in point.forms.items()
            if (point.length, prompt) in self.references
        )

    def compare(self) -> None:
        """Every different answer against the reference's to the same prompt."""
        self.differences = {}
        for point in self.points:
            for prompt, forms in point.forms.items():
                wanted = self.references.get((point.length, prompt))
                if wanted is None:
                    continue
                for form in forms:
                    one = _difference(f"{point.where} prompt {prompt}", form, wanted, self.bound)
                    if one is not None:
                        self.differences.setdefault(point.where, []).append(one)


def _difference(where: str, form: Tokens, wanted: Answer, bound: float) -> Difference | None:
    if wanted.likely or form == wanted.tokens:
        return compare_answer(where, form, wanted, bound)[1]
    # A server that tells no probabilities leaves nothing to judge a difference by.
    pairs = enumerate(zip(form, wanted.tokens, strict=False))
    end = min(len(form), len(wanted.tokens))
    step = next((step for step, (one, other) in pairs if one != other), end)
    got, other = (one[step] if len(one) > step else None for one in (form, wanted.tokens))
    return Difference(where, step, got, other, None, False)


def parse_numbers(text: str, what: str, *, whole: bool) -> tuple[float, ...]:
    """`1,4,16`, rising. Raises ConfigError for anything that is no list of positive numbers."""
    found = []
    for word in text.split(","):
        try:
            number = float(int(word)) if whole else float(word)
        except ValueError:
            number = 0.0
        if not 0 < number < 1e5:
            raise ConfigError(
                f"{what}: expected positive {'whole ' if whole else ''}numbers with commas "
                f"between, as in 1,4,16, got {text!r}"
            )
        found.append(number)
    return tuple(sorted(set(found)))


@dataclasses.dataclass
class _Run:
    """What one measurement needs at every step."""

    bench: LoadBench
    file: pathlib.Path
    facts: dict[str, Any]
    screen: Screen

    def keep(self) -> None:
        document = _document(self.bench, self.facts)
        text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
        write_atomically(self.file, text + "\n")


def bench_load(
    plan: Plan,
    *,
    checkout: Checkout,
    machine: Machine,
    command: Sequence[str],
    screen: Screen,
    nodes: int = 9,
    graphs: bool = True,
    chosen: Sequence[Variant] | None = None,
    scale: Scale = GPU,
    start: Start = serving,
) -> tuple[LoadBench, pathlib.Path]:
    """Each variant under each load; the outcome, and the file that holds it.

    chosen: variants; None: on the kernel, without speculation, on Triton. Those that come after
    `plain()` are judged too, as answers are compared at the end.
    A server that does not start or dies is on record with what it said, and the others are measured
    all the same. Interrupted, it returns what there is, and every server is gone.

    Raises CompileError on a GPU where the kernel library is not what csrc as it is makes, and
    MissingError where there is none.
    """
    library: dict[str, Any] = {}
    if scale.device.type == "cuda":
        path = library_path()
        require_current(path)
        library = {"file": path.name, **origin_of(path)}
    variants = tuple(chosen or (kernel(nodes), plain(), triton(nodes)))
    names = tuple(variant.name for variant in variants)
    bench = LoadBench(plan, scale.name, nodes, graphs, names, speed_bound(scale), library)
    run = _begin(bench, checkout, machine, command, screen)
    logs = run.file.with_suffix("")
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kd-load-") as scratch, _interruptible(run):
        folder = pathlib.Path(scratch)
        model = folder / f"model-{LAYERS}"
        scale.write_model(model, plan.seed, scale.vocabulary, LAYERS)
        for variant in variants:
            log = folder / f"{variant.name}.log"
            screen.note(f"{variant.name}: starts")
            try:
                with launched(
                    scale,
                    variant,
                    model=model,
                    log=log,
                    start=start,
                    graphs=graphs,
                    more=_room(plan, scale, graphs=graphs),
                ) as service:
                    likely = LIKELY if variant == plain() else 0
                    _measure(run, variant.name, service, _drawn(plan, scale), likely)
            except (KdError, OSError) as error:
                bench.failed[variant.name] = str(error)
                screen.note(f"{variant.name}: failed")
            finally:
                if log.is_file():
                    (logs / log.name).write_bytes(log.read_bytes())
            run.keep()
    run.keep()
    return bench, run.file


def bench_live(
    url: str,
    plan: Plan,
    *,
    checkout: Checkout,
    machine: Machine,
    command: Sequence[str],
    screen: Screen,
) -> tuple[LoadBench, pathlib.Path]:
    """The same of a server that already runs; nothing is started, and nothing ended.

    Raises ConfigError for what is no address, and where there are no prompts for its model;
    ServiceFailed where nothing of SGLang's answers there.
    """
    service = Live.at(url)
    bound = 2 * tie_bound(0, torch.bfloat16)
    bench = LoadBench(plan, _LIVE, None, None, (_LIVE,), bound)
    bench.server = told(service)
    if plan.file is None:
        scale = dataclasses.replace(GPU, vocabulary=vocabulary(bench.server))
        prompts = _drawn(plan, scale)
    else:
        prompts = [(0, read_prompts(plan.file))]
    run = _begin(bench, checkout, machine, command, screen)
    with _interruptible(run):
        try:
            _measure(run, _LIVE, service, prompts, LIKELY)
        except (KdError, OSError) as error:
            bench.failed[_LIVE] = str(error)
            screen.note(f"{_LIVE}: failed")
    run.keep()
    return bench, run.file


def _begin(
    bench: LoadBench,
    checkout: Checkout,
    machine: Machine,
    command: Sequence[str],
    screen: Screen,
) -> _Run:
    commit, dirty = checkout.revision()
    facts = {
        "command": list(command),
        "revision": commit,
        "dirty": dirty,
        "machine": machine.as_json(),
    }
    return _Run(bench, checkout.state / "bench" / f"{bench.run}.json", facts, screen)


@contextlib.contextmanager
def _interruptible(run: _Run) -> Iterator[None]:
    """Ctrl-C ends what is inside, servers and all, and what was measured is kept."""
    try:
        yield
    except KeyboardInterrupt:
        run.bench.interrupted = True
        run.bench.compare()


def _room(plan: Plan, scale: Scale, *, graphs: bool) -> tuple[str, ...]:
    """Arguments for more requests at once than the gates' servers take; the last of two counts."""
    most = max(plan.concurrency, default=0)
    usual = int(scale.arguments[scale.arguments.index("--max-running-requests") + 1])
    if most <= usual:
        return ()
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    wide = ("--cuda-graph-bs-decode", *map(str, sizes)) if graphs and scale.graphs else ()
    return ("--max-running-requests", str(sizes[-1]), *wide)


def _drawn(plan: Plan, scale: Scale) -> list[tuple[int, Prompts]]:
    """Prompts of each length."""
    return [
        (
            length,
            drawn(
                draw_prompts(scale, length, 1 if plan.fresh else plan.prompts, plan.seed),
                fresh=plan.fresh,
                vocabulary=scale.vocabulary,
                seed=plan.seed,
            ),
        )
        for length in plan.lengths
    ]


def _measure(
    run: _Run, name: str, service: Service, found: Sequence[tuple[int, Prompts]], likely: int
) -> None:
    """One server at every length and load. likely: above 0 where its answers are the reference."""
    bench, plan = run.bench, run.bench.plan
    bench.slots[name] = service.load().slots
    url = service.url if isinstance(service, Live) else f"http://127.0.0.1:{service.port}"
    for length, prompts in found:
        if not plan.fresh:
            _once(run, name, service, length, prompts, range(len(prompts)), likely)
        first = 0
        judged = min(_JUDGED_FRESH, plan.prompts) if plan.fresh else len(prompts)
        for concurrency, rate in plan.loads:
            order = Order(
                url,
                prompts,
                plan.new_tokens,
                plan.seconds,
                concurrency,
                rate,
                exactly=plan.soak,
                first=first,
                judged=judged,
                seed=plan.seed,
                silence_s=plan.silence_s,
            )
            point = Point(name, length, concurrency, rate, plan.new_tokens, plan.window_s)
            bench.points.append(point)
            run.screen.note(f"{point.where}: begins")
            _load(run, service, point, order)
            if plan.fresh and likely:
                judged_numbers = range(first, first + judged)
                _once(run, name, service, length, prompts, judged_numbers, likely)
            # A prompt that another point had would be cached.
            first += 1_000_000
            bench.compare()
            run.screen.ended(point)
            run.keep()
            if point.why:
                service.load()  # a server that is gone is asked for nothing more
    bench.leaked[name] = _leaked(service)
    if bench.leaked[name] is None and not bench.live:
        raise ServiceFailed(f"requests run on {_IDLE_S:g} s after the last one was answered")


def _once(
    run: _Run,
    name: str,
    service: Service,
    length: int,
    prompts: Prompts,
    numbers: Sequence[int],
    likely: int,
) -> None:
    """Each of these prompts, asked for once and not timed; the answers of a reference are kept.

    Raises ServiceFailed where one is not as many tokens as were asked for.
    """
    bench = run.bench
    at_once = 1 if bench.live else _AT_ONCE
    for begin in range(0, len(numbers), at_once):
        run.screen.note(
            f"{name}: {begin} of {len(numbers)} prompts of {length or 'the file'} asked once"
        )
        some = numbers[begin : begin + at_once]
        answers = _ask(service, prompts, some, bench.plan.new_tokens, likely)
        if problem := incomplete(answers, bench.plan.new_tokens):
            raise ServiceFailed(f"prompts of {length} tokens, from number {begin}: {problem}")
        if likely:
            bench.references |= {
                (length, number): one for number, one in zip(some, answers, strict=True)
            }


def _ask(
    service: Service, prompts: Prompts, numbers: Sequence[int], new_tokens: int, likely: int
) -> list[Answer]:
    if isinstance(service, Live):
        bodies = [prompts.body(one, new_tokens, stream=False) for one in numbers]
        return [service.answer(body, likely) for body in bodies]
    return service.answers([prompts.tokens(one) for one in numbers], new_tokens, likely=likely)


def _load(run: _Run, service: Service, point: Point, order: Order) -> None:
    """One point, filled tick by tick. An interrupt ends the client, and goes on."""
    try:
        with running(order) as client:
            try:
                for tick in client.ticks():
                    window = point.add(tick)
                    if window is not None:
                        window.used_slots = _used(service)
                        run.keep()
                    run.screen.tick(point, tick)
                point.why = client.why
            except KeyboardInterrupt:
                client.stop()
                for tick in client.rest():
                    point.add(tick)
                point.why = "interrupted"
                raise
    except ClientFailed as error:
        point.why = str(error)


def _used(service: Service) -> int | None:
    """KV slots in use right now, cached prefixes that nobody uses left out; None: not told."""
    with contextlib.suppress(ServiceFailed):
        return dataclasses.replace(service, limit_s=_POLL_S).load().used_slots
    return None


def _leaked(service: Service) -> int | None:
    """Slots that are in use with no request; None where requests of others run on."""
    deadline = time.monotonic() + _IDLE_S
    while True:
        load = service.load()
        # What the scheduler tells may be a step old, so a leak is believed at the end alone.
        if not load.requests and not load.used_slots:
            return 0
        if time.monotonic() > deadline:
            return None if load.requests else load.used_slots
        time.sleep(0.2)


def _document(bench: LoadBench, facts: Mapping[str, Any]) -> dict[str, Any]:
    plan = bench.plan
    return {
        "version": 1,
        "kind": "load",
        "run": bench.run,
        "started": bench.started,
        **facts,
        "library": bench.library,
        "environment": {name: os.environ[name] for name in os.environ if name[:7] == "KDTREE_"},
        "scale": bench.scale,
        "server": bench.server or None,
        "layers": None if bench.live else LAYERS,
        "nodes": bench.nodes,
        "graphs": bench.graphs,
        "plan": {
            **dataclasses.asdict(plan),
            "file": None if plan.file is None else str(plan.file),
            "window_s": plan.window_s or None,
        },
        "right": bench.right,
        "interrupted": bench.interrupted,
        "near_tie_bound": bench.bound,
        "kv_slots": bench.slots,
        "leaked_slots": bench.leaked,
        "points": [
            {
                **point.as_json(),
                "answers_judged": bench.judged(point),
                "differences": [
                    dataclasses.asdict(one) for one in bench.differences.get(point.where, ())
                ],
            }
            for point in bench.points
        ],
        "failed": bench.failed,
    }
