"""How fast DDTREE decodes on a GPU host, by context and by batch.

The time of short answers is taken from that of long ones to the same prompts, which the server has
in its cache: what stays is decoding. Answers of a batch end one after the other, as each accepts
tokens of its own, so the end of a batch runs with fewer requests; that is part of it.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from collections.abc import Mapping, Sequence

from phases.candidates import require_current_library
from phases.gate import Context, FailureKind, Figure, GateFailure, Unit
from phases.p8_ddtree.gpu_host import (
    ADAPTIVE,
    CHAIN,
    PLAIN,
    TREES,
    Variant,
    documents,
    near_ties,
    variant_server,
)
from phases.p8_ddtree.models import models_of
from phases.service import Answer, Service, ServiceFailed, Tokens, incomplete, serving
from phases.service_scale import GPU, Scale, Start
from phases.service_tokens import LIKELY, Key, compare_answer, rounding
from phases.side_by_side import entered
from phases.trained_models import TrainedModels

__all__ = ["GPU_POINTS", "BatchSpeed", "Points", "batch_speed", "lengthened", "speed", "starts"]

_SHORT = 2  # tokens of a short answer
_APART = 8  # tokens by which the prompts of a batch differ in length
_BATCHED_PASSES = 4
_SLOTS = ("--max-total-tokens", "2097152")
_AS_A_CHAIN = 0.9
"""What an adaptive tree must at least reach of the chain's speed, at every point. Below 1 by what
one measurement differs from the next."""


@dataclasses.dataclass(frozen=True)
class Points:
    """What is timed: each of `lengths` at each of `batches`, for answers of `new_tokens`."""

    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    new_tokens: int = 256


GPU_POINTS = Points((1024, 16_384, 65_536), (1, 4, 16))

_Point = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class BatchSpeed:
    """tokens_per_second: of all requests together. accept_length: tokens a verification, or 0.

    answers: of the first pass, untimed. timed: the tokens of each answer, as the timed passes had
    them; more than one where they differ.
    """

    tokens_per_second: float
    accept_length: float
    answers: tuple[Answer, ...]
    timed: tuple[frozenset[Tokens], ...]


def speed(
    ctx: Context,
    *,
    scale: Scale = GPU,
    points: Points = GPU_POINTS,
    start: Start = serving,
    models: TrainedModels | None = None,
) -> list[Figure]:
    """Tokens a second by context and batch; of trees, the chain, and no speculation.

    Everywhere the tree must be ahead of the chain by accepted tokens, and an adaptive one must not
    fall behind the chain by speed. One request must not be slower than without speculation: this
    target has three layers, so a pass of it costs little more than its launches, and what a tree
    gains in a real model's pass is not seen here. The tokens are those of no speculation.
    """
    require_current_library(scale.device)
    models = models or models_of(ctx)
    longer = lengthened(
        models, ctx.scratch / "models", max(points.lengths) + points.new_tokens + 1024
    )
    variants = (PLAIN, TREES, ADAPTIVE, CHAIN)
    found: dict[Variant, dict[_Point, BatchSpeed]] = {variant: {} for variant in variants}
    servers = [
        variant_server(longer, variant, scale, ctx.scratch / f"{number}.log", start, _SLOTS)
        for number, variant in enumerate(variants)
    ]
    every = [(length, batch) for length in points.lengths for batch in points.batches]
    ctx.progress(0, len(every), "the servers start")
    # All run until the end, so that a host that grows slower does so for each of them.
    with entered(servers, at_once=scale.side_by_side) as services:
        for number, (length, batch) in enumerate(every):
            for variant, service in zip(variants, services, strict=True):
                ctx.progress(number, len(every), f"{variant.name}: {length} tokens x {batch}")
                found[variant][length, batch] = batch_speed(
                    service,
                    starts(ctx, length, batch),
                    new_tokens=points.new_tokens,
                    repeats=scale.passes if batch == 1 else _BATCHED_PASSES,
                    likely=LIKELY if variant == PLAIN else 0,
                )
    figures = _figures(found)
    _demand_tokens(found, scale, figures)
    _demand_speed(found, figures)
    return figures


def starts(ctx: Context, length: int, batch: int) -> list[Tokens]:
    """Prompts of about `length` tokens: beginnings of one document, each a little shorter.

    So they are prefilled once, and go on differently.
    """
    (document,) = documents(ctx, length, 1)
    return [document[: length - _APART * number] for number in range(batch)]


def batch_speed(
    service: Service,
    prompts: Sequence[Tokens],
    *,
    new_tokens: int,
    repeats: int,
    likely: int = 0,
) -> BatchSpeed:
    """By the fastest of `repeats` passes, whose verifications are the ones that count.

    Raises ServiceFailed where an answer is not as many tokens as were asked for, or where long ones
    take no longer than short ones, or no more verifications.
    """
    long = _SHORT + new_tokens
    service.answers(prompts[:1], 1)  # by itself: at once, each would prefill what they share
    first = _asked(service, prompts, long, likely)
    timed: list[set[Tokens]] = [set() for _ in prompts]
    fastest: dict[int, tuple[float, list[int]]] = {}
    for _ in range(repeats):
        for count in (_SHORT, long):
            begun = time.perf_counter()
            answers = _asked(service, prompts, count)
            one = (time.perf_counter() - begun, [answer.verified for answer in answers])
            fastest[count] = min(one, fastest.get(count, one))
            if count == long:
                for forms, answer in zip(timed, answers, strict=True):
                    forms.add(answer.tokens)
    (seconds, verified), (before_seconds, before) = fastest[long], fastest[_SHORT]
    taken = seconds - before_seconds
    # The first token of an answer comes from the prefill.
    accepted = (long - 1) * len(prompts) / sum(verified) if all(verified) else 0.0
    # As in `decode_speed`: a short answer's one verification gives more than is asked for.
    decoded = (
        sum((long - 1) / all_ * (all_ - some) for all_, some in zip(verified, before, strict=True))
        if all(verified)
        else float(new_tokens * len(prompts))
    )
    if taken <= 0 or decoded <= 0:
        raise ServiceFailed(
            f"answers of {long} tokens took no longer than those of {_SHORT}, or no more "
            "verifications: nothing was decoded; ask for more new tokens"
        )
    return BatchSpeed(decoded / taken, accepted, tuple(first), tuple(map(frozenset, timed)))


def _asked(
    service: Service, prompts: Sequence[Tokens], count: int, likely: int = 0
) -> list[Answer]:
    answers = service.answers(prompts, count, likely=likely)
    if problem := incomplete(answers, count):
        raise ServiceFailed(f"{len(prompts)} prompts of {len(prompts[0])} tokens: {problem}")
    return answers


def lengthened(models: TrainedModels, folder: pathlib.Path, positions: int) -> TrainedModels:
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


_Found = Mapping[Variant, Mapping[_Point, BatchSpeed]]


def _figures(found: _Found) -> list[Figure]:
    """First what the gate judges, then each server's speed and accepted tokens at each point."""
    figures = [
        Figure("least gain over no speculation", _least(found, TREES, PLAIN, 1), Unit.SPEEDUP),
        Figure("least of adaptive over the chain", _least(found, ADAPTIVE, CHAIN), Unit.SPEEDUP),
    ]
    for variant, speeds in found.items():
        for (length, batch), one in speeds.items():
            name = f"{variant.name} at {length} x {batch}"
            figures.append(Figure(name, one.tokens_per_second, Unit.TOKENS_PER_SECOND))
            if variant.algorithm is not None:
                figures.append(
                    Figure(f"{name}: tokens a verification", one.accept_length, Unit.RATIO)
                )
    return figures


