"""Checks that look at tokens: speculative decoding against decoding with no speculation at all."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import torch

from kdtree_engine.reference.attention import tree_verify_attention
from kdtree_engine.reference.masks import MaskLayout
from kdtree_engine.reference.slots import SlotAllocator
from kdtree_engine.reference.speculative import (
    Generation,
    NoisyDrafter,
    Parts,
    plain_greedy,
    speculative_decode,
)
from kdtree_engine.reference.tiny_mla import Attention, TinyMLA, TinyMLAConfig
from phases.gate import Context, FailureKind, Figure, GateFailure, Unit
from phases.threads import single_threaded

__all__ = ["BATCHES", "BUDGETS", "speculation_equals_plain", "tokens_equal_oracle"]

BUDGETS = (1, 3, 8, 16, 32, 64)
BATCHES = (1, 4)
_CPU = torch.device("cpu")
_POOL_SLOTS = 1024
_DRAFT_DEPTH = 7
_SAME_LOGITS = 1e-9
"""Float64 logits of two right forms differ by some 1e-13, of a wrong one by 1e-3 and more."""


@single_threaded
def speculation_equals_plain(
    ctx: Context,
    *,
    parts: Parts | None = None,
    config: TinyMLAConfig | None = None,
    device: torch.device = _CPU,
    budgets: Sequence[int] = BUDGETS,
    batches: Sequence[int] = BATCHES,
    prompts_each: int = 20,
    new_tokens: int = 24,
) -> list[Figure]:
    """Speculative greedy decoding of TinyMLA in float64 against `plain_greedy`, token for token.

    For every budget and batch size, `prompts_each` prompts: behind no shared prefix, a short and a
    long one; in scattered and contiguous slots; with each mask layout; with drafters that are
    often and seldom right. The logits behind each token must agree too: a wrong KV row may leave
    the most likely token as it is.
    """
    settings = list(_settings(budgets, batches))
    prompts_done = tokens_done = distinct = drafted = accepted = rounds = 0
    worst = 0.0
    for number, setting in enumerate(settings):
        ctx.progress(number * prompts_each, len(settings) * prompts_each, str(setting))
        generator = torch.Generator().manual_seed(ctx.seed * 1000 + number)
        model = TinyMLA(config or TinyMLAConfig(), seed=ctx.seed + number, device=device)
        for group in _groups(prompts_each, setting.batch):
            task = _Task.draw(model, setting, group, generator)
            plain, logits = plain_greedy(model, task.whole_prompts, new_tokens)
            made = task.decode(model, parts or Parts(), logits, new_tokens, torch.float64)
            for request, wanted in enumerate(plain):
                place = f"{setting}, prompt {prompts_done + request}"
                _same_tokens(place, made.tokens[request], wanted)
                worst = max(worst, _same_logits(place, made.logits[request], logits[request]))
            prompts_done += len(plain)
            tokens_done += sum(map(len, made.tokens))
            distinct += sum(len(set(tokens)) for tokens in plain)
            drafted, accepted = drafted + made.drafted, accepted + made.accepted
            rounds += made.rounds
    total = len(settings) * prompts_each
    ctx.progress(total, total, "done")
    if not 0 < accepted < drafted:
        raise ValueError(
            f"{accepted} of {drafted} drafted tokens were accepted: a drafter that is never wrong, "
            "or never right, tests nothing"
        )
    return [
        Figure("prompts", prompts_done, Unit.COUNT),
        Figure("tokens", tokens_done, Unit.TOKENS),
        Figure("tokens a verification", tokens_done / rounds, Unit.RATIO),
        Figure("distinct tokens a text", distinct / prompts_done, Unit.TOKENS),
        Figure("worst difference of logits", worst, Unit.RELATIVE_ERROR),
    ]


@single_threaded
def tokens_equal_oracle(
    candidate: Attention,
    ctx: Context,
    *,
    dtype: torch.dtype,
    device: torch.device = _CPU,
    tolerance_factor: float = 2.0,
    config: TinyMLAConfig | None = None,
    budgets: Sequence[int] = (3, 8, 32),
    batches: Sequence[int] = BATCHES,
    prompts_each: int = 8,
    new_tokens: int = 24,
) -> list[Figure]:
    """Greedy tokens of TinyMLA with the candidate in place of the oracle, over pools in `dtype`.

    The reference decodes one token at a time with the oracle over pools in `dtype`. A token of the
    candidate's may differ from it only where the oracle's own two best logits lie closer together
    than rounding can move them. That bound is measured without the candidate: how far logits
    move when the oracle's output is rounded to `dtype`, times 2 (both logits may move), times
    `tolerance_factor`. Behind an excused token the prompt's texts differ, so it is left.
    """
    config = config or TinyMLAConfig(latent=512, rope=64, heads=8)
    oracle, rounded = Parts(), Parts(attention=_rounded_oracle)
    settings = list(_settings(budgets, batches))
    compared = excused = prompts_done = 0
    largest_gap = 0.0
    for number, setting in enumerate(settings):
        ctx.progress(number * prompts_each, len(settings) * prompts_each, str(setting))
        generator = torch.Generator().manual_seed(ctx.seed * 1000 + number)
        model = TinyMLA(config, seed=ctx.seed + number, device=device)
        for group in _groups(prompts_each, setting.batch):
            task = _Task.draw(model, setting, group, generator)
            one_by_one = dataclasses.replace(task, setting=dataclasses.replace(setting, budget=0))
            # The crib shapes the draft trees only; at budget 0 there are none.
            empty = [torch.zeros(0, config.vocabulary, dtype=torch.float64)] * len(task.prompts)
            wanted = one_by_one.decode(model, oracle, empty, new_tokens, dtype)
            moved = one_by_one.decode(model, rounded, empty, new_tokens, dtype)
            bound = 2 * tolerance_factor * _shift(wanted, moved)
            made = task.decode(model, Parts(attention=candidate), wanted.logits, new_tokens, dtype)
            for request, tokens in enumerate(wanted.tokens):
                first = _first_difference(made.tokens[request], tokens)
                compared += first
                if first == len(tokens):
                    continue
                best = wanted.logits[request][first].topk(2).values
                gap = float(best[0] - best[1])
                if not gap <= bound:
                    place = f"{setting}, prompt {prompts_done + request}"
                    raise GateFailure(
                        FailureKind.TOKEN_MISMATCH,
                        f"{place}: token {first} is {_at(made.tokens[request], first)}, the "
                        f"oracle's is {tokens[first]} and leads by {gap:.3g}, while rounding "
                        f"moves logits by at most {bound:.3g}",
                    )
                excused, largest_gap = excused + 1, max(largest_gap, gap)
            prompts_done += len(task.prompts)
    total = len(settings) * prompts_each
    ctx.progress(total, total, "done")
    return [
        Figure("tokens equal", compared, Unit.TOKENS),
        Figure("prompts", prompts_done, Unit.COUNT),
        Figure("near ties that fell otherwise", excused, Unit.COUNT),
        Figure("largest gap of those", largest_gap, Unit.RATIO),
    ]


@dataclasses.dataclass(frozen=True)
class _Setting:
    budget: int
    batch: int
    layout: MaskLayout
    shared: int
    scattered: bool
    noise: float

    def __str__(self) -> str:
        slots = "scattered" if self.scattered else "contiguous"
        return (
            f"budget {self.budget}, batch {self.batch}, {self.shared} shared tokens, {slots} "
            f"slots, {self.layout.value} mask"
        )


@dataclasses.dataclass(frozen=True)
class _Task:
    """Prompts of one batch, and what is needed to decode them in one setting again and again."""

    setting: _Setting
    shared: list[int]
    prompts: list[list[int]]
    seed: int

    @classmethod
    def draw(
        cls, model: TinyMLA, setting: _Setting, size: int, generator: torch.Generator
    ) -> _Task:
        """Prompts of 1 to 12 random tokens of their own."""

        def tokens(count: int) -> list[int]:
            drawn = torch.randint(model.config.vocabulary, (count,), generator=generator)
            return [int(token) for token in drawn]

        lengths = torch.randint(1, 13, (size,), generator=generator).tolist()
        seed = int(torch.randint(2**31, (1,), generator=generator))
        return cls(setting, tokens(setting.shared), [tokens(length) for length in lengths], seed)

    @property
    def whole_prompts(self) -> list[list[int]]:
        return [[*self.shared, *prompt] for prompt in self.prompts]

    def decode(
        self,
        model: TinyMLA,
        parts: Parts,
        crib: Sequence[torch.Tensor],
        new_tokens: int,
        dtype: torch.dtype,
    ) -> Generation:
        generator = torch.Generator().manual_seed(self.seed)
        drafter = NoisyDrafter(
            crib,
            [len(prompt) for prompt in self.whole_prompts],
            depth=_DRAFT_DEPTH,
            noise=self.setting.noise,
            generator=generator,
        )
        return speculative_decode(
            model,
            self.prompts,
            drafter,
            budget=self.setting.budget,
            new_tokens=new_tokens,
            allocator=SlotAllocator(_POOL_SLOTS, generator if self.setting.scattered else None),
            pools=model.new_pools(_POOL_SLOTS, dtype),
            shared=self.shared,
            layout=self.setting.layout,
            parts=parts,
        )


def _settings(budgets: Sequence[int], batches: Sequence[int]) -> Iterator[_Setting]:
    # Cycles of lengths that share no factor with each other or with the grid's rows, so that
    # every kind of prefix meets every layout.
    layouts = itertools.cycle([*MaskLayout, *reversed(MaskLayout), MaskLayout.PACKED])
    shared = itertools.cycle((0, 20, 7, 0, 3))
    scattered = itertools.cycle((True, True, False))
    noises = itertools.cycle((0.5, 1.5, 0.8, 0.3, 2.5))
    for budget, batch in itertools.product(budgets, batches):
        yield _Setting(budget, batch, next(layouts), next(shared), next(scattered), next(noises))


def _groups(prompts: int, batch: int) -> list[int]:
    """`prompts` cut into batches: sizes of `batch`, the last one perhaps smaller."""
    return [min(batch, prompts - start) for start in range(0, prompts, batch)]


def _same_tokens(place: str, made: Sequence[int], wanted: Sequence[int]) -> None:
    first = _first_difference(made, wanted)
    if first < len(wanted) or len(made) != len(wanted):
        raise GateFailure(
            FailureKind.TOKEN_MISMATCH,
            f"{place}: token {first} of {len(wanted)} is {_at(made, first)}, "
            f"plain decoding gives {_at(wanted, first)}",
        )


def _same_logits(place: str, made: torch.Tensor, wanted: torch.Tensor) -> float:
    """The worst relative difference of a row of logits."""
    apart = (made - wanted).norm(dim=1) / wanted.norm(dim=1)
    wrong = (~(apart <= _SAME_LOGITS)).nonzero()
    if len(wrong):
        first = int(wrong[0])
        raise GateFailure(
            FailureKind.NUMERICAL,
            f"{place}: the logits behind token {first} differ by {float(apart[first]):.3g} from "
            "those of plain decoding",
        )
    return float(apart.max())


def _shift(wanted: Generation, moved: Generation) -> float:
    """How far a logit moved at most, as far as both generations follow the same tokens."""
    worst = 0.0
    for tokens, others, ours, theirs in zip(
        wanted.tokens, moved.tokens, wanted.logits, moved.logits, strict=True
    ):
        same = min(_first_difference(others, tokens) + 1, len(tokens))
        worst = max(worst, float((ours[:same] - theirs[:same]).abs().max()))
    return worst


def _first_difference(made: Sequence[int], wanted: Sequence[int]) -> int:
    """Where `made` first differs from `wanted`, or the length of the shorter one."""
    for place, (ours, theirs) in enumerate(zip(made, wanted, strict=False)):
        if ours != theirs:
            return place
    return min(len(made), len(wanted))


def _at(tokens: Sequence[int], place: int) -> str:
    return str(tokens[place]) if place < len(tokens) else "missing"


def _rounded_oracle(q: torch.Tensor, *tensors: torch.Tensor | None, **options: object) -> object:
    """The oracle with its output rounded to the dtype of q, as a kernel's is."""
    answer = tree_verify_attention(q, *tensors, **options)  # type: ignore[arg-type]
    assert isinstance(answer, torch.Tensor)
    return answer.to(q.dtype)
