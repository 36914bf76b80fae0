"""Compiles `csrc` into the kernel library, on a machine that needs nvcc and no GPU.

Every source becomes one object that holds machine code for all architectures; objects are kept
under the hash of all that goes into them, so that only what changed is compiled again. The library
is put in place by a rename: whoever loads it sees the old one or the new one.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from kdtree_engine.atomic import write_atomically
from kdtree_engine.errors import KdError, MissingError
from kdtree_engine.library import PACKAGED_LIBRARY
from kdtree_engine.resources import (
    KernelResources,
    broken_limits,
    parse_ptxas,
    tile_of,
    with_dynamic_shared,
)

__all__ = [
    "ARCHITECTURES",
    "CSRC",
    "BuildReport",
    "CompileError",
    "architectures_of",
    "build",
    "origin_of",
    "require_current",
    "sources_digest",
]

ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_120")
CSRC = pathlib.Path(__file__).parents[1] / "csrc"
_OBJECTS = pathlib.Path(__file__).parents[1] / "build" / "objects"
_PTX = ("compute_90", "compute_120")
"""PTX for GPUs without machine code here: compute_90 for sm_100 and sm_103, compute_120 beyond."""
_FLAGS = (
    "-O3",
    "-std=c++17",
    "-lineinfo",
    "-Werror=all-warnings",
    "-Xptxas=-v,--warning-as-error",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Werror",
)
_ONLY_FOR = {
    "tree_verify_tall_": ("sm_90",),
    "tree_verify_wgmma_": ("sm_90a",),
}
"""Sources, by how their name begins, that only some architectures can run: tall tiles take more
shared memory than a block of the others gets, and sm_90a alone has wgmma. (The "a" binds machine
code to compute capability 9.0: there is no PTX of it for what comes after.)"""
_ARCH_LIST = " ".join((*ARCHITECTURES, "sm_90a", *_PTX))
"""What the library's `build_info` says that it holds."""
_FIRST_ERROR_LINES = 6


class CompileError(KdError):
    """nvcc refused a source, or a kernel breaks a limit of its architecture."""


@dataclasses.dataclass(frozen=True)
class BuildReport:
    """What a build made.

    kernels: one entry for each kernel and architecture, sorted by both.
    compiled, reused: sources compiled now, and those whose object was kept from an earlier build.
    seconds: of the whole build.
    """

    library: pathlib.Path
    kernels: tuple[KernelResources, ...]
    compiled: int
    reused: int
    seconds: float
    nvcc: str


