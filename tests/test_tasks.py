"""The command line as people and scripts meet it. Every call runs `kd` in a process of its own."""

from __future__ import annotations

import json
import os
import pathlib
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable

import click.testing
import pytest

import tasks
from kdtree_engine.gpus import GPUS
from phases.checkout import find_checkout
from phases.content import gate_content
from phases.evidence import GateRecord, Record, Store
from phases.registry import load_phases

Kd = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def kd(root: pathlib.Path, tmp_path: pathlib.Path) -> Kd:
    """`kd(*arguments)`, with a state folder of its own and nothing on standard input."""

    def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(root / "tasks.py"), *arguments],
            env=os.environ | {"KD_STATE": str(tmp_path / "state")} | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return call


def test_a_gate_that_passes_is_exit_0_a_table_on_stdout_and_a_record(
    kd: Kd, tmp_path: pathlib.Path
) -> None:
    run = kd("phase", "run", "0", "--only", "mask-layouts")
    assert run.returncode == 0, run.stderr
    header, row, ending = run.stdout.splitlines()
    assert header.split() == ["phase", "gate", "status", "figure", "seconds"]
    assert row.split()[:3] == ["p0_oracle", "mask-layouts", "passed"]
    assert ending.startswith("1 gate: 1 passed; evidence ")
    assert run.stderr.startswith("[1/1] p0_oracle mask-layouts: passed")
    (record,) = (tmp_path / "state" / "evidence").glob("*.json")
    assert json.loads(record.read_text())["gates"][0]["status"] == "passed"


def test_json_is_plain_json_on_stdout_with_messages_on_stderr(kd: Kd) -> None:
    run = kd("phase", "run", "7", "--json")
    assert run.returncode == 3
    answer = json.loads(run.stdout)
    assert answer["exit_code"] == 3
    assert {gate["status"] for gate in answer["gates"]} <= {"unwritten", "blocked"}


def test_require_turns_blocked_into_failure(kd: Kd) -> None:
    only = ("phase", "run", "1", "--only", "kernel-matches-oracle")
    assert kd(*only).returncode == 3
    assert kd(*only, "--require", "gpu").returncode == 1


def test_status_shows_the_newest_evidence(kd: Kd) -> None:
    kd("phase", "run", "0", "--only", "mask-layouts")
    cells = json.loads(kd("status", "--json").stdout)[0]["gates"]
    assert cells["mask-layouts"]["status"] == "passed"
    assert cells["mask-layouts"]["stale"] is False


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("phase", "run", "orcale"), "unknown phase 'orcale' (did you mean p0_oracle"),
        (("phase", "run", "0", "--only", "mask-path"), "unknown gate 'mask-path' (did you mean"),
        (("phase", "run", "1", "--only", "mask-paths"), "is one of p0_oracle (kd phase run 0)"),
        (("phase", "run", "0", "--host", "ct20"), "unknown host 'ct20' (did you mean ct200"),
        (("plan", "show", "orakle"), "unknown plan 'orakle' (did you mean 0010-oracle"),
        (("evidence", "show", "latest"), "unknown run 'latest'"),
        (("phases",), "unknown command 'phases' (did you mean phase"),
        (("plan", "lst"), "unknown command 'lst' (did you mean list"),
    ],
)
def test_an_unknown_name_is_one_line_with_the_nearest_ones_and_exit_2(
    kd: Kd, arguments: tuple[str, ...], complaint: str
) -> None:
    run = kd(*arguments)
    assert run.returncode == 2
    assert run.stdout == ""
    assert len(run.stderr.splitlines()) == 1
    assert complaint in run.stderr


def test_a_state_folder_that_cannot_be_is_one_line_and_exit_2(
    kd: Kd, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "file").write_text("")
    run = kd("phase", "run", "7", KD_STATE=str(tmp_path / "file"))
    assert run.returncode == 2
    assert len(run.stderr.splitlines()) == 1
    assert str(tmp_path / "file") in run.stderr