def _least(found: _Found, ours: Variant, other: Variant, batch: int | None = None) -> float:
    """The least quotient of two servers' speeds over all points, or those of one batch size."""
    return min(
        one.tokens_per_second / found[other][point].tokens_per_second
        for point, one in found[ours].items()
        if batch in (None, point[1])
    )


def _demand_tokens(found: _Found, scale: Scale, figures: list[Figure]) -> None:
    """Raises GateFailure where a server was timed at other tokens than those of no speculation."""
    reference = _keyed(found[PLAIN])
    bounds = near_ties(rounding(reference), scale.dtype)
    for variant, speeds in found.items():
        told = {point: one.timed for point, one in speeds.items()}
        for key, answer in _keyed(speeds).items():
            place = f"{variant.name} {key}"
            timed = told[key.length, key.batch][key.number]
            for tokens in (answer.tokens, *sorted(timed)):
                _, other = compare_answer(place, tokens, reference[key], bounds[key.length])
                if other is not None and not other.near_tie:
                    raise GateFailure(
                        FailureKind.TOKEN_MISMATCH, f"beyond rounding: {other}", figures
                    )


def _keyed(speeds: Mapping[_Point, BatchSpeed]) -> dict[Key, Answer]:
    return {
        Key(length, batch, number): answer
        for (length, batch), one in speeds.items()
        for number, answer in enumerate(one.answers)
    }


def _demand_speed(found: _Found, figures: list[Figure]) -> None:
    """Raises GateFailure where a tree does not do what it is for, or a server did not speculate."""
    for variant, speeds in found.items():
        for (length, batch), one in speeds.items():
            if variant.algorithm is not None and not one.accept_length:
                raise GateFailure(
                    FailureKind.TOO_SLOW,
                    f"{variant.name} at {length} x {batch}: an answer without a verification",
                    figures,
                )
    for (length, batch), tree in found[TREES].items():
        chain = found[CHAIN][length, batch]
        if tree.accept_length <= chain.accept_length:
            raise GateFailure(
                FailureKind.TOO_SLOW,
                f"at {length} tokens, batch {batch}, a tree gives {tree.accept_length:.2f} tokens "
                f"a verification and a chain {chain.accept_length:.2f}, expected more of the tree",
                figures,
            )
    gain, against_chain = figures[0].value, figures[1].value
    if gain < 1:
        raise GateFailure(
            FailureKind.TOO_SLOW,
            f"{gain:.2f} times the speed of no speculation, expected at least 1",
            figures,
        )
    if against_chain < _AS_A_CHAIN:
        raise GateFailure(
            FailureKind.TOO_SLOW,
            f"an adaptive tree has {against_chain:.2f} times the speed of the chain, expected at "
            f"least {_AS_A_CHAIN}",
            figures,
        )
