"""What each kernel takes of an SM, as ptxas reports it, and the limits that must hold."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

__all__ = ["SHARED_LIMIT_BYTES", "KernelResources", "broken_limits", "parse_ptxas"]

SHARED_LIMIT_BYTES = {"sm_80": 166_912, "sm_89": 101_376, "sm_90": 232_448, "sm_120": 101_376}
"""Shared memory that one block may take, static and dynamic together (CUDA programming guide,
technical specifications by compute capability: 163, 99, 227 and 99 KiB)."""
_SPILL_FREE = frozenset({"sm_120"})
"""Where a spill fails the build: the architecture that the project is for and cannot time."""

_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '(sm_\w+)'")
_PROPERTIES = re.compile(r"Function properties for (\S+)")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
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


def broken_limits(kernels: Iterable[KernelResources]) -> list[str]:
    """One line for each kernel that takes more than it may; empty where all is well."""
    faults: list[str] = []
    for kernel in kernels:
        limit = SHARED_LIMIT_BYTES[kernel.architecture]
        where = f"{kernel.kernel} on {kernel.architecture}"
        if kernel.shared_bytes > limit:
            faults.append(f"{where}: {kernel.shared_bytes} bytes of shared memory, limit {limit}")
        if kernel.spill_bytes and kernel.architecture in _SPILL_FREE:
            faults.append(f"{where}: {kernel.spill_bytes} bytes spilled, none allowed")
    return faults
