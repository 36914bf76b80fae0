"""What a live service is asked, and what it must say."""

from __future__ import annotations

from typing import Any

import pytest

from kdtree_engine.errors import ConfigError
from phases.recorded import draw_prompts, expected, without_speculation


def likely(*chances: float) -> list[list[float]]:
    """Of tokens 10, 11, ... in this order."""
    return [[chance, 10 + number] for number, chance in enumerate(chances)]


def record(alone: list[Any], together: list[Any]) -> dict[str, Any]:
    """Of one prompt, both times after the same token 10."""
    one, other = ({"tokens": [10] * len(steps), "likely": steps} for steps in (alone, together))
    return {"prompts": [[1, 2]], "alone": [one], "together": [other]}


GOOD = {"tokens": [10], "likely": [likely(-1.0, -2.0)]}


def test_prompts_are_ragged_and_come_again_and_fit() -> None:
    prompts = draw_prompts(vocabulary=1000, positions=None, count=6, new_tokens=8)
    assert [len(prompt) for prompt in prompts] == [7, 33, 120, 400, 8, 34]
    assert prompts == draw_prompts(vocabulary=1000, positions=None, count=6, new_tokens=8)
    assert prompts[3][:200] == prompts[3][200:]
    assert len({token for prompt in prompts for token in prompt}) <= 64
    short = draw_prompts(vocabulary=4, positions=64, count=4, new_tokens=8)
    assert [len(prompt) for prompt in short] == [7, 33, 55, 55]
    assert all(0 <= token < 4 for prompt in short for token in prompt)


def test_a_model_without_room_is_said_so() -> None:
    with pytest.raises(ConfigError, match="takes 8 tokens: too few for 8 new ones"):
        draw_prompts(vocabulary=4, positions=8, count=1, new_tokens=8)


def test_in_32_bits_every_token_must_be_the_recorded_one() -> None:
    steps = [likely(-1.0, -1.0000001, -5.0)]
    found = expected(record(steps, steps))
    assert found.checks == [{"prompt": [1, 2], "tokens": [10], "others": {}}]
    assert found.rounding == 0


def test_in_16_bits_what_is_almost_as_likely_may_stand_there() -> None:
    """Twice what the server moved by itself: 0.04, here."""
    alone = [likely(-1.0, -1.10, -5.0), likely(-1.0, -1.03, -1.05)]
    together = [likely(-1.0, -1.08, -5.0), likely(-1.0, -1.03, -1.05)]
    found = expected(record(alone, together))
    assert found.rounding == pytest.approx(0.02)
    assert found.checks[0]["others"] == {"1": [11]}


def test_where_the_server_parts_from_itself_that_counts() -> None:
    one = {"tokens": [10, 10], "likely": [likely(-1.0, -1.02)] * 2}
    other = {"tokens": [11, 5], "likely": [[[-1.0, 11], [-1.01, 10]], [[-1.0, 5], [-9.0, 6]]]}
    found = expected({"prompts": [[1]], "alone": [one], "together": [other]})
    assert found.rounding == pytest.approx(0.03)
    assert found.checks[0]["others"] == {"0": [10]}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "cannot be read"),
        ({"prompts": ["x"], "alone": [GOOD], "together": [GOOD]}, "cannot be read"),
        ({"prompts": [[float("inf")]], "alone": [GOOD], "together": [GOOD]}, "cannot be read"),
        (
            {"prompts": [[1]], "alone": [GOOD], "together": [GOOD | {"tokens": [float("inf")]}]},
            "cannot be read",
        ),
        ({"prompts": [[1]], "alone": [], "together": []}, "cannot be read"),
        ({"prompts": [], "alone": [], "together": []}, "none at all"),
        (record([], []), "none at all"),
        (record([likely(-1.0, -2.0)], [likely(-1.0, -1.5)]), r"moved its own tokens by 0\.500"),
    ],
)
def test_a_record_that_says_nothing_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        expected(given)


def test_speculation_is_left_out_with_its_values() -> None:
    arguments = (
        *("--model-path", "/a", "--speculative-algorithm", "NGRAM", "--tp-size", "1"),
        *("--speculative-num-steps=3", "--page-size", "1", "--speculative-token-map", "/b"),
    )
    assert without_speculation(arguments) == (
        *("--model-path", "/a", "--tp-size", "1", "--page-size", "1"),
    )
