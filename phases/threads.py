"""One CPU thread for checks on small tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["single_threaded"]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def single_threaded(check: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """`check` with one torch thread on the CPU; the number from before is put back afterwards.

    On tensors of some thousand values a second thread gains nothing, and on a busy machine the
    threads' waiting for each other made the token checks eight times slower.
    """

    @functools.wraps(check)
    def wrapped(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return check(*args, **kwargs)
        finally:
            torch.set_num_threads(before)

    return wrapped
