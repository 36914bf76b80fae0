"""Where gates stand, from evidence of real runs of small gates, and what may be promoted then."""

from __future__ import annotations

import dataclasses

import pytest
import sample_gates
from sample_gates import MACHINE, phase, speed_gate

from kdtree_engine.errors import ConfigError
from phases import promotable
from phases.checkout import Checkout
from phases.evidence import Evidence, Platform, Store
from phases.exit_code import ExitCode
from phases.gate import Gate
from phases.phase import Phase, ServiceProfile
from phases.registry import load_phases
from phases.requirement import Requirement
from phases.runner import run, select
from phases.states import GateState, State, gate_states


@pytest.fixture
def look(checkout: Checkout, store: Store):
    """The states of phases' gates; those in `ran` are run first."""

    def look_(*phases: Phase, ran: tuple[str, ...] = (), machine=MACHINE) -> dict[str, GateState]:
        if ran:
            run(
                select(phases, ran),
                checkout=checkout,
                store=store,
                machine=MACHINE,
                host="local",
                seed=1,
                command=["kd"],
            )
        known = store.newest(phases, "local", MACHINE.hostname)
        found = gate_states(select(phases), known, machine, Platform.of(machine, {}))
        return {one.gate: one for one in found}

    return look_


def test_what_passed_is_proven_and_what_never_ran_is_missing(look) -> None:
    right = Gate("right", "", sample_gates.passes)
    found = look(phase(0, right, Gate("other", "", sample_gates.passes)), ran=("right",))
    assert (found["right"].state, found["right"].why) == (State.PROVEN, None)
    assert found["right"].run is not None
    assert (found["other"].state, found["other"].why) == (State.MISSING, "it was never run here")


def test_another_driver_makes_evidence_stale(look) -> None:
    one = phase(0, Gate("right", "", sample_gates.passes))
    look(one, ran=("right",))
    found = look(one, machine=dataclasses.replace(MACHINE, driver="999"))
    assert found["right"].state is State.STALE
    assert "another GPU, driver" in (found["right"].why or "")


def test_other_code_makes_evidence_stale(look, store: Store) -> None:
    one = phase(0, Gate("right", "", sample_gates.passes))
    look(one, ran=("right",))
    (known,) = store.newest([one], "local", MACHINE.hostname).values()
    changed = Evidence(record=known.record, gate=known.gate, stale=True)
    (found,) = gate_states(select([one]), {"right": changed}, MACHINE, Platform.of(MACHINE, {}))
    assert (found.state, found.why) == (State.STALE, "passed, and the code has changed since")


def test_what_failed_says_how_and_blocks_what_builds_on_it(look) -> None:
    low = phase(0, Gate("bad", "", sample_gates.fails), speed_gate("low-speed"))
    high = dataclasses.replace(
        phase(1, Gate("above", "", sample_gates.passes), depends_on=(0,)), name="higher"
    )
    found = look(low, high, ran=("bad", "low-speed", "above"))
    assert found["bad"].state is State.FAILED
    assert found["bad"].why == "failed: numerical: row 3 of request 1 differs"
    assert found["low-speed"].why == "no speed before correctness: bad failed"
    assert found["above"].state is State.BLOCKED
    assert "has failed: bad" in (found["above"].why or "")


def test_what_the_machine_lacks_blocks_as_in_a_run(look) -> None:
    one = phase(
        0,
        Gate("gpu", "", sample_gates.passes, requires=(Requirement.GPU,)),
        Gate("library", "", sample_gates.misses_a_library),
        Gate("planned", ""),
        speed_gate(),
    )
    found = look(one, ran=("library", "gpu", "planned", "sample-speed"))
    assert found["gpu"].state is State.BLOCKED
    assert "no CUDA GPU" in (found["gpu"].why or "")
    assert found["library"].state is State.BLOCKED, "as the last run found on its way"
    assert found["planned"].state is State.UNWRITTEN
    assert found["sample-speed"].state is State.BLOCKED
    assert "gpu blocked; library blocked; planned unwritten" in (found["sample-speed"].why or "")


