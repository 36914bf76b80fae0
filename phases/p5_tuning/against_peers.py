"""Phase 5: the kernel's times beside those of other projects' kernels, in one run."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kdtree_engine.attention import tree_verify_attention
from kdtree_engine.errors import MissingError
from kdtree_engine.reference.tiny_mla import Attention
from kdtree_engine.timing import copy_bandwidth
from phases.gate import Context, FailureKind, Figure, GateFailure, Unit
from phases.p5_tuning.checks import TARGETS
from phases.peers import PEERS, Peer, lack, time_peer
from phases.regimes import Regime, first_seed, time_regime

__all__ = ["BAR", "against_peers"]

BAR = "flashinfer-fa2"
"""The peer of the same instruction class, which the kernel has to beat."""
REGIMES = tuple(target.regime for target in TARGETS)
LEAST_REGIMES = 0.75
"""In this share of the regimes the peer to beat has to be right, or little is shown."""
_CUDA = torch.device("cuda")


def against_peers(
    ctx: Context,
    *,
    device: torch.device = _CUDA,
    candidate: Attention = tree_verify_attention,
    peers: Sequence[Peer] = PEERS,
    regimes: Sequence[Regime] = REGIMES,
    replays: int = 15,
) -> list[Figure]:
    """Faster than FlashInfer fa2 in every regime that it does; how it stands to all others.

    By the rotated method, slots scattered, each peer right after the kernel and on the same seeds.
    A peer that is wrong or fails in a regime has no ratio there.

    Raises MissingError where FlashInfer is not installed; ValueError, with the reason, where its
    fa2 kernel is not right in three of four regimes, as then little is shown.
    """
    installed = _installed(peers)
    bandwidth = copy_bandwidth(device)
    figures: list[Figure] = []
    ratios: dict[Regime, float] = {}
    left_out: list[str] = []
    for done, regime in enumerate(regimes):
        ctx.progress(done, len(regimes), str(regime))
        ours = time_regime(
            regime,
            candidate,
            device=device,
            seed=ctx.seed,
            method="rotated",
            copy_bandwidth=bandwidth,
            repeats=replays,
        ).median_us
        figures.append(Figure(f"{regime}", ours, Unit.MICROSECONDS))
        for peer in installed:
            ctx.progress(done, len(regimes), f"{regime} {peer.name}")
            try:
                theirs = time_peer(
                    peer,
                    regime,
                    device=device,
                    seed=first_seed(ctx.seed, "rotated"),
                    method="rotated",
                    repeats=replays,
                    copy_bandwidth=bandwidth,
                ).median_us
            except Exception as error:  # a shape that it does not take, or a wrong result
                if peer.name == BAR:
                    told = " ".join(str(error).split())[:300]
                    left_out.append(f"{regime}: {type(error).__name__}: {told}")
                continue
            figures.append(
                Figure(f"{regime}, over {peer.name}, {peer.mask}", theirs / ours, Unit.SPEEDUP)
            )
            if peer.name == BAR:
                ratios[regime] = theirs / ours
    if not ratios or len(ratios) < LEAST_REGIMES * len(regimes):
        raise ValueError(
            f"{BAR} was right in {len(ratios)} of {len(regimes)} regimes, so little is shown "
            f"({'; '.join(left_out) or 'no regime was given'})"
        )
    figures = [
        Figure(f"least speed-up over {BAR}", min(ratios.values()), Unit.SPEEDUP),
        Figure(f"regimes that {BAR} does", len(ratios), Unit.COUNT),
        *figures,
    ]
    slower = [f"{regime}: {ratio:.2f}x" for regime, ratio in ratios.items() if not ratio > 1]
    if slower:
        raise GateFailure(
            FailureKind.TOO_SLOW, f"not faster than {BAR} at {'; '.join(slower)}", figures
        )
    return figures


def _installed(peers: Sequence[Peer]) -> list[Peer]:
    """The peers that can be run. MissingError where the one to beat is not among them."""
    lacking = {peer.name: found for peer in peers if (found := lack(peer)) is not None}
    if all(peer.name in lacking for peer in peers):
        raise MissingError("no peer is installed", remedy=_REMEDY)
    if BAR in lacking:
        _, why = lacking[BAR]
        raise MissingError(f"{BAR}, the peer to beat, cannot be run: {why}", remedy=_REMEDY)
    return [peer for peer in peers if peer.name not in lacking]


_REMEDY = "pip install flashinfer-python, and nvcc and ninja for it to compile with"
