"""Another machine, over SSH.

The far side needs sshd, a POSIX shell, dd, sleep and kill, which busybox has too; setsid and /proc
are used where they are. Nothing is installed there.

How a command runs. The command line that SSH carries is the same for all: it starts a shell which
reads its program from its standard input. So neither the environment nor anything else is seen by
`ps` but the program's own arguments, and what the person's own login shell is does not matter. The
shell tells its process group on both outputs, in a line that begins with a number made up for this
command (all before it is a login message); then it becomes the program, and the rest of the input
is the program's. Beside it a second shell watches over the group, in a session of its own: it ends
the group where the connection is lost, or a while after the time limit, should nobody else do so.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pathlib
import pwd
import re
import secrets
import select
import shlex
import shutil
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

import paramiko
from paramiko.sftp import CMD_EXTENDED

from remote import limits
from remote.errors import CommandFailed, CommandTimeout, TransportError, last_words
from remote.files import whole_file
from remote.inventory import SshHost
from remote.login import DEFAULT_KEYS, Login, no_longer_than, ssh_config_of
from remote.quoting import shell_line
from remote.transport import Completed

__all__ = ["SshTransport"]

_POLL_S = 0.05
_SPARE_S = 20.0  # for an answer of the host beyond a time limit, before the line is given up
_STALLED_S = 60.0  # the longest that a file's copy may stand still
_LONGEST_COPY_S = 6 * 3600.0  # of one file through a shell
_LONGEST_ARGUMENT = (128 << 10) - 1  # bytes; Linux takes no longer one
_LONGEST_SCRIPT = 1 << 20  # bytes; Linux takes about twice that in all
_BLOCK = 1 << 16
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)

# $1 is a process group with a minus before it, or a process. With a group go the groups of all that
# it has started, in sessions of their own too: they are looked for first, as each is found by its
# parent. Where there is no /proc, the loop finds nothing.
_END = (
    'exec 2>/dev/null; kill -0 "$1" || exit 0; groups=$1; all=" ${1#-} "; '
    'case "$1" in -*) more=1 ;; *) more= ;; esac; '
    'while [ -n "$more" ]; do more=; for stat in /proc/[0-9]*/stat; do '
    'read -r line <"$stat" || continue; pid=${line%% *}; '
    'case "$all" in *" $pid "*) continue ;; esac; '
    # After the name in brackets: state, parent, group.
    "set -- ${line##*) }; "
    'case "$all" in *" $2 "*) all="$all$pid "; more=1; '
    'case " -0 -1 $groups " in *" -$3 "*) ;; *) groups="$groups -$3" ;; esac ;; esac; '
    "done; done; kill -TERM $groups; n=0; "
    f'while [ "$n" -lt {round(limits.GRACE_S * 10)} ]; do '
    'left=; for group in $groups; do kill -0 "$group" && left=1; done; [ -n "$left" ] || exit 0; '
    "sleep 0.1 || { sleep 1; n=$((n+9)); }; n=$((n+1)); done; "
    "kill -KILL $groups; exit 0"
)
# $2 is the group's leader, $3 the process of sshd for this connection, $4 a number of seconds.
# Where the leader has ended, what it left in the background stays.
_WATCH = (
    "trap '' HUP INT TERM; n=0; kill -0 \"$3\" && seen=1 || seen=; "
    'while kill -0 "$2" && [ "$n" -lt "$4" ]; do '
    '[ -z "$seen" ] || kill -0 "$3" || break; sleep 1; n=$((n+1)); done; '
    f'kill -0 "$2" || exit 0; {_END}'
)
_READ_ON = 'eval "$(dd bs=1 count=%d 2>/dev/null)"'
# A group that is called as this process is there only where this process leads it.
_LEADS = "kill -0 -$$ 2>/dev/null"
# $1 is the target, $2 a name beside it, $3 the size in bytes, $4 the mode.
_PUT = """cd || exit
umask 077
[ -d "${2%/*}/" ] || { echo "No such file or directory" >&2; exit 1; }
[ ! -d "$1" ] || { echo "Is a directory" >&2; exit 1; }
trap 'rm -f "$2"' 0
trap 'exit 1' HUP INT TERM
cat >"$2" || exit
[ "$(($(wc -c <"$2")))" -eq "$3" ] || { echo "not all of it arrived" >&2; exit 1; }
chmod "$4" "$2" || exit
sync "$2" 2>/dev/null
mv -f "$2" "$1"
"""


def _home_of_user() -> pathlib.Path | None:
    """What the user database says; None of a user whom it does not know."""
    try:
        return pathlib.Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return None


class SshTransport:
    """Runs commands and copies files on another machine. See `Transport` for the contract.

    The connection is made when it is first needed, and anew where it was lost before.

    folder: the person's ~/.ssh, with config, known_hosts and keys; None is that of $HOME.
    connect_timeout: seconds for the whole of connecting and logging in.
    """

    def __init__(
        self, host: SshHost, *, folder: pathlib.Path | None = None, connect_timeout: float = 15.0
    ) -> None:
        self._settings = host
        self._folder = folder
        self._connect_timeout = connect_timeout
        self._login: Login | None = None
        self._has_sftp = True

    @property
    def host(self) -> str:
        return self._settings.name

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float,
        input: bytes | None = None,  # noqa: A002
        env: Mapping[str, str] | None = None,
        check: bool = True,
    ) -> Completed:
        out = _Taken(limits.LONGEST_OUTPUT)
        exit_code, stderr = self._run(
            argv, timeout=timeout, given=io.BytesIO(input or b""), env=env or {}, take=out
        )
        completed = Completed(exit_code, out.text(), stderr)
        if check and completed.exit_code != 0:
            raise CommandFailed(self.host, argv, completed.exit_code, completed.stderr)
        return completed

    def put(self, source: pathlib.Path, target: str, *, mode: int = 0o600) -> None:
        there = self._path(target)
        part = f"{there.rpartition('/')[0]}/.kd-{secrets.token_hex(8)}"
        try:
            with source.open("rb") as given:
                if not self._by_sftp(lambda sftp: _put(sftp, given, part, there, mode)):
                    given.seek(0)
                    size = str(os.fstat(given.fileno()).st_size)
                    self._copy_by_shell(_PUT, there, part, size, f"{mode:o}", given=given)
        except OSError as error:
            if isinstance(error, ConnectionError):  # nobody else removes what did arrive
                with contextlib.suppress(TransportError):
                    argv = ["/bin/sh", "-c", 'cd && rm -f "$1"', "sh", part]
                    self.run(argv, timeout=_SPARE_S)
            raise self._not_copied(str(source), target, error) from None

    def get(self, source: str, target: pathlib.Path) -> None:
        there = self._path(source)
        try:
            with whole_file(target, 0o600) as taken:
                if not self._by_sftp(lambda sftp: _get(sftp, there, taken)):
                    taken.seek(0)
                    taken.truncate()
                    self._copy_by_shell('cd && exec cat "$1"', there, taken=taken)
        except OSError as error:
            raise self._not_copied(source, str(target), error) from None

    def exists(self, path: str) -> bool:
        done = self.run(
            ["/bin/sh", "-c", 'cd && test -e "$1"', "sh", self._path(path)],
            timeout=_STALLED_S,
            check=False,
        )
        if done.exit_code not in (0, 1):
            raise TransportError(
                f"host {self.host}: whether {path} is there could not be seen"
                f"{last_words(done.stderr, ': ')}"
            )
        return done.exit_code == 0

    def rsync_options(self) -> Sequence[str]:
        """ssh itself, as this transport logs in: it asks for nothing and takes no unknown key.

        Raises TransportError for a folder that rsync's own way of quoting has no words for.
        """
        host = self._settings
        words = [
            *("ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes"),
            *("-o", f"ConnectTimeout={math.ceil(self._connect_timeout)}"),
            *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"),
            *("-o", "ClearAllForwardings=yes", "-o", "ForwardAgent=no", "-o", "LogLevel=ERROR"),
            # The inventory's words win over those of the person's ssh config.
            *("-o", f"HostName={host.address}", "-p", str(host.port), "-l", host.user),
        ]
        words += self._files_for_ssh()
        for word in words:
            if set(word) & set(" '\"\\"):
                raise TransportError(
                    f"host {self.host}: rsync cannot be told of {word!r}: a path for ssh has no "
                    "space, quote or backslash"
                )
        return ("-e", " ".join(words))

    def _files_for_ssh(self) -> list[str]:
        """Where ssh must look to see what this transport sees.

        It looks in the home folder of the user database, whatever $HOME says, and takes a `~` in
        its own files for that one too.
        """
        if self._folder is None and _home_of_user() == pathlib.Path.home():
            return []
        folder = self._files
        config = folder / "config"
        alias = self._settings.identity or self._settings.address
        said = ssh_config_of(self._settings, folder).lookup(alias)
        named: list[str] = said.get("userknownhostsfile", "").split()
        known = named[0] if named else folder / "known_hosts"
        words = ["-F", str(config) if config.exists() else "none"]
        words += ["-o", f"UserKnownHostsFile={pathlib.Path(known).expanduser()}"]
        keys = said.get("identityfile") or [
            str(path) for name in DEFAULT_KEYS if (path := folder / name).exists()
        ]
        for key in keys:
            words += ["-o", f"IdentityFile={pathlib.Path(key).expanduser()}"]
        return words

    @property
    def _files(self) -> pathlib.Path:
        return self._folder or pathlib.Path.home() / ".ssh"

    def rsync_place(self, path: str) -> str:
        name = self._settings.identity or self._settings.address
        return f"[{name}]:{path}" if ":" in name else f"{name}:{path}"

    def close(self) -> None:
        login, self._login = self._login, None
        if login is not None:
            login.close()

    # Commands.

    def _run(
        self,
        argv: Sequence[str],
        *,
        timeout: float,
        given: IO[bytes],
        env: Mapping[str, str],
        take: Callable[[bytes], bool],
    ) -> tuple[int, str]:
        """Exit code and stderr of a command; its stdout goes to `take`, which says if it may go on.

        Raises what `Transport.run` does, but CommandFailed.
        """
        nonce = secrets.token_hex(16)
        line, script = self._script(nonce, argv, timeout, env)
        login = self._open()
        command = _Command(nonce, line, script, given, take)
        with no_longer_than(timeout + limits.GRACE_S + _SPARE_S, login.drop):
            try:
                command.start(login, timeout)
                command.follow()
            except (OSError, EOFError, paramiko.SSHException) as error:
                if login.alive:
                    raise TransportError(
                        f"host {self.host}: `{argv[0]}` could not be started: {error}"
                    ) from None
            except BaseException:
                self._end(login, command)
                raise
            else:
                if command.expired or command.flooded:
                    command.ended = self._end(login, command)
                    command.drain()
            finally:
                command.close()
        return self._judged(argv, timeout, command, login)

    def _judged(
        self, argv: Sequence[str], timeout: float, command: _Command, login: Login
    ) -> tuple[int, str]:
        name = f"host {self.host}: `{argv[0]}`"
        stderr = command.err.text()
        if command.flooded:
            raise TransportError(
                f"{name} printed more than {limits.LONGEST_OUTPUT >> 20} MiB and was stopped"
            )
        if command.expired:
            if command.ended:
                raise CommandTimeout(self.host, argv, timeout, stderr)
            raise TransportError(
                f"{name} did not end within {timeout:g} s, and could not be stopped from here: "
                "the connection was given up, and the host stops it"
            )
        if command.exit_code is None:
            if not login.alive:
                raise TransportError(
                    f"{name}: the connection was lost before it had ended; the host stops it"
                )
            raise TransportError(
                f"{name}: the host ended the command and does not say how"
                f"{last_words(stderr or command.prelude, ': ')}"
            )
        if not command.begun:
            raise TransportError(
                f"host {self.host}: its login shell runs no commands "
                f"(exit code {command.exit_code}{last_words(command.prelude, ', ')})"
            )
        return command.exit_code, stderr

    def _script(
        self, nonce: str, argv: Sequence[str], timeout: float, env: Mapping[str, str]
    ) -> tuple[str, bytes]:
        """The command line for SSH, and what its shell reads first: how to become `argv`."""
        line = shell_line(self.host, argv)
        refused = f"host {self.host}: `{argv[0]}` could not be started:"
        for name, value in env.items():
            if not _VARIABLE.fullmatch(name):
                raise TransportError(f"{refused} no variable can be called {name!r}")
            if "\0" in value:
                raise TransportError(f"{refused} the value of {name} holds a NUL byte")
        exports = "".join(f"export {name}={shlex.quote(text)}\n" for name, text in env.items())
        watch_s = math.ceil(min(timeout + limits.GRACE_S + _SPARE_S, 1e9))
        script = "".join(
            (
                # In braces, so that a shell which gets only a part of it runs nothing of it.
                "{\n",
                # Another parent than at first: the connection is gone, and with it who would end
                # the command.
                "kd_p=; { read -r kd_a kd_b kd_c kd_p kd_d </proc/$$/stat; } 2>/dev/null\n",
                'case "$kd_p" in ""|"$PPID") ;; *) exit 1 ;; esac\n',
                f"{_LEADS} && kd_t=-$$ || kd_t=$$\n",
                "kd_s=; command -v setsid >/dev/null && kd_s=setsid\n",
                f'( $kd_s /bin/sh -c {shlex.quote(_WATCH)} kd "$kd_t" "$$" "$PPID" {watch_s} '
                "</dev/null >/dev/null 2>&1 & )\n",
                f'echo "{nonce} $kd_t"; echo "{nonce} $kd_t" >&2\n',
                "unset kd_a kd_b kd_c kd_d kd_p kd_s kd_t\n",
                exports,
                line,
                "\n}\n",
            )
        ).encode("utf-8", "surrogateescape")
        longest = max(len(os.fsencode(part)) for part in (*argv, *env.values()))
        if longest > _LONGEST_ARGUMENT or len(script) > _LONGEST_SCRIPT:
            raise TransportError(f"{refused} Argument list too long")
        # sshd makes its shell the leader of a session; other servers may not. setsid starts a new
        # process where it is called by a leader, which is why this looks first.
        read_on = _READ_ON % len(script)
        first = (
            f"{{\nif ! {_LEADS} && command -v setsid >/dev/null; then\n"
            f"exec setsid /bin/sh -c {shlex.quote(read_on)}\nfi\n{read_on}\n}}\n"
        ).encode()
        return f"exec /bin/sh -c {shlex.quote(_READ_ON % len(first))}", first + script

    def _end(self, login: Login, command: _Command) -> bool:
        """End the command's process group; whether that was done.

        Where it cannot be done the connection is given up, so that the host itself does it.
        """
        if command.exit_code is not None:
            return True
        try:
            command.await_group()
            if command.group is not None and login.alive:
                with no_longer_than(limits.GRACE_S + _SPARE_S, login.drop):
                    if _ended(login.connection.create_session(), command.group):
                        return True
        except (OSError, EOFError, paramiko.SSHException):
            pass
        login.drop()
        return False

    def _open(self) -> Login:
        if self._login is not None and not self._login.alive:
            self.close()
        if self._login is None:
            self._login = Login(self._settings, self._files, self._connect_timeout)
        return self._login

    # Files.

    def _path(self, path: str) -> str:
        """`path` as both SFTP and a shell in the home folder take it; never like an option."""
        if not path or "\0" in path:
            raise TransportError(f"host {self.host}: {path!r} is not a path")
        if path.startswith("~/"):
            return f"./{path[2:]}"
        return path if path.startswith("/") else f"./{path}"

    def _by_sftp(self, copy: Callable[[paramiko.SFTPClient], None]) -> bool:
        """Whether `copy` was done; if not, a shell does it or says why it cannot be done.

        SFTP has words for two reasons alone: the full disk is not among them.
        Raises OSError where the reason is clear.
        """
        if not self._has_sftp:
            return False
        login = self._open()
        with contextlib.ExitStack() as stack:
            try:
                with no_longer_than(_STALLED_S, login.drop):
                    sftp = login.connection.client.open_sftp()
                stack.callback(sftp.close)
            except (OSError, EOFError, paramiko.SSHException, paramiko.SFTPError):
                self._still_there(login)
                self._has_sftp = False
                return False
            sftp.get_channel().settimeout(_STALLED_S)
            try:
                copy(sftp)
            except TimeoutError:
                raise TimeoutError(0, f"nothing moved for {_STALLED_S:g} s") from None
            except OSError as error:
                if error.errno is not None:
                    raise OSError(error.errno, os.strerror(error.errno)) from None
                self._still_there(login)
                return False
            except (EOFError, paramiko.SSHException, paramiko.SFTPError):
                self._still_there(login)
                return False
        return True

    def _still_there(self, login: Login) -> None:
        if not login.alive:
            raise ConnectionError(0, "the connection was lost")

    def _copy_by_shell(
        self, script: str, *arguments: str, given: IO[bytes] | None = None, taken: Any = None
    ) -> None:
        faults: list[OSError] = []

        def take(block: bytes) -> bool:
            try:
                if taken is not None:
                    taken.write(block)
            except OSError as error:
                faults.append(error)
            return not faults

        try:
            exit_code, stderr = self._run(
                ["/bin/sh", "-c", script, "sh", *arguments],
                timeout=_LONGEST_COPY_S,
                given=given or io.BytesIO(),
                env={},
                take=take,
            )
        except TransportError:
            if faults:
                raise faults[0] from None
            raise
        if exit_code != 0:
            raise OSError(0, last_words(stderr) or f"exit code {exit_code}")

    def _not_copied(self, source: str, target: str, error: OSError) -> TransportError:
        reason = error.strerror or str(error)
        return TransportError(
            f"host {self.host}: {source} could not be copied to {target}: {reason}"
        )


def _ended(channel: paramiko.Channel, group: str) -> bool:
    """Whether the host has ended a process group, asked through a channel of its own."""
    try:
        channel.exec_command(f"exec /bin/sh -c {shlex.quote(_END)} kd {group}")
        channel.shutdown_write()
        while channel.recv(_BLOCK):
            pass
        return bool(channel.recv_exit_status() == 0)
    finally:
        channel.close()


class _Taken:
    """Output that is kept, up to `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._blocks: list[bytes] = []
        self._size = 0

    def __call__(self, block: bytes) -> bool:
        """Keep `block`; whether there may be more."""
        self._blocks.append(block)
        self._size += len(block)
        return self._size <= self._limit

    def text(self) -> str:
        return b"".join(self._blocks).decode("utf-8", "replace")


class _Stream:
    """One of a command's outputs, from where the command itself begins."""

    def __init__(self, nonce: str, take: Callable[[bytes], bool]) -> None:
        self._begin = re.compile(rb"(?s)(.*?)%b (-?\d+)\n" % nonce.encode())
        self._take = take
        self.prelude = b""
        self.group: str | None = None

    def feed(self, block: bytes) -> bool:
        """Take `block`; whether there may be more."""
        if self.group is None:
            self.prelude += block
            found = self._begin.match(self.prelude)
            if found is None:
                return len(self.prelude) <= _LONGEST_SCRIPT
            block = self.prelude[found.end() :]
            self.prelude, self.group = found[1], found[2].decode()
        return not block or self._take(block)


class _Command:
    """A command of which both outputs are read, and the input written, by one thread.

    exit_code: negative for a signal; None before the end, or where the host does not say.
    group: what `kill` is to be given for all of it; None before it has begun.
    expired, flooded: whether it took too long, or printed too much.
    """

    def __init__(
        self,
        nonce: str,
        line: str,
        script: bytes,
        given: IO[bytes],
        take: Callable[[bytes], bool],
    ) -> None:
        self.expired = self.flooded = self.ended = False
        self.err = _Taken(limits.LONGEST_OUTPUT)
        self._stdout = _Stream(nonce, take)
        self._stderr = _Stream(nonce, self.err)
        self._line = line
        self._unsent = script
        self._given: IO[bytes] | None = given
        self._channel: paramiko.Channel | None = None
        self._deadline = 0.0
        self._last_word = 0.0

    @property
    def group(self) -> str | None:
        return self._stdout.group or self._stderr.group

    @property
    def begun(self) -> bool:
        return self.group is not None

    @property
    def prelude(self) -> str:
        """What the login shell printed before the command, for where there was no command."""
        return (self._stdout.prelude + self._stderr.prelude).decode("utf-8", "replace")

    @property
    def exit_code(self) -> int | None:
        channel = self._channel
        if channel is None or not channel.exit_status_ready():
            return None
        signal_number = getattr(channel, "kd_signal", None)
        if signal_number is not None:
            return -int(signal_number)
        return int(channel.exit_status) if channel.exit_status >= 0 else None

    def start(self, login: Login, timeout: float) -> None:
        self._deadline = time.monotonic() + timeout
        self._channel = login.connection.create_session()
        self._channel.exec_command(self._line)
        self._channel.setblocking(0)

    def follow(self) -> None:
        """Until its end and that of its output, its time limit, or a line that is lost."""
        assert self._channel is not None
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        ended_at = None
        while True:
            self._write()
            self._read()
            now = time.monotonic()
            if self.flooded or (self._channel.closed and self._is_read()):
                return
            if self.exit_code is not None:
                ended_at = ended_at or now
                # What runs on in the background may hold the outputs open for ever.
                quiet = now - max(ended_at, self._last_word) > limits.SILENCE_S
                if quiet or self._is_read() or now > self._deadline:
                    return
            elif now > self._deadline:
                self.expired = True
                return
            if self._channel.eof_received:
                time.sleep(_POLL_S / 5)  # the file descriptor is ready for good
            else:
                poll.poll(_POLL_S * 1000 if self._given is None else 5)

    def await_group(self) -> None:
        """Give it a moment to say its process group."""
        deadline = time.monotonic() + limits.GRACE_S
        while not self.begun and self._channel is not None and time.monotonic() < deadline:
            self._write()
            self._read()
            if self._channel.closed:
                return
            time.sleep(0.01)

    def drain(self) -> None:
        """What it printed before it was ended."""
        assert self._channel is not None
        deadline = time.monotonic() + limits.SILENCE_S
        while not self.flooded and not self._is_read() and time.monotonic() < deadline:
            self._read()
            time.sleep(0.01)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def _is_read(self) -> bool:
        channel = self._channel
        assert channel is not None
        return (
            (channel.eof_received or channel.closed)
            and not channel.recv_ready()
            and not channel.recv_stderr_ready()
        )

    def _write(self) -> None:
        channel = self._channel
        assert channel is not None
        for _ in range(32):  # then what it prints is looked at
            if self._given is None:
                return
            if not self._unsent:
                self._unsent = self._given.read(_BLOCK)
            try:
                if not self._unsent:
                    channel.shutdown_write()
                    self._given = None
                    return
                sent = channel.send(self._unsent)
            except TimeoutError:
                return
            except OSError:
                sent = 0
            if not sent:
                self._given = None  # it ended without reading all of it
                return
            self._unsent = self._unsent[sent:]

    def _read(self) -> None:
        channel = self._channel
        assert channel is not None
        for ready, receive, stream in (
            (channel.recv_ready, channel.recv, self._stdout),
            (channel.recv_stderr_ready, channel.recv_stderr, self._stderr),
        ):
            for _ in range(32):
                if self.flooded or not ready():
                    break
                self._last_word = time.monotonic()
                self.flooded = not stream.feed(receive(_BLOCK))


def _put(sftp: paramiko.SFTPClient, given: IO[bytes], beside: str, there: str, mode: int) -> None:
    part, target = os.fsencode(beside), os.fsencode(there)
    try:
        with sftp.open(part, "wx") as taken:
            taken.chmod(0o600)  # before anything is in it
            taken.set_pipelined(True)
            shutil.copyfileobj(given, taken, 1 << 15)
            # With pipelining an error may be lost, but not the bytes that it took away.
            if taken.stat().st_size != given.tell():
                raise OSError("not all of it arrived")
            taken.chmod(mode)
            with contextlib.suppress(OSError):  # not all servers can
                sftp._request(CMD_EXTENDED, "fsync@openssh.com", taken.handle)
        sftp.posix_rename(part, target)
    except BaseException:
        with contextlib.suppress(Exception):
            sftp.remove(part)
        raise


def _get(sftp: paramiko.SFTPClient, there: str, taken: IO[bytes]) -> None:
    source = os.fsencode(there)
    if not stat.S_ISREG(sftp.stat(source).st_mode or 0):
        raise OSError("not a regular file")  # what SFTP makes of it differs; a shell knows
    sftp.getfo(source, taken, max_concurrent_prefetch_requests=128)
