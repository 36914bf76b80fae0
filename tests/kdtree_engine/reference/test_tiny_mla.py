"""`kdtree_engine.reference.tiny_mla`: a small MLA transformer in two forms that agree."""

from __future__ import annotations

import pytest
import torch

from kdtree_engine.reference import tree_verify_attention
from kdtree_engine.reference.masks import tree_mask
from kdtree_engine.reference.speculative import plain_greedy
from kdtree_engine.reference.tiny_mla import TinyMLA, TinyMLAConfig, TreeBatch

SEED = 20263


def test_absorbed_equals_plain() -> None:
    model = TinyMLA(TinyMLAConfig(), seed=SEED)
    tokens = [5, 17, 3, 90, 41]
    batch = TreeBatch.of([tokens], [range(5)], [[4, 0, 7, 2, 6]], [[]], None)
    absorbed = model.forward_absorbed(batch, model.new_pools(8), tree_verify_attention)
    plain = model.forward_plain(torch.tensor([tokens]))[0]
    torch.testing.assert_close(absorbed, plain, rtol=1e-11, atol=1e-11)


def test_a_tree_is_all_its_paths_at_once() -> None:
    """Two branches behind one token: each gets the logits it has as a sequence of its own."""
    model = TinyMLA(TinyMLAConfig(), seed=SEED)
    pools = model.new_pools(16)
    prefix = TreeBatch.of([[11, 12]], [range(2)], [[9, 3]], [[]], None)
    model.forward_absorbed(prefix, pools, tree_verify_attention)
    mask = tree_mask(torch.tensor([-1, 0, 0, 2]))
    tree = TreeBatch.of([[50, 60, 70, 80]], [[2, 3, 3, 4]], [[1, 5, 8, 2]], [[9, 3]], [mask])
    logits = model.forward_absorbed(tree, pools, tree_verify_attention)
    for node, sequence in ((1, [11, 12, 50, 60]), (3, [11, 12, 50, 70, 80])):
        plain = model.forward_plain(torch.tensor([sequence]))[0, -1]
        torch.testing.assert_close(logits[node], plain, rtol=1e-11, atol=1e-11)


def test_what_stands_on_the_right_is_not_seen() -> None:
    model = TinyMLA(TinyMLAConfig(), seed=SEED)
    short = model.forward_plain(torch.tensor([[1, 2, 3]]))
    filled = model.forward_plain(torch.tensor([[1, 2, 3, 44, 55]]))[:, :3]
    torch.testing.assert_close(filled, short, rtol=1e-12, atol=1e-12)


def test_positions_matter() -> None:
    """Else a wrong position in the speculative loop would go unseen."""
    model = TinyMLA(TinyMLAConfig(), seed=SEED)
    logits = []
    for where in ([0, 1, 2], [0, 1, 3]):
        batch = TreeBatch.of([[1, 2, 3]], [where], [[0, 1, 2]], [[]], None)
        logits.append(model.forward_absorbed(batch, model.new_pools(3), tree_verify_attention)[-1])
    assert (logits[0] - logits[1]).norm() > 0.01 * logits[0].norm()


def test_only_distances_matter() -> None:
    """Queries and keys turn alike, so a sequence that stands elsewhere has the same logits."""
    model = TinyMLA(TinyMLAConfig(), seed=SEED)
    logits = []
    for start in (0, 1000):
        batch = TreeBatch.of([[1, 2, 3]], [range(start, start + 3)], [[0, 1, 2]], [[]], None)
        logits.append(model.forward_absorbed(batch, model.new_pools(3), tree_verify_attention))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_greedy_decoding_wanders(seed: int) -> None:
    """A model that repeats itself would hide a token that is late or stale."""
    model = TinyMLA(TinyMLAConfig(), seed=seed)
    prompts = [[prompt, prompt + 1, 5] for prompt in range(8)]
    texts, _ = plain_greedy(model, prompts, 40)
    assert len(set(map(tuple, texts))) == len(texts)
    for text in texts:
        assert len(set(text)) >= 15
        for period in range(1, 9):
            assert text[20:] != text[20 - period : 40 - period]


def test_the_same_seed_is_the_same_model() -> None:
    tokens = torch.tensor([[1, 2, 3]])
    one, same, other = (TinyMLA(TinyMLAConfig(), seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.forward_plain(tokens), same.forward_plain(tokens))
    assert not torch.equal(one.forward_plain(tokens), other.forward_plain(tokens))


def test_unwritten_slots_hold_nan() -> None:
    pools = TinyMLA(TinyMLAConfig(latent=512, rope=64)).new_pools(5, torch.bfloat16)
    assert [pool.shape for pool in pools] == [(5, 576)] * 2
    assert all(pool.isnan().all() for pool in pools)


@pytest.mark.parametrize(("sizes", "name"), [({"heads": 0}, "heads"), ({"rope": 3}, "rope")])
def test_impossible_sizes_are_named(sizes: dict[str, int], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}:"):
        TinyMLAConfig(**sizes)  # type: ignore[arg-type]
