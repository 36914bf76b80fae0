"""`kd tune`: sweeps the compiled tiles on one GPU and writes its architecture's tuning table.

Nothing is timed before its output has been held against the oracle, and a tile that is wrong
anywhere ends the writing of a table: what else such a library says is not to be trusted. The rest
is a rule: for launches that share a key, the configuration whose worst regime is nearest to that
regime's best. Prefix lengths are no part of the key, so one configuration has to do for all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from kdtree_engine.atomic import write_atomically
from kdtree_engine.attention import tree_verify_attention
from kdtree_engine.build import origin_of, require_current, sources_digest
from kdtree_engine.errors import ConfigError
from kdtree_engine.library import (
    WGMMA_BLOCK_TOKENS,
    Kernels,
    built_in_tuning,
    kernels,
    library_path,
)
from kdtree_engine.machine import Machine
from kdtree_engine.reference.tiny_mla import Attention
from kdtree_engine.resources import SHARED_LIMIT_BYTES
from kdtree_engine.schedule import PIECE_COST
from kdtree_engine.timing import ImplausibleTiming, Timing, copy_bandwidth
from kdtree_engine.tuning import (
    BODIES,
    Body,
    Configuration,
    Entry,
    Measured,
    Table,
    TimedRegime,
    Unmeasured,
    architecture_of,
    load_table,
    parse_table,
    table_text,
)
from phases.checkout import Checkout
from phases.evidence import new_run_id, now
from phases.gate import GateFailure
from phases.p5_tuning.checks import TARGETS
from phases.p5_tuning.tiles import CompiledTile, part_tiles
from phases.regimes import Regime, draw, problem_with, time_regime

__all__ = [
    "REGIMES",
    "Candidate",
    "Outcome",
    "Part",
    "Sweep",
    "Trial",
    "candidates",
    "predicted_table",
    "sweep",
    "this_part",
    "tune",
    "tuned_table",
]

REGIMES = (
    *(target.regime for target in TARGETS),
    Regime(1, 8, 3, 16_384),
    Regime(1, 8, 5, 16_384),
    Regime(4, 8, 9, 4096),
    Regime(16, 8, 9, 4096),
    Regime(64, 8, 9, 4096),
    Regime(16, 8, 1, 16_384),
    Regime(16, 8, 17, 4096),
)
"""The twelve of plan 15, and beside them few rows and larger batches."""
LEAST_STAGES = (1, 2, 4)
"""`min_blocks` of the sweep; deterministic mode, which does not read it, has 0."""
_LEAST_SHARED_BYTES = 101_376
"""What a block gets on the smallest part of compute capability 8.0 or newer."""
_CUDA = torch.device("cuda")
_ATTEMPTS = 2

Timer = Callable[..., Timing]


@dataclasses.dataclass(frozen=True)
class Part:
    """The GPU that is tuned for: its name, architecture, SMs, and the tiles that it can run."""

    gpu: str
    architecture: str
    processors: int
    tiles: tuple[CompiledTile, ...]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A configuration of one body, in the default or in deterministic mode."""

    body: str
    configuration: Configuration
    deterministic: bool

    def __str__(self) -> str:
        return f"{self.configuration}{' deterministic' if self.deterministic else ''}"


@dataclasses.dataclass(frozen=True)
class Trial:
    """One candidate in one regime. A `right` one alone has a time; `why` says what else it is.

    same_launch: it was not called, as another candidate's launch is the same to the last number
        (the least stages of a split bind short work alone): the outcome is that one's.
    """

    candidate: Candidate
    regime: Regime
    status: Literal["right", "wrong", "failed"]
    why: str | None = None
    timing: Timing | None = None
    same_launch: bool = False


