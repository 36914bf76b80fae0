"""What a machine has, found out for real, with the standard library and torch alone.

    python -m kdtree_engine.machine        prints the facts as one JSON object

Two rules shape this module. Nothing may hang or raise: every program is started in a process
group of its own, under a time limit, and one that is missing, broken or too slow reads as absent.
And the calling process never touches CUDA: the phase runner forks workers after it has read the
machine, and a child of a process that has initialised CUDA cannot use it. So torch and the driver
are asked in short-lived processes, which print what they see line by line.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from kdtree_engine.errors import ConfigError

__all__ = ["OLDEST_CAPABILITY", "Gpu", "Machine", "read_machine"]

OLDEST_CAPABILITY = (8, 0)
"""The kernels use bf16 matrix units and asynchronous copies, both of which came with sm_80."""

_TOOL_LIMIT_S = 10.0
_DRIVER_LIMIT_S = 30.0
_TORCH_LIMIT_S = 180.0  # a cold disk and eight GPUs to wake up
_LONGEST_ANSWER = 1 << 20  # bytes of a tool's output that are read


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU.

    capability: CUDA compute capability, such as (12, 0) for sm_120.
    memory_bytes: total memory, 0 where the driver does not say.
    sm_count: streaming multiprocessors, 0 where only the driver sees the GPU (it does not say).
    usable: torch has run an operation on it, and its capability is OLDEST_CAPABILITY or newer.
    """

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    sm_count: int
    usable: bool


@dataclasses.dataclass(frozen=True)
class Machine:
    """What one machine has. Each version is None where the thing is absent or does not work.

    cuda: the CUDA version that torch was built with; `nvcc` has its own.
    driver: the NVIDIA driver's version.
    gpus: those that torch sees first, in torch's order, then those that only the driver shows.
    """

    hostname: str
    system: str
    python: str
    torch: str | None
    cuda: str | None
    driver: str | None
    gpus: tuple[Gpu, ...]
    nvcc: str | None
    compute_sanitizer: str | None
    sglang: str | None
    ssh: str | None
    rsync: str | None

    @property
    def usable_gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that this project's kernels can run on, through torch."""
        return tuple(gpu for gpu in self.gpus if gpu.usable)

    def as_json(self) -> dict[str, Any]:
        """A plain dict, for `json.dumps`; `from_json` takes it back."""
        facts = dataclasses.asdict(self)
        facts["gpus"] = [gpu | {"capability": list(gpu["capability"])} for gpu in facts["gpus"]]
        return facts

    @classmethod
    def from_json(cls, facts: object, place: str = "machine facts") -> Machine:
        """The machine that `as_json` described.

        Raises ConfigError, which names `place` and the field, where something is missing, unknown
        or of the wrong type.
        """
        given = _fields_of(cls, facts, place, "")
        gpus = given["gpus"]
        if not isinstance(gpus, list):
            raise _fault(place, "gpus", "a list", gpus)
        given["gpus"] = tuple(
            _gpu_from_json(gpu, place, f"gpus.{index}") for index, gpu in enumerate(gpus)
        )
        for field in ("hostname", "system", "python"):
            if not isinstance(given[field], str):
                raise _fault(place, field, "a text", given[field])
        for field in given.keys() - {"hostname", "system", "python", "gpus"}:
            if not (given[field] is None or isinstance(given[field], str)):
                raise _fault(place, field, "a version or null", given[field])
        return cls(**given)