def test_debug_shows_where_an_error_comes_from_and_changes_no_exit_code(kd: Kd) -> None:
    plain, traced = kd("plan", "show", "99"), kd("--debug", "plan", "show", "99")
    assert (plain.returncode, traced.returncode) == (2, 2)
    assert "Traceback" not in plain.stderr
    assert "Traceback" in traced.stderr
    assert traced.stderr.endswith(plain.stderr)


@pytest.mark.parametrize("command", ["moe", "plan-capacity"])
def test_the_help_names_every_gpu(command: str) -> None:
    told = click.testing.CliRunner().invoke(tasks.cli, [command, "--help"]).output
    assert all(name in told for name in GPUS)


def test_wrong_usage_is_exit_2(kd: Kd) -> None:
    assert kd("phase", "run", "0", "--seed", "99999999999999999999").returncode == 2
    assert kd("phase", "run").returncode == 2
    assert kd("phase", "run", "0", "--nonsense").returncode == 2
    assert kd("verify", "--require", "luck").returncode == 2


def test_debug_shows_the_traceback_of_an_error(kd: Kd) -> None:
    assert "Traceback" not in kd("plan", "show", "orakle").stderr
    assert "Traceback" in kd("--debug", "plan", "show", "orakle").stderr


def test_a_host_that_cannot_be_reached_yet_is_exit_3(kd: Kd) -> None:
    run = kd("phase", "run", "0", "--host", "ct200")
    assert run.returncode == 3
    assert "ct200" in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_what_is_kept_has_a_column_for_each_gpu(kd: Kd) -> None:
    lines = kd("status").stdout.splitlines()
    assert re.split("  +", lines[0])[2:] == [
        *("local", "kept: NVIDIA H200", "kept: NVIDIA H200, KDTREE_WGMMA=0", "kept: no GPU")
    ]
    (exact,) = (line for line in lines if " kernel-matches-oracle " in line)
    # On a CPU it could not run; on the H200 it did, and later records of others do not hide that.
    assert exact.split()[2:] == ["-", "passed", "passed", "blocked"]
    assert "kept" not in kd("status", "--host", "ct200").stdout


def test_a_broken_record_is_one_line_that_names_the_file_and_nothing_is_lost(
    kd: Kd, tmp_path: pathlib.Path
) -> None:
    folder = tmp_path / "state" / "evidence"
    folder.mkdir(parents=True)
    (folder / "broken.json").write_text("{}")
    run = kd("status")
    assert run.returncode == 2
    assert "broken.json: field run: is required" in run.stderr
    assert (folder / "broken.json").read_text() == "{}"


def test_the_help_states_the_exit_codes(kd: Kd) -> None:
    for arguments in (("--help",), ("phase", "run", "--help"), ("verify", "--help")):
        assert "130  interrupted" in kd(*arguments).stdout


def test_plans_are_listed_and_shown_as_they_are_off_a_terminal(kd: Kd, root: pathlib.Path) -> None:
    assert "0010  0      " in kd("plan", "list").stdout
    shown = kd("plan", "show", "10").stdout
    assert shown == next((root / "plans").glob("0010-*.md")).read_text()


def test_evidence_is_shown_and_tables_are_checked(kd: Kd) -> None:
    kd("phase", "run", "7")
    shown = kd("evidence", "show", "latest")
    assert "deferral-figures" in shown.stdout
    # "no GPU" is followed by CUDA's version where nvcc is installed
    assert re.search(r"no GPU; .*\btorch \d", shown.stdout.splitlines()[-1])
    listed = kd("evidence", "list").stdout
    assert listed.splitlines()[0].split()[:4] == ["record", "day", "host", "gpu"]
    assert re.search(r"h200-phase-5 +2026-11-\d\d +local +NVIDIA H200", listed)
    assert json.loads(kd("evidence", "show", "latest", "--json").stdout)["host"] == "local"
    assert len(json.loads(kd("evidence", "list", "--json").stdout)) >= 1
    assert kd("evidence", "tables", "--check").returncode == 0


def test_doctor_says_what_is_missing_and_how_to_get_it(kd: Kd) -> None:
    answer = json.loads(kd("doctor", "--json").stdout)
    assert answer["machine"]["python"].startswith("3.")
    for need in answer["needs"].values():
        assert (need["missing"] is None) == (need["remedy"] is None)
    assert "gates that need" in kd("doctor").stdout


