"""The gate that reads the tuning tables: whole, possible, and honest about what was measured."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from kdtree_engine import tuning
from kdtree_engine.build import ARCHITECTURES, CSRC, origin_of, sources_digest
from kdtree_engine.errors import ConfigError, KdError
from kdtree_engine.library import PACKAGED_LIBRARY, WGMMA_BLOCK_TOKENS, load
from kdtree_engine.resources import SHARED_LIMIT_BYTES
from kdtree_engine.tuning import Configuration, Entry, Measured, Table, TimedRegime
from phases.checkout import find_checkout
from phases.gate import Context, FailureKind, Figure, GateFailure, Unit
from phases.p5_tuning.checks import TARGETS
from phases.p5_tuning.tiles import CompiledTile, declared_tiles, library_tiles
from phases.regimes import Regime

__all__ = ["tuning_table"]

_ROUNDING_US = 0.005


def tuning_table(
    ctx: Context,
    *,
    tables: pathlib.Path = tuning.TABLES,
    root: pathlib.Path | None = None,
    library: pathlib.Path = PACKAGED_LIBRARY,
    tiles: dict[str, list[CompiledTile]] | None = None,
) -> list[Figure]:
    """Every built architecture has a table that covers every regime with tiles that it can run.

    What an entry calls measured must stand in the record that it names: the same tile, regime and
    time, on the same GPU. Where a library was built from csrc as it is, its tiles must be those
    that the sources declare; elsewhere the sources alone say what is compiled.
    """
    root = root or find_checkout().root
    found = [_table(tables / f"{architecture}.json") for architecture in ARCHITECTURES]
    for stray in sorted(path.stem for path in tables.glob("*.json")):
        if stray not in ARCHITECTURES:  # kd tune writes one for a GPU that no machine code is for
            found.append(_table(tables / f"{stray}.json"))
    declared = tiles or declared_tiles()
    asked = _agreeing(declared, library)
    measured = regimes = entries = 0
    for table in found:
        compiled = asked.get(table.architecture) or declared.get(table.architecture)
        for body, entry in table.everything():
            place = f"{table.architecture} {body} {_name(entry)}"
            entries += 1
            if compiled is not None:
                _possible(place, table.architecture, body, entry.configuration, compiled)
            if isinstance(entry.provenance, Measured):
                measured += 1
                deterministic = entry is table.bodies[body].deterministic
                _on_record(place, entry.configuration, entry.provenance, root, deterministic)
                _in_its_place(place, table, body, entry, entry.provenance)
        chosen = table.bodies[table.body]
        for target in TARGETS:
            regime = target.regime
            entry = chosen.entry(regime.heads * regime.nodes, regime.batch, deterministic=False)
            regimes += entry.measured
    return [
        Figure("entries", entries, Unit.COUNT),
        Figure("of them measured", measured, Unit.COUNT),
        Figure("architectures", len(found), Unit.COUNT),
        Figure("regimes by a measured entry, of all architectures", regimes, Unit.COUNT),
        Figure("architectures whose tiles a library was asked for", len(asked), Unit.COUNT),
    ]


def _table(path: pathlib.Path) -> Table:
    try:
        return tuning.load_table(path)
    except ConfigError as error:
        raise GateFailure(FailureKind.SHAPE, str(error)) from error


def _name(entry: Entry) -> str:
    if entry.rows_up_to is None and entry.batch_up_to is None:
        return f"entry {entry.configuration} without limits"
    return f"entry for {entry.rows_up_to} rows and batch {entry.batch_up_to}"


def _agreeing(
    declared: dict[str, list[CompiledTile]], library: pathlib.Path
) -> dict[str, list[CompiledTile]]:
    """What a library built from these sources says, by architecture; {} where there is none.

    One that cannot be loaded here (no loader, say) is no reason to fail: the sources have spoken.
    """
    if not library.is_file() or origin_of(library).get("sources") != sources_digest(CSRC):
        return {}
    try:
        asked = library_tiles(load(library).compiled_tiles)
    except KdError:
        return {}
    for architecture, compiled in asked.items():
        if _bare(compiled) != _bare(declared[architecture]):
            raise GateFailure(
                FailureKind.COMPILE,
                f"{architecture}: the library has tiles {_bare(compiled)}, the sources declare "
                f"{_bare(declared[architecture])}",
            )
    return asked


def _bare(tiles: Sequence[CompiledTile]) -> list[str]:
    return [f"{tile.row_tile}x{tile.block_tokens}" for tile in tiles]


def _possible(
    place: str,
    architecture: str,
    body: str,
    wanted: Configuration,
    compiled: Sequence[CompiledTile],
) -> None:
    """The tile is compiled for the architecture, is the body's, and a block has room for it."""
    if (body == "wgmma") != (wanted.block_tokens == WGMMA_BLOCK_TOKENS):
        raise GateFailure(FailureKind.SHAPE, f"{place}: {wanted} is not one of {body}'s tiles")
    same = [
        tile
        for tile in compiled
        if (tile.row_tile, tile.block_tokens) == (wanted.row_tile, wanted.block_tokens)
    ]
    if not same:
        raise GateFailure(
            FailureKind.SHAPE,
            f"{place}: no tile {wanted.row_tile}x{wanted.block_tokens} is compiled for it, only "
            + ", ".join(_bare(compiled)),
        )
    limit = SHARED_LIMIT_BYTES[architecture]
    if same[0].shared_bytes > limit:
        raise GateFailure(
            FailureKind.SHAPE,
            f"{place}: {same[0].shared_bytes} bytes of shared memory, a block gets {limit}",
        )


