"""The comparison of two servers' tokens: what is equal, what is a near-tie, what is wrong."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from phases.gate import FailureKind, GateFailure
from phases.service import Answer, incomplete
from phases.service_scale import CPU, GPU
from phases.service_tokens import (
    Comparison,
    Difference,
    Key,
    compare,
    compare_answer,
    demand,
    draw_prompts,
    figures_of,
    rounding,
    tie_bound,
    tie_bounds,
)

STEP = ((-1.0, 5), (-1.1, 6), (-3.0, 7))
REFERENCE = Answer((5, 5, 5), likely=(STEP, STEP, STEP))
KEY = Key(1024, 4, 2)


def test_equal_tokens() -> None:
    assert compare_answer("here", (5, 5, 5), REFERENCE, 0.2) == (3, None)


@pytest.mark.parametrize(
    ("got", "bound", "equal", "gap", "near_tie"),
    [
        ((5, 6, 9), 0.2, 1, 0.1, True),  # what comes after a difference is another text
        ((5, 6, 9), 0.05, 1, 0.1, False),
        ((7, 5, 5), 0.2, 0, 2.0, False),
        ((5, 5, 8), 9.0, 2, None, False),  # not among the likely ones, whatever the bound
        ((5, 5), 9.0, 2, None, False),
        ((5, 5, 5, 5), 9.0, 3, None, False),
    ],
)
def test_a_first_difference_and_its_verdict(
    got: tuple[int, ...], bound: float, equal: int, gap: float | None, near_tie: bool
) -> None:
    same, found = compare_answer("here", got, REFERENCE, bound)
    assert same == equal
    assert found is not None
    assert (found.step, found.near_tie) == (equal, near_tie)
    assert found.gap == (None if gap is None else pytest.approx(gap))


def test_an_aborted_answer_may_end_early_and_not_late() -> None:
    assert compare_answer("here", (5, 5), REFERENCE, 0.2, partial=True) == (2, None)
    assert compare_answer("here", (5,) * 4, REFERENCE, 0.2, partial=True)[1] is not None


def test_rounding_is_what_the_references_own_gaps_change_by() -> None:
    moved = ((-1.0, 5), (-1.13, 6), (-3.0, 7))
    answers = {
        Key(9, 1, 0): REFERENCE,
        Key(9, 4, 0): Answer((5, 6, 5), likely=(STEP, moved, ((-1.0, 5), (-9.0, 6)))),
        Key(9, 4, 1): Answer((5, 5, 5), likely=(moved,) * 3),  # another prompt
    }
    # After token 1 the texts differ, and with them the gaps.
    answers |= {Key(30, 1, 0): REFERENCE, Key(30, 4, 0): REFERENCE}
    assert rounding(answers) == {9: pytest.approx(0.03), 30: 0}


def test_a_change_that_parts_the_tokens_counts_as_rounding() -> None:
    """Those are the largest changes; to leave them out would leave the bound too small."""
    swapped = ((-1.0, 6), (-1.05, 5), (-3.0, 7))
    answers = {
        Key(9, 1, 0): REFERENCE,
        Key(9, 4, 0): Answer((6, 5, 5), likely=(swapped, ((0.0, 9), (0.0, 8)), STEP)),
    }
    first = STEP[0][0] - STEP[1][0]
    assert rounding(answers) == {9: pytest.approx(first + 0.05)}


def test_another_bound_judges_anew() -> None:
    found = compare("kernel", {KEY: Answer((5, 6, 5))}, {KEY: REFERENCE}, {1024: 0.0})
    assert found.near_ties == 0
    assert found.judged_by(0.2).near_ties == 1
    lost = compare("kernel", {KEY: Answer((5, 60, 5))}, {KEY: REFERENCE}, {1024: 0.2})
    assert lost.judged_by(9.0).near_ties == 0


def test_the_bound_is_twice_the_rounding_and_at_least_a_step_of_the_logits() -> None:
    assert tie_bound(0.1, torch.bfloat16) == pytest.approx(0.2)
    assert tie_bound(0.0, torch.bfloat16) == 2**-5
    with pytest.raises(GateFailure, match=r"differs from itself by 0\.300"):
        tie_bound(0.3, torch.bfloat16)


def test_a_length_has_the_bound_of_its_own_rounding() -> None:
    bounds = tie_bounds({32: 0.02, 64: 0.1}, torch.bfloat16)
    assert bounds == {32: pytest.approx(0.04), 64: pytest.approx(0.2)}
    reference = {Key(32, 1, 0): REFERENCE, Key(64, 1, 0): REFERENCE}
    parting = dict.fromkeys(reference, Answer((5, 6, 5)))
    short, long = compare("kernel", parting, reference, bounds).differences
    assert (short.near_tie, long.near_tie) == (False, True)


def test_an_answer_is_whole_where_its_number_of_tokens_ended_it() -> None:
    assert incomplete([REFERENCE], 3) is None
    for wrong in (Answer(()), Answer((5, 5, 5), ending="abort"), Answer((5, 5, 5), ending="")):
        assert str(incomplete([REFERENCE, wrong], 3)).startswith("answer 1: expected 3 tokens")


def many(what: str, answers: int, ties: int, tokens: int, *, stock: bool = False) -> Comparison:
    tie = Difference(what, 1, 6, 5, 0.1, near_tie=True)
    return Comparison(what, answers, tokens, 10 * answers, 1, 1, (tie,) * ties, stock)


@pytest.mark.parametrize(
    ("ours", "stocks", "says"),
    [
        ((9, 2, 80), None, None),
        ((9, 3, 80), None, "kernel: 3 of 9 answers part by a near-tie, expected at most 2 beside"),
        ((100, 10, 800), (50, 0, 500), None),
        ((100, 11, 800), (50, 0, 500), "at most 10 beside 0% of stock trees'"),
        ((100, 50, 800), (50, 20, 500), None),
        ((100, 51, 800), (50, 20, 500), "expected at most 50 beside 40%"),
        ((10, 0, 50), None, None),
        ((10, 0, 49), None, "kernel: 49 of 100 tokens were compared and equal, expected at least"),
        ((0, 0, 0), None, "0 of 0 tokens were compared"),
    ],
)
def test_near_ties_are_limited_by_those_of_stock_trees(
    ours: tuple[int, int, int], stocks: tuple[int, int, int] | None, says: str | None
) -> None:
    comparisons = [many("kernel", *ours)]
    # Whatever stock's own tokens are, they are not judged.
    comparisons += [many("triton", *stocks[:2], 1, stock=True)] if stocks else []
    if says is None:
        demand(*comparisons)
        return
    with pytest.raises(GateFailure, match=says) as caught:
        demand(*comparisons)
    assert caught.value.kind is FailureKind.TOKEN_MISMATCH


def test_the_headline_is_of_what_is_judged() -> None:
    figures = figures_of([many("triton", 9, 0, 90, stock=True), many("kernel", 9, 0, 70)], {9: 0.1})
    assert (figures[0].name, figures[0].value) == ("tokens equal", 70)


def test_only_differences_beyond_rounding_fail_and_all_are_on_record() -> None:
    reference = {KEY: REFERENCE, Key(1024, 4, 3): REFERENCE}
    found = {KEY: Answer((5, 6, 6), verified=1), Key(1024, 4, 3): Answer((5, 5, 5), verified=3)}
    bounds = {1024: 0.2}
    comparison = compare("kernel", found, reference, bounds)
    assert (comparison.tokens, comparison.accept_length) == (4, 1.0)
    demand(comparison)
    names = {figure.name: figure.value for figure in figures_of([comparison], bounds)}
    assert names["kernel: near-ties accepted"] == 1
    assert names["near-tie: kernel L=1024 B=4 #2 token 1"] == pytest.approx(0.1)
    wrong = compare("kernel", found | {KEY: Answer((5, 7, 6))}, reference, bounds)
    with pytest.raises(
        GateFailure, match=r"1 of 2 answers .*; kernel L=1024 B=4 #2, token 1: 7 for 5, 2.0000"
    ) as caught:
        demand(comparison, wrong)
    assert caught.value.kind is FailureKind.TOKEN_MISMATCH


def test_prompts_are_ragged_and_long_ones_share_their_beginning() -> None:
    short, long = draw_prompts(GPU, 1024, 4, 1), draw_prompts(GPU, 16384, 4, 1)
    assert [len(prompt) for prompt in short] == [1024, 1023, 1022, 1021]
    assert short[0][:100] != short[1][:100]
    assert long[0][:16000] == long[1][:16000]
    assert long[0][-24:] != long[1][-24:]
    assert draw_prompts(GPU, 16384, 2, 1) == long[:2] != draw_prompts(GPU, 16384, 2, 2)
    assert all(2 <= token < 64 for prompt in draw_prompts(CPU, 32, 3, 1) for token in prompt)


def test_the_longest_prompts_of_a_gpu_host_fit_the_models_context() -> None:
    assert max(GPU.lengths) + GPU.new_tokens + 64 < 262144
    assert dataclasses.replace(GPU, lengths=()).batches == (1, 4, 16)