def test_hosts_are_listed(kd: Kd) -> None:
    assert {"local", "ct200"} <= set(json.loads(kd("hosts", "list", "--json").stdout))


def test_the_shell_completes_phases_gates_and_plans(kd: Kd) -> None:
    assert "_KD_COMPLETE" in kd("completion", "bash").stdout
    words = {"COMP_WORDS": "kd phase run 0 --only mask-", "COMP_CWORD": "5"}
    answer = kd(_KD_COMPLETE="bash_complete", **words).stdout
    assert answer.split() == ["plain,mask-paths", "plain,mask-layouts"]


def terminal(root: pathlib.Path, *arguments: str, **environment: str) -> str:
    """What `kd` writes to a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, str(root / "tasks.py"), *arguments],
        env={key: value for key, value in os.environ.items() if key != "NO_COLOR"}
        | {"TERM": "xterm-256color", "COLUMNS": "160"}
        | environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    output = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:
            break
        if not chunk:
            break
        output += chunk
    process.wait(60)
    os.close(ours)
    return output.decode()


COLOUR = re.compile(r"\x1b\[[0-9;]*3\d")


def test_colour_is_for_terminals_and_no_color_is_respected(
    kd: Kd, root: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    state = str(tmp_path / "state")
    coloured = terminal(root, "phase", "run", "7", KD_STATE=state)
    assert COLOUR.search(coloured)
    assert not COLOUR.search(terminal(root, "phase", "run", "7", KD_STATE=state, NO_COLOR="1"))
    assert "\x1b" not in kd("phase", "run", "7").stdout + kd("phase", "run", "7").stderr


def test_a_draft_tree_can_be_looked_at(kd: Kd, root: pathlib.Path) -> None:
    shown = kd("tree", "show", "--seed", "1")
    assert shown.returncode == 0, shown.stderr
    *lines, last = shown.stdout.splitlines()
    assert len(lines) == 17, "the root and 16 nodes"
    assert lines[0].endswith("root")
    answer = json.loads(kd("tree", "show", "--seed", "1", "--json").stdout)
    accepted = [node for node in answer["nodes"] if node["accepted"]]
    assert sum(line.endswith("accepted") for line in lines) == len(accepted) - 1 >= 1
    assert last.endswith(f"next token: {answer['gained'][-1]}")
    assert "\x1b" not in shown.stdout
    assert COLOUR.search(terminal(root, "tree", "show"))
    assert not COLOUR.search(terminal(root, "tree", "show", NO_COLOR="1"))


def test_imbalance_of_experts_is_predicted_and_said_to_be_a_prediction(kd: Kd) -> None:
    arguments = ("moe", "--batch", "2,1", "--nodes", "1", "--samples", "2", "--gpu", "rtx-5090")
    shown = kd(*arguments, "--alpha", "7")
    assert shown.returncode == 0, shown.stderr
    header, *rows = shown.stdout.split("\n\n")[0].splitlines()
    assert header.startswith("batch  tokens  placement")
    assert [row.split()[:3] for row in rows[:4]] == [
        ["1", "1", name] for name in ("tp", "ep", "eplb", "eplb-joined")
    ]
    assert len(rows) == 8
    prediction, rates, link = shown.stdout.splitlines()[-3:]
    assert prediction == "every time is a prediction: no MoE layer was timed on any GPU"
    assert rates.startswith("rates of rtx-5090: not measured")
    assert link.startswith("all-reduce over pcie: all-reduce: latency given on the command line")
    assert "they are more than the 32 GB of one rtx-5090" in shown.stdout
    answer = json.loads(kd(*arguments, "--json").stdout)
    assert answer["measured"] is False
    assert len(answer["outcomes"]) == 8
    assert len(answer["outcomes"][0]["by_layer"]) == 60


def test_imbalance_of_a_recorded_router_is_read_from_its_file(
    kd: Kd, tmp_path: pathlib.Path
) -> None:
    trace = tmp_path / "router.jsonl"
    lines = [{"format": "router-trace", "version": 1, "experts": 4, "top_k": 2}]
    lines += [{"step": step, "layer": 1, "experts": [[0, 1], [0, 1]]} for step in range(4)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ("--batch", "1", "--ranks", "2", "--redundant", "0", "--json")
    (_, ep, *_) = json.loads(kd("moe", "--trace", str(trace), *arguments).stdout)["outcomes"]
    assert (ep["tokens"], ep["busiest"], ep["mean"], ep["idle"]) == (2, 2, 1, 0.5)
    trace.write_text("no trace")
    refused = kd("moe", "--trace", str(trace), *arguments)
    assert refused.returncode == 2
    assert len(refused.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--batch", "1,x"), "--batch '1,x'"),
        (("--batch", "0"), "--batch '0'"),
        (("--gpu", "h20"), "did you mean h200"),
        (("--link", "pci"), "did you mean pcie"),
        (("--weights", "int8"), "did you mean int4"),
        (("--ranks", "7"), "384 experts are not to be divided among 7 ranks"),
    ],
)
def test_wrong_arguments_of_moe_are_one_line(kd: Kd, arguments: tuple[str, ...], said: str) -> None:
    refused = kd("moe", *arguments)
    assert refused.returncode == 2
    assert said in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def test_options_of_a_drawn_router_say_nothing_beside_a_recorded_one(
    kd: Kd, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "router.jsonl").write_text("{}")
    for option in ("--skew", "--reuse", "--nodes"):
        refused = kd("moe", "--trace", str(tmp_path / "router.jsonl"), option, "1")
        assert refused.returncode == 2
        assert f"{option} says nothing beside --trace" in refused.stderr


def test_a_drawn_router_gives_a_token_as_many_experts_as_are_asked_for(kd: Kd) -> None:
    """And of other ranks than eight the all-reduce's latency is said to be of eight."""
    arguments = ("--batch", "1", "--nodes", "1", "--samples", "2", "--ranks", "4")
    shown = kd("moe", "--top-k", "2", *arguments)
    assert "1 tokens activate 2 of 384 experts a layer" in shown.stdout
    assert shown.stdout.endswith("that of 8 ranks, not of 4: --alpha\n")


