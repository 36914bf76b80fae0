"""A checkout brought to a host by the real rsync, and a release made of it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import time
import zipfile
from typing import Any

import pytest
import ssh_server

from kdtree_engine.errors import ConfigError, MissingError
from remote import sync
from remote.errors import TransportError
from remote.local import LocalTransport
from remote.releases import ReleaseRefused, Releases
from remote.ssh import SshTransport
from remote.sync import deliver, new_release_name, tracked_files
from remote.transport import Transport

pytestmark = pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not on PATH")
NAMES = [
    "plain.py",
    "two words",
    "it's $(id)",
    "-n",
    "ü/new\nline",
    "a/b/c.txt",
    ":x",
    "empty",
    "#1",
    ";",
]


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> pathlib.Path:
    """A git checkout whose files have names that a shell would stumble over."""
    folder = tmp_path / "check out"
    for name in NAMES:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if name == "empty" else f"{name}\n" * 50)
    (folder / "plain.py").chmod(0o755)
    for line in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *line], cwd=folder, check=True)
    (folder / "untracked").write_text("stays here")
    return folder


@pytest.fixture
def wheel(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "engine-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("engine.py", "value = 7\n")
    return path


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "it's root"


def send(
    checkout: pathlib.Path,
    wheel: pathlib.Path,
    root: pathlib.Path,
    release: str,
    transport: Transport | None = None,
) -> dict[str, Any]:
    transport = transport or LocalTransport()
    return deliver(
        transport,
        Releases(transport, python=sys.executable, root=str(root)),
        checkout=checkout,
        wheel=wheel,
        release=release,
        about={"revision": "abc"},
    )


def switch(root: pathlib.Path, release: str) -> None:
    Releases(LocalTransport(), python=sys.executable, root=str(root)).switch(release)


def test_what_git_knows_arrives_and_nothing_else(
    checkout: pathlib.Path, wheel: pathlib.Path, root: pathlib.Path, transport: Transport
) -> None:
    about = send(checkout, wheel, root, "first", transport)
    assert (about["revision"], about["files"]) == ("abc", len(NAMES) + 1)
    source = root / "releases/first/source"
    sent = sorted(
        path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()
    )
    assert sent == sorted(NAMES)
    for name in NAMES:
        assert (source / name).read_bytes() == (checkout / name).read_bytes()
    assert (source / "plain.py").stat().st_mode & 0o777 == 0o700
    assert (source / "two words").stat().st_mode & 0o777 == 0o600
    assert (root / "releases/first/site/engine.py").is_file()


def test_what_has_not_changed_takes_no_room(
    checkout: pathlib.Path, wheel: pathlib.Path, root: pathlib.Path, transport: Transport
) -> None:
    send(checkout, wheel, root, "first", transport)
    (checkout / "two words").write_text("changed")
    (checkout / "a/b/c.txt").unlink()
    send(checkout, wheel, root, "second", transport)
    first, second = (root / "releases" / name / "source" for name in ("first", "second"))
    assert (first / "plain.py").stat().st_ino == (second / "plain.py").stat().st_ino
    assert (second / "two words").read_text() == "changed"
    assert (first / "two words").read_text() != "changed"
    assert not (second / "a").exists()


@pytest.mark.parametrize("config", ["named key", "no config"])
def test_rsync_looks_where_home_is_as_all_else_does(
    checkout: pathlib.Path,
    server: ssh_server.SshServer,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    config: str,
) -> None:
    """$HOME may be another than the user database's, where ssh itself would look."""
    person = tmp_path / "home" / ".ssh"
    shutil.copytree(server.person, person)
    (person / "key").rename(person / "id_ed25519")
    if config == "named key":
        (person / "config").write_text("Host near\n  IdentityFile ~/.ssh/id_ed25519\n")
    else:
        (person / "config").unlink()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    with contextlib.closing(SshTransport(server.host())) as transport:
        (tmp_path / "there").mkdir()
        sync._rsync(transport, checkout, ["plain.py"], str(tmp_path / "there"))
    assert (tmp_path / "there/plain.py").is_file()


def test_an_unknown_host_key_is_refused_by_rsync_too(
    checkout: pathlib.Path, server: ssh_server.SshServer, tmp_path: pathlib.Path
) -> None:
    """Whatever the person's own ssh would do: nothing is sent to a host that is not known."""
    person = tmp_path / "ssh"
    shutil.copytree(server.person, person)
    (person / "known_hosts").write_text("")
    (person / "config").write_text((person / "config").read_text() + "StrictHostKeyChecking no\n")
    stranger = SshTransport(server.host(), folder=person)
    with pytest.raises(TransportError, match=r"rsync ended .*: Host key verification failed"):
        sync._rsync(stranger, checkout, ["plain.py"], str(tmp_path / "there"))
    assert not (tmp_path / "there").exists()
    assert (person / "known_hosts").read_text() == ""


def test_a_transfer_that_broke_off_is_taken_up_again(
    checkout: pathlib.Path,
    wheel: pathlib.Path,
    root: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """rsync is killed when it has sent three files; one more lies there from another checkout."""
    real = shutil.which("rsync")
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "rsync").write_text(
        f"#!/bin/bash\nhead -z -n 3 | {real} \"$@\"\necho 'rsync: killed' >&2\nkill -9 $$\n"
    )
    (tools / "rsync").chmod(0o755)
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", f"{tools}:{path}")
    with pytest.raises(TransportError, match="rsync ended with exit code -9: rsync: killed; the n"):
        send(checkout, wheel, root, "first")
    monkeypatch.setenv("PATH", path)
    came = [one for one in (root / "incoming/source").rglob("*") if one.is_file()]
    assert len(came) == 3
    (root / "incoming/source/left over").write_text("of another try")
    notes: list[str] = []
    transport = LocalTransport()
    host = Releases(transport, python=sys.executable, root=str(root))
    assert host.known()["releases"] == []
    deliver(
        transport,
        host,
        checkout=checkout,
        wheel=wheel,
        release="first",
        about={},
        note=notes.append,
    )
    assert "sends, 3 are there" in notes
    assert not (root / "releases/first/source/left over").exists()


