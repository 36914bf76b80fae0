"""What a service manager runs on a host: it becomes the service that `service.json` beside it says.

The program and its arguments are JSON, so neither a unit file nor a shell has to quote them. Values
of secrets come from the host alone: from `secrets.env` in the folder above, a line `NAME=value`
each, which nobody else may read, or from the manager's own environment. It needs Python 3.9 and its
standard library.

Which process became the service, and when that was started, stands in `service.pid` beside it: a
manager forgets it once it has died, and what it had started may live on.
"""

from __future__ import annotations

import json
import os
import pathlib
import stat
import sys
from typing import Any

_GIVEN = {"command": list, "environment": dict, "from_host": list}


class Refused(Exception):
    """Why the service cannot be started, in one line without any value of a secret."""


def secrets(path: pathlib.Path) -> dict[str, str]:
    """The values of `secrets.env`; none where there is no such file."""
    try:
        mode = path.stat().st_mode
        text = path.read_bytes().decode()
    except FileNotFoundError:
        return {}
    except UnicodeDecodeError:
        raise Refused(f"{path}: expected UTF-8 text") from None
    if stat.S_IMODE(mode) & 0o077:
        raise Refused(f"{path} can be read by others: chmod 600 it")
    found = {}
    # A newline alone ends a value: `splitlines` would take a form feed for one as well.
    for number, line in enumerate(text.split("\n"), 1):
        name, equals, value = line.removesuffix("\r").partition("=")
        if not line.strip() or line.startswith("#"):
            continue
        if not equals or not name.isidentifier() or "\0" in value:
            raise Refused(f"{path}, line {number}: expected NAME=value")
        found[name] = value
    return found


def wanted(path: pathlib.Path) -> dict[str, Any]:
    """What `service.json` says."""
    try:
        service = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise Refused(f"{path}: is not JSON: {error}") from None
    right = isinstance(service, dict) and all(
        isinstance(service.get(name), kind) for name, kind in _GIVEN.items()
    )
    if not right or not service["command"]:
        raise Refused(
            f"{path}: expected an object with {', '.join(_GIVEN)}, and a command that is not empty"
        )
    texts = [*service["command"], *service["from_host"], *service["environment"].values()]
    if not all(isinstance(text, str) for text in texts):
        raise Refused(f"{path}: expected texts in {', '.join(_GIVEN)}")
    return dict(service)


def environment(service: dict[str, Any], folder: pathlib.Path) -> dict[str, str]:
    """This process's environment, what the service is given, and the host's secrets by name."""
    given = service["environment"]
    names = service["from_host"]
    twice = [name for name in names if name in given or name == "PYTHONPATH"]
    if twice:  # another PYTHONPATH would bring another engine than the release's
        raise Refused(f"{', '.join(twice)}: set for the release, and cannot come from the host")
    values = secrets(folder.parent / "secrets.env")
    missing = [name for name in names if name not in values and name not in os.environ]
    if missing:
        raise Refused(
            f"{', '.join(missing)}: named for this service, and neither in "
            f"{folder.parent / 'secrets.env'} nor in the manager's environment"
        )
    return {
        **os.environ,
        **given,
        **{name: values[name] for name in names if name in values},
    }


def in_home(command: list[str]) -> list[str]:
    """The command with a `~/` of its program and of the model's path read as the home folder.

    No shell reads it, and SGLang takes such a path for the name of a model to be fetched.
    """
    return [
        str(pathlib.Path(word).expanduser())
        if word.startswith("~/") and (not place or command[place - 1] == "--model-path")
        else word
        for place, word in enumerate(command)
    ]


def note(path: pathlib.Path) -> None:
    """Write down which process this is, and since when: its number may be another's later."""
    started = int(pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps({"pid": os.getpid(), "started": started}) + "\n", encoding="utf-8")
    part.replace(path)


def main() -> None:
    """Become the service."""
    folder = pathlib.Path(__file__).resolve().parent
    try:
        service = wanted(folder / "service.json")
        command = in_home(service["command"])
        variables = environment(service, folder)
        os.chdir(folder)  # what lives on without its first process is known by where it works
        note(folder / "service.pid")
        os.execvpe(command[0], command, variables)
    except (OSError, ValueError, RuntimeError, Refused) as error:
        print(f"kd: the service cannot be started: {error}", file=sys.stderr, flush=True)
        raise SystemExit(78) from None  # EX_CONFIG: trying again changes nothing


if __name__ == "__main__":
    main()
