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

__all__ = ["Outcome", "run_gate"]

_PRELOAD = ["torch", "phases.worker"]
_GRACE_S = 2.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a gate ended, before it becomes evidence."""

    status: Status
    seconds: float
    figures: tuple[Figure, ...] = ()
    failure: FailureKind | None = None
    message: str | None = None


def run_gate(
    gate: Gate,
    *,
    seed: int,
    log: pathlib.Path,
    scratch: pathlib.Path,
    progress: Callable[[int, int, str], None],
) -> Outcome:
    """Run `gate`, which must have a check, in a process of its own.

    What it prints goes to `log`; `scratch` is made for it and removed afterwards.
    Always returns an outcome, except that KeyboardInterrupt passes through once the gate's
    processes are gone.
    """
    assert gate.check is not None, f"{gate.name} is unwritten"
    log.parent.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    begun = time.monotonic()
    scratch.mkdir(parents=True)
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_work, args=(theirs, gate.check, seed, str(scratch), str(log)), name=gate.name
    )
    ended: Outcome | _Died | None = None
    try:
        process.start()
        theirs.close()
        ended = _listen(ours, begun + gate.time_limit_s, progress)
    finally:
        _end(process, grace_s=_GRACE_S if ended else 0.0)
        ours.close()
        shutil.rmtree(scratch, ignore_errors=True)
    seconds = time.monotonic() - begun
    if ended is None:
        message = f"not done after {gate.time_limit_s:g} s; its process was ended"
        return Outcome(Status.FAILED, seconds, failure=FailureKind.TIMEOUT, message=message)
    if isinstance(ended, _Died):
        code = process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
        message = f"the gate's process died ({how}) before it answered; see {log}"
        return Outcome(Status.ERROR, seconds, message=message)
    return dataclasses.replace(ended, seconds=seconds)


class _Died:
    """The pipe closed with no outcome."""


def _listen(
    pipe: Connection, deadline: float, progress: Callable[[int, int, str], None]
) -> Outcome | _Died | None:
    """The outcome that the worker sends; _Died without one; None at the deadline."""
    while pipe.poll(max(0.0, deadline - time.monotonic())):
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            return _Died()
        if isinstance(message, Outcome):
            return message
        progress(*message)
    return None


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
