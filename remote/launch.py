"""What a service manager runs on a host: it becomes the service that `service.json` beside it says.

The program and its arguments are JSON, so neither a unit file nor a shell has to quote them. Values
of secrets come from the host alone: from `secrets.env` in the folder above, a line `NAME=value`
each, which nobody else may read, or from the manager's own environment. It needs Python 3.9 and its
standard library.
"""

from __future__ import annotations

import json
import os
import pathlib
import stat
import sys


class Refused(Exception):
    """Why the service cannot be started, in one line without any value of a secret."""


def secrets(path: pathlib.Path) -> dict[str, str]:
    """The values of `secrets.env`; none where there is no such file."""
    try:
        mode = path.stat().st_mode
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    except UnicodeDecodeError:
        raise Refused(f"{path}: expected UTF-8 text") from None
    if stat.S_IMODE(mode) & 0o077:
        raise Refused(f"{path} can be read by others: chmod 600 it")
    found = {}
    for number, line in enumerate(lines, 1):
        name, equals, value = line.partition("=")
        if not line.strip() or line.startswith("#"):
            continue
        if not equals or not name.isidentifier():
            raise Refused(f"{path}, line {number}: expected NAME=value")
        found[name] = value
    return found


def environment(service: dict[str, object], folder: pathlib.Path) -> dict[str, str]:
    """This process's environment, what the service is given, and the host's secrets by name."""
    given = service["environment"]
    names = service["from_host"]
    assert isinstance(given, dict)
    assert isinstance(names, list)
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


def _write_down(folder: pathlib.Path) -> None:
    """Which process leads the service: should it die, its group can still be found and ended."""
    pid = os.getpid()  # it stays the same when this becomes the service
    since = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    part = folder / ".service.pid.part"
    part.write_text(json.dumps({"pid": pid, "since": int(since)}))
    part.replace(folder / "service.pid")


def main() -> None:
    """Become the service."""
    folder = pathlib.Path(__file__).resolve().parent
    try:
        service = json.loads((folder / "service.json").read_text(encoding="utf-8"))
        command = service["command"]
        _write_down(folder)
        os.execvpe(
            str(pathlib.Path(command[0]).expanduser()), command, environment(service, folder)
        )
    except (OSError, ValueError, KeyError, Refused) as error:
        print(f"kd: the service cannot be started: {error}", file=sys.stderr, flush=True)
        raise SystemExit(78) from None  # EX_CONFIG: trying again changes nothing


if __name__ == "__main__":
    main()
