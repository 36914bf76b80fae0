"""`kd bench kernel`, dry: on the CPU, with libraries that only note which tile was asked for."""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tasks
from kdtree_engine.attention import tree_verify_attention
from kdtree_engine.build import sources_digest
from kdtree_engine.errors import ConfigError, MissingError
from kdtree_engine.machine import Machine
from phases import bench as bench_module
from phases.bench import (
    REGIMES,
    Bench,
    Measurement,
    Tile,
    bench_kernel,
    bench_this_machine,
    parse_regime,
    parse_tile,
    write_bench,
)
from phases.bench_table import COLUMNS, bench_rows, ceilings
from phases.checkout import Checkout
from phases.peers import PEERS, Peer
from phases.regimes import Regime

pytestmark = pytest.mark.usefixtures("small_cpu_cache")
CPU = torch.device("cpu")
SMALL = Regime(1, 8, 3, 100)
OTHER = Regime(2, 8, 2, 40)
LIBRARY = pathlib.Path("somewhere/libkdtree_engine.so")
MACHINE = Machine(
    hostname="here", system="Linux", python="3.11", torch="2.9", cuda=None, driver=None, gpus=(),
    nvcc=None, compute_sanitizer=None, sglang=None, ssh=None, rsync=None,
)  # fmt: skip


class Asked:
    """Stands for a library: `asked` is every tuning that it was told."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    @contextlib.contextmanager
    def open(self, path: pathlib.Path) -> Iterator[Any]:
        yield types.SimpleNamespace(
            build_info=lambda: f"of {path.name}",
            set_tuning=lambda *tile: self.asked.append(tile),
        )


@pytest.fixture(autouse=True)
def known_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine can do, said instead of measured: every test here would wait for that."""
    monkeypatch.setattr(bench_module, "copy_bandwidth", lambda device: 1e12)
    monkeypatch.setattr(bench_module, "matmul_rate", lambda device: 1e12)


def run(**changed: Any) -> Bench:
    options: dict[str, Any] = {
        "device": CPU,
        "regimes": [SMALL],
        "peers": (),
        "repeats": 3,
        "open_library": Asked().open,
    }
    return bench_kernel([LIBRARY], **options | changed)


def test_a_right_kernel_has_times_and_shares_of_what_the_machine_reached() -> None:
    bench = run()
    (entry,) = bench.kernels
    assert (entry.status, entry.implementation, entry.tile) == ("right", LIBRARY.name, None)
    assert entry.median_us is not None
    assert entry.cold_us is not None
    assert entry.calls is not None
    assert entry.calls >= 4
    assert entry.mask == "tree"
    assert entry.of_copy == pytest.approx(SMALL.floor_bytes / entry.median_us / 1e6)
    assert entry.of_product == pytest.approx(SMALL.flops / entry.median_us / 1e6)
    assert entry.must_us is None, "not one of the twelve"
    assert bench.right
    assert bench.libraries == {LIBRARY.name: {"build_info": f"of {LIBRARY.name}"}}


def test_a_wrong_kernel_has_no_time() -> None:
    def wrong(*tensors: Any, **options: Any) -> Any:
        return 1.1 * tree_verify_attention(*tensors, **options)  # type: ignore[operator]

    bench = run(candidate=wrong)
    (entry,) = bench.kernels
    assert entry.status == "wrong"
    assert entry.why is not None
    assert "relative error" in entry.why
    assert entry.median_us is None
    assert not bench.right
    assert bench_rows(bench)[0][3] == "wrong"


def test_a_kernel_that_ignores_the_mask_is_wrong() -> None:
    def chain(*tensors: Any, **options: Any) -> Any:
        return tree_verify_attention(*tensors[:6], **options)

    (entry,) = run(candidate=chain, regimes=[Regime(1, 8, 9, 50)]).kernels
    assert entry.status == "wrong"


