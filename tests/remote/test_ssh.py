"""What is SSH's own: keys, logins, connections that break. The far side is a real sshd."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import ssh_server
from ssh_server import SshServer

from remote.connection import connect
from remote.errors import CommandTimeout, HostKeyError, TransportError
from remote.inventory import SshHost
from remote.ssh import SshTransport

Start = Callable[..., SshServer]


@pytest.fixture
def start(server: SshServer, tmp_path: pathlib.Path) -> Iterator[Start]:
    """Start a server of this test's own, with further lines for its sshd_config."""
    running: list[SshServer] = []

    def another(*extra: str, sftp: bool = True) -> SshServer:
        folder = tmp_path / f"sshd{len(running)}"
        folder.mkdir()
        running.append(SshServer(folder, *extra, sftp=sftp))
        return running[-1]

    yield another
    for one in running:
        one.stop()


@pytest.fixture
def person(server: SshServer, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of the person's ssh folder, to be changed."""
    return pathlib.Path(shutil.copytree(server.person, tmp_path / "person"))


def refusal(host: SshHost, folder: pathlib.Path, **options: float) -> str:
    """Why a connection is refused; one line."""
    transport = SshTransport(host, folder=folder, **options)
    with pytest.raises(TransportError) as caught:
        transport.run(["true"], timeout=10)
    transport.close()
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"host {host.name}: ")
    return str(caught.value)


def wait_for(what: Callable[[], object], limit_s: float = 15.0) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if what():
            return True
        time.sleep(0.05)
    return False


def runs(pid: int) -> bool:
    try:
        return ") Z " not in pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def pids_in(path: pathlib.Path, count: int) -> list[int]:
    """The process ids that a command writes to `path`, one a line."""
    assert wait_for(lambda: path.exists() and path.read_text().count("\n") == count)
    return [int(line) for line in path.read_text().split()]


def two_generations(pids: pathlib.Path) -> list[str]:
    """A command and a child of it, both deaf to SIGTERM, which write their ids to `pids`."""
    child = f"trap '' TERM; echo $$ >> {pids}; sleep 300; sleep 300"
    parent = f'trap "" TERM; echo $$ >> {pids}; sh -c "$1" & sleep 300; sleep 300'
    return ["sh", "-c", parent, "sh", child]


# Connecting.


def test_the_inventory_gives_this_transport(server: SshServer) -> None:
    transport = connect(server.host())
    assert isinstance(transport, SshTransport)
    assert transport.host == "near"
    transport.close()
    transport.close()


