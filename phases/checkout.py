"""The checkout that `kd` runs from: its folders, its revision, its state folder."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess

from kdtree_engine.errors import ConfigError

__all__ = ["Checkout", "find_checkout"]


_CODE = ("phases/", "kdtree-engine/", "remote/", "tasks.py")


@dataclasses.dataclass(frozen=True)
class Checkout:
    """A checkout at `root`, with what `kd` writes kept under `state` (not committed)."""

    root: pathlib.Path
    state: pathlib.Path

    @property
    def plans(self) -> pathlib.Path:
        return self.root / "plans"

    @property
    def kept_evidence(self) -> pathlib.Path:
        return self.plans / "evidence"

    @property
    def evidence(self) -> pathlib.Path:
        return self.state / "evidence"

    @property
    def scratch(self) -> pathlib.Path:
        """Scratch folders of gates; what a killed run left there goes when the next one starts."""
        return self.state / "scratch"

    @property
    def logs(self) -> pathlib.Path:
        return self.state / "logs"

    @property
    def hosts_file(self) -> pathlib.Path:
        return self.root / "remote" / "hosts.yaml"

    def revision(self) -> tuple[str | None, bool | None]:
        """The commit and whether the code differs from it; (None, None) where neither is known.

        A new file counts where code lies, as it can be imported; elsewhere it does not.

        A copy of the tree without its .git (a release on a host, say) states the revision that it
        was made from in KD_REVISION; whether it was changed since is then unknown.
        """
        commit = self._git("rev-parse", "HEAD")
        if commit is None:
            return os.environ.get("KD_REVISION") or None, None
        changes = self._git("status", "--porcelain", "--untracked-files=normal")
        if changes is None:
            return commit, None
        new = tuple(f"?? {room}" for room in _CODE)
        lines = changes.splitlines()
        return commit, any(line[:2] != "??" or line.startswith(new) for line in lines)

    def _git(self, *arguments: str) -> str | None:
        if not (self.root / ".git").exists():
            return None  # git would answer for an outer repository
        try:
            done = subprocess.run(
                ("git", "-C", str(self.root), *arguments),
                capture_output=True,
                text=True,
                timeout=20,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None


def find_checkout() -> Checkout:
    """The checkout that this file lies in; KD_STATE moves its state folder.

    Raises ConfigError where the package was installed without its checkout: plans, CUDA sources
    and the host inventory are files of the repository and not of a wheel.
    """
    root = pathlib.Path(__file__).resolve().parent.parent
    for part in ("plans", "remote", "kdtree-engine"):
        if not (root / part).is_dir():
            raise ConfigError(
                f"{root} is not a checkout of kd: it has no folder '{part}'",
                remedy="clone the repository and run: pip install -e . -e ./kdtree-engine",
            )
    state = os.environ.get("KD_STATE")
    return Checkout(root, pathlib.Path(state).resolve() if state else root / ".kd")
