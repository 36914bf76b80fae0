"""The entry point."""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    version = os.environ.get("KD_TEST_SGLANG_VERSION")
    if version:
        from kdtree_engine.sglang_ext import compat

        compat.sglang_version = lambda: version
    if os.environ.get("KD_TEST_REMOVED"):
        HookRegistry.register("kdtree_engine.sglang_ext.start_up.made", _remove, HookType.BEFORE)


def _remove(*_: Any, **__: Any) -> None:
    module, _, path = os.environ["KD_TEST_REMOVED"].partition(":")
    above, _, last = path.rpartition(".")
    owner = importlib.import_module(module)
    delattr(functools.reduce(getattr, filter(None, above.split(".")), owner), last)
