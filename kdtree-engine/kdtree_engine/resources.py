"""What each kernel takes of an SM, as ptxas reports it, and the limits that must hold."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

__all__ = [
    "SHARED_LIMIT_BYTES",
    "KernelResources",
    "broken_limits",
    "parse_ptxas",
    "tile_of",
    "with_dynamic_shared",
]

SHARED_LIMIT_BYTES = {
    "sm_80": 166_912,
    "sm_89": 101_376,
    "sm_90": 232_448,
    "sm_90a": 232_448,
    "sm_120": 101_376,
}
"""Shared memory that one block may take, static and dynamic together (CUDA programming guide,
technical specifications by compute capability: 163, 99, 227 and 99 KiB)."""
_SPILL_FREE = frozenset({"sm_90a", "sm_120"})
"""Where a spill fails the build: sm_120, which the project is for and cannot time, and sm_90a,
whose warpgroups divide the registers among them to the last one."""

_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '(sm_\w+)'")
_PROPERTIES = re.compile(r"Function properties for (\S+)")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_TILE = re.compile(r"(?:4(Tile)|6(WgTile))I\w*?((?:Li\d+E)+)E")
_INTEGER = re.compile(r"Li(\d+)E")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclasses.dataclass(frozen=True)
class KernelResources:
    """One kernel on one architecture.

    registers: of a thread. stack_bytes, spill_bytes: of a thread, the latter stores and loads.
    static_shared_bytes, dynamic_shared_bytes: of a block; the dynamic part is what the kernel's
        configuration declares for its launch.
    """

    kernel: str
    architecture: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    static_shared_bytes: int
    dynamic_shared_bytes: int = 0

    @property
    def shared_bytes(self) -> int:
        return self.static_shared_bytes + self.dynamic_shared_bytes

    @property
    def fits(self) -> bool:
        """Whether a block gets so much shared memory: the launcher picks no tile that does not."""
        return self.shared_bytes <= SHARED_LIMIT_BYTES[self.architecture]


def parse_ptxas(text: str) -> list[KernelResources]:
    """The kernels in what `nvcc -Xptxas -v` wrote, with their mangled names.

    Device functions that are called and not inlined have properties of their own there; their
    spills count as the spills of the kernel they follow, as it is the kernel that pays.
    """
    found: list[KernelResources] = []
    kernel = architecture = ""
    stack = spill = 0
    for line in text.splitlines():
        if entry := _ENTRY.search(line):
            kernel, architecture = entry.groups()
            stack = spill = 0
        elif _PROPERTIES.search(line):
            continue
        elif frame := _STACK.search(line):
            own_stack, stores, loads = map(int, frame.groups())
            if kernel:
                stack, spill = own_stack, stores + loads
            elif found and stores + loads:
                last = found[-1]
                found[-1] = dataclasses.replace(last, spill_bytes=last.spill_bytes + stores + loads)
        elif (used := _USED.search(line)) and kernel:
            shared = _SHARED.search(line)
            found.append(
                KernelResources(
                    kernel=kernel,
                    architecture=architecture,
                    registers=int(used[1]),
                    stack_bytes=stack,
                    spill_bytes=spill,
                    static_shared_bytes=int(shared[1]) if shared else 0,
                )
            )
            kernel = ""
    return found


def tile_of(kernel: str) -> str | None:
    """The configuration in a mangled name, as C++ writes it, for fp16: it counts bits, not formats.

    "Tile<__half, 72, 32, 3, 4>" of ...4TileI13__nv_bfloat16Li72ELi32ELi3ELi4E... None for a kernel
    that has none, which is launched without dynamic shared memory.
    """
    tile = _TILE.search(kernel)
    if tile is None:
        return None
    return f"{tile[1] or tile[2]}<__half, {', '.join(_INTEGER.findall(tile[3]))}>"


def with_dynamic_shared(
    kernels: Iterable[KernelResources], shared_bytes: Mapping[str, int]
) -> list[KernelResources]:
    """The same kernels with what `shared_bytes` declares for their `tile_of`."""
    return [
        dataclasses.replace(kernel, dynamic_shared_bytes=shared_bytes[tile])
        if (tile := tile_of(kernel.kernel))
        else kernel
        for kernel in kernels
    ]


def broken_limits(kernels: Iterable[KernelResources]) -> list[str]:
    """One line for each limit that is broken; empty where all is well.

    A tile that takes more shared memory than a block gets is never picked there, so that is no
    fault, and neither is its spilling. But it is one that an architecture has no tile to pick.
    """
    faults: list[str] = []
    tiles: dict[str, int] = {}
    for kernel in kernels:
        if kernel.dynamic_shared_bytes:
            tiles.setdefault(kernel.architecture, 0)
            tiles[kernel.architecture] += kernel.fits
        elif not kernel.fits:
            faults.append(
                f"{kernel.kernel} on {kernel.architecture}: {kernel.shared_bytes} bytes of shared "
                f"memory, the limit is {SHARED_LIMIT_BYTES[kernel.architecture]}"
            )
        if kernel.fits and kernel.spill_bytes and kernel.architecture in _SPILL_FREE:
            faults.append(
                f"{kernel.kernel} on {kernel.architecture}: {kernel.spill_bytes} bytes spilled, "
                "none allowed"
            )
    faults += [f"no tile fits {architecture}" for architecture, fit in tiles.items() if not fit]
    return faults
