"""The tree kernels themselves, on this machine: every thread of a block is a fiber (support/simt).

Barriers and warp operations are real, and threads take turns in an order drawn from a seed, so
that a missing barrier shows. What this cannot show is memory: alignment, bounds, caches.
"""

from __future__ import annotations

import ctypes
import dataclasses
import pathlib
import re
import shutil
import subprocess

import pytest
import torch
from host_code import OUTPUTS, junk_trees, outputs_of, pointer
from tree_cases import TreeCase, standard_cases

from kdtree_engine.ops import (
    AcceptedPaths,
    accept_trees,
    build_draft_trees,
    compact_kv,
    fill_kv_indices,
)
from kdtree_engine.ops.acceptance import sample_tokens
from kdtree_engine.ops.library import TREES_CSRC
from kdtree_engine.ops.relocation import as_windows

LAUNCH = re.compile(r"([\w:]+(?:<[^<>]+>)?)<<<(.+), (\w+), 0, stream>>>\(p\);")
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@pytest.fixture(scope="module")
def simt(root: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """csrc_trees with its launches as loops over blocks, compiled by g++."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not on PATH")
    folder = tmp_path_factory.mktemp("simt")
    support = root / "tests" / "support" / "simt"
    sources = [support / "driver.cpp"]
    for name in ("build", "accept", "compact", "indices"):
        text, launches = LAUNCH.subn(
            r"simt::launch(\2, \3, [&] { \1(p); });", (TREES_CSRC / f"{name}.cu").read_text()
        )
        assert launches, f"{name}.cu: no launch was found"
        sources.append(folder / f"{name}.cpp")
        sources[-1].write_text(text)
    library = folder / "simt.so"
    flags = ["-O1", "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC", "-w"]
    subprocess.run(
        ["g++", *flags, f"-I{support}", f"-I{TREES_CSRC}", *map(str, sources), "-o", str(library)],
        check=True,
    )
    return ctypes.CDLL(str(library))


def assert_kernels_build(
    simt: ctypes.CDLL,
    scores: torch.Tensor,
    budget: int,
    top_k: int,
    *,
    from_logits: bool,
    token_ids: torch.Tensor | None = None,
    clean: torch.Tensor | None = None,
    bare: bool = False,
) -> None:
    """What the kernels write is what the CPU writes, every tensor and every bit.

    clean: the same scores for the CPU, which refuses those that are none.
    bare: without root tokens and a full mask.
    """
    batch, depth, columns = scores.shape
    roots = None if bare else torch.arange(batch) + 5
    prefixes = torch.arange(batch) * 13
    found = junk_trees(batch, depth, budget, prefixes)
    if bare:
        found = dataclasses.replace(found, full_mask=None)
    out = outputs_of(found)
    simt.build_trees(
        pointer(scores),
        TYPES[scores.dtype],
        ctypes.c_int64(scores.stride(0)),
        ctypes.c_int64(scores.stride(1)),
        batch,
        depth,
        columns,
        min(columns, budget, top_k),
        int(from_logits),
        pointer(token_ids),
        pointer(roots),
        pointer(prefixes),
        ctypes.byref(out),
    )
    wanted = build_draft_trees(
        scores if clean is None else clean,
        budget,
        top_k,
        from_logits=from_logits,
        token_ids=token_ids,
        root_tokens=roots,
        prefix_lengths=prefixes,
        full_mask=None if found.full_mask is None else torch.ones_like(found.full_mask),
    )
    for name in OUTPUTS[:-1] if bare else OUTPUTS:
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name


@pytest.mark.parametrize("case", standard_cases()[::7], ids=str)
def test_trees_of_log_probs(simt: ctypes.CDLL, case: TreeCase) -> None:
    simt.set_order(case.seed)
    scores = case.log_probs(torch.float32)
    assert_kernels_build(simt, scores, case.budget, case.top_k, from_logits=False)


def test_a_warp_that_runs_ahead_waits_for_what_others_load(simt: ctypes.CDLL) -> None:
    """Other scores in each batch, so that what the block before left behind is wrong."""
    for seed in range(6):
        simt.set_order(seed)
        case = TreeCase("plain", batch=4, depth=3, columns=64, budget=64, top_k=64, seed=seed)
        assert_kernels_build(simt, case.log_probs(torch.float32), 64, 64, from_logits=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("columns", [40, 4096, 4097, 9000])
def test_trees_of_logits(simt: ctypes.CDLL, dtype: torch.dtype, columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    scores = (torch.randn(1, 2, columns, generator=generator) * 3).to(dtype)
    scores[0, 1, ::3] = -torch.inf
    for seed, top_k in enumerate((1, 16, 64)):
        simt.set_order(seed)
        assert_kernels_build(simt, scores, 20, top_k, from_logits=True)


def test_ties_across_chunks_a_view_and_token_ids(simt: ctypes.CDLL) -> None:
    generator = torch.Generator().manual_seed(1)
    block = torch.randint(0, 3, (2, 4, 4200), generator=generator).to(torch.float32)
    block[1, 2] = -torch.inf
    scores = block[:, 1:, 5:]
    token_ids = torch.randperm(9000, generator=generator)[: scores.shape[2]].repeat(2, 3, 1)
    assert_kernels_build(simt, scores, 65, 16, from_logits=True, token_ids=token_ids)


def test_no_root_and_no_full_mask(simt: ctypes.CDLL) -> None:
    case = TreeCase("plain", batch=2, depth=4, columns=30, budget=40, top_k=9, seed=2)
    scores = case.log_probs(torch.float32)
    assert_kernels_build(simt, scores, 40, 9, from_logits=False, bare=True)


@pytest.mark.parametrize("seed", range(24))
def test_drawn_sizes(simt: ctypes.CDLL, seed: int) -> None:
    """Depths, budgets and ranks of all sizes, of one launch and of two, by scores of both kinds."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (1,), generator=generator))

    simt.set_order(seed)
    columns = drawn(1, 64) if seed % 3 else drawn(65, 700)
    kind = ("plain", "quantised", "holes", "equal", "scales", "short")[seed % 6]
    budget = (drawn(1, 128), 64, 128, drawn(62, 66))[seed % 4]
    top_k = (1, 16, 33, 64)[seed // 4 % 4]
    case = TreeCase(kind, drawn(1, 2), drawn(1, 16), columns, budget, top_k, seed)
    scores = case.log_probs(torch.float32)
    assert_kernels_build(simt, scores, budget, top_k, from_logits=False)
    dtype = (torch.bfloat16, torch.float16, torch.float32)[seed % 3]
    assert_kernels_build(simt, case.logits(dtype), budget, top_k, from_logits=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("top_k", [1, 16, 33, 64])
@pytest.mark.parametrize("kind", ["equal", "ties", "rising", "falling", "few", "nothing"])
def test_chunks_that_a_bound_does_not_thin_out(
    simt: ctypes.CDLL, kind: str, top_k: int, dtype: torch.dtype
) -> None:
    """More columns reach the bound than are ranked at once: those are found by bisection."""
    generator = torch.Generator().manual_seed(top_k)
    columns = 4096 + 300  # the second chunk leaves a warp without columns
    scores = {
        "equal": torch.full((columns,), 2.5),
        "ties": torch.randint(0, 2, (columns,), generator=generator).float(),
        "rising": torch.arange(columns) / 64.0 - 40,
        "falling": 40 - torch.arange(columns) / 64.0,
        "few": torch.full((columns,), -torch.inf),
        "nothing": torch.full((columns,), -torch.inf),
    }[kind].repeat(1, 1, 1)
    if kind == "few":
        scores[..., 7::61] = torch.randn(scores[..., 7::61].shape, generator=generator)
    for seed, from_logits in enumerate((True, False)):
        simt.set_order(seed)
        given = (scores if from_logits else scores - 100).to(dtype)
        assert_kernels_build(simt, given, 64, top_k, from_logits=from_logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("columns", [50, 5000])
def test_what_is_no_score_is_never_chosen(
    simt: ctypes.CDLL, columns: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(columns)
    for from_logits in (True, False):
        scores = torch.randn(1, 3, columns, generator=generator)
        scores = (3 * scores if from_logits else -scores.abs()).to(dtype)
        clean = scores.clone()
        for begin, value in enumerate((torch.nan, torch.inf, -torch.inf, -torch.nan)):
            scores[0, :2, begin::11] = value
            clean[0, :2, begin::11] = -torch.inf
        if not from_logits:
            scores[0, 2, 5::7] = 0.5
            clean[0, 2, 5::7] = -torch.inf
        scores[0, 1, 10:], clean[0, 1, 10:] = torch.nan, -torch.inf
        assert_kernels_build(simt, scores, 40, 16, from_logits=from_logits, clean=clean)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("begin", [0, 1, 2, 4, 8])
def test_rows_that_begin_anywhere(simt: ctypes.CDLL, begin: int, dtype: torch.dtype) -> None:
    """Copies of 16 bytes must be aligned, or the stand-in for CUDA's ends the process."""
    generator = torch.Generator().manual_seed(begin)
    for width in (8192 + 16, 8192 + 17):
        block = torch.randn(2, 2, width, generator=generator).to(dtype)
        scores = block[:, :, begin : begin + 8192]
        assert_kernels_build(simt, scores, 20, 16, from_logits=True)


def test_a_large_vocabulary(simt: ctypes.CDLL) -> None:
    generator = torch.Generator().manual_seed(8)
    scores = (torch.randn(1, 2, 163_840, generator=generator) * 3).bfloat16()
    scores[0, 1] = (scores[0, 1] / 4).round()
    for top_k in (16, 64):
        assert_kernels_build(simt, scores, 64, top_k, from_logits=True)


@pytest.mark.parametrize("case", standard_cases()[::12], ids=str)
def test_the_walk(simt: ctypes.CDLL, case: TreeCase) -> None:
    trees = build_draft_trees(case.log_probs(), case.budget, case.top_k)
    generator = torch.Generator().manual_seed(case.seed)
    child = trees.retrieve_next_token.clamp(min=0)
    other = torch.randint(trees.nodes, child.shape, generator=generator)
    wanted_node = torch.where(torch.rand(child.shape, generator=generator) < 0.8, child, other)
    targets = trees.tokens.gather(1, wanted_node)
    wanted = accept_trees(trees, target_tokens=targets)
    found = AcceptedPaths(*(torch.full_like(value, 77) for value in vars(wanted).values()))
    simt.accept(
        *map(pointer, (trees.tokens, trees.parents, targets)),
        *map(pointer, (found.nodes, found.counts, found.bonus)),
        case.batch,
        trees.nodes,
        case.depth + 1,
    )
    for name in ("nodes", "counts", "bonus"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name


@pytest.mark.parametrize("columns", [1, 1023, 1025, 30_000])
def test_a_draw_picks_its_token(simt: ctypes.CDLL, columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    probs = torch.randn(8, columns, generator=generator).mul(3).softmax(-1)
    probs[1, columns // 2 + 1 :] = 0
    draws = torch.rand(8, generator=generator)
    draws[:3] = torch.tensor([0.0, 0.99999994, 2.0**-31])
    found = torch.full((8,), 77)
    simt.sample(pointer(probs), pointer(draws), pointer(found), 8, columns)
    assert torch.equal(found, sample_tokens(probs, draws))
    nothing = torch.zeros(1, columns)
    simt.sample(pointer(nothing), pointer(draws), pointer(found), 1, columns)
    assert int(found[0]) == -1, "a row without weight"


@pytest.mark.parametrize("steps", [2, 17, 40])
def test_rows_move(simt: ctypes.CDLL, steps: int) -> None:
    batch, layers, nodes, width = 3, 2, 50, 584  # 73 vectors of 16 bytes, for 96 threads; then 146
    for repeat in (1, 2):
        generator = torch.Generator().manual_seed(steps)
        rows, counts = torch.full((batch, steps), -1), torch.tensor([steps, 1, 0])
        others = (torch.randperm(nodes - 1, generator=generator)[: steps - 1] + 1).sort().values
        rows[0], rows[1, 0] = torch.cat([torch.zeros(1, dtype=torch.int64), others]), 0
        windows = torch.randperm(200, generator=generator)[: batch * nodes].view(batch, nodes)
        pools = torch.randn(layers, 200, width * repeat, generator=generator).to(torch.bfloat16)
        found = pools.clone()
        addresses = torch.tensor([pool.data_ptr() for pool in found])
        row_bytes = ctypes.c_int64(2 * width * repeat)
        simt.compact(
            pointer(addresses),
            layers,
            row_bytes,
            *map(pointer, (rows, counts, windows)),
            batch,
            steps,
            nodes,
        )
        compact_kv(pools, AcceptedPaths(rows, counts, counts), windows)
        assert torch.equal(found, pools)


@pytest.mark.parametrize("moves", [1, 64, 150])
def test_rows_move_anywhere(simt: ctypes.CDLL, moves: int) -> None:
    """What `move_rows` makes of moves, by the kernel's body."""
    generator = torch.Generator().manual_seed(moves)
    drawn = torch.randperm(399, generator=generator)[: 2 * moves] + 1
    sources, destinations = drawn[:moves].contiguous(), drawn[moves:].contiguous()
    paths, windows = as_windows(sources, destinations)
    pools = torch.randn(2, 400, 584, generator=generator).to(torch.bfloat16)
    found = pools.clone()
    addresses = torch.tensor([pool.data_ptr() for pool in found])
    simt.compact(
        pointer(addresses),
        2,
        ctypes.c_int64(2 * 584),
        *map(pointer, (paths.nodes, paths.counts, windows)),
        *(windows.shape[0], paths.nodes.shape[1], windows.shape[1]),
    )
    pools[:, destinations] = pools[:, sources]
    assert torch.equal(found, pools)


def filled(
    simt: ctypes.CDLL,
    table: torch.Tensor,
    requests: torch.Tensor,
    lengths: torch.Tensor,
    room: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kv_indptr` and `kv_indices` by the kernel, -7 where it writes nothing."""
    kv_indptr = torch.full((len(requests) + 1,), 77, dtype=torch.int32)
    kv_indices = torch.full((room,), -7)
    simt.fill_indices(
        pointer(table),
        pointer(requests),
        int(requests.dtype == torch.int64),
        pointer(lengths),
        int(lengths.dtype == torch.int64),
        pointer(kv_indptr),
        pointer(kv_indices),
        *map(ctypes.c_int64, (*table.shape, room)),
        len(requests),
    )
    return kv_indptr, kv_indices


@pytest.mark.parametrize(("batch", "width"), [(1, 1), (1, 5000), (3, 1025), (70, 33), (600, 7)])
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
def test_slots_of_a_batch(simt: ctypes.CDLL, batch: int, width: int, index: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(batch)
    simt.set_order(batch)
    table = torch.randint(0, 2**31 - 1, (batch + 2, width), generator=generator).to(torch.int32)
    requests = torch.randperm(batch + 2, generator=generator)[:batch].to(index)
    lengths = torch.randint(0, width + 1, (batch,), generator=generator).to(index)
    lengths[0] = width
    room = int(lengths.sum()) + 5
    wanted = torch.full((batch + 1,), 77, dtype=torch.int32), torch.full((room,), -7)
    fill_kv_indices(table, requests, lengths, *wanted)
    found = filled(simt, table, requests, lengths, room)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


def test_more_slots_than_32_bits_count_are_written_nowhere(simt: ctypes.CDLL) -> None:
    """40 requests of one row that is said to have 2^30 slots; of what is there all is listed."""
    table = torch.tensor([[5, 6, 7]], dtype=torch.int32)
    requests, lengths = torch.zeros(40).long(), torch.full((40,), 1 << 30)
    kv_indptr = torch.zeros(41, dtype=torch.int32)
    kv_indices = torch.full((3,), -7)
    simt.fill_indices(
        pointer(table),
        pointer(requests),
        1,
        pointer(lengths),
        1,
        pointer(kv_indptr),
        pointer(kv_indices),
        *map(ctypes.c_int64, (1, 1 << 30, 3)),
        40,
    )
    assert kv_indices.tolist() == [5, 6, 7]
    assert kv_indptr[:2].tolist() == [0, 1 << 30]


def test_nothing_is_written_behind_the_list_or_of_a_row_that_is_not_there(
    simt: ctypes.CDLL,
) -> None:
    table = torch.arange(1, 41, dtype=torch.int32).view(4, 10)
    lengths = torch.tensor([12, -3, 10, 10])  # the first is cut to the table's width
    kv_indptr, kv_indices = filled(simt, table, torch.tensor([1, 0, 4, 3]), lengths, 26)
    assert kv_indptr.tolist() == [0, 10, 10, 20, 30]
    assert kv_indices.tolist() == [*range(11, 21), *[-7] * 10, *range(31, 37)]
