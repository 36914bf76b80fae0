"""Greedy tokens of two servers, compared; a difference is a near-tie or a failure.

In 16 bits two right servers differ now and then: where two tokens are almost equally likely, the
order of a sum decides. So the reference tells the most likely tokens of each step, and a first
difference is accepted where the other token was likely within what rounding does there. How much
that is gets measured in the same run: the reference answers the same prompt alone and in batches,
and what its own gaps then change by is rounding and nothing else. After a first difference the
texts are different ones, so nothing more is compared.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence

import torch

from phases.gate import FailureKind, Figure, GateFailure, Unit
from phases.service import Answer, Service, Tokens
from phases.service_scale import Scale

__all__ = [
    "LIKELY",
    "Comparison",
    "Difference",
    "Key",
    "ask_all",
    "compare",
    "compare_answer",
    "demand",
    "draw_prompts",
    "figures_of",
    "rounding",
    "tie_bound",
]

LIKELY = 4
"""How many of the most likely tokens the reference tells of each step."""
_OWN = 24  # tokens at a prompt's end that no other has
_NOISIEST = 0.25  # of a log probability; beyond it a near-tie would mean nothing
_SHOWN = 20


@dataclasses.dataclass(frozen=True, order=True)
class Key:
    """One answer: of prompt `number` of a length, asked in a batch of that size."""

    length: int
    batch: int
    number: int

    def __str__(self) -> str:
        return f"L={self.length} B={self.batch} #{self.number}"


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where an answer leaves the reference's.

    gap: by how much the reference found its own token likelier, in log probability; None where the
    other token is not among the most likely, or there is none. near_tie: the verdict.
    """

    where: str
    step: int
    got: int | None
    wanted: int | None
    gap: float | None
    near_tie: bool

    def __str__(self) -> str:
        gap = "not among the likely ones" if self.gap is None else f"{self.gap:.4f} less likely"
        return f"{self.where}, token {self.step}: {self.got} for {self.wanted}, {gap}"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """tokens: equal ones, before the first difference of each answer. verified: verifications."""

    what: str
    answers: int
    tokens: int
    verified: int
    produced: int
    differences: tuple[Difference, ...]

    @property
    def accept_length(self) -> float:
        """Tokens that a verification gave on average; 0 without speculation."""
        return self.produced / self.verified if self.verified else 0.0


