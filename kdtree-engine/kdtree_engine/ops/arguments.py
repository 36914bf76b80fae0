"""What the tree operations accept, checked on the host alone: no tensor's contents are read.

A fault raises TypeError (a wrong type or dtype) or ValueError (everything else); its text names the
argument, what was expected and what was got.
"""

from __future__ import annotations

import torch

__all__ = ["check_integer", "check_tensor", "short"]


def check_tensor(
    name: str,
    value: object,
    shape: tuple[int | str, ...],
    dtypes: tuple[torch.dtype, ...],
    *,
    like: tuple[str, torch.device] | None = None,
    contiguous: bool = True,
) -> None:
    """Checks a tensor's device, dtype, shape and strides.

    shape: an extent for each dimension; a word where any extent of at least 1 will do.
    like: the name and device of the argument whose device it must have.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
    if like is not None and value.device != like[1]:
        raise ValueError(
            f"{name}: expected device {like[1]}, that of {like[0]}, got {value.device}"
        )
    if value.dtype not in dtypes:
        raise TypeError(
            f"{name}: expected dtype {' or '.join(map(short, dtypes))}, got {short(value.dtype)}"
        )
    fits = value.dim() == len(shape) and all(
        have >= 1 if isinstance(want, str) else have == want
        for have, want in zip(value.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join(map(str, shape))
        raise ValueError(f"{name}: expected shape [{wanted}], got {list(value.shape)}")
    if contiguous and not value.is_contiguous():
        raise ValueError(
            f"{name}: expected contiguous strides, got {tuple(value.stride())} "
            f"for shape {list(value.shape)}"
        )


def check_integer(name: str, value: object, low: int, high: int) -> None:
    """Checks that `value` is an integer in low..high."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if not low <= value <= high:
        raise ValueError(f"{name}: expected {low}..{high}, got {value}")


def short(dtype: torch.dtype) -> str:
    """A dtype's name as people write it."""
    return str(dtype).removeprefix("torch.")
