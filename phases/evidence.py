"""Evidence: what was run, on what, with which code, and what came out.

One run of `kd` writes one `Record`. The models refuse what must not exist: a passed gate without a
content hash, a failure without a kind, and above all a speed figure without the proof that the
phase's correctness gates passed on the same host with the same code.
"""

from __future__ import annotations

import datetime
import json
import pathlib
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self

import pydantic

from kdtree_engine.atomic import write_atomically
from kdtree_engine.errors import ConfigError, UnknownName
from kdtree_engine.machine import Machine
from phases.content import gate_content
from phases.gate import FailureKind, Figure, Gate, GateKind, Status, Unit
from phases.phase import Phase

__all__ = [
    "Evidence",
    "FigureRecord",
    "GateRecord",
    "Platform",
    "Proof",
    "ProofEntry",
    "Record",
    "Store",
    "load_record",
    "new_run_id",
    "now",
    "unfounded",
]

_Digest = Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{64}$")]
_Time = pydantic.AwareDatetime
_MachineField = Annotated[
    Machine,
    pydantic.PlainValidator(lambda value: _machine(value)),
    pydantic.PlainSerializer(lambda value: value.as_json()),
]


def _machine(value: Any) -> Machine:
    if isinstance(value, Machine):
        return value
    try:
        return Machine.from_json(value)
    except ConfigError as error:
        raise ValueError(str(error)) from error  # pydantic adds the file and the field


class _Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class FigureRecord(_Model):
    """One figure as it is kept."""

    name: str
    value: float
    unit: Unit

    @classmethod
    def of(cls, figure: Figure) -> Self:
        return cls(name=figure.name, value=figure.value, unit=figure.unit)


class ProofEntry(_Model):
    """One correctness gate that passed: in which run, with what content."""

    run: str
    status: Literal[Status.PASSED] = Status.PASSED
    content: _Digest


class Platform(_Model):
    """What a proof of correctness holds for: another driver is another machine.

    So is another environment: KDTREE_ variables choose what the engine runs.
    """

    hostname: str
    gpus: tuple[str, ...]
    driver: str | None
    cuda: str | None
    torch: str | None
    sglang: str | None = None
    environment: Mapping[str, str] = {}

    @classmethod
    def of(cls, machine: Machine, environment: Mapping[str, str]) -> Self:
        gpus = (
            f"{gpu.name} sm_{gpu.capability[0]}{gpu.capability[1]}" for gpu in machine.usable_gpus
        )
        return cls(
            hostname=machine.hostname,
            gpus=tuple(gpus),
            driver=machine.driver,
            cuda=machine.cuda,
            torch=machine.torch,
            sglang=machine.sglang,
            environment=environment,
        )

    def may_be(self, other: Platform) -> bool:
        """Whether they are the same, as far as this says: older proofs know nothing of SGLang."""
        known = self if self.sglang else self.model_copy(update={"sglang": other.sglang})
        return known == other


class Proof(_Model):
    """That every correctness gate of a phase passed on a host. `Store.prove` alone makes one."""

    phase: str
    host: str
    platform: Platform
    gates: Mapping[str, ProofEntry] = pydantic.Field(min_length=1)


class GateRecord(_Model):
    """How one gate ended in one run. `content` is the hash of what the gate depended on."""

    phase: str
    gate: str
    kind: GateKind
    status: Status
    failure: FailureKind | None = None
    message: str | None = None
    figures: tuple[FigureRecord, ...] = ()
    content: _Digest | None = None
    seed: int | None = None
    started: _Time | None = None
    seconds: float | None = pydantic.Field(default=None, ge=0)
    log: str | None = None
    proof: Proof | None = None

    @pydantic.model_validator(mode="after")
    def _holds_together(self) -> Self:
        if (self.status is Status.FAILED) != (self.failure is not None):
            raise ValueError("'failure' goes with status failed, and with no other")
        if self.status is Status.PASSED and (self.content is None or self.seconds is None):
            raise ValueError("a passed gate has a 'content' hash and 'seconds'")
        if self.status is Status.PASSED and not self.figures:
            raise ValueError("a passed gate has at least one figure")
        if self.figures and self.status not in (Status.PASSED, Status.FAILED):
            raise ValueError(f"a gate that is {self.status} has no figures")
        if self.status not in (Status.PASSED, Status.UNWRITTEN) and not self.message:
            raise ValueError(f"a gate that is {self.status} says why in 'message'")
        speeds = [figure.name for figure in self.figures if figure.unit.is_speed]
        if speeds and self.kind is not GateKind.SPEED:
            raise ValueError(f"a correctness gate has no speed figure, got {', '.join(speeds)}")
        if self.figures and self.kind is GateKind.SPEED and self.proof is None:
            raise ValueError("a speed gate's figures need a 'proof' that the phase is correct")
        if self.proof is not None and self.proof.phase != self.phase:
            raise ValueError(f"'proof' is of {self.proof.phase}, not of {self.phase}")
        return self


