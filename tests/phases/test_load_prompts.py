"""Prompts of a load test: what is sent, and which request has which."""

from __future__ import annotations

import json
import pathlib

import pytest

from kdtree_engine.errors import ConfigError
from phases.load_prompts import drawn, read_prompts

FOUR = [tuple(range(2 + one, 42 + one)) for one in range(4)]


def test_requests_repeat_the_prompts() -> None:
    prompts = drawn(FOUR, fresh=False, vocabulary=64, seed=1)
    assert [prompts.number(one) for one in (0, 3, 4, 9)] == [0, 3, 0, 1]
    body = json.loads(prompts.body(5, 7))
    assert body == {
        "input_ids": list(FOUR[1]),
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 7, "ignore_eos": True},
        "stream": True,
    }
    assert prompts.tokens(5) == FOUR[1]


@pytest.mark.parametrize("length", [4, 8, 40, 200])
def test_a_fresh_prompt_is_as_long_and_has_ends_of_its_own(length: int) -> None:
    first = tuple(range(2, 2 + length))
    prompts = drawn([first], fresh=True, vocabulary=300, seed=1)
    found = [prompts.tokens(one) for one in range(20)]
    assert {len(one) for one in found} == {length}
    assert len(set(found)) == 20 if length > 4 else len(set(found)) > 10
    assert all(2 <= token < 300 for one in found for token in one)
    assert json.loads(prompts.body(3, 7))["input_ids"] == list(found[3])
    assert [prompts.number(one) for one in (0, 9)] == [0, 9]
    again = drawn([first], fresh=True, vocabulary=300, seed=1)
    assert again.tokens(7) == found[7]


def test_a_file_of_prompts(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"input_ids": [3, 4]}\n\n{"input_ids": [5], "why": "more is left out"}\n')
    prompts = read_prompts(file)
    assert (len(prompts), prompts.tokens(1)) == (2, (5,))
    file.write_text('{"text": "say \\"so\\""}\n')
    assert json.loads(read_prompts(file).body(0, 2))["text"] == 'say "so"'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "got none"),
        ('{"text": "a"}\n{"input_ids": [1]}\n', "got input_ids and text"),
        ('{"text": "a"}\n{"input_ids": [true]}\n', "line 2: expected an object"),
        ('{"input_ids": [-1]}', "line 1"),
        ('{"input_ids": []}', "line 1"),
        ('{"text": ""}', "line 1"),
        ("[1, 2]", "line 1"),
        ("{", "line 1"),
    ],
)
def test_a_file_that_is_none(tmp_path: pathlib.Path, text: str, problem: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_prompts(file)
    with pytest.raises(ConfigError, match="nothing"):
        read_prompts(tmp_path / "nothing")
