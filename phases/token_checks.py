"""Checks that look at tokens: speculative decoding against decoding with no speculation at all."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from kdtree_engine.reference.acceptance import Acceptance
from kdtree_engine.reference.attention import tree_verify_attention
from kdtree_engine.reference.masks import MaskLayout, pack_masks, unpack_masks
from kdtree_engine.reference.slots import SlotAllocator
from kdtree_engine.reference.speculative import (
    Drafter,
    Generation,
    NoisyDrafter,
    Parts,
    plain_greedy,
    speculative_decode,
)
from kdtree_engine.reference.tiny_mla import Attention, TinyMLA, TinyMLAConfig
from kdtree_engine.reference.tree import DraftTree
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
_LEAST_SHARES = {0: 0.10, 3: 0.07, 6: 0.01}
"""Of all rounds: those that accept nothing, and those that accept so many drafted tokens or more.

A half to a quarter of what comes up over all settings: 28 %, 14 % and 4 %. A drafter that is
always right never tries the way back, one that is nearly useless never tries a deep path.
"""
_LEAST_MOVED = 0.15
"""Of all rounds: those whose path leaves the window's front, so that rows have to move."""


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

    Equal tokens alone would let a loop pass that speculates less than it says, as every token is
    the target's own. So a witness looks at every tree and every walk (`_Witness`), deep paths and
    rounds with nothing accepted must both be common, and two attentions that are wrong on purpose
    must change the tokens: else the model would not show what the attention does.
    """
    parts = parts or Parts()
    settings = list(_settings(budgets, batches))
    prompts_done = tokens_done = distinct = rounds = moved = 0
    accepted: Counter[int] = Counter()
    worst = 0.0
    for number, setting in enumerate(settings):
        ctx.progress(number * prompts_each, len(settings) * prompts_each, str(setting))
        generator = torch.Generator().manual_seed(ctx.seed * 1000 + number)
        model = TinyMLA(config or TinyMLAConfig(), seed=ctx.seed + number, device=device)
        for group in _groups(prompts_each, setting.batch):
            task = _Task.draw(model, setting, group, generator)
            plain, logits = plain_greedy(model, task.whole_prompts, new_tokens)
            made, witness = task.decode(model, parts, logits, new_tokens, torch.float64)
            for request, wanted in enumerate(plain):
                place = f"{setting}, prompt {prompts_done + request}"
                _same_tokens(place, made.tokens[request], wanted)
                worst = max(worst, _same_logits(place, made.logits[request], logits[request]))
            prompts_done += len(plain)
            tokens_done += sum(map(len, made.tokens))
            distinct += sum(len(set(tokens)) for tokens in plain)
            accepted += witness.accepted
            rounds, moved = rounds + made.rounds, moved + witness.moved
    total = len(settings) * prompts_each
    ctx.progress(total, total, "with a wrong attention")
    changed = _wrong_attention_shows(ctx, parts, config or TinyMLAConfig(), device)
    ctx.progress(total, total, "done")
    shares = {
        f"rounds that accept {'nothing' if not least else f'{least} or more'}": sum(
            count for depth, count in accepted.items() if (depth >= least if least else not depth)
        )
        / rounds
        for least in _LEAST_SHARES
    }
    figures = [
        Figure("prompts", prompts_done, Unit.COUNT),
        Figure("tokens", tokens_done, Unit.TOKENS),
        Figure("tokens a verification", tokens_done / rounds, Unit.RATIO),
        Figure("distinct tokens a text", distinct / prompts_done, Unit.TOKENS),
        Figure("worst difference of logits", worst, Unit.RELATIVE_ERROR),
        *(Figure(name, share, Unit.RATIO) for name, share in shares.items()),
        Figure("rounds whose rows move", moved / rounds, Unit.RATIO),
        Figure("least share of texts that a wrong attention changes", changed, Unit.RATIO),
    ]
    _drafting_tests_something(figures, shares, moved / rounds, max(budgets))
    return figures


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
            wanted, _ = one_by_one.decode(model, oracle, empty, new_tokens, dtype)
            moved, _ = one_by_one.decode(model, rounded, empty, new_tokens, dtype)
            bound = 2 * tolerance_factor * _shift(wanted, moved)
            made, _ = task.decode(
                model, Parts(attention=candidate), wanted.logits, new_tokens, dtype
            )
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
    sharpness: float
    """Factor of the logits that the drafter looks at. Above 1 its trees are narrow and deep."""
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
    ) -> tuple[Generation, _Witness]:
        """What the loop makes of the prompts, looked at step by step."""
        generator = torch.Generator().manual_seed(self.seed)
        drafter = NoisyDrafter(
            [self.setting.sharpness * logits for logits in crib],
            [len(prompt) for prompt in self.whole_prompts],
            depth=_DRAFT_DEPTH,
            noise=self.setting.noise,
            generator=generator,
        )
        witness = _Witness(self, parts, drafter)
        allocator = SlotAllocator(_POOL_SLOTS, generator if self.setting.scattered else None)
        made = speculative_decode(
            model,
            self.prompts,
            witness.draft,
            budget=self.setting.budget,
            new_tokens=new_tokens,
            allocator=allocator,
            pools=model.new_pools(_POOL_SLOTS, dtype),
            shared=self.shared,
            layout=self.setting.layout,
            parts=dataclasses.replace(parts, build_tree=witness.build, accept=witness.accept),
        )
        witness.judge(made, allocator.free_slots)
        return made, witness


class _Witness:
    """Stands between the loop and its parts, and fails where the loop does less than it says.

    A tree has as many nodes as its budget allows, and is verified as it was built. The walk goes
    down a path of that tree until no child carries the target's token. The next draft stands behind
    all that was accepted. In the end every slot is free again, and the counts are right.
    """

    def __init__(self, task: _Task, parts: Parts, drafter: Drafter) -> None:
        self.accepted: Counter[int] = Counter()
        """Rounds by the number of drafted tokens that they accepted."""
        self.moved = 0
        """Rounds whose accepted path is not the front of the window already."""
        self._setting, self._parts, self._drafter = task.setting, parts, drafter
        self._texts = task.whole_prompts
        self._drafts: deque[tuple[int, torch.Tensor]] = deque()
        self._trees: deque[tuple[int, DraftTree]] = deque()
        self._drafted = 0

    def draft(self, request: int, tokens: Sequence[int]) -> torch.Tensor:
        if list(tokens) != self._texts[request]:
            self._fail(
                FailureKind.TOKEN_MISMATCH,
                f"request {request} has {len(tokens)} tokens when the next ones are drafted, and "
                f"they are not its prompt and what was accepted ({len(self._texts[request])})",
            )
        log_probs = self._drafter(request, tokens)
        self._drafts.append((request, log_probs))
        return log_probs

    def build(
        self,
        log_probs: torch.Tensor,
        budget: int,
        top_k: int | None = None,
        *,
        token_ids: torch.Tensor | None = None,
        root_token: int = -1,
    ) -> DraftTree:
        tree = self._parts.build_tree(
            log_probs, budget, top_k, token_ids=token_ids, root_token=root_token
        )
        request, drafted = self._drafts.popleft()
        wanted = min(self._setting.budget, _nodes_there(drafted, self._setting.budget))
        if len(tree) - 1 != wanted:
            self._fail(
                FailureKind.SHAPE, f"a tree has {len(tree) - 1} nodes under its root, not {wanted}"
            )
        if int(tree.tokens[0]) != self._texts[request][-1]:
            self._fail(
                FailureKind.TOKEN_MISMATCH,
                f"a tree's root carries token {int(tree.tokens[0])}, the last one of request "
                f"{request} is {self._texts[request][-1]}",
            )
        self._trees.append((request, tree))
        self._drafted += wanted
        return tree

    def accept(self, tree: DraftTree, logits: torch.Tensor) -> Acceptance:
        acceptance = self._parts.accept(tree, logits)
        request, built = self._trees.popleft()
        tokens, parents = built.tokens.tolist(), built.parents.tolist()
        if tree.tokens.tolist() != tokens or tree.parents.tolist() != parents:
            self._fail(FailureKind.TOKEN_MISMATCH, "a tree is verified that was not built")
        nodes, last = list(acceptance.nodes), acceptance.nodes[-1]
        if nodes[0] or [parents[node] for node in nodes[1:]] != nodes[:-1]:
            self._fail(FailureKind.TOKEN_MISMATCH, f"the accepted nodes {nodes} are no path")
        if [tokens[node] for node in nodes[1:]] != list(acceptance.drafted):
            self._fail(
                FailureKind.TOKEN_MISMATCH,
                f"the path {nodes} does not carry the tokens {list(acceptance.drafted)}",
            )
        for node, parent in enumerate(parents):
            if parent == last and tokens[node] == acceptance.bonus:
                self._fail(
                    FailureKind.TOKEN_MISMATCH,
                    f"the walk stops at node {last}, though its child {node} carries the target's "
                    f"token {acceptance.bonus}",
                )
        self._texts[request].extend(acceptance.tokens)
        self.accepted[len(acceptance.drafted)] += 1
        self.moved += nodes != list(range(len(nodes)))
        return acceptance

    def judge(self, made: Generation, free: int) -> None:
        """What the whole run says of itself against what was seen."""
        if free != _POOL_SLOTS:
            self._fail(
                FailureKind.NUMERICAL, f"{free} of {_POOL_SLOTS} slots are free when all is done"
            )
        seen = {
            "rounds": self.accepted.total(),
            "drafted": self._drafted,
            "accepted": sum(depth * count for depth, count in self.accepted.items()),
        }
        for name, count in seen.items():
            if getattr(made, name) != count:
                self._fail(FailureKind.NUMERICAL, f"`{name}` is {getattr(made, name)}, not {count}")

    def _fail(self, kind: FailureKind, problem: str) -> NoReturn:
        raise GateFailure(kind, f"{self._setting}: {problem}")


def _nodes_there(log_probs: torch.Tensor, most: int) -> int:
    """How many nodes the full tree has, counted no further than `most`."""
    there, level = 0, 1
    for width in log_probs.isfinite().sum(1).tolist():
        level *= width
        there += level
        if there >= most:
            break
    return there


def _drafting_tests_something(
    figures: Sequence[Figure], shares: Mapping[str, float], moved: float, budget: int
) -> None:
    """Deep paths, rejected drafts and rows that move must all be common enough to be tested."""
    asked = zip(_LEAST_SHARES.items(), shares.items(), strict=True)
    wanted = [(name, share, least) for (depth, least), (name, share) in asked if depth <= budget]
    if budget >= min(depth for depth in _LEAST_SHARES if depth):
        wanted.append(("rounds whose rows move", moved, _LEAST_MOVED))
    for name, share, least in wanted:
        if share < least:
            raise GateFailure(
                FailureKind.NUMERICAL,
                f"{name} are {share:.3g} of all, at least {least:.3g} are needed: a drafter that "
                "is nearly always or nearly never right tests nothing",
                figures,
            )


def _wrong_attention_shows(
    ctx: Context, parts: Parts, config: TinyMLAConfig, device: torch.device
) -> float:
    """The least share of texts that a wrong attention changes; a GateFailure where that is none."""
    setting = _Setting(16, 4, MaskLayout.PACKED, shared=7, scattered=True, sharpness=1, noise=1)
    least = 1.0
    for what, spoil in (
        ("forgets the prefix", _without_prefix),
        ("ignores the mask", _without_mask),
    ):
        generator = torch.Generator().manual_seed(ctx.seed)
        model = TinyMLA(config, seed=ctx.seed, device=device)
        task = _Task.draw(model, setting, setting.batch, generator)
        plain, logits = plain_greedy(model, task.whole_prompts, 12)
        wrong = dataclasses.replace(parts, attention=functools.partial(spoil, parts.attention))
        made, _ = task.decode(model, wrong, logits, 12, torch.float64)
        changed = sum(list(ours) != text for ours, text in zip(made.tokens, plain, strict=True))
        if not changed:
            raise GateFailure(
                FailureKind.NUMERICAL,
                f"an attention that {what} changes no token of {len(plain)} texts: this check "
                "would not notice a wrong attention",
            )
        least = min(least, changed / len(plain))
    return least


def _with_masks(
    attention: Attention,
    change: Callable[[torch.Tensor], torch.Tensor],
    prefixes: Sequence[int] | None,
    tensors: Sequence[torch.Tensor | None],
    options: Mapping[str, Any],
) -> Any:
    """`attention` with every T x T mask changed, and the prefixes' lengths where they are given."""
    q, pool, qo_indptr, kv_indptr, kv_indices, own, mask, starts = tensors
    assert qo_indptr is not None
    assert kv_indptr is not None
    trees, lengths = qo_indptr.diff().tolist(), kv_indptr.diff().tolist()
    if mask is not None and starts is not None:
        masks = [change(one) for one in unpack_masks(mask, starts, trees, lengths)]
        mask, starts = pack_masks(masks, lengths, MaskLayout.DRAFT)
    if prefixes is not None:
        kv_indptr = torch.tensor([0, *itertools.accumulate(prefixes)], device=kv_indptr.device)
    return attention(q, pool, qo_indptr, kv_indptr, kv_indices, own, mask, starts, **options)  # type: ignore[arg-type]


