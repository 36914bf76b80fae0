"""The entry point `sglang.srt.plugins`: makes `--attention-backend kdtree_mla` exist.

SGLang calls `register` in its launcher, in each scheduler (one for each rank) and in the
detokenizer, and only logs what a plugin raises. So nothing is decided here: the name is
registered, and the checks run where a server makes the backend, in `start_up`. What they find
wrong ends the server there; a server that was not asked for `kdtree_mla` is left alone.
"""

from __future__ import annotations

import logging
import os
from typing import Any, NoReturn

from kdtree_engine.errors import KdError
from kdtree_engine.sglang_ext import compat

__all__ = ["NAME", "create", "register"]

NAME = "kdtree_mla"

_log = logging.getLogger(__name__)


def register() -> None:
    """Register the backend's name. Imports neither the kernel nor SGLang's Triton backend.

    Where SGLang has no place for the name, one line says so; the command line then refuses
    `kdtree_mla`, and the server does not start with it.
    """
    try:
        version = compat.sglang_version()
        compat.register_backend(NAME, version, create)
        compat.draft_on_triton(NAME)
        if compat.can_register_algorithms():
            from kdtree_engine.sglang_ext import ddtree

            ddtree.register()
        if (tier := os.environ.get("KDTREE_DEFRAG")) in ("tier0", "tier1"):
            from kdtree_engine.sglang_ext.defrag import service
            from kdtree_engine.sglang_ext.settings import read_settings

            every = read_settings(os.environ)[0].relocate_every if tier == "tier1" else None
            service.offer(NAME, relocate_every=every)
    except KdError as error:
        _log.error("%s", error)


def create(runner: Any) -> Any:
    """The attention backend for a model runner, or the end of this process with one line."""
    from kdtree_engine.sglang_ext import start_up

    try:
        return start_up.made(runner)
    except KdError as error:
        _stop(error)


def _stop(error: KdError) -> NoReturn:
    """End the scheduler. Its launcher sees it go and ends the server.

    SystemExit and no other exception: SGLang would print a traceback of its own code, in which the
    line is hard to find.
    """
    _log.error("%s; the server stops", error)
    raise SystemExit(1) from error
