"""Requests that churn a pool: drawn from a seed, or read from a public trace.

A prompt is a list of pieces, (content, tokens): two prompts share a prefix exactly where their
pieces agree, so that a prefix cache sees what it would see of real text.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import json
import math
import pathlib
import random
from collections.abc import Iterable, Sequence
from typing import Any

from kdtree_engine.errors import ConfigError

__all__ = ["Lengths", "Request", "Traffic", "draw", "read_trace"]

BLOCK = 512
"""Tokens of one hash id in Mooncake's traces."""
MOST_TOKENS = 1 << 24
"""Of a prompt or an output: more than any pool has, and as many as a content may have."""
_MOST_CONTENT = 1 << 39
"""Contents are numbered below it, so that every token of one has a number in 63 bits."""


@dataclasses.dataclass(frozen=True)
class Lengths:
    """A distribution of token counts: `fixed:N`, `uniform:LOW:HIGH` or `lognormal:MEDIAN:SIGMA`.

    lognormal: exp(normal(log MEDIAN, SIGMA)), held between MEDIAN / 16 and MEDIAN * 16.
    """

    kind: str
    first: float
    second: float = 0.0

    @staticmethod
    def parse(text: str) -> Lengths:
        """Raises ConfigError for any other text."""
        kind, *numbers = text.split(":")
        try:
            values = [float(number) for number in numbers]
        except ValueError:
            values = []
        wanted = {"fixed": 1, "uniform": 2, "lognormal": 2}.get(kind)
        if (
            len(values) != wanted  # NaN is not between any numbers either
            or not all(0 <= value <= MOST_TOKENS for value in values)
            or values[0] < 1
            or (kind == "uniform" and values[1] < values[0])
        ):
            raise ConfigError(
                f"{text!r} is no distribution of lengths",
                remedy="fixed:N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA",
            )
        return Lengths(kind, *values)

    def draw(self, random_: random.Random) -> int:
        """At least 1."""
        if self.kind == "fixed":
            return round(self.first)
        if self.kind == "uniform":
            return random_.randint(
                math.ceil(self.first), max(math.ceil(self.first), int(self.second))
            )
        middle, most = math.log(self.first), math.log(16)
        drawn = random_.gauss(middle, self.second)
        return max(1, round(math.exp(min(max(drawn, middle - most), middle + most))))

    def __str__(self) -> str:
        values = (self.first,) if self.kind == "fixed" else (self.first, self.second)
        return ":".join([self.kind, *(f"{value:g}" for value in values)])


