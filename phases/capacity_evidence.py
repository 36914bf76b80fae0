"""What `kd plan-capacity` is calibrated by: kept times of the kernel, and kept steps of a service.

    attention of the GPU that was measured: the gate `kernel-regimes`, cold times; held out are the
        regimes of `kd tune`'s sweep that the gate has not
    attention of other architectures: the same sweep, with the tiles that their tables take
    the host: steps of a model of four layers; the shortest context of `kd bench serve` is fitted,
        its longer ones and another run are held out

Cold times, as in a step other kernels run before each call. A GPU that is measured later is added
to the names below.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from kdtree_engine.capacity.attention import AttentionFit, Regime, error_of, fit_attention, tile_of
from kdtree_engine.capacity.calibration import Checked, MeasuredStep, checked, fit_host
from kdtree_engine.capacity.shapes import ModelShape
from kdtree_engine.capacity.step import Host, Load, Service, components_without_host
from kdtree_engine.errors import ConfigError, MissingError
from kdtree_engine.gpus import GPUS, LINKS, Gpu
from kdtree_engine.moe.costs import BYTES_PER_WEIGHT
from kdtree_engine.tuning import TimedRegime
from phases.evidence import load_record
from phases.service_scale import GPU as SCALE
from phases.service_speed import LAYERS

__all__ = ["SERVED", "Calibration", "CheckedRegime", "calibrate"]

KERNEL = "h200-phase-5.json"
SWEEP = "tuning/sm_90-20261129T205454Z-4ac243.json"
SERVE = "serve/h200-sglang-0.5.17-graphs.json"
ALONE = "serve/h200-sglang-0.5.17-alone.txt"

TREES, PLAIN = "trees", "no speculation"

_COLD = re.compile(r"B=(\d+) H=(\d+) T=(\d+) L=(\d+), cold")
_ROW = re.compile(r"(\d+) (\d+) (\S+) (\S+) (\S+)")

SERVED = ModelShape(
    name="four layers",
    layers=LAYERS,
    dense_layers=LAYERS,
    hidden=1024,
    intermediate=2048,
    heads=8,
    query_rank=0,
    nope=128,
    value=128,
    vocabulary=SCALE.vocabulary,
    positions=262144,
)
"""The model whose steps are kept: `phases.small_model.write_service_model`."""

_Answer = TypeVar("_Answer")


@dataclasses.dataclass(frozen=True)
class CheckedRegime:
    """A measured time of the kernel beside what the fit says of it."""

    source: str
    timed: TimedRegime
    error: float
    fitted: bool


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What was fitted, and how far it is off each of the kept figures."""

    attention: AttentionFit
    host: Host
    regimes: list[CheckedRegime]
    steps: list[Checked]

    def worst(self, *, fitted: bool) -> tuple[float, float]:
        """The largest errors, by size, of regimes and of steps."""
        return (
            max((abs(one.error) for one in self.regimes if one.fitted == fitted), default=0.0),
            max((abs(one.error) for one in self.steps if one.step.fitted == fitted), default=0.0),
        )


def calibrate(folder: pathlib.Path, gpu: Gpu) -> Calibration:
    """From the kept evidence in `folder`, for services on `gpu`.

    Raises MissingError where a file is not there, and ConfigError where it is not what it was.
    """
    fit, regimes = _attention(folder, gpu.architecture)
    served, nodes, steps = _kept(folder / SERVE, _steps)
    own, _ = _attention(folder, served.architecture)
    steps += [MeasuredStep(TREES, ALONE, *one) for one in _kept(folder / ALONE, _alone(nodes))]
    found, shares = list[Checked](), dict[str, float]()
    for way in (TREES, PLAIN):
        alike = [one for one in steps if one.served == way]
        rest = [_without_host(served, own, one) for one in alike]
        shares[way] = fit_host(alike, rest)
        found += checked(alike, rest, shares[way])
    seen = [one.step.context for one in found if one.step.served == TREES]
    within = min(seen), max(seen)
    host = Host(shares[TREES], shares[PLAIN], served.device, SERVED, nodes, within)
    return Calibration(fit, host, regimes, found)


def _attention(folder: pathlib.Path, architecture: str) -> tuple[AttentionFit, list[CheckedRegime]]:
    """By the gate's own record where it is of that architecture, else by the sweep."""
    gpu, cold = _kept(folder / KERNEL, _cold)
    tried = [
        one
        for one, tile in _kept(folder / SWEEP, _sweep)
        if tile == tile_of(architecture, Regime(one.batch, one.heads, one.nodes, one.prefix))
    ]
    known = {_place(one) for one in cold}
    own = gpu.architecture == architecture
    fitted = cold if own else _fastest(one for one in tried if _place(one) in known)
    held = _fastest(one for one in tried if _place(one) not in known)
    fit = fit_attention(fitted, gpu, architecture)
    source = KERNEL if own else SWEEP
    return fit, [
        *(CheckedRegime(source, one, error_of(fit, gpu, one), True) for one in fitted),
        *(CheckedRegime(SWEEP, one, error_of(fit, gpu, one), False) for one in held),
    ]