def _on_record(
    place: str,
    configuration: Configuration,
    provenance: Measured,
    root: pathlib.Path,
    deterministic: bool,
) -> None:
    path = root / provenance.record
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        gpu, rows = str(document["gpu"]), list(document["measurements"])
        rows = [row for row in rows if row["deterministic"] is deterministic]
        missing = [time for time in provenance.times if not _stands(configuration, time, rows)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise GateFailure(
            FailureKind.SHAPE, f"{place}: record {provenance.record} cannot be read: {error!r}"
        ) from error
    if gpu != provenance.gpu:
        raise GateFailure(
            FailureKind.SHAPE, f"{place}: {provenance.record} is of {gpu}, not of {provenance.gpu}"
        )
    if missing:
        raise GateFailure(
            FailureKind.NUMERICAL,
            f"{place}: {_regime(missing[0])} in {missing[0].us} us with {configuration} is not in "
            f"{provenance.record}",
        )


def _stands(
    configuration: Configuration, time: TimedRegime, rows: Sequence[dict[str, Any]]
) -> bool:
    """Whether a record has this time; a least count of stages that it lost (null) is not held."""
    return any(
        (row["batch"], row["heads"], row["tree_nodes"], row["prefix"])
        == (time.batch, time.heads, time.nodes, time.prefix)
        and (row["row_tile"], row["block_tokens"])
        == (configuration.row_tile, configuration.block_tokens)
        and row["min_blocks"] in (None, configuration.min_blocks)
        and abs(row["median_us"] - time.us) < _ROUNDING_US
        for row in rows
    )


def _in_its_place(place: str, table: Table, body: str, entry: Entry, provenance: Measured) -> None:
    """What was measured for an entry is of launches that the table sends there."""
    if entry is table.bodies[body].deterministic:
        return  # every launch of that mode goes there
    for time in provenance.times:
        rows = time.heads * time.nodes
        goes = table.bodies[body].entry(rows, time.batch, deterministic=False)
        if goes is not entry:
            raise GateFailure(
                FailureKind.SHAPE,
                f"{place}: {_regime(time)} was measured, and the table sends it to {_name(goes)}",
            )


def _regime(time: TimedRegime) -> Regime:
    return Regime(time.batch, time.heads, time.nodes, time.prefix)
