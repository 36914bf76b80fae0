"""Gates that behave in every way a gate can, for the tests of the runner. One function each."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from kdtree_engine.errors import MissingError
from kdtree_engine.machine import Machine
from phases.gate import Context, FailureKind, Figure, Gate, GateFailure, GateKind, Unit
from phases.phase import Phase

MACHINE = Machine(
    hostname="bench-1",
    system="Linux",
    python="3.11.7",
    torch="2.14.1",
    cuda=None,
    driver=None,
    gpus=(),
    nvcc=None,
    compute_sanitizer=None,
    sglang=None,
    ssh=None,
    rsync=None,
)


def passes(context: Context) -> Sequence[Figure]:
    for done in range(3):
        context.progress(done, 3, f"case {done}")
    (context.scratch / "notes").write_text("gone after the gate")
    return [Figure("prompts", 200, Unit.COUNT), Figure("seed", context.seed, Unit.COUNT)]


def measures(context: Context) -> Sequence[Figure]:
    return [Figure("16k prefix", 28.1, Unit.MICROSECONDS)]


def fails(context: Context) -> Sequence[Figure]:
    figures = [Figure("relative error", 0.5, Unit.RELATIVE_ERROR)]
    raise GateFailure(FailureKind.NUMERICAL, "row 3 of request 1 differs", figures)


def breaks(context: Context) -> Sequence[Figure]:
    raise IndexError("list index out of range")


def misses_a_library(context: Context) -> Sequence[Figure]:
    raise MissingError("the kernel library is not built", remedy="run `kd build`")


def answers_nothing(context: Context) -> Sequence[Figure]:
    return []


def gives_infinity(context: Context) -> Sequence[Figure]:
    return [Figure("ratio", float("inf"), Unit.RATIO)]


def prints(context: Context) -> Sequence[Figure]:
    print("from Python")
    os.system("echo from a child")
    return [Figure("lines", 2, Unit.COUNT)]


def crashes(context: Context) -> Sequence[Figure]:
    ctypes.string_at(0)
    raise AssertionError("unreachable")


def exits(context: Context) -> Sequence[Figure]:
    os._exit(7)


def exits_before_its_child(context: Context) -> Sequence[Figure]:
    """The child has the pipe too, which so stays open."""
    if os.fork() == 0:
        time.sleep(600)
    os._exit(7)


def ends_by_an_unnamed_signal(context: Context) -> Sequence[Figure]:
    os.kill(os.getpid(), signal.SIGRTMIN + 1)
    raise AssertionError("unreachable")


def talks(context: Context) -> Sequence[Figure]:
    """Without an end, and faster than anybody listens."""
    while True:
        context.progress(1, 2, "still here")


class _Unreadable(str):
    def __reduce__(self) -> tuple[object, ...]:
        return int, ("no number",)


def sends_what_cannot_be_read(context: Context) -> Sequence[Figure]:
    return [Figure(_Unreadable("case"), 1, Unit.COUNT)]


def hangs(context: Context) -> Sequence[Figure]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path(os.environ["SAMPLE_PID_FILE"]).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)
    return []


def leaves_a_child(context: Context) -> Sequence[Figure]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path(os.environ["SAMPLE_PID_FILE"]).write_text(f"{os.getpid()} {child.pid}")
    return [Figure("children", 1, Unit.COUNT)]


def patches_the_clock(context: Context) -> Sequence[Figure]:
    time.monotonic = lambda: 0.0
    return [Figure("clocks", 1, Unit.COUNT)]


def phase(number: int, *gates: Gate, depends_on: tuple[int, ...] = ()) -> Phase:
    """A phase called `sample` with these gates."""
    return Phase(number, "sample", "a sample", 10 + number, depends_on, gates)


def speed_gate(name: str = "sample-speed") -> Gate:
    return Gate(name, "how fast it is", measures, kind=GateKind.SPEED)


def meets_another(context: Context) -> Sequence[Figure]:
    """How many gates of one run are there at the same time, up to two."""
    with _being_there(context) as there:
        found = there(2, 10.0)
        time.sleep(0.3)  # the other one looks too
    return [Figure("gates", found, Unit.COUNT)]


def meets_nobody(context: Context) -> Sequence[Figure]:
    """Fails where another gate of the run is there at the same time."""
    with _being_there(context) as there:
        if there(2, 0.5) > 1:
            raise GateFailure(FailureKind.NUMERICAL, "another gate runs beside it")
    return [Figure("ratio", 1.0, Unit.RATIO)]


def fails_before_another_ends(context: Context) -> Sequence[Figure]:
    with _being_there(context) as there:
        there(2, 10.0)
    raise GateFailure(FailureKind.NUMERICAL, "wrong")


def outlives_another(context: Context) -> Sequence[Figure]:
    with _being_there(context) as there:
        there(2, 10.0)
        there(1, 10.0)
        time.sleep(1.0)
    return [Figure("gates", 1, Unit.COUNT)]


def sleeps(context: Context) -> Sequence[Figure]:
    time.sleep(60)
    return []


@contextlib.contextmanager
def _being_there(context: Context) -> Iterator[Callable[[int, float], int]]:
    """Shows other gates of the run that this one is there.

    Gives a function that waits until so many are there, at most so many seconds; how many are.
    """
    here = context.scratch.parent / f"{context.scratch.name}.here"

    def there(wanted: int, wait_s: float) -> int:
        end = time.monotonic() + wait_s
        while (found := len(list(here.parent.glob("*.here")))) != wanted and time.monotonic() < end:
            time.sleep(0.02)
        return found

    here.touch()
    try:
        yield there
    finally:
        here.unlink()


def with_pid_file(name: str, path: str, context: Context) -> Sequence[Figure]:
    """The sample gate `name`, with the file that it writes process numbers to."""
    os.environ["SAMPLE_PID_FILE"] = path
    figures: Sequence[Figure] = globals()[name](context)
    return figures
