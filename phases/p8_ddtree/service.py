"""Phase 8: DDTREE in the real SGLang server, on a machine without a GPU.

What a GPU host does of it is in `gpu_host`. The models are trained (`phases.trained_models`), as
random ones accept next to nothing. Everything is in float32, as in phase 3. A chain is a tree of
one token a position, so the chain of the same drafter is served by the same algorithm.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import torch

from phases.draft_acceptance import rounds
from phases.gate import Context, FailureKind, Figure, GateFailure, Unit
from phases.p8_ddtree import gpu_host
from phases.p8_ddtree.models import models_of
from phases.service import Answer, Service, Tokens, failures_in, incomplete, serving
from phases.service_scale import CPU, Start
from phases.trained_models import TrainedModels, load_models, prompts

__all__ = [
    "chi_square",
    "chi_square_limit",
    "ddtree_distribution",
    "ddtree_token_exact",
    "models_of",
]

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_PROMPTS = (24, 17, 31, 40)
_NEW_TOKENS = 48
_BUDGET, _TOP_K = 16, 8
_SPOILED_TOKENS = 24
_SAMPLED, _DRAWN = 4, 512
"""Tokens of a sampled answer, and answers."""
_AT_ONCE = 16
_TEMPERATURE, _TOP_P = 0.6, 0.9
"""Far from 1, so that a worker that overlooks them has another distribution."""
_CONTEXT = 144
"""Of the servers: some answers end at it, where what is reserved for a request reaches beyond."""
_NEAR_END = (_CONTEXT - 1 - _NEW_TOKENS, 40, 30)
_RARE = 8.0
"""Expected answers of an outcome, below which outcomes are counted together."""
_SURPRISE = 1e-4
"""A right server fails once in ten thousand runs."""


@dataclasses.dataclass(frozen=True)
class _Variant:
    """A server. budget: nodes of its trees; None: plain decoding by stock Triton."""

    name: str
    backend: str = "kdtree_mla"
    budget: int | None = _BUDGET
    top_k: int = _TOP_K
    adaptive: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Nodes and tokens of a position of its trees."""
        assert self.budget is not None
        return self.budget, self.top_k


_STOCK = _Variant("stock", backend="triton", budget=None)
_TREES = _Variant("trees")
_CHAIN = _Variant("chain", budget=7, top_k=1)
_OTHERS = _Variant("trees on triton, adaptive", backend="triton", adaptive=True)


