"""What ptxas says of a kernel, read and held against the limits of its architecture."""

from __future__ import annotations

import dataclasses

import pytest

from kdtree_engine.resources import (
    KernelResources,
    broken_limits,
    parse_ptxas,
    tile_of,
    with_dynamic_shared,
)

# As nvcc 13.0 writes it: a tile, then a kernel that calls a function which is not inlined.
PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z6verifyI4TileI6__halfLi72ELi32EEEvv' for 'sm_80'
ptxas info    : Function properties for _Z6verifyI4TileI6__halfLi72ELi32EEEvv
    24 bytes stack frame, 20 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 512 bytes smem, 360 bytes cmem[0]
ptxas info    : Compile time = 24.403 ms
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z5mergePf' for 'sm_120'
ptxas info    : Function properties for _Z5mergePf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 38 registers, used 0 barriers
ptxas info    : Compile time = 17.385 ms
ptxas info    : Function properties for _Z5slow_f
    16 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads
"""
TILE = "_Z6verifyI4TileI6__halfLi72ELi32EEEvv"


def test_each_kernel_and_architecture_is_read() -> None:
    assert parse_ptxas(PTXAS) == [
        KernelResources(TILE, "sm_80", 255, 24, 44, 512),
        # The spills of what it calls are its own.
        KernelResources("_Z5mergePf", "sm_120", 38, 0, 16, 0),
    ]
    assert parse_ptxas("") == []


def test_a_tile_is_found_by_its_template_arguments() -> None:
    assert tile_of(TILE) == "Tile<__half, 72, 32>"
    mma = "_ZN1k4TileI13__nv_bfloat16Li16ELi16ELi3ELi1EEE"
    assert tile_of(mma) == "Tile<__half, 16, 16, 3, 1>"
    wgmma = "_ZN1k6verifyINS_6WgTileI13__nv_bfloat16Li72ELi16EEEEEvNS_6ParamsE"
    assert tile_of(wgmma) == "WgTile<__half, 72, 16>"
    assert tile_of("_Z5mergePf") is None


def test_dynamic_shared_memory_is_added_to_tiles() -> None:
    tile, merge = with_dynamic_shared(parse_ptxas(PTXAS), {"Tile<__half, 72, 32>": 100_000})
    assert tile.shared_bytes == 100_512
    assert merge.shared_bytes == 0
    with pytest.raises(KeyError, match="72, 32"):
        with_dynamic_shared(parse_ptxas(PTXAS), {})


def a_tile(**changes: object) -> KernelResources:
    tile = KernelResources("tile", "sm_120", 255, 0, 0, 0, dynamic_shared_bytes=101_376)
    return dataclasses.replace(tile, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kernels", "faults"),
    [
        ([a_tile()], []),
        ([a_tile(spill_bytes=8)], ["tile on sm_120: 8 bytes spilled, none allowed"]),
        ([a_tile(spill_bytes=8, architecture="sm_90")], []),
        (
            [a_tile(spill_bytes=8, architecture="sm_90a", dynamic_shared_bytes=232_448)],
            ["tile on sm_90a: 8 bytes spilled, none allowed"],
        ),
        ([a_tile(architecture="sm_90a", dynamic_shared_bytes=232_449)], ["no tile fits sm_90a"]),
        # A tile too large is not picked, and may spill; but something has to be left to pick.
        ([a_tile(), a_tile(dynamic_shared_bytes=101_377, spill_bytes=8)], []),
        ([a_tile(dynamic_shared_bytes=101_377)], ["no tile fits sm_120"]),
        (
            [a_tile(), a_tile(kernel="merge", dynamic_shared_bytes=0, static_shared_bytes=101_377)],
            ["merge on sm_120: 101377 bytes of shared memory, the limit is 101376"],
        ),
    ],
)
def test_limits(kernels: list[KernelResources], faults: list[str]) -> None:
    assert broken_limits(kernels) == faults
