"""Phase 8 on a GPU host: CUDA graphs of drafter and target, in bf16.

The models are the trained ones, so their text is the synthetic language's, at any length. Tokens
are held against no speculation as in phases 3 and 4: a difference is a near-tie or a failure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence

import torch

from phases.candidates import require_current_library
from phases.gate import Context, FailureKind, Figure, GateFailure, Unit
from phases.p8_ddtree.models import models_of
from phases.service import Answer, Service, Tokens, incomplete, plain_text, serving
from phases.service_graphs import ARGUMENTS, ENVIRONMENT, replays_in
from phases.service_scale import GPU, Scale, Start
from phases.service_tokens import (
    LIKELY,
    Key,
    compare,
    demand,
    figures_of,
    rounding,
    tie_bound,
)
from phases.trained_models import TrainedModels, prompts

__all__ = [
    "ADAPTIVE",
    "CHAIN",
    "GPU_SIZES",
    "PLAIN",
    "TREES",
    "TRITON",
    "Sizes",
    "Variant",
    "documents",
    "eager_tokens",
    "graph_tokens",
    "near_ties",
    "tree_server",
    "variant_server",
]

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_GRAPHS = (1, 2, 4, 8, 16)
_BUDGET, _TOP_K = 32, 8
_NOISIEST = 0.5  # of a log probability
_DRAFT_REPLAY = re.compile(r"Decode graph replay: worker=draft .*mode=TARGET_VERIFY raw_bs=(\d+)")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a host can be asked for.

    lengths, batches: of prompts, in tokens and in requests. padded: batch sizes between those that
    are captured. new_tokens: of an answer.
    """

    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    padded: tuple[int, ...]
    new_tokens: int = 64


GPU_SIZES = Sizes((64, 1000, 3000), (1, 4, 16), (3, 11))


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to serve. algorithm: DDTREE, DFLASH (the chain of the same drafter), or none."""

    name: str
    algorithm: str | None = "DDTREE"
    backend: str = "kdtree_mla"
    adaptive: bool = False


PLAIN = Variant("plain", algorithm=None, backend="triton")
TREES = Variant("trees")
ADAPTIVE = Variant("adaptive trees", adaptive=True)
CHAIN = Variant("chain", algorithm="DFLASH")
TRITON = Variant("trees on triton", backend="triton")


def eager_tokens(
    ctx: Context,
    *,
    scale: Scale = GPU,
    sizes: Sizes = GPU_SIZES,
    start: Start = serving,
    models: TrainedModels | None = None,
) -> list[Figure]:
    """As `graph_tokens` without graphs: no speculation, and trees of a fixed budget."""
    eager = dataclasses.replace(scale, graphs=False)
    return _tokens(ctx, (PLAIN, TREES), eager, sizes, start, models)


@contextlib.contextmanager
def tree_server(models: TrainedModels, log: pathlib.Path, start: Start) -> Iterator[Service]:
    """Trees of a fixed budget on the kernel, eager."""
    eager = dataclasses.replace(GPU, graphs=False)
    with variant_server(models, TREES, eager, log, start) as service:
        yield service


def graph_tokens(
    ctx: Context,
    *,
    scale: Scale = GPU,
    sizes: Sizes = GPU_SIZES,
    start: Start = serving,
    models: TrainedModels | None = None,
) -> list[Figure]:
    """Tokens with graphs on are those of no speculation, and every pass came from a graph.

    Five servers: no speculation; trees of a fixed and of an adaptive budget on the kernel; the
    chain of the same drafter, which is SGLang's own DFLASH; trees on Triton.
    """
    chosen = (PLAIN, TREES, ADAPTIVE, CHAIN, TRITON)
    return _tokens(ctx, chosen, scale, sizes, start, models)


def _tokens(
    ctx: Context,
    variants: Sequence[Variant],
    scale: Scale,
    sizes: Sizes,
    start: Start,
    models: TrainedModels | None,
) -> list[Figure]:
    """Each server's tokens against those of the first, which does not speculate."""
    require_current_library(scale.device)
    models = models or models_of(ctx)
    figures: list[Figure] = []
    found: dict[Variant, dict[Key, Answer]] = {}
    for number, variant in enumerate(variants):
        ctx.progress(number, len(variants), variant.name)
        log = ctx.scratch / f"{number}.log"
        with variant_server(models, variant, scale, log, start) as service:
            found[variant] = _ask(ctx, service, sizes, LIKELY if variant == PLAIN else 0)
        if variant.algorithm is not None and scale.graphs:
            verified = sum(answer.verified for answer in found[variant].values())
            figures += _all_in_graphs(variant, plain_text(log), verified)
    bounds = near_ties(rounding(found[PLAIN]), scale.dtype)
    comparisons = [
        compare(variant.name, answers, found[PLAIN], bounds, stock=variant == CHAIN)
        for variant, answers in found.items()
        if variant != PLAIN
    ]
    figures = [*figures_of(comparisons, bounds), *figures]
    demand(*comparisons, figures=figures)
    return figures


