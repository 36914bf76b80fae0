"""`kd bench serve`: decode speed of the live service, on the kernel and on Triton, trees and none.

All servers run in one run on one machine, one after the other, over the same model, prompts and
graph sizes. The tokens of each are held against those without speculation; a server with other
tokens has speeds all the same, and the run is not right. What comes out is a `ServeBench`, written
to a file after each figure, so that what was measured outlives the machine.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from kdtree_engine.atomic import write_atomically
from kdtree_engine.build import origin_of, require_current
from kdtree_engine.errors import KdError
from kdtree_engine.library import library_path
from kdtree_engine.machine import Machine
from phases.checkout import Checkout
from phases.evidence import new_run_id, now
from phases.service import serving
from phases.service_scale import GPU, Scale, Start, Variant, decoding, kernel, plain, triton
from phases.service_speed import (
    LAYERS,
    NEW_TOKENS,
    Served,
    differences,
    measure,
    ratio,
    speed_bound,
)
from phases.service_tokens import Difference

__all__ = ["COLUMNS", "ServeBench", "bench_serve", "rows", "variants"]

COLUMNS = (
    *("server", "context", "tok/s", "accepted", "ms a step"),
    *("times triton", "times plain", "tokens"),
)


@dataclasses.dataclass
class ServeBench:
    """One run. failed: what each server that could not be measured said, by its name.

    library: the kernel library's file and what the build wrote beside it: digest of csrc, nvcc.
    """

    scale: str
    seed: int
    nodes: int
    graphs: bool
    new_tokens: int
    lengths: tuple[int, ...]
    library: dict[str, Any] = dataclasses.field(default_factory=dict)
    served: dict[str, Served] = dataclasses.field(default_factory=dict)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    differences: dict[str, list[Difference]] = dataclasses.field(default_factory=dict)
    bound: float = 0.0
    run: str = dataclasses.field(default_factory=new_run_id)
    started: str = dataclasses.field(default_factory=lambda: now().isoformat())

    @property
    def right(self) -> bool:
        """Whether every server was measured, and differs from the reference in near-ties alone."""
        measured = [self.served.get(variant.name) for variant in variants(self.nodes)]
        every = [one for found in self.differences.values() for one in found]
        return (
            bool(self.lengths)
            and not self.failed
            and all(one is not None and all(map(one.at, self.lengths)) for one in measured)
            and all(one.near_tie for one in every)
        )

    def times(self, variant: Variant, other: Variant, length: int) -> float | None:
        """How many times as fast as `other`; None where one of them is missing."""
        ours, theirs = self.served.get(variant.name), self.served.get(other.name)
        return ratio(ours, theirs, length) if ours and theirs else None


def variants(nodes: int) -> tuple[Variant, ...]:
    """In the order in which they are served: what matters most first."""
    return kernel(nodes), plain(), triton(nodes), decoding()


def bench_serve(
    lengths: Sequence[int],
    *,
    checkout: Checkout,
    machine: Machine,
    command: Sequence[str],
    nodes: int = 9,
    graphs: bool = True,
    new_tokens: int = NEW_TOKENS,
    repeats: int | None = None,
    seed: int = 1,
    scale: Scale = GPU,
    start: Start = serving,
    progress: Callable[[int, int, str], None] = lambda done, total, note: None,
) -> tuple[ServeBench, pathlib.Path]:
    """Serve and time each variant; the outcome, and the file that holds it.

    A server that does not start or answer is on record with what it said, and the others are
    measured all the same. The servers' logs stay beside the file.

    Raises CompileError on a GPU where the kernel library is not what csrc as it is makes, and
    MissingError where there is none.
    """
    library: dict[str, Any] = {}
    if scale.device.type == "cuda":
        path = library_path()
        require_current(path)
        library = {"file": path.name, **origin_of(path)}
    bench = ServeBench(
        scale.name,
        seed,
        nodes,
        graphs,
        new_tokens,
        tuple(lengths),
        library,
        bound=speed_bound(scale),
    )
    file = checkout.state / "bench" / f"{bench.run}.json"
    revision = checkout.revision()
    chosen = variants(nodes)
    total, done = len(chosen) * (len(lengths) + 1), 0

    def note(what: str) -> None:
        nonlocal done
        progress(done, total, what)
        done += 1

    def keep(served: Served) -> None:
        bench.served[served.variant.name] = served
        _compare(bench)
        document = _document(bench, machine=machine, revision=revision, command=command)
        write_atomically(file, json.dumps(document, indent=1, ensure_ascii=False) + "\n")

    logs = file.with_suffix("")
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kd-serve-") as scratch:
        folder = pathlib.Path(scratch)
        for number, variant in enumerate(chosen):
            done = number * (len(lengths) + 1)
            try:
                measure(
                    scale,
                    variant,
                    folder=folder,
                    seed=seed,
                    graphs=graphs,
                    lengths=lengths,
                    start=start,
                    new_tokens=new_tokens,
                    repeats=repeats,
                    keep=keep,
                    note=note,
                )
            except KdError as error:
                bench.failed[variant.name] = str(error)
                note(f"{variant.name}: failed")
            for log in folder.glob("*.log"):
                (logs / log.name).write_bytes(log.read_bytes())
    document = _document(bench, machine=machine, revision=revision, command=command)
    write_atomically(file, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    return bench, file


def rows(bench: ServeBench) -> list[tuple[str, ...]]:
    """A row for each server and length; the last column: how many tokens equal the reference's."""
    found = []
    for name, served in bench.served.items():
        for speed in served.speeds:
            against = [
                bench.times(served.variant, other, speed.length)
                for other in (triton(bench.nodes), plain())
            ]
            found.append(
                (
                    name,
                    str(speed.length),
                    f"{speed.tokens_per_second:.0f}",
                    f"{speed.accept_length:.2f}" if speed.accept_length else "",
                    f"{1e3 * speed.step_seconds:.2f}" if speed.step_seconds else "",
                    *("" if times is None else f"{times:.2f}" for times in against),
                    _verdict(bench, name, speed.length),
                )
            )
    # The last line of what a server said is the nearest to a reason.
    found += [(name, "", "failed", "", "", "", "", said) for name, said in _reasons(bench)]
    return found