@dataclasses.dataclass(frozen=True)
class Request:
    """arrival_s: seconds from the start. prompt: pieces (content, tokens). output: tokens.

    abort_after: output tokens after which its client leaves; None for one that stays.
    """

    arrival_s: float
    prompt: tuple[tuple[int, int], ...]
    output: int
    abort_after: int | None = None

    @property
    def prompt_tokens(self) -> int:
        return sum(tokens for _, tokens in self.prompt)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What `draw` draws from.

    rate: arrivals a second, exponential gaps. shared: the share of requests whose prompt starts
    with one of `prefixes` common beginnings of `prefix` tokens (no more than the prompt less one).
    aborts: the share of requests whose client leaves, after a uniform part of the output.
    """

    requests: int = 1000
    rate: float = 1.5
    prompt: Lengths = Lengths("lognormal", 12288, 0.5)
    output: Lengths = Lengths("lognormal", 512, 0.8)
    shared: float = 0.5
    prefixes: int = 16
    prefix: Lengths = Lengths("fixed", 2048)
    aborts: float = 0.1


def draw(traffic: Traffic, seed: int) -> list[Request]:
    """The same requests for the same arguments, on any machine."""
    random_ = random.Random(seed)
    common = [(number, traffic.prefix.draw(random_)) for number in range(traffic.prefixes)]
    clock, requests = 0.0, []
    for number in range(traffic.requests):
        clock += random_.expovariate(traffic.rate)
        tokens, output = traffic.prompt.draw(random_), traffic.output.draw(random_)
        own = traffic.prefixes + number
        prompt: tuple[tuple[int, int], ...] = ((own, tokens),)
        if common and random_.random() < traffic.shared and tokens > 1:
            content, length = random_.choice(common)
            length = min(length, tokens - 1)
            prompt = ((content, length), (own, tokens - length))
        leaves = random_.random() < traffic.aborts
        after = random_.randint(1, output) if leaves else None
        requests.append(Request(clock, prompt, output, after))
    return requests


def read_trace(path: pathlib.Path) -> list[Request]:
    """Requests of a public trace, by arrival, the first at 0 s. ConfigError for any other file.

    `*.csv`: the Azure LLM inference traces, TIMESTAMP,ContextTokens,GeneratedTokens; no prompt
    shares anything, as they record no contents. Any other name: Mooncake's lines of JSON with
    timestamp (ms), input_length, output_length and hash_ids, one for each 512 tokens: prompts share
    the blocks whose ids they share.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() == ".csv":
            found = list(_azure(csv.DictReader(text.splitlines())))
        else:
            found = list(_mooncake(json.loads(line) for line in text.splitlines() if line.strip()))
    except (OSError, ValueError, KeyError, TypeError, RecursionError, csv.Error) as error:
        raise ConfigError(
            f"{path} is no trace: {type(error).__name__}: {error}",
            remedy="Azure's CSV (TIMESTAMP,ContextTokens,GeneratedTokens) or Mooncake's JSON lines",
        ) from error
    found = [one for one in found if one.prompt_tokens and one.output]
    if not found:
        raise ConfigError(f"{path} has no request")
    found.sort(key=lambda one: one.arrival_s)
    first = found[0].arrival_s
    return [dataclasses.replace(one, arrival_s=one.arrival_s - first) for one in found]


def _azure(rows: Iterable[dict[str, str]]) -> Iterable[Request]:
    for number, row in enumerate(rows):
        at = row["TIMESTAMP"].strip()
        # Seven digits of a second, which Python reads from 3.11 on only up to six.
        whole, _, part = at.partition(".")
        # All in one zone, whichever: what counts are the differences, on any machine the same.
        time = datetime.datetime.fromisoformat(whole).replace(tzinfo=datetime.UTC)
        digits = "".join(char for char in part if char in "0123456789")[:6]
        seconds = time.timestamp() + (float(f"0.{digits}") if digits else 0.0)
        tokens, output = (
            _whole(int(row[name]), f"request {number + 1}: {name}")
            for name in ("ContextTokens", "GeneratedTokens")
        )
        yield Request(seconds, ((number, tokens),), output)


def _mooncake(lines: Iterable[dict[str, Any]]) -> Iterable[Request]:
    for number, line in enumerate(lines, 1):
        tokens, output = (
            _whole(line[name], f"request {number}: {name}")
            for name in ("input_length", "output_length")
        )
        ids = [
            _whole(one, f"request {number}: hash_ids", _MOST_CONTENT)
            for one in list(line["hash_ids"])
        ]
        at = line["timestamp"]
        if isinstance(at, bool) or not isinstance(at, (int, float)) or not 0 <= at < 1e15:
            raise ValueError(f"request {number}: timestamp: expected milliseconds, got {at!r:.40}")
        yield Request(at / 1000, _blocks(tokens, ids), output)


def _whole(value: object, what: str, most: int = MOST_TOKENS) -> int:
    """The number, if it is a whole one below `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < most:
        raise ValueError(f"{what}: expected a whole number below {most}, got {value!r:.40}")
    return value


def _blocks(tokens: int, ids: Sequence[int]) -> tuple[tuple[int, int], ...]:
    if len(ids) != -(-tokens // BLOCK):
        raise ValueError(f"{len(ids)} hash ids for {tokens} tokens")
    left = [min(BLOCK, tokens - number * BLOCK) for number in range(len(ids))]
    return tuple(zip(ids, left, strict=True))
