"""The kernel library: where it lies, how it is loaded, and what it exports.

One shared library serves every torch and Python, as its interface is apache-tvm-ffi's and not
torch's. It is loaded on first use, so that importing the package needs torch alone.
"""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any, Protocol, cast

from kdtree_engine.errors import ConfigError, MissingError

__all__ = ["LIBRARY_NAME", "PACKAGED_LIBRARY", "Kernels", "kernels", "library_path", "load"]

LIBRARY_NAME = "libkdtree_engine.so"
PACKAGED_LIBRARY = pathlib.Path(__file__).parent / "lib" / LIBRARY_NAME
"""Where `kd build` puts the library and where a wheel carries it."""


class Kernels(Protocol):
    """What the library exports; `csrc` documents each. Tensors are passed as they are."""

    tree_verify_attention: Callable[..., None]
    tree_verify_attention_naive: Callable[..., None]
    workspace_bytes: Callable[..., int]
    build_info: Callable[[], Any]


def library_path() -> pathlib.Path:
    """The library to load: the file that KDTREE_LIBRARY names, else the one in the package."""
    override = os.environ.get("KDTREE_LIBRARY")
    if not override:
        if not PACKAGED_LIBRARY.is_file():
            raise MissingError(
                "the kernel library is not built",
                remedy="run `kd build` where nvcc is, or install a wheel that carries it",
            )
        return PACKAGED_LIBRARY
    path = pathlib.Path(override)
    if not path.is_file():
        raise ConfigError(f"KDTREE_LIBRARY: no file {override}")
    return path


@functools.cache
def kernels() -> Kernels:
    """The library of `library_path`, loaded on the first call. Raises what `load` raises."""
    return load(library_path())


def load(path: pathlib.Path) -> Kernels:
    """Load a kernel library.

    A process that has loaded a path keeps that file, even where the path has been built anew.

    MissingError: apache-tvm-ffi is absent. ConfigError: the file is no library that it can load.
    """
    try:
        import tvm_ffi
    except ModuleNotFoundError as error:
        raise MissingError(
            "apache-tvm-ffi, which loads the kernel library, is not installed",
            remedy="pip install 'kdtree-engine[cuda]'",
        ) from error
    try:
        module = tvm_ffi.load_module(str(path))
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be loaded: {error}") from error
    return cast(Kernels, module)
