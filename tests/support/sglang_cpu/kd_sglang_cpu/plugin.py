"""The entry point."""

from __future__ import annotations

import os


def register() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("kd_sglang_cpu: set TRITON_INTERPRET=1 before the server starts")
    from kd_sglang_cpu import observe, standins

    standins.install()
    observe.install()