def ddtree_token_exact(
    ctx: Context, *, start: Start = serving, models: TrainedModels | None = None
) -> list[Figure]:
    """On a GPU host its own part, `gpu_host.eager_tokens`; elsewhere, on the CPU:

    Greedy tokens of DDTREE are those of stock plain decoding.

    Four servers: stock Triton without speculation; trees on the kernel, asked in a ragged batch, in
    requests sent at once, to the end of the context, and with a mask of ones, which must show; the
    chain of the same drafter; and trees on SGLang's Triton backend, whose masks have their prefix,
    with an adaptive budget. The tree must accept more tokens a verification than the chain, and
    both as many as the drafter's weights say that they should: a drafter that is fed wrongly
    changes no token and shows there alone.
    """
    if torch.cuda.is_available():
        return gpu_host.eager_tokens(ctx, start=start, models=models)
    models = models or models_of(ctx)
    asked, near_end = (
        [tuple(prompts(ctx.seed, 1, length, series=length)[0].tolist()) for length in lengths]
        for lengths in (_PROMPTS, _NEAR_END)
    )
    with _server(ctx, models, _STOCK, start) as (service, _):
        stock = service.generate(asked, _NEW_TOKENS)
        ends = service.generate(near_end, _NEW_TOKENS)
    found: dict[_Variant, list[Answer]] = {}
    counts: Mapping[str, int] = {}
    different = 0
    for number, variant in enumerate((_TREES, _CHAIN, _OTHERS), 1):
        ctx.progress(number, 4, variant.name)
        with _server(ctx, models, variant, start) as (service, folder):
            answers = service.answers(asked, _NEW_TOKENS)
            together = service.generate_at_once(asked, _NEW_TOKENS) if variant == _TREES else []
            if problem := incomplete(answers, _NEW_TOKENS):
                raise GateFailure(FailureKind.TOKEN_MISMATCH, f"{variant.name}: {problem}")
            _same(variant.name, [one.tokens for one in answers], stock)
            to_the_end = f"{variant.name}, to the end of the context"
            for _ in range(2):  # what was written beside a row may show in the next batch alone
                _same(to_the_end, service.generate(near_end, _NEW_TOKENS), ends)
            if not variant.adaptive:
                expected = rounds(models, asked, variant.shape, _NEW_TOKENS)
                _as_drafted(variant.name, [one.verified for one in answers], expected)
            if variant == _TREES:
                _same("requests sent at once", together, stock)
                counts = _observed(folder)
                (folder / "wrong-mask").touch()
                spoiled = service.generate(asked, _SPOILED_TOKENS)
                different = sum(
                    got != wanted[: len(got)] for got, wanted in zip(spoiled, stock, strict=True)
                )
        found[variant] = answers
    for name in ("branching", "short_masks", "accepted", "moved"):
        if not counts.get(name):
            raise GateFailure(FailureKind.TOKEN_MISMATCH, f"trees: nothing was counted of '{name}'")
    if not different:
        raise GateFailure(
            FailureKind.TOKEN_MISMATCH, "a mask of ones changes no token: the check sees nothing"
        )
    lengths = {variant: _accept_length(answers) for variant, answers in found.items()}
    figures = [
        Figure("tokens equal", sum(map(len, stock)) * 4, Unit.TOKENS),
        *(
            Figure(f"{variant.name}: tokens a verification", length, Unit.RATIO)
            for variant, length in lengths.items()
        ),
        Figure("branching trees", counts["branching"], Unit.COUNT),
        Figure("masks of T x T bytes", counts["short_masks"], Unit.COUNT),
        Figure("accepted nodes", counts["accepted"], Unit.COUNT),
        Figure("moved rows", counts["moved"], Unit.COUNT),
        Figure("answers that a wrong mask changes", different, Unit.COUNT),
    ]
    if lengths[_TREES] <= lengths[_CHAIN]:
        raise GateFailure(
            FailureKind.NUMERICAL,
            f"a verification of a tree gives {lengths[_TREES]:.2f} tokens and one of a chain "
            f"{lengths[_CHAIN]:.2f}, expected more of the tree",
            figures,
        )
    return figures


