"""Greedy tokens of two servers, compared; a difference is a near-tie or a failure.

In 16 bits two right servers differ now and then: where two tokens are almost equally likely, the
order of a sum decides. So the reference tells the most likely tokens of each step, and a first
difference is accepted where the other token was likely within what rounding does there. How much
that is gets measured in the same run, at each prompt length: the reference answers the same prompt
alone and in batches, and what its own gaps then change by is rounding and nothing else. After a
first difference the texts are different ones, so nothing more is compared.

Near-ties excuse, so they are limited: a kernel that is wrong by a little would have more of them
than stock trees have in the same run, and where most tokens come after one, little was compared.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence

import torch

from phases.gate import FailureKind, Figure, GateFailure, Unit
from phases.service import Answer, Service, Tokens, incomplete
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
    "moved",
    "rounding",
    "tie_bound",
    "tie_bounds",
]

LIKELY = 4
"""How many of the most likely tokens the reference tells of each step."""
_OWN = 24  # tokens at a prompt's end that no other has
_NOISIEST = 0.25  # of a log probability; beyond it a near-tie would mean nothing
_SHOWN = 20
_FEW_TIES = 2
_MORE_TIES = 0.1  # of the answers: how many more may part by a near-tie than of stock's
_COMPARED = 0.5  # of the tokens, at least


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
        return f"{self.where}, token {self.step}: {self.got} for {self.wanted}, {self.how}"

    @property
    def how(self) -> str:
        """How far it is from the reference, in a few words."""
        if self.wanted is None or self.got is None:
            return f"{'beyond' if self.wanted is None else 'before'} the reference's end"
        return "not among the likely ones" if self.gap is None else f"{self.gap:.4f} less likely"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """tokens: equal ones, before the first difference of each answer. verified: verifications.

    wanted: tokens that would be equal without any difference. stock: whether it is of stock SGLang,
    which is on record and not judged.
    """

    what: str
    answers: int
    tokens: int
    wanted: int
    verified: int
    produced: int
    differences: tuple[Difference, ...]
    stock: bool = False

    @property
    def accept_length(self) -> float:
        """Tokens that a verification gave on average; 0 without speculation."""
        return self.produced / self.verified if self.verified else 0.0

    def judged_by(self, bound: float) -> Comparison:
        """The same, with another bound for what is a near-tie."""
        differences = (
            dataclasses.replace(one, near_tie=one.gap is not None and one.gap <= bound)
            for one in self.differences
        )
        return dataclasses.replace(self, differences=tuple(differences))

    @property
    def near_ties(self) -> int:
        """Answers that part from the reference's by a near-tie."""
        return sum(one.near_tie for one in self.differences)


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
    """Each length's prompts, in batches of each size. extra: more sizes, for the first length.

    Raises GateFailure where an answer is not as many tokens as were asked for.
    """
    found: dict[Key, Answer] = {}
    for length in scale.lengths:
        sizes = [*scale.batches, *(extra if length == scale.lengths[0] else ())]
        prompts = draw_prompts(scale, length, max(sizes), seed)
        # Before any of them: at once, each would prefill what they have in common.
        service.answers(prompts[:1], 1)
        for size in sizes:
            note(f"{size} of {length} tokens")
            answers = service.answers(prompts[:size], scale.new_tokens, likely=likely)
            if problem := incomplete(answers, scale.new_tokens):
                raise GateFailure(
                    FailureKind.TOKEN_MISMATCH, f"{size} prompts of {length} tokens: {problem}"
                )
            found |= {Key(length, size, number): one for number, one in enumerate(answers)}
    return found


def rounding(reference: Mapping[Key, Answer]) -> dict[int, float]:
    """How much one server moves its own tokens from batch to batch, by prompt length."""
    largest = dict.fromkeys((key.length for key in sorted(reference)), 0.0)
    first: dict[tuple[int, int], Answer] = {}
    for key, answer in sorted(reference.items()):
        other = first.setdefault((key.length, key.number), answer)
        largest[key.length] = max(largest[key.length], moved(other, answer))
    return largest


def moved(one: Answer, other: Answer) -> float:
    """The largest change of a gap between the two likeliest tokens of `one`, in log probability.

    Of the same prompt after the same tokens, so that nothing but rounding changes it. Where it
    changed so much that the tokens part, that counts too: those are the largest changes.
    """
    largest = 0.0
    steps = zip(one.tokens, other.tokens, one.likely, other.likely, strict=False)
    for mine, theirs, these, those in steps:
        there = {token: chance for chance, token in those}
        two = [(chance, there[token]) for chance, token in these[:2] if token in there]
        if len(two) == 2:
            (first, first_there), (second, second_there) = two
            largest = max(largest, abs((first - second) - (first_there - second_there)))
        if mine != theirs:
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


