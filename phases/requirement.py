"""What a gate may need of a machine, how it is looked for, and how a person gets it."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable

from kdtree_engine.machine import Machine

__all__ = ["Requirement"]


@dataclasses.dataclass(frozen=True)
class _Entry:
    present: Callable[[Machine], bool]
    lack: str
    remedy: str


class Requirement(enum.StrEnum):
    """Something that a machine has or lacks. The values are the words of `--require`."""

    GPU = "gpu"
    NVCC = "nvcc"
    SANITIZER = "sanitizer"
    SGLANG = "sglang"
    SERVICE = "service"

    def missing(self, machine: Machine) -> str | None:
        """None where `machine` has it, else what is missing, in a few words."""
        entry = _ENTRIES[self]
        return None if entry.present(machine) else entry.lack

    @property
    def remedy(self) -> str:
        """The command or step that would add it."""
        return _ENTRIES[self].remedy


def _has_sglang(machine: Machine) -> bool:
    return machine.sglang is not None


_ENTRIES = {
    Requirement.GPU: _Entry(
        lambda machine: bool(machine.usable_gpus),
        "no CUDA GPU of compute capability 8.0 or newer that torch can use",
        "run on a GPU host, with a CUDA build of torch",
    ),
    Requirement.NVCC: _Entry(
        lambda machine: machine.nvcc is not None,
        "nvcc is not on PATH",
        "install the CUDA toolkit 13.0 and put its bin folder on PATH",
    ),
    Requirement.SANITIZER: _Entry(
        lambda machine: machine.compute_sanitizer is not None,
        "compute-sanitizer is not on PATH",
        "install the CUDA toolkit 13.0 and put its bin folder on PATH",
    ),
    Requirement.SGLANG: _Entry(
        _has_sglang,
        "SGLang is not installed",
        "pip install -e '.[sglang]' -e ./kdtree-engine, or name a Python that has it in "
        "KD_SGLANG_PYTHON",
    ),
    Requirement.SERVICE: _Entry(
        _has_sglang,
        "no SGLang server can be started, as SGLang is not installed",
        "pip install -e '.[sglang]' -e ./kdtree-engine, or name a Python that has it in "
        "KD_SGLANG_PYTHON",
    ),
}
