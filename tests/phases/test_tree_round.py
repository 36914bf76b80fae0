"""A round to look at: its tree is the oracle's, and what it gains is what plain decoding says."""

from __future__ import annotations

import pytest

from kdtree_engine.reference.speculative import plain_greedy
from kdtree_engine.reference.tiny_mla import TinyMLA, TinyMLAConfig
from phases.tree_round import one_round


@pytest.mark.parametrize("noise", [0.0, 1.5, 50.0])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_round_gains_what_plain_decoding_says(noise: float, seed: int) -> None:
    shown = one_round(budget=20, top_k=5, depth=4, noise=noise, seed=seed)
    model = TinyMLA(TinyMLAConfig(), seed=seed)
    (plain,), _ = plain_greedy(model, [shown.prompt], len(shown.gained))
    assert list(shown.gained) == plain
    if noise == 0.0:
        assert len(shown.gained) > 1, "a drafter that knows the target is believed"


def test_the_nodes_tell_one_story() -> None:
    shown = one_round(budget=20, top_k=5, depth=4, noise=1.5, seed=1)
    assert [node.number for node in shown.nodes] == list(range(21))
    for node in shown.nodes[1:]:
        above = shown.nodes[node.parent]
        assert node.depth == above.depth + 1
        assert node.path == pytest.approx(above.path * node.draft)
        assert not node.accepted or (above.accepted and node.token == above.target)
    last = [node for node in shown.nodes if node.accepted][-1]
    assert shown.gained[-1] == last.target
    assert shown.as_json()["nodes"][0]["parent"] == -1


def test_a_budget_beyond_the_tree_shows_the_tree() -> None:
    shown = one_round(budget=100, top_k=2, depth=3, noise=1.0, seed=1)
    assert len(shown.nodes) == 1 + 2 + 4 + 8