class Record(_Model):
    """One run. `finished` is None while it goes on and stays so when it dies.

    environment: the KDTREE_ variables that were set, as they change what the engine runs.
    """

    version: Literal[1] = 1
    run: str = pydantic.Field(pattern=r"^\d{8}T\d{6}Z-[0-9a-f]{6}$")
    command: tuple[str, ...]
    host: str
    machine: _MachineField
    environment: Mapping[str, str] = {}
    revision: str | None
    dirty: bool | None
    seed: int
    started: _Time
    finished: _Time | None = None
    gates: tuple[GateRecord, ...]

    @pydantic.model_validator(mode="after")
    def _proofs_are_of_this_host(self) -> Self:
        for gate in self.gates:
            proof = gate.proof
            if proof and proof.host != self.host:
                raise ValueError(f"the proof of {gate.gate} is from another host, {proof.host}")
            if proof and not proof.platform.may_be(self.platform):
                raise ValueError(f"the proof of {gate.gate} is from another machine or driver")
        names = [gate.gate for gate in self.gates]
        if len(set(names)) < len(names):
            raise ValueError("a gate stands twice in one run")
        return self

    @property
    def platform(self) -> Platform:
        return Platform.of(self.machine, self.environment)

    def without_logs(self) -> Record:
        """This record without the paths of logs, which mean nothing on another machine."""
        gates = tuple(gate.model_copy(update={"log": None}) for gate in self.gates)
        return self.model_copy(update={"gates": gates})

    def with_gate(self, gate: GateRecord) -> Record:
        """This record with the entry of the same gate replaced. Validated again."""
        gates = tuple(gate if old.gate == gate.gate else old for old in self.gates)
        return Record.model_validate(dict(self) | {"gates": gates})

    def as_text(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"


class Evidence(_Model):
    """The newest that is known of a gate on a host, and whether the code has changed since."""

    record: Record
    gate: GateRecord
    stale: bool

    @property
    def proves(self) -> bool:
        """Passed, and with the code as it is now."""
        return self.gate.status is Status.PASSED and not self.stale


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def new_run_id() -> str:
    """Sorts by time: `20261129T140102Z-a1b2c3`."""
    return f"{now():%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


def load_record(path: pathlib.Path) -> Record:
    """The record at `path`. Raises ConfigError naming the file and the field."""
    remedy = "move the file away"
    try:
        fields: Any = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", remedy=remedy) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not JSON: {error}", remedy=remedy) from error
    try:
        return Record.model_validate(fields)
    except pydantic.ValidationError as error:
        raise ConfigError.from_validation(path, error) from error


def unfounded(record: Record, phases: Iterable[Phase], known: Iterable[Record]) -> list[str]:
    """What is wrong with the proofs in `record`, one line each: what its model alone cannot see.

    A proof must cover just the correctness gates that its phase declares, and each run that it
    names must be among `known`, or be `record` itself, with that gate passed on that content.
    """
    passed = {
        (other.run, entry.gate, entry.content)
        for other in (*known, record)
        for entry in other.gates
        if entry.status is Status.PASSED
    }
    declared = {phase.package: {gate.name for gate in phase.correctness_gates} for phase in phases}
    found: list[str] = []
    for entry in record.gates:
        if entry.proof is None:
            continue
        if set(entry.proof.gates) != declared.get(entry.phase):
            found.append(f"the proof of {entry.gate} does not cover the gates of {entry.phase}")
        found += [
            f"the proof of {entry.gate} names {name} of run {at.run}, where it did not pass so"
            for name, at in entry.proof.gates.items()
            if (at.run, name, at.content) not in passed
        ]
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field '{twice}' stands there twice")
    return fields


_KEPT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,79}")


