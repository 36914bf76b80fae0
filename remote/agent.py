"""What runs on a host to look after its releases. It is sent there with each request.

Nothing of kd has to be installed for it: this file is the program, which needs Python 3.9 and its
standard library alone. It reads one request, `{"do": NAME, ...}`, as JSON from stdin and answers by
one line of JSON, `{"done": ...}` or `{"error": TEXT}`. So no name from here ever meets a shell.

    ROOT/releases/ID/source        the checkout, as it was sent
                     wheel         the engine's wheel, which holds its kernels, and tools' wheels
                     site          the wheel unpacked: what goes before SGLang on PYTHONPATH
                     tools         what gates import and the host's Python lacks
                     manifest.json SHA-256 and mode of each file that was sent
                     evidence.json how the gates stood with it when they were run last
                     release.json  what it is: revision, which number it has here, when, by whom
    ROOT/incoming                  what is being sent; it stays where a transfer breaks off
    ROOT/current                   a symbolic link to releases/ID
    ROOT/promotions.jsonl          each promotion, in order: the one truth about what came before
    ROOT/lock.json                 who changes something right now
    ROOT/.lock.guard               held for the moment in which lock.json is looked at and changed
    ROOT/service                   what starts the service, and its log
    ROOT/jobs/NAME                 what runs here for long, and the last 20 that ended: log and end
    ROOT/state                     evidence of gates that ran here, of all releases
    ROOT/build                     objects of kernels that were compiled here

Each step is one rename, so that whoever is killed leaves the state before it or the state after it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import http.client
import json
import os
import pathlib
import pwd
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from typing import Any

_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,99}")
_BLOCK = 1 << 20
_METRICS_S, _METRICS_BYTES = 5.0, 32 << 20
"""How long a service may take to say its metrics, and how many bytes of them are looked at."""
_METRICS_LINE_BYTES, _METRICS_KEPT_BYTES = 1 << 16, 1 << 20
"""How long a line of them may be, and how much of them is told: what kd exports is a few lines."""
_LEFT_S = 10.0
"""How long what a killed transfer left at work may take to be gone."""
_JOBS_KEPT = 20
"""How many jobs that have ended keep their logs."""
_JOB_STARTS_S = 600.0
"""Seconds after which a job without a `job.json` is one whose start was killed."""


class Refused(Exception):
    """A request that cannot be done; its text is one line for the person who asked."""


def prepare(root: str) -> dict[str, Any]:
    """Make the folders, for this user alone; where they are and how much is free, in bytes."""
    place = _root(root)
    for folder in (place, place / "releases", place / "incoming"):
        _require_folder(folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return {
        "root": str(place),
        "current": _current(place),
        "base": _base(place),
        "free_bytes": shutil.disk_usage(place).free,
        "rsync": shutil.which("rsync"),
        "home": str(pathlib.Path.home()),
        "user": pwd.getpwuid(os.getuid()).pw_name,
    }


def expect(root: str, names: list[str]) -> dict[str, int]:
    """Of what came before a transfer broke off, keep what is wanted now; how much that is.

    For who has the lock: what a transfer or a build that was killed left at work there is ended.
    """
    incoming = _root(root) / "incoming"
    if incoming.is_symlink():
        raise Refused(f"{incoming}: expected a folder, got a link")
    _end_builds(root)
    deadline = time.monotonic() + _LEFT_S
    while busy := _at_work_in(incoming):
        for process in busy:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise Refused(_still_at_work(incoming, busy))
        time.sleep(0.1)
    wanted = set(names)
    kept = 0
    for path in sorted(incoming.rglob("*"), reverse=True):  # what is in a folder before the folder
        if path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError):
                path.rmdir()  # if it is empty
        elif path.relative_to(incoming).as_posix() in wanted and path.lstat().st_nlink == 1:
            kept += 1  # one that an older release has as well would be changed there too
        else:
            path.unlink()
    for part in ("source", "wheel", "wheel/tools"):
        (incoming / part).mkdir(mode=0o700, exist_ok=True)
    return {"kept": kept}


def _at_work_in(folder: pathlib.Path) -> list[int]:
    """Each rsync that works in a folder or below it, as the receiving end of one does.

    Somebody's shell may be there as well, to look.
    """
    place = os.path.realpath(folder)
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone by now, or another user's
            works = str((process / "cwd").readlink())
            if (process / "comm").read_text().strip() != "rsync":
                continue
            if works == place or works.startswith(f"{place}/"):
                found.append(int(process.name))
    return sorted(found)


def _still_at_work(folder: pathlib.Path, processes: list[int]) -> str:
    return (
        f"{folder}: an rsync works there (process {', '.join(map(str, processes[:3]))}), of a "
        f"transfer that was given up and goes on: end it, then the same again"
    )


def _end_builds(root: str) -> None:
    """Builds that go on after what began them was killed: theirs would be taken for ours."""
    for job in jobs(root)["jobs"]:
        if job["name"].startswith("build-"):
            with contextlib.suppress(Refused):
                end_job(root, job["name"], signal.SIGKILL)


def look_at_python(root: str, packages: list[str]) -> dict[str, Any]:
    """The Python that this runs on: what wheels it takes, and which packages it has.

    packages: {name: version, or None where it is not installed}. PYTHONPATH does not count.
    """
    try:
        libc: str | None = os.confstr("CS_GNU_LIBC_VERSION")
    except (OSError, ValueError):
        libc = None
    return {
        "root": str(_root(root)),
        "executable": sys.executable,
        "version": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "machine": os.uname().machine,
        "glibc": libc.split()[-1] if libc else None,
        "path": os.environ.get("PATH", os.defpath),
        "packages": installed(packages),
    }


def installed(packages: list[str]) -> dict[str, str | None]:
    done = _python(["-c", _VERSIONS, *packages], {}, 60.0)
    if done.returncode:
        raise Refused(f"{sys.executable} cannot tell its packages: {_last_line(done.stderr)}")
    found: dict[str, str | None] = json.loads(done.stdout)
    return found


_VERSIONS = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found[name] = None
print(json.dumps(found))
"""


