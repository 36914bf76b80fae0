"""Numbers as a person types them."""

from __future__ import annotations

import pytest

from kdtree_engine.errors import ConfigError
from phases.numbers import counts, lengths


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("4k,16k,65k", [4096, 16_384, 65_536]),
        ("64k, 1K", [1024, 65_536]),
        ("131k,262k,128k", [131_072, 262_144]),
        ("200k,3k,100", [100, 3072, 204_800]),
        ("65536,65k", [65_536]),
    ],
)
def test_thousands_are_what_the_field_calls_so(text: str, tokens: list[int]) -> None:
    assert lengths(text, "--context", 1 << 20) == tokens


def test_the_glossary_names_the_same_numbers() -> None:
    assert lengths("65k", "--context", 1 << 20) == [65_536]
    assert lengths("200k", "--context", 1 << 20) == [204_800]


def test_counts_rise_and_come_once() -> None:
    assert counts("16,1, 4,1", "--batch", 1024) == [1, 4, 16]


@pytest.mark.parametrize(
    "text",
    ["", "k", "0", "0k", "-4k", "4m", "4k,", "4kk", "1e3", "1.5k", "2000k", "٤", "9" * 5000 + "k"],
)
def test_what_is_no_length_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"--context .*expected numbers from 1 to 1048576"
    ) as error:
        lengths(text, "--context", 1 << 20)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "4k", "0", "1025", "1;2", "-1"])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--batch .*expected numbers from 1 to 1024"):
        counts(text, "--batch", 1024)
