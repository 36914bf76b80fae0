"""The gate `tuning-table`: the tables of the package pass it, and each way to be wrong does not."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from kdtree_engine.build import CSRC, BuildReport, sources_digest
from kdtree_engine.errors import ConfigError
from kdtree_engine.library import load
from kdtree_engine.resources import SHARED_LIMIT_BYTES
from kdtree_engine.tuning import TABLES
from phases.gate import Context, FailureKind, GateFailure
from phases.p5_tuning import table
from phases.p5_tuning.table import tuning_table
from phases.p5_tuning.tiles import CompiledTile, declared_tiles, library_tiles

NOWHERE = pathlib.Path("no", "library.so")


@pytest.fixture
def ctx(tmp_path: pathlib.Path) -> Context:
    return Context(seed=1, scratch=tmp_path)


@pytest.fixture
def tables(tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of the package's tables, to be spoiled."""
    return pathlib.Path(shutil.copytree(TABLES, tmp_path / "tables"))


def spoil(path: pathlib.Path, change: Callable[[dict[str, Any]], None]) -> None:
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))


def entry(fields: dict[str, Any], number: int, body: str = "mma") -> dict[str, Any]:
    found = fields["bodies"][body]["entries"][number]
    assert isinstance(found, dict)
    return found


def test_the_tables_of_the_package_pass(ctx: Context) -> None:
    figures = {figure.name: figure.value for figure in tuning_table(ctx)}
    assert figures["architectures"] == 4
    written = "".join(path.read_text() for path in TABLES.glob("*.json"))
    assert figures["of them measured"] == written.count('"measured":') > 0
    # All of sm_90's twelve regimes go by an entry with times of its own, and no other part's.
    assert figures["regimes by a measured entry, of all architectures"] == 12


def test_a_gpu_that_no_machine_code_is_for_may_have_a_table_too(
    ctx: Context, tables: pathlib.Path
) -> None:
    spoil(tables / "sm_120.json", lambda fields: fields.update(architecture="sm_86"))
    (tables / "sm_120.json").rename(tables / "sm_86.json")
    shutil.copy(TABLES / "sm_120.json", tables)
    figures = {figure.name: figure.value for figure in tuning_table(ctx, tables=tables)}
    assert figures["architectures"] == 5


def test_a_missing_table_is_named(ctx: Context, tables: pathlib.Path) -> None:
    (tables / "sm_89.json").unlink()
    with pytest.raises(GateFailure, match=r"sm_89\.json: cannot be read") as caught:
        tuning_table(ctx, tables=tables)
    assert caught.value.kind is FailureKind.SHAPE


def test_tiles_that_are_not_compiled_for_a_part_are_refused(
    ctx: Context, tables: pathlib.Path
) -> None:
    spoil(tables / "sm_120.json", lambda fields: entry(fields, 0).update(block_tokens=32))
    with pytest.raises(GateFailure, match=r"sm_120 mma .*: no tile 16x32 is compiled .* 24x16"):
        tuning_table(ctx, tables=tables, library=NOWHERE)


def test_a_tile_belongs_to_its_body(ctx: Context, tables: pathlib.Path) -> None:
    spoil(tables / "sm_90.json", lambda fields: entry(fields, 1).update(block_tokens=64))
    with pytest.raises(GateFailure, match=r"24x64/\d is not one of mma's tiles"):
        tuning_table(ctx, tables=tables)


def test_a_tile_that_a_block_has_no_room_for_is_refused(ctx: Context) -> None:
    tiles = declared_tiles()
    tiles["sm_120"] = [CompiledTile(16, tile.row_tile, 101_377) for tile in tiles["sm_120"]]
    with pytest.raises(GateFailure, match=r"sm_120 .*101377 bytes .* a block gets 101376"):
        tuning_table(ctx, tiles=tiles, library=NOWHERE)


def other_time(fields: dict[str, Any]) -> None:
    entry(fields, 3)["measured"]["times"][0]["us"] -= 1.0


def other_least_count(fields: dict[str, Any]) -> None:
    entry(fields, 3)["min_blocks"] = 4


