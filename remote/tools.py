"""The packages that gates import and that a host's Python lacks: SGLang brings most, not all.

They are fetched here, as wheels for that Python, and go with a release into a folder of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdtree_engine.errors import ConfigError, MissingError
from remote.errors import last_words

__all__ = ["distribution_of", "fetch_tools", "needed_tools", "plain_name", "some_python"]

_NOT_SENT = frozenset({"torch", "numpy", "kdtree-engine", "fabric"})
"""What SGLang cannot be without, the release itself, and what only this side of a connection uses.
(The service has no tools: what the engine imports, the host's own Python must have.)"""
_LIMIT_S = 600.0
_COMMON_GLIBC = "2.28"
_OLDEST_GLIBC = 5  # 2.5, of manylinux1


def needed_tools(checkout: pathlib.Path) -> dict[str, str]:
    """What gates import of kd's dependencies: {name: requirement}, of `pyproject.toml`.

    The requirement is the version that is installed here, where one is: what is tried here is then
    what runs there.
    """
    try:
        project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))
        given = project.get("project", {}).get("dependencies", [])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{checkout / 'pyproject.toml'}: cannot be read: {error}") from None
    found = {}
    for requirement in given:
        name = plain_name(re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0])
        if name in _NOT_SENT:
            continue
        try:
            found[name] = f"{name}=={importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            found[name] = requirement
    return found


def fetch_tools(
    requirements: Sequence[str],
    python: Mapping[str, Any],
    cache: pathlib.Path,
    note: Callable[[str], None] = lambda text: None,
) -> list[pathlib.Path]:
    """Wheels of `requirements` and of what those need, for a Python; `cache` keeps them.

    python: version, machine and glibc, as `Releases.look_at_python` says them.

    Raises MissingError, which names the packages, where one cannot be fetched.
    """
    if not requirements:
        return []
    asked = "\n".join(sorted(requirements))
    system = f"{python['version']}-{python['machine']}-{python['glibc']}"
    folder = cache / system / hashlib.sha256(asked.encode()).hexdigest()[:16]
    if not folder.is_dir():
        note(f"fetches {', '.join(sorted(requirements))} for Python {python['version']}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as scratch:
            wheels = pathlib.Path(scratch) / "wheels"
            wheels.mkdir()
            _download(requirements, python, wheels)
            with contextlib.suppress(OSError):  # another run has just fetched the same
                wheels.rename(folder)
    return sorted(folder.glob("*.whl"))


def some_python(version: str) -> dict[str, Any]:
    """What `fetch_tools` takes, for a host that is not asked: an old Linux, as this processor."""
    if not re.fullmatch(r"3\.\d{1,2}", version):
        raise ConfigError(f"{version!r} is no version of Python", remedy="name it as 3.12")
    return {"version": version, "machine": os.uname().machine, "glibc": _COMMON_GLIBC}


def distribution_of(wheel: str) -> str:
    """The name of the package that a wheel, by its file's name, holds."""
    return plain_name(wheel.partition("-")[0])


def plain_name(name: str) -> str:
    """A package's name as it compares with others."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _download(requirements: Sequence[str], python: Mapping[str, Any], folder: pathlib.Path) -> None:
    line = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
        *("--no-input", "--retries", "1", "--timeout", "20", "--only-binary", ":all:"),
        *("--implementation", "cp", "--python-version", python["version"]),
        *(word for platform in _platforms(python) for word in ("--platform", platform)),
        *("--dest", str(folder), "--", *requirements),
    ]
    names = ", ".join(sorted(requirements))
    remedy = "`kd bundle` on a machine where pip reaches a registry, then `kd deploy --bundle FILE`"
    try:
        done = subprocess.run(
            line, capture_output=True, text=True, check=False, timeout=_LIMIT_S, cwd=folder
        )
    except subprocess.TimeoutExpired:
        raise MissingError(f"{names}: not fetched within {_LIMIT_S:g} s", remedy=remedy) from None
    if done.returncode:
        raise MissingError(
            f"{names}: gates need them, the host's Python {python['version']} lacks them, and they "
            f"cannot be fetched{last_words(done.stderr, ': ')}",
            remedy=remedy,
        )


def _platforms(python: Mapping[str, Any]) -> list[str]:
    """The platforms of wheels that such a machine takes, newest first."""
    machine = python["machine"]
    if python["glibc"] is None:
        return [f"linux_{machine}"]
    newest = int(python["glibc"].split(".")[1])
    numbers = range(newest, _OLDEST_GLIBC - 1, -1)
    old = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
    return [
        name
        for number in numbers
        for name in (
            f"manylinux_2_{number}_{machine}",
            *([f"{old[number]}_{machine}"] if number in old else []),
        )
    ]
