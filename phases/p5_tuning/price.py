"""Phase 6: what a run length costs on one GPU, in the verify pass and elsewhere.

The pool is as large as a long-lived service's. The runs of a request lie anywhere in it, or in
windows of it: SGLang scatters a request over slots that are near each other, which address
translation may not notice. Slots are drawn anew for each call, and each call's output is held
against what contiguous rows of the same contents must give.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import torch

from kdtree_engine.attention import tree_verify_attention
from kdtree_engine.errors import MissingError
from kdtree_engine.fragmentation.layouts import slots_needed
from kdtree_engine.fragmentation.measure import ROW_BYTES, measure
from kdtree_engine.reference.tiny_mla import Attention
from kdtree_engine.timing import Timing, WrongResult, copy_bandwidth, time_operation
from phases.candidates import require_current_library
from phases.gate import Context, FailureKind, Figure, GateFailure, Unit
from phases.p5_tuning.price_figures import Slots, name, price_series, verify
from phases.p5_tuning.price_subjects import Compaction, Gather, Place, Subject, Verify
from phases.regimes import Regime, first_seed

__all__ = ["PLAN", "PricePlan", "run_length_price"]

_CUDA = torch.device("cuda")
_US = Unit.MICROSECONDS

_POOLS_AT_ONCE = 6
"""The buffers of three calls, what was drawn first and last, and what is being drawn."""
_LAYERS_AT_ONCE = 8
"""The same of a compaction, whose output is its pools: a copy of them, and what they must be. The
timer keeps a copy of each timed call's output on top, which is small of what else is timed."""
_OTHER_BYTES = 6_000_000_000
"""More than the oracle holds in float64 at 204,800 tokens, and the flush of the caches."""
_SHARE_OF_MEMORY = 0.9

Timer = Callable[..., Timing]


@dataclasses.dataclass(frozen=True)
class PricePlan:
    """What is timed.

    contexts: prefix tokens. run_lengths: slots.
    trees: by nodes, the windows in slots that runs are scattered within; None: the whole pool.
    gather: the windows of a plain gather of the same rows.
    heads: of a rank. pool: slots, fewer where the card's memory is short.
    layers, layer_pool, tree: of the compaction: pools, slots of each, nodes of the tree.
    """

    contexts: tuple[int, ...] = (16_384, 65_536, 204_800)
    run_lengths: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    trees: Mapping[int, Sequence[int | None]] = dataclasses.field(
        default_factory=lambda: {9: (None, 524_288, 65_536, 512), 65: (None, 65_536)}
    )
    gather: Sequence[int | None] = (None, 65_536)
    heads: int = 8
    pool: int = 4_000_000
    layers: int = 61
    layer_pool: int = 65_536
    tree: int = 65

    @property
    def windows(self) -> list[int | None]:
        """All that occur, once each."""
        return list(dict.fromkeys(w for ws in (*self.trees.values(), self.gather) for w in ws))


PLAN = PricePlan()
"""Trees of nine nodes, as plan 15's, and of a draft budget of 64. At runs of 8, windows of 512
slots have the page locality that plan 16 found under churn; one of 524,288 is a smaller pool."""


