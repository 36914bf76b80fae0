"""What TinyMLA's absorbed form must pass, with whatever attention stands in it."""

from __future__ import annotations

import torch

from kdtree_engine.reference.slots import SlotAllocator
from kdtree_engine.reference.tiny_mla import Attention, TinyMLA, TinyMLAConfig, TreeBatch
from phases.gate import Context, FailureKind, Figure, GateFailure, Unit
from phases.threads import single_threaded

__all__ = ["absorbed_equals_plain"]

_ALLOWED = 1e-11
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
    """
    worst, rows = 0.0, 0
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
    ctx.progress(len(_CONFIGS), len(_CONFIGS), "done")
    return [
        Figure("worst relative error", worst, Unit.RELATIVE_ERROR),
        Figure("rows of logits", rows, Unit.COUNT),
    ]
