"""`kd bench kernel`: times of the kernels on one GPU, in one run, beside installed peers.

Nothing is timed before its output has been held against the oracle, and a wrong one has no time.
Each is timed by both methods of `kdtree_engine.timing`: rotated, as bars and figures of peers are
given, and cold, which is nearer to a call between other kernels. Every figure stands beside what
the same card reached in the same run with a copy and with a matrix product. What comes out is a
`Bench`, written to a file after each figure, so that what was measured outlives the machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from kdtree_engine.atomic import write_atomically
from kdtree_engine.attention import tree_verify_attention
from kdtree_engine.build import origin_of, require_current, sources_digest
from kdtree_engine.errors import ConfigError
from kdtree_engine.library import Kernels, built_in_tuning, library_path, using
from kdtree_engine.machine import Machine
from kdtree_engine.reference.tiny_mla import Attention
from kdtree_engine.timing import (
    Method,
    Tensors,
    Timing,
    WrongResult,
    copy_bandwidth,
    matmul_rate,
    time_operation,
)
from phases.checkout import Checkout
from phases.evidence import new_run_id, now
from phases.p5_tuning.checks import TARGETS
from phases.peers import PEERS, Operation, Peer, lack, make_inputs, problem_with_peer
from phases.regimes import Regime, draw, first_seed, problem_with, replays_for

__all__ = [
    "REGIMES",
    "Bench",
    "Measurement",
    "Tile",
    "bench_kernel",
    "bench_this_machine",
    "parse_regime",
    "parse_tile",
    "write_bench",
]

REGIMES = tuple(target.regime for target in TARGETS)
"""The twelve that have a time to reach."""
_TARGETS = {target.regime: target for target in TARGETS}
_ENVIRONMENT = ("KDTREE_WGMMA", "KDTREE_CHECK", "CUDA_VISIBLE_DEVICES")

_CUDA = torch.device("cuda")

Opener = Callable[[pathlib.Path], contextlib.AbstractContextManager[Kernels]]
Status = Literal["right", "wrong", "failed", "not installed"]


@dataclasses.dataclass(frozen=True)
class Tile:
    """A configuration that the library is made to take: packed rows, and tokens of a stage."""

    rows: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.tokens}"


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One implementation in one regime.

    implementation: a library's file, or a peer's name. tile: None for the built-in choice.
    status: `right` alone comes with a time; `why` says what else it is.
    mask: what it was given and judged by; a peer that takes no tree does a causal chain.
    median_us, p10_us, p90_us: microseconds of a call by the rotated method, `calls` calls a graph.
    cold_us, cold_p10_us, cold_p90_us: by the cold one, one call a graph.
    bytes_per_second: each latent row counted once. of_copy, of_product: the fractions of what a
        copy and a matrix product reached on the same card in the same run; all of the rotated time.
    must_us, aim_us: of plan 15, for an H200, where it names the regime.
    """

    implementation: str
    regime: Regime
    status: Status
    tile: Tile | None = None
    why: str | None = None
    mask: Literal["tree", "chain"] = "tree"
    calls: int | None = None
    median_us: float | None = None
    p10_us: float | None = None
    p90_us: float | None = None
    cold_us: float | None = None
    cold_p10_us: float | None = None
    cold_p90_us: float | None = None
    bytes_per_second: float | None = None
    flops_per_second: float | None = None
    of_copy: float | None = None
    of_product: float | None = None
    must_us: float | None = None
    aim_us: float | None = None


@dataclasses.dataclass
class Bench:
    """One run: on what, with what, and what came out. `write_bench` gives it its file."""

    device: str
    copy_bytes_per_second: float
    product_flops_per_second: float
    seed: int
    repeats: int
    libraries: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """By file: build_info, and what the build wrote beside it (the digest of csrc, nvcc)."""
    kernels: list[Measurement] = dataclasses.field(default_factory=list)
    peers: list[Measurement] = dataclasses.field(default_factory=list)
    run: str = dataclasses.field(default_factory=new_run_id)
    started: str = dataclasses.field(default_factory=lambda: now().isoformat())

    @property
    def right(self) -> bool:
        """Whether every kernel computed what it should, with every tile and in every regime."""
        return all(entry.status == "right" for entry in self.kernels)

    def ratio(self, peer: Measurement, kernel: Measurement) -> float | None:
        """How many times a peer's time is the kernel's, in one regime; above 1 the kernel wins."""
        if peer.regime != kernel.regime or peer.median_us is None or kernel.median_us is None:
            return None
        return peer.median_us / kernel.median_us


