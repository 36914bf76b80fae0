"""One gate in a process of its own.

A gate may crash, hang, patch the clock or leave threads and children behind: none of it reaches
the run that asked for it. Workers are forked from a server process that has imported torch once,
and each leads a process group that is ended as a whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import pathlib
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

from kdtree_engine.errors import MissingError
from phases.gate import Check, Context, FailureKind, Figure, Gate, GateFailure, Status

__all__ = ["Outcome", "RunningGate"]

_PRELOAD = ["torch", "phases.worker"]
_GRACE_S = 2.0
_AT_ONCE = 100
"""What one gate says that is taken before others are heard."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a gate ended, before it becomes evidence."""

    status: Status
    seconds: float
    figures: tuple[Figure, ...] = ()
    failure: FailureKind | None = None
    message: str | None = None


class RunningGate:
    """A gate, which must have a check, in a process of its own that has been started.

    What it prints goes to `log`; `scratch` is made for it and removed with it. Whoever has made one
    asks `hear` until there is an outcome, or gives it up by `end`.
    """

    def __init__(
        self,
        gate: Gate,
        *,
        seed: int,
        log: pathlib.Path,
        scratch: pathlib.Path,
        progress: Callable[[int, int, str], None],
    ) -> None:
        assert gate.check is not None, f"{gate.name} is unwritten"
        log.parent.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self._begun = time.monotonic()
        self._limit_s = gate.time_limit_s
        self._log, self._scratch, self._progress = log, scratch, progress
        scratch.mkdir(parents=True)
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_work, args=(theirs, gate.check, seed, str(scratch), str(log)), name=gate.name
        )
        try:
            self._process.start()
            theirs.close()
        except BaseException:
            self.end()
            raise

    @property
    def waits(self) -> list[Connection | int]:
        """What is ready once it has something to say, or its process is gone."""
        return [self.pipe, self._process.sentinel]

    @property
    def deadline(self) -> float:
        """When its time is up, by time.monotonic()."""
        return self._begun + self._limit_s

    def hear(self) -> Outcome | None:
        """Takes what its process has said, without waiting; the outcome once it has ended.

        None while it goes on. To be called where one of `waits` is ready, or at the deadline.
        """
        for _ in range(_AT_ONCE):  # who talks without an end keeps neither others nor the limit off
            try:
                if not self.pipe.poll():
                    if self._process.is_alive():
                        break
                    if not self.pipe.poll():  # a child of it may hold the pipe open
                        return self._died()
                message = self.pipe.recv()
            except (EOFError, OSError):  # the pipe closed with no outcome
                return self._died()
            except Exception as error:  # whatever its objects raise as they are made anew
                self.end()
                said = f"what the gate's process sent cannot be read: {error}; see {self._log}"
                return Outcome(Status.ERROR, self._seconds(), message=said)
            if isinstance(message, Outcome):
                self.end(_GRACE_S)
                return dataclasses.replace(message, seconds=self._seconds())
            self._progress(*message)
        if time.monotonic() < self.deadline:
            return None
        self.end()
        message = f"not done after {self._limit_s:g} s; its process was ended"
        return Outcome(Status.FAILED, self._seconds(), failure=FailureKind.TIMEOUT, message=message)

    def _died(self) -> Outcome:
        self.end(_GRACE_S)
        code = self._process.exitcode
        how = f"signal {_signal_name(-code)}" if code and code < 0 else f"exit code {code}"
        message = f"the gate's process died ({how}) before it answered; see {self._log}"
        return Outcome(Status.ERROR, self._seconds(), message=message)

    def end(self, grace_s: float = 0.0) -> None:
        """Ends its processes, after `grace_s` in which they may exit by themselves."""
        _end(self._process, grace_s)
        self.pipe.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _seconds(self) -> float:
        return time.monotonic() - self._begun


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most of those for real-time use have none
        return str(number)


def _end(process: multiprocessing.process.BaseProcess, grace_s: float) -> None:
    """End the worker's whole group, after `grace_s` in which it may exit by itself."""
    if process.pid is None:
        return
    process.join(grace_s)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # also what an ended worker has left running
    if process.is_alive():
        process.kill()  # it had not made its group yet
    process.join()


def _work(pipe: Connection, check: Check, seed: int, scratch: str, log: str) -> None:
    """The worker's body. What is printed, by C code and children too, goes to the log."""
    os.setpgid(0, 0)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    threading.Thread(target=_die_with_the_run, args=(pipe,), daemon=True).start()

    def progress(done: int, total: int, note: str) -> None:
        with contextlib.suppress(OSError):
            pipe.send((int(done), int(total), str(note)))

    pipe.send(_judge(check, Context(seed=seed, scratch=pathlib.Path(scratch), progress=progress)))


def _judge(check: Check, context: Context) -> Outcome:
    try:
        figures = tuple(check(context))
        if not figures or not all(isinstance(figure, Figure) for figure in figures):
            raise TypeError(f"a gate returns its figures, got {figures!r}")
    except GateFailure as failure:
        return Outcome(Status.FAILED, 0.0, failure.figures, failure.kind, str(failure))
    except MissingError as error:  # found out on the way, such as a library that is not built
        return Outcome(Status.BLOCKED, 0.0, message=str(error))
    except Exception as error:
        traceback.print_exc()
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{pathlib.Path(place.filename).name}:{place.lineno}"
        text = " ".join(str(error).split())[:500]
        return Outcome(Status.ERROR, 0.0, message=f"{type(error).__name__} at {where}: {text}")
    return Outcome(Status.PASSED, 0.0, figures)


def _die_with_the_run(pipe: Connection) -> None:
    """End this process group once the other end of the pipe, and so the run, is gone."""
    with contextlib.suppress(OSError):
        pipe.poll(None)  # nothing is ever sent this way: it returns when the pipe breaks
    os.killpg(0, signal.SIGKILL)
