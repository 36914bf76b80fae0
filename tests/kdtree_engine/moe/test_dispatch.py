"""The work of ranks: four experts by hand, conservation, and idle ranks."""

from __future__ import annotations

import torch

from kdtree_engine.moe.dispatch import joined, sliced, spread
from kdtree_engine.moe.placement import balanced, contiguous
from kdtree_engine.moe.synthetic import SyntheticRouter

COUNTS = torch.tensor([[[3, 1, 0, 2]]])
"""One sample, one layer, four experts."""
HOSTS = torch.tensor([[[1, 1, 0, 0], [1, 0, 1, 1]]]).bool()
"""The first expert on both ranks."""


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def test_tensor_parallel_ranks_have_all_experts_and_a_part_of_each() -> None:
    work = sliced(COUNTS, 2)
    assert (work.experts.tolist(), work.pairs.tolist(), work.share) == ([[[3, 3]]], [[[6, 6]]], 0.5)


def test_contiguous_ranks_have_their_experts_tokens() -> None:
    work = spread(COUNTS, contiguous(1, 4, 2), seeded())
    assert (work.experts.tolist(), work.pairs.tolist()) == ([[[2, 1]]], [[[4, 2]]])


def test_copies_share_their_tokens_evenly_from_a_drawn_one_on() -> None:
    seen = set()
    for seed in range(20):
        work = spread(COUNTS, HOSTS, torch.Generator().manual_seed(seed))
        assert work.experts.tolist() == [[[2, 2]]]
        seen.add(tuple(work.pairs.flatten().tolist()))
    assert seen == {(3, 3), (2, 4)}, "2 and 1 of three tokens, or 1 and 2"


def test_a_single_token_goes_to_one_copy_alone() -> None:
    work = spread(torch.tensor([[[1, 0, 0, 0]]]), HOSTS, seeded())
    assert sorted(work.experts.flatten().tolist()) == [0, 1]


def test_joined_tokens_go_to_the_rank_with_the_fewest_active_experts() -> None:
    # Each rank has one expert of its own; of equal ranks the one with fewer tokens takes it.
    work = joined(COUNTS, HOSTS)
    assert (work.experts.tolist(), work.pairs.tolist()) == ([[[2, 1]]], [[[4, 2]]])
    work = joined(torch.tensor([[[3, 0, 0, 2]]]), HOSTS)
    assert (work.experts.tolist(), work.pairs.tolist()) == ([[[1, 1]]], [[[3, 2]]])


def test_no_token_is_lost_or_doubled_and_joined_reads_each_expert_once() -> None:
    router = SyntheticRouter(experts=64, top_k=4, layers=6)
    routing = router.draw(64, 5, seed=3)
    hosts = balanced(routing.counts.sum(0), 8, 16)
    counts, tokens = routing.batches(8, 10, seeded())
    active = (counts > 0).sum(2)
    dealt, together = spread(counts, hosts, seeded()), joined(counts, hosts)
    for work in (dealt, together):
        assert torch.equal(work.pairs.sum(2), (4 * tokens)[:, None].expand(10, 5))
        assert (work.pairs >= work.experts).all()
    assert torch.equal(together.experts.sum(2), active)
    assert (dealt.experts.sum(2) > active).any(), "spread reads an expert more than once"


def test_one_token_leaves_exactly_the_ranks_idle_that_own_none_of_its_experts() -> None:
    routing = SyntheticRouter().draw(16, 1, seed=1)
    work = spread(routing.counts, contiguous(60, 384, 8), seeded())
    owners = routing.counts.nonzero()
    busy = torch.zeros(16, 60, 8, dtype=torch.bool)
    busy[owners[:, 0], owners[:, 1], owners[:, 2] // 48] = True
    assert torch.equal(work.experts > 0, busy)
    assert 0.25 < float((~busy).double().mean()) < 0.42, "(7/8)^8 is 0.34"