def ddtree_distribution(
    ctx: Context, *, start: Start = serving, models: TrainedModels | None = None
) -> list[Figure]:
    """Answers that are sampled through trees have the distribution of the target.

    Many answers to one prompt, at a temperature and with a top-p. The first token comes from the
    prefill, the others from trees. The probability of each answer is computed from the target's
    weights in plain torch; outcomes that are expected less than 8 times are counted as one. On a
    GPU host the server is in bf16, which moves probabilities by far less than this many answers
    could tell.
    """
    models = models or models_of(ctx)
    prompt = tuple(prompts(ctx.seed, 1, series=7)[0].tolist())
    drawn: collections.Counter[Tokens] = collections.Counter()
    verified = produced = 0
    with _sampling_server(ctx, models, start) as (service, folder):
        for number in range(0, _DRAWN, _AT_ONCE):
            ctx.progress(number, _DRAWN, "answers")
            answers = service.answers(
                [prompt] * _AT_ONCE,
                _SAMPLED,
                sampling={"temperature": _TEMPERATURE, "top_p": _TOP_P},
            )
            if problem := incomplete(answers, _SAMPLED):
                raise GateFailure(FailureKind.TOKEN_MISMATCH, f"sampled: {problem}")
            drawn.update(one.tokens for one in answers)
            verified += sum(one.verified for one in answers)
            produced += sum(len(one.tokens) - 1 for one in answers)
        counts = _observed(folder)
    gained = produced / verified if verified else 0.0
    on_cpu = not torch.cuda.is_available()  # where the server counts what it moves
    if gained <= 1 or (on_cpu and not counts.get("moved")):
        raise GateFailure(
            FailureKind.TOKEN_MISMATCH,
            f"{gained:.2f} tokens a verification and {counts.get('moved', 0)} moved rows: no tree "
            "was tried",
        )
    probabilities = _likely_answers(models, prompt, _RARE / _DRAWN)
    value, freedom = chi_square(drawn, probabilities, _RARE)
    limit = chi_square_limit(freedom, _SURPRISE)
    figures = [
        Figure("answers", sum(drawn.values()), Unit.COUNT),
        Figure("chi-square", value, Unit.RATIO),
        Figure("degrees of freedom", freedom, Unit.COUNT),
        Figure("chi-square that a right server exceeds once in 10,000", limit, Unit.RATIO),
        Figure("tokens a verification", gained, Unit.RATIO),
    ]
    if freedom < 3:
        raise GateFailure(
            FailureKind.NUMERICAL, "too few outcomes were likely to tell distributions apart"
        )
    if value > limit:
        raise GateFailure(
            FailureKind.TOKEN_MISMATCH,
            f"chi-square {value:.1f} with {freedom} degrees of freedom, expected at most "
            f"{limit:.1f}: the answers do not have the target's distribution",
            figures,
        )
    return figures


def chi_square(
    drawn: Mapping[Tokens, int], probabilities: Mapping[Tokens, float], rare: float
) -> tuple[float, int]:
    """Pearson's statistic of counts against probabilities, and its degrees of freedom.

    Outcomes that are expected fewer than `rare` times are counted as one, and so are all that
    `probabilities` do not name.
    """
    total = sum(drawn.values())
    likely = {one: total * p for one, p in probabilities.items() if total * p >= rare}
    cells = [(drawn.get(one, 0), expected) for one, expected in likely.items()]
    rest = total - sum(expected for _, expected in cells)
    others = total - sum(count for count, _ in cells)
    if rest >= rare:
        cells.append((others, rest))
    elif cells:  # too little to stand for itself
        count, expected = cells.pop()
        cells.append((count + others, expected + max(rest, 0.0)))
    value = sum((count - expected) ** 2 / expected for count, expected in cells)
    return value, len(cells) - 1


def chi_square_limit(freedom: int, surprise: float) -> float:
    """What chi-square exceeds with probability `surprise`, by the incomplete gamma function."""
    half = torch.tensor(max(freedom, 1) / 2, dtype=torch.float64)
    low, high = 0.0, 10.0 * freedom + 100.0
    for _ in range(80):
        middle = (low + high) / 2
        above = torch.special.gammaincc(half, torch.tensor(middle / 2, dtype=torch.float64))
        low, high = (middle, high) if float(above) > surprise else (low, middle)
    return high


@torch.no_grad()
def _likely_answers(models: TrainedModels, prompt: Tokens, least: float) -> dict[Tokens, float]:
    """The target's answers of at least this probability, computed in plain torch.

    None is missed, as an answer is never likelier than its beginning.
    """
    target, _ = load_models(models)
    found: dict[Tokens, float] = {(): 1.0}
    for _ in range(_SAMPLED):
        begun = list(found.items())
        logits = target(torch.tensor([(*prompt, *answer) for answer, _ in begun]))[0][:, -1]
        next_token = (logits / _TEMPERATURE).double().softmax(-1).tolist()
        found = {
            (*answer, token): before * chance
            for (answer, before), chances in zip(begun, next_token, strict=True)
            for token, chance in _kept(chances).items()
            if before * chance >= least
        }
    return found