@dataclasses.dataclass
class Sweep:
    """What a sweep was made on and with, and its trials so far."""

    part: Part
    seed: int
    repeats: int
    trials: list[Trial] = dataclasses.field(default_factory=list)
    run: str = dataclasses.field(default_factory=new_run_id)
    date: str = dataclasses.field(default_factory=lambda: f"{now():%Y-%m-%d}")

    @property
    def right(self) -> bool:
        """Whether every tile computed what it should, in every regime."""
        return all(trial.status == "right" for trial in self.trials)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A finished sweep and what was written; table and file are None where a tile was wrong."""

    sweep: Sweep
    record: pathlib.Path
    table: Table | None
    file: pathlib.Path | None


def candidates(tiles: Iterable[CompiledTile], *, deterministic: bool) -> list[Candidate]:
    """Every configuration that is tried: each tile, by default with each of LEAST_STAGES.

    deterministic: whether that mode is tried too. Its configuration binds every launch, so it is
    chosen over all regimes or not at all.
    """
    found = []
    for tile in tiles:
        body = _body_of(tile)
        for least in LEAST_STAGES:
            configuration = Configuration(tile.row_tile, tile.block_tokens, least)
            found.append(Candidate(body, configuration, deterministic=False))
        if deterministic:
            configuration = Configuration(tile.row_tile, tile.block_tokens, 0)
            found.append(Candidate(body, configuration, deterministic=True))
    return found


def this_part(library: Kernels, device: torch.device = _CUDA) -> Part:
    """What the library can run on this machine's GPU."""
    facts = torch.cuda.get_device_properties(device)
    architecture = architecture_of((facts.major, facts.minor))
    limit = SHARED_LIMIT_BYTES.get(architecture) or int(
        getattr(facts, "shared_memory_per_block_optin", _LEAST_SHARED_BYTES)
    )
    tiles = part_tiles(library.compiled_tiles, facts.major * 10 + facts.minor, limit)
    return Part(facts.name, architecture, facts.multi_processor_count, tuple(tiles))


def tune(
    regimes: Sequence[Regime],
    *,
    repeats: int,
    checkout: Checkout,
    machine: Machine,
    command: Sequence[str],
    progress: Callable[[int, int, str], None],
    part: Part | None = None,
    library: Kernels | None = None,
    tables: pathlib.Path | None = None,
    evidence: pathlib.Path | None = None,
    **options: Any,
) -> Outcome:
    """Sweep on this machine's GPU, and write the record and the table of its architecture.

    regimes: none for REGIMES. Others change only the entries that their launches go by, and leave
        deterministic mode alone.
    tables, evidence: folders of the checkout unless named. options: what `sweep` takes besides.
    What was measured up to then is in the checkout's state folder if the run dies.
    Raises MissingError, ConfigError, CompileError where there is no library of csrc as it is.
    """
    nvcc = None
    if library is None:
        require_current(library_path())
        library, nvcc = kernels(), origin_of(library_path()).get("nvcc")
    part = part or this_part(library)
    made = Sweep(part, seed=1, repeats=repeats)
    describe = functools.partial(
        _record, machine=machine, nvcc=nvcc, revision=checkout.revision(), command=command
    )
    state = checkout.state / "tune" / f"{made.run}.json"
    folder = tables or checkout.root / "kdtree-engine" / "kdtree_engine" / "tables"
    file = folder / f"{part.architecture}.json"
    old = load_table(file) if file.is_file() else predicted_table(part.architecture, part.tiles)
    require_whole(old, part, regimes)
    sweep(
        made,
        library,
        regimes or REGIMES,
        deterministic=not regimes,
        progress=progress,
        keep=lambda: write_atomically(state, describe(made)),
        **options,
    )
    name = f"{part.architecture}-{made.run}.json"
    record = (evidence or checkout.kept_evidence / "tuning") / name
    if not made.right:
        return Outcome(made, state, None, None)
    where = record.relative_to(checkout.root) if checkout.root in record.parents else record
    table = tuned_table(old, made, where.as_posix())
    text = table_text(table)
    parse_table(json.loads(text), str(file))  # what could not be loaded is not written
    # The record first: a table never names one that is not there.
    write_atomically(record, describe(made))
    write_atomically(file, text)
    return Outcome(made, record, table, file)


def sweep(
    made: Sweep,
    library: Kernels,
    regimes: Sequence[Regime],
    *,
    deterministic: bool,
    device: torch.device = _CUDA,
    operation: Attention = tree_verify_attention,
    timer: Timer = time_regime,
    bandwidth: float | None = None,
    keep: Callable[[], None] = lambda: None,
    progress: Callable[[int, int, str], None] = lambda done, total, note: None,
) -> None:
    """Try every candidate in every regime and add the trials to `made`.

    timer: called as `time_regime` is. bandwidth: bytes/s that the device copies, None to measure.
    keep: called after each trial. progress: before each.
    """
    tried = candidates(made.part.tiles, deterministic=deterministic)
    if bandwidth is None:
        bandwidth = copy_bandwidth(device)
    total = len(tried) * len(regimes)
    known: dict[tuple[object, ...], Trial] = {}
    for done, (regime, candidate) in enumerate(itertools.product(regimes, tried)):
        progress(done, total, f"{regime} {candidate}")
        launch = (regime, *_launch(made.part, regime, candidate))
        if launch in known:
            same = dataclasses.replace(known[launch], candidate=candidate, same_launch=True)
            made.trials.append(same)
            keep()
            continue
        with _forced(library, candidate.configuration):
            known[launch] = _trial(candidate, regime, operation, timer, device, made, bandwidth)
        made.trials.append(known[launch])
        keep()