def build(
    *,
    csrc: pathlib.Path = CSRC,
    library: pathlib.Path = PACKAGED_LIBRARY,
    objects: pathlib.Path = _OBJECTS,
    jobs: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> BuildReport:
    """Compiles every .cu below `csrc` and links `library`.

    jobs: compilers run at once; None: one for each CPU core.
    progress: `progress(done, total, source)`, called from worker threads.

    MissingError: no nvcc, no sources or no apache-tvm-ffi. CompileError: with the first lines that
    the compiler gave, or with the limits that are broken; the old library then stays.
    """
    begin = time.monotonic()
    compiler = _Compiler.found(csrc)
    sources = sorted(csrc.rglob("*.cu"))
    if not sources:
        raise MissingError(
            f"no CUDA sources in {csrc}", remedy="build from a checkout: a wheel carries none"
        )
    headers = _hash_headers(csrc)
    objects.mkdir(parents=True, exist_ok=True)

    done = 0

    def one(source: pathlib.Path) -> _Object:
        nonlocal done
        made = compiler.compile(source, headers, objects)
        done += 1
        if progress is not None:
            progress(done, len(sources), source.relative_to(csrc).as_posix())
        return made

    with concurrent.futures.ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        futures = [pool.submit(one, source) for source in sources]
        try:
            made = [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            raise

    kernels = [kernel for item in made for kernel in parse_ptxas(item.log)]
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".link-") as folder:
        linked = pathlib.Path(folder) / library.name
        compiler.link([item.path for item in made], linked)
        kernels = with_dynamic_shared(kernels, compiler.shared_bytes(kernels, headers, objects))
        kernels = _readable(kernels)
        if faults := broken_limits(kernels):
            raise CompileError(f"{len(faults)} limits broken: " + "; ".join(faults))
        digest = sources_digest(csrc)
        linked.replace(library)
    report = BuildReport(
        library=library,
        kernels=tuple(kernels),
        compiled=sum(not item.reused for item in made),
        reused=sum(item.reused for item in made),
        seconds=time.monotonic() - begin,
        nvcc=compiler.version,
    )
    origin = {"sources": digest, "nvcc": report.nvcc, "seconds": round(report.seconds, 1)}
    write_atomically(_origin_file(library), json.dumps(origin) + "\n")
    return report


def sources_digest(csrc: pathlib.Path = CSRC) -> str:
    """SHA-256, in hex, over the names and bytes of everything in `csrc` that is compiled."""
    digest = hashlib.sha256(_hash_headers(csrc).encode())
    for source in sorted(csrc.rglob("*.cu")):
        digest.update(source.relative_to(csrc).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest.hexdigest()


def require_current(library: pathlib.Path, csrc: pathlib.Path = CSRC) -> None:
    """Raises CompileError where `library` was not built from `csrc` as it is now.

    What is measured with a library is recorded under the hash of the sources, so the two must
    belong together.
    """
    if origin_of(library).get("sources") != sources_digest(csrc):
        raise CompileError(
            f"{library} was not built from {csrc} as it is now", remedy="run `kd build`"
        )


def origin_of(library: pathlib.Path) -> dict[str, Any]:
    """What a build wrote beside `library`: `sources` (a digest), `nvcc`, `seconds`; {}: nothing."""
    try:
        origin = json.loads(_origin_file(library).read_text())
    except (OSError, json.JSONDecodeError):
        return {}
    return origin if isinstance(origin, dict) else {}


def _origin_file(library: pathlib.Path) -> pathlib.Path:
    return library.with_suffix(".json")


@dataclasses.dataclass(frozen=True)
class _Object:
    path: pathlib.Path
    log: str
    reused: bool


@dataclasses.dataclass(frozen=True)
class _Compiler:
    nvcc: str
    version: str
    includes: tuple[str, ...]
    tvm_ffi: pathlib.Path

    @classmethod
    def found(cls, csrc: pathlib.Path) -> _Compiler:
        nvcc = shutil.which("nvcc")
        if nvcc is None:
            raise MissingError(
                "nvcc is not on PATH",
                remedy="install the CUDA toolkit 13.0 and put its bin folder on PATH",
            )
        try:
            from tvm_ffi import libinfo
        except ModuleNotFoundError as error:
            raise MissingError(
                "apache-tvm-ffi, whose headers the library is compiled with, is not installed",
                remedy="pip install 'kdtree-engine[cuda]'",
            ) from error
        answer = _run([nvcc, "--version"])
        release = re.search(r"release [\d.]+, V([\d.]+)", answer.stdout)
        if answer.returncode or release is None:
            raise MissingError(
                f"{nvcc} does not work: {_first_lines(answer.stderr or answer.stdout)}",
                remedy="install the CUDA toolkit 13.0 and put its bin folder on PATH",
            )
        # A dict, as both may be the same folder.
        folders = dict.fromkeys([libinfo.find_include_path(), libinfo.find_dlpack_include_path()])
        return cls(
            nvcc=nvcc,
            version=release[1],
            includes=(f"-I{csrc}", *(f"-isystem={folder}" for folder in folders)),
            tvm_ffi=pathlib.Path(libinfo.find_libtvm_ffi()),
        )

    def compile(self, source: pathlib.Path, headers: str, objects: pathlib.Path) -> _Object:
        """The object of `source` and what ptxas said, an earlier build's where nothing changed."""
        flags = (*_FLAGS, f'-DKD_ARCH_LIST="{_ARCH_LIST}"', *_architecture_flags(source.name))
        key = hashlib.sha256(
            "\0".join((self.version, headers, *flags, *self.includes, source.name)).encode()
            + source.read_bytes()
        ).hexdigest()
        kept, log = objects / f"{key}.o", objects / f"{key}.log"
        if kept.is_file() and log.is_file():
            return _Object(kept, log.read_text(), reused=True)
        with tempfile.TemporaryDirectory(dir=objects, prefix=".compile-") as folder:
            fresh = pathlib.Path(folder) / "object.o"
            answer = _run([self.nvcc, "-c", *flags, *self.includes, str(source), "-o", str(fresh)])
            if answer.returncode:
                raise CompileError(
                    f"{source.name} does not compile: {_first_lines(answer.stderr + answer.stdout)}"
                )
            text = pathlib.Path(folder) / "object.log"
            text.write_text(answer.stderr + answer.stdout)
            text.replace(log)
            # The object comes last: where it is, its log is.
            fresh.replace(kept)
        return _Object(kept, log.read_text(), reused=False)

    def shared_bytes(
        self, kernels: Sequence[KernelResources], headers: str, objects: pathlib.Path
    ) -> dict[str, int]:
        """Dynamic shared memory of each tile, by `tile_of`: what its configuration declares.

        ptxas cannot know it, as a launch brings it along. So the headers are asked, by a small
        host program that prints kSmemBytes of the tiles that were compiled.
        """
        tiles = sorted({tile for kernel in kernels if (tile := tile_of(kernel.kernel))})
        if not tiles:
            return {}
        lines = "".join(
            f'  std::printf("%d\\n", int(kdtree::{tile}::kSmemBytes));\n' for tile in tiles
        )
        program = f'#include <cstdio>\n#include "tiles.h"\nint main() {{\n{lines}}}\n'
        key = hashlib.sha256((headers + program).encode()).hexdigest()
        kept = objects / f"{key}.tiles"
        if not kept.is_file():
            with tempfile.TemporaryDirectory(dir=objects, prefix=".tiles-") as folder:
                source, binary = pathlib.Path(folder) / "tiles.cu", pathlib.Path(folder) / "tiles"
                source.write_text(program)
                made = _run(
                    [self.nvcc, "-std=c++17", *self.includes, str(source), "-o", str(binary)]
                )
                answer = made if made.returncode else _run([str(binary)])
                if answer.returncode:
                    raise CompileError(f"tiles.h: {_first_lines(answer.stderr + answer.stdout)}")
                write_atomically(kept, answer.stdout)
        return dict(zip(tiles, map(int, kept.read_text().split()), strict=True))

    def link(self, objects: Sequence[pathlib.Path], library: pathlib.Path) -> None:
        """One shared library, with CUDA's runtime inside and apache-tvm-ffi's beside it."""
        answer = _run(
            [
                self.nvcc,
                "-shared",
                "-cudart=static",
                *map(str, objects),
                f"-L{self.tvm_ffi.parent}",
                "-ltvm_ffi",
                "-o",
                str(library),
            ]
        )
        if answer.returncode:
            raise CompileError(
                f"{library.name} does not link: {_first_lines(answer.stderr + answer.stdout)}"
            )


def _architecture_flags(source: str) -> list[str]:
    """Machine code for each architecture that can run the source, and PTX for what comes after."""
    flags = []
    for architecture in architectures_of(source):
        virtual = architecture.replace("sm_", "compute_")
        code = f"[{architecture},{virtual}]" if virtual in _PTX else architecture
        flags.append(f"-gencode=arch={virtual},code={code}")
    return flags


def architectures_of(source: str) -> tuple[str, ...]:
    """The architectures that a source, by its file's name, is compiled for."""
    for begin, architectures in _ONLY_FOR.items():
        if source.startswith(begin):
            return architectures
    return ARCHITECTURES


def _readable(kernels: Sequence[KernelResources]) -> list[KernelResources]:
    """The same kernels under the names that people read, where c++filt is there to give them."""
    names = [kernel.kernel for kernel in kernels]
    filter_program = shutil.which("c++filt")
    if filter_program is not None:
        answer = _run([filter_program, *names])
        lines = answer.stdout.splitlines()
        if answer.returncode == 0 and len(lines) == len(names):
            # "void kdtree::(anonymous namespace)::merge_kernel<__half>(kdtree::Params)"
            names = [
                re.sub(r"\((?!anon).*|^void |kdtree::|\(anonymous namespace\)::", "", line).replace(
                    " >", ">"
                )
                for line in lines
            ]
    renamed = [
        dataclasses.replace(kernel, kernel=name)
        for kernel, name in zip(kernels, names, strict=True)
    ]
    return sorted(renamed, key=lambda kernel: (kernel.kernel, kernel.architecture))


def _hash_headers(csrc: pathlib.Path) -> str:
    """One hash of every header: which source includes which is not worth finding out."""
    digest = hashlib.sha256()
    for suffix in ("*.h", "*.cuh", "*.hpp"):
        for header in sorted(csrc.rglob(suffix)):
            digest.update(header.relative_to(csrc).as_posix().encode() + b"\0")
            digest.update(header.read_bytes())
    return digest.hexdigest()


def _first_lines(text: str) -> str:
    """The first lines that speak of an error, else the first lines."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b(error|fatal|undefined)\b", line, re.I)]
    return " | ".join((errors or lines or ["no message"])[:_FIRST_ERROR_LINES])


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)
