"""How patient every transport is, and how much output it takes."""

from __future__ import annotations

__all__ = ["GRACE_S", "LONGEST_OUTPUT", "SILENCE_S"]

GRACE_S = 2.0  # between asking a process group to end and ending it
SILENCE_S = 0.5  # after a program's end, for what it printed last
LONGEST_OUTPUT = 64 << 20  # bytes of stdout or stderr
