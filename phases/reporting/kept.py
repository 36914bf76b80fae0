"""Kept evidence, read once: records of gates, and the documents of benchmarks beside them.

A record's figures are current or stale by the content hash of their gate (`phases.content`). The
documents under plans/evidence/serve, frag and profile are of no gate. Where one says which kernel
sources it was measured with, those are compared with the sources as they are: other sources make it
stale; the same ones do not prove it current, as there is other code that it depends on.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import pydantic

from kdtree_engine.build import sources_digest
from kdtree_engine.errors import ConfigError
from phases.checkout import Checkout
from phases.evidence import Evidence, GateRecord, Record, Store, load_record
from phases.gate import Status, Unit
from phases.phase import Phase
from phases.plan import Plan, load_plans
from phases.reporting.model import Missing, Source, Standing

__all__ = ["Document", "Kept", "KeptGate", "documents", "place_of", "read_kept"]

ENDED = (Status.PASSED, Status.FAILED, Status.ERROR)
_LARGEST = 32 << 20
"""Bytes of a document: what is larger was not written by `kd`."""
_MOST = 1e20
"""No figure is as large; sums, products and plots of what is below it stay finite."""
_ANY_SMALL = (Unit.PROBABILITY, Unit.RELATIVE_ERROR)
"""Others that are next to nothing, such as times, would give endless ratios."""


@dataclasses.dataclass(frozen=True)
class KeptGate:
    """How one gate ended in one kept record. file: the record's, below the root."""

    file: str
    evidence: Evidence

    @property
    def record(self) -> Record:
        return self.evidence.record

    @property
    def entry(self) -> GateRecord:
        return self.evidence.gate

    @property
    def ended(self) -> bool:
        """Whether it ran to an end, good or bad."""
        return self.entry.status in ENDED

    @property
    def figures(self) -> dict[str, float]:
        return {one.name: one.value for one in self.entry.figures}

    @property
    def source(self) -> Source:
        record = self.record
        failed = f"the gate {self.entry.status}" if self.entry.status is not Status.PASSED else ""
        return Source(
            self.file,
            Standing.STALE if self.evidence.stale else Standing.CURRENT,
            place_of(record),
            f"{record.started:%Y-%m-%d}",
            _revision(record.revision, record.dirty),
            failed,
        )


@dataclasses.dataclass(frozen=True)
class Kept:
    """records: by file. gates: of each gate what every record says, the newest first."""

    root: pathlib.Path
    folder: pathlib.Path
    phases: Sequence[Phase]
    plans: Sequence[Plan]
    records: Mapping[str, Record]
    gates: Mapping[str, tuple[KeptGate, ...]]

    def places(self) -> list[str]:
        """What the records were made on: machines without a GPU first."""
        found = {place_of(record) for record in self.records.values()}
        return sorted(found, key=lambda place: (not place.startswith("CPU"), place))

    def newest(self, gate: str, place: str | None = None) -> KeptGate | None:
        """The newest that ran to an end; where none did, the newest. place: None for any."""
        known = [
            one
            for one in self.gates.get(gate, ())
            if place is None or place_of(one.record) == place
        ]
        return next((one for one in known if one.ended), known[0] if known else None)

    def measured(self, gate: str) -> KeptGate | None:
        """The newest with figures, those of a machine whose environment changes nothing first."""
        known = [one for one in self.gates.get(gate, ()) if one.entry.figures]
        return min(known, key=lambda one: bool(one.record.environment), default=None)

    def why_not(self, gate: str) -> str:
        """Why there are no figures of a gate, by the newest record that says anything of it."""
        one = self.newest(gate)
        if one is None:
            return "no kept record has this gate"
        stale = ", and the code that it depends on has changed since" if one.evidence.stale else ""
        told = f": {one.entry.message}" if one.entry.message else ""
        return f"{one.entry.status}{stale}{told} ({one.file})"


def read_kept(
    checkout: Checkout, phases: Sequence[Phase], folder: pathlib.Path | None = None
) -> Kept:
    """What lies in `folder`, the checkout's kept evidence where None.

    Raises ConfigError for a record or plan that cannot be read.
    """
    folder = folder or checkout.kept_evidence
    store = Store(checkout.evidence, folder, checkout.root)
    records = {_below(checkout.root, path): _record(path) for path in sorted(folder.glob("*.json"))}
    gates: dict[str, list[KeptGate]] = {}
    for file, record in sorted(records.items(), key=lambda item: item[1].run, reverse=True):
        for name, evidence in store.among([record], phases).items():
            gates.setdefault(name, []).append(KeptGate(file, evidence))
    return Kept(
        checkout.root,
        folder,
        phases,
        load_plans(checkout.plans),
        records,
        {name: tuple(known) for name, known in gates.items()},
    )