def _without_prefix(
    attention: Attention, *tensors: torch.Tensor | None, **options: object
) -> object:
    """Nodes see their tree and nothing before it."""
    assert tensors[2] is not None
    none = [0] * (len(tensors[2]) - 1)
    return _with_masks(attention, lambda mask: mask, none, tensors, options)


def _without_mask(attention: Attention, *tensors: torch.Tensor | None, **options: object) -> object:
    """All nodes of a tree see each other."""
    return _with_masks(attention, torch.ones_like, None, tensors, options)


def _settings(budgets: Sequence[int], batches: Sequence[int]) -> Iterator[_Setting]:
    # Cycles of lengths that share no factor with each other or with the grid's rows, so that
    # every kind of prefix meets every layout.
    layouts = itertools.cycle([*MaskLayout, *reversed(MaskLayout), MaskLayout.PACKED])
    shared = itertools.cycle((0, 20, 7, 0, 3))
    scattered = itertools.cycle((True, True, False))
    drafters = itertools.cycle(((1.0, 0.5), (6.0, 2.0), (1.0, 0.8), (6.0, 6.0), (1.0, 2.5)))
    for budget, batch in itertools.product(budgets, batches):
        yield _Setting(budget, batch, next(layouts), next(shared), next(scattered), *next(drafters))


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