def _python(
    arguments: list[str], environment: dict[str, str], limit_s: float
) -> subprocess.CompletedProcess[str]:
    """This Python as a service has it: with what its person installed, unlike this process."""
    inherited = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
    try:
        return subprocess.run(
            [sys.executable, *arguments],
            env={**inherited, "PYTHONDONTWRITEBYTECODE": "1", **environment},
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        raise Refused(f"{sys.executable} did not answer within {limit_s:g} s") from None


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it says nothing"


def compare(root: str, manifest: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What a release of these files would change of the one there is. Writes nothing.

    base: the current release, or the newest where none is. libraries: {name: SHA-256} of its
    kernels.
    """
    place = _root(root)
    base = _base(place)
    there = _json(place / "releases" / base / "manifest.json") if base else None
    there = there or {}
    kernels = place / "releases" / (base or ".none") / "site" / "kdtree_engine" / "lib"
    return {
        "base": base,
        "libraries": {one.name: file_digest(one) for one in sorted(kernels.glob("*.so"))},
        "new": sorted(set(manifest) - set(there)),
        "changed": sorted(
            name for name in manifest if name in there and there[name] != manifest[name]
        ),
        "removed": sorted(set(there) - set(manifest)),
    }


def place_release(
    root: str,
    release: str,
    manifest: dict[str, dict[str, Any]],
    about: dict[str, Any],
    check: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Make what came in a release, if it is what was sent, file by file; its `release.json`.

    manifest: {path: {"sha256": hex, "executable": bool}} of all files in `source` and `wheel`.
    check: what this Python must import from it, else there is no release; see `_CHECK`.
    """
    place = _root(root)
    target = _release(place, release)
    if target.exists():
        raise Refused(f"release {release} is there already")
    incoming = place / "incoming"
    # It would go on writing into the release, wherever that has been moved to.
    if busy := _at_work_in(incoming):
        raise Refused(_still_at_work(incoming, busy))
    faults = _faults(incoming, manifest)
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise Refused(f"what arrived is not what was sent: {'; '.join(faults[:3])}{more}")
    for part in ("site", "tools"):
        shutil.rmtree(incoming / part, ignore_errors=True)
    for wheel in sorted((incoming / "wheel").glob("*.whl")):
        _unpack(wheel, incoming / "site")
    if (incoming / "built").is_dir():  # it was compiled here, from these sources
        library = incoming / "site" / "kdtree_engine" / "lib"
        shutil.rmtree(library, ignore_errors=True)
        (incoming / "built").rename(library)
    tools = _unpack_tools(incoming)
    if check is not None:
        _try_imports(incoming / "site", check)
    _join(place, incoming)
    about = {
        **about,
        "release": release,
        "sequence": 1 + max((_order(one)[0] for one in _whole(place)), default=0),
        "placed": time.time(),  # to be shown: a clock may be set back
        "files": len(manifest),
        "tools": tools,
    }
    _write(incoming / "manifest.json", json.dumps(manifest, sort_keys=True, indent=1) + "\n")
    _write(incoming / "release.json", json.dumps(about, sort_keys=True, indent=1) + "\n")
    _sync_tree(incoming)
    incoming.rename(target)
    _sync(place / "releases")
    _sync(place)
    return about


def switch(root: str, release: str) -> dict[str, str | None]:
    """Let `current` point at a release, at once; which it was before."""
    place = _root(root)
    if not (_release(place, release) / "release.json").is_file():
        raise Refused(f"there is no release {release}")
    before = _current(place)
    new = place / f".current.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        new.unlink()
    new.symlink_to(pathlib.Path("releases") / release)
    new.replace(place / "current")
    _sync(place)
    return {"before": before, "current": release}


def releases(root: str) -> dict[str, Any]:
    """Every whole release, oldest first, with what is known of it; those cut short have no name."""
    place = _root(root)
    current = _current(place)
    promoted = [entry["release"] for entry in _log(place) if entry.get("result") == "promoted"]
    found = [
        {
            **about,
            "current": about["release"] == current,
            "promoted": about["release"] in promoted,
            "bad": (place / "releases" / about["release"] / "bad.json").is_file(),
            "evidence": _evidence_of(place / "releases" / about["release"]),
        }
        for about in _whole(place)
    ]
    good = {one["release"] for one in found if not one["bad"]}
    before = [entry["release"] for entry in reversed(history(_log(place)))]
    previous = next((name for name in before if name != current and name in good), None)
    return {"current": current, "previous": previous, "releases": found}


def _evidence_of(release: pathlib.Path) -> dict[str, Any] | None:
    """What `put_evidence` wrote. It is to be shown alone, so a damaged one is as good as none."""
    try:
        found = _json(release / "evidence.json") or {}
    except Refused:
        return None
    gates = found.get("gates")
    whole = isinstance(gates, list) and all(
        isinstance(one, dict) and "state" in one for one in gates
    )
    return found if whole and "phase" in found else None


def promoted(root: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Add one line to the promotion log, whole and on disk before this ends."""
    place = _root(root)
    entry = {**entry, "at": time.time()}
    _append(place / "promotions.jsonl", entry)
    return entry


def promotions(root: str) -> dict[str, Any]:
    """What is live, what came before it, and every promotion, oldest first.

    live: the entry that was promoted last; None where nothing was. previous: what a rollback makes
    live; None where nothing came before. stopped: the entry that says that it was stopped on
    purpose and not started since; None where it was not. followed: whether what would be started
    is what is live: a promotion that was killed leaves something else.
    """
    place = _root(root)
    entries = _log(place)
    stack = history(entries)
    live = stack[-1] if stack else {}
    try:
        starts = parsed((place / "service" / "service.json").read_bytes())
    except (OSError, ValueError):
        starts = None
    return {
        "live": live or None,
        "stopped": entries[-1] if entries and entries[-1].get("result") == "stopped" else None,
        "followed": (starts, _current(place)) == (live.get("service"), live.get("release")),
        "previous": stack[-2] if len(stack) > 1 else None,
        "entries": entries,
    }


def history(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is live, after what it came, and so on: the last one is live.

    A rollback takes away what came after the one that it went back to. So a second rollback goes
    further back, and never to what was left by the first.
    """

    def what(entry: dict[str, Any]) -> tuple[Any, Any]:
        return entry["release"], entry.get("phase")

    stack: list[dict[str, Any]] = []
    for entry in entries:
        if entry.get("result") != "promoted":
            continue
        known = [what(one) for one in stack]
        if entry.get("back") and what(entry) in known:
            del stack[len(known) - 1 - known[::-1].index(what(entry)) :]
        elif known and known[-1] == what(entry):
            stack.pop()
        stack.append(entry)
    return stack


def mark_bad(root: str, release: str, why: str) -> dict[str, Any]:
    """A release that failed; it is not promoted again without being asked for by name.

    Once it has been, and is live, it is not bad any more: see `mark_good`.
    """
    folder = _release(_root(root), release)
    if not folder.is_dir():
        raise Refused(f"there is no release {release}")
    about = {"why": why, "at": time.time()}
    _write(folder / "bad.json", json.dumps(about) + "\n")
    return about


def mark_good(root: str, release: str) -> dict[str, bool]:
    """A release that is live after all; whether it was bad."""
    mark = _release(_root(root), release) / "bad.json"
    was_bad = mark.is_file()
    mark.unlink(missing_ok=True)
    return {"was_bad": was_bad}


def put_evidence(
    root: str, release: str, phase: str, gates: list[dict[str, Any]]
) -> dict[str, Any]:
    """Write down how the gates of phases 0..`phase` stood with a release, beside it."""
    folder = _release(_root(root), release)
    if not folder.is_dir():
        raise Refused(f"there is no release {release}")
    about = {"phase": phase, "at": time.time(), "gates": gates}
    _write(folder / "evidence.json", json.dumps(about, indent=1) + "\n")
    return about


def prune(root: str, keep: int) -> dict[str, list[str]]:
    """Remove old releases but the last `keep` that were promoted, the current and the previous one.

    One that was never promoted goes once a younger one was, and a bad one does not count. One that
    a process is at work with stays for the next time; those are `in_use`.
    """
    if keep < 1:
        raise Refused(f"keep: expected 1 or more, got {keep}")
    place = _root(root)
    _remove_hidden(place)  # what a prune that was killed left
    known = releases(root)
    order = [entry["release"] for entry in _log(place) if entry.get("result") == "promoted"]
    good = [one["release"] for one in known["releases"] if not one["bad"]]
    last: list[str] = []
    for name in reversed(order):
        if name in good and name not in last:
            last.append(name)
    # A bad one too, if it is what a rollback goes to: it was well at another phase.
    stack = [entry["release"] for entry in history(_log(place))[-2:]]
    kept = {*last[:keep], known["current"], known["previous"], *stack}
    names = [one["release"] for one in known["releases"]]
    youngest = max((names.index(name) for name in order if name in names), default=-1)
    removed, in_use = [], []
    for number, name in enumerate(names):
        if name in kept or (name not in order and number > youngest):
            continue
        release = place / "releases" / name
        with _unused(release) as unused:
            if not unused:
                in_use.append(name)
                continue
            # Out of sight first: a release that is half removed must not look like a whole one.
            release.rename(release.with_name(f".removed.{name}"))
        removed.append(name)
    _remove_hidden(place)
    return {"removed": removed, "in_use": in_use}


@contextlib.contextmanager
def _unused(release: pathlib.Path) -> Iterator[bool]:
    """Whether no process has marked a release as one that it works with: see `remote.validation`.

    Where none has, none can inside the `with` block. Who waits for the mark then sees that the
    release is gone.
    """
    descriptor = os.open(release / "release.json", os.O_RDWR)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)


def _remove_hidden(place: pathlib.Path) -> None:
    for gone in (place / "releases").glob(".removed.*"):
        if gone.is_symlink():  # somebody has moved the release to another disk: that stays there
            gone.unlink()
        else:
            shutil.rmtree(gone)


def lock(root: str, owner: str, command: str, token: str) -> dict[str, Any]:
    """Take the host's one lock. Refused, with whose it is, where somebody has it."""
    place = _root(root)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    mine = {"owner": owner, "command": command, "token": _digest(token), "at": time.time()}
    new = place / f".lock.{os.getpid()}"
    with _lock_guarded(place):
        held = _holder(place)
        if held is not None:
            raise Refused(_locked(place, held))
        _write(new, json.dumps(mine) + "\n")
        try:
            os.link(new, place / "lock.json")  # whole at once, or refused: a rename would replace
        finally:
            new.unlink()
        _sync(place)
    return {"owner": owner}


def unlock(root: str, token: str) -> dict[str, bool]:
    """Give the lock back. Refused where it is not this token's, and nothing where there is none."""
    place = _root(root)
    if _holder(place) is None:  # nothing is written where there is nothing
        return {"was_locked": False}
    with _lock_guarded(place):
        held = _holder(place)
        if held is None:
            return {"was_locked": False}
        if held.get("token") != _digest(token):
            raise Refused(_locked(place, held))
        (place / "lock.json").unlink()
        _sync(place)
    return {"was_locked": True}


def has_lock(root: str, token: str) -> bool | None:
    """Whether the lock is this token's; None where nobody has it."""
    held = _holder(_root(root))
    return None if held is None else held.get("token") == _digest(token)


def break_lock(root: str, owner: str, at: float) -> dict[str, Any]:
    """Remove the lock of `owner` since `at`, and no other that was taken since it was looked at."""
    place = _root(root)
    if _holder(place) is None:
        raise Refused("the lock is another one by now, or gone")
    with _lock_guarded(place):
        held = _holder(place)
        if held is None or (held["owner"], held["at"]) != (owner, at):
            raise Refused("the lock is another one by now, or gone")
        (place / "lock.json").unlink()
        _sync(place)
    return {"broken": owner}


def lock_holder(root: str) -> dict[str, Any]:
    """Who has the lock, since when and for what; None where nobody has it.

    A lock file that does not say so has the owner `damaged`.
    """
    held = _holder(_root(root))
    if held is not None:
        held.pop("token", None)
    return {"holder": held}


def put_service(root: str, name: str, text: str) -> dict[str, str]:
    """Write one file of the service's folder, at once and for this user alone."""
    if not _ID.fullmatch(name):
        raise Refused(f"{name!r} cannot be a file of the service")
    folder = _root(root) / "service"
    _require_folder(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write(folder / name, text)
    return {"path": str(folder / name)}


def no_release(root: str) -> dict[str, str | None]:
    """Let `current` point at nothing: what is live is no release of kd's."""
    place = _root(root)
    before = _current(place)
    with contextlib.suppress(FileNotFoundError):
        (place / "current").unlink()
    _sync(place)
    return {"before": before}


def current(root: str) -> str | None:
    """The release that `current` points at, whether it is there or not."""
    return _current(_root(root))


def remove_service(root: str) -> dict[str, Any]:
    """Let nothing be live: no `service.json` that a manager could start, no `current`."""
    with contextlib.suppress(FileNotFoundError):
        (_root(root) / "service" / "service.json").unlink()
    return no_release(root)


def manage(root: str, manager: dict[str, Any], what: str) -> dict[str, Any]:
    """`install`, `start`, `stop` or `status` of the service's manager; its status then."""
    from remote import managers  # it imports this module, and comes with it

    if what not in ("install", "start", "stop", "status"):
        raise Refused(f"a manager cannot {what!r}")
    made = managers.manager_of(str(_root(root)), manager)
    if what != "status":
        getattr(made, what)()
    return made.status()


def look_at_log(root: str, offset: int | None, lines: int = 0) -> dict[str, Any]:
    """What the service has printed from byte `offset` on; its last `lines` where that is None."""
    path = _root(root) / "service" / "service.log"
    try:
        with path.open("rb") as printed:
            end = printed.seek(0, os.SEEK_END)
            if offset is None:
                printed.seek(max(0, end - _BLOCK))
                kept = printed.read().splitlines(keepends=True)
                block = b"".join(kept[-lines:]) if lines else b""
                offset = end - len(block)
            else:
                offset = offset if offset <= end else 0  # the manager began it anew
                printed.seek(offset)
                block = printed.read(_BLOCK)
    except FileNotFoundError:
        return {"text": "", "offset": 0, "path": str(path)}
    whole = block[: _whole_characters(block)]
    return {
        "text": whole.decode("utf-8", "replace"),
        "offset": offset + len(whole),
        "path": str(path),
    }


def put_tokens(root: str, record: dict[str, Any]) -> dict[str, str]:
    """Write down the tokens that releases are held against."""
    path = _root(root) / "tokens.json"
    _write(path, json.dumps(record) + "\n")
    return {"path": str(path)}


def tokens(root: str) -> dict[str, Any]:
    """What `put_tokens` wrote; None where nothing was recorded."""
    try:
        return {"record": _json(_root(root) / "tokens.json")}
    except Refused as error:
        raise Refused(f"{error}: kd record writes it anew") from None


def model_of(root: str, path: str) -> dict[str, Any]:
    """What tells one model's folder from another, and how many tokens it knows and takes.

    files: a hash over the names and sizes of its weights, as reading a terabyte takes too long.
    """
    folder = in_home(path)
    config = _json(folder / "config.json")
    if config is None:
        raise Refused(f"{folder} has no config.json: expected the folder of a model")
    inner = config.get("text_config")  # of a model that sees as well
    text = inner if isinstance(inner, dict) else config
    weights = sorted(
        (one.relative_to(folder).as_posix(), one.stat().st_size)
        for kind in ("*.safetensors", "*.bin", "*.gguf")
        for one in folder.rglob(kind)
    )
    try:
        vocabulary = int(text["vocab_size"])
        if vocabulary < 1:
            raise ValueError(f"vocab_size {vocabulary}")
        return {
            "path": str(folder),
            "config": file_digest(folder / "config.json"),
            "files": _digest(json.dumps(weights)),
            "vocabulary": vocabulary,
            "positions": int(text.get("max_position_embeddings", 0)) or None,
        }
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise Refused(f"{folder / 'config.json'}: no number of tokens: {error!r}") from error


def group_of(root: str, pid: int) -> dict[str, list[int]]:
    """Processes that live in the group or session that `pid` leads or led."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            # What stands in brackets is the name, and may hold anything.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z" and pid in (int(fields[2]), int(fields[3])):
                found.append(int(folder.name))
    return {"processes": sorted(found)}


def listens(root: str, leader: int, port: int) -> bool | None:
    """Whether `group_of` has who listens at a port; None where that cannot be seen."""
    wanted = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in pathlib.Path("/proc/net", name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    wanted.add(f"socket:[{fields[9]}]")
    seen = bool(wanted)
    for process in group_of(root, leader)["processes"]:
        try:
            for descriptor in pathlib.Path(f"/proc/{process}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # closed by now
                    if str(descriptor.readlink()) in wanted:
                        return True
        except FileNotFoundError:
            continue
        except OSError:
            seen = False
    return False if seen else None


def metrics(root: str, leader: int, port: int, prefix: str) -> dict[str, str]:
    """What the service's `/metrics` says of the names with `prefix`, in Prometheus' text format.

    Empty where it exports nothing, does not answer, or another process than the service does.
    """
    if listens(root, leader, port) is False:
        return {"text": ""}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_METRICS_S)
    kept, size, left, begins = [], 0, _METRICS_KEPT_BYTES, True
    quietly = contextlib.suppress(OSError, ValueError, http.client.HTTPException)
    # A socket's own limit begins anew with each byte, and headers may go on for ever.
    with contextlib.closing(connection), quietly, within(_METRICS_S):
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        while answer.status == 200 and size < _METRICS_BYTES:
            line = answer.readline(_METRICS_LINE_BYTES)
            if not line:
                break
            size += len(line)
            whole = begins and line.endswith(b"\n")
            begins = line.endswith(b"\n")  # else the next one is the rest of a line without end
            if whole and line.startswith(prefix.encode()) and left >= len(line):
                left -= len(line)
                kept.append(line.decode(errors="replace"))
    return {"text": "".join(kept)}


def remove_profile(root: str, name: str) -> dict[str, int]:
    """Remove the traces of that name; how many there were."""
    folder = _root(root) / "profiles"
    found = [path for path in folder.glob("*.trace.json.gz") if path.name.startswith(f"{name}-TP-")]
    for path in found:
        path.unlink(missing_ok=True)
    return {"removed": len(found)}


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """A limit of the whole of what is done inside the `with` block: TimeoutError after it.

    Of the main thread alone, as it is a signal.
    """

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"no whole answer within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def kill_group(root: str, pid: int) -> dict[str, list[int]]:
    """Kill what `group_of` finds."""
    found = group_of(root, pid)
    for process in found["processes"]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return found


def below(pid: int) -> dict[int, int]:
    """Processes that `pid` has started, and those that they have, whatever group they are in.

    {process: when it was started}. Each is found by its parent, so they must be noted before that
    ends.
    """
    parents: dict[int, int] = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(fields[1])
    found, grown = {pid}, True
    while grown:
        more = {one for one, parent in parents.items() if parent in found} - found
        found |= more
        grown = bool(more)
    started = {one: _since(one) for one in found - {pid}}
    return {one: since for one, since in started.items() if since is not None}


def living(noted: dict[int, int]) -> list[int]:
    """Those of `below` that live still; a number may be another process's by now."""
    return sorted(one for one, since in noted.items() if _since(one) == since)


def service_left(root: str) -> dict[str, list[int]]:
    """Processes that live of the service that was started last, whatever its manager knows of it.

    A manager names no process once the first one has died. `launch.py` noted which that was.
    """
    folder = _root(root) / "service"
    try:
        noted = parsed((folder / "service.pid").read_bytes())
        first, started = int(noted["pid"]), int(noted["started"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        first = started = 0
    if first < 2:
        return {"processes": []}  # none was started, or none that could be told from another
    found = group_of(root, first)["processes"]
    now = _since(first)
    if now is None:
        # A group's number is not given again while the group lives. It may have ended though, and
        # the number become another's who has ended too: only what works in this folder is ours.
        found = [process for process in found if _works_in(process, folder)]
    elif now != started:
        found = []
    return {"processes": found}


def end_service_left(root: str, kill: bool) -> dict[str, list[int]]:
    """Ask what `service_left` finds to end, or kill it."""
    found = service_left(root)
    for process in found["processes"]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL if kill else signal.SIGTERM)
    return found


def start_job(
    root: str, name: str, command: list[str], environment: dict[str, str], given: str = ""
) -> dict[str, Any]:
    """Let a program run here that outlives this request and its connection.

    It is in a session of its own, reads `given`, and prints to `log`. How it ends is in `exit`.
    """
    folder = _job(root, name)
    _require_folder(folder.parent)
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _remove_old_jobs(folder.parent)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        raise Refused(f"there is a job {name} already") from None
    _write(folder / "given", given)
    with (folder / "given").open("rb") as stdin, (folder / "log").open("wb") as printed:
        started = subprocess.Popen(
            [sys.executable, "-I", "-c", _KEEPER, str(folder / "exit"), *command],
            stdin=stdin,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=str(folder),
            env={**os.environ, **environment},
        )
    about = {"pid": started.pid, "since": _since(started.pid), "at": time.time()}
    _write(folder / "job.json", json.dumps(about) + "\n")
    return about


def jobs(root: str) -> dict[str, Any]:
    """The names of the jobs that go on right now, and when each began (Unix time), oldest first."""
    found, unknown = [], []
    for folder in (_root(root) / "jobs").glob("*"):
        about = _job_of(folder)
        if about is None:
            about = _kept_by(folder)
        if about is None:
            unknown.append(folder)
        elif _goes_on(folder, about):
            found.append({"name": folder.name, "at": about["at"]})
    busy = _workplaces() if unknown else set()
    for folder in unknown:
        with contextlib.suppress(OSError):  # another request removes it
            if _identity(folder) in busy:
                found.append({"name": folder.name, "at": folder.stat().st_mtime})
    return {"jobs": sorted(found, key=lambda one: (one["at"], one["name"]))}


def _job_of(folder: pathlib.Path) -> dict[str, Any] | None:
    """pid, since and at of a job; None of one that was cut short, or whose file is damaged.

    since: None where it had ended before anybody looked.
    """
    try:
        about = parsed((folder / "job.json").read_bytes())
        pid, since, at = about["pid"], about["since"], about["at"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    right = isinstance(pid, int) and 0 < pid < 1 << 32 and isinstance(since, (int, type(None)))
    if not right or not isinstance(at, (int, float)) or not 0 <= at < 1e11:
        return None
    return {"pid": pid, "since": since, "at": float(at)}


def _known_job(folder: pathlib.Path) -> dict[str, Any]:
    about = _job_of(folder)
    if about is not None:
        return about
    if not folder.is_dir():
        raise Refused(f"there is no job {folder.name}")
    return _kept_by(folder) or {"pid": 0, "since": None, "at": folder.stat().st_mtime}


def _kept_by(folder: pathlib.Path) -> dict[str, Any] | None:
    """As `_job_of`, of a job whose file is damaged or was never written: its keeper says so.

    That has where the job's end is written among its arguments. None where none lives.
    """
    wanted = os.fsencode(folder / "exit")
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone by now
            arguments = (process / "cmdline").read_bytes().split(b"\0")
            since = _since(int(process.name))
            if _KEEPER.encode() in arguments and wanted in arguments and since is not None:
                at = folder.stat().st_mtime
                return {"pid": int(process.name), "since": since, "at": at}
    return None


def _goes_on(folder: pathlib.Path, about: dict[str, Any]) -> bool:
    alive = about["since"] is not None and _since(about["pid"]) == about["since"]
    return alive and not (folder / "exit").exists()


def _remove_old_jobs(folder: pathlib.Path) -> None:
    """All but the last that have ended.

    One that is just being started has no `job.json` yet, and one whose `job.json` is damaged may go
    on: such a folder stays while it is young, and while a process works in it.
    """
    ended = []
    for job in folder.glob("*"):
        about = _job_of(job)
        with contextlib.suppress(OSError):  # another request removes it as well
            if about is None or not _goes_on(job, about):
                ended.append((job.stat().st_mtime, job, about is not None))
    old = sorted(ended)[:-_JOBS_KEPT]
    busy = _workplaces() if old else set()
    for changed, job, known in old:
        with contextlib.suppress(OSError):
            aged = known or abs(time.time() - changed) > _JOB_STARTS_S
            if aged and _identity(job) not in busy:
                shutil.rmtree(job, ignore_errors=True)


def _identity(folder: pathlib.Path) -> tuple[int, int]:
    found = folder.stat()
    return found.st_dev, found.st_ino


def _workplaces() -> set[tuple[int, int]]:
    """The folders that processes work in, of those that can be looked at, as `_identity` says."""
    found = set()
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone by now, or another user's
            found.add(_identity(process / "cwd"))
    return found


# It waits for the program, as nobody else would, and is not ended by what ends the program.
_KEEPER = """
import os, signal, subprocess, sys
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda *of_no_use: None)
place, *command = sys.argv[1:]
try:
    code = subprocess.call(command)
except OSError as error:
    print(f"{command[0]} cannot be run: {error.strerror}", file=sys.stderr, flush=True)
    code = 127
with open(place + ".part", "w") as taken:
    taken.write(str(code))
    taken.flush()
    os.fsync(taken.fileno())
os.replace(place + ".part", place)
"""


def look_at_job(root: str, name: str, offset: int = 0) -> dict[str, Any]:
    """What a job has printed from byte `offset` on, and whether it goes on.

    exit_code: None while it goes on, and of one that ended with nobody to see it (`alive` false).
    """
    folder = _job(root, name)
    about = _known_job(folder)
    # Whether it lives is asked first: what it printed last is then read for certain.
    alive = about["since"] is not None and _since(about["pid"]) == about["since"]
    try:
        code: int | None = int((folder / "exit").read_text())
    except FileNotFoundError:
        code = None
    block = b""
    # Without a log its start was killed.
    with contextlib.suppress(FileNotFoundError), (folder / "log").open("rb") as printed:
        printed.seek(offset)
        block = printed.read(_BLOCK)
    # A character that is not there to its end yet stays for the next look.
    whole = block if code is not None or not alive else block[: _whole_characters(block)]
    return {
        "text": whole.decode("utf-8", "replace"),
        "offset": offset + len(whole),
        "alive": alive and code is None,
        "exit_code": code,
    }


def end_job(root: str, name: str, number: int = signal.SIGTERM) -> dict[str, bool]:
    """Send a signal to a job and all that it has started; whether it was there."""
    folder = _job(root, name)
    if not folder.is_dir():
        return {"was_alive": False}
    about = _known_job(folder)
    if about["since"] is None or _since(about["pid"]) != about["since"]:
        return {"was_alive": False}
    if number == signal.SIGKILL:
        kill_group(root, about["pid"])  # those too that made a group of their own
    with contextlib.suppress(ProcessLookupError):
        os.killpg(about["pid"], number)
    return {"was_alive": True}


def _job(root: str, name: str) -> pathlib.Path:
    if not _ID.fullmatch(name):
        raise Refused(f"{name!r} cannot be a job's name")
    return _root(root) / "jobs" / name


def _since(pid: int) -> int | None:
    """When a process was started, in ticks since the machine was; None where there is none.

    A number is given again to another process; number and time together are not.
    """
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def _whole_characters(block: bytes) -> int:
    """Where the last character of UTF-8 that is there whole ends."""
    for back in range(1, min(4, len(block)) + 1):
        byte = block[-back]
        if byte < 0x80:
            return len(block) - back + 1
        if byte >= 0xC0:
            wanted = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(block) if back >= wanted else len(block) - back
    return len(block)


def audit(root: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Add one line to the audit log: who did what."""
    entry = {**entry, "at": time.time()}
    _append(_root(root) / "audit.jsonl", entry)
    return entry


def audited(root: str, last: int) -> dict[str, Any]:
    """The last lines of the audit log that can be read, oldest first."""
    try:
        lines = (_root(root) / "audit.jsonl").read_bytes().split(b"\n")
    except FileNotFoundError:
        return {"entries": []}
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            entry = parsed(line)
            if isinstance(entry, dict):
                found.append(entry)
    return {"entries": found[-last:]}


def _root(root: str) -> pathlib.Path:
    place = in_home(root)
    if not place.is_absolute():
        raise Refused(f"root: expected an absolute path, got {root!r}")
    return place


def require_folders(root: str) -> None:
    """Refused where a file is in the place of a folder that promotions use."""
    place = _root(root)
    for folder in (place, *(place / name for name in ("releases", "incoming", "service", "jobs"))):
        _require_folder(folder)


def _require_folder(path: pathlib.Path) -> None:
    """Refused where something else is in a folder's place."""
    if os.path.lexists(path) and not path.is_dir():
        what = "link that leads to no folder" if path.is_symlink() else "file"
        raise Refused(
            f"{path}: expected a folder, got a {what}: "
            f"move it away by hand (mv {shlex.quote(str(path))} ELSEWHERE)"
        )


def _release(place: pathlib.Path, name: str) -> pathlib.Path:
    if not _ID.fullmatch(name):
        raise Refused(f"{name!r} cannot be a release's name")
    return place / "releases" / name


def _current(place: pathlib.Path) -> str | None:
    path = place / "current"
    try:
        return path.readlink().name
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        what = "folder" if path.is_dir() else "file"
        raise Refused(
            f"{path}: expected a link to a release, got a {what}: "
            f"move it away by hand (mv {shlex.quote(str(path))} ELSEWHERE)"
        ) from None


def _base(place: pathlib.Path) -> str | None:
    """The release that is like the next one: the current, or the newest where none is."""
    names = [about["release"] for about in _whole(place)]
    current = _current(place)  # may point to one that is gone
    return current if current in names else (names[-1] if names else None)


def _whole(place: pathlib.Path) -> list[dict[str, Any]]:
    """What each release's `release.json` says, oldest first. One that was cut short has none."""
    found = []
    for folder in (place / "releases").glob("[!.]*"):
        try:
            about = _json(folder / "release.json")
            _order({**(about or {}), "release": folder.name})
        except Refused as error:
            raise Refused(
                f"{error}: move that release away by hand (mv {shlex.quote(str(folder))} ELSEWHERE)"
            ) from None
        if about is not None:
            found.append({**about, "release": folder.name})
    return sorted(found, key=_order)


def _order(about: dict[str, Any]) -> tuple[int, float, str]:
    """What releases are sorted by. The first ones had no number: they are older than all others."""
    number, placed = about.get("sequence", 0), about.get("placed", 0.0)
    if not isinstance(number, int) or not isinstance(placed, (int, float)):
        raise Refused(f"release {about['release']}: expected numbers in sequence and placed")
    return (number, placed, about["release"])


@contextlib.contextmanager
def _lock_guarded(place: pathlib.Path) -> Iterator[None]:
    """Nobody else changes the lock meanwhile. It ends with this process, however that ends."""
    descriptor = os.open(place / ".lock.guard", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _holder(place: pathlib.Path) -> dict[str, Any] | None:
    """What the lock file says. One that was damaged says nothing, and is a lock all the same."""
    path = place / "lock.json"
    try:
        content, at = path.read_bytes(), path.stat().st_mtime
    except FileNotFoundError:
        return None
    try:
        found = parsed(content)
        texts = [found[name] for name in ("owner", "command", "token")]
        if all(isinstance(text, str) for text in texts) and 0 <= found["at"] < 1e11:
            return dict(found)
    except (ValueError, LookupError, TypeError):
        pass
    return {"owner": "damaged", "command": "unknown", "at": at}


def _locked(place: pathlib.Path, held: dict[str, Any]) -> str:
    """Why the lock cannot be had."""
    if "token" not in held:
        return f"locked, and {place / 'lock.json'} is damaged: nobody knows by whom"
    return f"locked by {held['owner']} since {_when(held['at'])}: {held['command']}"


def _works_in(process: int, folder: pathlib.Path) -> bool:
    try:
        return folder.samefile(f"/proc/{process}/cwd")
    except OSError:  # gone by now, or another user's
        return False


def _faults(folder: pathlib.Path, manifest: dict[str, dict[str, Any]]) -> list[str]:
    """What in `folder` is not as in `manifest`, in a few words each."""
    found = set()
    faults = []
    sent = [path for part in ("source", "wheel") for path in sorted((folder / part).rglob("*"))]
    for path in sent:
        if path.is_dir() and not path.is_symlink():
            continue
        name = path.relative_to(folder).as_posix()
        found.add(name)
        wanted = manifest.get(name)
        if wanted is None:
            faults.append(f"{name!r} was not sent")
        elif path.is_symlink() or not path.is_file():
            faults.append(f"{name!r} is no plain file")
        elif file_digest(path) != wanted["sha256"]:
            faults.append(f"{name!r} has other content")
        elif bool(path.stat().st_mode & stat.S_IXUSR) != wanted["executable"]:
            faults.append(f"{name!r} has another mode")
    faults += [f"{name!r} is missing" for name in sorted(set(manifest) - found)]
    return faults


def _unpack_tools(incoming: pathlib.Path) -> list[str]:
    """Unpack what this Python lacks of the tools that were sent; their names.

    What it has stays out: every folder of PYTHONPATH comes before its own packages, so that a
    second copy would take the place of SGLang's.
    """
    wheels = {
        wheel.name.partition("-")[0].replace("_", "-"): wheel
        for wheel in sorted((incoming / "wheel" / "tools").glob("*.whl"))
    }
    if not wheels:
        return []
    lacking = [name for name, version in installed(list(wheels)).items() if version is None]
    for name in lacking:
        _unpack(wheels[name], incoming / "tools", scripts=False)
    return lacking


def _try_imports(site: pathlib.Path, check: dict[str, Any]) -> None:
    done = _python(["-c", _CHECK, str(site), json.dumps(check)], {"PYTHONPATH": str(site)}, 600.0)
    if done.returncode:
        raise Refused(
            f"{sys.executable} cannot import the engine from it: {_last_line(done.stderr)}"
        )


# imports: modules. entry_point: [group, name]. library: whether the kernels must load.
_CHECK = """
import importlib, importlib.metadata, json, os, sys
site, check = sys.argv[1], json.loads(sys.argv[2])
for name in check["imports"]:
    place = importlib.import_module(name).__file__
    if not os.path.abspath(place or "").startswith(os.path.join(site, "")):
        sys.exit(f"{name} comes from {place}, before the release")
group, name = check["entry_point"]
known = importlib.metadata.entry_points()
known = known.select(group=group) if hasattr(known, "select") else known.get(group, ())
points = [point for point in known if point.name == name]
if not points:
    sys.exit(f"the wheel has no entry point {name} of {group}")
points[0].load()
if check["library"]:
    from kdtree_engine.library import kernels
    kernels()
"""


def _join(place: pathlib.Path, incoming: pathlib.Path) -> None:
    """Let `site` and `source` be one engine, as in a checkout, by links inside the release.

    Gates start servers on `source`, which lacks the library, and hold a library of `site` against
    the sources, which a wheel lacks. A compiler's objects stay outside: a release never changes.
    """
    site, engine = incoming / "site", incoming / "source" / "kdtree-engine"
    links = {engine / "kdtree_engine" / "lib": site / "kdtree_engine" / "lib"}
    if site.is_dir():
        (place / "build").mkdir(mode=0o700, exist_ok=True)
        links[site / "csrc"] = engine / "csrc"
        links[site / "build"] = place / "build"
    for link, target in links.items():
        if target.is_dir() and link.parent.is_dir() and not os.path.lexists(link):
            # As seen from where the release will be, which is one folder deeper.
            there = pathlib.Path(os.path.relpath(target, link.parent))
            link.symlink_to(pathlib.Path("..") / there if target.parent == place else there)


def _unpack(wheel: pathlib.Path, site: pathlib.Path, *, scripts: bool = True) -> None:
    """A wheel of packages alone is its own installation, once it is unpacked.

    scripts: whether one that has scripts or data too is refused; else those are left out.
    """
    try:
        with zipfile.ZipFile(wheel) as packed:
            names = packed.namelist()
            if any(name.startswith(("/", "..")) or "/../" in name for name in names):
                raise Refused(f"{wheel.name} has a file outside of it")
            apart = {name for name in names if ".data/" in name.partition("/")[0] + "/"}
            if any(scripts or name.split("/")[1] in ("purelib", "platlib") for name in apart):
                raise Refused(f"{wheel.name} has scripts or data, which unpacking cannot install")
            packed.extractall(site, [name for name in names if name not in apart])
    except zipfile.BadZipFile as error:
        raise Refused(f"{wheel.name} is no wheel: {error}") from error


def file_digest(path: pathlib.Path) -> str:
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as given:
        while block := given.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def parsed(text: str | bytes) -> Any:
    """What JSON says. Raises ValueError for whatever cannot be read as that."""
    try:
        return json.loads(text)
    except RecursionError:  # a file of brackets alone
        raise ValueError("it is nested too deeply") from None


def in_home(path: str) -> pathlib.Path:
    """A path with a `~/` or `~name/` at its start read as that home folder."""
    try:
        return pathlib.Path(path).expanduser()
    except RuntimeError as error:  # nobody is called so, or this user has no home
        raise Refused(f"{path}: {error} Expected an absolute path, or one below ~/") from None


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _json(path: pathlib.Path) -> dict[str, Any] | None:
    try:
        found = parsed(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise Refused(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise Refused(f"{path}: expected an object")
    return found


def _log(place: pathlib.Path) -> list[dict[str, Any]]:
    """The promotions, oldest first. A last line that was cut short by a crash never happened."""
    path = place / "promotions.jsonl"
    found = _lines(path)
    for number, entry in enumerate(found, 1):
        # None is stock SGLang, which is no release.
        if not isinstance(entry.get("release", 0), (str, type(None))):
            raise _damaged(path, number)
    return found


def _damaged(path: pathlib.Path, number: int) -> Refused:
    """No command guesses what a damaged line of the promotion log said: a person takes it out."""
    quoted = shlex.quote(str(path))
    return Refused(
        f"{path}, line {number}: expected JSON with a release: look at it there "
        f"(sed -n {number}p {quoted}), then take that line out, with the whole file kept beside "
        f"it (sed -i.damaged {number}d {quoted})"
    )


def _lines(path: pathlib.Path) -> list[dict[str, Any]]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    found = []
    whole = content[: content.rfind(b"\n") + 1]  # `_append` writes over the rest
    for number, line in enumerate(whole.split(b"\n")[:-1], 1):
        try:
            entry = parsed(line)
        except ValueError:
            entry = None
        if not isinstance(entry, dict):
            raise _damaged(path, number)
        found.append(entry)
    return found


def _append(path: pathlib.Path, entry: dict[str, Any]) -> None:
    line = (json.dumps(entry, sort_keys=True) + "\n").encode()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            os.ftruncate(descriptor, _last_whole(descriptor, size))
        size = os.fstat(descriptor).st_size
        try:
            if os.write(descriptor, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def _last_whole(descriptor: int, size: int) -> int:
    """Where the last whole line ends: what a crash cut short is written over."""
    return os.pread(descriptor, size, 0).rfind(b"\n") + 1


def _write(path: pathlib.Path, text: str) -> None:
    """At once or not at all, for this user alone."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(part, "w", encoding="utf-8", opener=_private) as taken:
            taken.write(text)
            taken.flush()
            os.fsync(taken.fileno())
        part.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _sync(folder: pathlib.Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(folder: pathlib.Path) -> None:
    """All of a folder on disk: a release that is in place must be whole after a power cut too."""
    for path in [folder, *folder.rglob("*")]:
        if not path.is_symlink():
            _sync(path)


def _when(at: Any) -> str:
    if not isinstance(at, (int, float)):
        return "an unknown time"
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


_DOES = {
    one.__name__: one
    for one in (
        prepare,
        expect,
        look_at_python,
        compare,
        place_release,
        switch,
        releases,
        promoted,
        promotions,
        mark_bad,
        put_evidence,
        prune,
        lock,
        unlock,
        break_lock,
        lock_holder,
        put_service,
        no_release,
        remove_service,
        manage,
        look_at_log,
        put_tokens,
        tokens,
        model_of,
        group_of,
        metrics,
        remove_profile,
        kill_group,
        service_left,
        end_service_left,
        start_job,
        look_at_job,
        end_job,
        jobs,
        audit,
        audited,
    )
}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """What a request comes to. Faults of the host, such as a full disk, are answers too."""
    request = dict(request)
    name = request.pop("do", None)
    if name not in _DOES:
        return {"error": f"cannot do {name!r}"}
    try:
        return {"done": _DOES[name](**request)}
    except Refused as error:
        return {"error": str(error)}
    except OSError as error:
        return {"error": told(error)}


def told(error: OSError) -> str:
    """One line of a fault of the host, such as a full disk, with the file."""
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"


def main(request: dict[str, Any]) -> None:
    """Answer one request on stdout."""
    os.umask(0o077)
    print(json.dumps(answer(request)), flush=True)
