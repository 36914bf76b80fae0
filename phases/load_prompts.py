"""Prompts for a load test, as they are sent: drawn ones and those of a file.

They are put into words for the wire before anything is timed. Of prompts that must each be new
only both ends are drawn for each: with another beginning no cached prefix fits, and with another
end the n-gram drafter has not seen it. To draw and write 65,536 tokens at each request would take
the client tens of milliseconds, in which it would note the arrival of others' tokens too late.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import random
from collections.abc import Sequence
from typing import Any

from kdtree_engine.errors import ConfigError
from phases.service import Tokens

__all__ = ["Prompts", "drawn", "read_prompts"]

_OWN = 24


@dataclasses.dataclass(frozen=True)
class Prompts:
    """texts: what follows `input_ids` or `text` in a request, by prompt; each is JSON.

    fresh: whether each request gets a prompt that no other has: two ends of `own` tokens, with ids
    from 2 to `vocabulary`, and the tokens of the first prompt between them.
    """

    texts: tuple[str, ...]
    key: str = "input_ids"
    fresh: bool = False
    own: int = 0
    vocabulary: int = 0
    seed: int = 1

    def __len__(self) -> int:
        return len(self.texts)

    def number(self, request: int) -> int:
        """Which prompt a request has; requests of one prompt must give one answer."""
        return request if self.fresh else request % len(self.texts)

    def body(self, request: int, new_tokens: int, *, stream: bool = True) -> bytes:
        """The whole request. Greedy, and never ended by a token: an answer's length is known."""
        sampling = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
        rest = json.dumps({"sampling_params": sampling, "stream": stream})
        return f'{{"{self.key}":{self._text(request)},{rest[1:]}'.encode()

    def tokens(self, request: int) -> Tokens:
        """The same prompt as tokens. Only where prompts are of tokens."""
        assert self.key == "input_ids"
        return tuple(json.loads(self._text(request)))

    def _text(self, request: int) -> str:
        if not self.fresh:
            return self.texts[request % len(self.texts)]
        draw = random.Random(f"fresh {self.seed} {request}")
        ends = [draw.choices(range(2, self.vocabulary), k=self.own) for _ in range(2)]
        parts = (json.dumps(ends[0])[1:-1], self.texts[0][1:-1], json.dumps(ends[1])[1:-1])
        return f"[{','.join(filter(None, parts))}]"


def drawn(prompts: Sequence[Tokens], *, fresh: bool, vocabulary: int, seed: int) -> Prompts:
    """Those of token ids. fresh: the first alone counts, and gives its length to all."""
    own = min(_OWN, len(prompts[0]) // 4)
    if fresh:
        prompts = [prompts[0][2 * own :]]
    texts = tuple(json.dumps(list(prompt), separators=(",", ":")) for prompt in prompts)
    return Prompts(texts, "input_ids", fresh, own, vocabulary, seed)


def read_prompts(path: pathlib.Path) -> Prompts:
    """A file of JSON lines, each with `input_ids` or each with `text`.

    Raises ConfigError, with the line, where one is neither.
    """
    texts: dict[str, list[str]] = {"input_ids": [], "text": []}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found: Any = json.loads(line)
        except ValueError:
            found = None
        key = next((key for key in texts if isinstance(found, dict) and _fits(key, found)), None)
        if key is None:
            raise ConfigError(
                f"{path}, line {number}: expected an object with input_ids (a list of whole "
                f"numbers) or text, got {line[:60]!r}"
            )
        texts[key].append(json.dumps(found[key]))
    kinds = [key for key, found in texts.items() if found]
    if len(kinds) != 1:
        raise ConfigError(
            f"{path}: expected prompts of one kind, got {' and '.join(kinds) or 'none'}"
        )
    (kind,) = kinds
    return Prompts(tuple(texts[kind]), kind)


def _fits(key: str, found: dict[str, Any]) -> bool:
    value = found.get(key)
    if key == "text":
        return isinstance(value, str) and bool(value)
    whole = isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)
    return whole and bool(value)