def _reasons(bench: ServeBench) -> list[tuple[str, str]]:
    return [
        (name, (said.strip() or "no message").splitlines()[-1])
        for name, said in bench.failed.items()
    ]


def _verdict(bench: ServeBench, name: str, length: int) -> str:
    if plain().name not in bench.served:
        return "not compared"
    places = (f"{name} L={length}", f"{name} L={length} timed")
    found = [one for one in bench.differences.get(name, ()) if one.where in places]
    if not found:
        return "equal"
    one = min(found, key=lambda one: one.near_tie)  # the first that is wrong, else the first
    return f"{'near-tie' if one.near_tie else 'differs'} at {one.step}"


def _compare(bench: ServeBench) -> None:
    """Each server's answers against the reference's, as far as both are there."""
    reference = bench.served.get(plain().name)
    if reference is None:
        return
    bench.differences = {
        name: differences(served, reference, bench.bound)
        for name, served in bench.served.items()
        if served is not reference
    }


def _document(
    bench: ServeBench,
    *,
    machine: Machine,
    revision: tuple[str | None, bool | None],
    command: Sequence[str],
) -> dict[str, Any]:
    commit, dirty = revision
    lengths = dict.fromkeys(one.length for served in bench.served.values() for one in served.speeds)
    ours = kernel(bench.nodes)
    return {
        "version": 3,
        "run": bench.run,
        "started": bench.started,
        "command": list(command),
        "revision": commit,
        "dirty": dirty,
        "machine": machine.as_json(),
        "library": bench.library,
        "environment": {name: os.environ[name] for name in os.environ if name[:7] == "KDTREE_"},
        "scale": bench.scale,
        "seed": bench.seed,
        "layers": LAYERS,
        "nodes": bench.nodes,
        "graphs": bench.graphs,
        "new_tokens": bench.new_tokens,
        "right": bench.right,
        "near_tie_bound": bench.bound,
        "servers": [
            {
                "name": name,
                "arguments": list(served.variant.arguments),
                "start_seconds": served.start_seconds,
                "capture_seconds": served.capture.seconds,
                "capture_bytes": served.capture.memory_bytes,
                "graph_bytes": served.graph_bytes,
                "speeds": [
                    {
                        "length": one.length,
                        "tokens_per_second": one.tokens_per_second,
                        "accept_length": one.accept_length,
                        "step_us": 1e6 * one.step_seconds,
                    }
                    for one in served.speeds
                ],
                "differences": [dataclasses.asdict(one) for one in bench.differences.get(name, ())],
            }
            for name, served in bench.served.items()
        ],
        "times": [
            {
                "length": length,
                "triton": bench.times(ours, triton(bench.nodes), length),
                "plain": bench.times(ours, plain(), length),
            }
            for length in lengths
        ],
        "failed": bench.failed,
    }
