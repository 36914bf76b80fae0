"""What runs in a server with the plugin, as globs from the repository root.

A gate of a service starts another process, so none of its imports leads to what that one loads.
"""

from __future__ import annotations

__all__ = ["KERNELS", "PLUGIN"]

_ENGINE = "kdtree-engine/kdtree_engine"
PLUGIN = (
    "kdtree-engine/pyproject.toml",
    f"{_ENGINE}/*.py",
    f"{_ENGINE}/fragmentation/*.py",
    f"{_ENGINE}/ops/*.py",
    f"{_ENGINE}/reference/*.py",
    f"{_ENGINE}/sglang_ext/*.py",
    f"{_ENGINE}/sglang_ext/defrag/*.py",
)
KERNELS = ("kdtree-engine/csrc/*", "kdtree-engine/csrc_trees/*", f"{_ENGINE}/tables/*")
"""And on a GPU."""
