"""Building: from a small source with the real nvcc, and what is said where it cannot be done."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess

import pytest

from kdtree_engine.build import (
    ARCHITECTURES,
    CSRC,
    BuildReport,
    CompileError,
    build,
    origin_of,
    require_current,
    sources_digest,
)
from kdtree_engine.errors import MissingError
from kdtree_engine.library import load

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")

BINDING = """\
#include <tvm/ffi/function.h>
#include "answer.h"
__global__ void store(int* to) { *to = ANSWER; }
static int64_t answer() { return ANSWER; }
#pragma GCC diagnostic ignored "-Wunused-parameter"
TVM_FFI_DLL_EXPORT_TYPED_FUNC(answer, answer);
"""


@pytest.fixture
def csrc(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "binding.cu").write_text(BINDING)
    (folder / "answer.h").write_text("#define ANSWER 42\n")
    return folder


def built(csrc: pathlib.Path) -> BuildReport:
    folder = csrc.parent
    return build(csrc=csrc, library=folder / "lib" / "libkd.so", objects=folder / "objects")


@pytest.mark.slow
@needs_nvcc
def test_a_build_loads_and_is_reused_until_something_changes(csrc: pathlib.Path) -> None:
    report = built(csrc)
    assert load(report.library).answer() == 42  # type: ignore[attr-defined]
    assert (report.compiled, report.reused) == (1, 0)
    assert report.seconds > 0
    assert sorted(kernel.architecture for kernel in report.kernels) == sorted(ARCHITECTURES)
    assert {kernel.kernel for kernel in report.kernels} == {"store"}

    again = built(csrc)
    assert (again.compiled, again.reused) == (0, 1)
    assert again.kernels == report.kernels

    (csrc / "answer.h").write_text("#define ANSWER 43\n")
    changed = built(csrc)
    assert (changed.compiled, changed.reused) == (1, 0)
    # Under another name, as a process that has loaded a file keeps it for that path.
    fresh = changed.library.with_name("fresh.so")
    changed.library.rename(fresh)
    assert load(fresh).answer() == 43  # type: ignore[attr-defined]
    left = {path.name for path in report.library.parent.iterdir()}
    assert left == {"fresh.so", "libkd.json"}, "only what it was built from stands beside it"


@needs_nvcc
@pytest.mark.parametrize(
    ("name", "architecture"),
    [("tree_verify_tall_x.cu", "sm_90"), ("tree_verify_wgmma_x.cu", "sm_90a")],
)
def test_a_source_may_be_for_one_architecture(
    csrc: pathlib.Path, name: str, architecture: str
) -> None:
    (csrc / "binding.cu").unlink()
    (csrc / name).write_text("__global__ void store(int* to) { *to = 1; }\n")
    assert {kernel.architecture for kernel in built(csrc).kernels} == {architecture}


@pytest.mark.parametrize("said", [None, "not JSON", "[]"])
def test_a_library_of_unknown_origin_has_none(tmp_path: pathlib.Path, said: str | None) -> None:
    if said is not None:
        (tmp_path / "lib.json").write_text(said)
    assert origin_of(tmp_path / "lib.so") == {}


@needs_nvcc
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("int broken( { return 1; }", r"binding\.cu does not compile: .*error"),
        ("static void never_called() {}", r"binding\.cu does not compile: .*never_called"),
    ],
)
def test_an_error_or_a_warning_ends_the_build_and_keeps_the_old_library(
    csrc: pathlib.Path, line: str, said: str
) -> None:
    library = csrc.parent / "lib" / "libkd.so"
    library.parent.mkdir()
    library.write_text("the old one")
    (csrc / "binding.cu").write_text(f"{BINDING}{line}\n")
    with pytest.raises(CompileError, match=said) as caught:
        built(csrc)
    assert "\n" not in str(caught.value), "one line"
    assert library.read_text() == "the old one"


def test_without_nvcc_it_says_what_is_missing(
    csrc: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(csrc))
    with pytest.raises(MissingError, match=r"nvcc is not on PATH \(install the CUDA toolkit"):
        built(csrc)


def test_an_nvcc_that_does_not_work_is_named(
    csrc: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = csrc.parent / "bin" / "nvcc"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho no license >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken.parent}:/usr/bin:/bin")
    with pytest.raises(MissingError, match="nvcc does not work: no license"):
        built(csrc)


@needs_nvcc
def test_without_sources_it_says_so(tmp_path: pathlib.Path) -> None:
    (tmp_path / "csrc").mkdir()
    with pytest.raises(MissingError, match=r"no CUDA sources in .*csrc"):
        built(tmp_path / "csrc")


def test_a_library_belongs_to_the_sources_it_was_built_from(tmp_path: pathlib.Path) -> None:
    csrc, library = tmp_path / "csrc", tmp_path / "lib.so"
    csrc.mkdir()
    (csrc / "kernel.cu").write_text("1")
    (tmp_path / "lib.json").write_text(json.dumps({"sources": sources_digest(csrc)}))
    require_current(library, csrc)
    for change in ("kernel.cu", "header.cuh"):
        (csrc / change).write_text("2")
        with pytest.raises(CompileError, match=r"was not built from .* \(run `kd build`\)"):
            require_current(library, csrc)
        (tmp_path / "lib.json").write_text(json.dumps({"sources": sources_digest(csrc)}))
    (tmp_path / "lib.json").unlink()
    with pytest.raises(CompileError):
        require_current(library, csrc)


@needs_nvcc
def test_an_override_goes_before_what_a_call_brings_along(tmp_path: pathlib.Path) -> None:
    """(override, call) -> what is launched: the rule of kernels.h, by a host program."""
    cases = {
        ((0, 0, 0), (72, 32, 2)): (72, 32, 2),
        ((0, 0, 4), (72, 32, 2)): (72, 32, 4),
        ((24, 16, 0), (72, 32, 2)): (24, 16, 0),
        ((24, 0, 1), (72, 32, 2)): (24, 0, 1),
        # KDTREE_WGMMA=1: a class of tiles. A call whose tile is one of them keeps it.
        ((0, 64, 0), (72, 64, 2)): (72, 64, 2),
        ((0, 64, 0), (72, 32, 2)): (0, 64, 0),
        ((0, 64, 0), (0, 0, 0)): (0, 64, 0),
    }
    lines = "".join(
        f"  show(kdtree::resolved_tuning({{{', '.join(map(str, forced))}}}, "
        f"{{{', '.join(map(str, call))}}}));\n"
        for forced, call in cases
    )
    source, program = tmp_path / "rule.cu", tmp_path / "rule"
    source.write_text(
        '#include <cstdio>\n#include "kernels.h"\n'
        "void show(const kdtree::Tuning& t) {\n"
        '  std::printf("%d %d %d\\n", t.row_tile, t.block_tokens, t.min_blocks);\n}\n'
        f"int main() {{\n{lines}}}\n"
    )
    subprocess.run(["nvcc", f"-I{CSRC}", str(source), "-o", str(program)], check=True)
    said = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    found = [tuple(map(int, line.split())) for line in said.splitlines()]
    assert found == list(cases.values())