def draw_prompts(scale: Scale, length: int, count: int, seed: int) -> list[Tokens]:
    """Ragged prompts of `length` tokens and a few less; long ones share all but their ends."""
    draw = random.Random(f"{seed} {length}")

    def tokens(size: int) -> list[int]:
        return draw.choices(range(2, scale.vocabulary), k=size)

    own = min(_OWN, length // 4)
    shared = tokens(length) if length > scale.distinct else None
    prompts = []
    for number in range(count):
        size = length - min(number, length // 4)
        head = tokens(size - own) if shared is None else shared[: size - own]
        prompts.append(tuple(head + tokens(own)))
    return prompts


def ask_all(
    service: Service,
    scale: Scale,
    *,
    seed: int,
    likely: int = 0,
    extra: Sequence[int] = (),
    note: Callable[[str], None] = lambda text: None,
) -> dict[Key, Answer]:
    """Each length's prompts, in batches of each size. extra: more sizes, for the first length."""
    found: dict[Key, Answer] = {}
    for length in scale.lengths:
        sizes = [*scale.batches, *(extra if length == scale.lengths[0] else ())]
        prompts = draw_prompts(scale, length, max(sizes), seed)
        # Before any of them: at once, each would prefill what they have in common.
        service.answers(prompts[:1], 1)
        for size in sizes:
            note(f"{size} of {length} tokens")
            answers = service.answers(prompts[:size], scale.new_tokens, likely=likely)
            found |= {Key(length, size, number): one for number, one in enumerate(answers)}
    return found


def rounding(reference: Mapping[Key, Answer]) -> float:
    """The largest change of a gap between the two likeliest tokens from batch to batch.

    Of the same prompt after the same tokens, so that nothing but rounding changes it.
    """
    largest = 0.0
    first: dict[tuple[int, int], Answer] = {}
    for key, answer in sorted(reference.items()):
        other = first.setdefault((key.length, key.number), answer)
        steps = zip(other.tokens, answer.tokens, other.likely, answer.likely, strict=False)
        for one, two, these, those in steps:
            if [token for _, token in these[:2]] == [token for _, token in those[:2]]:
                largest = max(largest, abs(_gap(these) - _gap(those)))
            if one != two:
                break
    return largest


def tie_bound(noise: float, dtype: torch.dtype) -> float:
    """How much less likely another token may be: twice the rounding that was measured.

    At least a step between neighbouring logits of 4 to 8 in `dtype`, as logits are rounded to it.
    Raises GateFailure where the reference alone is so uneven that nothing could be told.
    """
    if noise > _NOISIEST:
        raise GateFailure(
            FailureKind.NUMERICAL,
            f"the reference differs from itself by {noise:.3f} from batch to batch, expected at "
            f"most {_NOISIEST}",
        )
    return max(2 * noise, 4 * torch.finfo(dtype).eps)


def compare(
    what: str, found: Mapping[Key, Answer], reference: Mapping[Key, Answer], bound: float
) -> Comparison:
    """Each answer against the reference's to the same request."""
    equal, differences = 0, []
    for key, answer in found.items():
        same, difference = compare_answer(f"{what} {key}", answer.tokens, reference[key], bound)
        equal += same
        differences += [difference] if difference else []
    return Comparison(
        what,
        answers=len(found),
        tokens=equal,
        verified=sum(answer.verified for answer in found.values()),
        # The first token of an answer comes from the prefill.
        produced=sum(max(0, len(answer.tokens) - 1) for answer in found.values()),
        differences=tuple(differences),
    )


def compare_answer(
    where: str, got: Tokens, reference: Answer, bound: float, *, partial: bool = False
) -> tuple[int, Difference | None]:
    """Equal tokens, and the first difference. partial: `got` may end early, as aborted ones do."""
    wanted = reference.tokens
    for step, (one, other) in enumerate(zip(got, wanted, strict=False)):
        if one != other:
            likely = {token: chance for chance, token in reference.likely[step]}
            best = max(likely.values())
            gap = best - likely[one] if one in likely else None
            tie = gap is not None and gap <= bound
            return step, Difference(where, step, one, other, gap, tie)
    end = min(len(got), len(wanted))
    if len(got) == len(wanted) or (partial and len(got) < len(wanted)):
        return end, None
    ends = [tokens[end] if len(tokens) > end else None for tokens in (got, wanted)]
    return end, Difference(where, end, ends[0], ends[1], None, False)


def demand(*comparisons: Comparison, figures: Sequence[Figure] = ()) -> None:
    """Raises GateFailure for the first difference that rounding does not explain."""
    for comparison in comparisons:
        wrong = [one for one in comparison.differences if not one.near_tie]
        if wrong:
            raise GateFailure(
                FailureKind.TOKEN_MISMATCH,
                f"{len(wrong)} of {comparison.answers} answers differ beyond rounding; {wrong[0]}",
                figures,
            )


def figures_of(comparisons: Sequence[Comparison], bound: float) -> list[Figure]:
    """What is kept of comparisons: sums, and the differences with the largest gaps."""
    figures = [Figure("tokens equal", sum(one.tokens for one in comparisons), Unit.TOKENS)]
    for one in comparisons:
        accepted = sum(difference.near_tie for difference in one.differences)
        figures += [
            Figure(f"{one.what}: answers", one.answers, Unit.COUNT),
            Figure(f"{one.what}: tokens equal", one.tokens, Unit.TOKENS),
            Figure(f"{one.what}: near-ties accepted", accepted, Unit.COUNT),
            Figure(f"{one.what}: others refused", len(one.differences) - accepted, Unit.COUNT),
            Figure(f"{one.what}: tokens a verification", one.accept_length, Unit.RATIO),
        ]
    figures.append(Figure("gap that is a near-tie, log probability", bound, Unit.RATIO))
    every = [difference for one in comparisons for difference in one.differences]
    every.sort(key=lambda one: float("inf") if one.gap is None else one.gap, reverse=True)
    figures += [
        Figure(
            f"{'near-tie' if one.near_tie else 'refused'}: {one.where} token {one.step}",
            -1.0 if one.gap is None else one.gap,
            Unit.RATIO,
        )
        for one in every[:_SHOWN]
    ]
    return figures


def _gap(likely: Sequence[tuple[float, int]]) -> float:
    return likely[0][0] - likely[1][0] if len(likely) > 1 else 0.0