def read_machine() -> Machine:
    """Look at this machine; takes about as long as importing torch. Raises nothing."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=6) as pool:
        torch_lines = pool.submit(_ask_python, "_print_torch_view", _TORCH_LIMIT_S)
        driver_gpus = pool.submit(_driver_view)
        nvcc = pool.submit(_version_of, ["nvcc", "--version"], r"\bV(\d[\d.]*)")
        sanitizer = pool.submit(
            _version_of, ["compute-sanitizer", "--version"], r"[Vv]ersion\s+(\d[\d.]*)"
        )
        ssh = pool.submit(_version_of, ["ssh", "-V"], r"OpenSSH_(\S+?),?\s")
        rsync = pool.submit(_version_of, ["rsync", "--version"], r"version\s+v?(\d\S*)")
    torch_version, cuda, torch_gpus = _parse_torch(torch_lines.result())
    driver, shown = driver_gpus.result()
    return Machine(
        hostname=socket.gethostname(),
        system=platform.platform(),
        python=platform.python_version(),
        torch=torch_version,
        cuda=cuda,
        driver=driver,
        gpus=_merged(torch_gpus, shown),
        nvcc=nvcc.result(),
        compute_sanitizer=sanitizer.result(),
        sglang=_installed("sglang"),
        ssh=ssh.result(),
        rsync=rsync.result(),
    )


# --- programs -----------------------------------------------------------------------------------


def _output(argv: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """Exit code (None where it could not be started or ran past `limit_s`) and what it printed.

    The output goes through a file rather than a pipe: a grandchild that outlives the program and
    holds a pipe open would keep us waiting past the limit.
    """
    with tempfile.TemporaryFile() as printed:
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError:
            return None, ""
        code: int | None = None
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass  # what it printed until now still counts
        finally:
            if code is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        printed.seek(0)
        return code, printed.read(_LONGEST_ANSWER).decode(errors="replace")


def _version_of(argv: Sequence[str], pattern: str) -> str | None:
    """The version that a program on PATH prints; its first line where that shows no version."""
    program = shutil.which(argv[0])
    if program is None:
        return None
    code, text = _output([program, *argv[1:]], _TOOL_LIMIT_S)
    if code != 0:
        return None
    found = re.search(pattern, text + "\n")
    if found:
        return found.group(1)
    return text.strip().partition("\n")[0] or "unknown"


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _ask_python(function: str, limit_s: float) -> list[dict[str, Any]]:
    """The JSON lines that a function of this module prints in a process of its own.

    The process gets this one's import path, so that it sees the torch that this one would import.
    Lines that are not JSON objects are warnings of libraries, and are left out.
    """
    program = (
        "import sys; sys.path[:] = sys.argv[1:]; "
        f"from kdtree_engine import machine; machine.{function}()"
    )
    _, text = _output([sys.executable, "-c", program, *sys.path], limit_s)
    lines = []
    for line in text.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            value = json.loads(line)
            if isinstance(value, dict):
                lines.append(value)
    return lines


def _say(**facts: object) -> None:
    # Flushed, so that a hang after this line does not lose it.
    print(json.dumps(facts), flush=True)


# --- GPUs ---------------------------------------------------------------------------------------


def _print_torch_view() -> None:
    """First torch's versions, then one line per GPU that torch shows. Runs on its own."""
    import torch

    _say(torch=str(torch.__version__), cuda=torch.version.cuda)
    if not torch.cuda.is_available():
        return
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        capability = (found.major, found.minor)
        _say(
            uuid=str(getattr(found, "uuid", "")),
            name=found.name,
            capability=capability,
            memory_bytes=found.total_memory,
            sm_count=found.multi_processor_count,
            usable=capability >= OLDEST_CAPABILITY and _computes(index),
        )


def _computes(index: int) -> bool:
    """Whether torch can run an operation on GPU `index`: its build may lack this architecture."""
    import torch

    try:
        return float(torch.ones(8, device=f"cuda:{index}").mul(2).sum().item()) == 16.0
    except RuntimeError as error:
        # A GPU whose memory is taken by a live service is busy; it is not unusable.
        return "out of memory" in str(error)


def _parse_torch(lines: list[dict[str, Any]]) -> tuple[str | None, str | None, dict[str, Gpu]]:
    """torch's version, its CUDA version, and its GPUs by UUID."""
    if not lines or "torch" not in lines[0]:
        return None, None, {}
    gpus = {}
    for position, line in enumerate(lines[1:]):
        uuid = _bare(str(line.pop("uuid", ""))) or f"torch device {position}"
        with contextlib.suppress(ConfigError):
            gpus[uuid] = _gpu_from_json(line, "torch", "gpu")
    return lines[0]["torch"], lines[0].get("cuda"), gpus


def _print_driver_view() -> None:
    """One line per GPU that the driver shows, through NVML. Runs on its own, as NVML may hang."""
    import pynvml

    def text(value: str | bytes) -> str:
        return value.decode() if isinstance(value, bytes) else value

    pynvml.nvmlInit()
    driver = text(pynvml.nvmlSystemGetDriverVersion())
    _say(driver=driver)
    for index in range(pynvml.nvmlDeviceGetCount()):
        device = pynvml.nvmlDeviceGetHandleByIndex(index)
        try:
            memory = int(pynvml.nvmlDeviceGetMemoryInfo(device).total)
        except pynvml.NVMLError:
            memory = 0  # GPUs that share the host's memory have none of their own
        _say(
            driver=driver,
            uuid=text(pynvml.nvmlDeviceGetUUID(device)),
            name=text(pynvml.nvmlDeviceGetName(device)),
            capability=pynvml.nvmlDeviceGetCudaComputeCapability(device),
            memory_bytes=memory,
            sm_count=0,
            usable=False,
        )