def test_an_unknown_host_key_is_refused_with_its_fingerprint(
    server: SshServer, person: pathlib.Path
) -> None:
    (person / "known_hosts").unlink()
    said = refusal(server.host(), person)
    shown = subprocess.run(
        ["ssh-keygen", "-lf", str(server.folder / "host_ed25519.pub")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()[1]
    assert (
        f"127.0.0.1 port {server.port}: the host's key is not known here: ED25519 {shown}" in said
    )
    assert f"ssh-keyscan -p {server.port} -t ed25519 127.0.0.1 >> {person}/known_hosts" in said
    assert not (person / "known_hosts").exists()
    with pytest.raises(HostKeyError):
        SshTransport(server.host(), folder=person).run(["true"], timeout=10)


def test_the_remedy_for_an_unknown_key_is_one(server: SshServer, person: pathlib.Path) -> None:
    (person / "known_hosts").unlink()
    remedy = refusal(server.host(), person).rpartition("then: ")[2].removesuffix(")")
    subprocess.run(["sh", "-c", remedy], check=True, timeout=20, capture_output=True)
    with contextlib.closing(SshTransport(server.host(), folder=person)) as transport:
        assert transport.run(["true"], timeout=10).exit_code == 0


def test_a_changed_host_key_is_refused_with_file_and_line(
    server: SshServer, person: pathlib.Path
) -> None:
    ssh_server.make_key(person / "other")
    kind, blob = (person / "other.pub").read_text().split()[:2]
    name = f"[127.0.0.1]:{server.port}"
    (person / "known_hosts").write_text(f"\n# old\n{name} {kind} {blob}\n")
    said = refusal(server.host(), person)
    assert "HAS CHANGED: it shows ED25519 SHA256:" in said
    assert f"but {person}/known_hosts:3 has ED25519 SHA256:" in said
    remedy = said.partition("right: ")[2].partition(", then")[0]
    assert remedy == f"ssh-keygen -f {person}/known_hosts -R '{name}'"
    subprocess.run(["sh", "-c", remedy], check=True, timeout=20, capture_output=True)
    assert "is not known here" in refusal(server.host(), person)


def test_a_revoked_key_is_refused(server: SshServer, person: pathlib.Path) -> None:
    path = person / "known_hosts"
    entry = path.read_text().splitlines()[-1]
    path.write_text(f"{entry}\n@revoked * {entry.partition(' ')[2]}\n")
    assert f"was revoked in {path}:2" in refusal(server.host(), person)


def test_a_key_that_was_revoked_without_a_port_is_refused(
    server: SshServer, person: pathlib.Path
) -> None:
    """It is the key that was revoked: ssh refuses it at every port too."""
    path = person / "known_hosts"
    key = path.read_text().strip().splitlines()[-1].partition(" ")[2]
    path.write_text(f"127.0.0.1 {key}\n@revoked 127.0.0.1 {key}\n")
    assert f"was revoked in {path}:2" in refusal(server.host(), person)


def test_known_hosts_may_be_hashed_patterns_several_or_of_another_kind(
    server: SshServer, person: pathlib.Path
) -> None:
    path = person / "known_hosts"
    name = f"[127.0.0.1]:{server.port}"

    def connects() -> bool:
        with contextlib.closing(SshTransport(server.host(), folder=person)) as transport:
            return transport.run(["true"], timeout=10).exit_code == 0

    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(path)], check=True, capture_output=True)
    assert "|1|" in path.read_text()
    assert connects()
    for names in (f"other,{name}", f"[127.0.0.*]:{server.port}", "127.0.0.1"):
        shutil.copy(server.write_known_hosts(names), path)
        assert connects()
    # The server offers ed25519 too, and that is what would be spoken if it were not asked.
    shutil.copy(server.write_known_hosts(name, "host_ecdsa"), path)
    assert connects()
    shutil.copy(server.write_known_hosts(f"{name},!{name}"), path)
    assert "is not known here" in refusal(server.host(), person)
    server.write_known_hosts(name)


def test_the_configuration_may_include_files(server: SshServer, person: pathlib.Path) -> None:
    (person / "config.d").mkdir()
    (person / "config").rename(person / "config.d" / "near")
    (person / "config").write_text("Include config.d/n*\nHost near\n  IdentityFile /none\n")
    with contextlib.closing(SshTransport(server.host(), folder=person)) as transport:
        assert transport.run(["true"], timeout=10).exit_code == 0
    (person / "config").write_text("Host other\n  Include config.d/*\n")
    assert "`Host near` of" in refusal(server.host(), person)


def test_a_wrong_login_key_is_one_line_that_names_it(
    server: SshServer, person: pathlib.Path
) -> None:
    ssh_server.make_key(person / "wrong")
    config = person / "config"
    config.write_text(config.read_text().replace(f"{server.person}/key", f"{person}/wrong"))
    said = refusal(server.host(), person)
    assert f"it did not let {server.host().user} in with {person}/wrong (is one of these in" in said


