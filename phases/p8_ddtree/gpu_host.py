"""Phase 8 on a GPU host: CUDA graphs of drafter and target, in bf16.

The models are the trained ones, so their text is the synthetic language's, at any length. Tokens
are held against no speculation as in phases 3 and 4: a difference is a near-tie or a failure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence

from phases.candidates import require_current_library
from phases.gate import Context, FailureKind, Figure, GateFailure, Unit
from phases.p8_ddtree.models import models_of
from phases.service import Answer, Service, Tokens, incomplete, plain_text, serving
from phases.service_graphs import ARGUMENTS, ENVIRONMENT, replays_in
from phases.service_scale import GPU, Scale, Start
from phases.service_speed import decode_speed
from phases.service_tokens import (
    LIKELY,
    Key,
    compare,
    demand,
    figures_of,
    rounding,
    tie_bounds,
)
from phases.trained_models import TrainedModels, prompts

__all__ = ["GPU_SIZES", "Sizes", "eager_tokens", "graph_tokens", "speed", "tree_server"]

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_GRAPHS = (1, 2, 4, 8, 16)
_BUDGET, _TOP_K = 32, 8
_DRAFT_REPLAY = re.compile(r"Decode graph replay: worker=draft .*mode=TARGET_VERIFY raw_bs=(\d+)")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a host can be asked for.

    lengths, batches: of prompts, in tokens and in requests. padded: batch sizes between those that
    are captured. timed: lengths of prompts that are timed. new_tokens, timed_tokens: of an answer.
    """

    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    padded: tuple[int, ...]
    timed: tuple[int, ...]
    new_tokens: int = 64
    timed_tokens: int = 256


GPU_SIZES = Sizes((64, 1000, 3000), (1, 4, 16), (3, 11), (1024, 16_384, 65_536))


@dataclasses.dataclass(frozen=True)
class _Variant:
    """One way to serve. algorithm: DDTREE, DFLASH (the chain of the same drafter), or none."""

    name: str
    algorithm: str | None = "DDTREE"
    backend: str = "kdtree_mla"
    adaptive: bool = False


_PLAIN = _Variant("plain", algorithm=None, backend="triton")
_TREES = _Variant("trees")
_ADAPTIVE = _Variant("adaptive trees", adaptive=True)
_CHAIN = _Variant("chain", algorithm="DFLASH")
_TRITON = _Variant("trees on triton", backend="triton")


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
    return _tokens(ctx, (_PLAIN, _TREES), eager, sizes, start, models)


@contextlib.contextmanager
def tree_server(models: TrainedModels, log: pathlib.Path, start: Start) -> Iterator[Service]:
    """Trees of a fixed budget on the kernel, eager."""
    eager = dataclasses.replace(GPU, graphs=False)
    with _server(models, _TREES, eager, log, start) as service:
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
    chosen = (_PLAIN, _TREES, _ADAPTIVE, _CHAIN, _TRITON)
    return _tokens(ctx, chosen, scale, sizes, start, models)


def _tokens(
    ctx: Context,
    variants: Sequence[_Variant],
    scale: Scale,
    sizes: Sizes,
    start: Start,
    models: TrainedModels | None,
) -> list[Figure]:
    """Each server's tokens against those of the first, which does not speculate."""
    require_current_library(scale.device)
    models = models or models_of(ctx)
    figures: list[Figure] = []
    found: dict[_Variant, dict[Key, Answer]] = {}
    for number, variant in enumerate(variants):
        ctx.progress(number, len(variants), variant.name)
        log = ctx.scratch / f"{number}.log"
        with _server(models, variant, scale, log, start) as service:
            found[variant] = _ask(ctx, service, sizes, LIKELY if variant == _PLAIN else 0)
        if variant.algorithm is not None and scale.graphs:
            verified = sum(answer.verified for answer in found[variant].values())
            figures += _all_in_graphs(variant, plain_text(log), verified)
    noise = rounding(found[_PLAIN])
    bounds = tie_bounds(noise, scale.dtype)
    comparisons = [
        compare(variant.name, answers, found[_PLAIN], bounds, stock=variant == _CHAIN)
        for variant, answers in found.items()
        if variant != _PLAIN
    ]
    figures = [*figures_of(comparisons, bounds), *figures]
    demand(*comparisons, figures=figures)
    return figures


