"""The tree operations on a GPU against the CPU, eager and in captured graphs: `pytest -m gpu`.

With the library built (`kd build`). Everything must be equal to the last bit: nothing here has a
tolerance.
"""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest
import torch
from host_code import OUTPUTS
from tree_cases import TreeCase, standard_cases

from kdtree_engine.ops import (
    AcceptedPaths,
    DraftTrees,
    accept_trees,
    build_draft_trees,
    compact_kv,
    fill_kv_indices,
)
from kdtree_engine.ops.acceptance import sample_tokens
from kdtree_engine.ops.candidates import top_candidates
from kdtree_engine.ops.tree_budget import expected_tokens
from kdtree_engine.sglang_ext import ddtree_round

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
CUDA = torch.device("cuda")
BIG = 163_840


def assert_same(found: DraftTrees, wanted: DraftTrees) -> None:
    for name in OUTPUTS:
        ours, theirs = getattr(found, name), getattr(wanted, name)
        assert (ours is None) == (theirs is None), name
        assert ours is None or torch.equal(ours.cpu(), theirs), name


def built(scores: torch.Tensor, budget: int, top_k: int, from_logits: bool) -> DraftTrees:
    """With roots, prefixes and a full mask, on the device of `scores`."""
    batch, device = scores.shape[0], scores.device
    prefixes = torch.arange(batch, device=device) * 7
    nodes = budget + 1
    bytes_of_mask = nodes * (7 * (batch * (batch - 1) // 2) + batch * nodes)
    return build_draft_trees(
        scores,
        budget,
        top_k,
        from_logits=from_logits,
        root_tokens=torch.arange(batch, device=device) + 3,
        prefix_lengths=prefixes,
        full_mask=torch.ones(bytes_of_mask, dtype=torch.uint8, device=device),
    )


def drawn_logits(
    batch: int, depth: int, columns: int, dtype: torch.dtype, seed: int
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(batch, depth, columns, generator=generator) * 3).to(dtype)


def captured(call: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """`call` in a graph, after one run outside of it that loads the library."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@pytest.mark.parametrize("case", standard_cases(), ids=str)
def test_log_probs(case: TreeCase) -> None:
    scores = case.log_probs(torch.float32)
    found = built(scores.to(CUDA), case.budget, case.top_k, from_logits=False)
    assert_same(found, built(scores, case.budget, case.top_k, from_logits=False))


@pytest.mark.parametrize("case", standard_cases(), ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits(case: TreeCase, dtype: torch.dtype) -> None:
    scores = case.logits(dtype)
    found = built(scores.to(CUDA), case.budget, case.top_k, from_logits=True)
    assert_same(found, built(scores, case.budget, case.top_k, from_logits=True))


@pytest.mark.parametrize("budget", [1, 31, 32, 63, 64, 65, 127, 128])
@pytest.mark.parametrize("top_k", [1, 2, 16, 63, 64])
@pytest.mark.parametrize("columns", [64, 4096, 4097, 12_289])
def test_the_grid(budget: int, top_k: int, columns: int) -> None:
    for seed, (batch, depth) in enumerate([(1, 1), (3, 7), (2, 15), (1, 16)]):
        scores = drawn_logits(batch, depth, columns, torch.bfloat16, seed)
        found = built(scores.to(CUDA), budget, top_k, from_logits=True)
        assert_same(found, built(scores, budget, top_k, from_logits=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("batch", "depth"), [(1, 7), (1, 15), (16, 7), (64, 2)])
def test_a_large_vocabulary(dtype: torch.dtype, batch: int, depth: int) -> None:
    scores = drawn_logits(batch, depth, BIG, dtype, 5)
    found = built(scores.to(CUDA), 64, 16, from_logits=True)
    assert_same(found, built(scores, 64, 16, from_logits=True))


def test_ties_in_every_chunk_and_at_its_borders() -> None:
    generator = torch.Generator().manual_seed(3)
    scores = torch.randint(0, 6, (2, 7, BIG), generator=generator).to(torch.bfloat16)
    scores[0, 0] = 1.0
    scores[0, 1] = -torch.inf
    scores[1, 0, 4095:4097] = 9.0
    for top_k in (16, 64):
        found = built(scores.to(CUDA), 128, top_k, from_logits=True)
        assert_same(found, built(scores, 128, top_k, from_logits=True))


def test_a_view_of_a_drafters_block() -> None:
    """Rows of a wider tensor, one position in from its start, as a drafter hands them over."""
    block = drawn_logits(3, 8, 5001, torch.bfloat16, 6)
    found = built(block.to(CUDA)[:, 1:, 1:], 40, 8, from_logits=True)
    assert_same(found, built(block[:, 1:, 1:], 40, 8, from_logits=True))


def test_token_ids_name_the_columns() -> None:
    generator = torch.Generator().manual_seed(8)
    case = TreeCase("quantised", batch=2, depth=5, columns=20, budget=30, top_k=9, seed=8)
    scores = case.log_probs(torch.float32)
    names = torch.randperm(100, generator=generator)[:20].repeat(2, 5, 1)
    for token_ids in (names, names.to(torch.int32)):
        found = build_draft_trees(scores.to(CUDA), 30, 9, token_ids=token_ids.to(CUDA))
        assert_same(found, build_draft_trees(scores, 30, 9, token_ids=token_ids))


def test_what_is_no_score_is_never_chosen_where_nothing_is_checked() -> None:
    scores = drawn_logits(1, 4, 9000, torch.float32, 9)
    clean = scores.clone()
    scores[0, :, ::50] = torch.nan
    scores[0, :, 7::50] = torch.inf
    clean[0, :, ::50] = clean[0, :, 7::50] = -torch.inf
    assert torch.equal(
        top_candidates(scores, 16, from_logits=True)[1],
        top_candidates(clean, 16, from_logits=True)[1],
    )
    found = built(scores.to(CUDA), 40, 16, from_logits=True)
    assert_same(found, built(clean, 40, 16, from_logits=True))


def test_nan_is_named_where_checks_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDTREE_CHECK", "1")
    scores = torch.zeros(1, 2, 4, device=CUDA)
    scores[0, 1, 3] = torch.nan
    with pytest.raises(ValueError, match=r"scores\[0, 1, 3\]: .*got nan"):
        build_draft_trees(scores, 4, from_logits=True)


@pytest.mark.parametrize("columns", [64, BIG])
def test_a_graph_builds_other_trees_when_it_is_replayed(columns: int) -> None:
    scores = torch.zeros(2, 7, columns, dtype=torch.bfloat16, device=CUDA)
    roots = torch.zeros(2, dtype=torch.int64, device=CUDA)
    prefixes = torch.zeros(2, dtype=torch.int64, device=CUDA)
    full = torch.ones(65 * (2 * 65 + 5000), dtype=torch.bool, device=CUDA)
    kept: list[DraftTrees] = []

    def call() -> None:
        kept[:] = [
            build_draft_trees(
                scores,
                64,
                16,
                from_logits=True,
                root_tokens=roots,
                prefix_lengths=prefixes,
                full_mask=full,
            )
        ]

    graph = captured(call)
    for seed in range(10):
        drawn = drawn_logits(2, 7, columns, torch.bfloat16, seed)
        lengths = torch.tensor([seed * 11, 500 * (seed % 5)])
        scores.copy_(drawn)
        roots.fill_(seed)
        prefixes.copy_(lengths)
        full.fill_(True)
        for name in OUTPUTS[:-1]:  # what a replay does not write would show
            getattr(kept[0], name).fill_(77)
        graph.replay()
        wanted = build_draft_trees(
            drawn,
            64,
            16,
            from_logits=True,
            root_tokens=torch.full((2,), seed),
            prefix_lengths=lengths,
            full_mask=torch.ones(len(full), dtype=torch.bool),
        )
        assert_same(kept[0], wanted)


def drawn_targets(trees: DraftTrees, seed: int) -> torch.Tensor:
    """Mostly tokens that some node carries, so that walks go deep."""
    generator = torch.Generator().manual_seed(seed)
    place = torch.randint(trees.nodes, trees.tokens.shape, generator=generator)
    child = trees.retrieve_next_token.clamp(min=0)
    wanted = torch.where(torch.rand(place.shape, generator=generator) < 0.8, child, place)
    return trees.tokens.gather(1, wanted)


def on_gpu(trees: DraftTrees) -> DraftTrees:
    tensors = {name: value.to(CUDA) for name, value in vars(trees).items() if name != "max_depth"}
    return DraftTrees(**tensors, max_depth=trees.max_depth)


def assert_same_paths(found: AcceptedPaths, wanted: AcceptedPaths) -> None:
    for name in ("nodes", "counts", "bonus"):
        assert torch.equal(getattr(found, name).cpu(), getattr(wanted, name)), name


@pytest.mark.parametrize("case", standard_cases(), ids=str)
def test_greedy_acceptance(case: TreeCase) -> None:
    trees = built(case.log_probs(torch.float32), case.budget, case.top_k, from_logits=False)
    for seed in range(4):
        targets = drawn_targets(trees, seed)
        found = accept_trees(on_gpu(trees), target_tokens=targets.to(CUDA))
        assert_same_paths(found, accept_trees(trees, target_tokens=targets))


@pytest.mark.parametrize("columns", [1, 2, 1023, 1024, 1025, 5000, BIG, 1 << 18])
def test_sampled_tokens(columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    rows = 64 if columns < BIG else 9
    probs = torch.randn(rows, columns, generator=generator).mul(3).softmax(-1)
    probs[::3, columns // 2 + 1 :] = 0
    draws = torch.rand(rows, generator=generator)
    draws[:4] = torch.tensor([0.0, 2.0**-31, 0.5, 0.99999994])
    assert torch.equal(
        sample_tokens(probs.to(CUDA), draws.to(CUDA)).cpu(), sample_tokens(probs, draws)
    )


def test_a_row_without_weight_gives_no_token_where_nothing_is_checked() -> None:
    probs = torch.tensor([[0.0, 0.0], [torch.nan, 0.5], [-1.0, 3.0]], device=CUDA)
    assert sample_tokens(probs, torch.full((3,), 0.5, device=CUDA)).tolist() == [-1, 1, -1]


def test_sampled_acceptance_in_a_graph() -> None:
    case = TreeCase("plain", batch=3, depth=6, columns=50, budget=40, top_k=6, seed=7)
    trees = built(case.log_probs(torch.float32), case.budget, case.top_k, from_logits=False)
    ours = on_gpu(trees)
    probs = torch.full((3, 41, 50), 0.02, device=CUDA)
    draws = torch.zeros(3, 41, device=CUDA)
    kept: list[AcceptedPaths] = []

    def call() -> None:
        kept[:] = [accept_trees(ours, target_probs=probs, draws=draws)]

    graph = captured(call)
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(3, 41, 50, generator=generator).mul(3).softmax(-1)
        uniform = torch.rand(3, 41, generator=generator)
        probs.copy_(drawn)
        draws.copy_(uniform)
        graph.replay()
        wanted = accept_trees(trees, target_probs=drawn, draws=uniform)
        assert_same_paths(kept[0], wanted)


@pytest.mark.parametrize("nodes", [2, 9, 65, 129])
@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 576), (torch.uint8, 656)])
def test_compaction(nodes: int, dtype: torch.dtype, width: int) -> None:
    """In a graph, with other paths and windows at each replay; paths of up to 40 nodes too."""
    batch, layers, slots = 5, 3, 5 * nodes + 40
    pools = [torch.zeros(slots, 1, width, dtype=dtype, device=CUDA) for _ in range(layers)]
    steps = min(40, nodes)
    paths = AcceptedPaths(
        *(torch.zeros(*shape, dtype=torch.int64, device=CUDA) for shape in ((5, steps), (5,), (5,)))
    )
    windows = torch.zeros(batch, nodes, dtype=torch.int64, device=CUDA)
    graph = captured(lambda: compact_kv(pools, paths, windows))
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.full((batch, steps), -1)
        counts = torch.randint(0, steps + 1, (batch,), generator=generator)
        for request, count in enumerate(counts.tolist()):
            if count:
                others = torch.randperm(nodes - 1, generator=generator)[: count - 1] + 1
                rows[request, :count] = torch.cat([torch.zeros(1).long(), others.sort().values])
        window = torch.randperm(slots, generator=generator)[: batch * nodes].view(batch, nodes)
        drawn = torch.randint(0, 200, (layers, slots, 1, width), generator=generator).to(dtype)
        for pool, values in zip(pools, drawn, strict=True):
            pool.copy_(values)
        paths.nodes.copy_(rows)
        paths.counts.copy_(counts)
        windows.copy_(window)
        graph.replay()
        compact_kv(drawn, AcceptedPaths(rows, counts, torch.zeros(batch).long()), window)
        for pool, values in zip(pools, drawn, strict=True):
            assert torch.equal(pool.cpu(), values)


@pytest.mark.parametrize(("batch", "width"), [(1, 262_144), (3, 70_001), (64, 5000), (1000, 40)])
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
def test_slots_of_a_batch(batch: int, width: int, index: torch.dtype) -> None:
    """In a graph, with other requests and lengths at each replay; stale slots lie behind."""
    generator = torch.Generator().manual_seed(batch)
    table = torch.randint(0, 2**31 - 1, (batch + 2, width), generator=generator).to(torch.int32)
    on_gpu = table.to(CUDA)
    requests = torch.zeros(batch, dtype=index, device=CUDA)
    lengths = torch.zeros(batch, dtype=index, device=CUDA)
    kv_indptr = torch.zeros(batch + 1, dtype=torch.int32, device=CUDA)
    kv_indices = torch.full((batch * width,), -7, device=CUDA)
    graph = captured(lambda: fill_kv_indices(on_gpu, requests, lengths, kv_indptr, kv_indices))
    wanted = kv_indptr.cpu(), kv_indices.cpu()
    for turn in range(6):
        rows = torch.randint(0, batch + 2, (batch,), generator=generator).to(index)
        drawn = torch.randint(0, width + 1, (batch,), generator=generator).to(index)
        drawn[: turn % 2] = width
        requests.copy_(rows)
        lengths.copy_(drawn)
        graph.replay()
        fill_kv_indices(table, rows, drawn, *wanted)
        assert torch.equal(kv_indptr.cpu(), wanted[0])
        assert torch.equal(kv_indices.cpu(), wanted[1])


def test_a_list_is_never_written_beyond_its_end() -> None:
    """Unchecked contents: lengths are cut to the table and the list, and no row is no slots."""
    table = torch.arange(1, 41, dtype=torch.int32, device=CUDA).view(4, 10)
    requests = torch.tensor([1, 0, 4, 3], device=CUDA)
    lengths = torch.tensor([12, -3, 10, 10], device=CUDA)
    kv_indptr = torch.zeros(5, dtype=torch.int32, device=CUDA)
    guarded = torch.full((40,), -7, device=CUDA)
    fill_kv_indices(table, requests, lengths, kv_indptr, guarded[:26])
    assert kv_indptr.tolist() == [0, 10, 10, 20, 30]
    assert guarded.tolist() == [*range(11, 21), *[-7] * 10, *range(31, 37), *[-7] * 14]


def test_a_pool_beyond_2_to_the_31_bytes() -> None:
    pool = torch.zeros(4_000_000, 576, dtype=torch.bfloat16, device=CUDA)
    pool[3_999_999] = 5
    paths = AcceptedPaths(
        torch.tensor([[0, 2]], device=CUDA),
        torch.tensor([2], device=CUDA),
        torch.tensor([0], device=CUDA),
    )
    window = torch.tensor([[1, 3_999_998, 3_999_999]], device=CUDA)
    compact_kv([pool], paths, window)
    assert pool[3_999_998].eq(5).all()
    assert not pool[1].any()


def test_rows_that_are_no_multiple_of_16_bytes_are_refused() -> None:
    paths = AcceptedPaths(
        *(torch.zeros(*s, dtype=torch.int64, device=CUDA) for s in ((1, 2), (1,), (1,)))
    )
    windows = torch.zeros(1, 2, dtype=torch.int64, device=CUDA)
    with pytest.raises(ValueError, match="pools: expected rows of a multiple of 16 bytes on a GPU"):
        compact_kv([torch.zeros(4, 3, device=CUDA)], paths, windows)


def test_it_follows_the_current_stream() -> None:
    scores = drawn_logits(1, 7, 20_000, torch.bfloat16, 4)
    ours = torch.zeros_like(scores, device=CUDA)
    right = scores.to(CUDA)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        ours.copy_(right)
        found = built(ours, 64, 16, from_logits=True)
    stream.synchronize()
    assert_same(found, built(scores, 64, 16, from_logits=True))


def test_what_ddtree_computes_in_a_round_waits_for_nothing() -> None:
    """Every step between SGLang's passes, with torch refusing whatever would wait for the GPU."""
    batch, depth, columns, budget, slots = 3, 7, 4096, 32, 512
    logits = drawn_logits(batch, depth, columns, torch.bfloat16, seed=9).to(CUDA)
    roots = torch.arange(batch, device=CUDA)
    prefixes = torch.tensor([5, 9, 0], device=CUDA)
    targets = drawn_logits(batch, budget + 1, columns, torch.float32, seed=10).to(CUDA)
    window = torch.randperm(slots, device=CUDA)[: batch * (budget + 1)].view(batch, -1)
    pools = [torch.randn(slots, 576, device=CUDA).bfloat16() for _ in range(3)]
    sampling = types.SimpleNamespace(
        temperatures=torch.full((batch, 1), 0.7, device=CUDA),
        top_ks=torch.full((batch,), 20, device=CUDA),
        top_ps=torch.full((batch,), 0.9, device=CUDA),
        min_ps=torch.full((batch,), 0.01, device=CUDA),
        need_top_k_sampling=True,
        need_top_p_sampling=True,
        need_min_p_sampling=True,
    )

    def a_round() -> torch.Tensor:
        whole = build_draft_trees(
            logits, budget, 8, from_logits=True, root_tokens=roots, prefix_lengths=prefixes
        )
        gains = expected_tokens(whole.log_weights, (9, 17, 33))
        host = torch.empty(gains.shape, dtype=gains.dtype, pin_memory=True)
        host.copy_(gains, non_blocking=True)
        trees = whole.first(17)
        ddtree_round.full_mask(trees, 64)
        drawn = ddtree_round.sampled_tokens(targets[:, :17], sampling, 20)
        paths = accept_trees(trees, target_tokens=drawn)
        compact_kv(pools, paths, window[:, :17].contiguous())
        ddtree_round.path_rows(paths, trees.nodes)
        return ddtree_round.gained_tokens(trees, paths, budget + 1)

    a_round()  # loads the library, and what torch compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gained = a_round()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert gained.shape == (batch, budget + 1)