class Store:
    """The records of this checkout: those of its own runs and those kept in the repository."""

    def __init__(self, own: pathlib.Path, kept: pathlib.Path, root: pathlib.Path) -> None:
        self._own = own
        self._kept = kept
        self._root = root

    def save(self, record: Record) -> pathlib.Path:
        path = self._own / f"{record.run}.json"
        write_atomically(path, record.as_text())
        return path

    def own_records(self) -> list[Record]:
        """The records of this checkout's own runs, oldest first."""
        records = []
        for path in sorted(self._own.glob("*.json")):
            record = load_record(path)
            if record.run != path.stem:
                raise ConfigError(f"{path}: field run: {record.run} is not the file's name")
            records.append(record)
        return records

    def kept_records(self) -> dict[str, Record]:
        """Kept records by the name that they are kept under."""
        return {path.stem: load_record(path) for path in sorted(self._kept.glob("*.json"))}

    def find(self, run: str) -> Record:
        """The record whose run id is, or begins with, `run`, or that is kept under that name.

        `latest` is the newest of this checkout's own.
        """
        records, kept = self.own_records(), self.kept_records()
        if run == "latest" and records:
            return records[-1]
        if run in kept:
            return kept[run]
        matches = [record for record in records if run and record.run.startswith(run)]
        if len(matches) != 1:
            known = [*(record.run for record in reversed(records[-10:])), *kept]
            raise UnknownName("run", run, known)
        return matches[0]

    def keep(self, record: Record, name: str, phases: Iterable[Phase]) -> pathlib.Path:
        """Copy `record` to the repository's kept evidence as `name`.json, without paths of logs.

        They stay on the machine, in `.kd/logs`.

        Raises ConfigError for a record that never finished or whose proofs do not hold, a name
        that is no plain file name, and a name that another record has.
        """
        path = self._kept / f"{name}.json"
        if _KEPT_NAME.fullmatch(name) is None:
            raise ConfigError(
                f"'{name}' cannot name a kept record",
                remedy="at most 80 letters, digits, '_', '-' and '.', a letter or digit first",
            )
        if record.finished is None:
            raise ConfigError(
                f"run {record.run} never finished", remedy="run it again, then keep that"
            )
        kept = self.kept_records()
        record = record.without_logs()
        if kept.get(name, record) != record:
            raise ConfigError(
                f"{path} keeps another run, {kept[name].run}",
                remedy="choose another name, or remove that file first",
            )
        if faults := unfounded(record, phases, [*self.own_records(), *kept.values()]):
            raise ConfigError(f"run {record.run}: " + "; ".join(faults))
        write_atomically(path, record.as_text())
        return path

    def newest(self, phases: Iterable[Phase], host: str, hostname: str) -> dict[str, Evidence]:
        """The newest evidence of each gate on `host`, a machine that calls itself `hostname`.

        From this checkout's own runs: what the repository keeps was run by somebody, somewhere.
        """
        return self.among(
            [
                record
                for record in self.own_records()
                if (record.host, record.machine.hostname) == (host, hostname)
            ],
            phases,
        )

    def among(self, records: Iterable[Record], phases: Iterable[Phase]) -> dict[str, Evidence]:
        """The newest evidence of each gate among `records`."""
        gates = {gate.name: (phase, gate) for phase in phases for gate in phase.gates}
        found: dict[str, tuple[Record, GateRecord]] = {}
        for record in sorted(records, key=lambda record: record.run):
            found |= {entry.gate: (record, entry) for entry in record.gates if entry.gate in gates}
        return {
            name: Evidence(record=record, gate=entry, stale=self._is_stale(*gates[name], entry))
            for name, (record, entry) in found.items()
        }

    def machines(self) -> list[tuple[str, str]]:
        """The (host, hostname) pairs that this checkout's runs were made on."""
        return list({(record.host, record.machine.hostname): None for record in self.own_records()})

    def prove(self, phase: Phase, host: str, platform: Platform) -> Proof | list[str]:
        """The proof that every correctness gate of `phase` passed, or the list of what lacks.

        On just that platform, and with the code as it is now.
        """
        evidence = self.newest([phase], host, platform.hostname)
        lacking: list[str] = []
        entries: dict[str, ProofEntry] = {}
        for gate in phase.correctness_gates:
            known = evidence.get(gate.name)
            if known is None:
                lacking.append(f"{gate.name} was not run")
            elif not known.proves or known.gate.content is None:
                stale = ", and the code has changed since" if known.stale else ""
                lacking.append(f"{gate.name} {known.gate.status}{stale}")
            elif not known.record.platform.may_be(platform):
                lacking.append(
                    f"{gate.name} passed with another GPU, driver, CUDA, torch, SGLang or "
                    "environment"
                )
            else:
                entries[gate.name] = ProofEntry(run=known.record.run, content=known.gate.content)
        if lacking or not entries:
            return lacking or ["the phase has no correctness gate"]
        return Proof(phase=phase.package, host=host, platform=platform, gates=entries)

    def _is_stale(self, phase: Phase, gate: Gate, entry: GateRecord) -> bool:
        """Whether the code has changed: the gate's own, or what a speed figure's proof rests on."""
        if entry.content is None:
            return False  # it never ran: there is nothing that could have gone stale
        if gate_content(self._root, gate) != entry.content:
            return True
        if entry.proof is None:
            return False
        proved = {name: passed.content for name, passed in entry.proof.gates.items()}
        return proved != {
            gate.name: gate_content(self._root, gate) for gate in phase.correctness_gates
        }