def other_tile(fields: dict[str, Any]) -> None:
    entry(fields, 3)["row_tile"] = 24


def other_gpu(fields: dict[str, Any]) -> None:
    entry(fields, 3)["measured"]["gpu"] = "NVIDIA H100"


def no_record(fields: dict[str, Any]) -> None:
    entry(fields, 3)["measured"]["record"] = "plans/evidence/kernel-versions/none.json"


def no_such_rows(fields: dict[str, Any]) -> None:
    first, second = entry(fields, 3)["measured"], entry(fields, 4)["measured"]
    first["times"].append(second["times"][0])


def times_of_default_mode(fields: dict[str, Any]) -> None:
    body = fields["bodies"]["mma"]
    body["deterministic"] = {"row_tile": 72, "block_tokens": 32, "min_blocks": 0} | {
        "measured": entry(fields, 3)["measured"]
    }


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_time, r"L=4096 in [0-9.]+ us with 72x32/\d is not in plans/evidence"),
        (other_least_count, r"L=4096 in [0-9.]+ us with 72x32/4 is not in plans/evidence"),
        (other_tile, r"L=4096 in [0-9.]+ us with 24x32/\d is not in plans/evidence"),
        (other_gpu, r"\.json is of NVIDIA H200, not of NVIDIA H100"),
        (no_record, "record plans/evidence/kernel-versions/none.json cannot be read"),
        (no_such_rows, r"was measured, and the table sends it to entry for 72 rows and batch None"),
        (times_of_default_mode, "with 72x32/0 is not in plans/evidence"),
    ],
)
def test_what_is_called_measured_stands_in_the_record(
    ctx: Context, tables: pathlib.Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    spoil(tables / "sm_90.json", change)
    with pytest.raises(GateFailure, match=said):
        tuning_table(ctx, tables=tables, library=NOWHERE)


def test_a_library_that_has_other_tiles_than_its_sources_is_refused(
    ctx: Context, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    library = tmp_path / "lib.so"
    library.touch()
    library.with_suffix(".json").write_text(json.dumps({"sources": sources_digest()}))
    few = '[{"row_tile": 16, "block_tokens": 16, "shared_bytes": 84272}]'

    class Fake:
        compiled_tiles = staticmethod(lambda capability, limit: few)

    monkeypatch.setattr(table, "load", lambda path: Fake)
    with pytest.raises(GateFailure, match=r"sm_80: the library has tiles \['16x16'\]"):
        tuning_table(ctx, library=library)


def test_the_sources_declare_what_the_plan_says() -> None:
    tiles = declared_tiles()
    short = [(tile.row_tile, tile.block_tokens) for tile in tiles["sm_120"]]
    assert short == [(16, 16), (24, 16), (32, 16)]
    assert tiles["sm_80"] == tiles["sm_89"] == tiles["sm_120"]
    assert len(tiles["sm_90"]) == 11
    for architecture, some in tiles.items():
        assert all(tile.shared_bytes <= SHARED_LIMIT_BYTES[architecture] for tile in some)


def test_sources_that_read_otherwise_are_not_guessed_at(tmp_path: pathlib.Path) -> None:
    csrc = pathlib.Path(shutil.copytree(CSRC, tmp_path / "csrc"))
    launch = csrc / "launch.cu"
    launch.write_text(launch.read_text().replace("entry<Wg72>", "row<Wg72>"))
    with pytest.raises(ConfigError, match=r"do not name the same tiles"):
        declared_tiles(csrc)


@pytest.mark.slow
def test_a_library_says_the_same_of_itself(built: BuildReport) -> None:
    """What a compiler made of the sources: no GPU is needed to ask it."""
    asked, declared = library_tiles(load(built.library).compiled_tiles), declared_tiles()
    for architecture, tiles in asked.items():
        pairs = list(zip(tiles, declared[architecture], strict=True))
        assert all(
            (tile.row_tile, tile.block_tokens) == (said.row_tile, said.block_tokens)
            and tile.shared_bytes <= said.shared_bytes
            for tile, said in pairs
        )
