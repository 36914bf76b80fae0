"""Whether a release is right where it will serve: the phases' gates, run on its host.

It is the release's own `tasks.py` that runs them, with the host's own Python: gates are asked for
as a person there would ask. Evidence is kept for all releases of a host in one place, as it is by
the content of what a gate depends on: what has not changed is not run again.
"""

from __future__ import annotations

import collections
import json
import secrets
from collections.abc import Callable
from typing import Any, TypeGuard

from kdtree_engine.errors import UnknownName
from remote.deploy import releases_of, this_person
from remote.errors import TransportError, last_words
from remote.host_build import CUDA
from remote.inventory import Host
from remote.jobs import new_job_name, run_job
from remote.releases import ReleaseRefused
from remote.transport import Transport

__all__ = ["States", "Validation"]

States = list[dict[str, Any]]
"""One for each gate: phase, gate, kind, token_exact, state, why, run. `phases.states` says what
they mean."""

# It becomes the program after it, and that holds the mark as long as it lives, however it ends: no
# promotion's prune removes the release meanwhile, and none waits for the gates.
_USING = """
import fcntl, os, sys
try:
    mark = os.open(sys.argv[1], os.O_RDWR)
    fcntl.flock(mark, fcntl.LOCK_SH)
    os.stat(sys.argv[1])
except FileNotFoundError:
    sys.exit("it is not there any more: a promotion has removed it as an old one")
os.set_inheritable(mark, True)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
# Runs the gates, and says how they stand then, with the mark held from the first to the last. $1 is
# the line between the two. A signal is for the gates, and this waits for them.
_BOTH = """
import signal, subprocess, sys
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda *of_no_use: None)
between, program, *wanted = sys.argv[1:]
line = [sys.executable, program, "verify", *wanted, "--json"]
code = subprocess.call([*line, "--no-input"])
if code in (0, 1, 3):
    print(between, flush=True)
    subprocess.call([*line, "--dry-run"])
