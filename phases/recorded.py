"""The tokens that a live service must give: recorded once from plain decoding.

A promotion asks the service the same prompts and compares. In 16 bits two right servers differ now
and then, where two tokens are almost equally likely; so the record says how likely the others were,
and how much that moved between a prompt asked alone and the same among others. A first difference
within twice that is a near-tie, as in the gates of phases 3 and 4; what follows it is another text.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any

from kdtree_engine.errors import ConfigError
from phases.service import Answer
from phases.service_tokens import moved

__all__ = ["Expected", "draw_prompts", "expected", "without_speculation"]

_DISTINCT = 64
_TIE = 0.01
"""Natural log of probability: two closer than this are equal whatever was measured, on a GPU."""
_UNEVEN = 0.25
"""A server that moves more than this by itself would excuse anything."""
_LENGTHS = (7, 33, 120, 400)


def draw_prompts(
    *, vocabulary: int, positions: int | None, count: int, new_tokens: int, seed: int = 1
) -> list[list[int]]:
    """`count` ragged prompts of token ids, of few distinct ones, so that n-grams come again.

    vocabulary: of the model. positions: its longest context; None where that is not known.
    Raises ConfigError for a model that takes none of them.
    """
    draw = random.Random(seed)
    known = [draw.randrange(vocabulary) for _ in range(_DISTINCT)]
    room = max(_LENGTHS) + count if positions is None else positions - new_tokens - 1
    if room < 1:
        raise ConfigError(
            f"the model takes {positions} tokens: too few for {new_tokens} new ones",
            remedy="lower health.new_tokens in remote/hosts.yaml",
        )
    prompts = []
    for number in range(count):
        length = min(room, _LENGTHS[number % len(_LENGTHS)] + number // len(_LENGTHS))
        half = [draw.choice(known) for _ in range((length + 1) // 2)]
        prompts.append((half + half)[:length])  # what comes again is what a drafter finds
    return prompts


@dataclasses.dataclass(frozen=True)
class Expected:
    """checks: what `remote.promoter` compares with. rounding: what one server moved by itself."""

    checks: list[dict[str, Any]]
    rounding: float


def expected(record: Mapping[str, Any]) -> Expected:
    """What a service must say of the recorded prompts.

    Raises ConfigError for a record of a server that is not certain of its own tokens, and for one
    that cannot be read.
    """
    try:
        alone, together = (list(map(_answer, record[name])) for name in ("alone", "together"))
        rounding = max((moved(*two) for two in zip(alone, together, strict=True)), default=0.0)
        checks = [
            {
                "prompt": [int(token) for token in prompt],
                "tokens": list(answer.tokens),
                "others": _near_ties(answer, max(2 * rounding, _tie(rounding))),
            }
            for prompt, answer in zip(record["prompts"], together, strict=True)
        ]
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"the recorded tokens cannot be read: {error!r:.300}", remedy="kd record"
        ) from error
    if not checks or not all(check["tokens"] for check in checks):
        raise ConfigError("the recorded tokens are none at all", remedy="kd record")
    if rounding > _UNEVEN:
        raise ConfigError(
            f"the recorded server moved its own tokens by {rounding:.3f} (log probability): with "
            f"that any token would do, expected at most {_UNEVEN}",
            remedy="serve the model in another dtype, then kd record",
        )
    return Expected(checks, rounding)


def _tie(rounding: float) -> float:
    """In 32 bits nothing is a near-tie that the server itself does not move."""
    return _TIE if rounding > 1e-4 else 0.0


def _answer(said: Mapping[str, Any]) -> Answer:
    likely = tuple(
        tuple((float(chance), int(token)) for chance, token in step) for step in said["likely"]
    )
    tokens = tuple(map(int, said["tokens"]))
    if len(likely) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens and {len(likely)} steps of likely ones")
    return Answer(tokens, likely=likely)


def _near_ties(answer: Answer, slack: float) -> dict[str, list[int]]:
    """Of each step the tokens that were almost as likely as the one that was chosen."""
    found = {}
    for step, (token, likely) in enumerate(zip(answer.tokens, answer.likely, strict=True)):
        best = max(chance for chance, _ in likely)
        others = [one for chance, one in likely if one != token and best - chance <= slack]
        if others and slack > 0:
            found[str(step)] = others
    return found


def without_speculation(arguments: Sequence[str]) -> tuple[str, ...]:
    """A server's arguments without those of speculation, values and all."""
    kept: list[str] = []
    skipping = False
    for argument in arguments:
        if argument.startswith("--speculative-"):
            skipping = "=" not in argument
            continue
        if argument.startswith("--"):
            skipping = False
        if not skipping:
            kept.append(argument)
    return tuple(kept)