def test_a_key_that_cannot_be_used_is_told(
    server: SshServer, person: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    ssh_server.make_key(person / "locked", passphrase="secret")
    config = person / "config"
    text = config.read_text()
    config.write_text(text.replace(f"{server.person}/key", f"{person}/locked"))
    said = refusal(server.host(), person)
    assert "as there is no key to show" in said
    assert f"ssh-add {person}/locked" in said
    config.write_text(text.replace(f"{server.person}/key", f"{person}/none"))
    assert f"{person}/none is not there" in refusal(server.host(), person)
    config.write_text("Host other\n  IdentityFile /x\n")
    assert f"`Host near` of {config} should name the key" in refusal(server.host(), person)
    config.write_text("Host near\n  Nonsense\n")
    assert f"{config} cannot be read" in refusal(server.host(), person)


def test_an_agent_s_key_is_enough(
    server: SshServer, person: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh_server.make_key(person / "locked", passphrase="secret")
    config = person / "config"
    config.write_text(config.read_text().replace(f"{server.person}/key", f"{person}/key"))
    (person / "key").rename(person / "elsewhere")
    socket_path = person / "agent"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket_path)], stdout=subprocess.DEVNULL)
    try:
        assert wait_for(socket_path.exists)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket_path))
        subprocess.run(
            ["ssh-add", "-q", str(person / "elsewhere")], check=True, capture_output=True
        )
        with contextlib.closing(SshTransport(server.host(), folder=person)) as transport:
            assert transport.run(["true"], timeout=10).exit_code == 0
            # No agent is forwarded.
            shown = transport.run(["sh", "-c", "echo $SSH_AUTH_SOCK"], timeout=10)
            assert shown.stdout == "\n"
    finally:
        agent.terminate()
        agent.wait(10)


