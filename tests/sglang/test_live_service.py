"""The real SGLang as a host's live service: recorded, promoted, taken back; over a real sshd.

The host is this machine, reached over SSH; its service manager is a real supervisord. Services that
are unfit in other ways are in tests/remote/test_promotion.py, with a stand-in that starts at once.
"""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
import ssh_server

from phases.phase import Phase
from phases.recorded import draw_prompts, expected, without_speculation
from phases.registry import find_phase, load_phases
from phases.service import server_python
from phases.service_scale import CPU, kernel
from phases.small_model import write_small_model
from remote.deploy import Deployment, releases_of
from remote.inventory import Health, Service, SshHost
from remote.promotion import LiveService, Outcome, Target
from remote.ssh import SshTransport

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
pytest.importorskip("supervisor", reason="supervisor is not installed")

WRONG = ("mask=metadata.custom_mask,", "mask=torch.ones_like(metadata.custom_mask),")
ENVIRONMENT = (*CPU.environment, "KD_TEST_SECRET")


class Live:
    """A host with SGLang on it, and this checkout on its way there."""

    def __init__(
        self, folder: pathlib.Path, root: pathlib.Path, server: ssh_server.SshServer
    ) -> None:
        self.said: list[str] = []
        self._root = root
        python = folder / "python"
        (support,) = CPU.paths
        # What makes SGLang run on a CPU at all is the host's own affair.
        python.write_text(
            f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{support}" exec "{server_python()}" "$@"\n'
        )
        python.chmod(0o755)
        model = write_small_model(folder / "model", seed=1)
        self.host: SshHost = server.host(
            root=str(folder / "root"),
            python=str(python),
            service=Service(
                manager="supervisor",
                unit="sglang",
                model_path=str(model),
                tensor_parallel=1,
                port=ssh_server.free_port(),
                arguments=(
                    *("--skip-tokenizer-init", *CPU.arguments, "--disable-cuda-graph"),
                    *("--attention-backend", "triton"),
                    *kernel(9).arguments[2:],
                ),
                environment=ENVIRONMENT,
            ),
            health=Health(
                start_ceiling_s=240,
                stalled_log_s=120,
                poll_s=1,
                sustain_s=3,
                prompts=3,
                new_tokens=12,
            ),
        )
        self.transport = SshTransport(self.host, folder=server.person)
        self.releases = releases_of(self.transport, self.host)
        self.service = LiveService(
            self.transport,
            self.releases,
            self.host,
            python=str(python),
            manager_python=sys.executable,
        )
        self.releases.prepare()
        secrets = folder / "root" / "secrets.env"
        values = {**CPU.environment, "KD_TEST_SECRET": "hush-hush"}
        secrets.write_text("".join(f"{name}={value}\n" for name, value in values.items()))
        secrets.chmod(0o600)

    def record(self) -> Outcome:
        assert self.host.service is not None
        model = self.service.model()
        prompts = draw_prompts(
            vocabulary=model["vocabulary"],
            positions=model["positions"],
            count=self.host.health.prompts,
            new_tokens=self.host.health.new_tokens,
        )
        arguments = without_speculation(self.host.service.command_line())
        return self.service.record(arguments, prompts, command="kd record", note=self.said.append)

    def deploy(self, checkout: pathlib.Path) -> str:
        deployment = Deployment(checkout, (None, None))
        return str(deployment.run(self.transport, self.host, note=self.said.append)["release"])

    def promote(self, release: str | None, phase: Phase, *more: str) -> Outcome:
        profile = phase.profile
        target = Target(release, phase.number, (*profile.arguments, *more), profile.environment)
        if release is None:
            target = Target(None, None, (), {})
        record = self.releases.tokens()
        assert record is not None
        checks = expected(record).checks
        return self.service.promote(target, checks, command="kd promote", note=self.said.append)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.service.manager.stop()
        conf = pathlib.Path(self.host.root) / "service" / "supervisord.conf"
        line = [sys.executable, "-m", "supervisor.supervisorctl", "-c", str(conf), "shutdown"]
        subprocess.run(line, capture_output=True, check=False, timeout=60)
        self.transport.close()


@pytest.fixture
def live(
    tmp_path: pathlib.Path, root: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Live]:
    if ssh_server.SSHD is None or shutil.which("rsync") is None:
        pytest.skip("sshd and rsync are needed (apt-get install openssh-server rsync)")
    server = ssh_server.SshServer(tmp_path_factory.mktemp("sshd"))
    made = Live(tmp_path, root, server)
    yield made
    made.close()
    server.stop()


def clone(root: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """The tracked files as they are, in a repository of their own."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z"], capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)
    for line in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *line], cwd=folder, check=True)
    return folder


def test_a_release_is_live_or_what_was_before_is(
    live: Live, root: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    phase = find_phase(load_phases(), "3")
    checkout = clone(root, tmp_path / "checkout")

    # Nothing is live yet; what plain decoding says is written down.
    assert live.record().result == "recorded"
    record = live.releases.tokens()
    assert record is not None
    assert record["server"]["version"] == "0.5.23"
    assert len({tuple(one["tokens"]) for one in record["together"]}) == 3
    assert live.service.manager.status().pid is None

    # Trees on the kernel give those tokens.
    good = live.deploy(checkout)
    outcome = live.promote(good, phase)
    assert (outcome.result, outcome.text) == ("promoted", f"phase 3 of {good} is live")
    log = live.releases.look_at_log(None, 400)["text"]
    assert "kdtree_mla: SGLang 0.5.23" in log
    assert "verify: kernel" in log

    # An engine that lets every node see every other one gives other tokens, and is taken back.
    mask = checkout / "kdtree-engine/kdtree_engine/sglang_ext/backend.py"
    text = mask.read_text()
    assert WRONG[0] in text, "the engine has changed: break it in another way here"
    mask.write_text(text.replace(*WRONG))
    bad = live.deploy(checkout)
    outcome = live.promote(bad, phase)
    assert outcome.result == "restored", outcome.text
    assert "other tokens than recorded" in outcome.text
    assert live.releases.known()["current"] == good

    # So is one that SGLang does not even start with.
    mask.write_text(text)
    outcome = live.promote(live.deploy(checkout), phase, "--no-such-argument")
    assert outcome.result == "restored", outcome.text
    assert "--no-such-argument" in outcome.text
    live_now = live.releases.promotions()["live"]
    assert (live_now["release"], live_now["phase"]) == (good, 3)
    assert live.releases.known()["current"] == good
    assert live.service.manager.status().pid is not None

    # No secret is anywhere but where the host keeps it.
    folder = pathlib.Path(live.host.root)
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "secrets.env":
            assert b"hush-hush" not in path.read_bytes(), path
    assert not any("hush-hush" in line for line in live.said)
