"""The contract of every transport, with everything that a command can do wrong."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

import pytest

from remote import limits
from remote.connection import connect
from remote.errors import CommandFailed, CommandTimeout, TransportError
from remote.inventory import LocalHost
from remote.transport import Completed, Transport

LOCAL = LocalHost(name="local", kind="local", root="/tmp/kd")


@pytest.fixture
def host(transport: Transport) -> Transport:
    """What is tested with it is the contract of both."""
    return transport


def python(program: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(program), *arguments]


def test_a_command_gives_its_exit_code_and_both_outputs(host: Transport) -> None:
    done = host.run(["sh", "-c", "echo out; echo err >&2; exit 3"], timeout=10, check=False)
    assert done == Completed(3, "out\n", "err\n")


@pytest.mark.parametrize(
    "argument",
    [
        "two words",
        "it's",
        '"',
        "$(id)",
        "`id`",
        "a\nb",
        "-rf",
        "",
        "*",
        "\\",
        "é €",
        "~",
        ";|&",
        "a=b",
    ],
)
def test_every_argument_arrives_as_it_is(host: Transport, argument: str) -> None:
    done = host.run(python("import sys; print(ascii(sys.argv[1]))", argument), timeout=10)
    assert done.stdout == ascii(argument) + "\n"


@pytest.mark.parametrize("program", ["if", "exit", "A=b", "$(id)", "two words"])
def test_the_first_word_is_a_program_and_never_shell(host: Transport, program: str) -> None:
    """`exit` would give 0 and `A=b` would be an assignment, were they read by the shell."""
    assert host.run([program], timeout=10, check=False).exit_code == 127


@pytest.mark.parametrize("argv", [[], [""], ["-c", "id"], "id", ["echo", "a\0b"]])
def test_what_cannot_be_a_command_is_refused(host: Transport, argv: list[str]) -> None:
    with pytest.raises(TransportError, match=rf"^host {host.host}: "):
        host.run(argv, timeout=10)


def test_a_command_too_long_for_the_system_is_one_clear_error(host: Transport) -> None:
    with pytest.raises(TransportError, match=r"could not be started: .*Argument list too long"):
        host.run(["echo", "x" * (1 << 22)], timeout=10)


def test_a_failed_command_is_an_error_with_its_last_words(host: Transport) -> None:
    with pytest.raises(CommandFailed) as caught:
        host.run(["sh", "-c", "echo first >&2; echo 'disk full' >&2; exit 2"], timeout=10)
    assert str(caught.value).startswith(f"host {host.host}: `sh -c ")
    assert str(caught.value).endswith("` ended with exit code 2: disk full")
    with pytest.raises(CommandFailed, match=r"ended with signal 9$"):
        host.run(["sh", "-c", "kill -9 $$"], timeout=10)


def test_an_error_shows_neither_input_nor_environment(host: Transport) -> None:
    with pytest.raises(CommandFailed) as caught:
        host.run(["false"], timeout=10, input=b"s3cret", env={"HF_TOKEN": "s3cret"})
    assert "s3cret" not in str(caught.value)


def test_environment_is_added_to_the_host_s_own(host: Transport) -> None:
    value = "a b'c\n$(id) \\ é€ "
    program = "import os; print(os.environ['HOME'], ascii(os.environ['KD_NEW']))"
    done = host.run(python(program), timeout=10, env={"KD_NEW": value})
    assert done.stdout == f"{pathlib.Path.home()} {value!a}\n"
    with pytest.raises(TransportError, match="could not be started"):
        host.run(["true"], timeout=10, env={"A=B": "c"})


def test_a_command_that_reads_stdin_meets_its_end(host: Transport) -> None:
    assert host.run(["cat"], timeout=10) == Completed(0, "", "")


def test_input_arrives_whole_and_so_does_what_comes_back(host: Transport) -> None:
    """Two bytes a character, odd offset: some character lies across every block boundary."""
    text = "x" + "é" * (1 << 20)
    done = host.run(["cat"], timeout=30, input=text.encode())
    assert done.stdout == text


def test_output_that_is_not_utf_8_is_shown_with_marks(host: Transport) -> None:
    done = host.run(["cat"], timeout=10, input=b"caf\xe9 \xff ok")
    assert done.stdout == "caf\ufffd \ufffd ok"


def test_a_huge_output_is_taken_on_both_streams_at_once(host: Transport) -> None:
    program = """
        import sys
        for _ in range(400):
            sys.stdout.write("o" * 50_000)
            sys.stderr.write("e" * 50_000)
    """
    done = host.run(python(program), timeout=60)
    assert (len(done.stdout), len(done.stderr)) == (20_000_000, 20_000_000)


def test_an_endless_output_is_stopped(host: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LONGEST_OUTPUT", 1 << 20)
    with pytest.raises(TransportError, match=rf"^host {host.host}: `yes` printed more than 1 MiB"):
        host.run(["yes"], timeout=60)


def test_a_time_limit_ends_the_whole_process_group(host: Transport, tmp_path: pathlib.Path) -> None:
    """Both generations ignore SIGTERM, so only SIGKILL to the group ends them."""
    pids = tmp_path / "pids"
    program = (
        f"trap '' TERM; sh -c \"trap '' TERM; echo \\$\\$ >> {pids}; sleep 300; sleep 300\" & "
        f"echo $$ >> {pids}; echo waiting >&2; sleep 300; sleep 300"
    )
    begun = time.monotonic()
    with pytest.raises(CommandTimeout) as caught:
        host.run(["sh", "-c", program], timeout=1.0)
    assert time.monotonic() - begun < 30
    assert "did not end within 1 s and was stopped; it last said: waiting" in str(caught.value)
    started = [int(line) for line in pids.read_text().split()]
    assert len(started) == 2
    for pid in started:
        assert _ends(pid)


def test_a_time_limit_ends_sessions_of_their_own_too(
    host: Transport, tmp_path: pathlib.Path
) -> None:
    """One below the other, each deaf to SIGTERM; the name of one looks like the end of a name."""
    pids = tmp_path / "pids"
    odd = tmp_path / "x) S 1 ("
    odd.symlink_to("/bin/sh")
    inner = f"trap '' TERM; echo $$ >> {pids}; sleep 300; sleep 300"
    outer = f"trap '' TERM; echo $$ >> {pids}; setsid sh -c \"$1\" & sleep 300; sleep 300"
    program = f"trap '' TERM; setsid '{odd}' -c \"$1\" sh \"$2\" & sleep 300; sleep 300"
    with pytest.raises(CommandTimeout):
        host.run(["sh", "-c", program, "sh", outer, inner], timeout=2.0)
    started = [int(line) for line in pids.read_text().split()]
    assert len(started) == 2
    for pid in started:
        assert _ends(pid)


def test_a_command_may_clean_up_after_its_time_limit(
    host: Transport, tmp_path: pathlib.Path
) -> None:
    mark = tmp_path / "cleaned"
    with pytest.raises(CommandTimeout):
        host.run(
            ["sh", "-c", f"trap 'touch {mark}; exit' TERM; while :; do sleep 0.05; done"],
            timeout=1.0,
        )
    assert mark.exists()


def test_what_stays_in_the_background_is_not_waited_for(
    host: Transport, tmp_path: pathlib.Path
) -> None:
    """The background process holds the output open for longer than the test may take."""
    program = f"setsid sleep 300 & echo $! > {tmp_path}/pid; echo started"
    begun = time.monotonic()
    assert host.run(["sh", "-c", program], timeout=120).stdout == "started\n"
    assert time.monotonic() - begun < 60
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_ctrl_c_ends_the_command_and_goes_on(tmp_path: pathlib.Path) -> None:
    pid_file = tmp_path / "pid"
    program = f"""
        from remote.local import LocalTransport
        LocalTransport().run(
            ["sh", "-c", "echo $$ > {pid_file}.part; mv {pid_file}.part {pid_file}; sleep 300; :"],
            timeout=300)
    """
    kd = subprocess.Popen(python(program), stderr=subprocess.PIPE, start_new_session=True)
    deadline = time.monotonic() + 60
    while not pid_file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    kd.send_signal(signal.SIGINT)
    _, stderr = kd.communicate(timeout=60)
    assert stderr.decode().rstrip().endswith("KeyboardInterrupt")
    assert _ends(int(pid_file.read_text()))


def test_a_person_s_own_invoke_settings_do_not_apply(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".invoke.yaml").write_text("run: {dry: true, replace_env: true}\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("INVOKE_RUN_DRY", "1")
    assert connect(LOCAL).run(["echo", "ran"], timeout=10).stdout == "ran\n"


def test_files_go_there_and_back_with_tight_modes(host: Transport, tmp_path: pathlib.Path) -> None:
    source = tmp_path / "a file"
    source.write_bytes(bytes(range(256)) * 1000)
    there = str(tmp_path / "it's there")
    host.put(source, there)
    assert host.exists(there)
    assert pathlib.Path(there).stat().st_mode & 0o777 == 0o600
    host.put(source, there, mode=0o755)
    assert pathlib.Path(there).stat().st_mode & 0o777 == 0o755
    host.get(there, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == source.read_bytes()


def test_a_copy_that_fails_leaves_the_old_file_and_no_remains(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = connect(LOCAL)
    source, target = tmp_path / "new", tmp_path / "place" / "old"
    source.write_text("new")
    target.parent.mkdir()
    target.write_text("old")

    def disk_full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(TransportError, match=r"could not be copied to .*: No space left on device"):
        host.put(source, str(target))
    assert target.read_text() == "old"
    assert [path.name for path in target.parent.iterdir()] == ["old"]


def test_what_is_not_there_cannot_be_copied(host: Transport, tmp_path: pathlib.Path) -> None:
    assert not host.exists(str(tmp_path / "none"))
    with pytest.raises(TransportError, match="No such file or directory"):
        host.get(str(tmp_path / "none"), tmp_path / "back")
    with pytest.raises(TransportError, match="No such file or directory"):
        host.put(pathlib.Path(__file__), str(tmp_path / "no folder" / "file"))


def test_a_path_may_begin_with_the_home_folder(
    host: Transport, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    up = "../" * len(pathlib.Path.home().parts[1:])
    there = f"~/{up}{tmp_path.relative_to('/')}"
    host.put(pathlib.Path(__file__), f"{there}/~")
    assert host.exists(f"{there}/~")
    assert not host.exists(f"{there}/none")
    host.get(f"{there}/~", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == pathlib.Path(__file__).read_bytes()


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_what_cannot_be_a_path_is_refused(
    host: Transport, path: str, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(TransportError, match="is not a path"):
        host.put(pathlib.Path(__file__), path)
    with pytest.raises(TransportError, match="is not a path"):
        host.get(path, tmp_path / "back")
    with pytest.raises(TransportError, match="is not a path"):
        host.exists(path)


NAMES = ["-rf", "two words", "it's", "$(id)", "a\nb", "*", "é €", "\\", "~", "n" * 255, "\udcff"]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_file_may_be_called_anything(host: Transport, tmp_path: pathlib.Path, name: str) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"\0\xff\n")
    (tmp_path / "there").mkdir()
    there = tmp_path / "there" / name
    host.put(source, str(there), mode=0o640)
    assert [path.name for path in there.parent.iterdir()] == [name]
    assert there.stat().st_mode & 0o7777 == 0o640
    assert host.exists(str(there))
    host.get(str(there), tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"\0\xff\n"


def test_a_folder_is_no_file(host: Transport, tmp_path: pathlib.Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(TransportError, match="Is a directory"):
        host.put(pathlib.Path(__file__), str(tmp_path / "folder"))
    with pytest.raises(TransportError, match="Is a directory"):
        host.get(str(tmp_path / "folder"), tmp_path / "back")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert not list((tmp_path / "folder").iterdir())


def test_invoke_is_not_loaded_before_a_connection() -> None:
    program = (
        "import sys, remote.inventory, remote.transport, remote.facts;"
        "print([name for name in ('invoke', 'fabric', 'paramiko', 'torch') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def _ends(pid: int) -> bool:
    """Whether the process is gone, or dead and only not yet reaped."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if ") Z " in pathlib.Path(f"/proc/{pid}/stat").read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_a_program_may_lie_in_the_home_folder(
    host: Transport, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an inventory's `python` may."""
    home = pathlib.Path(host.run(["sh", "-c", "cd && pwd"], timeout=10).stdout.strip())
    with tempfile.TemporaryDirectory(dir=home, prefix="kd's test ") as folder:
        program = pathlib.Path(folder) / "it's $(me)"
        program.write_text('#!/bin/sh\necho "$1"\n')
        program.chmod(0o700)
        named = f"~/{program.relative_to(home)}"
        assert host.run([named, "two  words"], timeout=10).stdout == "two  words\n"
        assert host.run(["echo", "~/kept"], timeout=10).stdout == "~/kept\n"