def tie_bounds(noise: Mapping[int, float], dtype: torch.dtype) -> dict[int, float]:
    """`tie_bound` for each prompt length."""
    return {length: tie_bound(one, dtype) for length, one in noise.items()}


def compare(
    what: str,
    found: Mapping[Key, Answer],
    reference: Mapping[Key, Answer],
    bounds: Mapping[int, float],
    *,
    stock: bool = False,
) -> Comparison:
    """Each answer against the reference's to the same request. bounds: by prompt length."""
    equal, differences = 0, []
    for key, answer in found.items():
        same, difference = compare_answer(
            f"{what} {key}", answer.tokens, reference[key], bounds[key.length]
        )
        equal += same
        differences += [difference] if difference else []
    return Comparison(
        what,
        answers=len(found),
        tokens=equal,
        wanted=sum(len(reference[key].tokens) for key in found),
        verified=sum(answer.verified for answer in found.values()),
        # The first token of an answer comes from the prefill.
        produced=sum(max(0, len(answer.tokens) - 1) for answer in found.values()),
        differences=tuple(differences),
        stock=stock,
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
    """Raises GateFailure for what rounding does not explain; those of stock are not judged.

    That is a difference that is no near-tie; more near-ties than stock trees of the same run have,
    and a few; and answers that part so early that less than half of their tokens were compared.
    """
    theirs = max((one.near_ties / one.answers for one in comparisons if one.stock), default=0.0)
    for comparison in comparisons:
        if comparison.stock:
            continue
        wrong = [one for one in comparison.differences if not one.near_tie]
        if wrong:
            raise GateFailure(
                FailureKind.TOKEN_MISMATCH,
                f"{len(wrong)} of {comparison.answers} answers differ beyond rounding; {wrong[0]}",
                figures,
            )
        margin = max(_FEW_TIES, _MORE_TIES * comparison.answers)
        most = int(theirs * comparison.answers + margin)
        if comparison.near_ties > most:
            raise GateFailure(
                FailureKind.TOKEN_MISMATCH,
                f"{comparison.what}: {comparison.near_ties} of {comparison.answers} answers part "
                f"by a near-tie, expected at most {most} beside {theirs:.0%} of stock trees'",
                figures,
            )
        if not comparison.wanted or comparison.tokens < _COMPARED * comparison.wanted:
            raise GateFailure(
                FailureKind.TOKEN_MISMATCH,
                f"{comparison.what}: {comparison.tokens} of {comparison.wanted} tokens were "
                f"compared and equal, expected at least {_COMPARED:.0%}",
                figures,
            )


def figures_of(comparisons: Sequence[Comparison], bounds: Mapping[int, float]) -> list[Figure]:
    """What is kept of comparisons: sums, and the differences with the largest gaps.

    The headline is of what is judged: stock's equal tokens say nothing of the kernel.
    """
    ours = sum(one.tokens for one in comparisons if not one.stock)
    figures = [Figure("tokens equal", ours, Unit.TOKENS)]
    for one in comparisons:
        accepted = one.near_ties
        figures += [
            Figure(f"{one.what}: answers", one.answers, Unit.COUNT),
            Figure(f"{one.what}: tokens equal", one.tokens, Unit.TOKENS),
            Figure(f"{one.what}: tokens wanted", one.wanted, Unit.TOKENS),
            Figure(f"{one.what}: near-ties accepted", accepted, Unit.COUNT),
            Figure(f"{one.what}: others refused", len(one.differences) - accepted, Unit.COUNT),
            Figure(f"{one.what}: tokens a verification", one.accept_length, Unit.RATIO),
        ]
    figures += [
        Figure(f"gap that is a near-tie at {length}, log probability", bound, Unit.RATIO)
        for length, bound in bounds.items()
    ]
    every = [difference for one in comparisons for difference in one.differences]
    every.sort(key=lambda one: float("inf") if one.gap is None else one.gap, reverse=True)
    figures += [
        Figure(
            f"near-tie: {one.where} token {one.step}"
            if one.near_tie
            else f"refused, {one.how}: {one.where} token {one.step}",
            -1.0 if one.gap is None else one.gap,
            Unit.RATIO,
        )
        for one in every[:_SHOWN]
    ]
    return figures
