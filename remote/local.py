"""This machine, through the same interface as any other host.

It stands on Invoke, as Fabric does, so that both transports share their way of running commands.
Invoke's own local runner is close but not safe enough here, which is what `_GroupRunner` mends: it
ends only the direct child on a timeout, leaves the child's stdin open, decodes each block of output
on its own (so a character that lies across two blocks is lost), and joins all output again for
every block.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import pathlib
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import IO, Any

from invoke.config import Config
from invoke.context import Context
from invoke.exceptions import CommandTimedOut
from invoke.runners import Local

from remote import limits
from remote.errors import CommandFailed, CommandTimeout, TransportError
from remote.files import whole_file
from remote.quoting import shell_line
from remote.transport import Completed

__all__ = ["LocalTransport"]

_SHELL = "/bin/sh"


class LocalTransport:
    """Runs commands and copies files on this machine. See `Transport` for the contract."""

    def __init__(self, host: str = "local") -> None:
        self._host = host
        # lazy: a person's own ~/.invoke.yaml has no say in how kd runs commands.
        self._context = Context(Config(lazy=True))

    @property
    def host(self) -> str:
        return self._host

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float,
        input: bytes | None = None,  # noqa: A002
        env: Mapping[str, str] | None = None,
        check: bool = True,
    ) -> Completed:
        command = shell_line(self._host, argv)
        with contextlib.ExitStack() as stack:
            stdin = None
            if input is not None:
                stdin = stack.enter_context(tempfile.TemporaryFile())
                stdin.write(input)
                stdin.seek(0)
            runner = _GroupRunner(self._context, stdin)
            try:
                result = runner.run(
                    command,
                    shell=_SHELL,
                    env=dict(env or {}),
                    encoding="utf-8",
                    hide=True,
                    warn=True,
                    pty=False,
                    in_stream=False,
                    timeout=timeout,
                )
            except CommandTimedOut as error:
                raise CommandTimeout(self._host, argv, timeout, error.result.stderr) from None
            except (OSError, ValueError) as error:
                # The kernel or Popen refused it: too long, or a variable's name holds "=".
                raise TransportError(
                    f"host {self._host}: `{argv[0]}` could not be started: {error}"
                ) from None
            except BaseException:
                runner.end_group()
                raise
        if runner.flooded:
            raise TransportError(
                f"host {self._host}: `{argv[0]}` printed more than "
                f"{limits.LONGEST_OUTPUT >> 20} MiB and was stopped"
            )
        assert result is not None  # only a disowned command has no result
        completed = Completed(result.exited, result.stdout, result.stderr)
        if check and completed.exit_code != 0:
            raise CommandFailed(self._host, argv, completed.exit_code, completed.stderr)
        return completed

    def put(self, source: pathlib.Path, target: str, *, mode: int = 0o600) -> None:
        self._copy(source, self._path(target), mode)

    def get(self, source: str, target: pathlib.Path) -> None:
        self._copy(self._path(source), target, 0o600)

    def exists(self, path: str) -> bool:
        return self._path(path).exists()

    def rsync_options(self) -> Sequence[str]:
        return ()

    def rsync_place(self, path: str) -> str:
        return path  # absolute, so that no colon in it can look like a host

    def close(self) -> None:
        pass  # there is no connection to let go

    def _path(self, path: str) -> pathlib.Path:
        """`path` with `~/` at its start read as the home folder."""
        if not path or "\0" in path:
            raise TransportError(f"host {self._host}: {path!r} is not a path")
        return pathlib.Path.home() / path[2:] if path.startswith("~/") else pathlib.Path(path)

    def _copy(self, source: pathlib.Path, target: pathlib.Path, mode: int) -> None:
        try:
            with source.open("rb") as given, whole_file(target, mode) as taken:
                shutil.copyfileobj(given, taken)
        except OSError as error:
            raise TransportError(
                f"host {self._host}: {source} could not be copied to {target}: {error.strerror}"
            ) from None


class _GroupRunner(Local):
    """A child in a process group of its own, which ends as a whole."""

    read_chunk_size = 1 << 16
    process: subprocess.Popen[bytes]

    def __init__(self, context: Context, stdin: IO[bytes] | None) -> None:
        super().__init__(context)
        self.flooded = False
        self._stdin = stdin
        self._expired = False
        self._received = {"stdout": 0, "stderr": 0}

    def start(self, command: str, shell: str, env: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [shell, "-c", command],
            env=env,
            stdin=self._stdin or subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def kill(self) -> None:
        """What the timer calls."""
        self._expired = True
        self.end_group()

    @property
    def timed_out(self) -> bool:
        return self._expired

    def send_interrupt(self, interrupt: KeyboardInterrupt) -> None:
        self.end_group()
        raise interrupt

    def end_group(self) -> None:
        """Ask the process group and what it has started to end, and after a moment end them."""
        process = getattr(self, "process", None)
        if process is None:
            return
        groups = _groups_below(process.pid)
        left = [group for group in groups if _sent(group, signal.SIGTERM)]
        deadline = time.monotonic() + limits.GRACE_S
        while left and time.monotonic() < deadline:
            time.sleep(0.01)
            process.poll()  # reaps the leader, which would keep the group alive
            left = [group for group in left if _sent(group, 0)]
        for group in left:
            _sent(group, signal.SIGKILL)

    def read_proc_output(self, reader: Callable[..., Any]) -> Generator[str, None, None]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while block := reader(self.read_chunk_size):
            yield decoder.decode(block)
        yield decoder.decode(b"", final=True)

    def read_proc_stdout(self, num_bytes: int) -> bytes:
        return self._read("stdout", self.process.stdout, num_bytes)

    def read_proc_stderr(self, num_bytes: int) -> bytes:
        return self._read("stderr", self.process.stderr, num_bytes)

    def respond(self, buffer_: list[str]) -> None:
        pass  # nothing here answers prompts

    def stop(self) -> None:
        super().stop()
        process = getattr(self, "process", None)
        if process is not None:
            for stream in (process.stdout, process.stderr):
                stream.close()

    def _read(self, name: str, stream: IO[bytes] | None, num_bytes: int) -> bytes:
        """The next block; empty at the end.

        The end is not left to the pipe alone: a background process that inherited it may hold it
        open for ever.
        """
        assert stream is not None
        poll = select.poll()
        poll.register(stream, select.POLLIN)
        while not poll.poll(limits.SILENCE_S * 1000):
            if self.process.poll() is not None:
                return b""
        block = os.read(stream.fileno(), num_bytes)
        self._received[name] += len(block)
        if self._received[name] > limits.LONGEST_OUTPUT:
            self.flooded = True
            self.end_group()
            return b""
        return block


def _groups_below(first: int) -> set[int]:
    """The process groups of `first` and of all that it has started, in sessions of their own too.

    Each process is found by its parent: one whose parent has ended before is nobody's.
    """
    parents, groups = {}, {first: first}
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # What stands in brackets is the name, and may hold anything.
            fields = path.read_bytes().rpartition(b")")[2].split()
            parents[int(path.parent.name)] = (int(fields[1]), int(fields[2]))
    grown = True
    while grown:
        more = {
            pid: group
            for pid, (parent, group) in parents.items()
            if parent in groups and pid not in groups
        }
        groups |= more
        grown = bool(more)
    return {group for group in groups.values() if group > 1}


def _sent(group: int, number: int) -> bool:
    """Whether a process group is there to take a signal."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