def _fastest(timed: Iterable[TimedRegime]) -> list[TimedRegime]:
    """Of each regime: a tile is tried with several least stages of a split."""
    found = dict[tuple[int, int, int, int], TimedRegime]()
    for one in timed:
        found[_place(one)] = min(found.get(_place(one), one), one, key=lambda each: each.us)
    return list(found.values())


def _cold(path: pathlib.Path) -> tuple[Gpu, list[TimedRegime]]:
    """Of the gate `kernel-regimes`, with the GPU that it ran on."""
    record = load_record(path)
    gate = next(one for one in record.gates if one.gate == "kernel-regimes")
    matches = [(_COLD.fullmatch(one.name), one.value) for one in gate.figures]
    found = [_timed(*map(int, match.groups()), us=us) for match, us in matches if match]
    return _gpu_of(record.machine.as_json()), found


def _sweep(path: pathlib.Path) -> list[tuple[TimedRegime, tuple[int, int]]]:
    """Every trial of the default mode, with its tile: rows, and tokens of a stage."""
    return [
        (
            _timed(
                *(row[name] for name in ("batch", "heads", "tree_nodes", "prefix")),
                us=row["median_us"],
            ),
            (row["row_tile"], row["block_tokens"]),
        )
        for row in json.loads(path.read_text(encoding="utf-8"))["measurements"]
        if not row["deterministic"]
    ]


def _steps(path: pathlib.Path) -> tuple[Gpu, int, list[MeasuredStep]]:
    """Of `kd bench serve`: trees on the kernel, and no speculation; the shortest context is fitted.

    Without speculation it is SGLang's Triton kernel that decodes, and the model takes this one's
    time for it: a tenth of the step. Also the GPU, and the nodes of the trees.
    """
    document = json.loads(path.read_text(encoding="utf-8"))
    nodes, found = int(document["nodes"]), []
    for served, name, own in ((TREES, f"kdtree_mla-{nodes}", nodes), (PLAIN, "triton-plain", 1)):
        speeds = next(one["speeds"] for one in document["servers"] if one["name"] == name)
        shortest = min(one["length"] for one in speeds)
        for one in speeds:
            length = int(one["length"])
            seconds = one["step_us"] * 1e-6 if own > 1 else 1 / one["tokens_per_second"]
            found.append(
                MeasuredStep(served, SERVE, length, own, _positive(seconds), length == shortest)
            )
    return _gpu_of(document["machine"]), nodes, found


def _alone(nodes: int) -> Callable[[pathlib.Path], list[tuple[int, int, float, bool]]]:
    """Of the same server at another time, a line a step; all of them are held out."""

    def read(path: pathlib.Path) -> list[tuple[int, int, float, bool]]:
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [match for line in lines if (match := _ROW.fullmatch(line.strip()))]
        return [(int(row[1]), nodes, _positive(float(row[5]) * 1e-3), False) for row in rows]

    return read


def _without_host(gpu: Gpu, fit: AttentionFit, step: MeasuredStep) -> float:
    """What the model says that the GPU does in a kept step, in seconds."""
    weight = BYTES_PER_WEIGHT["bf16"]
    service = Service(SERVED, gpu, LINKS[gpu.link], 1, 1, weight, weight)
    load = Load(step.context, 1, step.nodes, 1.0)
    return sum(one.seconds for one in components_without_host(service, load, fit))


def _gpu_of(machine: dict[str, Any]) -> Gpu:
    """The GPU that a file was measured on, of those that the engine's table has."""
    names = [one["name"] for one in machine["gpus"] if one["usable"]]
    found = next((one for one in GPUS.values() if names and names[0].startswith(one.device)), None)
    if found is None:
        raise ValueError(f"measured on {names}, which kdtree_engine.gpus does not have")
    return found


def _kept(path: pathlib.Path, read: Callable[[pathlib.Path], _Answer]) -> _Answer:
    """What `read` makes of a kept file; one line where it is not there or not what it was."""
    if not path.is_file():
        raise MissingError(
            f"{path}: the model is calibrated by this file",
            remedy="run kd from a whole checkout, with its plans/evidence",
        )
    try:
        return read(path)
    except (OSError, ValueError, KeyError, TypeError, StopIteration, RecursionError) as error:
        raise ConfigError(f"{path}: {type(error).__name__}: {error}") from error


def _timed(batch: int, heads: int, nodes: int, prefix: int, *, us: float) -> TimedRegime:
    return TimedRegime(batch, heads, nodes, prefix, _positive(us))


def _positive(value: float) -> float:
    if not 0 < value < math.inf:
        raise ValueError(f"expected a time, got {value}")
    return value


def _place(timed: TimedRegime) -> tuple[int, int, int, int]:
    return timed.batch, timed.heads, timed.nodes, timed.prefix