def tuned_table(old: Table, made: Sweep, record: str) -> Table:
    """`old` with the entries replaced that the sweep's launches go by; the body taken stays.

    record: what the entries name as the record of their times.
    """
    bodies = dict(old.bodies)
    for name in BODIES:
        trials = [trial for trial in made.trials if trial.candidate.body == name]
        if not trials:
            continue
        before = (
            bodies.get(name)
            or predicted_table(
                old.architecture, [tile for tile in made.part.tiles if _body_of(tile) == name]
            ).bodies[name]
        )
        measured = functools.partial(_entry, made=made, record=record)
        default = [trial for trial in trials if not trial.candidate.deterministic]
        fixed = [trial for trial in trials if trial.candidate.deterministic]
        bodies[name] = Body(
            measured(None, None, fixed) if fixed else before.deterministic,
            tuple(_entries(before, default, measured)),
        )
    return dataclasses.replace(old, bodies=bodies)


def predicted_table(architecture: str, tiles: Sequence[CompiledTile]) -> Table:
    """A table from sums alone, by plan 15: fewest tiles, then least padding, then longest stages.

    Each tile over the rows reads the KV rows from L2 again. For deterministic mode, one tile that
    pads 72 rows (8 heads, 9 nodes) the least.
    """
    some = {name: [tile for tile in tiles if _body_of(tile) == name] for name in BODIES}
    bodies = {name: _predicted_body(those) for name, those in some.items() if those}
    return Table(architecture, BODIES[0], bodies)