def _record(path: pathlib.Path) -> Record:
    """Also raises ConfigError for one that no run wrote: its figures could not be shown."""
    try:
        record = load_record(path)
    except UnicodeEncodeError:  # of what a model says of a field with half of a surrogate pair
        raise ConfigError(f"{path}: a name in it has a character that UTF-8 cannot write") from None
    for gate in record.gates:
        for figure in gate.figures:
            tiny = 0 < abs(figure.value) < 1 / _MOST and figure.unit not in _ANY_SMALL
            if tiny or abs(figure.value) >= _MOST:
                raise ConfigError(
                    f"{path}: the figure {figure.name!r} of {gate.gate} is {figure.value:.3g}, "
                    f"expected one between {1 / _MOST:.0e} and {_MOST:.0e}"
                )
    return record


def place_of(record: Record) -> str:
    """`CPU`, `NVIDIA H200`, `2 x NVIDIA H200`, with variables that change what the engine runs."""
    return _place([gpu.name for gpu in record.machine.usable_gpus], record.environment)


def _place(gpus: Sequence[str], environment: Mapping[str, str]) -> str:
    names = [f"{gpus.count(one)} x {one}" if gpus.count(one) > 1 else one for one in gpus]
    parts = [", ".join(dict.fromkeys(names)) or "CPU"]
    return " ".join([*parts, *(f"{name}={value}" for name, value in environment.items())])


def _revision(revision: str | None, dirty: bool | None) -> str:
    return (revision or "unknown")[:12] + (" with changes" if dirty else "")


# ---------------------------------------------------------------------------------------------
# Documents of no gate.

Model = TypeVar("Model", bound=pydantic.BaseModel)


@dataclasses.dataclass(frozen=True)
class Document(Generic[Model]):
    """One kept JSON document. stem: its file's name without folder and suffix.

    point: which of several in one file, where they say so.
    """

    stem: str
    source: Source
    content: Model
    point: str = ""


class _Gpu(pydantic.BaseModel):
    name: str
    usable: bool = True


class _Machine(pydantic.BaseModel):
    gpus: tuple[_Gpu, ...] = ()


class _Library(pydantic.BaseModel):
    sources: str | None = None


class _Origin(pydantic.BaseModel):
    """What documents say of where they are from, as far as they say it."""

    machine: _Machine | None = None
    environment: dict[str, str] = {}
    revision: str | None = None
    dirty: bool | None = None
    started: str | None = None
    at: str | None = None
    library: _Library = _Library()
    point: str = ""

    def source(self, file: str) -> Source:
        place, remark, standing = "machine not said", "", Standing.UNHASHED
        if self.machine is not None:
            usable = [gpu.name for gpu in self.machine.gpus if gpu.usable]
            place = _place(usable, self.environment)
        if self.library.sources is not None:
            same = self.library.sources == sources_digest()
            standing = Standing.UNHASHED if same else Standing.STALE
            remark = f"the kernel's sources {'are as now' if same else 'have changed since'}"
        date = (self.started or self.at or "no date")[:10]
        revision = _revision(self.revision, self.dirty)
        return Source(file, standing, place, date, revision, remark)


def documents(
    kept: Kept,
    folder: str,
    model: type[Model],
    wanted: Callable[[Mapping[str, Any]], bool] = lambda raw: True,
) -> tuple[list[Document[Model]], list[Missing]]:
    """The JSON documents of plans/evidence/`folder` as `model`; what cannot be read is said.

    A file has one document or a list of them. wanted: by their fields, before they are judged.
    """
    found: list[Document[Model]] = []
    broken: list[Missing] = []
    for path in sorted((kept.folder / folder).glob("*.json")):
        file = _below(kept.root, path)
        try:
            for raw in filter(wanted, _read(path)):
                origin = _Origin.model_validate(raw)
                content = model.model_validate(raw)
                found.append(Document(path.stem, origin.source(file), content, origin.point))
        except pydantic.ValidationError as error:
            told = ConfigError.from_validation(pathlib.Path(file), error)
            broken.append(_unread(file, told))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            broken.append(_unread(file, error))
    return found, broken


def _unread(file: str, error: Exception) -> Missing:
    return Missing(file, f"it cannot be read: {' '.join(str(error).split())}", "Not shown")


def _read(path: pathlib.Path) -> list[dict[str, Any]]:
    if path.stat().st_size > _LARGEST:
        raise ValueError(f"it has {path.stat().st_size} bytes")
    raw = json.loads(
        path.read_text(encoding="utf-8"),
        parse_constant=_refuse,
        parse_int=lambda text: int(_within(text)),
        parse_float=lambda text: float(_within(text)),
    )
    listed = raw if isinstance(raw, list) else [raw]
    if not listed or not all(isinstance(one, dict) for one in listed):
        raise TypeError("it is no JSON object, nor a list of them")
    return listed


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number of JSON")


def _within(text: str) -> str:
    """A number as it stands there, if it is one that can have been measured."""
    if abs(float(text)) >= _MOST:
        shown = text if len(text) < 20 else f"{text[:12]}... of {len(text)} characters"
        raise ValueError(f"the number {shown} is too large, expected less than {_MOST:.0e}")
    return text


def _below(root: pathlib.Path, path: pathlib.Path) -> str:
    """`path` as seen from the repository's root, or its whole where it lies elsewhere."""
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()