def parse_regime(text: str) -> Regime:
    """`B,H,T,L`: batch, heads, tree nodes, prefix. ConfigError for anything else."""
    parts = text.split(",")
    if len(parts) != 4 or not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(f"regime {text!r} is not B,H,T,L", remedy="as in --regime 1,8,9,16384")
    batch, heads, nodes, prefix = map(int, parts)
    if batch < 1 or heads < 1 or not 1 <= nodes <= 128:
        raise ConfigError(f"regime {text!r}: B and H are at least 1, T is 1 to 128")
    return Regime(batch, heads, nodes, prefix)


def parse_tile(text: str) -> Tile:
    """`ROWSxTOKENS`. ConfigError for anything else."""
    if not (found := re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})", text)):
        raise ConfigError(f"tile {text!r} is not ROWSxTOKENS", remedy="as in --tile 72x32")
    return Tile(int(found[1]), int(found[2]))


def bench_this_machine(
    libraries: Sequence[pathlib.Path],
    regimes: Sequence[Regime],
    tiles: Sequence[Tile | None],
    *,
    repeats: int,
    checkout: Checkout,
    machine: Machine,
    command: Sequence[str],
    progress: Callable[[int, int, str], None],
    device: torch.device = _CUDA,
    peers: Sequence[Peer] = PEERS,
    open_library: Opener = using,
) -> tuple[Bench, pathlib.Path]:
    """`bench_kernel` on this machine, and the file below its state folder that holds the outcome.

    libraries: none for the library that the operation uses, which csrc as it is must have made.
    """
    if not libraries:
        require_current(library_path())
    csrc, revision = sources_digest(), checkout.revision()

    def file(bench: Bench) -> pathlib.Path:
        return checkout.state / "bench" / f"{bench.run}.json"

    def keep(bench: Bench) -> None:
        write_bench(
            bench, file(bench), machine=machine, revision=revision, csrc=csrc, command=command
        )

    bench = bench_kernel(
        libraries or [library_path()],
        device=device,
        regimes=regimes,
        tiles=tiles,
        peers=peers,
        repeats=repeats,
        open_library=open_library,
        keep=keep,
        progress=progress,
    )
    return bench, file(bench)


def bench_kernel(
    libraries: Sequence[pathlib.Path],
    *,
    device: torch.device,
    regimes: Sequence[Regime] = REGIMES,
    tiles: Sequence[Tile | None] = (None,),
    peers: Sequence[Peer] = PEERS,
    repeats: int = 50,
    seed: int = 1,
    candidate: Attention = tree_verify_attention,
    open_library: Opener = using,
    keep: Callable[[Bench], None] = lambda bench: None,
    progress: Callable[[int, int, str], None] = lambda done, total, note: None,
) -> Bench:
    """Time each library with each tile, and each peer, in each regime.

    repeats: cold calls of each; rotated, half as many replays of a graph of several calls.
    keep: called with what there is after every figure. progress: before each.
    Raises MissingError, ConfigError where a library cannot be loaded or is named twice.
    """
    named: dict[str, pathlib.Path] = {}
    for path in libraries:
        named[_name(path, named)] = path
    bench = Bench(str(device), copy_bandwidth(device), matmul_rate(device), seed, repeats)
    total = len(regimes) * (len(libraries) * len(tiles) + len(peers))
    done = 0

    def note(what: str) -> None:
        nonlocal done
        progress(done, total, what)
        done += 1

    for name, path in named.items():
        with open_library(path) as library:
            bench.libraries[name] = {"build_info": str(library.build_info()), **origin_of(path)}
            for tile in tiles:
                for regime in regimes:
                    note(f"{name} {tile or 'automatic'} {regime}")
                    with _tuned(library, tile):
                        measured = _measure_kernel(bench, name, tile, regime, candidate)
                    bench.kernels.append(measured)
                    keep(bench)
    for peer in peers:
        missing = lack(peer)
        for regime in regimes:
            note(f"{peer.name} {regime}")
            if missing is not None:
                status, why = missing
                bench.peers.append(Measurement(peer.name, regime, status, why=why, mask=peer.mask))
            else:
                bench.peers.append(_measure_peer(bench, peer, regime))
            keep(bench)
    return bench