def run_length_price(
    ctx: Context,
    *,
    device: torch.device = _CUDA,
    candidate: Attention = tree_verify_attention,
    plan: PricePlan = PLAN,
    repeats: int = 30,
    timer: Timer = time_operation,
    free_bytes: int | None = None,
    keep: Callable[[Sequence[Figure]], None] = lambda figures: None,
) -> list[Figure]:
    """Cold times by run length, and what each costs over contiguous slots; no threshold on that.

    Contiguous slots are timed before the first window and after each, and prices are over the mean:
    a price below the distance between those times is noise. A wrong output fails the gate.

    free_bytes: of the device's memory; None: what it says, and without limit on a CPU.
    keep: called with the figures so far, after each series.
    Raises MissingError where too little memory is free; ValueError where a figure is missing.
    """
    require_current_library(device)
    free = _free(device) if free_bytes is None else free_bytes
    pool, layer_pool = _sizes(plan, free, _LAYERS_AT_ONCE + repeats)
    clock = _Clock(ctx, device, timer, repeats, copy_bandwidth(device), _readings(plan))
    figures: list[Figure] = []
    for context in plan.contexts:
        for nodes, windows in plan.trees.items():
            regime = Regime(1, plan.heads, nodes, context)
            subject = Verify(regime, candidate, device)
            figures += clock.series(subject, pool, windows, plan.run_lengths)
            keep(figures)
        figures += clock.series(Gather(context, device), pool, plan.gather, plan.run_lengths)
        keep(figures)
    copies = Compaction(plan.layers, plan.tree, device)
    figures += clock.series(copies, layer_pool, (None,), (1,))
    _require_complete(plan, pool, figures)
    return [
        Figure("most that contiguity saves in verify, a layer", _dearest(figures), _US),
        *figures,
        *_localities(plan, pool, device, ctx.seed),
        Figure("slots of the pool", pool, Unit.COUNT),
        Figure("outputs over slots, checked before their time", clock.compared, Unit.COUNT),
        Figure("of them with the bits of contiguous rows", clock.equal, Unit.COUNT),
        Figure("copy", clock.bandwidth / 1e12, Unit.TERABYTES_PER_SECOND),
    ]


def _free(device: torch.device) -> int | None:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else None


