"""An n-gram worker that is given the ends of prompts drafts from the same tokens as before."""

from __future__ import annotations

import array
import copy
import random
import types
from typing import Any

import pytest

from kdtree_engine.errors import MissingError
from kdtree_engine.sglang_ext import compat
from kdtree_engine.sglang_ext.prompt_ends import given_ends, is_given_ends

DEPTH = 5


class Worker:
    """Asks for prompts as SGLang 0.5.17 does, and keeps what it took of each."""

    max_trie_depth = DEPTH

    def __init__(self) -> None:
        self.listed: list[int] = []

    def read(self, batch: Any) -> list[tuple[str, list[int], int]]:
        found = []
        for request in batch.reqs:
            prompt, answer = list(request.origin_input_ids), list(request.output_ids[-DEPTH:])
            self.listed.append(len(prompt))
            missing = DEPTH - len(answer)
            context = prompt[-missing:] + answer if missing > 0 else answer[-DEPTH:]
            length = len(request.origin_input_ids) + len(request.output_ids)
            found.append((request.rid, context, length))
        return found if batch.grammar_needs_sync() else found[::-1]


def batch(seed: int) -> Any:
    """Requests with prompts and answers of none to a few more tokens than the drafter looks at."""
    print(f"seed {seed}")
    draw = random.Random(seed)

    def tokens(least: int) -> array.array[int]:
        return array.array("q", draw.choices(range(1000), k=draw.randint(least, 3 * DEPTH)))

    requests = [
        types.SimpleNamespace(rid=str(number), origin_input_ids=tokens(1), output_ids=tokens(0))
        for number in range(8)
    ]
    return types.SimpleNamespace(reqs=requests, grammar_needs_sync=lambda: seed % 2)


@pytest.mark.parametrize("seed", range(20))
def test_the_context_is_the_same(seed: int) -> None:
    given = batch(seed)
    assert given_ends(Worker.read)(Worker(), given) == Worker().read(given)


def test_no_more_than_the_end_is_listed() -> None:
    given = batch(3)
    given.reqs[0].origin_input_ids = array.array("q", range(10_000))
    worker = Worker()
    given_ends(Worker.read)(worker, given)
    assert max(worker.listed) == DEPTH


def test_what_else_a_worker_asks_for_is_the_originals() -> None:
    """Items of a prompt, other attributes, and what is set."""

    def asks(worker: Worker, batch: Any) -> Any:
        request = batch.reqs[0]
        request.seen = True
        batch.flag = len(request.origin_input_ids)
        return request.origin_input_ids[-2:], request.origin_input_ids[0], copy.copy(request).rid

    given = batch(3)
    prompt = given.reqs[0].origin_input_ids
    assert given_ends(asks)(Worker(), given) == (prompt[-2:], prompt[0], "0")
    assert given.reqs[0].seen
    assert given.flag == len(prompt)


def test_a_wrapped_method_is_still_called_what_it_is() -> None:
    wrapped = given_ends(Worker.read)
    assert wrapped.__name__ == "read"
    assert is_given_ends(wrapped)
    assert not is_given_ends(Worker.read)


def test_the_requests_are_left_as_they_are() -> None:
    given = batch(4)
    before = [vars(request).copy() for request in given.reqs]
    given_ends(Worker.read)(Worker(), given)
    assert [vars(request) for request in given.reqs] == before


@pytest.fixture
def worker_class(monkeypatch: pytest.MonkeyPatch) -> type:
    """What stands where SGLang keeps its n-gram worker."""
    made = type(
        "NGRAMWorker",
        (),
        {"_prepare_draft_tokens": Worker.read, "_update_ngram_corpus": Worker.read},
    )
    monkeypatch.setattr(compat, "_found", lambda name: made if "NGRAMWorker" in name else None)
    return made


def test_both_readers_of_the_release_are_given_ends_once(worker_class: Any) -> None:
    assert compat.read_prompt_ends("0.5.17")
    first = worker_class._prepare_draft_tokens
    assert is_given_ends(first)
    assert is_given_ends(worker_class._update_ngram_corpus)
    compat.read_prompt_ends("0.5.17")
    assert worker_class._prepare_draft_tokens is first


def test_a_release_that_takes_ends_itself_is_left_alone(worker_class: Any) -> None:
    assert not compat.read_prompt_ends("0.5.23")
    assert worker_class._prepare_draft_tokens is Worker.read


def test_a_worker_without_a_reader_is_named(worker_class: Any) -> None:
    del worker_class._update_ngram_corpus
    with pytest.raises(MissingError, match=r"0\.5\.17 lacks _update_ngram_corpus"):
        compat.read_prompt_ends("0.5.17")
    assert worker_class._prepare_draft_tokens is Worker.read, "nothing is half done"