def test_a_host_that_asks_for_more_than_a_key_is_refused(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """paramiko would ask on the terminal for what is missing."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    far = start("AuthenticationMethods publickey,password", "PasswordAuthentication yes")
    assert "is right, but it asks for more than a key" in refusal(far.host(), far.person)


def test_a_refused_port_and_an_unknown_name_are_one_line(
    server: SshServer, person: pathlib.Path
) -> None:
    port = ssh_server.free_port()
    said = refusal(server.host(port=port), person)
    assert f"127.0.0.1 port {port}: Connection refused" in said
    said = refusal(server.host(address="no-such-host.invalid"), person)
    assert "no-such-host.invalid port" in said
    assert "there is no such name" in said


def test_a_host_that_accepts_and_says_nothing_runs_into_the_time_limit(
    server: SshServer, person: pathlib.Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begun = time.monotonic()
        said = refusal(server.host(port=silent.getsockname()[1]), person, connect_timeout=1.0)
    assert 0.9 < time.monotonic() - begun < 5
    assert "timed out: no login within 1 s" in said


def test_a_host_that_speaks_no_ssh_is_one_line(server: SshServer, person: pathlib.Path) -> None:
    def answer() -> None:
        with contextlib.suppress(OSError):
            taken, _ = talker.accept()
            with taken:
                taken.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as talker:
        thread = threading.Thread(target=answer)
        thread.start()
        port = talker.getsockname()[1]
        said = refusal(server.host(port=port), person, connect_timeout=3.0)
        thread.join(10)
    assert f"127.0.0.1 port {port}: " in said


def test_a_jump_host_is_verified_too(start: Start, server: SshServer, person: pathlib.Path) -> None:
    far = start()
    config = person / "config"
    config.write_text(
        f"Host near\n  IdentityFile {far.person}/key\n  ProxyJump jump\n"
        f"Host jump\n  HostName 127.0.0.1\n  Port {server.port}\n  User {far.host().user}\n"
        f"  IdentityFile {server.person}/key\n"
    )
    known = person / "known_hosts"
    both = known.read_text() + (far.person / "known_hosts").read_text()
    known.write_text((far.person / "known_hosts").read_text())
    assert f"127.0.0.1 port {server.port}: the host's key is not known" in refusal(
        far.host(), person
    )
    known.write_text(both)
    transport = SshTransport(far.host(), folder=person)
    done = transport.run(["sh", "-c", "echo ${SSH_CONNECTION##* }"], timeout=10)
    assert done.stdout == f"{far.port}\n"
    transport.close()
    assert wait_for(lambda: not far.sessions())


def test_a_proxy_command_is_used_and_ended(server: SshServer, person: pathlib.Path) -> None:
    program = """
        import os, socket, sys, threading
        line = socket.create_connection((sys.argv[1], int(sys.argv[2])))
        def up():
            while block := os.read(0, 65536):
                line.sendall(block)
        threading.Thread(target=up, daemon=True).start()
        while block := line.recv(65536):
            os.write(1, block)
    """
    (person / "proxy.py").write_text(textwrap.dedent(program))
    config = person / "config"
    text = config.read_text()
    config.write_text(f"{text}  ProxyCommand {sys.executable} {person}/proxy.py %h %p\n")
    before = set(ssh_server.children(os.getpid()))
    transport = SshTransport(server.host(), folder=person)
    assert transport.run(["echo", "through"], timeout=10).stdout == "through\n"
    assert len(set(ssh_server.children(os.getpid())) - before) == 1
    transport.close()
    config.write_text(f"{text}  ProxyCommand {sys.executable} {person}/none.py\n")
    said = refusal(server.host(), person, connect_timeout=2.0)
    assert "its ProxyCommand said: " in said
    assert "No such file or directory" in said
    assert set(ssh_server.children(os.getpid())) == before


# Commands.


def test_a_secret_in_the_environment_is_not_seen_by_ps(
    ssh: SshTransport, tmp_path: pathlib.Path
) -> None:
    secret = "s3cr3t" + hashlib.sha256(b"kd").hexdigest()
    program = 'cat /proc/[0-9]*/cmdline 2>/dev/null | tr "\\0" "\\n"; echo "$HF_TOKEN" | wc -c; cat'
    done = ssh.run(["sh", "-c", program], timeout=20, env={"HF_TOKEN": secret}, input=b"the end")
    assert done.stdout.endswith(f"{len(secret) + 1}\nthe end")
    assert secret not in done.stdout
    assert "sshd" in done.stdout


def test_nothing_of_the_way_there_is_in_the_environment(ssh: SshTransport) -> None:
    names = {line.partition("=")[0] for line in ssh.run(["env"], timeout=10).stdout.splitlines()}
    assert not [name for name in names if name.startswith("kd_")]


def test_input_that_is_not_read_is_no_error(ssh: SshTransport) -> None:
    assert ssh.run(["true"], timeout=20, input=b"x" * (8 << 20)).exit_code == 0
    done = ssh.run(["head", "-c", "3"], timeout=20, input=b"abc" * (2 << 20))
    assert done.stdout == "abc"


@pytest.mark.parametrize("name", ["HUP", "INT", "KILL", "SEGV", "TERM"])
def test_a_death_by_signal_is_told_from_an_exit_code(ssh: SshTransport, name: str) -> None:
    number = getattr(signal, f"SIG{name}")
    assert ssh.run(["sh", "-c", f"kill -{name} $$"], timeout=10, check=False).exit_code == -number
    done = ssh.run(["sh", "-c", f"exit {128 + number}"], timeout=10, check=False)
    assert done.exit_code == 128 + number


def test_many_commands_share_one_connection(ssh: SshTransport, server: SshServer) -> None:
    before = len(server.sessions())
    seen = {ssh.run(["sh", "-c", "echo $SSH_CONNECTION"], timeout=10).stdout for _ in range(20)}
    assert len(seen) == 1
    assert len(server.sessions()) - before <= 2


def test_a_program_that_closes_its_outputs_is_waited_for(ssh: SshTransport) -> None:
    program = "exec >/dev/null 2>&1; sleep 1; exit 4"
    assert ssh.run(["sh", "-c", program], timeout=20, check=False).exit_code == 4


def test_a_login_message_is_no_output(start: Start) -> None:
    far = start(
        'ForceCommand echo hello; echo there >&2; eval "$SSH_ORIGINAL_COMMAND"',
    )
    with contextlib.closing(SshTransport(far.host(), folder=far.person)) as transport:
        done = transport.run(["sh", "-c", "echo out; echo err >&2"], timeout=10)
        assert (done.stdout, done.stderr) == ("out\n", "err\n")


def test_an_account_without_commands_is_one_line(start: Start) -> None:
    far = start("ForceCommand echo 'This account is not for you.'; exit 1")
    said = refusal(far.host(), far.person)
    assert "runs no commands (exit code 1, This account is not for you.)" in said


def test_a_server_that_leads_no_session_still_gives_a_group_that_ends(
    start: Start, tmp_path: pathlib.Path
) -> None:
    """Here the shell is no group's leader, as under servers other than OpenSSH's."""
    far = start('ForceCommand sh -c "$SSH_ORIGINAL_COMMAND"; exit $?')
    pids = tmp_path / "pids"
    with contextlib.closing(SshTransport(far.host(), folder=far.person)) as transport:
        assert transport.run(["sh", "-c", "exit 3"], timeout=10, check=False).exit_code == 3
        assert transport.run(["cat"], timeout=10, input=b"in").stdout == "in"
        with pytest.raises(CommandTimeout):
            transport.run(two_generations(pids), timeout=1.0)
    for pid in pids_in(pids, 2):
        assert wait_for(lambda pid=pid: not runs(pid))


def test_a_host_without_setsid_is_enough(start: Start, tmp_path: pathlib.Path) -> None:
    for tool in ("dd", "sleep", "sh", "cat"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    far = start(f'ForceCommand exec env PATH={tmp_path} sh -c "$SSH_ORIGINAL_COMMAND"')
    with contextlib.closing(SshTransport(far.host(), folder=far.person)) as transport:
        assert transport.run(["setsid"], timeout=10, check=False).exit_code == 127
        pids = tmp_path / "pids"
        with pytest.raises(CommandTimeout):
            transport.run(two_generations(pids), timeout=1.0)
    for pid in pids_in(pids, 2):
        assert wait_for(lambda pid=pid: not runs(pid))


def test_a_host_without_proc_is_enough(start: Start, tmp_path: pathlib.Path) -> None:
    hide = "mount -t tmpfs none /proc"
    if subprocess.run(["unshare", "-m", "sh", "-c", hide], capture_output=True).returncode:
        pytest.skip("mounting over /proc is not allowed here")
    # SSH_ORIGINAL_COMMAND is for the inner shell.
    far = start(
        f"ForceCommand exec unshare -m sh -c '{hide}; exec sh -c \"$SSH_ORIGINAL_COMMAND\"'"
    )
    with contextlib.closing(SshTransport(far.host(), folder=far.person)) as transport:
        assert transport.run(["ls", "/proc"], timeout=10).stdout == ""
        pids = tmp_path / "pids"
        with pytest.raises(CommandTimeout):
            transport.run(two_generations(pids), timeout=1.0)
    for pid in pids_in(pids, 2):
        assert wait_for(lambda pid=pid: not runs(pid))


def test_a_command_that_cannot_be_stopped_from_here_is_stopped_by_its_host(
    start: Start, tmp_path: pathlib.Path
) -> None:
    """This host has no room for a second command, which would end the first."""
    far = start("MaxSessions 1")
    pids = tmp_path / "pids"
    with contextlib.closing(SshTransport(far.host(), folder=far.person)) as transport:
        with pytest.raises(TransportError, match="did not end within 1 s, and could not be stop"):
            transport.run(two_generations(pids), timeout=1.0)
        for pid in pids_in(pids, 2):
            assert wait_for(lambda pid=pid: not runs(pid))
        assert transport.run(["true"], timeout=10).exit_code == 0


def test_ctrl_c_ends_the_command_and_its_children(
    server: SshServer, tmp_path: pathlib.Path
) -> None:
    pids = tmp_path / "pids"
    program = f"""
        import pathlib
        from remote.inventory import SshHost
        from remote.ssh import SshTransport
        host = SshHost.model_validate_json({server.host().model_dump_json()!r}, strict=False)
        SshTransport(host, folder=pathlib.Path({str(server.person)!r})).run(
            {two_generations(pids)!r}, timeout=300)
    """
    kd = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    started = pids_in(pids, 2)
    kd.send_signal(signal.SIGINT)
    _, stderr = kd.communicate(timeout=30)
    assert stderr.decode().rstrip().endswith("KeyboardInterrupt")
    assert not any(runs(pid) for pid in started)


@pytest.mark.parametrize("whose", ["the host's", "ours"])
def test_a_lost_connection_is_one_error_and_the_command_is_ended(
    start: Start, tmp_path: pathlib.Path, whose: str
) -> None:
    far = start()
    pids = tmp_path / "pids"
    transport = SshTransport(far.host(), folder=far.person)
    transport.run(["true"], timeout=10)

    def cut() -> None:
        pids_in(pids, 2)
        if whose == "ours":
            assert transport._login is not None
            transport._login.connection.transport.sock.shutdown(socket.SHUT_RDWR)
        else:
            ssh_server.kill(far.sessions())

    cutter = threading.Thread(target=cut)
    cutter.start()
    begun = time.monotonic()
    with pytest.raises(TransportError, match=r"^host near: `sh`: the connection was lost"):
        transport.run(two_generations(pids), timeout=120)
    cutter.join(20)
    assert time.monotonic() - begun < 20
    for pid in pids_in(pids, 2):
        assert wait_for(lambda pid=pid: not runs(pid))
    # The next command connects anew.
    assert transport.run(["true"], timeout=10).exit_code == 0
    transport.close()


def test_a_host_that_stops_answering_does_not_hold_a_command_up(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remote.ssh._SPARE_S", 1.0)
    far = start()
    transport = SshTransport(far.host(), folder=far.person)
    transport.run(["true"], timeout=10)
    stopped = far.sessions()
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        with pytest.raises(TransportError, match="the connection was lost"):
            transport.run(["true"], timeout=1.0)
        assert time.monotonic() - begun < 10
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        transport.close()


def test_nothing_is_left_after_a_close(server: SshServer, tmp_path: pathlib.Path) -> None:
    def left() -> tuple[set[threading.Thread], list[str]]:
        links = []
        for path in pathlib.Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                links.append(str(path.readlink()))
        return set(threading.enumerate()), sorted(link for link in links if ":[" in link)

    before = left()
    transport = SshTransport(server.host(), folder=server.person)
    transport.run(["true"], timeout=10)
    with pytest.raises(CommandTimeout):
        transport.run(["sleep", "60"], timeout=0.5)
    transport.put(pathlib.Path(__file__), str(tmp_path / "there"))
    transport.get(str(tmp_path / "there"), tmp_path / "back")
    transport.close()
    transport.close()
    assert left() == before
    assert wait_for(lambda: b"kd\0-" not in b"".join(command_lines()))


def command_lines() -> Iterator[bytes]:
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield path.read_bytes()


def test_a_person_s_own_fabric_settings_do_not_apply(
    server: SshServer, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".fabric.yaml").write_text("user: nobody-at-all\nforward_agent: true\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FABRIC_PORT", "9")
    with contextlib.closing(SshTransport(server.host(), folder=server.person)) as transport:
        assert transport.run(["echo", "ran"], timeout=10).stdout == "ran\n"


# Files.


@pytest.fixture(params=["sftp", "shell", "broken sftp"])
def copier(request: pytest.FixtureRequest, start: Start) -> Iterator[SshTransport]:
    """A host with SFTP, one without, and one whose SFTP does not start."""
    broken = ["Subsystem sftp /bin/false"] if request.param == "broken sftp" else []
    far = start(*broken, sftp=request.param == "sftp")
    transport = SshTransport(far.host(), folder=far.person)
    yield transport
    transport.close()


def test_files_are_copied_with_sftp_or_without(
    copier: SshTransport, tmp_path: pathlib.Path
) -> None:
    source, there = tmp_path / "source", tmp_path / "-it's\n there"
    source.write_bytes(os.urandom(3 << 20) + "é\n".encode())
    there.write_text("old")
    copier.put(source, str(there), mode=0o751)
    assert there.read_bytes() == source.read_bytes()
    assert there.stat().st_mode & 0o7777 == 0o751
    copier.get(str(there), tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == source.read_bytes()
    source.write_bytes(b"")
    copier.put(source, str(there))
    copier.get(str(there), tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b""
    assert there.stat().st_mode & 0o7777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == sorted(
        [there.name, "back", "source"]
    )


def test_copies_that_fail_say_why(copier: SshTransport, tmp_path: pathlib.Path) -> None:
    source, missing = tmp_path / "source", tmp_path / "none" / "file"
    source.write_text("new")
    with pytest.raises(TransportError) as caught:
        copier.put(source, str(missing))
    assert str(caught.value) == (
        f"host near: {source} could not be copied to {missing}: No such file or directory"
    )
    with pytest.raises(TransportError, match=r"No such file or directory$"):
        copier.get(str(missing), tmp_path / "back")
    with pytest.raises(TransportError, match=r"Is a directory$"):
        copier.put(source, str(tmp_path))
    with pytest.raises(TransportError, match=r"No such file or directory$"):
        copier.put(missing, str(tmp_path / "there"))
    assert not (tmp_path / "back").exists()
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["source"]


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a small disk is not allowed here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_leaves_the_old_file_and_no_remains(
    copier: SshTransport, small_disk: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(4 << 20))
    (small_disk / "old").write_text("old")
    with pytest.raises(TransportError, match=r"^host near: .*old: .*No space left on device"):
        copier.put(source, str(small_disk / "old"))
    assert (small_disk / "old").read_text() == "old"
    assert [path.name for path in small_disk.iterdir()] == ["old"]
    # The disk of this machine may be the full one, too.
    with pytest.raises(TransportError, match=r"^host near: .*: No space left on device"):
        copier.get(str(source), small_disk / "old")
    assert [path.name for path in small_disk.iterdir()] == ["old"]


def test_a_copy_that_is_cut_off_leaves_nothing(start: Start, tmp_path: pathlib.Path) -> None:
    far = start()
    source, place = tmp_path / "source", tmp_path / "place"
    place.mkdir()
    with source.open("wb") as file:
        file.truncate(1 << 30)

    def cut() -> None:
        if wait_for(lambda: any(path.stat().st_size for path in place.iterdir())):
            ssh_server.kill(far.sessions())

    cutter = threading.Thread(target=cut)
    cutter.start()
    lost = pytest.raises(TransportError, match=r"^host near: .*: the connection was lost$")
    with contextlib.closing(SshTransport(far.host(), folder=far.person)) as transport, lost:
        transport.put(source, str(place / "target"))
    cutter.join(20)
    assert not list(place.iterdir())


# kd hosts check.


def test_hosts_are_checked_and_one_that_fails_is_exit_1(
    root: pathlib.Path, server: SshServer, tmp_path: pathlib.Path
) -> None:
    shutil.copytree(server.person, tmp_path / ".ssh")
    near = server.host().model_dump(mode="json", exclude={"name", "health", "service"})
    far = near | {"port": ssh_server.free_port(), "python": "/no/python"}
    script = (
        "import sys, pathlib, phases.checkout\n"
        f"phases.checkout.Checkout.hosts_file = pathlib.Path({str(tmp_path / 'hosts.yaml')!r})\n"
        "import tasks; tasks.main()\n"
    )
    hosts = {"near": near | {"python": "/no/python"}, "far": far}
    (tmp_path / "hosts.yaml").write_text(json.dumps({"hosts": hosts}))

    def check(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", script, "hosts", "check", *arguments],
            cwd=root,
            env=os.environ | {"HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
        )

    one = check("near")
    assert (one.returncode, one.stderr) == (0, "")
    assert one.stdout.splitlines()[1].split()[:4] == ["near", "127.0.0.1", "yes", "no"]
    both = check("--json")
    assert both.returncode == 1
    answer = json.loads(both.stdout)
    assert (answer["near"]["reached"], answer["near"]["python"]) == (True, False)
    assert answer["far"]["reached"] is False
    assert both.stderr.startswith("kd: host far: 127.0.0.1 port ")
    assert len(both.stderr.splitlines()) == 1