def test_a_peer_beside_no_peers_is_wrong_usage(kd: Kd) -> None:
    refused = kd("bench", "kernel", "--no-peers", "--peer", "sglang-extend")
    assert refused.returncode == 2
    assert "--peer says nothing beside --no-peers" in refused.stderr


def test_capacity_is_planned_with_its_error_and_its_label(kd: Kd) -> None:
    arguments = ("plan-capacity", "--gpu", "h200", "--context", "4k,16k", "--batch", "1")
    shown = kd(*arguments)
    assert shown.returncode == 0, shown.stderr
    steps, kept = (part.splitlines() for part in shown.stdout.split("\n\n"))
    assert steps[0].startswith("context  batch  step ms")
    assert [row.split()[:2] for row in steps[1:]] == [["4096", "1"], ["16384", "1"]]
    assert all(row.endswith("prediction") for row in steps[1:])
    assert kept[0].startswith("kept step")
    assert sum(row.endswith("held out") for row in kept) == 10
    assert "prediction: a step of Kimi K2 on 8 x h200 was never measured" in shown.stderr
    answer = json.loads(kd(*arguments, "--accepted", "4", "--draft-ms", "1", "--json").stdout)
    assert [step["accepted"] for step in answer["steps"]] == [4, 4]
    assert answer["steps"][0]["components"][4]["label"] == "given"


def test_what_does_not_fit_is_said_and_exits_1(kd: Kd) -> None:
    refused = kd("plan-capacity", "--gpu", "rtx-5090", "--context", "4k", "--batch", "1")
    assert refused.returncode == 1
    assert "does not fit: needs 77 GB of 30 usable" in refused.stdout
    assert refused.stderr.startswith("Kimi K2 does not fit on 8 x rtx-5090: its weights take 77.1 ")


