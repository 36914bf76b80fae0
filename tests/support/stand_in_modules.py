"""Modules that stand in for SGLang's, for what the plugin does with them."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest


def without_sglang(monkeypatch: pytest.MonkeyPatch) -> Callable[..., types.ModuleType]:
    """Hide SGLang; returns `add`: `add("a.b", name=...)` puts a module there with these names."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sglang", None)

    def add(name: str, **contents: Any) -> types.ModuleType:
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            prefix = ".".join(parts[:count])
            if sys.modules.get(prefix) is None:
                monkeypatch.setitem(sys.modules, prefix, types.ModuleType(prefix))
        vars(sys.modules[name]).update(contents)
        return sys.modules[name]

    return add