def speed(
    ctx: Context,
    *,
    scale: Scale = GPU,
    sizes: Sizes = GPU_SIZES,
    start: Start = serving,
    models: TrainedModels | None = None,
) -> list[Figure]:
    """Tokens a second of one request, by context; of trees, the chain, and no speculation.

    The tree must be ahead of the chain by accepted tokens, and not behind no speculation by speed:
    this target has three layers, so a pass of it costs little more than its launches, and what a
    tree gains in a real model's pass is not seen here.
    """
    require_current_library(scale.device)
    models = models or models_of(ctx)
    figures: list[Figure] = []
    lengths: dict[_Variant, list[float]] = {}
    rates: dict[_Variant, list[float]] = {}
    longer = _lengthened(models, ctx.scratch / "models", max(sizes.timed) + 1024)
    variants = (_TREES, _ADAPTIVE, _CHAIN, _PLAIN)
    for number, variant in enumerate(variants):
        log = ctx.scratch / f"{number}.log"
        with _server(longer, variant, scale, log, start) as service:
            for length in sizes.timed:
                ctx.progress(number, len(variants), f"{variant.name}: {length} tokens")
                (prompt,) = _prompts(ctx, length, 1)
                one = decode_speed(
                    service, prompt, new_tokens=sizes.timed_tokens, repeats=scale.passes
                )
                rates.setdefault(variant, []).append(one.tokens_per_second)
                lengths.setdefault(variant, []).append(one.accept_length)
                name = f"{variant.name} at {length}"
                figures.append(Figure(name, one.tokens_per_second, Unit.TOKENS_PER_SECOND))
                if variant.algorithm is not None:
                    figures.append(
                        Figure(f"{name}: tokens a verification", one.accept_length, Unit.RATIO)
                    )
    pairs = zip(rates[_TREES], rates[_PLAIN], strict=True)
    least = min(ours / theirs for ours, theirs in pairs)
    figures.insert(0, Figure("least gain over no speculation", least, Unit.SPEEDUP))
    for length, tree, chain in zip(sizes.timed, lengths[_TREES], lengths[_CHAIN], strict=True):
        if tree <= chain:
            raise GateFailure(
                FailureKind.TOO_SLOW,
                f"at {length} tokens a tree gives {tree:.2f} tokens a verification and a chain "
                f"{chain:.2f}, expected more of the tree",
                figures,
            )
    if least < 1:
        raise GateFailure(
            FailureKind.TOO_SLOW,
            f"{least:.2f} times the speed of no speculation, expected at least 1",
            figures,
        )
    return figures


def _lengthened(models: TrainedModels, folder: pathlib.Path, positions: int) -> TrainedModels:
    """The same weights, for contexts of at least `positions` tokens.

    They were trained on short texts, so what they say of distant tokens is not learnt; a rotary
    embedding that is not stretched is the same at any length.
    """
    made = {}
    for name, source in (("target", models.target), ("drafter", models.drafter)):
        place = folder / name
        place.mkdir(parents=True)
        about = json.loads((source / "config.json").read_text())
        about["max_position_embeddings"] = max(positions, about["max_position_embeddings"])
        scaling = about.get("rope_scaling")
        if scaling is not None:
            scaling["original_max_position_embeddings"] = about["max_position_embeddings"]
        (place / "config.json").write_text(json.dumps(about))
        (place / "model.safetensors").symlink_to(source / "model.safetensors")
        made[name] = place
    return dataclasses.replace(models, target=made["target"], drafter=made["drafter"])


def _all_in_graphs(variant: _Variant, log: str, verified: int) -> list[Figure]:
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
        asked = _prompts(ctx, length, max(batches))
        for size in batches:
            answers = service.answers(asked[:size], sizes.new_tokens, likely=likely)
            if problem := incomplete(answers, sizes.new_tokens):
                raise GateFailure(
                    FailureKind.TOKEN_MISMATCH, f"{size} prompts of {length} tokens: {problem}"
                )
            found |= {Key(length, size, number): one for number, one in enumerate(answers)}
    return found


def _prompts(ctx: Context, length: int, count: int) -> list[Tokens]:
    return [tuple(one) for one in prompts(ctx.seed, count, length, series=length).tolist()]


@contextlib.contextmanager
def _server(
    models: TrainedModels,
    variant: _Variant,
    scale: Scale,
    log: pathlib.Path,
    start: Start,
) -> Iterator[Service]:
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
            *("--model-path", str(models.target), "--skip-tokenizer-init"),
            *scale.arguments,
            *("--attention-backend", variant.backend),
            *more,
            *ARGUMENTS,
        ),
        log=log,
        environment={"PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment},
        limit_s=scale.limit_s,
    ) as service:
        yield service
