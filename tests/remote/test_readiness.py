"""Whether a host has what a promotion will need: each thing that may lack, and what is said."""

from __future__ import annotations

import os
import pathlib
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import ssh_server

from remote import agent, managers, promoter, readiness

GPUS = "0, 12.0, 5, 97887\n1, 12.0, 5, 97887\n"


class Host:
    """A host that lacks nothing, until a test takes something away."""

    def __init__(self, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = folder / "root"
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text('{"vocab_size": 97}')
        self.root.mkdir()
        self.secrets = self.root / "secrets.env"
        self.secrets.write_text("HF_TOKEN=hush\n")
        self.secrets.chmod(0o600)
        self.programs = folder / "bin"
        self.programs.mkdir()
        self.program("nvidia-smi", f"printf '{GPUS}'")
        monkeypatch.setenv("PATH", str(self.programs), prepend=":")
        monkeypatch.setattr(agent, "installed", lambda names: {"sglang": "0.5.23"})
        monkeypatch.setattr(readiness, "_fails", lambda line: False)
        self.request: dict[str, Any] = {
            "root": str(self.root),
            "manager": {"kind": "supervisor", "unit": "sglang", "python": sys.executable},
            "model": str(self.model),
            "port": ssh_server.free_port(),
            "tensor_parallel": 2,
            "environment": ["HF_TOKEN"],
            "cuda_arch": "sm_120",
        }

    def program(self, name: str, script: str) -> None:
        path = self.programs / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def lacks(self) -> dict[str, str]:
        return {one["what"]: one["said"] for one in readiness.look(self.request) if not one["ok"]}


@pytest.fixture
def host(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def test_what_is_there_is_said(host: Host) -> None:
    before = sorted(host.root.rglob("*"))
    found = readiness.look(host.request)
    assert [one["what"] for one in found] == [
        *("sglang", "manager", "model", "port", "disk", "records", "secrets", "gpus")
    ]
    said = {one["what"]: one["said"] for one in found if one["ok"]}
    assert said.pop("disk").endswith(" MB are free")
    assert said == {
        "sglang": "0.5.23",
        "manager": "supervisor",
        "model": str(host.model),
        "port": f"{host.request['port']} is free",
        "records": "0 releases",
        "secrets": "HF_TOKEN",
        "gpus": "2 of sm_120",
    }
    assert sorted(host.root.rglob("*")) == before, "nothing is written"


def test_without_sglang(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "installed", lambda names: {"sglang": None})
    assert host.lacks() == {"sglang": f"{sys.executable} has no SGLang"}


def test_without_supervisor(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "_fails", lambda line: True)
    assert "-m pip install supervisor" in host.lacks()["manager"]


class TestSystemd:
    @pytest.fixture(autouse=True)
    def systemd(self, host: Host, tmp_path: pathlib.Path) -> None:
        about = {"kind": "systemd", "units": str(tmp_path / "units")}
        host.request["manager"].update(about)
        (tmp_path / "units").mkdir()
        host.program("systemctl", "")  # it knows of no unit

    def test_where_none_runs(
        self, host: Host, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(readiness, "_SYSTEMD", tmp_path / "absent")  # whatever runs here
        assert "no systemd runs there" in host.lacks()["manager"]

    def test_a_unit_of_somebody_else(
        self, host: Host, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(readiness, "_SYSTEMD", tmp_path)
        assert host.lacks() == {}
        unit = tmp_path / "units" / "sglang.service"
        unit.write_text("[Unit]\n")
        assert "kd has not written it" in host.lacks()["manager"]
        unit.write_text(f"{managers.WRITTEN_BY}\n")
        assert host.lacks() == {}

    def test_an_old_one(
        self, host: Host, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(readiness, "_SYSTEMD", tmp_path)
        host.program("systemctl", 'echo "systemd 239 (239-82.el8)"')
        assert "this is systemd 239, and 240 or newer is needed" in host.lacks()["manager"]

    def test_without_sudo(
        self, host: Host, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(readiness, "_SYSTEMD", tmp_path)
        monkeypatch.setattr(readiness, "_fails", lambda line: "install" in line)
        monkeypatch.setattr("os.geteuid", lambda: 1000)
        assert host.lacks() == {"manager": "`sudo -n install` is not allowed to this user"}


def test_without_the_model(host: Host) -> None:
    shutil.rmtree(host.model)
    assert "has no config.json" in host.lacks()["model"]


def test_a_port_that_somebody_else_has(host: Host) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", host.request["port"]))
        other.listen()
        assert "is held by something that kd does not manage" in host.lacks()["port"]


def test_a_full_disk(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(host.root)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=5 << 20))
    assert host.lacks() == {"disk": f"5 MB are free below {host.root}, 32 MB are needed"}


def test_secrets_that_are_named_and_not_there(host: Host) -> None:
    host.request["environment"] = ["HF_TOKEN", "KD_NOT_THERE"]
    assert host.lacks()["secrets"].startswith("KD_NOT_THERE is named for the service, and not in ")
    host.secrets.chmod(0o644)
    assert "chmod 600" in host.lacks()["secrets"]
    shutil.rmtree(host.root)  # before the first deployment
    assert "HF_TOKEN, KD_NOT_THERE" in host.lacks()["secrets"]


class TestVariablesOfTheManager:
    """What this connection has by itself is nothing that the service is given."""

    @pytest.fixture(autouse=True)
    def named(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        host.request["environment"] = ["HF_TOKEN", "KD_ELSEWHERE"]
        monkeypatch.setenv("KD_ELSEWHERE", "x")

    @pytest.fixture
    def supervisord(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
        (host.root / "service").mkdir()
        (host.root / "service/supervisord.conf").write_text("")

        def runs_as(pid: object) -> None:
            def control(self: object, *words: str, **more: object) -> str | None:
                return {"pid": pid if pid is None else str(pid)}.get(words[0], "")

            monkeypatch.setattr(managers.Supervisor, "_control", control)

        return runs_as

    def test_of_a_supervisord_that_is_still_to_be_started(
        self, host: Host, supervisord: Callable[..., None]
    ) -> None:
        supervisord(None)
        assert host.lacks() == {}, "it will have what this connection has"

    @pytest.mark.parametrize("has", [False, True])
    def test_of_a_supervisord_that_runs(
        self, host: Host, supervisord: Callable[..., None], has: bool
    ) -> None:
        variables = {"PATH": os.environ["PATH"], **({"KD_ELSEWHERE": "y"} if has else {})}
        line = [sys.executable, "-c", "print(1, flush=True); input()"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(line, env=variables, **pipes) as process:
            assert process.stdout is not None
            process.stdout.readline()  # its environment is the new one by then
            supervisord(process.pid)
            said = host.lacks()
            process.kill()
        if has:
            assert said == {}
        else:
            assert said["secrets"].startswith("KD_ELSEWHERE is named for the service, and not in ")
            assert ", nor in the environment of supervisor: a line NAME=value" in said["secrets"]

    def test_of_one_that_cannot_be_looked_at(
        self, host: Host, supervisord: Callable[..., None]
    ) -> None:
        supervisord(1 << 30)
        assert "whether the manager's environment has it is not known" in host.lacks()["secrets"]

    @pytest.mark.parametrize(
        ("unit", "own", "says"),
        [
            (
                "Environment=\nEnvironmentFiles=",
                "PATH=/bin\nLANG=C.UTF-8",
                "nor in the environment",
            ),
            ("Environment=\nEnvironmentFiles=", "PATH=/bin\nKD_ELSEWHERE=y", None),
            ('Environment=A=1 "KD_ELSEWHERE=a b"\nEnvironmentFiles=', "PATH=/bin", None),
            (
                "Environment=\nEnvironmentFiles=/etc/x (ignore_errors=no)",
                "",
                "reads more from /etc/x",
            ),
            (None, "", "systemctl does not say: Failed to connect to bus"),
        ],
    )
    def test_of_systemd(
        self,
        host: Host,
        tmp_path: pathlib.Path,
        monkeypatch: pytest.MonkeyPatch,
        unit: str | None,
        own: str,
        says: str | None,
    ) -> None:
        monkeypatch.setattr(readiness, "_SYSTEMD", tmp_path)
        host.request["manager"].update(kind="systemd", units=str(tmp_path))
        for name, text in (("unit", unit or ""), ("own", own)):
            (tmp_path / name).write_text(f"{text}\n")
        fails = "echo Failed to connect to bus >&2; exit 1" if unit is None else ""
        says_it = f"case $1 in\n  show) cat '{tmp_path}/unit';;\n  *) cat '{tmp_path}/own';;\nesac"
        host.program("systemctl", f"{fails}\n{says_it}")
        if says is None:
            assert host.lacks() == {}
        else:
            assert says in host.lacks()["secrets"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("promotions.jsonl", "garbage\n", "promotions.jsonl, line 1: expected JSON with a release"),
        ("releases", "", "releases: expected a folder, got a file: move it away by hand"),
        ("jobs", "", "jobs: expected a folder, got a file: move it away by hand"),
        ("current", "", "current: expected a link to a release, got a file: move it away by hand"),
        (
            "tokens.json",
            "[" * 100_000,
            "tokens.json cannot be read: it is nested too deeply: kd rec",
        ),
    ],
)
def test_what_is_damaged_comes_with_what_mends_it(
    host: Host, name: str, content: str, says: str
) -> None:
    (host.root / name).write_text(content)
    assert list(host.lacks()) == ["records"]
    assert says in host.lacks()["records"]


def test_a_root_below_a_file(host: Host, tmp_path: pathlib.Path) -> None:
    program = tmp_path / "program"
    program.write_text("")
    program.chmod(0o755)
    host.request["root"] = str(program / "root")
    lacks = host.lacks()
    assert lacks["disk"] == f"{program} is a file, and a folder is to be there"
    assert lacks["secrets"] == f"{program}/root/secrets.env: Not a directory"


def test_one_look_that_fails_hides_no_other(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*of_no_use: object) -> None:
        raise OverflowError("cannot convert")

    monkeypatch.setattr(agent, "model_of", broken)
    monkeypatch.setattr(promoter, "listens", broken)
    host.secrets.unlink()
    assert list(host.lacks()) == ["model", "port", "secrets"]
    assert "a fault of kd: OverflowError" in host.lacks()["model"]


@pytest.mark.parametrize(
    ("told", "untold"),
    [
        ("0, 12.0, [N/A], [N/A]\n1, 12.0, 5, 97887\n", "GPU 0 ([N/A] of [N/A])"),
        ("0, 12.0, 5, 97887\n1, 12.0, nan, 97887\n", "GPU 1 (nan of 97887)"),
        ("0, 12.0, 5, 0\n1, 12.0, 5, 9788\n", "GPU 0 (5 of 0)"),
    ],
)
def test_memory_that_is_not_told_is_said_to_be_so(host: Host, told: str, untold: str) -> None:
    """A promotion does not wait for it either."""
    host.program("nvidia-smi", f"printf '{told}'")
    (gpus,) = (one for one in readiness.look(host.request) if one["what"] == "gpus")
    assert gpus == {
        "what": "gpus",
        "ok": True,
        "said": f"2 of sm_120; nvidia-smi does not tell the memory of {untold}",
    }


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("printf '0, 12.0, 5, 97887\\n'", "2 of sm_120 are needed, and there is GPU 0: sm_120"),
        ("printf '0, 9.0, 5, 9\\n1, 9.0, 5, 9\\n'", "there is GPU 0: sm_90, GPU 1: sm_90"),
        ("printf ''", "there is no GPU"),
        ("echo '0, [N/A], 0, 5'", "2 of sm_120 are needed, and there is GPU 0: an unknown arch"),
        ("echo no driver; exit 9", "nvidia-smi fails: no driver"),
        ("printf '\\377\\376'", "nvidia-smi fails: \ufffd\ufffd"),
        (
            "printf '0, 12.0, 5, 97887\\n1, 12.0, 80000, 97887\\n'",
            "memory is held, and no service of kd's runs: 80000 of 97887 MiB of GPU 1",
        ),
    ],
)
def test_gpus(host: Host, script: str, says: str) -> None:
    host.program("nvidia-smi", script)
    (what,) = host.lacks().items()
    assert what[0] == "gpus"
    assert says in what[1]


def test_without_nvidia_smi(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "nvidia-smi is not on PATH" in host.lacks()["gpus"]
    host.request["cuda_arch"] = None
    assert host.lacks() == {}


def test_as_much_room_as_a_promotion_asks_for() -> None:
    assert promoter.FREE == 32 << 20
