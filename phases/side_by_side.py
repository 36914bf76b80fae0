"""Several context managers entered together, as servers that take a minute each to start."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

__all__ = ["entered"]

Entered = TypeVar("Entered")


@contextlib.contextmanager
def entered(
    managers: Sequence[AbstractContextManager[Entered]], *, at_once: bool
) -> Iterator[list[Entered]]:
    """What each gives, in their order; all are left again, the last one first.

    at_once: they are entered at the same time, each in a thread; else one after the other. Where
    one raises, those that were entered are left, once the others have been entered or have raised.
    """
    with contextlib.ExitStack() as inside:
        if not at_once:
            yield [inside.enter_context(one) for one in managers]
            return
        with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, len(managers))) as pool:
            found = list(pool.map(inside.enter_context, managers))
        yield found
