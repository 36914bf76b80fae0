"""What a target samples from, against plain rules for each row."""

from __future__ import annotations

import pytest
import torch

from kdtree_engine.ops.target_probs import target_probs


def plain(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> list:
    """One row, token by token."""
    probs = torch.softmax(logits.float() / temperature, -1).tolist()
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    kept, before = [], 0.0
    for rank, token in enumerate(order):
        if rank < top_k and before <= top_p and probs[token] >= min_p * probs[order[0]]:
            kept.append(token)
        before += probs[token]
    whole = sum(probs[token] for token in kept)
    return [probs[token] / whole if token in kept else 0.0 for token in range(len(probs))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("most", [None, 40])
def test_each_request_has_its_own_limits(dtype: torch.dtype, most: int | None) -> None:
    seed = 11
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(4, 3, 50, generator=generator)).to(dtype)
    limits = [(0.7, 5, 1.0, 0.0), (1.0, 40, 0.8, 0.0), (1.3, 40, 1.0, 0.1), (1.0, 1, 1.0, 0.0)]
    temperatures, top_ks, top_ps, min_ps = (
        torch.tensor(values) for values in zip(*limits, strict=True)
    )
    found = target_probs(
        logits, temperatures, top_ks=top_ks, top_ps=top_ps, min_ps=min_ps, most=most
    )
    assert found.dtype == torch.float32
    for request, limit in enumerate(limits):
        for node in range(3):
            expected = plain(logits[request, node], *limit)
            assert found[request, node].tolist() == pytest.approx(expected, abs=1e-6)
    assert (found[3].max(-1).values == 1).all(), "a greedy request has one token"


def test_without_limits_it_is_the_softmax() -> None:
    logits = torch.tensor([[[0.0, 1.0, 2.0]]])
    found = target_probs(logits, torch.tensor([2.0]))
    torch.testing.assert_close(found, torch.softmax(logits / 2, -1))