sys.exit(code if code >= 0 else 128 - code)
"""
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "phase": str,
    "gate": str,
    "kind": str,
    "token_exact": bool,
    "state": str,
    "why": (str, type(None)),
    "run": (str, type(None)),
}
_ANSWER_S = 600.0
_ENDED = (0, 1, 3)  # exit codes of a run that came to its end


class Validation:
    """Gates of releases of one host."""

    def __init__(self, transport: Transport, host: Host) -> None:
        self._transport = transport
        self._releases = releases_of(transport, host)

    def run(
        self,
        release: str,
        phase: int | str,
        note: Callable[[str], None] = lambda text: None,
        *,
        jobs: int = 1,
        poll_s: float = 1.0,
    ) -> States:
        """Run what is not proven of phases 0..`phase` there, and say how each gate stands then.

        jobs: gates at once, as of `kd verify`; a release older than that takes one alone.
        note: gets each line of progress as it comes. A run that is interrupted here is ended there,
        with all that it has started.

        Raises UnknownName where there is no such release, TransportError where the run does not
        come to its end.
        """
        (*using, program), environment = self._program(release)
        name = new_job_name("validate")
        between = f"kd: {secrets.token_hex(16)}"
        line = [*using, "-c", _BOTH, between, program, "--phase", str(phase)]
        line += ["--jobs", str(jobs)] if jobs > 1 else []
        said: list[str] = []
        stand: list[str] = []
        result = False

        def hear(text: str) -> None:
            nonlocal result
            if stand or text == between:
                stand.append(text)
                return
            result = result or text == "{"  # the record, which its states tell better
            if not result:
                said.append(text)
                note(text)

        code = run_job(
            self._releases,
            name,
            line,
            environment,
            hear,
            host=self._transport.host,
            note=note,
            poll_s=poll_s,
        )
        if code not in _ENDED:
            raise TransportError(
                f"host {self._transport.host}: release {release}: its gates were not run to the "
                f"end (exit code {code}){last_words(chr(10).join(said), ': ')}",
                remedy=f"the log there: jobs/{name}/log below the host's root",
            )
        found = self._states_of(release, "\n".join(stand[1:]), "")
        try:
            self._releases.put_evidence(release, str(phase), found)
        except ReleaseRefused:  # what ran is kept all the same, as evidence is of no release
            note(f"{release} is not there any more: a promotion has removed it as an old one")
        self._releases.audit(
            {
                "did": "validate",
                "by": this_person(),
                "from": None,
                "to": release,
                "release": release,
                "phase": str(phase),
                "result": dict(collections.Counter(one["state"] for one in found)),
            }
        )
        return found

    def states(self, release: str, phase: int | str) -> States:
        """How each gate of phases 0..`phase` stands there. Runs none."""
        line, environment = self._program(release)
        done = self._transport.run(
            [*line, "verify", "--dry-run", "--phase", str(phase), "--json"],
            env=environment,
            timeout=_ANSWER_S,
            check=False,
        )
        why = f" (exit code {done.exit_code}){last_words(done.stderr, ': ')}"
        said = done.stdout if done.exit_code in _ENDED else ""
        return self._states_of(release, said, why)

    def _states_of(self, release: str, said: str, why: str) -> States:
        """What the release's kd has printed of its gates. why: how it ended, for what is none."""
        found = _json_of(said, "{")
        states = found.get("gates") if isinstance(found, dict) else None
        if not _are_states(states):
            raise TransportError(
                f"host {self._transport.host}: release {release}: its kd cannot tell how its gates "
                f"stand{why or last_words(said, ': ')}"
            )
        return states

    def profile(self, release: str, phase: int) -> tuple[tuple[str, ...], dict[str, str]]:
        """Arguments and environment that the release's own phase gives a service.

        They are what its gates have run with: the checkout here may say something else by now.
        """
        line, environment = self._program(release)
        done = self._transport.run(
            [*line, "phase", "list", "--json"], env=environment, timeout=_ANSWER_S, check=False
        )
        try:
            (one,) = (one for one in _json_of(done.stdout, "[") or () if one["number"] == phase)
            arguments, variables = one["profile"]["arguments"], one["profile"]["environment"]
            texts = [*arguments, *variables, *variables.values()]
            if done.exit_code or not all(isinstance(text, str) for text in texts):
                raise ValueError(f"exit code {done.exit_code}")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise TransportError(
                f"host {self._transport.host}: release {release}: its kd cannot tell what phase "
                f"{phase} gives a service (exit code {done.exit_code})"
                f"{last_words(done.stderr, ': ')}"
            ) from None
        return tuple(arguments), dict(variables)

    def _program(self, release: str) -> tuple[list[str], dict[str, str]]:
        """The release's own `tasks.py` with the host's Python, and the environment of gates."""
        known = {one["release"]: one for one in self._releases.known()["releases"]}
        if release not in known:
            raise UnknownName("release", release, known)
        python = self._releases.look_at_python()
        root = python["root"]
        folder = f"{root}/releases/{release}"
        environment = {
            # The tools hold only what the host's Python lacks, and come last.
            "PYTHONPATH": f"{folder}/site:{folder}/source:{folder}/tools",
            # What an SSH server gives often lacks it, and gates look for nvcc and its sanitizer.
            "PATH": f"{python['path']}:{CUDA}",
            "PYTHONDONTWRITEBYTECODE": "1",  # a release never changes
            "PYTHONUNBUFFERED": "1",
            "KD_STATE": f"{root}/state",
            "KD_REVISION": known[release].get("revision") or "",
            "KD_SGLANG_PYTHON": python["executable"],
        }
        line = [python["executable"], "-c", _USING, f"{folder}/release.json"]
        return [*line, f"{folder}/source/tasks.py"], environment


def _json_of(said: str, opens: str) -> Any:
    """The JSON that a release's kd has printed; None where there is none.

    opens: what its first line is. A login message may come before it.
    """
    begin = said.find(f"{opens}\n")
    try:
        found, _ = json.JSONDecoder().raw_decode(said[max(begin, 0) :])
    except (ValueError, RecursionError):
        return None
    return found


def _are_states(found: object) -> TypeGuard[States]:
    """One for each gate. A release without any has proven nothing."""
    return (
        isinstance(found, list)
        and bool(found)
        and all(
            isinstance(one, dict)
            and all(name in one and isinstance(one[name], kind) for name, kind in _FIELDS.items())
            for one in found
        )
    )
