"""Log-probabilities to the last bit: near torch's own, and the same whatever the order of a sum."""

from __future__ import annotations

import pytest
import torch

from kdtree_engine.ops.candidates import (
    CHUNK_COLUMNS,
    check_scores,
    fixed_exp,
    log_normaliser,
    top_candidates,
)


def drawn(*shape: int, seed: int = 1, scale: float = 4.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def test_the_exponential_is_near_the_true_one() -> None:
    x = torch.linspace(-30, 0, 100_001)
    found = fixed_exp(x).to(torch.float64) * 2.0**-40
    # Three float32 roundings of a value near 1, and what is cut off at 2^-40.
    assert bool(((found - x.double().exp()).abs() <= 4e-7 * x.double().exp() + 2.0**-40).all())
    assert fixed_exp(torch.tensor([0.0, -30.5, -torch.inf, torch.nan])).tolist() == [2**40, 0, 0, 0]


@pytest.mark.parametrize("columns", [1, 7, CHUNK_COLUMNS, CHUNK_COLUMNS + 1, 163_840])
@pytest.mark.parametrize("scale", [0.0, 0.5, 8.0, 200.0])
def test_the_normaliser_is_near_torchs(columns: int, scale: float) -> None:
    rows = drawn(3, columns, scale=scale)
    wanted = rows.double().logsumexp(-1)
    assert bool(((log_normaliser(rows).double() - wanted).abs() <= 1e-6 * (1 + wanted.abs())).all())
    assert bool((log_normaliser(rows) >= rows.amax(-1)).all()), "no log-probability is above 0"


def test_within_a_chunk_the_order_of_the_columns_changes_no_bit() -> None:
    rows = drawn(4, CHUNK_COLUMNS)
    order = torch.randperm(CHUNK_COLUMNS, generator=torch.Generator().manual_seed(2))
    assert torch.equal(log_normaliser(rows[:, order]), log_normaliser(rows))


def test_what_is_no_number_adds_nothing() -> None:
    rows = drawn(2, 50)
    rows[:, 40:] = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.nan, torch.inf] * 2)
    assert torch.equal(log_normaliser(rows), log_normaliser(rows[:, :40]))
    assert log_normaliser(torch.full((1, 9), -torch.inf)).tolist() == [-torch.inf]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_of_equal_scores_the_lower_column_comes_first(dtype: torch.dtype) -> None:
    scores = torch.tensor([[[-2.0, -0.0, -1.0, 0.0, -1.0, -torch.inf]]], dtype=dtype)
    log_probs, tokens = top_candidates(scores, 6, from_logits=False)
    assert tokens.tolist() == [[[1, 3, 2, 4, 0, -1]]]
    assert log_probs.tolist() == [[[0.0, 0.0, -1.0, -1.0, -2.0, -torch.inf]]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_candidates_of_logits_are_those_of_a_stable_sort(dtype: torch.dtype) -> None:
    scores = drawn(2, 3, 5000).to(dtype)
    log_probs, tokens = top_candidates(scores, 40, from_logits=True)
    order = scores.double().sort(dim=-1, descending=True, stable=True).indices[..., :40]
    assert torch.equal(tokens, order)
    wanted = scores.double().log_softmax(-1).gather(-1, order)
    torch.testing.assert_close(log_probs, wanted, rtol=0, atol=1e-6)


def test_what_no_candidate_can_have_is_left_out() -> None:
    scores = torch.tensor([[[torch.nan, 1.0, torch.inf, -1.0]]])
    assert top_candidates(scores, 4, from_logits=True)[1].tolist() == [[[1, 3, -1, -1]]]
    assert top_candidates(scores, 4, from_logits=False)[1].tolist() == [[[3, -1, -1, -1]]]


@pytest.mark.parametrize(
    ("value", "from_logits", "text"),
    [
        (torch.nan, True, r"scores\[0, 1, 2\]: expected a logit below \+inf, got nan"),
        (torch.inf, True, r"scores\[0, 1, 2\]: expected a logit below \+inf, got inf"),
        (torch.nan, False, r"scores\[0, 1, 2\]: expected a log-probability of at most 0, got nan"),
        (0.5, False, r"scores\[0, 1, 2\]: expected a log-probability of at most 0, got 0\.5"),
    ],
)
def test_a_score_that_is_none_is_named(value: float, from_logits: bool, text: str) -> None:
    scores = torch.zeros(1, 2, 3)
    scores[0, 1, 2] = value
    with pytest.raises(ValueError, match=text):
        check_scores(scores, None, from_logits=from_logits)


def test_a_token_that_stands_twice_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"token_ids\[0, 1\]: expected each token once, got 4 twice"
    ):
        check_scores(torch.zeros(1, 2, 2), torch.tensor([[[4, 5], [4, 4]]]), from_logits=False)
