"""The keys of hosts that a person trusts: what OpenSSH's known_hosts files say.

Read here and not by paramiko, which does not read patterns and revoked keys, cannot say on which
line a key stands, and keeps one key of each host where a file has several.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import hmac
import pathlib
import re
from collections.abc import Iterator, Sequence

from remote.errors import HostKeyError

__all__ = ["HostKey", "KnownHosts"]

_SSH_PORT = 22


@dataclasses.dataclass(frozen=True)
class HostKey:
    """A host's public key: `kind` as in ssh-ed25519, and its bytes as SSH sends them."""

    kind: str
    blob: bytes

    def __str__(self) -> str:
        """As ssh prints it: ED25519 SHA256:..."""
        digest = base64.b64encode(hashlib.sha256(self.blob).digest()).decode().rstrip("=")
        return f"{self.family.upper()} SHA256:{digest}"

    @property
    def family(self) -> str:
        """What `ssh-keyscan -t` calls the kind."""
        return self.kind.removeprefix("sk-").removeprefix("ssh-").partition("-")[0]


@dataclasses.dataclass(frozen=True)
class _Entry:
    path: pathlib.Path
    line: int
    marker: str
    names: str
    key: HostKey

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line}"

    def is_about(self, name: str) -> bool:
        if self.names.startswith("|1|"):
            return _is_hash_of(name, self.names)
        found = False
        for pattern in self.names.lower().split(","):
            if pattern.startswith("!"):
                if _matches(pattern[1:], name):
                    return False
            elif _matches(pattern, name):
                found = True
        return found


class KnownHosts:
    """What `files` say; those that are missing say nothing. Nothing is ever added to them."""

    def __init__(self, files: Sequence[pathlib.Path]) -> None:
        self._files = tuple(files)

    def kinds(self, address: str, port: int) -> list[str]:
        """The kinds of key by which this host is known."""
        return list(dict.fromkeys(entry.key.kind for entry in self._about(address, port)))

    def verify(self, host: str, address: str, port: int, key: HostKey) -> None:
        """Return if `key` is one that is known for `address` at `port`.

        Raises HostKeyError, which names `host`, where it is unknown, changed or revoked.
        """
        where = f"host {host}: {address} port {port}"
        name = _name(address, port)
        names = (name, _name(address, _SSH_PORT))  # revoked there, it is revoked at any port
        for entry in self._entries():
            if entry.marker == "@revoked" and entry.key == key and any(map(entry.is_about, names)):
                raise HostKeyError(f"{where}: its key {key} was revoked in {entry.place}")
        known = self._about(address, port)
        if any(entry.key == key for entry in known):
            return
        # A key that stands there without the port counts, as for ssh. Another one says nothing:
        # it may be that of another server on the same machine.
        elsewhere = [] if known or port == _SSH_PORT else self._about(address, _SSH_PORT)
        if any(entry.key == key for entry in elsewhere):
            return
        shown = self._files[0] if self._files else pathlib.Path("~/.ssh/known_hosts")
        if known:
            old = next((entry for entry in known if entry.key.kind == key.kind), known[0])
            raise HostKeyError(
                f"{where}: the host's key HAS CHANGED: it shows {key}, but {old.place} has "
                f"{old.key}; somebody may be listening in, or the host was set up anew",
                remedy="ask who runs the host; if the new key is right: ssh-keygen "
                f"-f {_typed(old.path)} -R '{name}', then connect with ssh once or scan it anew",
            )
        raise HostKeyError(
            f"{where}: the host's key is not known here: {key}",
            remedy="compare the fingerprint with what the host's owner says, then: ssh-keyscan "
            f"-p {port} -t {key.family} {address} >> {_typed(shown)}",
        )

    def _about(self, address: str, port: int) -> list[_Entry]:
        name = _name(address, port)
        return [entry for entry in self._entries() if not entry.marker and entry.is_about(name)]

    def _entries(self) -> Iterator[_Entry]:
        for path in self._files:
            try:
                lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            except OSError:
                continue
            for number, line in enumerate(lines, 1):
                fields = line.split()
                marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
                if len(fields) < 3 or fields[0].startswith("#"):
                    continue
                try:
                    blob = base64.b64decode(fields[2], validate=True)
                except binascii.Error:
                    continue
                yield _Entry(path, number, marker, fields[0], HostKey(fields[1], blob))


def _name(address: str, port: int) -> str:
    """As known_hosts writes it."""
    address = address.lower()
    return address if port == _SSH_PORT else f"[{address}]:{port}"


def _matches(pattern: str, name: str) -> bool:
    """Whether `name` is as `pattern` says, where * and ? stand for any text and any character."""
    parts = {"*": ".*", "?": "."}
    regex = "".join(parts.get(letter, re.escape(letter)) for letter in pattern)
    return re.fullmatch(regex, name) is not None


def _is_hash_of(name: str, hashed: str) -> bool:
    try:
        salt, digest = (base64.b64decode(part) for part in hashed.split("|")[2:4])
    except (binascii.Error, ValueError):
        return False
    return hmac.compare_digest(hmac.digest(salt, name.encode(), "sha1"), digest)


def _typed(path: pathlib.Path) -> str:
    """As a person would type it."""
    try:
        return f"~/{path.relative_to(pathlib.Path.home())}"
    except ValueError:
        return str(path)