def _driver_view() -> tuple[str | None, dict[str, Gpu]]:
    """The driver's version and the GPUs that it shows, by UUID; none of them counts as usable."""
    lines = _ask_python("_print_driver_view", _DRIVER_LIMIT_S)
    if not lines:
        lines = _ask_nvidia_smi()
    driver = None
    gpus = {}
    for line in lines:
        driver = line.pop("driver", None) or driver
        if "uuid" in line:
            uuid = _bare(str(line.pop("uuid")))
            with contextlib.suppress(ConfigError):
                gpus[uuid] = _gpu_from_json(line, "driver", "gpu")
    return driver, gpus


def _ask_nvidia_smi() -> list[dict[str, Any]]:
    """The same lines as `_print_driver_view`, where pynvml is absent."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    # The name comes last, as it is the one field that could hold a comma.
    columns = "uuid,compute_cap,memory.total,driver_version,name"
    code, text = _output(
        [program, f"--query-gpu={columns}", "--format=csv,noheader,nounits"], _DRIVER_LIMIT_S
    )
    lines = []
    for row in text.splitlines() if code == 0 else []:
        cells = [cell.strip() for cell in row.split(",", 4)]
        if len(cells) == 5 and re.fullmatch(r"\d+\.\d+", cells[1]):
            uuid, capability, mebibytes, driver, name = cells
            lines.append(
                {
                    "driver": driver,
                    "uuid": uuid,
                    "name": name,
                    "capability": [int(part) for part in capability.split(".")],
                    "memory_bytes": int(mebibytes) << 20 if mebibytes.isdigit() else 0,
                    "sm_count": 0,
                    "usable": False,
                }
            )
    return lines


def _merged(torch_gpus: Mapping[str, Gpu], shown: Mapping[str, Gpu]) -> tuple[Gpu, ...]:
    return (*torch_gpus.values(), *(gpu for uuid, gpu in shown.items() if uuid not in torch_gpus))


def _bare(uuid: str) -> str:
    """The driver says `GPU-1a2b...` where torch says `1a2b...`."""
    return uuid.lower().removeprefix("gpu-")


# --- JSON ---------------------------------------------------------------------------------------


def _fault(place: str, field: str, wanted: str, given: object) -> ConfigError:
    shown = repr(given)
    return ConfigError(f"{place}: field {field}: must be {wanted}, got {shown[:60]}")


def _fields_of(kind: type, facts: object, place: str, within: str) -> dict[str, Any]:
    """`facts`, which must be an object with exactly the fields of dataclass `kind`."""
    if not isinstance(facts, Mapping):
        raise _fault(place, within or "(top level)", "an object", facts)
    prefix = f"{within}." if within else ""
    known = [field.name for field in dataclasses.fields(kind)]
    for name in facts:
        if name not in known:
            raise ConfigError(f"{place}: field {prefix}{name}: is not a known field")
    for name in known:
        if name not in facts:
            raise ConfigError(f"{place}: field {prefix}{name}: is required")
    return dict(facts)


def _gpu_from_json(facts: object, place: str, within: str) -> Gpu:
    given = _fields_of(Gpu, facts, place, within)

    def whole(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0

    capability = given["capability"]
    if not isinstance(given["name"], str):
        raise _fault(place, f"{within}.name", "a text", given["name"])
    pair = isinstance(capability, (list, tuple)) and len(capability) == 2
    if not (pair and all(whole(part) for part in capability)):
        raise _fault(place, f"{within}.capability", "two whole numbers", capability)
    for field in ("memory_bytes", "sm_count"):
        if not whole(given[field]):
            raise _fault(place, f"{within}.{field}", "a whole number", given[field])
    if not isinstance(given["usable"], bool):
        raise _fault(place, f"{within}.usable", "true or false", given["usable"])
    return Gpu(**(given | {"capability": tuple(capability)}))


if __name__ == "__main__":
    print(json.dumps(read_machine().as_json()))