def _kept(chances: Sequence[float]) -> dict[int, float]:
    """What top-p leaves: the likeliest tokens that have at most so much before them."""
    kept: dict[int, float] = {}
    before = 0.0
    for token in sorted(range(len(chances)), key=lambda one: -chances[one]):
        if before > _TOP_P:
            break
        kept[token] = chances[token]
        before += chances[token]
    return {token: chance / before for token, chance in kept.items()}


@contextlib.contextmanager
def _sampling_server(
    ctx: Context, models: TrainedModels, start: Start
) -> Iterator[tuple[Service, pathlib.Path]]:
    if not torch.cuda.is_available():
        with _server(ctx, models, _TREES, start) as found:
            yield found
        return
    log = ctx.scratch / "sampled.log"
    with gpu_host.tree_server(models, log, start) as service:
        yield service, ctx.scratch


@contextlib.contextmanager
def _server(
    ctx: Context, models: TrainedModels, variant: _Variant, start: Start
) -> Iterator[tuple[Service, pathlib.Path]]:
    """The server of a variant, and the folder of what it counts; its log must be well."""
    folder = ctx.scratch / variant.name.replace(" ", "-").replace(",", "")
    folder.mkdir()
    log = folder / "log"
    arguments = ["--model-path", str(models.target), "--skip-tokenizer-init", *CPU.arguments]
    arguments += ["--disable-cuda-graph", "--attention-backend", variant.backend]
    arguments += ["--max-running-requests", str(_AT_ONCE), "--context-length", str(_CONTEXT)]
    if variant.budget is not None:
        arguments += ["--speculative-algorithm", "DDTREE"]
        arguments += ["--speculative-draft-model-path", str(models.drafter)]
        arguments += ["--speculative-ddtree-budget", str(variant.budget)]
        arguments += ["--speculative-ddtree-topk", str(variant.top_k)]
    paths = [*map(str, CPU.paths), str(_ROOT / "kdtree-engine"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **CPU.environment,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CUDA_VISIBLE_DEVICES": "",
        "KD_TEST_OBSERVED": str(folder / "counts.json"),
        "KD_TEST_WRONG_MASK": str(folder / "wrong-mask"),
        "KDTREE_DDTREE_ADAPTIVE": "1" if variant.adaptive else "0",
    }
    with start(tuple(arguments), log=log, environment=environment, limit_s=CPU.limit_s) as service:
        yield service, folder
    failures = failures_in(log.read_text(errors="replace"))
    if failures:
        raise GateFailure(FailureKind.LAUNCH, f"{variant.name}: its log says: {failures[0]}")


def _observed(folder: pathlib.Path) -> dict[str, int]:
    path = folder / "counts.json"
    found: dict[str, int] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def _same(what: str, found: Sequence[Tokens], expected: Sequence[Tokens]) -> None:
    for number, (got, wanted) in enumerate(zip(found, expected, strict=True)):
        pairs = enumerate(zip(got, wanted, strict=False))
        step = next((step for step, (one, other) in pairs if one != other), None)
        if step is not None or len(got) != len(wanted):
            raise GateFailure(
                FailureKind.TOKEN_MISMATCH,
                f"{what}: answer {number} differs from stock plain decoding at token {step}: "
                f"{got[step or 0 : (step or 0) + 3]}",
            )


def _as_drafted(what: str, found: Sequence[int], expected: Sequence[int]) -> None:
    """Raises GateFailure where verifications are not those of the drafter's weights.

    One more or less of an answer may be a near-tie of the drafter, which rounds otherwise.
    """
    apart = [abs(one - other) for one, other in zip(found, expected, strict=True)]
    if max(apart) > 1 or sum(apart) > 2:
        raise GateFailure(
            FailureKind.NUMERICAL,
            f"{what}: answers took {list(found)} verifications, and {list(expected)} by the "
            "drafter's weights: it does not draft what it was trained to",
        )


def _accept_length(answers: Sequence[Answer]) -> float:
    """Tokens of a verification; an answer's first token comes from the prefill."""
    return sum(len(one.tokens) - 1 for one in answers) / sum(one.verified for one in answers)
