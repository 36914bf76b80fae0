"""What a host has, in its own words."""

from __future__ import annotations

import json

from kdtree_engine.errors import ConfigError, MissingError
from kdtree_engine.machine import Machine
from remote.errors import FactsError, last_words
from remote.transport import Transport

__all__ = ["read_facts"]

_LIMIT_S = 240.0  # the host itself gives torch 180 s


def read_facts(transport: Transport, python: str, *, timeout: float = _LIMIT_S) -> Machine:
    """Ask the Python at path `python` on the host what the machine has.

    Raises MissingError where that Python or its kdtree_engine is not there, FactsError where the
    answer is not a machine's description, CommandTimeout after `timeout` seconds.
    """
    argv = [python, "-m", "kdtree_engine.machine"]
    answer = transport.run(argv, timeout=timeout, check=False)
    if answer.exit_code in (126, 127):
        raise MissingError(
            f"host {transport.host}: {python} is not there or cannot be run",
            remedy="correct the host's `python` in remote/hosts.yaml",
        )
    if "No module named" in answer.stderr and "kdtree_engine" in answer.stderr:
        raise MissingError(
            f"host {transport.host}: kdtree_engine is not installed for {python}",
            remedy=f"on that host, in a checkout: {python} -m pip install ./kdtree-engine",
        )
    if answer.exit_code != 0:
        raise FactsError(
            f"host {transport.host}: {python} could not describe the machine "
            f"(exit code {answer.exit_code}{last_words(answer.stderr, ', ')})"
        )
    # The last line, as a login message or a library's warning may come before it.
    line = answer.stdout.strip().rpartition("\n")[2]
    try:
        return Machine.from_json(json.loads(line), place=f"host {transport.host}")
    except (json.JSONDecodeError, RecursionError):
        raise FactsError(
            f"host {transport.host}: {python} described the machine in something other than JSON"
            f"{last_words(answer.stdout, ': ')}"
        ) from None
    except ConfigError as error:
        raise FactsError(
            error.problem, remedy="install the same kdtree_engine there as here"
        ) from None
