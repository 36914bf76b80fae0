"""kdtree-engine: everything that computes.

    tree_verify_attention   attention of tree nodes over a paged latent pool, on CUDA and CPU
    reference               the oracle that everything else is judged by

Importing the package loads nothing else; the names above are loaded when first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kdtree_engine import reference
    from kdtree_engine.attention import tree_verify_attention

__all__ = ["reference", "tree_verify_attention"]

_HOMES = {"tree_verify_attention": "kdtree_engine.attention"}


def __getattr__(name: str) -> Any:
    if name == "reference":
        return importlib.import_module("kdtree_engine.reference")
    if name not in _HOMES:
        raise AttributeError(f"module 'kdtree_engine' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