def near_ties(noise: Mapping[int, float], dtype: torch.dtype) -> dict[int, float]:
    """How much less likely another token may be, by prompt length: one bound for all lengths.

    noise: how much one server moves its own tokens, by prompt length. A trained model's logits lie
    tens apart, and 16 bits move them as much further than a drawn model's; few tokens are near a
    tie at all, so few of the largest changes are seen, and one length's count for the others.

    Raises GateFailure where the reference alone is so uneven that nothing could be told.
    """
    most = max(noise.values())
    if most > _NOISIEST:
        raise GateFailure(
            FailureKind.NUMERICAL,
            f"the reference differs from itself by {most:.3f} from batch to batch, expected at "
            f"most {_NOISIEST}",
        )
    return dict.fromkeys(noise, max(2 * most, tie_bound(0, dtype)))


def _all_in_graphs(variant: Variant, log: str, verified: int) -> list[Figure]:
    """Raises GateFailure where a pass of the target or the drafter did not come from a graph."""
    replays = replays_in(log)
    drafted = sum(map(int, _DRAFT_REPLAY.findall(log)))
    problem = None
    if replays.eager:
        problem = f"{replays.eager} decode steps ran without a graph"
    elif not replays.in_graphs:
        problem = "its log: expected lines 'Decode batch' with 'cuda graph: True', got none"
    elif not verified or replays.verified < verified:
        problem = f"{verified} trees were verified, and {replays.verified} of them in graphs"
    elif drafted < verified:
        problem = f"{verified} trees were drafted, and {drafted} of them in graphs"
    if problem is not None:
        raise GateFailure(FailureKind.LAUNCH, f"{variant.name}: {problem}")
    return [
        Figure(f"{variant.name}: verified in graphs", replays.verified, Unit.COUNT),
        Figure(f"{variant.name}: drafted in graphs", drafted, Unit.COUNT),
    ]


def _ask(ctx: Context, service: Service, sizes: Sizes, likely: int) -> dict[Key, Answer]:
    found: dict[Key, Answer] = {}
    for length in sizes.lengths:
        batches = (*sizes.batches, *(sizes.padded if length == sizes.lengths[0] else ()))
        asked = documents(ctx, length, max(batches))
        for size in batches:
            answers = service.answers(asked[:size], sizes.new_tokens, likely=likely)
            if problem := incomplete(answers, sizes.new_tokens):
                raise GateFailure(
                    FailureKind.TOKEN_MISMATCH, f"{size} prompts of {length} tokens: {problem}"
                )
            found |= {Key(length, size, number): one for number, one in enumerate(answers)}
    return found


def documents(ctx: Context, length: int, count: int) -> list[Tokens]:
    """The beginnings of `count` documents of the language."""
    return [tuple(one) for one in prompts(ctx.seed, count, length, series=length).tolist()]


@contextlib.contextmanager
def variant_server(
    models: TrainedModels,
    variant: Variant,
    scale: Scale,
    log: pathlib.Path,
    start: Start,
    further: Sequence[str] = (),
) -> Iterator[Service]:
    """The server of a variant. further: arguments after all others, so that they win."""
    more: Sequence[str] = ("--disable-cuda-graph",)
    if scale.graphs:
        more = ("--cuda-graph-bs-decode", *map(str, _GRAPHS), "--disable-prefill-cuda-graph")
    if variant.algorithm is not None:
        more = (
            *more,
            *("--speculative-algorithm", variant.algorithm),
            *("--speculative-draft-model-path", str(models.drafter)),
            *("--speculative-draft-attention-backend", "triton"),
        )
    environment: Mapping[str, str] = {
        **scale.environment,
        **ENVIRONMENT,
        "KDTREE_DDTREE_BUDGET": str(_BUDGET),
        "KDTREE_DDTREE_TOPK": str(_TOP_K),
        "KDTREE_DDTREE_ADAPTIVE": "1" if variant.adaptive else "0",
    }
    paths = [*map(str, scale.paths), str(_ROOT / "kdtree-engine"), os.environ.get("PYTHONPATH", "")]
    with start(
        (
            *("--model-path", str(models.target), "--skip-tokenizer-init", "--sleep-on-idle"),
            *scale.arguments,
            *("--attention-backend", variant.backend),
            *more,
            *ARGUMENTS,
            *further,
        ),
        log=log,
        environment={"PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment},
        limit_s=scale.limit_s,
    ) as service:
        yield service
