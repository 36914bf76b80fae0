"""Results of `kd bench serve` as kept evidence: from `.kd/bench` to `plans/evidence/serve`."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

from kdtree_engine.atomic import write_atomically
from kdtree_engine.errors import ConfigError
from phases.checkout import Checkout

__all__ = ["FOLDER", "keep_bench"]

FOLDER = "serve"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,79}")


def keep_bench(checkout: Checkout, run: str, name: str | None) -> pathlib.Path:
    """Copy a run's file as `name`.json, the run's own id where None; its path.

    run: an id, what one begins with, or `latest`. Raises ConfigError where there is no such run or
    several, for another benchmark than those of a service, for one that was interrupted or wrong,
    as no figure of those may be cited, and where that name keeps another run.
    """
    path = _found(checkout.state / "bench", run)
    try:
        told: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not isinstance(told, dict) or not (told.get("kind") == "load" or "servers" in told):
        raise ConfigError(
            f"{path}: expected what kd bench serve wrote", remedy="copy others by hand"
        )
    if told.get("interrupted") or not told.get("right"):
        raise ConfigError(
            f"{path}: the run was {'interrupted' if told.get('interrupted') else 'not right'}, "
            "and its figures are worth nothing",
            remedy="run it again",
        )
    wanted = path.stem if name is None else name
    if _NAME.fullmatch(wanted) is None:
        raise ConfigError(
            f"'{wanted}' cannot name kept evidence",
            remedy="at most 80 letters, digits, '_', '-' and '.', a letter or digit first",
        )
    kept = checkout.kept_evidence / FOLDER / f"{wanted}.json"
    text = path.read_text(encoding="utf-8")
    if kept.exists() and kept.read_text(encoding="utf-8") != text:
        raise ConfigError(
            f"{kept} keeps another run", remedy="choose another name, or remove that file first"
        )
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(kept, text)
    return kept


def _found(folder: pathlib.Path, run: str) -> pathlib.Path:
    paths = sorted(folder.glob("*.json"))
    if run == "latest" and paths:
        return paths[-1]
    matches = [path for path in paths if run and path.stem.startswith(run)]
    if len(matches) != 1:
        several = ", ".join(path.stem for path in matches[:3])
        raise ConfigError(
            f"{folder}: {'several runs begin' if matches else 'no run begins'} with '{run}'"
            + (f": {several}" if matches else "")
        )
    return matches[0]
