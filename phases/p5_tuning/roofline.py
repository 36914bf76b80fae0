"""The model of plan 15 as code, and the gate that holds it against kept H200 evidence.

    bound = t0 + max(memory, tensor)                                  perfect overlap, no padding
    time  = t0 + queries + fill + max(copy, product) + overlap * min(copy, product) + merge

All in microseconds. `overlap` is the one number that is fitted, over all regimes at once: 0 where
copies hide behind products entirely, 1 where they take turns. Everything else is a sum from the
shape of the launch and the rates of the part:

- copy: the KV rows once from DRAM, and once for each row tile from L2, whichever takes longer.
- product: the stages of the busiest block, whole tiles and whole stages, at its share of the rate.
- queries: each block loads the query rows of its tile from L2 before it starts.
- fill: the first stage of a block is copied before anything can be multiplied.
- merge: the partial rows, written and read through L2.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from kdtree_engine.library import WGMMA_BLOCK_TOKENS
from kdtree_engine.schedule import PIECE_COST, Grid, shared_splits
from kdtree_engine.tuning import Configuration, table_of
from phases.checkout import find_checkout
from phases.gate import Context, FailureKind, Figure, GateFailure, Unit
from phases.p5_tuning.checks import TARGETS
from phases.regimes import FLOPS_PER_ROW_AND_TOKEN, Regime

__all__ = [
    "EVIDENCE",
    "H200",
    "RTX_PRO_6000",
    "Launch",
    "Part",
    "Terms",
    "bound_us",
    "fitted_overlap",
    "kept_times",
    "launch_of",
    "predictions",
    "roofline_model",
    "terms",
]

EVIDENCE = "plans/evidence/kernel-versions/wgmma-w12.json"
"""The kept times that the model is held against: a file of that folder, or one of `kd bench`."""

_ROW_BYTES = 1152
_LEAST_OF_BOUND = 0.95
_MOST_OFF = 0.30
_SAME_PREFIX = 0.03
"""A kept time at 200,000 tokens is one of the regime of 204,800."""
_STEPS = 1000


@dataclasses.dataclass(frozen=True)
class Part:
    """A GPU's rates, for plan 15's sums.

    bandwidth: bytes/s of row reads from DRAM. tensor_rate: flop/s of mma.sync, bf16 with float32
        sums. l2_rate: bytes/s, assumed on both parts. t0_us: launch, ramp and drain; 0: unknown.
    """

    name: str
    architecture: str
    processors: int
    bandwidth: float
    tensor_rate: float
    l2_rate: float
    t0_us: float


H200 = Part("H200", "sm_90", 132, 4.46e12, 635e12, 5e12, 6.5)
RTX_PRO_6000 = Part("RTX PRO 6000", "sm_120", 188, 1.8e12, 1024 * 188 * 2.6e9, 5e12, 0.0)
"""Public figures: 1,024 dense flop a cycle and SM at 2.6 GHz, nominal DRAM. None was measured."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a regime is cut: `lanes` tiles over the rows, `splits` of all its requests together."""

    configuration: Configuration
    lanes: int
    splits: int
    stages: int
    """The most stages that a block goes through."""

    @property
    def rows(self) -> int:
        """Packed rows of a request, padded to whole tiles."""
        return self.lanes * self.configuration.row_tile


@dataclasses.dataclass(frozen=True)
class Terms:
    """What a launch's time is made of, microseconds each."""

    t0: float
    copy: float
    product: float
    queries: float
    fill: float
    merge: float

    def time(self, overlap: float) -> float:
        """overlap: 0 where the shorter of copy and product is hidden, 1 where it is added."""
        hidden, shown = sorted((self.copy, self.product))
        return self.t0 + self.queries + self.fill + shown + overlap * hidden + self.merge


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A regime on a part where nothing was measured, microseconds without t0."""

    regime: Regime
    launch: Launch
    bound_us: float
    overlapped_us: float
    in_turns_us: float


def bound_us(part: Part, regime: Regime) -> float:
    """Below it no kernel of this instruction class comes: plan 15's bound per regime."""
    memory = regime.floor_bytes / part.bandwidth
    tensor = regime.flops / part.tensor_rate
    return part.t0_us + 1e6 * max(memory, tensor)


