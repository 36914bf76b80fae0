"""The tree kernels' own decisions under g++, held against the oracle; and what nvcc makes of them.

`test_simt.py` runs the kernels themselves; what a GPU alone shows is in
tests/gpu/test_trees_on_gpu.py.
"""

from __future__ import annotations

import ctypes
import pathlib
import shutil
import subprocess

import pytest
import torch
from host_code import OUTPUTS, junk_trees, outputs_of, pointer
from tree_cases import TreeCase, same_tree, standard_cases

from kdtree_engine.build import ARCHITECTURES, BuildReport
from kdtree_engine.library import load
from kdtree_engine.ops import (
    DraftTrees,
    acceptance,
    build_draft_trees,
    compaction,
    draft_trees,
    kv_indices,
)
from kdtree_engine.ops.acceptance import sample_tokens
from kdtree_engine.ops.candidates import fixed_exp, log_normaliser, top_candidates
from kdtree_engine.ops.library import (
    TREES_CSRC,
    TREES_LIBRARY,
    build_tree_kernels,
    tree_kernels,
)
from kdtree_engine.reference.tree import build_draft_tree


@pytest.fixture(scope="module")
def host(root: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The headers of csrc_trees, compiled for this machine."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not on PATH")
    library = tmp_path_factory.mktemp("host") / "trees_on_host.so"
    source = root / "tests" / "support" / "trees_on_host.cpp"
    flags = ["-O2", "-std=c++17", "-ffp-contract=off", "-Wall", "-Werror", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, f"-I{TREES_CSRC}", str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def candidates(
    host: ctypes.CDLL, scores: torch.Tensor, ranks: int, *, from_logits: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities and tokens [B, D, ranks] and normalisers [B, D], by top_k.h and exact.h."""
    batch, depth, columns = scores.shape
    rows = scores.to(torch.float32).contiguous()
    log_probs = torch.empty(batch, depth, ranks, dtype=torch.float64)
    tokens = torch.empty(batch, depth, ranks, dtype=torch.int64)
    normalisers = torch.empty(batch, depth)
    host.candidates(
        pointer(rows),
        batch * depth,
        columns,
        ranks,
        int(from_logits),
        pointer(log_probs),
        pointer(tokens),
        pointer(normalisers),
    )
    return log_probs, tokens, normalisers


def selected(
    host: ctypes.CDLL,
    log_probs: torch.Tensor,
    tokens: torch.Tensor,
    budget: int,
    roots: torch.Tensor,
    prefixes: torch.Tensor,
) -> DraftTrees:
    """Trees by select.h, in tensors that held something else before."""
    batch, depth, ranks = log_probs.shape
    trees = junk_trees(batch, depth, budget, prefixes)
    host.grow(
        pointer(log_probs),
        pointer(tokens),
        batch,
        depth,
        ranks,
        pointer(roots),
        pointer(prefixes),
        ctypes.byref(outputs_of(trees)),
    )
    return trees


def test_the_exponential_has_torchs_bits(host: ctypes.CDLL) -> None:
    x = torch.cat([-torch.rand(100_000, generator=torch.Generator().manual_seed(1)) * 31])
    x[:6] = torch.tensor([0.0, -0.0, -30.0, -31.0, -torch.inf, torch.nan])
    found = torch.empty(len(x), dtype=torch.int64)
    host.exponentials(pointer(x), len(x), pointer(found))
    assert torch.equal(found, fixed_exp(x))


@pytest.mark.parametrize("size", [1e-3, 1.0, 12.0, 45.0])
def test_sums_of_exponentials_are_those_of_their_integers(host: ctypes.CDLL, size: float) -> None:
    """In float32 that are cut off; by hand it was held against every float32 from -45 to -2^-40."""
    generator = torch.Generator().manual_seed(int(size))
    x = -torch.rand(400_000, generator=generator) * size
    x[:8], x[8:16] = 0.0, -0.0
    x[16:24] = torch.tensor(
        [-torch.inf, torch.nan, -30.0, -29.999, -1e30, 0.0, -28.07, -(2.0**-149)]
    )
    x[24:32] = torch.tensor([-torch.inf] * 8)
    found = torch.empty(len(x) // 8, dtype=torch.int64)
    host.exponential_sums(pointer(x), len(x), pointer(found))
    assert torch.equal(found, fixed_exp(x).view(-1, 8).sum(1))


@pytest.mark.parametrize("columns", [1, 31, 4096, 4097, 20_000, 163_840])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_candidates_of_logits_have_torchs_bits(
    host: ctypes.CDLL, columns: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(columns)
    scores = (torch.randn(1, 3, columns, generator=generator) * 3).to(dtype)
    scores[0, 1, ::3] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0] * columns)[
        : -(-columns // 3)
    ]
    ranks = min(columns, 64)
    log_probs, tokens, normalisers = candidates(host, scores, ranks, from_logits=True)
    wanted = top_candidates(scores, ranks, from_logits=True)
    assert torch.equal(normalisers[0], log_normaliser(scores[0].float()))
    assert torch.equal(log_probs, wanted[0])
    assert torch.equal(tokens, wanted[1])


def test_rows_without_a_candidate_and_rows_of_equals(host: ctypes.CDLL) -> None:
    scores = torch.full((1, 3, 5000), -torch.inf)
    scores[0, 1] = 3.0
    scores[0, 2, 4999] = 1.0
    for ranks in (1, 16, 64):
        found = candidates(host, scores, ranks, from_logits=True)
        wanted = top_candidates(scores, ranks, from_logits=True)
        assert torch.equal(found[0], wanted[0])
        assert torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("case", standard_cases(), ids=str)
def test_trees_of_log_probs_are_the_oracles(host: ctypes.CDLL, case: TreeCase) -> None:
    scores = case.log_probs(torch.float32)
    ranks = min(case.columns, case.top_k, case.budget)
    log_probs, tokens, _ = candidates(host, scores, ranks, from_logits=False)
    roots, prefixes = torch.arange(case.batch) + 5, torch.arange(case.batch) * 13
    found = selected(host, log_probs, tokens, case.budget, roots, prefixes)
    for request in range(case.batch):
        root = int(roots[request])
        wanted = build_draft_tree(scores[request], case.budget, case.top_k, root_token=root)
        assert same_tree(found, request, wanted), request


@pytest.mark.parametrize("case", standard_cases()[::4], ids=str)
def test_everything_that_is_written_is_what_the_cpu_writes(
    host: ctypes.CDLL, case: TreeCase
) -> None:
    scores = case.logits()
    ranks = min(case.columns, case.top_k, case.budget)
    log_probs, tokens, _ = candidates(host, scores, ranks, from_logits=True)
    roots, prefixes = torch.arange(case.batch) + 5, torch.arange(case.batch) * 13
    found = selected(host, log_probs, tokens, case.budget, roots, prefixes)
    assert found.full_mask is not None
    wanted = build_draft_trees(
        scores,
        case.budget,
        case.top_k,
        from_logits=True,
        root_tokens=roots,
        prefix_lengths=prefixes,
        full_mask=torch.ones_like(found.full_mask),
    )
    for name in OUTPUTS:
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name


def test_a_draw_picks_what_torch_picks(host: ctypes.CDLL) -> None:
    generator = torch.Generator().manual_seed(3)
    probs = torch.randn(2000, 37, generator=generator).mul(3).softmax(-1)
    probs[::5, ::2] = 0
    draws = torch.rand(2000, generator=generator)
    draws[:3] = torch.tensor([0.0, 0.99999994, 2.0**-31])
    found = torch.empty(2000, dtype=torch.int64)
    host.sample(pointer(probs), pointer(draws), 2000, 37, pointer(found))
    assert torch.equal(found, sample_tokens(probs, draws))


def test_offsets_of_full_masks_are_64_bits_wide(host: ctypes.CDLL) -> None:
    """65 nodes behind a request with a prefix of 2^26: 65 * (2^26 + 65) bytes come before."""
    host.full_mask_offset.restype = ctypes.c_int64
    prefixes = torch.tensor([1 << 26, 0])
    assert host.full_mask_offset(pointer(prefixes), 1, 65) == 65 * ((1 << 26) + 65) > 1 << 31


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuildReport:
    """The library of csrc_trees as it is; 25 s on two cores, objects of earlier builds are kept."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on PATH")
    return build_tree_kernels(library=tmp_path_factory.mktemp("library") / TREES_LIBRARY.name)


@pytest.mark.slow
def test_nvcc_compiles_it_for_every_architecture_without_a_spill(built: BuildReport) -> None:
    assert {kernel.architecture for kernel in built.kernels} == set(ARCHITECTURES)
    names = {kernel.kernel.partition("<")[0] for kernel in built.kernels}
    assert names == {
        "chunk_kernel",
        "merge_kernel",
        "select_kernel",
        "sample_kernel",
        "accept_kernel",
        "compact_kernel",
        "indices_kernel",
    }
    assert {kernel.spill_bytes for kernel in built.kernels} == {0}
    assert max(kernel.shared_bytes for kernel in built.kernels) <= 48 * 1024, "static, on all parts"


@pytest.mark.slow
def test_the_library_loads_without_a_gpu_and_says_what_it_holds(built: BuildReport) -> None:
    library = load(built.library)
    assert all(name in str(library.build_info()) for name in ARCHITECTURES)
    bytes_of = library.build_workspace_bytes  # type: ignore[attr-defined]
    # Keys of 40 chunks, and little else.
    assert 7 * 40 * 16 * 8 < bytes_of(1, 7, 163_840, 16) < 1.3 * 7 * 40 * 16 * 8
    with pytest.raises(ValueError, match=r"ranks: expected 1\.\.64, got 65"):
        bytes_of(1, 7, 163_840, 65)


@pytest.mark.slow
def test_the_operations_call_the_library_with_what_it_takes(
    built: BuildReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as shows without a GPU: every argument arrives, then it asks for CUDA tensors."""
    monkeypatch.setenv("KDTREE_TREES_LIBRARY", str(built.library))
    tree_kernels.cache_clear()
    trees = build_draft_trees(torch.zeros(1, 2, 4), 3)
    integers = torch.zeros(1, 3, dtype=torch.int64)
    row = torch.zeros(1, dtype=torch.int64)
    outputs = [getattr(trees, name) for name in OUTPUTS]
    with pytest.raises(ValueError, match="scores: expected a CUDA tensor"):
        draft_trees._cuda(torch.zeros(1, 2, 4), None, None, row, False, 3, *outputs)
    with pytest.raises(ValueError, match="probs: expected a CUDA tensor"):
        acceptance._sample_cuda(torch.zeros(1, 4), torch.zeros(1), row)
    with pytest.raises(ValueError, match="tokens: expected a CUDA tensor"):
        acceptance._accept_cuda(integers, integers, integers, integers, row, row)
    with pytest.raises(ValueError, match="nodes: expected a CUDA tensor"):
        compaction._cuda([torch.zeros(8, 16)], integers, row, integers)
    with pytest.raises(ValueError, match="req_to_token: expected a CUDA tensor"):
        kv_indices._cuda(integers.int(), row, row, integers[0].int(), integers[0])
    tree_kernels.cache_clear()
