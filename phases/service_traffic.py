"""Mixed traffic on a server: ragged lengths, shared prefixes, aborts, callers that hang up.

Every answer is held against the reference's to the same prompt, those of aborted requests as far as
they go. When the traffic has ended, nothing may run and no KV slot may be in use: each is free, or
holds a cached prefix.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import random
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator, Sequence

from phases.gate import FailureKind, Figure, GateFailure
from phases.service import Answer, Service, ServiceFailed, Tokens, plain_text
from phases.service_tokens import LIKELY, Comparison, Difference, compare_answer, moved

__all__ = [
    "Traffic",
    "demand_traffic",
    "leaks_in",
    "mixed_prompts",
    "room_for_aborted",
    "run_traffic",
    "traffic_rounding",
]

_WORKERS = 8
_IDLE_LIMIT_S = 60.0
_LEAK_WORDS = ("memory leak detected", "Scheduler hit an exception")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """requests: sent. aborted: answered, and cut short. hung_up: left by their caller."""

    seconds: float
    requests: int
    aborted: int
    hung_up: int
    comparison: Comparison


def mixed_prompts(vocabulary: int, longest: int, count: int, seed: int) -> list[Tokens]:
    """Prompts from a few tokens to `longest`; every second one begins as the one before it."""
    draw = random.Random(f"traffic {seed}")
    prompts: list[Tokens] = []
    for number in range(count):
        # Spread over the orders of magnitude, so that short ones are as many as long ones.
        size = max(3, round(longest ** draw.random()))
        head: Tokens = prompts[-1][: size // 2] if number % 2 else ()
        own = draw.choices(range(2, vocabulary), k=max(1, size - len(head)))
        prompts.append((*head, *own))
    return prompts


def room_for_aborted(nodes: int) -> int:
    """How many tokens more than was asked for an aborted answer may have.

    SGLang does not cut those: the tree that was verified last may have given more, and one that was
    under way.
    """
    return 2 * nodes


def run_traffic(
    service: Service,
    prompts: Sequence[Tokens],
    reference: Sequence[Answer],
    *,
    seconds: float,
    bound: float,
    seed: int,
    nodes: int,
    workers: int = _WORKERS,
    note: Callable[[str], None] = lambda text: None,
) -> Traffic:
    """`workers` callers for so long; then the checks that nothing runs and nothing is held.

    reference: an answer to each prompt, with its likely tokens, `room_for_aborted` longer than the
        longest that is asked for. nodes: of the server's trees.
    bound: what is a near-tie, as in `service_tokens.compare_answer`.
    Raises GateFailure for a leak, ServiceFailed for a request that failed, an abort among them.
    """
    begun = time.monotonic()
    deadline = begun + seconds
    counts: collections.Counter[str] = collections.Counter()
    differences: list[Difference] = []
    lock = threading.Lock()
    beyond = room_for_aborted(nodes)
    longest = max(1, len(reference[0].tokens) - beyond)

    def count(numbers: Sequence[int], wanted: int, answers: Sequence[Answer], *, cut: bool) -> None:
        for number, answer in zip(numbers, answers, strict=True):
            ended_early = cut and answer.ending == "abort"
            whole, got = reference[number], answer.tokens
            most = wanted + beyond if ended_early else wanted
            expected = dataclasses.replace(whole, tokens=whole.tokens[:most])
            where = f"traffic, prompt {number}"
            same, difference = compare_answer(where, got, expected, bound, partial=ended_early)
            with lock:
                counts["answers"] += 1
                counts["tokens"] += same
                counts["wanted"] += len(got) if ended_early else len(expected.tokens)
                counts["aborted"] += ended_early
                counts["verified"] += answer.verified
                counts["produced"] += max(0, len(answer.tokens) - 1)
                differences.extend([difference] if difference else [])

    def call(worker: int) -> None:
        draw = random.Random(f"{seed} {worker}")
        turn = 0
        while time.monotonic() < deadline:
            turn += 1
            numbers = [draw.randrange(len(prompts)) for _ in range(draw.choice((1, 1, 2, 4)))]
            wanted = draw.randint(1, longest)
            kind = draw.random()
            if kind < 0.15:
                numbers = numbers[:1]
            with lock:
                counts["requests"] += len(numbers)
                note(f"{counts['requests']} requests")
            if kind < 0.15:
                name = f"traffic-{seed}-{worker}-{turn}"
                with _aborted(service, name, draw.uniform(0.0, 0.3)):
                    asked = [prompts[numbers[0]]]
                    count(numbers, wanted, service.answers(asked, wanted, names=[name]), cut=True)
            elif kind < 0.3:
                asked = [prompts[number] for number in numbers]
                try:
                    answers = service.answers(asked, wanted, limit_s=draw.uniform(0.005, 0.2))
                except ServiceFailed as error:
                    if not _hung_up(error):
                        raise
                    with lock:
                        counts["hung up"] += len(numbers)
                else:
                    count(numbers, wanted, answers, cut=False)
            else:
                asked = [prompts[number] for number in numbers]
                count(numbers, wanted, service.answers(asked, wanted), cut=False)

    with concurrent.futures.ThreadPoolExecutor(max_workers=workers) as pool:
        for done in [pool.submit(call, worker) for worker in range(workers)]:
            done.result()
    lasted = time.monotonic() - begun
    _is_idle_and_empty(service)
    return Traffic(
        seconds=lasted,
        requests=counts["requests"],
        aborted=counts["aborted"],
        hung_up=counts["hung up"],
        comparison=Comparison(
            "traffic",
            answers=counts["answers"],
            tokens=counts["tokens"],
            wanted=counts["wanted"],
            verified=counts["verified"],
            produced=counts["produced"],
            differences=tuple(differences),
        ),
    )


def traffic_rounding(
    service: Service,
    prompts: Sequence[Tokens],
    reference: Sequence[Answer],
    *,
    seconds: float,
    seed: int,
    workers: int = _WORKERS,
    note: Callable[[str], None] = lambda text: None,
) -> float:
    """How much a server moves its own tokens in such traffic, as `service_tokens.moved` has it.

    Requests run together as they come, and begin with whatever is cached: a few batches of chosen
    sizes show less than half a million tokens do. reference: what it said of each prompt itself.
    """
    deadline = time.monotonic() + seconds
    longest = len(reference[0].tokens)
    answered = 0
    lock = threading.Lock()

    def call(worker: int) -> float:
        nonlocal answered
        draw = random.Random(f"rounding {seed} {worker}")
        largest = 0.0
        while time.monotonic() < deadline:
            numbers = [draw.randrange(len(prompts)) for _ in range(draw.choice((1, 1, 2, 4)))]
            asked = [prompts[number] for number in numbers]
            answers = service.answers(asked, draw.randint(1, longest), likely=LIKELY)
            for number, answer in zip(numbers, answers, strict=True):
                largest = max(largest, moved(reference[number], answer))
            with lock:
                answered += len(numbers)
                note(f"{answered} answers to traffic of its own")
        return largest

    with concurrent.futures.ThreadPoolExecutor(max_workers=workers) as pool:
        return max(pool.map(call, range(workers)))


def demand_traffic(traffic: Traffic, figures: Sequence[Figure] = ()) -> None:
    """Raises GateFailure where some of what makes traffic mixed never happened."""
    for what, found in (
        ("answers", traffic.comparison.answers),
        ("aborted requests", traffic.aborted),
        ("callers that hung up", traffic.hung_up),
    ):
        if not found:
            raise GateFailure(
                FailureKind.LAUNCH,
                f"traffic: {what}: expected at least 1, got 0 of {traffic.requests} requests in "
                f"{traffic.seconds:.0f} s",
                figures,
            )


def leaks_in(log: str) -> list[str]:
    """Lines in which SGLang says that it lost slots or that something broke."""
    return [line for line in log.splitlines() if any(words in line for words in _LEAK_WORDS)]


@contextlib.contextmanager
def _aborted(service: Service, name: str, after: float) -> Iterator[None]:
    """The request of this name is aborted after so many seconds; raises what the abort raised."""
    failed: list[Exception] = []

    def abort() -> None:
        try:
            service.abort(name)
        except Exception as error:  # a thread has nobody to tell
            failed.append(error)

    timer = threading.Timer(after, abort)
    timer.start()
    try:
        yield
    finally:
        timer.join()
    if failed:
        raise failed[0]


def _hung_up(error: ServiceFailed) -> bool:
    """Whether this side ran out of time: urllib says it in its own way before the answer begins."""
    cause = error.__cause__
    if isinstance(cause, urllib.error.URLError):
        return isinstance(cause.reason, TimeoutError)
    return isinstance(cause, TimeoutError)


def _is_idle_and_empty(service: Service) -> None:
    """Raises GateFailure unless every request ends soon, and then no slot is in use."""
    deadline = time.monotonic() + _IDLE_LIMIT_S
    while service.load().requests:
        if time.monotonic() > deadline:
            raise GateFailure(
                FailureKind.TIMEOUT,
                f"{service.load().requests} requests run on {_IDLE_LIMIT_S:g} s after the last "
                "caller left",
            )
        time.sleep(0.2)
    deadline = time.monotonic() + _IDLE_LIMIT_S
    while held := service.load().used_slots:  # what the scheduler tells may be a step old
        if time.monotonic() > deadline:
            raise GateFailure(
                FailureKind.NUMERICAL,
                f"{held} KV slots are in use with no request, and are no prefix: they leaked",
            )
        time.sleep(0.2)
    if said := leaks_in(plain_text(service.log)):
        raise GateFailure(FailureKind.LAUNCH, f"the server's log says: {said[0]}")
