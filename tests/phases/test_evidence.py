"""The data model refuses evidence that must not exist."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest
import sample_gates

from kdtree_engine.errors import ConfigError, UnknownName
from phases.content import gate_content
from phases.evidence import (
    FigureRecord,
    GateRecord,
    Platform,
    Proof,
    ProofEntry,
    Record,
    Store,
    load_record,
    new_run_id,
    now,
    unfounded,
)
from phases.gate import FailureKind, Gate, GateKind, Status, Unit
from phases.registry import load_phases

DIGEST = "a" * 64
COUNT = FigureRecord(name="prompts", value=200, unit=Unit.COUNT)
TIME = FigureRecord(name="16k", value=28.1, unit=Unit.MICROSECONDS)
HERE = Platform.of(sample_gates.MACHINE, {})
PROOF = Proof(
    phase="p1_sample",
    host="local",
    platform=HERE,
    gates={"right": ProofEntry(run=new_run_id(), content=DIGEST)},
)


def entry(**changes: Any) -> GateRecord:
    """A gate that passed, but for `changes`."""
    fields: dict[str, Any] = {
        "phase": "p1_sample",
        "gate": "right",
        "kind": GateKind.CORRECTNESS,
        "status": Status.PASSED,
        "figures": (COUNT,),
        "content": DIGEST,
        "seconds": 1.5,
    }
    return GateRecord(**(fields | changes))


def record(*gates: GateRecord, **changes: Any) -> Record:
    """A finished run of `gates`, but for `changes`."""
    fields: dict[str, Any] = {
        "run": new_run_id(),
        "command": ("kd", "phase", "run", "1"),
        "host": "local",
        "machine": sample_gates.MACHINE,
        "revision": "f" * 40,
        "dirty": False,
        "seed": 1,
        "started": now(),
        "finished": now(),
        "gates": gates,
    }
    return Record(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"status": Status.FAILED, "message": "m"}, "'failure' goes with status failed"),
        ({"failure": FailureKind.SHAPE}, "'failure' goes with status failed"),
        ({"content": None}, "'content' hash"),
        ({"seconds": None}, "'content' hash and 'seconds'"),
        ({"figures": ()}, "at least one figure"),
        ({"status": Status.BLOCKED, "message": "m"}, "a gate that is blocked has no figures"),
        ({"status": Status.ERROR, "figures": ()}, "says why in 'message'"),
        ({"figures": (TIME,)}, "a correctness gate has no speed figure, got 16k"),
        ({"kind": GateKind.SPEED, "figures": (TIME,)}, "need a 'proof'"),
        ({"kind": GateKind.SPEED, "figures": (COUNT,)}, "need a 'proof'"),
        (
            {
                "kind": GateKind.SPEED,
                "status": Status.FAILED,
                "failure": FailureKind.TOO_SLOW,
                "message": "m",
                "figures": (TIME,),
            },
            "need a 'proof'",
        ),
        ({"phase": "p2_sample", "proof": PROOF}, "'proof' is of p1_sample"),
        ({"content": "abc"}, "content"),
    ],
)
def test_a_gate_record_that_does_not_hold_together_is_refused(
    changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        entry(**changes)


def test_a_speed_figure_is_recorded_with_its_proof() -> None:
    speed = entry(gate="fast", kind=GateKind.SPEED, figures=(TIME,), proof=PROOF)
    assert record(entry(), speed).gates[1].figures == (TIME,)


def test_a_proof_from_another_machine_is_refused() -> None:
    other_driver = PROOF.platform.model_copy(update={"driver": "999"})
    for change, complaint in (
        ({"host": "ct200"}, "the proof of fast is from another host, ct200"),
        ({"platform": other_driver}, "the proof of fast is from another machine or driver"),
    ):
        elsewhere = PROOF.model_copy(update=change)
        speed = entry(gate="fast", kind=GateKind.SPEED, figures=(TIME,), proof=elsewhere)
        with pytest.raises(ValueError, match=complaint):
            record(speed)


def test_no_proof_says_that_a_gate_other_than_a_passed_one_proves() -> None:
    with pytest.raises(ValueError, match="status"):
        ProofEntry(run=new_run_id(), status=Status.BLOCKED, content=DIGEST)  # type: ignore[arg-type]


def test_figures_are_finite() -> None:
    with pytest.raises(ValueError, match="finite"):
        FigureRecord(name="ratio", value=float("nan"), unit=Unit.RATIO)


def test_a_record_comes_back_from_its_file_unchanged(store: Store) -> None:
    saved = record(entry())
    assert load_record(store.save(saved)) == saved


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"run": 1, "run": 2}', "the field 'run' stands there twice"),
        ("[]", "Input should be"),
        ('{"version": 1}', "field run: is required"),
        (None, "field gates.0.status: Input should be"),
    ],
)
def test_a_broken_record_is_one_line_with_file_and_field(
    store: Store, text: str | None, complaint: str
) -> None:
    path = store.save(record(entry()))
    if text is None:
        fields = json.loads(path.read_text())
        fields["gates"][0]["status"] = "green"
        text = json.dumps(fields)
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        store.own_records()
    assert complaint in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_broken_machine_in_a_record_names_its_field(store: Store) -> None:
    path = store.save(record(entry()))
    fields = json.loads(path.read_text())
    fields["machine"]["gpus"] = "many"
    path.write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=r"field machine: .*gpus"):
        load_record(path)


def right_gate() -> Gate:
    return Gate("right", "it is right", sample_gates.passes)


def test_the_newest_entry_wins_even_when_it_is_worse(store: Store, root: pathlib.Path) -> None:
    content = gate_content(root, right_gate())
    store.save(record(entry(content=content), run="20260101T000000Z-000001"))
    store.save(
        record(
            entry(status=Status.INTERRUPTED, message="died", figures=(), content=None),
            run="20260101T000001Z-000000",
        )
    )
    newest = store.newest([sample_gates.phase(1, right_gate())], "local", "bench-1")
    assert newest["right"].gate.status is Status.INTERRUPTED
    assert not newest["right"].proves


def test_evidence_with_another_content_is_stale_and_proves_nothing(store: Store) -> None:
    phase = sample_gates.phase(1, right_gate(), sample_gates.speed_gate())
    store.save(record(entry(content=DIGEST)))
    assert store.newest([phase], "local", "bench-1")["right"].stale
    assert store.prove(phase, "local", HERE) == ["right passed, and the code has changed since"]


def test_a_proof_needs_every_correctness_gate_of_the_phase_on_that_machine(
    store: Store, root: pathlib.Path
) -> None:
    phase = sample_gates.phase(
        1, right_gate(), Gate("exact", "exact", sample_gates.passes), sample_gates.speed_gate()
    )
    store.save(record(entry(content=gate_content(root, phase.gates[0]))))
    assert store.prove(phase, "local", HERE) == ["exact was not run"]

    store.save(record(entry(gate="exact", content=gate_content(root, phase.gates[1]))))
    proof = store.prove(phase, "local", HERE)
    assert isinstance(proof, Proof)
    assert set(proof.gates) == {"right", "exact"}
    elsewhere = HERE.model_copy(update={"hostname": "bench-2"})
    assert store.prove(phase, "local", elsewhere) == ["right was not run", "exact was not run"]
    for change in ({"torch": "9.9.9"}, {"environment": {"KDTREE_WGMMA": "1"}}):
        assert store.prove(phase, "local", HERE.model_copy(update=change)) == [
            "right passed with another GPU, driver, CUDA, torch, SGLang or environment",
            "exact passed with another GPU, driver, CUDA, torch, SGLang or environment",
        ]


def test_a_speed_figure_goes_stale_with_the_code_that_its_proof_rests_on(
    store: Store, root: pathlib.Path
) -> None:
    speed = sample_gates.speed_gate()
    phase = sample_gates.phase(1, right_gate(), speed)
    right = entry(content=gate_content(root, right_gate()))
    store.save(record(right))
    proof = store.prove(phase, "local", HERE)
    fast = entry(
        gate=speed.name,
        kind=GateKind.SPEED,
        figures=(TIME,),
        proof=proof,
        content=gate_content(root, speed),
    )
    store.save(record(right, fast))
    assert not store.newest([phase], "local", "bench-1")[speed.name].stale

    grown = sample_gates.phase(1, right_gate(), Gate("new", "", sample_gates.passes), speed)
    assert store.newest([grown], "local", "bench-1")[speed.name].stale


def test_a_phase_without_correctness_gates_proves_nothing(store: Store) -> None:
    phase = sample_gates.phase(1, sample_gates.speed_gate())
    assert store.prove(phase, "local", HERE) == ["the phase has no correctness gate"]


def test_a_kept_record_is_found_by_its_name_and_proves_nothing_here(
    store: Store, tmp_path: pathlib.Path
) -> None:
    kept = record(entry())
    assert store.keep(kept, "first", []) == tmp_path / "kept" / "first.json"
    assert store.find("first") == kept
    assert store.kept_records() == {"first": kept}
    assert store.machines() == []
    assert store.newest([sample_gates.phase(1, right_gate())], "local", "bench-1") == {}
    assert store.among([kept], [sample_gates.phase(1, right_gate())])["right"].gate == entry()


def test_a_platform_has_one_release_of_sglang() -> None:
    """A record that knows of none holds for any: what it shows did not need it."""
    machine = dataclasses.replace(sample_gates.MACHINE, sglang="0.5.23")
    with_it = Platform.of(machine, {})
    assert with_it.sglang == "0.5.23"
    assert with_it.may_be(with_it)
    assert not with_it.may_be(with_it.model_copy(update={"sglang": "0.5.17"}))
    assert not with_it.may_be(with_it.model_copy(update={"sglang": None}))
    unknown = with_it.model_copy(update={"sglang": None})
    assert unknown.may_be(with_it)
    assert not unknown.may_be(with_it.model_copy(update={"driver": "another"}))


def test_a_proof_older_than_that_is_still_read() -> None:
    """Made where SGLang was installed, before a proof said so."""
    machine = dataclasses.replace(sample_gates.MACHINE, sglang="0.5.23")
    speed = entry(gate="sample-speed", kind=GateKind.SPEED, figures=(TIME,), proof=PROOF)
    assert record(entry(), speed, machine=machine).gates[1].proof == PROOF


def test_a_kept_record_has_no_path_of_the_machine(store: Store, tmp_path: pathlib.Path) -> None:
    own = record(entry(log="../somewhere/.kd/logs/run/right.log"))
    for _ in range(2):  # and keeping it again is the same record
        store.keep(own, "first", [])
    text = (tmp_path / "kept" / "first.json").read_text()
    assert "somewhere" not in text
    assert store.find("first") == own.without_logs()


def test_a_run_that_never_finished_is_not_kept(store: Store) -> None:
    with pytest.raises(ConfigError, match="never finished"):
        store.keep(record(entry(), finished=None), "first", [])


@pytest.mark.parametrize(
    "name", ["", "../evil", "a/b", "/tmp/x", ".hidden", "with space", "x" * 99]
)
def test_a_kept_record_has_a_plain_name(store: Store, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a kept record"):
        store.keep(record(entry()), name, [])


def test_a_kept_record_is_never_replaced_by_another(store: Store) -> None:
    first = record(entry(), run="20260101T000000Z-aaaaaa")
    store.keep(first, "first", [])
    store.keep(first, "first", [])
    with pytest.raises(ConfigError, match="keeps another run, 20260101T000000Z-aaaaaa"):
        store.keep(record(entry()), "first", [])


def test_a_proof_that_its_record_cannot_show_to_be_false_is_not_kept(store: Store) -> None:
    speed = entry(gate="sample-speed", kind=GateKind.SPEED, figures=(TIME,), proof=PROOF)
    phase = sample_gates.phase(
        1, right_gate(), Gate("exact", "", sample_gates.passes), sample_gates.speed_gate()
    )
    faults = unfounded(record(speed), [phase], [])
    assert faults[0] == "the proof of sample-speed does not cover the gates of p1_sample"
    assert "where it did not pass so" in faults[1]
    with pytest.raises(ConfigError, match="does not cover the gates"):
        store.keep(record(speed), "fast", [phase])


def test_the_kept_evidence_of_this_repository_is_founded(root: pathlib.Path) -> None:
    folder = root / "plans" / "evidence"
    kept = [load_record(path) for path in sorted(folder.glob("*.json"))]
    assert kept
    for one in kept:
        assert unfounded(one, load_phases(), kept) == []


def test_runs_are_found_by_the_beginning_of_their_id(store: Store) -> None:
    old = record(entry(), run="20260101T000000Z-aaaaaa")
    new = record(entry(), run="20260102T000000Z-bbbbbb")
    store.save(old)
    store.save(new)
    assert store.find("20260101") == old
    assert store.find("latest") == new
    with pytest.raises(UnknownName, match="unknown run '2026'"):
        store.find("2026")
