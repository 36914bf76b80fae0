"""Whether a host has what a promotion will need, looked at on the host itself. Changes nothing.

It is sent there like `remote.agent`, and needs Python 3.9 and its standard library alone. What only
a start can tell is not looked at: whether SGLang can serve the model, and how long that takes.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from remote import agent, launch, managers, promoter

_LIMIT_S = 30.0
_MB = 1 << 20
_SYSTEMD = pathlib.Path("/run/systemd/system")
"""It is there where systemd runs, and nowhere else: sd_booted(3)."""


class _Host:
    """This host, as the inventory says that it is.

    request: root, manager (of `managers.manager_of`), model, port, tensor_parallel, environment and
    cuda_arch of the inventory.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self._request = request
        self._root = agent.in_home(request["root"])
        self._manager = managers.manager_of(str(self._root), request["manager"])

    def sglang(self) -> str:
        version = agent.installed(["sglang"])["sglang"]
        if version is None:
            raise agent.Refused(f"{sys.executable} has no SGLang")
        return version

    def manager(self) -> str:
        if isinstance(self._manager, managers.Supervisor):
            python = str(agent.in_home(self._request["manager"]["python"]))
            if _fails([python, "-c", "import supervisor"]):
                raise agent.Refused(
                    f"{python} has no supervisor; on that host: {python} -m pip install supervisor"
                )
            return "supervisor"
        if not _SYSTEMD.is_dir():
            raise agent.Refused("no systemd runs there: `manager: supervisor` does without")
        for program in ("systemctl", "install"):
            if os.geteuid() and _fails(["sudo", "-n", "-l", program]):
                raise agent.Refused(f"`sudo -n {program}` is not allowed to this user")
        self._manager.require()
        return "systemd"

    def model(self) -> str:
        return str(agent.model_of(str(self._root), self._request["model"])["path"])

    def port(self) -> str:
        port = int(self._request["port"])
        if not promoter.listens(port):
            return f"{port} is free"
        first = self._first()
        if first is None or agent.listens(str(self._root), first, port) is False:
            raise agent.Refused(f"{port} is held by something that kd does not manage")
        return f"{port} is the live service's"

    def disk(self) -> str:
        place = self._root
        while not place.exists():
            place = place.parent
        if not place.is_dir():
            raise agent.Refused(f"{place} is a file, and a folder is to be there")
        if not os.access(place, os.W_OK | os.X_OK):
            raise agent.Refused(f"{place} cannot be written to by this user")
        free = shutil.disk_usage(place).free
        if free < promoter.FREE:
            raise agent.Refused(
                f"{free // _MB} MB are free below {place}, {promoter.FREE // _MB} MB are needed"
            )
        return f"{free // _MB} MB are free"

    def secrets(self) -> str:
        names = self._request["environment"]
        place = self._root / "secrets.env"
        try:
            given = launch.secrets(place)
        except launch.Refused as error:
            raise agent.Refused(str(error)) from None
        missing = [name for name in names if name not in given]
        # What this connection has by itself is nothing that the service is given.
        unseen = ""
        if missing:
            try:
                has = self._manager.variables()
                missing = [name for name in missing if name not in has]
                unseen = f", nor in the environment of {self._request['manager']['kind']}"
            except agent.Refused as error:
                unseen = f", and whether the manager's environment has it is not known: {error}"
        if missing:
            raise agent.Refused(
                f"{', '.join(missing)} is named for the service, and not in {place}{unseen}: a "
                f"line NAME=value for each, chmod 600"
            )
        return ", ".join(names) or "none is named"

    def records(self) -> str:
        """What promotions and releases left there, which the next one reads."""
        root = str(self._root)
        agent.require_folders(root)
        count = len(agent.releases(root)["releases"])
        agent.promotions(root)
        agent.tokens(root)
        return f"{count} releases"

    def gpus(self) -> str:
        arch, wanted = self._request["cuda_arch"], int(self._request["tensor_parallel"])
        if arch is None:
            return "none is named"
        told = _smi("index,compute_cap,memory.used,memory.total")
        found = [index for index, cap, *_ in told if _arch(cap) == arch.rstrip("af")]
        if len(found) < wanted:
            there = ", ".join(f"GPU {index}: {_arch(cap)}" for index, cap, *_ in told) or "no GPU"
            raise agent.Refused(f"{wanted} of {arch} are needed, and there is {there}")
        held, untold = [], []
        for index, _, used, total in told:
            try:
                share = float(used) / float(total)
            except (ValueError, ZeroDivisionError):
                share = math.nan  # "[N/A]", of memory that is the host's, and where it may not say
            if not math.isfinite(share):
                untold.append(f"GPU {index} ({used} of {total})")
            elif share > promoter.GPU_LEFT:
                held.append(f"{used} of {total} MiB of GPU {index}")
        if held and self._first() is None:
            raise agent.Refused(f"memory is held, and no service of kd's runs: {', '.join(held)}")
        # A promotion does not wait for what nvidia-smi cannot tell, so that this is no reason.
        unknown = f"; nvidia-smi does not tell the memory of {', '.join(untold)}" if untold else ""
        return f"{len(found)} of {arch}{unknown}"

    def _first(self) -> int | None:
        """The first process of the live service; None where none runs."""
        configured = (self._root / "service" / "supervisord.conf").exists()
        if self._request["manager"]["kind"] == "supervisor" and not configured:
            return None
        pid: int | None = self._manager.status()["pid"]
        return pid


def look(request: dict[str, Any]) -> list[dict[str, Any]]:
    """`what`, `ok` and `said` of each thing that a promotion needs, in the order of looking."""
    host = _Host(request)
    looks: tuple[Callable[[], str], ...] = (
        *(host.sglang, host.manager, host.model, host.port),
        *(host.disk, host.records, host.secrets, host.gpus),
    )
    found = []
    for one in looks:
        try:
            said, ok = one(), True
        except Exception as error:  # whatever ends one look, the others are of use
            said, ok = " ".join(_told(error).split())[:500], False
        found.append({"what": one.__name__, "ok": ok, "said": said})
    return found


def _told(error: Exception) -> str:
    if isinstance(error, OSError):
        return agent.told(error)
    known = isinstance(error, agent.Refused)
    return str(error) if known else f"cannot be looked at, a fault of kd: {error!r}"


def _fails(line: list[str]) -> bool:
    try:
        done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return True
    return bool(done.returncode)


def _smi(query: str) -> list[list[str]]:
    """What nvidia-smi says of each GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        raise agent.Refused("nvidia-smi is not on PATH: nobody can say what GPUs there are")
    done = managers.run(
        [program, "--format=csv,noheader,nounits", f"--query-gpu={query}"], _LIMIT_S
    )
    rows = [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines()]
    if done.returncode or any(len(row) != query.count(",") + 1 for row in rows):
        raise agent.Refused(f"nvidia-smi fails: {(done.stderr or done.stdout).strip()[:200]}")
    return rows


def _arch(capability: str) -> str:
    """sm_120 of 12.0."""
    number = capability.replace(".", "")
    return f"sm_{number}" if number.isdigit() else "an unknown architecture"


def main(request: dict[str, Any]) -> None:
    """Say on stdout what `look` finds."""
    print(json.dumps({"done": {"found": look(request)}}), flush=True)
