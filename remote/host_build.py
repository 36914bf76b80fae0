"""The kernels, compiled on the host that will run them, from the sources that have been sent."""

from __future__ import annotations

from collections.abc import Callable

from kdtree_engine.build import CompileError
from kdtree_engine.errors import MissingError
from kdtree_engine.library import LIBRARY_NAME
from remote.errors import last_words
from remote.jobs import new_job_name, run_job
from remote.releases import Releases
from remote.transport import Transport

__all__ = ["build_on_host", "require_nvcc"]

CUDA = "/usr/local/cuda/bin"
"""Where nvcc is on many hosts, and on the PATH of none that SSH gives."""
_LIMIT_S = 60.0
_BUILD_S = 3600.0
"""Of all kernels for all architectures; two cores take two minutes."""

# Where it is put by the agent, once the wheel has been unpacked: see `remote.agent`.
_BUILD = """
import pathlib, sys
from kdtree_engine.build import build
from kdtree_engine.errors import KdError
csrc, library, objects = map(pathlib.Path, sys.argv[1:])
try:
    report = build(
        csrc=csrc, library=library, objects=objects,
        progress=lambda done, total, name: print(f"[{done}/{total}] {name}", flush=True),
    )
except KdError as error:
    print(" ".join(str(error).split()))
    sys.exit(1)
print(f"{report.compiled} sources compiled, {report.reused} reused, {report.seconds:.1f} s")
"""


def require_nvcc(transport: Transport) -> None:
    """Raises MissingError where the host has no nvcc."""
    line = _with_cuda(["sh", "-c", "command -v nvcc"])
    if transport.run(line, timeout=_LIMIT_S, check=False).exit_code:
        raise MissingError(
            f"host {transport.host}: nvcc is not on PATH, nor in {CUDA}",
            remedy="install the CUDA toolkit 13.0 there, or `kd build` here and deploy without "
            "--build-on-host",
        )


def build_on_host(transport: Transport, releases: Releases, note: Callable[[str], None]) -> None:
    """Compile what has arrived in `incoming`, which becomes a release with the library in it.

    It is the build of the sources that were sent, so the library says that it was built from them.
    Objects of earlier builds there are used again.

    Raises CompileError with what the build said last.
    """
    python = releases.look_at_python()
    root, engine = python["root"], f"{python['root']}/incoming/source/kdtree-engine"
    places = (f"{engine}/csrc", f"{root}/incoming/built/{LIBRARY_NAME}", f"{root}/build/objects")
    said: list[str] = []

    def hear(text: str) -> None:
        said.append(text)
        note(text)

    code = run_job(
        releases,
        new_job_name("build"),
        _with_cuda([python["executable"], "-c", _BUILD, *places]),
        # What Python would keep beside the sources was not sent, and would be refused.
        {"PYTHONPATH": engine, "PYTHONDONTWRITEBYTECODE": "1"},
        hear,
        host=transport.host,
        note=note,
        limit_s=_BUILD_S,
    )
    if code:
        why = last_words("\n".join(said), ": ")
        raise CompileError(f"host {transport.host}: the kernels were not built{why}")


def _with_cuda(line: list[str]) -> list[str]:
    return ["sh", "-c", f'PATH="$PATH:{CUDA}" exec "$@"', "sh", *line]
