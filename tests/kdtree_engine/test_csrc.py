"""The CUDA sources as they are: they compile for every architecture, within its limits."""

from __future__ import annotations

import pytest

from kdtree_engine.build import ARCHITECTURES, BuildReport
from kdtree_engine.library import load

pytestmark = pytest.mark.slow


def test_every_architecture_has_its_kernels(built: BuildReport) -> None:
    """A warning would have ended the build, and so would a broken limit."""
    found = {kernel.architecture for kernel in built.kernels}
    assert found == {*ARCHITECTURES, "sm_90a"}


def test_what_sm_120_may_pick_spills_nothing_and_fits_a_block(built: BuildReport) -> None:
    tiles = [kernel for kernel in built.kernels if kernel.architecture == "sm_120"]
    assert sum(tile.kernel.startswith("tree_verify_kernel") for tile in tiles) == 6
    assert {tile.spill_bytes for tile in tiles} == {0}
    assert max(tile.shared_bytes for tile in tiles) <= 101_376


def test_the_library_loads_without_a_gpu_and_says_what_it_holds(built: BuildReport) -> None:
    said = str(load(built.library).build_info())
    assert all(architecture in said for architecture in (*ARCHITECTURES, "sm_90a", "compute_120"))