def write_bench(
    bench: Bench,
    path: pathlib.Path,
    *,
    machine: Machine,
    revision: tuple[str | None, bool | None],
    csrc: str,
    command: Sequence[str],
) -> None:
    """The whole of a bench as JSON. csrc: the digest of the checkout's CUDA sources."""
    commit, dirty = revision
    document = {
        "version": 2,
        "command": list(command),
        "revision": commit,
        "dirty": dirty,
        "csrc_sha256": csrc,
        "machine": machine.as_json(),
        "environment": {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        "methods": {
            "rotated": "several calls in one CUDA graph, each on inputs of its own, divided",
            "cold": "one call a CUDA graph, after other kernels",
            "both": "caches flushed, inputs never seen before, slots at random",
        },
        **dataclasses.asdict(bench),
    }
    write_atomically(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def _tuned(library: Kernels, tile: Tile | None) -> Iterator[None]:
    library.set_tuning(*((tile.rows, tile.tokens, 0) if tile else built_in_tuning()))
    try:
        yield
    finally:
        library.set_tuning(*built_in_tuning())


def _name(path: pathlib.Path, taken: Mapping[str, object]) -> str:
    """A library's file, with as much of its folder as it takes to tell it from others."""
    for depth in range(1, len(path.parts) + 1):
        name = "/".join(path.parts[-depth:])
        if name not in taken:
            return name
    raise ConfigError(f"library {path} is named twice")


def _measure_kernel(
    bench: Bench, name: str, tile: Tile | None, regime: Regime, candidate: Attention
) -> Measurement:
    target = _TARGETS.get(regime)
    empty = Measurement(
        name,
        regime,
        "right",
        tile,
        must_us=target.must_us if target else None,
        aim_us=target.aim_us if target else None,
    )

    def operation(*tensors: torch.Tensor) -> torch.Tensor:
        answer = candidate(*tensors, sm_scale=regime.sm_scale, max_nodes=regime.nodes)
        assert isinstance(answer, torch.Tensor)
        return answer

    def make(seed: int) -> Tensors:
        return draw(regime, seed, device=torch.device(bench.device), scattered=True)

    def check(inputs: Tensors, outputs: Tensors) -> str | None:
        return problem_with(inputs, outputs[0], regime.sm_scale)

    return _measured(bench, empty, make, lambda: operation, check)


def _measure_peer(bench: Bench, peer: Peer, regime: Regime) -> Measurement:
    device = torch.device(bench.device)
    return _measured(
        bench,
        Measurement(peer.name, regime, "right", mask=peer.mask),
        functools.partial(make_inputs, peer, regime, device=device),
        lambda: peer.make(peer.load(), regime),
        functools.partial(problem_with_peer, peer, regime),
    )


def _measured(
    bench: Bench,
    empty: Measurement,
    make: Callable[[int], Tensors],
    prepare: Callable[[], Operation],
    check: Callable[[Tensors, Tensors], str | None],
) -> Measurement:
    """`empty` with its status, and with its times where the outputs were right.

    prepare: gives what is timed; a peer's may fail at that.
    """
    regime, device = empty.regime, torch.device(bench.device)

    def time(method: Method, repeats: int) -> Timing:
        return time_operation(
            make,
            operation,
            device=device,
            check=check,
            method=method,
            repeats=repeats,
            seed=first_seed(bench.seed, method),
            floor_bytes=regime.floor_bytes,
            copy_bandwidth=bench.copy_bytes_per_second,
        )

    try:
        operation = prepare()
        inputs = make(first_seed(bench.seed, "cold") - 1)
        wrong = check(inputs, (operation(*inputs),))
        del inputs
        if wrong is not None:
            return dataclasses.replace(empty, status="wrong", why=wrong)
        timing = time("rotated", replays_for(bench.repeats))
        cold = time("cold", bench.repeats)
    except WrongResult as error:
        return dataclasses.replace(empty, status="wrong", why=str(error))
    except Exception as error:
        # A tile that the device cannot have, memory that is short, a peer of another version, or
        # what a compiler of kernels raises.
        return _failed(empty, error)
    seconds = timing.median_us * 1e-6
    return dataclasses.replace(
        empty,
        calls=timing.calls,
        median_us=timing.median_us,
        p10_us=timing.p10_us,
        p90_us=timing.p90_us,
        cold_us=cold.median_us,
        cold_p10_us=cold.p10_us,
        cold_p90_us=cold.p90_us,
        bytes_per_second=regime.floor_bytes / seconds,
        flops_per_second=regime.flops / seconds,
        of_copy=regime.floor_bytes / seconds / bench.copy_bytes_per_second,
        of_product=regime.flops / seconds / bench.product_flops_per_second,
    )


def _failed(empty: Measurement, error: Exception) -> Measurement:
    told = " ".join(str(error).split()) or "no message"
    return dataclasses.replace(empty, status="failed", why=f"{type(error).__name__}: {told}"[:400])
