"""The kernel library: where it lies, how it is loaded, and what it exports.

One shared library serves every torch and Python, as its interface is apache-tvm-ffi's and not
torch's. It is loaded on first use, so that importing the package needs torch alone.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

from kdtree_engine.errors import ConfigError, MissingError

__all__ = [
    "LIBRARY_NAME",
    "PACKAGED_LIBRARY",
    "WGMMA_BLOCK_TOKENS",
    "Kernels",
    "asked_body",
    "built_in_tuning",
    "kernels",
    "library_path",
    "load",
    "using",
]

LIBRARY_NAME = "libkdtree_engine.so"
PACKAGED_LIBRARY = pathlib.Path(__file__).parent / "lib" / LIBRARY_NAME
"""Where `kd build` puts the library and where a wheel carries it."""

WGMMA_BLOCK_TOKENS = 64
"""`block_tokens` of the wgmma tiles, and of no others: asking `set_tuning` for it asks for them."""


class Kernels(Protocol):
    """What the library exports; `csrc` documents each. Tensors are passed as they are."""

    tree_verify_attention: Callable[..., None]
    tree_verify_attention_naive: Callable[..., None]
    workspace_bytes: Callable[..., int]
    build_info: Callable[[], Any]
    set_tuning: Callable[[int, int, int], None]
    compiled_tiles: Callable[[int, int], Any]


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
    """The library of `library_path`, loaded on the first call. Raises what `load` raises.

    KDTREE_WGMMA is read then, and only then: with 1, tiles are chosen among the wgmma ones.
    """
    asked_body.cache_clear()
    asked_body()
    library = load(library_path())
    if any(built_in_tuning()):
        library.set_tuning(*built_in_tuning())
    return library


@functools.cache
def asked_body() -> str | None:
    """The body of the tuning table that KDTREE_WGMMA asked for when the library was loaded.

    "wgmma" for 1, "mma" for 0, None (the table's own) for anything else.
    """
    return {"1": "wgmma", "0": "mma"}.get(os.environ.get("KDTREE_WGMMA", ""))


def built_in_tuning() -> tuple[int, int, int]:
    """What `set_tuning` takes for leaving the tile to the calls, as KDTREE_WGMMA is now.

    With KDTREE_WGMMA=1 that is to the calls whose tile is a wgmma one: where the tuning table has
    none, the library picks one, and where the GPU can run none, the call raises.
    """
    return (0, WGMMA_BLOCK_TOKENS if os.environ.get("KDTREE_WGMMA", "") == "1" else 0, 0)


@contextlib.contextmanager
def using(path: pathlib.Path) -> Iterator[Kernels]:
    """Within it, the operation's library is the one at `path`. Raises what `load` raises."""
    before = os.environ.get("KDTREE_LIBRARY")
    os.environ["KDTREE_LIBRARY"] = str(path)
    kernels.cache_clear()
    try:
        yield kernels()
    finally:
        if before is None:
            del os.environ["KDTREE_LIBRARY"]
        else:
            os.environ["KDTREE_LIBRARY"] = before
        kernels.cache_clear()


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