def test_a_file_that_changes_while_it_is_sent_is_no_release(
    checkout: pathlib.Path,
    wheel: pathlib.Path,
    root: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = sync._rsync

    def meanwhile(*arguments: Any) -> None:
        (checkout / "two words").write_text("edited meanwhile")
        real(*arguments)

    monkeypatch.setattr(sync, "_rsync", meanwhile)
    with pytest.raises(ReleaseRefused, match="'source/two words' has other content"):
        send(checkout, wheel, root, "first")


def test_too_little_room_is_said_before_anything_is_sent(
    checkout: pathlib.Path,
    wheel: pathlib.Path,
    root: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sync, "_ROOM", 1e12)
    with pytest.raises(TransportError, match=r"has \d+ MiB free, \d+ MiB are needed"):
        send(checkout, wheel, root, "first")
    assert not list((root / "incoming").iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small file system")
def test_a_full_disk_is_one_line_and_leaves_current_alone(
    checkout: pathlib.Path,
    wheel: pathlib.Path,
    root: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(root)], check=False
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        send(checkout, wheel, root, "first")
        switch(root, "first")
        (checkout / "big").write_bytes(os.urandom(1 << 20))
        subprocess.run(["git", "add", "big"], cwd=checkout, check=True)
        monkeypatch.setattr(sync, "_ROOM", 0)
        with pytest.raises(TransportError, match=r"rsync ended .*No space left on device") as error:
            send(checkout, wheel, root, "second")
        assert "\n" not in str(error.value)
        assert (root / "current/source/plain.py").is_file()
        subprocess.run(["git", "rm", "-q", "--cached", "big"], cwd=checkout, check=True)
        send(checkout, wheel, root, "third")  # what had come of it is out of the way
    finally:
        subprocess.run(["umount", str(root)], check=True)


def test_no_rsync_on_the_host_is_one_line(
    checkout: pathlib.Path,
    wheel: pathlib.Path,
    root: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = Releases.prepare
    monkeypatch.setattr(Releases, "prepare", lambda self: real(self) | {"rsync": None})
    with pytest.raises(MissingError, match="host local: rsync is not on PATH"):
        send(checkout, wheel, root, "first")


def test_a_transfer_that_stands_still_is_given_up(
    ssh: SshTransport, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line lives and answers; what hangs is the other end's rsync, or its disk."""
    monkeypatch.setattr(sync, "_SILENT_S", 2)
    options = [*ssh.rsync_options(), "--rsync-path=exec sleep 30; rsync"]
    monkeypatch.setattr(ssh, "rsync_options", lambda: options)
    (tmp_path / "a").write_text("")
    begun = time.monotonic()
    with pytest.raises(TransportError, match="the next try goes on where it was") as caught:
        sync._rsync(ssh, tmp_path, ["a"], str(tmp_path / "there"))
    assert time.monotonic() - begun < 20
    assert "\n" not in str(caught.value)


def test_a_link_in_the_checkout_is_refused(checkout: pathlib.Path) -> None:
    (checkout / "link").symlink_to("plain.py")
    subprocess.run(["git", "add", "link"], cwd=checkout, check=True)
    with pytest.raises(ConfigError, match="link: expected a plain file"):
        tracked_files(checkout)


def test_a_file_behind_a_link_to_elsewhere_is_refused(
    checkout: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/c.txt").write_text("not of this checkout")
    shutil.rmtree(checkout / "a/b")
    (checkout / "a/b").symlink_to(tmp_path / "out")
    with pytest.raises(ConfigError, match=r"a/b/c\.txt: expected a plain file"):
        tracked_files(checkout)


def test_a_release_is_never_changed_by_a_later_transfer(
    checkout: pathlib.Path,
    wheel: pathlib.Path,
    root: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not even by one that broke off with files that it shares, and whose modes changed then."""
    send(checkout, wheel, root, "first")
    old = root / "releases/first/source/two words"
    before = (old.stat().st_mode, old.stat().st_mtime_ns)
    with monkeypatch.context() as patch:
        patch.setattr(LocalTransport, "put", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            send(checkout, wheel, root, "second")
    (checkout / "two words").chmod(0o755)
    os.utime(checkout / "two words", (1, 1))
    send(checkout, wheel, root, "second")
    assert (old.stat().st_mode, old.stat().st_mtime_ns) == before
    assert (root / "releases/second/source/two words").stat().st_mode & 0o100


def test_a_folder_without_git_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="its files cannot be listed: fatal: not a git rep"):
        tracked_files(tmp_path)


def test_a_folder_of_which_git_knows_nothing_is_refused(checkout: pathlib.Path) -> None:
    (checkout / "inner").mkdir()
    (checkout / "inner/file").write_text("")
    with pytest.raises(ConfigError, match="inner: git knows no file here"):
        tracked_files(checkout / "inner")


def test_names_of_releases_sort_by_time() -> None:
    name = new_release_name("5f30ea020753aa83", dirty=False)
    assert name.endswith("Z-5f30ea0")
    assert new_release_name(None, dirty=True).endswith("-unknown-changed")
    assert name[:8].isdigit()