def launch_of(part: Part, regime: Regime, configuration: Configuration) -> Launch:
    """How the schedule cuts a regime (csrc/schedule.cuh); every number of the tile is given."""
    rows = regime.heads * regime.nodes
    lanes = min(-(-rows // configuration.row_tile), part.processors)
    blocks = -(-(regime.prefix + regime.nodes) // configuration.block_tokens)
    grid = Grid(part.processors // lanes, configuration.block_tokens, configuration.min_blocks)
    cut = shared_splits([blocks] * regime.batch, grid)
    line = regime.batch * (PIECE_COST + blocks)
    share = max(-(-line // grid.groups), grid.min_blocks)
    return Launch(
        configuration, lanes, sum(map(len, cut)), stages=min(share, regime.batch * blocks)
    )


def terms(part: Part, regime: Regime, launch: Launch) -> Terms:
    """The sums of a launch; see the module's own text for each."""
    tile, tokens = launch.configuration.row_tile, launch.configuration.block_tokens
    share_of_dram = part.bandwidth / part.processors
    share_of_tensor = part.tensor_rate / part.processors
    stage_product = FLOPS_PER_ROW_AND_TOKEN * tile * tokens / share_of_tensor
    stage_copy = _ROW_BYTES * tokens / share_of_dram
    copy = max(
        regime.floor_bytes / part.bandwidth, launch.lanes * regime.floor_bytes / part.l2_rate
    )
    query_rows = partial_rows = launch.splits * launch.rows
    if launch.splits == regime.batch:
        partial_rows = 0  # every request is whole: its block writes the output itself
    partial_bytes = 2 * _partial_row_bytes(tokens)
    return Terms(
        t0=part.t0_us,
        copy=1e6 * copy,
        product=1e6 * launch.stages * stage_product,
        queries=1e6 * query_rows * _ROW_BYTES / part.l2_rate,
        fill=1e6 * min(stage_copy, stage_product),
        merge=1e6 * partial_rows * partial_bytes / part.l2_rate,
    )


def fitted_overlap(cases: Sequence[tuple[Terms, float]]) -> float:
    """The overlap in 0..1 whose largest relative error over (terms, measured us) is least."""
    return min(
        (step / _STEPS for step in range(_STEPS + 1)),
        key=lambda overlap: max(abs(one.time(overlap) / us - 1) for one, us in cases),
    )


def kept_times(path: pathlib.Path) -> list[tuple[Regime, Configuration | None, float]]:
    """The right and default-mode times of a file: regime, tile (None: not told), microseconds.

    The file is one of plans/evidence/kernel-versions/, or one that `kd bench kernel` wrote.
    """
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if "measurements" in document:
        return [
            (
                Regime(row["batch"], row["heads"], row["tree_nodes"], row["prefix"]),
                _configuration(row["row_tile"], row["block_tokens"], row["min_blocks"]),
                float(row["median_us"]),
            )
            for row in document["measurements"]
            if not row["deterministic"]
        ]
    return [
        (
            Regime(**row["regime"]),
            _configuration(row["tile"]["rows"], row["tile"]["tokens"], 0) if row["tile"] else None,
            float(row["median_us"]),
        )
        for row in document["kernels"]
        if row["status"] == "right"
    ]


def predictions(part: Part = RTX_PRO_6000) -> list[Prediction]:
    """Every regime of plan 15 on a part, with the tiles that its tuning table takes."""
    made = []
    for target in TARGETS:
        regime = target.regime
        launch = launch_of(part, regime, _tabled(part.architecture, regime, None))
        one = terms(part, regime, launch)
        made.append(
            Prediction(regime, launch, bound_us(part, regime), one.time(0.0), one.time(1.0))
        )
    return made


def roofline_model(
    ctx: Context, *, evidence: str = EVIDENCE, root: pathlib.Path | None = None
) -> list[Figure]:
    """No kept time below 0.95 of the bound, and the model within 30% of each, with one overlap.

    The fastest kept time of a regime is the one that counts. The predictions for sm_120 are
    figures beside it, without t0, which nobody has measured there.
    """
    best = _best((root or find_checkout().root) / evidence)
    cases = []
    for regime, configuration, us in best:
        least = _LEAST_OF_BOUND * bound_us(H200, regime)
        if us < least:
            raise GateFailure(
                FailureKind.NUMERICAL,
                f"{regime}: {us:.1f} us is below {_LEAST_OF_BOUND} of the bound, {least:.1f} us: "
                "a rate of the model is too low, or the time is wrong",
            )
        cases.append((terms(H200, regime, launch_of(H200, regime, configuration)), us))
    overlap = fitted_overlap(cases)
    ratios = [one.time(overlap) / us for one, us in cases]
    figures = [
        Figure("largest error of the model", max(abs(ratio - 1) for ratio in ratios), Unit.RATIO),
        Figure("overlap fitted over all regimes", overlap, Unit.RATIO),
        Figure(
            "least time over bound",
            min(us / bound_us(H200, regime) for regime, _, us in best),
            Unit.RATIO,
        ),
    ]
    figures += [
        Figure(f"{regime}: model over measured", ratio, Unit.RATIO)
        for (regime, _, _), ratio in zip(best, ratios, strict=True)
    ]
    figures += _figures(predictions())
    off = [
        f"{regime}: the model says {one.time(overlap):.1f} us, measured {us:.1f} ({one})"
        for (regime, _, us), (one, _), ratio in zip(best, cases, ratios, strict=True)
        if abs(ratio - 1) > _MOST_OFF
    ]
    if off:
        raise GateFailure(FailureKind.NUMERICAL, "; ".join(off), figures)
    return figures


def _figures(made: Iterable[Prediction]) -> list[Figure]:
    unit, figures = Unit.PREDICTED_MICROSECONDS, []
    for one in made:
        name = f"sm_120 {one.regime}, without t0:"
        figures += [
            Figure(f"{name} bound", one.bound_us, unit),
            Figure(f"{name} copies hidden", one.overlapped_us, unit),
            Figure(f"{name} in turns", one.in_turns_us, unit),
        ]
    return figures


def _best(path: pathlib.Path) -> list[tuple[Regime, Configuration, float]]:
    """The fastest kept time of each regime of the plan. Fails the gate where one has none."""
    kept = kept_times(path)
    best = []
    for target in TARGETS:
        same = [entry for entry in kept if _same(entry[0], target.regime)]
        if not same:
            raise GateFailure(FailureKind.SHAPE, f"{path.name} has no time for {target.regime}")
        regime, configuration, us = min(same, key=lambda entry: entry[2])
        if configuration is None:
            configuration = _tabled(H200.architecture, regime, _body(kept))
        best.append((regime, configuration, us))
    return best


def _same(kept: Regime, wanted: Regime) -> bool:
    shapes = [(regime.batch, regime.heads, regime.nodes) for regime in (kept, wanted)]
    return shapes[0] == shapes[1] and abs(kept.prefix / wanted.prefix - 1) <= _SAME_PREFIX


def _body(kept: Iterable[tuple[Regime, Configuration | None, float]]) -> str | None:
    """The body that the other times of a file are of; None, the table's own, where none says."""
    tokens = {configuration.block_tokens for _, configuration, _ in kept if configuration}
    if len(tokens) != 1:
        return None
    return "wgmma" if tokens == {WGMMA_BLOCK_TOKENS} else "mma"


def _configuration(
    row_tile: int | None, block_tokens: int | None, min_blocks: int | None
) -> Configuration | None:
    if not row_tile or not block_tokens:
        return None
    return _whole(Configuration(row_tile, block_tokens, min_blocks or 0))


def _tabled(architecture: str, regime: Regime, body: str | None) -> Configuration:
    """What the tuning table takes for a regime."""
    table = table_of(architecture)
    chosen = table.chosen(body) if table else None
    if chosen is None:
        raise ValueError(f"no tuning table of {architecture} has body {body or 'at all'}")
    rows = regime.heads * regime.nodes
    return _whole(chosen.entry(rows, regime.batch, deterministic=False).configuration)


def _whole(configuration: Configuration) -> Configuration:
    """With the library's own least stages of a split where none are named (launch.cu)."""
    own = 1 if configuration.block_tokens == WGMMA_BLOCK_TOKENS else 2
    return dataclasses.replace(configuration, min_blocks=configuration.min_blocks or own)


def _partial_row_bytes(block_tokens: int) -> int:
    """512 values and a (maximum, sum) pair: 16 bits wide on the wgmma path, else float32."""
    return 512 * (2 if block_tokens == WGMMA_BLOCK_TOKENS else 4) + 8