def _sizes(plan: PricePlan, free_bytes: int | None, layers_at_once: int) -> tuple[int, int]:
    """Slots of the pool, and of each layer's pool that is compacted: what the memory allows.

    layers_at_once: copies of all the layers' pools that are held while a compaction is timed.
    """
    tokens = max(plan.contexts) + max(plan.trees)
    least = max(
        slots_needed(tokens, tokens),
        *(slots_needed(tokens, n, window) for window in plan.windows for n in plan.run_lengths),
    )
    layer_least = 2 * plan.tree
    if free_bytes is None:
        return plan.pool, plan.layer_pool
    room = int(_SHARE_OF_MEMORY * free_bytes)
    pool = min(plan.pool, (room - _OTHER_BYTES) // (_POOLS_AT_ONCE * ROW_BYTES))
    layer_pool = min(plan.layer_pool, room // (layers_at_once * plan.layers * ROW_BYTES))
    if pool < least or layer_pool < layer_least:
        wanted = max(
            _OTHER_BYTES + least * _POOLS_AT_ONCE * ROW_BYTES,
            layer_least * layers_at_once * plan.layers * ROW_BYTES,
        )
        raise MissingError(
            f"{free_bytes / 1e9:.1f} GB of the GPU's memory are free, and a pool of {least} slots "
            f"with what it is checked by takes {wanted / _SHARE_OF_MEMORY / 1e9:.1f} GB",
            remedy="run on a GPU with more memory, or end what else uses this one's",
        )
    return pool, layer_pool


def _readings(plan: PricePlan) -> int:
    """How many times are measured in all."""
    series = [*plan.trees.values(), plan.gather]
    a_window = len(plan.run_lengths) + 1
    return len(plan.contexts) * sum(1 + a_window * len(windows) for windows in series) + 3


class _Clock:
    """Times subjects, each after a look at its output, and makes figures of them."""

    def __init__(
        self,
        ctx: Context,
        device: torch.device,
        timer: Timer,
        repeats: int,
        bandwidth: float,
        readings: int,
    ) -> None:
        self.bandwidth = bandwidth
        self.compared = self.equal = 0
        self._ctx, self._device, self._timer = ctx, device, timer
        self._repeats = repeats
        self._done, self._readings = 0, readings

    def series(
        self,
        subject: Subject,
        pool: int,
        windows: Sequence[int | None],
        run_lengths: Sequence[int],
    ) -> list[Figure]:
        """One contiguous time, and time and price of each run length within each window."""
        timings: dict[Slots, Timing] = {}
        contiguous = [self._time(subject, Place(pool))]
        for window in windows:
            for length in run_lengths:
                slots = Slots(length, window or pool)
                timings[slots] = self._time(subject, Place(pool, slots))
            contiguous.append(self._time(subject, Place(pool)))
        times = [timing.median_us for timing in contiguous]
        base = sum(times) / len(times)
        title = name(subject.name, subject.tokens, None)
        reached = subject.floor_bytes / (base * 1e-6) / self.bandwidth
        figures = [
            Figure(title, base, _US),
            Figure(f"{title}: its times apart by", max(times) - min(times), _US),
            Figure(f"{title}: of copy", reached, Unit.CEILING_FRACTION),
        ]
        for slots, timing in timings.items():
            title = name(subject.name, subject.tokens, slots)
            figures += [
                Figure(title, timing.median_us, _US),
                Figure(f"{title}: price", timing.median_us - base, _US),
                # A ratio of times is about speed, so it is named a speed-up: 1.02 is 2 percent.
                Figure(f"{title}: contiguous instead", timing.median_us / base, Unit.SPEEDUP),
            ]
        return figures

    def _time(self, subject: Subject, place: Place) -> Timing:
        title = name(subject.name, subject.tokens, place.slots)
        self._ctx.progress(self._done, self._readings, title)
        self._done += 1
        seed = first_seed(self._ctx.seed, "cold")
        try:
            self._compare(subject, place, seed - 1)
            return self._timer(
                lambda number: subject.inputs(number, place),
                subject.run,
                device=self._device,
                check=subject.problem,
                repeats=self._repeats,
                seed=seed,
                floor_bytes=subject.floor_bytes,
                copy_bandwidth=self.bandwidth,
            )
        except WrongResult as error:
            raise GateFailure(FailureKind.NUMERICAL, f"{title}: {error}") from error

    def _compare(self, subject: Subject, place: Place, seed: int) -> None:
        """One call over slots and one over contiguous rows of the same contents: both are right."""
        drawn = subject.inputs(seed, place)
        output = subject.run(*(tensor.clone() for tensor in drawn))
        outputs = output if isinstance(output, tuple) else (output,)
        if (problem := subject.problem(drawn, outputs)) is not None:
            raise WrongResult(f"over slots: {problem}")
        problem, equal = subject.try_contiguous(drawn, outputs)
        if problem is not None:
            raise WrongResult(f"over contiguous rows: {problem}")
        self.compared += 1
        self.equal += equal


def _dearest(figures: Sequence[Figure]) -> float:
    """The largest price of a run length in any verify pass, microseconds of one layer."""
    series = [one for one in price_series(figures) if one.operation.startswith("verify")]
    return max(price for one in series for price in one.price_us.values())


def _localities(plan: PricePlan, pool: int, device: torch.device, seed: int) -> list[Figure]:
    """What the windows mean: the share of steps within 2 MiB, of the longest context."""
    tokens = max(plan.contexts)
    length = torch.tensor([tokens], device=device)
    figures = []
    for window in plan.windows:
        for run_length in plan.run_lengths:
            slots = Slots(run_length, window or pool)
            rows = Place(pool, slots).lay_out(tokens, seed, device)
            near = float(measure(rows[None], length).page_locality)
            figures.append(Figure(f"page locality of {tokens} tokens, {slots}", near, Unit.RATIO))
    return figures


def _require_complete(plan: PricePlan, pool: int, figures: Sequence[Figure]) -> None:
    """Raises ValueError where phase 7 would not find a time in what is kept, or none to use."""
    found = {(one.operation, one.tokens, one.within): one for one in price_series(figures)}
    wanted = [(verify(nodes), windows) for nodes, windows in plan.trees.items()]
    wanted.append(("gather", plan.gather))
    for tokens in plan.contexts:
        for operation, windows in wanted:
            for window in windows:
                one = found.get((operation, tokens, window or pool))
                times = [one.contiguous_us, *one.us.values()] if one else []
                whole = one is not None and set(one.us) == set(plan.run_lengths)
                if not whole or not all(math.isfinite(us) and us > 0 for us in times):
                    what = f"{operation}, {tokens} tokens, within {window or pool} slots"
                    raise ValueError(f"figures are incomplete: {what}")
