"""The end of each prompt, for an n-gram drafter that asks for the whole and looks at the end.

SGLang 0.5.17 turns each prompt of a batch into a list twice a step, to take the last few tokens of
it: 1.4 ms each at 65k tokens, while the GPU waits. 0.5.23 takes the end alone. What is here stands
in for a batch in such a call: the same requests, whose prompts have their true length and give
their last tokens when they are listed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

__all__ = ["given_ends", "is_given_ends"]

_MARK = "_kdtree_given_ends"


class _Prompt:
    """A prompt that is as long as it is, and of which only the last `count` tokens can be had."""

    def __init__(self, tokens: Sequence[int], count: int) -> None:
        self._tokens, self._count = tokens, count

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens[-self._count :])

    def __getitem__(self, place: Any) -> Any:
        return self._tokens[place]


class _StandIn:
    """Something with a few attributes of its own; the others, set ones too, are the original's."""

    def __init__(self, original: Any, **own: Any) -> None:
        vars(self).update(own, _original=original)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # as of a copy that has nothing yet
            raise AttributeError(name)
        return getattr(self._original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._original, name, value)


def _ended(batch: Any, count: int) -> Any:
    requests = [
        _StandIn(request, origin_input_ids=_Prompt(request.origin_input_ids, count))
        for request in batch.reqs
    ]
    return _StandIn(batch, reqs=requests)


def given_ends(method: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`method(worker, batch)` of an n-gram worker, which then lists the ends of prompts alone.

    Listed, a prompt has its last `worker.max_trie_depth` tokens; its length and its items are true.
    """

    @functools.wraps(method)
    def called(worker: Any, batch: Any) -> Any:
        return method(worker, _ended(batch, worker.max_trie_depth))

    setattr(called, _MARK, True)
    return called


def is_given_ends(method: Any) -> bool:
    """Whether `method` comes from `given_ends` itself."""
    return hasattr(method, _MARK)
