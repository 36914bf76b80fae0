"""The library of the tree kernels: built from `csrc_trees`, apart from the attention's.

The kept evidence of the attention goes by the hash of `csrc`; what is beside it may change freely.
"""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch

from kdtree_engine.build import BuildReport, build
from kdtree_engine.contents import checks_wanted
from kdtree_engine.errors import ConfigError, MissingError
from kdtree_engine.library import PACKAGED_LIBRARY, load

__all__ = [
    "TREES_CSRC",
    "TREES_LIBRARY",
    "TreeKernels",
    "build_tree_kernels",
    "may_read",
    "tree_kernels",
]

TREES_CSRC = pathlib.Path(__file__).parents[2] / "csrc_trees"
TREES_LIBRARY = PACKAGED_LIBRARY.with_name("libkdtree_trees.so")
"""Where `kd build` puts the library and where a wheel carries it."""


class TreeKernels(Protocol):
    """What the library exports; `csrc_trees` documents each. Tensors are passed as they are."""

    build_draft_trees: Callable[..., None]
    build_workspace_bytes: Callable[[int, int, int, int], int]
    sample_tokens: Callable[..., None]
    accept_trees: Callable[..., None]
    compact_kv: Callable[..., None]
    fill_kv_indices: Callable[..., None]
    build_info: Callable[[], Any]


def build_tree_kernels(
    *,
    library: pathlib.Path = TREES_LIBRARY,
    jobs: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> BuildReport:
    """Compiles `csrc_trees` into `library`; all else is as of `kdtree_engine.build.build`."""
    return build(csrc=TREES_CSRC, library=library, jobs=jobs, progress=progress)


@functools.cache
def tree_kernels() -> TreeKernels:
    """The library, loaded on the first call.

    It is the file that KDTREE_TREES_LIBRARY names, else the one in the package.

    MissingError: it is not built, or apache-tvm-ffi is absent. ConfigError: it cannot be loaded.
    """
    override = os.environ.get("KDTREE_TREES_LIBRARY")
    path = pathlib.Path(override) if override else TREES_LIBRARY
    if override and not path.is_file():
        raise ConfigError(f"KDTREE_TREES_LIBRARY: no file {override}")
    if not path.is_file():
        raise MissingError(
            "the library of the tree kernels is not built",
            remedy="run `kd build` where nvcc is, or install a wheel that carries it",
        )
    return cast(TreeKernels, load(path))


def may_read(device: torch.device) -> bool:
    """Whether values on a GPU may be read for checks: KDTREE_CHECK=1, and no capture under way."""
    if not checks_wanted():
        return False
    with torch.cuda.device(device):
        return not torch.cuda.is_current_stream_capturing()
