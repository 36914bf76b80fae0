"""The gates of services depend on all that their servers load."""

from __future__ import annotations

import pathlib

import pytest

from phases.content import imported_files
from phases.gate import Gate
from phases.registry import load_phases
from phases.served import KERNELS, PLUGIN

GATES = [gate for phase in load_phases() for gate in phase.gates if set(gate.data) >= set(PLUGIN)]


def files_of(root: pathlib.Path, globs: tuple[str, ...]) -> set[pathlib.Path]:
    return {path.resolve() for pattern in globs for path in root.glob(pattern)}


def test_what_the_plugin_loads_is_part_of_it(root: pathlib.Path) -> None:
    loaded = {
        path.resolve()
        for module in ("plugin", "start_up", "backend", "ddtree", "ddtree_worker", "kv_moves")
        for path in imported_files(root, f"kdtree_engine.sglang_ext.{module}")
    }
    assert len(loaded) > 40
    assert loaded <= files_of(root, PLUGIN)


def test_both_kernel_libraries_are_part_of_it(root: pathlib.Path) -> None:
    kernels = {path.name for path in files_of(root, KERNELS)}
    assert {"tree_verify.cuh", "indices.cu", "compact.cu"} <= kernels


def test_every_gate_of_right_tokens_depends_on_it() -> None:
    exact = {gate.name for phase in load_phases() for gate in phase.gates if gate.token_exact}
    served = {name for name in exact if "service" in name or "ddtree" in name}
    assert served <= {gate.name for gate in GATES}


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.name)
def test_no_glob_is_empty(root: pathlib.Path, gate: Gate) -> None:
    assert all(any(root.glob(pattern)) for pattern in gate.data)
