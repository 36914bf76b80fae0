"""The study of `kd moe`: a case by hand, its figures against each other, and its sentences."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from kdtree_engine.errors import ConfigError
from kdtree_engine.gpus import GPUS, Link
from kdtree_engine.moe.costs import ExpertShape
from kdtree_engine.moe.routing import Routing, routing_of
from kdtree_engine.moe.synthetic import SyntheticRouter
from phases.moe_imbalance import COLUMNS, Imbalance, findings, rows, study

SHAPE = ExpertShape(hidden=10, intermediate=2, bytes_per_weight=0.5)
"""60 weights: 30 bytes to read, 120 flop a token."""
GPU = dataclasses.replace(
    GPUS["h200"], name="toy", bandwidth=30, flops=1e9, memory=100, source="none", launch=0.5
)
"""A second for each expert that is read."""
LINK = Link("toy", latency=0.25, bandwidth=1e9, source="none")


def studied(routing: Routing, batches: list[int], **given: Any) -> Imbalance:
    settings: dict[str, Any] = {"ranks": 2, "redundant": 0, "samples": 4, "seed": 1}
    return study(routing, batches, shape=SHAPE, gpu=GPU, link=LINK, **{**settings, **given})


def by_hand() -> Routing:
    """Two steps before and two after, alike: two tokens, of which both chose experts 0 and 1."""
    return routing_of(torch.tensor([[[2, 2, 0, 0]]] * 4), top_k=2, layers=[7], source="by hand")


def test_four_experts_on_two_ranks_by_hand() -> None:
    found = studied(by_hand(), [1])
    tp, ep, eplb, joined = found.outcomes
    # Two active experts: halves of both on each rank, or both on the first rank.
    assert (tp.layer_us, tp.busiest, tp.mean, tp.idle, tp.waiting) == (1.5e6, 1, 1, 0, 0)
    assert (ep.layer_us, ep.busiest, ep.mean, ep.idle, ep.waiting) == (2.5e6, 2, 1, 0.5, 0.5)
    # Balanced by their loads they lie on different ranks.
    for one in (eplb, joined):
        assert (one.layer_us, one.busiest, one.idle, one.waiting) == (1.5e6, 1, 0, 0)
    assert ep.reduce_us == pytest.approx(0.25e6)
    assert ep.step_us == ep.layer_us + ep.reduce_us
    assert ep.by_layer == [(7, [2, 0], [4, 0], [2.5e6, 0.5e6])]


def test_a_placement_is_tried_on_what_came_after_its_loads() -> None:
    counts = torch.tensor([[[2, 2, 0, 0]]] * 2 + [[[2, 0, 2, 0]]] * 2)
    found = studied(routing_of(counts, top_k=2, layers=None, source="moved"), [1])
    # Balanced by what was before, 0 and 1 lie apart, and 2 beside 0; contiguous has 0 and 2 apart.
    assert found.outcome(1, "ep").busiest == 1
    assert found.outcome(1, "eplb").busiest == 2


def test_figures_of_a_drawn_router_hold_together() -> None:
    routing = SyntheticRouter(experts=64, top_k=4, layers=6).draw(128, 5, seed=1)
    found = studied(routing, [1, 16, 64], ranks=8, redundant=16)
    assert [one.placement for one in found.outcomes[:4]] == ["tp", "ep", "eplb", "eplb-joined"]
    for batch in (1, 16, 64):
        tp, ep, eplb, joined = (
            found.outcome(batch, name) for name in ("tp", "ep", "eplb", "eplb-joined")
        )
        assert tp.tokens == ep.tokens == 5 * batch
        assert tp.busiest == pytest.approx(tp.mean) == pytest.approx(ep.mean)
        assert tp.waiting == pytest.approx(0, abs=1e-9)
        assert tp.layer_us <= ep.layer_us, "reading is what takes the time here"
        assert joined.mean == pytest.approx(ep.mean), "each active expert is read once"
        assert eplb.mean >= ep.mean, "and here, where its copies have tokens, more than once"
        assert 0 <= ep.idle < 1
    waits = [found.outcome(batch, "ep").waiting for batch in (1, 16, 64)]
    assert waits == sorted(waits, reverse=True), "batching evens the ranks out"


def test_a_batch_has_the_same_figures_whatever_else_is_asked_for() -> None:
    routing = SyntheticRouter(experts=64, top_k=4, layers=6).draw(64, 5, seed=1)
    alone, among = (studied(routing, batches, ranks=8, redundant=16) for batches in ([8], [1, 8]))
    assert alone.outcomes == among.outcomes[4:]


def test_one_rank_reduces_with_nobody() -> None:
    assert {one.reduce_us for one in studied(by_hand(), [1], ranks=1).outcomes} == {0}
    assert min(one.reduce_us for one in studied(by_hand(), [1]).outcomes) > 0


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"4 experts .* 3 ranks"):
        studied(by_hand(), [1], ranks=3)
    with pytest.raises(ConfigError, match="2 steps to draw from, a batch of 3"):
        studied(by_hand(), [1, 3])
    with pytest.raises(ConfigError, match="a multiple of 2"):
        studied(by_hand(), [1], redundant=1)


def test_rows_and_sentences_are_of_the_figures() -> None:
    found = studied(by_hand(), [1, 2])
    table = rows(found)
    assert all(len(row) == len(COLUMNS) for row in table)
    assert table[1][:3] == ("1", "2", "ep")
    assert table[1][-4:] == ("2.0", "1.0", "0.500", "0.500")
    first, reduce, batching, *placements, memory = findings(found)
    assert "2 tokens activate 2 of 4 experts a layer" in first
    assert "the busiest of 2 ranks reads 2.0, the mean 1.0, and 50.0% of the ranks none" in first
    assert "50% of the ranks' time in experts is waiting" in first
    assert "needs 63.6% of ep's step" in first  # 1.75 of 2.75 seconds
    assert reduce == "All-reduce is 9% of ep's step at batch 1 and 9% at batch 2."
    assert "1.0 times as long for 2 times the tokens, so a token costs 50.0%" in batching
    assert [one.split(":")[0] for one in placements] == [
        "Placement at batch 1",
        "Placement at batch 2",
    ]
    assert placements[0].endswith("the shortest, within 1%: tp, eplb, eplb-joined.")
    # Two experts of 30 bytes a rank, in one layer.
    assert (
        memory == "Memory: the experts take 0 GB a rank, 0 with the copies, of the 0 GB of one toy."
    )
    assert len(findings(studied(by_hand(), [1]))) == 4
    large = dataclasses.replace(found, shape=ExpertShape(bytes_per_weight=1e6), redundant=2)
    assert findings(large)[-1] == (
        "Memory: the experts take 88,080 GB a rank, 132,121 with the copies: they are more than "
        "the 0 GB of one toy."
    )


def test_json_is_plain_and_says_that_nothing_was_measured() -> None:
    found = studied(by_hand(), [1])
    plain = json.loads(json.dumps(found.as_json()))
    assert plain["measured"] is False
    assert plain["outcomes"][1]["busiest"] == 2
    assert plain["findings"] == findings(found)
    assert plain["gpu"]["source"] == "none"
