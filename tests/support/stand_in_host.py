"""A host with a live service: a real manager, and a stand-in for SGLang that starts at once."""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from typing import Any, Literal

import ssh_server
import stand_in_server
from systemd_machine import MachineTransport, SystemdMachine

from phases.recorded import draw_prompts
from remote.agent import file_digest
from remote.errors import TransportError
from remote.inventory import Health, LocalHost, Service
from remote.local import LocalTransport
from remote.promotion import LiveService, Outcome, Target
from remote.releases import Releases
from remote.transport import Transport

NEW_TOKENS = 6


class StandInHost:
    """One host with a service, and what a person would do with it."""

    def __init__(
        self,
        folder: pathlib.Path,
        transport: Transport,
        manager: Literal["supervisor", "systemd"] = "supervisor",
        interpreter: str = sys.executable,
    ) -> None:
        self.root = folder / "a root's"
        self.said: list[str] = []
        self.port = ssh_server.free_port()
        # SGLang's Python: a server that it is asked for is the stand-in.
        server = shutil.copy(stand_in_server.__file__, folder)
        self.python = folder / "python"
        self.python.write_text(
            f'#!/bin/sh\nif [ "$1 $2" = "-m sglang.launch_server" ]; then\n'
            f'  shift 2; exec "{interpreter}" "{server}" "$@"\n'
            f'fi\nexec "{interpreter}" "$@"\n'
        )
        self.python.chmod(0o755)
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text('{"vocab_size": 97}')
        self.host = LocalHost(
            name="here",
            kind="local",
            root=str(self.root),
            python=str(self.python),
            service=Service(
                manager=manager,
                unit="sglang",
                model_path=str(self.model),
                tensor_parallel=1,
                port=self.port,
            ),
            health=Health(
                start_ceiling_s=9,
                stalled_log_s=4,
                poll_s=0.2,
                sustain_s=0.6,
                prompts=3,
                new_tokens=NEW_TOKENS,
            ),
        )
        self.transport = transport
        self.releases = Releases(transport, python=interpreter, root=str(self.root))
        self.live = LiveService(
            transport,
            self.releases,
            self.host,
            python=str(self.python),
            manager_python=interpreter,
        )
        prompts = draw_prompts(vocabulary=97, positions=None, count=3, new_tokens=NEW_TOKENS)
        self.prompts = prompts
        self.checks = [
            {
                "prompt": one,
                "tokens": stand_in_server.tokens_after(one, NEW_TOKENS),
                "others": {},
            }
            for one in prompts
        ]

    def place(self, release: str, behaviour: str = "") -> str:
        """A release whose service behaves so."""
        self.releases.prepare()
        wheel = self.root / "incoming" / "wheel" / "engine-1-py3-none-any.whl"
        wheel.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel, "w") as packed:
            packed.writestr("behaviour", behaviour)
        manifest = {f"wheel/{wheel.name}": {"sha256": file_digest(wheel), "executable": False}}
        self.releases.place(release, manifest, {})
        return release

    def promote(self, release: str | None, phase: int | None = 3) -> Outcome:
        target = Target(release, None if release is None else phase, ("--x", "1"), {})
        return self.live.promote(target, self.checks, command="kd promote", note=self.said.append)

    def back(self, entry: dict[str, Any], what: str = "rollback") -> Outcome:
        seen = self.releases.promotions()["live"]
        return self.live.again(
            what, entry, self.checks, seen=seen, command="kd", note=self.said.append
        )

    def stop(self) -> Outcome:
        live = self.releases.promotions()["live"]
        return self.live.stop(live, command="kd stop", note=self.said.append)

    def serves(self) -> str | None:
        """The release that serves right now, and rightly."""
        body = {"input_ids": [[1, 2]], "sampling_params": {"max_new_tokens": 4}}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/generate", json.dumps(body).encode()
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            (said,) = json.load(answer)
        assert said["output_ids"] == stand_in_server.tokens_after([1, 2], 4)
        pid = self.live.manager.status().pid
        environment = self.there("cat", f"/proc/{pid}/environ").split("\0")
        (path,) = [one for one in environment if one.startswith("PYTHONPATH=")]
        return pathlib.Path(path.partition("=")[2]).parent.name or None

    def is_well(self, release: str | None) -> None:
        """This release is live by every account, and nobody has the lock."""
        assert self.serves() == release
        found = self.releases.promotions()["live"]
        assert found["release"] == release
        assert self.releases.known()["current"] == release
        assert self.releases.lock_holder() is None

    def audit(self) -> list[tuple[str, str | None, str | None, str]]:
        return [
            (one["did"], one["from"], one["to"], one["result"]) for one in self.releases.audited(99)
        ]

    def there(self, *argv: str) -> str:
        """What a command on the host prints: its processes may have other numbers than here."""
        return self.transport.run(argv, timeout=30).stdout

    def close(self) -> None:
        if self.live.manager.kind == "systemd":
            self.live.manager.stop()
            return
        conf = self.root / "service" / "supervisord.conf"
        if conf.is_file():
            with contextlib.suppress(TransportError):
                self.live.manager.stop()
            line = [sys.executable, "-m", "supervisor.supervisorctl", "-c", str(conf), "shutdown"]
            subprocess.run(line, capture_output=True, check=False, timeout=60)
            deadline = time.monotonic() + 30
            while (self.root / "service" / "supervisord.pid").exists():
                assert time.monotonic() < deadline
                time.sleep(0.05)


@contextlib.contextmanager
def stand_in(folder: pathlib.Path, machine: SystemdMachine | None = None) -> Iterator[StandInHost]:
    """Such a host: this machine with a supervisord, or a machine with systemd."""
    if machine is None:
        made = StandInHost(folder, LocalTransport())
    else:
        machine.drop_in("sglang", "[Service]", "TimeoutStopSec=2")  # of a test that has no minute
        made = StandInHost(folder, MachineTransport(machine.enter), "systemd")
    try:
        yield made
    finally:
        made.close()
        if machine is not None:
            machine.forget("sglang")


def interrupts(
    host: StandInHost, *lines: str, number: signal.Signals = signal.SIGINT
) -> threading.Thread:
    """Ctrl-C to this thread each time that the next of these begins a line that was said.

    number: another signal than that of Ctrl-C.
    """
    main = threading.main_thread().ident
    assert main is not None
    seen = len(host.said)

    def watch() -> None:
        place = seen
        for wanted in lines:
            while not any(line.startswith(wanted) for line in host.said[place:]):
                time.sleep(0.02)
            place = len(host.said)
            signal.pthread_kill(main, number)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread
