"""`kd serve`: the command line of an SGLang server with a phase's profile."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Mapping, Sequence

from kdtree_engine.errors import ConfigError, MissingError
from kdtree_engine.sglang_ext.settings import read_settings
from phases.phase import Phase

__all__ = ["ServeLine", "require_profile", "require_sglang", "serve_line"]

_MODEL = ("--model-path", "--model")


@dataclasses.dataclass(frozen=True)
class ServeLine:
    """What is started: the whole command, and the variables that are added to the environment."""

    command: tuple[str, ...]
    environment: Mapping[str, str]


def serve_line(
    phase: Phase, *, python: str, host_arguments: Sequence[str] = (), extra: Sequence[str] = ()
) -> ServeLine:
    """A server with the profile of `phase`.

    python: the Python that has SGLang. host_arguments: what the inventory says of the host's
    service. extra: the user's own, last, so that they win where an argument is said twice.

    Raises ConfigError for a phase that gives a service nothing, and where no model is named.
    """
    require_profile(phase)
    profile = phase.profile
    arguments = (*host_arguments, *profile.arguments, *extra)
    if not any(argument.partition("=")[0] in _MODEL for argument in arguments):
        raise ConfigError(
            "no model is named, neither by the host's service nor after --",
            remedy=f"kd serve --phase {phase.number} -- --model-path FOLDER",
        )
    return ServeLine((python, "-m", "sglang.launch_server", *arguments), dict(profile.environment))


def require_profile(phase: Phase) -> None:
    """Raises ConfigError for a phase that gives a service nothing, or is not written yet."""
    profile = phase.profile
    if not profile.arguments:
        raise ConfigError(
            f"phase {phase.number} ({phase.name}) has no service profile",
            remedy="phases 3 to 8 have one",
        )
    try:
        read_settings(profile.environment)
    except ConfigError as error:
        raise ConfigError(
            f"phase {phase.number} ({phase.name}) is not written yet: {error.problem}",
            remedy="its profile names what this checkout does not know",
        ) from error


def require_sglang(python: str) -> None:
    """Raises MissingError where `python` cannot be run, or has no SGLang."""
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang') is None)"
    try:
        found = subprocess.run([python, "-c", probe], capture_output=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingError(
            f"{python} cannot be run: {error}",
            remedy="name the Python that has SGLang in remote/hosts.yaml or KD_SGLANG_PYTHON",
        ) from error
    if found.returncode:
        raise MissingError(
            f"SGLang is not installed for {python}",
            remedy="pip install -e '.[sglang]' -e ./kdtree-engine, or name another Python in "
            "KD_SGLANG_PYTHON",
        )