def test_what_a_run_was_kept_from_may_run_by_now(look) -> None:
    one = phase(0, Gate("nvcc", "", sample_gates.passes, requires=(Requirement.NVCC,)))
    look(one, ran=("nvcc",))
    found = look(one, machine=dataclasses.replace(MACHINE, nvcc="13.0"))
    assert found["nvcc"].state is State.MISSING
    assert "it was blocked when it was last to run" in (found["nvcc"].why or "")


def said(state: str, *, token_exact: bool = False, kind: str = "correctness") -> dict[str, object]:
    """A state as another machine prints it."""
    return {
        "phase": "p3_backend_wiring",
        "gate": f"{state}-{kind}",
        "kind": kind,
        "token_exact": token_exact,
        "state": state,
        "why": None if state == "proven" else "for a reason",
        "run": None,
    }


def test_only_what_is_proven_may_be_promoted() -> None:
    others = ("stale", "missing", "failed", "blocked", "unwritten")
    states = [said("proven"), *map(said, others), said("missing", kind="speed")]
    lines = promotable.lacking(states)
    assert lines[0] == "p3_backend_wiring stale-correctness is stale: for a reason"
    assert [line.split()[1] for line in lines] == [
        *(f"{state}-correctness" for state in others),
        "missing-speed",
    ]
    assert promotable.refused_even_if_forced(states) == []
    assert promotable.refused_even_if_forced([said("missing", token_exact=True)]) == [
        "p3_backend_wiring missing-correctness is missing: for a reason"
    ]
    assert promotable.exit_code_of(states) is ExitCode.FAILED
    assert promotable.exit_code_of([said("proven"), said("stale")]) is ExitCode.BLOCKED
    assert promotable.exit_code_of([said("proven")]) is ExitCode.PASSED


def test_what_a_release_leaves_out_is_missing() -> None:
    """It says itself which gates it has; nobody has proven those that it does not name."""
    phases = promotable.up_to(load_phases(), load_phases()[3])
    found = promotable.completed([], phases)
    assert {one["phase"] for one in found} == {one.package for one in phases}
    assert promotable.refused_even_if_forced(found) == promotable.lacking(found)
    assert "p3_backend_wiring service-token-exact is missing: the release knows no such gate" in (
        promotable.lacking(found)
    )
    whole = [
        {**said("proven"), "phase": one.package, "gate": gate.name}
        for one in phases
        for gate in one.gates
    ]
    found = promotable.completed(whole, phases)
    assert len(found) == len(whole)
    assert promotable.lacking(found) == []
    exact = [one["gate"] for one in found if one["token_exact"]]
    assert exact == ["service-token-exact"], "whatever a release says of it"
    assert not any(one["token_exact"] for one in whole), "what was given stays as it is"


def test_states_of_this_machine_are_read_as_those_of_another(look) -> None:
    found = look(phase(0, Gate("exact", "", sample_gates.passes, token_exact=True)))
    states = [one.as_json() for one in found.values()]
    assert promotable.refused_even_if_forced(states) == [
        "p0_sample exact is missing: it was never run here"
    ]


def test_the_default_phase_is_the_highest_that_a_service_can_run_at() -> None:
    phases = load_phases()
    chosen = promotable.default_phase(phases)
    assert chosen.profile.arguments
    assert all(gate.check for gate in chosen.gates)
    later = [one for one in phases if one.number > chosen.number]
    assert not any(one.profile.arguments and all(g.check for g in one.gates) for one in later)
    assert promotable.up_to(phases, chosen)[-1] is chosen
    with pytest.raises(ConfigError, match="--phase"):
        promotable.default_phase([phase(0, Gate("right", "", sample_gates.passes))])
    planned = dataclasses.replace(phase(0, Gate("planned", "")), profile=ServiceProfile(("-x",)))
    with pytest.raises(ConfigError):
        promotable.default_phase([planned])


def test_the_gates_of_the_right_tokens_say_so() -> None:
    exact = {gate.name for one in load_phases() for gate in one.gates if gate.token_exact}
    assert exact == {
        *("service-token-exact", "graph-service-token-exact", "churn-service-token-exact"),
        "relocation-service-token-exact",
        *("ddtree-token-exact", "ddtree-distribution", "ddtree-graph-token-exact"),
    }
