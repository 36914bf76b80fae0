"""What TinyMLA's absorbed form must pass, with whatever attention stands in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from kdtree_engine.reference.slots import SlotAllocator
from kdtree_engine.reference.tiny_mla import Attention, TinyMLA, TinyMLAConfig, TreeBatch
from phases.gate import Context, FailureKind, Figure, GateFailure, Unit
from phases.threads import single_threaded

__all__ = ["absorbed_equals_plain"]

_ALLOWED = 1e-11
_SAME_ELSEWHERE = 1e-9
"""Logits of a sequence that starts at position 1000: angles so large lose three digits."""
_LEAST_CHANGE = 0.01
"""What another token, another distance or no attention must do to logits; 1 is usual."""
_TEXTS = 12
_START = 1000
_CONFIGS = (
    TinyMLAConfig(),
    TinyMLAConfig(layers=3, heads=8, latent=96, rope=32, nope=24, value=40),
    TinyMLAConfig(layers=1, heads=1, latent=16, rope=2),
    TinyMLAConfig(layers=2, heads=8, latent=512, rope=64),
)


@single_threaded
def absorbed_equals_plain(attention: Attention, ctx: Context) -> list[Figure]:
    """Logits of the absorbed form over a scattered paged cache against the plain form's.

    Ragged sequences in one batch, each computed in three pieces that follow each other through
    the cache, so that every L and T between 0 and the whole comes up.

    The two forms share code, and what is wrong there is wrong in both. So the plain form must also
    equal a third one, written here token by token with rotations as complex numbers (`_by_hand`);
    and logits must depend on what they should depend on, and on nothing else (`_depends`).
    """
    worst, by_hand, change, rows = 0.0, 0.0, math.inf, 0
    for number, config in enumerate(_CONFIGS):
        ctx.progress(number, len(_CONFIGS), str(config))
        generator = torch.Generator().manual_seed(ctx.seed * 1000 + number)
        model = TinyMLA(config, seed=ctx.seed + number)
        lengths = (1, 7, 23)
        sequences = [
            torch.randint(config.vocabulary, (length,), generator=generator) for length in lengths
        ]
        slots = SlotAllocator(128, generator)
        windows = [slots.take(length) for length in lengths]
        pools = model.new_pools(128)
        found: list[list[torch.Tensor]] = [[] for _ in lengths]
        for piece in range(3):
            cuts = [(length * piece // 3, length * (piece + 1) // 3) for length in lengths]
            batch = TreeBatch.of(
                [
                    tokens[start:end].tolist()
                    for tokens, (start, end) in zip(sequences, cuts, strict=True)
                ],
                [range(start, end) for start, end in cuts],
                [window[start:end] for window, (start, end) in zip(windows, cuts, strict=True)],
                [window[:start] for window, (start, _) in zip(windows, cuts, strict=True)],
                None,
            )
            logits = model.forward_absorbed(batch, pools, attention)
            bounds = batch.qo_indptr.tolist()
            for request in range(len(lengths)):
                found[request].append(logits[bounds[request] : bounds[request + 1]])
        for request, tokens in enumerate(sequences):
            plain = model.forward_plain(tokens[None])[0]
            apart = (torch.cat(found[request]) - plain).norm(dim=1) / plain.norm(dim=1)
            wrong = (~(apart <= _ALLOWED)).nonzero()
            if len(wrong):
                place = int(wrong[0])
                raise GateFailure(
                    FailureKind.NUMERICAL,
                    f"{config}: sequence {request}, token {place}: the absorbed form's logits "
                    f"differ by {float(apart[place]):.3g}",
                )
            worst, rows = max(worst, float(apart.max())), rows + len(tokens)
            other = _apart(plain, _by_hand(model, tokens))
            if not other <= _ALLOWED:
                raise GateFailure(
                    FailureKind.NUMERICAL,
                    f"{config}: sequence {request}: the plain form's logits differ by {other:.3g} "
                    "from those computed token by token with complex rotations",
                )
            by_hand = max(by_hand, other)
        change = min(change, _depends(model, attention, generator))
    ctx.progress(len(_CONFIGS), len(_CONFIGS), "done")
    return [
        Figure("worst relative error", worst, Unit.RELATIVE_ERROR),
        Figure("rows of logits", rows, Unit.COUNT),
        Figure("worst relative error to the form by hand", by_hand, Unit.RELATIVE_ERROR),
        Figure("least change of logits where one must be", change, Unit.RATIO),
    ]


def _by_hand(model: TinyMLA, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [S, vocabulary] of one sequence, one query token at a time.

    A rotary pair is a complex number, turned by a product; a score is the real part of
    query times conjugate key.
    """
    config = model.config
    where = torch.arange(len(tokens), dtype=torch.float64)
    pairs = torch.arange(config.rope // 2, dtype=torch.float64)
    angles = where[:, None] / config.rope_base ** (2 * pairs / config.rope)
    turns = torch.polar(torch.ones_like(angles), angles)

    def turned(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * by

    x = model.embedding[tokens]
    for layer in model.layers:
        normed = _norm(x)
        queries = (_norm(normed @ layer.query_down) @ layer.query_up).view(
            len(tokens), config.heads, config.nope + config.rope
        )
        rows = normed @ layer.kv_down
        latent = _norm(rows[:, : config.latent])
        key_rope = turned(rows[:, config.latent :], turns)
        attended = []
        for at, query in enumerate(queries):
            heads = []
            for head in range(config.heads):
                keys = latent[: at + 1] @ layer.key_up[head].T
                rope = turned(query[head, config.nope :], turns[at]) * key_rope[: at + 1].conj()
                scores = keys @ query[head, : config.nope] + rope.real.sum(1)
                weights = (scores / (config.nope + config.rope) ** 0.5).softmax(0)
                heads.append(weights @ (latent[: at + 1] @ layer.value_up[head]))
            attended.append(torch.cat(heads))
        x = x + torch.stack(attended) @ layer.output
        normed = _norm(x)
        gated = normed @ layer.mlp_gate
        x = x + (gated * gated.sigmoid() * (normed @ layer.mlp_up)) @ layer.mlp_down
    return _norm(x) @ model.unembedding


def _depends(model: TinyMLA, attention: Attention, generator: torch.Generator) -> float:
    """The least of the changes that a token, a distance and the lack of attention make.

    Fails where one makes none, or where a sequence has other logits because it stands elsewhere:
    queries and keys turn alike, so that scores depend on distances only. Each change is the largest
    over some texts: in a single one, a head may be so sure of one token that nothing else counts.
    """
    vocabulary, count = model.config.vocabulary, 5
    largest: dict[str, float] = {}

    def last(tokens: list[int], where: Sequence[int], attention: Attention) -> torch.Tensor:
        batch = TreeBatch.of([tokens], [where], [range(count)], [[]], None)
        return model.forward_absorbed(batch, model.new_pools(count), attention)[-1]

    def nothing(*args: Any, **options: Any) -> Any:
        return torch.zeros_like(attention(*args, **options))

    for _ in range(_TEXTS):
        tokens: list[int] = torch.randperm(vocabulary, generator=generator)[:count].tolist()
        usual = last(tokens, range(count), attention)
        elsewhere = last(tokens, range(_START, _START + count), attention)
        if not _apart(elsewhere, usual) <= _SAME_ELSEWHERE:
            _fail(model, "logits are others at other positions, though all distances are equal")
        first = [(tokens[0] + 1) % vocabulary, *tokens[1:]]
        own = [*tokens[:-1], (tokens[-1] + 1) % vocabulary]
        further = [*range(count - 1), count + 2]
        for what, logits in {
            "the first token": last(first, range(count), attention),
            "the last token": last(own, range(count), attention),
            "the distance to the last token": last(tokens, further, attention),
            "the attention": last(tokens, range(count), nothing),
        }.items():
            largest[what] = max(largest.get(what, 0.0), _apart(logits, usual))
    for what, change in largest.items():
        if not change >= _LEAST_CHANGE:
            _fail(model, f"{what} changes the logits by {change:.3g} at most")
    return min(largest.values())


def _norm(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6)


def _apart(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The worst relative difference of a row."""
    return float(((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


def _fail(model: TinyMLA, problem: str) -> NoReturn:
    raise GateFailure(FailureKind.NUMERICAL, f"{model.config}: {problem}")