def test_the_capacity_of_another_model_is_that_of_its_config(
    kd: Kd, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    refused = kd("plan-capacity", "--model", str(tmp_path))
    assert refused.returncode == 2
    assert "field model_type: expected one of" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--context", "4x"), "--context '4x'"),
        (("--context", "300k"), "Kimi K2 has 262144 positions"),
        (("--batch", "0"), "--batch '0'"),
        (("--gpu", "h20"), "did you mean h200"),
        (("--weights", "int8"), "did you mean int4"),
        (("--tp", "3"), "8 GPUs are not to be divided among 3 ranks"),
        (("--accepted", "10"), "10 tokens accepted of 9 verified"),
    ],
)
def test_wrong_arguments_of_plan_capacity_are_one_line(
    kd: Kd, arguments: tuple[str, ...], said: str
) -> None:
    refused = kd("plan-capacity", *arguments)
    assert refused.returncode == 2
    assert said in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def test_ctrl_c_is_exit_130_and_leaves_interrupted_on_record(
    root: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    state = tmp_path / "state"
    process = subprocess.Popen(
        [sys.executable, str(root / "tasks.py"), "phase", "run", "0"],
        env=os.environ | {"KD_STATE": str(state)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for _ in range(1200):
        if list(state.glob("logs/*/*.log")):
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "kd: interrupted"
    (record,) = (state / "evidence").glob("*.json")
    assert "interrupted" in {gate["status"] for gate in json.loads(record.read_text())["gates"]}


def test_serve_says_what_it_would_start(kd: Kd) -> None:
    said = kd("serve", "--phase", "4", "--dry-run", "--", "--model-path", "/m x", "--port", "5")
    assert said.returncode == 0
    assert said.stdout.endswith(
        " -m sglang.launch_server --attention-backend kdtree_mla --model-path '/m x' --port 5\n"
    )
    given = json.loads(
        kd("serve", "--phase", "3", "--dry-run", "--json", "--", "--model-path", "m").stdout
    )
    assert given["environment"] == {}
    assert given["command"][-3:] == ["--disable-cuda-graph", "--model-path", "m"]
    refused = kd("serve", "--phase", "4")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "no model is named" in refused.stderr
    for wrong in (
        ("serve",),
        ("serve", "--phase", "4", "--release", "a"),
        ("serve", "--end", "serve-1"),
        ("serve", "--host", "ct200", "--phase", "4", "--end", "serve-1"),
    ):
        assert kd(*wrong).returncode == 2


def test_a_reader_that_goes_away_is_no_failed_gate(
    root: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, str(root / "tasks.py"), "status"],
        env=os.environ | {"KD_STATE": str(tmp_path / "state")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (128 + signal.SIGPIPE, "")


@pytest.mark.slow
def test_a_checkout_becomes_a_release_of_this_machine(
    kd: Kd, root: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """`local` of the inventory keeps it below HOME."""
    if shutil.which("rsync") is None or not (root / ".git").exists():
        pytest.skip("needs rsync and a git checkout")
    there = {"HOME": str(tmp_path)}
    preview = kd("deploy", "--dry-run", **there)
    rows = {line.split()[0]: line.split()[1:] for line in preview.stdout.splitlines()}
    assert rows["new"] == ["files", "KiB"]
    assert len(rows) < 12, "a line for each folder, and not for each file"
    assert int(rows["plans"][0]) > 10
    assert "against nothing:" in preview.stderr
    assert not (tmp_path / ".local").exists()
    deployed = kd("deploy", "--no-validate", **there)
    assert deployed.returncode == 0, deployed.stderr
    release = deployed.stdout.strip()
    assert (tmp_path / ".local/share/kd/releases" / release / "source/tasks.py").is_file()
    known = json.loads(kd("releases", "--json", **there).stdout)
    assert [one["release"] for one in known["releases"]] == [release]
    asked = kd("validate", "oracle", "--dry-run", "--json", **there)
    assert asked.returncode == 3
    answer = json.loads(asked.stdout)
    assert (answer["release"], answer["phase"]) == (release, "p0_oracle")
    assert {one["state"] for one in answer["gates"]} == {"missing"}
    assert kd("validate", "0", "--release", "x", **there).returncode == 2


def test_a_bundle_that_cannot_be_is_one_line(kd: Kd, tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"no tar")
    for path, says in (("a.tar", "is no whole bundle of kd"), ("b.tar", "there is no such file")):
        refused = kd("deploy", "--bundle", str(tmp_path / path), HOME=str(tmp_path))
        assert (refused.returncode, refused.stdout) == (2, "")
        assert len(refused.stderr.splitlines()) == 1
        assert says in refused.stderr
    assert kd("bundle", "--python", "3").returncode == 2
    assert kd("bundle", "--python", "3.12", "--output", "/no/such/a.tar").returncode == 2
    assert not (tmp_path / ".local").exists()


def test_where_each_gate_stands_is_said_without_a_run(kd: Kd, tmp_path: pathlib.Path) -> None:
    kd("phase", "run", "0", "--only", "mask-layouts")
    run = kd("verify", "--dry-run", "--phase", "oracle")
    assert run.returncode == 3
    rows = [line.split()[:3] for line in run.stdout.splitlines()]
    assert rows[0] == ["phase", "gate", "state"]
    assert ["p0_oracle", "mask-layouts", "proven"] in rows
    assert ["p0_oracle", "mask-paths", "missing"] in rows
    answer = json.loads(kd("verify", "--dry-run", "--json").stdout)
    assert answer["exit_code"] == 3
    assert {one["kind"] for one in answer["gates"]} == {"correctness", "speed"}
    exact = {one["gate"] for one in answer["gates"] if one["token_exact"]}
    assert exact == {
        *("service-token-exact", "graph-service-token-exact", "churn-service-token-exact"),
        "relocation-service-token-exact",
        *("ddtree-token-exact", "ddtree-distribution", "ddtree-graph-token-exact"),
    }
    assert len(list((tmp_path / "state/evidence").iterdir())) == 1, "nothing was run"
    assert kd("verify", "--dry-run", "--phase", "orcale").returncode == 2


def test_verify_runs_the_gates_up_to_a_phase_alone(kd: Kd, tmp_path: pathlib.Path) -> None:
    """What is proven below it is not run again."""
    kd("phase", "run", "0", "--only", "mask-layouts")
    root = find_checkout().root
    store = Store(tmp_path / "state/evidence", tmp_path / "kept", root)
    (record,) = store.own_records()
    entries = []
    for gate in load_phases()[0].gates:
        if gate.name != "mask-layouts":
            fields = dict(record.gates[0]) | {"gate": gate.name}
            entries.append(
                GateRecord.model_validate(fields | {"content": gate_content(root, gate)})
            )
    quick = entries.pop(2)
    assert quick.gate == "mask-paths"
    changed = dict(record) | {"run": f"{record.run[:-6]}ffffff", "gates": tuple(entries)}
    store.save(Record.model_validate(changed))
    run = kd("verify", "--phase", "0", "--json")
    assert run.returncode == 0, run.stderr
    answer = json.loads(run.stdout)
    assert [one["gate"] for one in answer["gates"]] == ["mask-paths"]
    assert len(answer["fresh"]) == 8


def test_a_lock_that_was_left_behind_is_broken_by_its_owners_name(
    kd: Kd, tmp_path: pathlib.Path
) -> None:
    there = {"HOME": str(tmp_path)}
    assert kd("unlock", **there).stdout == "nobody has the lock of local\n"
    folder = tmp_path / ".local/share/kd"
    folder.mkdir(parents=True)
    lock = {"owner": "ann@there", "command": "kd deploy", "token": "x", "at": 1.0}
    (folder / "lock.json").write_text(json.dumps(lock))
    shown = kd("unlock", **there)
    assert (shown.returncode, shown.stdout) == (0, "left as it is\n")
    assert "ann@there has had the lock of local since 1970-01-01 00:00:01 UTC" in shown.stderr
    assert kd("unlock", "--owner", "bob", **there).returncode == 2
    refused = kd("deploy", **there)
    assert refused.returncode == 2
    assert "locked by ann@there" in refused.stderr
    assert "kd unlock" in refused.stderr
    assert not (folder / "audit.jsonl").exists()
    assert kd("unlock", "--owner", "ann@there", **there).stdout == "broken\n"
    assert not (folder / "lock.json").exists()
    (audited,) = map(json.loads, (folder / "audit.jsonl").read_text().splitlines())
    assert [audited[key] for key in ("did", "from", "result")] == ["unlock", "ann@there", "broken"]
    assert "@" in audited["by"]
    (folder / "lock.json").write_text("")
    assert "the lock of local is damaged since 20" in kd("unlock", **there).stderr
    assert kd("unlock", "--owner", "damaged", **there).stdout == "broken\n"
    assert not (folder / "lock.json").exists()


GROUPED = """\
hosts:
  one: {kind: local, root: /srv/one}
  two: {kind: local, root: /srv/two}
groups:
  both: [two, one]
  last: [two]
"""


class TestSeveralHosts:
    @pytest.fixture
    def grouped(self, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """An inventory of two hosts and two groups."""
        (tmp_path / "hosts.yaml").write_text(GROUPED)
        checkout = types.SimpleNamespace(hosts_file=tmp_path / "hosts.yaml")
        monkeypatch.setattr(tasks, "_checkout", lambda: checkout)

    def test_the_list_shows_groups(self, grouped: None) -> None:
        call = click.testing.CliRunner().invoke
        lines = call(tasks.cli, ["hosts", "list"]).stdout.splitlines()
        assert [line.split() for line in lines] == [
            ["host", "kind", "address", "groups"],
            ["one", "local", "both"],
            ["two", "local", "both,", "last"],
        ]
        listed = json.loads(call(tasks.cli, ["hosts", "list", "--json"]).stdout)
        assert listed["two"]["groups"] == ["both", "last"]
        assert listed["one"]["kind"] == "local"

    def test_hosts_and_groups_are_completed(self, grouped: None) -> None:
        command = tasks.deploy
        context = click.Context(command)
        (option,) = (one for one in command.params if one.name == "host_names")

        def completed(word: str) -> list[str]:
            return [item.value for item in option.shell_complete(context, word)]

        assert completed("") == ["one", "two", "both", "last"]
        assert completed("b") == ["both"]
        assert completed("one,t") == ["one,two"]

    def test_one_after_the_other_and_json_by_their_names(
        self, grouped: None, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tasks._on_each(tasks._hosts("both"), lambda host: ({"root": host.root}, 0), True)
        said = capsys.readouterr()
        assert json.loads(said.out) == {"two": {"root": "/srv/two"}, "one": {"root": "/srv/one"}}
        assert said.err.splitlines() == ["host two (1 of 2)", "host one (2 of 2)"]

    def test_one_host_answers_as_it_is(
        self, grouped: None, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for names in ("one", "one,one"):
            tasks._on_each(tasks._hosts(names), lambda host: ({"root": host.root}, 0), True)
            said = capsys.readouterr()
            assert (json.loads(said.out), said.err) == ({"root": "/srv/one"}, "")

    def test_the_first_that_fails_ends_it(self, kd: Kd, root: pathlib.Path) -> None:
        """ct200 is an example and nowhere. What was done before is told all the same."""
        if not (root / ".git").exists():
            pytest.skip("needs a git checkout")
        first = kd("deploy", "--dry-run", "--host", "ct200,local", "--json")
        assert (first.returncode, json.loads(first.stdout)) == (2, {})
        begins, stopped, why = first.stderr.splitlines()
        assert begins == "host ct200 (1 of 2)"
        assert stopped == "stopped at host ct200; not reached: local"
        assert why.startswith("kd: host ct200: ")
        second = kd("deploy", "--dry-run", "--host", "local,ct200", "--json")
        assert (second.returncode, list(json.loads(second.stdout))) == (2, ["local"])
        assert "stopped at host ct200; not reached: none" in second.stderr

    def test_a_name_of_nothing_is_exit_2_before_anything_is_done(self, kd: Kd) -> None:
        run = kd("deploy", "--dry-run", "--host", "local,ct20")
        assert (run.returncode, run.stdout) == (2, "")
        assert run.stderr == "kd: unknown host or group 'ct20' (did you mean ct200?)\n"


def test_hosts_that_are_not_reached_are_exit_1(kd: Kd) -> None:
    found = kd("hosts", "check", "local", "--json")
    assert found.returncode == 0
    assert json.loads(found.stdout)["local"]["reached"] is True
