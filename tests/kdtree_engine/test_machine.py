"""Machines made of small scripts on PATH and small modules on the import path."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable

import pytest
import torch

from kdtree_engine import machine
from kdtree_engine.errors import ConfigError
from kdtree_engine.machine import Gpu, Machine, read_machine

H200 = Gpu("NVIDIA H200", (9, 0), 150_109_880_320, 132, usable=True)
LAB = Machine(
    hostname="lab",
    system="Linux",
    python="3.11.7",
    torch="2.11.0+cu130",
    cuda="13.0",
    driver="580.159.04",
    gpus=(H200,),
    nvcc="13.0.88",
    compute_sanitizer=None,
    sglang="0.5.23",
    ssh="9.2p1",
    rsync=None,
)

Script = Callable[[str, str], None]


@pytest.fixture
def script(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """A machine whose PATH holds nothing but what the test writes: `script("nvcc", "echo V1")`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def write(name: str, body: str) -> None:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{textwrap.dedent(body)}\n")
        path.chmod(0o755)

    return write


@pytest.fixture
def module(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Stand-ins for torch and pynvml, both absent until written: `module("torch", "...")`."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def write(name: str, body: str) -> None:
        (folder / f"{name}.py").write_text(textwrap.dedent(body))

    for absent in ("torch", "pynvml"):
        write(absent, "raise ImportError('not here')")
    return write


# A torch that sees two GPUs. Its kernels were not built for the second.
TORCH_WITH_TWO_GPUS = """
    import types

    __version__ = "2.11.0+cu130"
    version = types.SimpleNamespace(cuda="13.0")

    def _properties(index):
        return types.SimpleNamespace(
            uuid=f"aaaa-{index}", name=f"GPU {index}", major=9, minor=index,
            total_memory=80 << 30, multi_processor_count=132)

    cuda = types.SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 2, get_device_properties=_properties)

    class ones:
        def __init__(self, count, device):
            if device != "cuda:0":
                raise RuntimeError("no kernel image is available for execution on the device")
        def mul(self, factor): return self
        def sum(self): return self
        def item(self): return 16.0
"""


@pytest.mark.usefixtures("script", "module")
def test_a_bare_machine_has_nothing_and_that_is_no_error() -> None:
    bare = read_machine()
    assert (bare.torch, bare.cuda, bare.driver, bare.gpus) == (None, None, None, ())
    assert (bare.nvcc, bare.compute_sanitizer, bare.ssh, bare.rsync) == (None, None, None, None)
    assert bare.python == ".".join(map(str, sys.version_info[:3]))


def test_this_machine_has_the_torch_that_the_tests_run_on() -> None:
    here = read_machine()
    assert here.torch == torch.__version__
    assert here.cuda == torch.version.cuda
    assert bool(here.usable_gpus) <= torch.cuda.is_available()


@pytest.mark.usefixtures("module")
def test_versions_are_read_out_of_what_each_tool_prints(script: Script) -> None:
    script("nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.88'")
    script("compute-sanitizer", "echo 'NVIDIA (R) Compute Sanitizer'; echo 'Version 2025.3.1.0'")
    script("ssh", "echo 'OpenSSH_9.2p1 Debian-2+deb12u6, OpenSSL 3.0.19 27 Jan 2026' >&2")
    script("rsync", "echo 'rsync  version 3.2.7  protocol version 31'")
    here = read_machine()
    assert here.nvcc == "13.0.88"
    assert here.compute_sanitizer == "2025.3.1.0"
    assert here.ssh == "9.2p1"
    assert here.rsync == "3.2.7"


@pytest.mark.usefixtures("module")
def test_a_tool_that_fails_is_absent_and_one_that_says_no_version_is_not(script: Script) -> None:
    script("nvcc", "echo 'V13.0.88'; exit 1")
    script("rsync", "echo 'openrsync, protocol 29'")
    here = read_machine()
    assert here.nvcc is None
    assert here.rsync == "openrsync, protocol 29"


@pytest.mark.usefixtures("module")
def test_a_tool_that_hangs_is_given_up_with_all_it_started(
    script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(machine, "_TOOL_LIMIT_S", 0.5)
    # The grandchild inherits the output: a reader that waited for the output's end would wait too.
    script("nvcc", f"/bin/sleep 300 & echo $! > {tmp_path}/grandchild; /bin/sleep 300")
    begun = time.monotonic()
    assert read_machine().nvcc is None
    assert time.monotonic() - begun < 60
    _assert_ends(int((tmp_path / "grandchild").read_text()))


def test_nvidia_smi_is_asked_where_pynvml_is_absent(script: Script, module: Script) -> None:
    script(
        "nvidia-smi",
        """
        echo 'GPU-bbbb-0, 12.0, 97887, 580.95.05, NVIDIA RTX PRO 6000, Blackwell'
        echo 'GPU-bbbb-1, 12.1, [N/A], 580.95.05, NVIDIA GB10'
        """,
    )
    here = read_machine()
    assert here.driver == "580.95.05"
    assert here.gpus == (
        Gpu("NVIDIA RTX PRO 6000, Blackwell", (12, 0), 97887 << 20, 0, usable=False),
        Gpu("NVIDIA GB10", (12, 1), 0, 0, usable=False),
    )
    assert here.usable_gpus == ()


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    "answer",
    [
        "echo 'NVIDIA-SMI has failed because it could not reach the driver'; exit 9",
        "echo 'No devices were found'",
        "printf '\\377\\376 broken \\n'",
    ],
    ids=["no-driver", "no-devices", "not-text"],
)
def test_an_nvidia_smi_without_an_answer_is_no_gpu(script: Script, answer: str) -> None:
    script("nvidia-smi", answer)
    assert read_machine().gpus == ()


def test_a_gpu_counts_as_usable_only_where_torch_computed_on_it(
    script: Script, module: Script
) -> None:
    module("torch", TORCH_WITH_TWO_GPUS)
    script(
        "nvidia-smi",
        """
        echo 'GPU-cccc-9, 9.0, 81920, 580.95.05, hidden from torch'
        echo 'GPU-aaaa-0, 9.0, 81920, 580.95.05, GPU 0'
        """,
    )
    here = read_machine()
    assert [(gpu.name, gpu.usable) for gpu in here.gpus] == [
        ("GPU 0", True),
        ("GPU 1", False),
        ("hidden from torch", False),
    ]
    assert [gpu.sm_count for gpu in here.usable_gpus] == [132]


@pytest.mark.usefixtures("script")
def test_a_gpu_that_is_full_is_busy_and_not_unusable(module: Script) -> None:
    module("torch", TORCH_WITH_TWO_GPUS.replace("no kernel image is available", "out of memory"))
    assert [gpu.usable for gpu in read_machine().gpus] == [True, True]


@pytest.mark.usefixtures("script")
def test_a_gpu_older_than_the_kernels_is_not_usable(module: Script) -> None:
    module("torch", TORCH_WITH_TWO_GPUS.replace("major=9", "major=7"))
    assert [gpu.usable for gpu in read_machine().gpus] == [False, False]


@pytest.mark.usefixtures("script")
def test_a_torch_whose_gpus_hang_still_has_a_version(
    module: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_TORCH_LIMIT_S", 3.0)
    hang = "is_available=lambda: __import__('time').sleep(300)"
    module("torch", TORCH_WITH_TWO_GPUS.replace("is_available=lambda: True", hang))
    here = read_machine()
    assert here.torch == "2.11.0+cu130"
    assert here.gpus == ()


@pytest.mark.usefixtures("script")
def test_nvml_is_believed_before_nvidia_smi(module: Script) -> None:
    module(
        "pynvml",
        """
        import types
        class NVMLError(Exception): pass
        def nvmlInit(): pass
        def nvmlSystemGetDriverVersion(): return b"550.1"
        def nvmlDeviceGetCount(): return 1
        def nvmlDeviceGetHandleByIndex(index): return index
        def nvmlDeviceGetMemoryInfo(device): raise NVMLError("not supported")
        def nvmlDeviceGetUUID(device): return "GPU-dddd"
        def nvmlDeviceGetName(device): return "NVIDIA GB10"
        def nvmlDeviceGetCudaComputeCapability(device): return (12, 1)
        """,
    )
    here = read_machine()
    assert here.driver == "550.1"
    assert here.gpus == (Gpu("NVIDIA GB10", (12, 1), 0, 0, usable=False),)


def test_reading_loads_neither_torch_nor_nvml_into_the_process() -> None:
    """A process that has initialised CUDA cannot fork workers that use it."""
    program = (
        "import sys; from kdtree_engine.machine import read_machine; read_machine();"
        "print([name for name in ('torch', 'pynvml', 'sglang') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_fork_can_use_the_gpu_after_the_machine_was_read() -> None:
    program = textwrap.dedent(
        """
        import os, sys
        from kdtree_engine.machine import read_machine
        assert read_machine().usable_gpus
        child = os.fork()
        if child == 0:
            import torch
            os._exit(0 if torch.ones(4, device="cuda").sum().item() == 4 else 1)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_module_prints_one_json_object_that_reads_back() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kdtree_engine.machine"], capture_output=True, text=True, check=True
    )
    assert Machine.from_json(json.loads(done.stdout)).torch == torch.__version__


def test_json_round_trip() -> None:
    assert Machine.from_json(json.loads(json.dumps(LAB.as_json()))) == LAB


def _with(path: str, value: object) -> dict[str, object]:
    facts = json.loads(json.dumps(LAB.as_json()))
    inner = facts
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in way:
        inner = inner[part]
    inner[last] = value
    return facts  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ([], "lab: field (top level): must be an object, got []"),
        ({"hostname": "x"}, "lab: field system: is required"),
        (_with("color", 1), "lab: field color: is not a known field"),
        (_with("hostname", None), "lab: field hostname: must be a text, got None"),
        (_with("torch", 2.11), "lab: field torch: must be a version or null, got 2.11"),
        (_with("gpus", {}), "lab: field gpus: must be a list, got {}"),
        (_with("gpus.0", 7), "lab: field gpus.0: must be an object, got 7"),
        (
            _with("gpus.0.capability", [9]),
            "lab: field gpus.0.capability: must be two whole numbers, got [9]",
        ),
        (
            _with("gpus.0.memory_bytes", -1),
            "lab: field gpus.0.memory_bytes: must be a whole number, got -1",
        ),
        (
            _with("gpus.0.usable", "yes"),
            "lab: field gpus.0.usable: must be true or false, got 'yes'",
        ),
    ],
)
def test_a_bad_description_is_named_by_its_field(facts: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Machine.from_json(facts, place="lab")
    assert str(caught.value) == message


def _assert_ends(pid: int) -> None:
    """A process that was killed and whose parent is gone is reaped by init, soon."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        state = pathlib.Path(f"/proc/{pid}/stat")
        if state.exists() and ") Z " in state.read_text():
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} outlived its tool")
