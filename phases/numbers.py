"""Numbers as a person types them on a command line: `1,4,16` and `4k,65k`."""

from __future__ import annotations

from kdtree_engine.errors import ConfigError

__all__ = ["counts", "lengths"]

_DIGITS = 9


def counts(text: str, option: str, most: int) -> list[int]:
    """`1,16,256` in rising order, each once. Raises ConfigError for others than 1 to `most`."""
    return _numbers(text, option, most, "1,4,16", thousands=False)


def lengths(text: str, option: str, most: int) -> list[int]:
    """Tokens: `4k,65k,100` in rising order, each once, from 1 to `most`.

    k is 1,024; and a power of two is also called by its thousands, so 65k and 64k are both 65,536
    and 200k is 204,800 (plan 0, "Glossary"). Raises ConfigError.
    """
    return _numbers(text, option, most, "4k,16k,65536", thousands=True)


def _numbers(text: str, option: str, most: int, example: str, *, thousands: bool) -> list[int]:
    found = [_number(word.strip().lower(), thousands) for word in text.split(",")]
    right = [one for one in found if one is not None and 1 <= one <= most]
    if len(right) != len(found):
        raise ConfigError(
            f"{option} {text!r:.60}: expected numbers from 1 to {most} with commas, as in {example}"
        )
    return sorted(set(right))


def _number(word: str, thousands: bool) -> int | None:
    digits = word.removesuffix("k") if thousands else word
    if not (digits.isascii() and digits.isdigit() and len(digits) <= _DIGITS):
        return None
    return int(digits) if digits == word else _tokens(int(digits))


def _tokens(thousands: int) -> int:
    powers = (1 << exponent for exponent in range(10, 40))
    called = (power for power in powers if thousands in (power // 1000, power // 1024))
    return next(called, 1024 * thousands)