def _predicted_body(tiles: Sequence[CompiledTile]) -> Body:
    why = Unmeasured(
        "predicted by plan 15: the fewest tiles, as each reads the KV rows from L2 again, then the "
        "least padding"
    )
    tallest = max(tile.row_tile for tile in tiles)

    def chosen(rows: int) -> Configuration:
        fewest = -(-rows // tallest)
        few = [tile for tile in tiles if -(-rows // tile.row_tile) == fewest]
        return _predicted(min(few, key=lambda tile: (tile.row_tile, -tile.block_tokens)))

    # Beyond so many rows the tallest tile alone needs the fewest.
    pairs = itertools.pairwise(range(1, 8 * tallest + 1))
    ends = [rows for rows, following in pairs if chosen(rows) != chosen(following)]
    fixed = min(tiles, key=lambda tile: (-72 % tile.row_tile, -tile.row_tile, -tile.block_tokens))
    return Body(
        Entry(
            None,
            None,
            _predicted(fixed),
            Unmeasured("the tile that 72 rows, the commonest, fill without padding; never timed"),
        ),
        (
            *(Entry(rows, None, chosen(rows), why) for rows in ends),
            Entry(None, None, chosen(8 * tallest), why),
        ),
    )


def _predicted(tile: CompiledTile) -> Configuration:
    return Configuration(tile.row_tile, tile.block_tokens, 0)


def _body_of(tile: CompiledTile) -> str:
    return "wgmma" if tile.block_tokens == WGMMA_BLOCK_TOKENS else "mma"


def _entries(
    before: Body, trials: Sequence[Trial], measured: Callable[..., Entry]
) -> Iterator[Entry]:
    """The entries of a body: those of `before` for batches where nothing was tried, new elsewhere.

    An old entry that was measured at other batches too is cut, so that those keep what they had.
    """
    for limit, entries in itertools.groupby(before.entries, key=lambda entry: entry.rows_up_to):
        here = [trial for trial in trials if _limit_of(before, trial.regime) == limit]
        above = 0
        for old in entries:
            yield from _cut(old, [t for t in here if _covers(above, old, t.regime.batch)], measured)
            above = old.batch_up_to or above


def _covers(above: int, entry: Entry, batch: int) -> bool:
    return above < batch and (entry.batch_up_to is None or batch <= entry.batch_up_to)


def _cut(old: Entry, trials: Sequence[Trial], measured: Callable[..., Entry]) -> Iterator[Entry]:
    if not trials:
        yield old
        return
    best = {
        batch: _best([trial for trial in trials if trial.regime.batch == batch])
        for batch in {trial.regime.batch for trial in trials}
    }
    past = old.provenance.times if isinstance(old.provenance, Measured) else ()
    batches = sorted({*best, *(time.batch for time in past)})
    # Neighbouring batches that want the same configuration share an entry. None: the old one.
    groups = [list(group) for _, group in itertools.groupby(batches, key=best.get)]
    for group in groups:
        up_to = old.batch_up_to if group is groups[-1] else group[-1]
        if group[0] in best:
            chosen = [trial for trial in trials if trial.regime.batch in group]
            yield measured(old.rows_up_to, up_to, chosen, best[group[0]])
        else:
            assert isinstance(old.provenance, Measured)
            times = tuple(time for time in past if time.batch in group)
            kept = dataclasses.replace(old.provenance, times=times)
            yield dataclasses.replace(old, batch_up_to=up_to, provenance=kept)


def require_whole(table: Table, part: Part, regimes: Sequence[Regime]) -> None:
    """Raises ConfigError where a tried batch was measured at lengths or shapes that are not tried.

    Lengths are no part of an entry's key: one of them alone must not choose for the others.
    """
    tried = {(regime.batch, regime.heads, regime.nodes, regime.prefix) for regime in regimes}
    left: set[str] = set()
    for name in {_body_of(tile) for tile in part.tiles} & set(table.bodies):
        for regime in regimes:
            entry = table.bodies[name].entry(
                regime.heads * regime.nodes, regime.batch, deterministic=False
            )
            past = entry.provenance.times if isinstance(entry.provenance, Measured) else ()
            for time in past:
                shape = (time.batch, time.heads, time.nodes, time.prefix)
                if time.batch == regime.batch and shape not in tried:
                    left.add(",".join(map(str, shape)))
    if left:
        raise ConfigError(
            "the entry that these launches go by was measured at more lengths or shapes of the "
            "same batch, which would lose their say",
            remedy="add " + " ".join(f"--regime {one}" for one in sorted(left)),
        )


def _limit_of(body: Body, regime: Regime) -> int | None:
    rows = regime.heads * regime.nodes
    return body.entry(rows, regime.batch, deterministic=False).rows_up_to


def _entry(
    rows: int | None,
    batch: int | None,
    trials: Sequence[Trial],
    configuration: Configuration | None = None,
    *,
    made: Sweep,
    record: str,
) -> Entry:
    """The entry that trials speak for, with the times of the configuration that is taken."""
    configuration = configuration or _best(trials)
    times = tuple(
        TimedRegime(
            trial.regime.batch,
            trial.regime.heads,
            trial.regime.nodes,
            trial.regime.prefix,
            _us(trial),
        )
        for trial in trials
        if trial.candidate.configuration == configuration
    )
    return Entry(rows, batch, configuration, Measured(made.part.gpu, made.date, record, times))


def _best(trials: Sequence[Trial]) -> Configuration:
    """The configuration whose worst regime is nearest to that regime's best; ties by the mean."""
    fastest: dict[Regime, float] = {}
    for trial in trials:
        fastest[trial.regime] = min(fastest.get(trial.regime, float("inf")), _us(trial))
    ratios: dict[Configuration, list[float]] = {}
    for trial in trials:
        ratio = _us(trial) / fastest[trial.regime]
        ratios.setdefault(trial.candidate.configuration, []).append(ratio)
    return min(ratios, key=lambda one: (max(ratios[one]), sum(ratios[one])))


def _us(trial: Trial) -> float:
    assert trial.timing is not None
    return round(trial.timing.median_us, 2)


def _launch(part: Part, regime: Regime, candidate: Candidate) -> tuple[object, ...]:
    """What a launch goes by: mode, tile, and the stages of a split as in csrc/schedule.cuh."""
    one = candidate.configuration
    if candidate.deterministic:
        return True, one.row_tile, one.block_tokens
    lanes = min(-(-regime.heads * regime.nodes // one.row_tile), part.processors)
    blocks = -(-(regime.prefix + regime.nodes) // one.block_tokens)
    line = regime.batch * ((PIECE_COST if regime.batch > 1 else 0) + blocks)
    share = max(-(-line // (part.processors // lanes)), one.min_blocks)
    return False, one.row_tile, one.block_tokens, share


@contextlib.contextmanager
def _forced(library: Kernels, configuration: Configuration) -> Iterator[None]:
    library.set_tuning(*dataclasses.astuple(configuration))
    try:
        yield
    finally:
        library.set_tuning(*built_in_tuning())


def _trial(
    candidate: Candidate,
    regime: Regime,
    operation: Attention,
    timer: Timer,
    device: torch.device,
    made: Sweep,
    bandwidth: float,
) -> Trial:
    """Correctness first; then the time, under which every output is checked again."""
    call = functools.partial(operation, deterministic=candidate.deterministic)
    try:
        inputs = draw(regime, made.seed, device=device, scattered=True)
        out = call(*inputs, sm_scale=regime.sm_scale, max_nodes=regime.nodes)
        assert isinstance(out, torch.Tensor)
        wrong = problem_with(inputs, out, regime.sm_scale)
        if wrong is not None:
            return Trial(candidate, regime, "wrong", wrong)
        timing = _plausible(
            functools.partial(
                timer,
                regime,
                call,
                device=device,
                seed=made.seed,
                copy_bandwidth=bandwidth,
                repeats=made.repeats,
            )
        )
    except GateFailure as error:  # of the timer: an output was wrong under the clock
        return Trial(candidate, regime, "wrong", str(error))
    except Exception as error:  # one bad tile does not end a long sweep
        told = " ".join(str(error).split()) or "no message"
        return Trial(candidate, regime, "failed", f"{type(error).__name__}: {told}"[:400])
    return Trial(candidate, regime, "right", timing=timing)


def _plausible(measure: Callable[[], Timing]) -> Timing:
    """A time, taken once more where the first cannot be.

    One hiccup of the host in a sweep of many hundred trials is to be expected, and a kernel that
    deceives the clock does so both times.
    """
    for attempt in range(_ATTEMPTS):
        try:
            timing = measure()
            if not (math.isfinite(timing.median_us) and timing.median_us >= 0.01):
                raise ImplausibleTiming(f"a call took {timing.median_us} us")
            return timing
        except ImplausibleTiming:
            if attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError("not reached")


def _record(
    made: Sweep,
    *,
    machine: Machine,
    nvcc: str | None,
    revision: tuple[str | None, bool | None],
    command: Sequence[str],
) -> str:
    """The record's text: as those of plans/evidence/kernel-versions/, a line for each time."""
    commit, dirty = revision
    head: Mapping[str, Any] = {
        "version": f"tune-{made.run}",
        "what": "a sweep of kd tune over the compiled tiles",
        "gpu": made.part.gpu,
        "architecture": made.part.architecture,
        "torch": machine.torch,
        "driver": machine.driver,
        "nvcc": nvcc,
        "date": made.date,
        "csrc_sha256": sources_digest(),
        "revision": commit,
        "dirty": dirty,
        "command": list(command),
        "seed": made.seed,
        "repeats": made.repeats,
        "method": "as phases/regimes.py times a regime, the oracle first, slots at random; a row "
        "with same_launch has the outcome of another min_blocks, as the launch is the same",
    }
    right = [_row(trial) for trial in made.trials if trial.status == "right"]
    other = [_row(trial) for trial in made.trials if trial.status != "right"]
    lines = [f' "{key}": {json.dumps(value, ensure_ascii=False)},' for key, value in head.items()]
    return "\n".join(
        ["{", *lines, f' "refused": {_lines(other)},', f' "measurements": {_lines(right)}', "}", ""]
    )


def _row(trial: Trial) -> dict[str, Any]:
    regime, configuration, timing = trial.regime, trial.candidate.configuration, trial.timing
    row: dict[str, Any] = {
        "batch": regime.batch,
        "heads": regime.heads,
        "tree_nodes": regime.nodes,
        "prefix": regime.prefix,
        **dataclasses.asdict(configuration),
        "deterministic": trial.candidate.deterministic,
        "same_launch": trial.same_launch,
    }
    if timing is None:
        return row | {"status": trial.status, "why": trial.why}
    return row | {
        "median_us": _us(trial),
        "p10_us": round(timing.p10_us, 2),
        "p90_us": round(timing.p90_us, 2),
    }


def _lines(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "[]"
    return "[\n" + ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in rows) + "\n ]"
