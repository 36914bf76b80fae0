"""Which tiles are compiled for an architecture: read from the CUDA sources, or asked of a library.

The sources say it on any machine. They bound a tile's shared memory by the assertions that the
compiler checks; only a library knows its exact size. Where one is built, the two must agree.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Callable, Iterable
from typing import Any

from kdtree_engine.build import ARCHITECTURES, CSRC, architectures_of
from kdtree_engine.errors import ConfigError
from kdtree_engine.resources import SHARED_LIMIT_BYTES

__all__ = ["CompiledTile", "declared_tiles", "library_tiles", "part_tiles"]

_ALIAS = re.compile(r"using (\w+) = (Wg)?Tile<T, (\d+), (\d+)[\d, ]*>;")
_ENTRY = re.compile(r"entry<(\w+)>\((\w+)\(")
_ASSERTED = re.compile(r"static_assert\((\w+)<__half>::kSmemBytes <= (\w+)")
_CONSTANT = re.compile(r"constexpr int (\w+) = (\d+);")
_MOST_SHARED_BYTES = 232_448
"""What the configurations assert of themselves: the most that a block gets on any part."""


@dataclasses.dataclass(frozen=True, order=True)
class CompiledTile:
    """A tile of `row_tile` packed rows and stages of `block_tokens` tokens.

    shared_bytes: what a block takes, or a bound of it that the compiler has checked.
    """

    block_tokens: int
    row_tile: int
    shared_bytes: int


def declared_tiles(csrc: pathlib.Path = CSRC) -> dict[str, list[CompiledTile]]:
    """By architecture of the build, the tiles that `csrc` compiles for it, smallest first.

    Raises ConfigError where tiles.h, kernels.h and launch.cu do not read as expected, or where a
    tile that is declared is not among those that a launch picks from.
    """
    texts = [(csrc / name).read_text() for name in ("tiles.h", "kernels.h", "launch.cu")]
    header, kernels, launch = texts
    constants = {name: int(value) for text in texts for name, value in _CONSTANT.findall(text)}
    units = dict(_ENTRY.findall(launch))
    asserted = dict(_ASSERTED.findall(header))
    aliases = _ALIAS.findall(header)
    if (
        not aliases
        or units.keys() != {name for name, *_ in aliases}
        or "kWgmmaBlock" not in kernels
    ):
        raise ConfigError(f"{csrc}: tiles.h and the table of launch.cu do not name the same tiles")
    tiles: dict[str, list[CompiledTile]] = {architecture: [] for architecture in ARCHITECTURES}
    for name, wgmma, rows, second in aliases:
        bound = constants[asserted[name]] if name in asserted else _MOST_SHARED_BYTES
        block = constants["kWgmmaBlock"] if wgmma else int(second)
        for architecture in architectures_of(f"{units[name]}.cu"):
            tiles[architecture.removesuffix("a")].append(CompiledTile(block, int(rows), bound))
    return {architecture: sorted(some) for architecture, some in tiles.items()}


def library_tiles(
    compiled_tiles: Callable[[int, int], Any], architectures: Iterable[str] = ARCHITECTURES
) -> dict[str, list[CompiledTile]]:
    """The same of a library, by its function `compiled_tiles`. Needs no GPU."""
    return {
        architecture: part_tiles(
            compiled_tiles, _capability(architecture), SHARED_LIMIT_BYTES[architecture]
        )
        for architecture in architectures
    }


def part_tiles(
    compiled_tiles: Callable[[int, int], Any], capability: int, shared_bytes: int
) -> list[CompiledTile]:
    """What a library has for a part of a capability (90 for 9.0) whose blocks get so many bytes."""
    told = json.loads(str(compiled_tiles(capability, shared_bytes)))
    return sorted(CompiledTile(**tile) for tile in told)


def _capability(architecture: str) -> int:
    return int(architecture.removeprefix("sm_"))
