"""How the tree operations join torch: one fragment of the namespace that the attention opened.

Registered through `torch.library.Library`, as the attention is (see `kdtree_engine.attention`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["register"]

_LIBRARY = torch.library.Library("kdtree_engine", "FRAGMENT")  # type: ignore[no-untyped-call]


def register(schema: str, *, cpu: Callable[..., None], cuda: Callable[..., None]) -> None:
    """Defines an operation of `schema`, "NAME(arguments) -> ()", which writes its outputs."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.needs_exact_strides,))  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, cpu, "CPU")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, cuda, "CUDA")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"kdtree_engine::{name}", _meta, lib=_LIBRARY)


def _meta(*_: object) -> None:
    """Nothing to infer: the operations return nothing and write tensors that their callers made."""
