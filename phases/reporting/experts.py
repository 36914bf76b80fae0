"""MoE imbalance, layer by layer and rank by rank: a prediction of a drawn router, made anew."""

from __future__ import annotations

from kdtree_engine.gpus import LINKS, find_gpu
from kdtree_engine.moe.costs import ExpertShape
from kdtree_engine.moe.synthetic import SyntheticRouter
from phases.moe_imbalance import COLUMNS, Imbalance, findings, rows, study
from phases.reporting.model import Block, HeatMap, Section, Source, Standing, Table, Text

__all__ = ["BATCHES", "experts_section", "predicted"]

BATCHES = (1, 16)
_PLACEMENT = "ep"
_SEED, _NODES, _RANKS, _REDUNDANT, _SAMPLES = 1, 9, 8, 32, 16
_STEPS = 512
_GPU = "rtx-pro-6000"
"""With these, what `kd moe --batch 1,16` takes where it is told nothing else."""


def predicted(steps: int = _STEPS) -> Imbalance:
    """The imbalance at both batches, of a router that is drawn anew: seconds of work."""
    gpu = find_gpu(_GPU)
    return study(
        SyntheticRouter().draw(steps, _NODES, _SEED),
        BATCHES,
        ranks=_RANKS,
        redundant=_REDUNDANT,
        shape=ExpertShape(),
        gpu=gpu,
        link=LINKS[gpu.link],
        samples=_SAMPLES,
        seed=_SEED,
    )


def experts_section(found: Imbalance, revision: str) -> Section:
    source = Source(
        f"kd moe --batch {','.join(map(str, BATCHES))}",
        Standing.PREDICTED,
        f"rates of {found.gpu.name}",
        "drawn now",
        revision,
        found.source,
    )
    maps = [_shares(found, batch) for batch in BATCHES]
    # One scale for all, even around 1, so that the maps can be compared.
    off = max(abs(value - 1) for shares in maps for row in shares for value in row)
    blocks: list[Block] = [
        HeatMap(
            f"Batch {batch}: time of each rank's experts over the mean of its layer",
            "rank",
            "layer",
            "share of the layer's mean",
            tuple(map(str, range(found.ranks))),
            tuple(str(layer) for layer, *_ in found.outcome(batch, _PLACEMENT).by_layer),
            shares,
            1 - off,
            1.0,
            1 + off,
            source,
        )
        for batch, shares in zip(BATCHES, maps, strict=True)
    ]
    blocks.append(Text(tuple(findings(found))))
    blocks.append(
        Table.of(
            "Predicted cost of a step by batch and placement",
            [name if name == "placement" else f"#{name}" for name in COLUMNS],
            [list(row) for row in rows(found)],
            source=source,
        )
    )
    return Section(
        "experts",
        "MoE imbalance map",
        "A prediction, with nothing measured: no MoE layer was timed, and no routing is a model's "
        f"own. Experts are divided over {found.ranks} ranks (expert parallelism); a layer lasts "
        "until the slowest rank is done. 1 is a rank that works as long as its layer's mean, the "
        f"mean of {_SAMPLES} drawn steps; batch 1 is {_NODES} tokens, a tree of one request.",
        tuple(blocks),
    )


def _shares(found: Imbalance, batch: int) -> tuple[tuple[float, ...], ...]:
    """[rank][layer]: its microseconds over the mean of the ranks in that layer."""
    layers = [us for *_, us in found.outcome(batch, _PLACEMENT).by_layer]
    return tuple(
        tuple(us[rank] * len(us) / sum(us) for us in layers) for rank in range(found.ranks)
    )