def test_a_kernel_that_turns_wrong_under_the_clock_has_no_time() -> None:
    calls = 0

    def later(*tensors: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        out = tree_verify_attention(*tensors, **options)
        assert isinstance(out, torch.Tensor)
        return out if calls == 1 else out * 2

    (entry,) = run(candidate=later).kernels
    assert (entry.status, entry.median_us) == ("wrong", None)


def test_every_library_tile_and_regime_is_measured_and_kept_at_once() -> None:
    library, kept, said = Asked(), [], []
    bench = bench_kernel(
        [pathlib.Path("a/lib.so"), pathlib.Path("b/lib.so")],
        device=CPU,
        regimes=[SMALL, OTHER],
        tiles=[None, Tile(72, 64)],
        peers=(),
        repeats=3,
        open_library=library.open,
        keep=lambda bench: kept.append(len(bench.kernels)),
        progress=lambda done, total, note: said.append((done, total, note)),
    )
    assert [(entry.implementation, entry.tile, entry.regime) for entry in bench.kernels] == [
        (name, tile, regime)
        for name in ("lib.so", "b/lib.so")
        for tile in (None, Tile(72, 64))
        for regime in (SMALL, OTHER)
    ]
    assert kept == list(range(1, 9))
    assert said[0] == (0, 8, f"lib.so automatic {SMALL}")
    # Each is asked for before its call, and taken back after it.
    assert library.asked[:8] == [(0, 0, 0)] * 4 + [(72, 64, 0), (0, 0, 0)] * 2


def test_a_library_is_named_once() -> None:
    with pytest.raises(ConfigError, match=r"lib\.so is named twice"):
        bench_kernel([pathlib.Path("lib.so")] * 2, device=CPU, open_library=Asked().open)


def test_a_tile_that_cannot_be_had_is_failed_and_the_rest_goes_on() -> None:
    def refused(*tensors: Any, **options: Any) -> Any:
        if tensors[0].shape[0] == SMALL.nodes:
            raise RuntimeError("the tile that was asked for cannot be launched")
        return tree_verify_attention(*tensors, **options)

    first, second = run(candidate=refused, regimes=[SMALL, OTHER]).kernels
    assert first.status == "failed"
    assert first.why == "RuntimeError: the tile that was asked for cannot be launched"
    assert second.status == "right"


def installed() -> None:
    """Of a peer that is there, and needs nothing of what was imported."""


def absent() -> None:
    import no_such_module.at_all  # noqa: F401


def chain(loaded: None, regime: Regime, factor: float = 1.0) -> Any:
    def operation(*tensors: torch.Tensor) -> torch.Tensor:
        out = tree_verify_attention(*tensors[:6], sm_scale=regime.sm_scale)
        assert isinstance(out, torch.Tensor)
        return out * factor

    return operation


def tree(loaded: None, regime: Regime) -> Any:
    def operation(*tensors: torch.Tensor) -> torch.Tensor:
        out = tree_verify_attention(*tensors[:8], sm_scale=regime.sm_scale)
        assert isinstance(out, torch.Tensor)
        return out

    return operation


def refusing(loaded: None, regime: Regime) -> Any:
    raise NotImplementedError(f"{regime} is\nnot for me")


def test_peers_are_run_where_they_are_and_never_invented() -> None:
    regime = Regime(2, 8, 9, 40)  # of trees that are no chains
    peers = (
        Peer("here", installed, chain),
        Peer("a tree's", installed, tree, tree=True),
        Peer("wrong", installed, functools.partial(chain, factor=1.5)),
        Peer("a chain's for a tree", installed, chain, tree=True),
        Peer("refuses", installed, refusing),
        Peer("absent", absent, chain),
    )
    bench = run(peers=peers, regimes=[regime])
    assert {entry.implementation: entry.status for entry in bench.peers} == {
        "here": "right",
        "a tree's": "right",
        "wrong": "wrong",
        "a chain's for a tree": "wrong",
        "refuses": "failed",
        "absent": "not installed",
    }
    (kernel,), (here, with_tree, *others) = bench.kernels, bench.peers
    assert here.median_us is not None
    assert here.cold_us is not None
    assert kernel.median_us is not None
    assert bench.ratio(here, kernel) == here.median_us / kernel.median_us
    assert [here.mask, with_tree.mask] == ["chain", "tree"]
    assert all(entry.median_us is None for entry in others)
    table = {row[0]: row for row in bench_rows(bench)}
    assert table["here"][-1] == f"{here.median_us / kernel.median_us:.2f}x"
    assert [table[name][1] for name in ("here", "a tree's")] == ["chain", "tree"]
    assert table["wrong"][3] == "wrong"
    assert table["refuses"][3] == f"failed: NotImplementedError: {regime} is not for me"
    assert table["absent"][3] == "not installed"
    assert all(len(row) == len(COLUMNS) for row in table.values())


def test_the_result_file_says_on_what_and_with_what(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDTREE_WGMMA", "1")
    path = tmp_path / "bench" / "one.json"
    bench = run(tiles=[Tile(72, 64)])
    write_bench(
        bench, path, machine=MACHINE, revision=("abc", True), csrc="f" * 64, command=["kd", "bench"]
    )
    document = json.loads(path.read_text())
    assert document["machine"]["hostname"] == "here"
    assert (document["revision"], document["dirty"]) == ("abc", True)
    assert document["csrc_sha256"] == "f" * 64
    assert document["environment"]["KDTREE_WGMMA"] == "1"
    assert document["run"] == bench.run
    (entry,) = document["kernels"]
    assert entry["tile"] == {"rows": 72, "tokens": 64}
    assert entry["regime"] == {"batch": 1, "heads": 8, "nodes": 3, "prefix": 100}
    assert entry["median_us"] > 0
    assert entry["cold_us"] > 0
    assert document["methods"].keys() == {"rotated", "cold", "both"}


def test_the_file_lies_below_the_state_folder(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    bench, file = bench_this_machine(
        [LIBRARY],
        [SMALL],
        [None],
        repeats=3,
        checkout=Checkout(root, tmp_path),
        machine=MACHINE,
        command=["kd", "bench", "kernel"],
        progress=lambda done, total, note: None,
        device=CPU,
        peers=PEERS[:1],
        open_library=Asked().open,
    )
    assert file == tmp_path / "bench" / f"{bench.run}.json"
    document = json.loads(file.read_text())
    assert document["csrc_sha256"] == sources_digest()
    assert [len(document[part]) for part in ("kernels", "peers")] == [1, 1]


def test_without_a_gpu_the_command_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_this_machine", lambda: MACHINE)
    with pytest.raises(MissingError, match="no CUDA GPU"):
        tasks.cli.main(["bench", "kernel"], prog_name="kd", standalone_mode=False)


def test_a_regime_of_the_plan_shows_what_it_must_reach() -> None:
    regime = REGIMES[1]
    entry = Measurement(
        "lib.so", regime, "right", median_us=24.5, cold_us=51.25, of_copy=0.18, of_product=0.13,
        must_us=28, aim_us=16,
    )  # fmt: skip
    bench = Bench("cuda", 4.28e12, 790e12, 1, 50, kernels=[entry])
    assert bench_rows(bench) == [
        ("lib.so", "automatic", str(regime), "24.5", "51.2", "0.18", "0.13", "28", "16", "")
    ]
    assert ceilings(bench) == "copy 4.28 TB/s, matrix product 790 TFLOP/s"
    assert len(REGIMES) == 12


@pytest.mark.parametrize(
    "text", ["", "1,8,9", "1,8,9,4k", "0,8,9,4096", "1,8,129,4096", "1,8,-9,4"]
)
def test_what_is_no_regime_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="regime"):
        parse_regime(text)


@pytest.mark.parametrize("text", ["", "72", "72x", "0x32", "72x32x1", "72*32"])
def test_what_is_no_tile_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="is not ROWSxTOKENS"):
        parse_tile(text)


def test_what_a_person_types_is_read() -> None:
    assert parse_regime("16,8,9,16384") == Regime(16, 8, 9, 16_384)
    assert str(parse_tile("72x64")) == "72x64"
