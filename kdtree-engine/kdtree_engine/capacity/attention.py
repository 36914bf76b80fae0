"""Tree verification of one layer: a roofline whose three numbers are fitted to kept times.

    seconds = fixed + max(bytes / (bandwidth * share), flops / (rate * share'))
    bytes   = 1,152 * batch * (prefix + nodes)                  each latent row once
    flops   = 2,176 * rows * batch * (prefix + nodes)           rows: whole tiles over heads * nodes

`fixed` is what a launch costs whatever is in it; the shares say how much of its ceilings the kernel
reaches. The tile, and which of the two bodies runs, are those of the architecture's tuning table.
The rate is that of mma.sync where the table says `mma`, else the GPU's own.

On a GPU where nothing was measured the same seconds and the same shares are taken, with that GPU's
ceilings: a prediction. Where its tiles were tried on another GPU, the fit is of those tiles there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from kdtree_engine.capacity.hull import Point, inside
from kdtree_engine.errors import ConfigError
from kdtree_engine.gpus import Gpu
from kdtree_engine.tuning import Table, TimedRegime, table_of

__all__ = [
    "AttentionFit",
    "Regime",
    "attention_parts",
    "body_of",
    "error_of",
    "fit_attention",
    "tile_of",
]

_ROW_BYTES = 1152
_FLOPS = 2 * (576 + 512)
_SHARES = [step / 100 for step in range(5, 101)]
"""Tried in the fit, of a ceiling."""


@dataclasses.dataclass(frozen=True)
class Regime:
    """`batch` requests of `nodes` tree nodes behind `prefix` tokens, `heads` heads a rank."""

    batch: int
    heads: int
    nodes: int
    prefix: int

    @property
    def rows(self) -> int:
        """Packed rows of a request."""
        return self.heads * self.nodes


@dataclasses.dataclass(frozen=True)
class AttentionFit:
    """What `fit_attention` found.

    architecture: whose tiles and body it is of. device: the GPU it was measured on.
    fixed: seconds of a launch. bandwidth_share, flops_share: of the ceilings, in 0..1.
    measured: what it was fitted to; what does not lie among these is no calibration.
    """

    architecture: str
    device: str
    fixed: float
    bandwidth_share: float
    flops_share: float
    measured: tuple[Regime, ...]

    def covers(self, regime: Regime) -> bool:
        """Whether it lies among the measured regimes.

        That is in their convex hull, by the logarithms of batch, packed rows and prefix. To be
        below the largest of each would not do: many requests, many rows and a long prefix were
        measured each alone, and all three together are far from anything that was.
        """
        return inside(_place(regime), tuple(map(_place, self.measured)))


def _place(regime: Regime) -> Point:
    return math.log2(regime.batch), math.log2(regime.rows), math.log2(1 + regime.prefix)


def body_of(architecture: str) -> str:
    """`wgmma` or `mma`: the set of kernels that the tuning table takes."""
    return _table(architecture).body


def tile_of(architecture: str, regime: Regime) -> tuple[int, int]:
    """Rows of a tile, and tokens of a stage, that the tuning table takes for a launch."""
    table = _table(architecture)
    entry = table.bodies[table.body].entry(regime.rows, regime.batch, deterministic=False)
    return entry.configuration.row_tile, entry.configuration.block_tokens


def _table(architecture: str) -> Table:
    table = table_of(architecture)
    if table is None:
        raise ConfigError(f"there is no tuning table of {architecture}")
    return table


def attention_parts(fit: AttentionFit, gpu: Gpu, regime: Regime) -> tuple[float, float, float]:
    """Seconds of one layer: (fixed, bytes, flops). Of the last two the shorter is hidden."""
    read, product = _floors(fit.architecture, gpu, regime)
    return fit.fixed, read / fit.bandwidth_share, product / fit.flops_share


def _floors(architecture: str, gpu: Gpu, regime: Regime) -> tuple[float, float]:
    """Seconds of bytes and of flops at the GPU's ceilings."""
    rate = gpu.mma_flops if body_of(architecture) == "mma" else gpu.flops
    tile, _ = tile_of(architecture, regime)
    tokens = regime.batch * (regime.prefix + regime.nodes)
    rows = math.ceil(regime.rows / tile) * tile
    return _ROW_BYTES * tokens / gpu.bandwidth, _FLOPS * rows * tokens / rate


def error_of(fit: AttentionFit, gpu: Gpu, timed: TimedRegime) -> float:
    """Relative: 0.1 where the model says a tenth more than was measured."""
    fixed, read, product = attention_parts(fit, gpu, _regime(timed))
    return (fixed + max(read, product)) * 1e6 / timed.us - 1


def fit_attention(timed: Sequence[TimedRegime], gpu: Gpu, architecture: str) -> AttentionFit:
    """The three numbers whose squared relative errors over `timed` are least.

    timed: microseconds of one call on `gpu`, with the tiles of `architecture`'s table. Every pair
    of shares is tried, each with the best `fixed` beside it: no start to get stuck at.
    """
    if len(timed) < 3:
        raise ConfigError(f"three numbers cannot be fitted to {len(timed)} times")
    floors = [_floors(architecture, gpu, _regime(one)) for one in timed]
    times = [one.us * 1e-6 for one in timed]
    weights = [1 / time**2 for time in times]
    whole = sum(weights)

    def tried(read: float, product: float) -> tuple[float, float, float, float]:
        longest = [max(one / read, two / product) for one, two in floors]
        left = [time - one for time, one in zip(times, longest, strict=True)]
        fixed = max(0.0, sum(map(math.prod, zip(weights, left, strict=True))) / whole)
        squares = [weight * (one - fixed) ** 2 for weight, one in zip(weights, left, strict=True)]
        return sum(squares), fixed, read, product

    _, fixed, read, product = min(tried(read, product) for read in _SHARES for product in _SHARES)
    measured = tuple(map(_regime, timed))
    return AttentionFit(architecture, gpu.device, fixed, read, product, measured)


def _regime(timed: TimedRegime) -> Regime:
    return Regime(timed.batch, timed.heads, timed.nodes, timed.prefix)
