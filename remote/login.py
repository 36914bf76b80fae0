"""How a connection over SSH begins: the person's ssh files, the host's key, the login.

It stands on Fabric and paramiko, as neither is strict enough alone: Fabric accepts and forgets any
host key, also of the hosts that it jumps through, and paramiko may ask on the terminal. Here an
unknown key is refused, and nothing is ever asked.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pathlib
import re
import shlex
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import fabric
import paramiko
from paramiko.auth_strategy import AuthStrategy
from paramiko.common import MSG_CHANNEL_REQUEST

from remote.errors import HostKeyError, TransportError, last_words
from remote.inventory import SshHost
from remote.known_hosts import HostKey, KnownHosts

__all__ = ["DEFAULT_KEYS", "Login", "no_longer_than", "ssh_config_of"]

KEEPALIVE_S = 15
SYSTEM_FOLDER = pathlib.Path("/etc/ssh")
DEFAULT_KEYS = ("id_rsa", "id_ecdsa", "id_ed25519")
_DEEPEST = 16  # files that include one another
_UNKNOWN_SIGNAL = 65  # none has this number: OpenSSH names only some

# Without a handler Python would print paramiko's tracebacks; what matters of them is raised here.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class Login:
    """An open connection to `host`, with those that it jumps through.

    folder: the person's ~/.ssh.
    limit_s: for the whole of name, TCP, keys and login.

    Raises HostKeyError for a key that is not known, TransportError where the host cannot be
    reached or lets nobody in, each in one line.
    """

    def __init__(self, host: SshHost, folder: pathlib.Path, limit_s: float) -> None:
        self._host = host
        self._folder = folder
        self._limit_s = limit_s
        self._where = f"host {host.name}: {host.address} port {host.port}"
        self.connection = self._prepared()
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        return bool(self.connection.is_connected)

    def close(self) -> str:
        """End the connection with its threads; what ProxyCommands said. May be called twice."""
        said = ""
        for hop in _chain(self.connection):
            wire = hop.client.get_transport()
            hop.client.close()
            if wire is not None:
                if wire.is_alive():
                    wire.join(5)
                said += _proxy_ended(wire.sock)
        return said

    def drop(self) -> None:
        """End it without waiting, so that whatever waits for an answer stops waiting."""
        for hop in _chain(self.connection):
            wire = hop.client.get_transport()
            if wire is not None:
                wire.close()

    def _prepared(self) -> fabric.Connection:
        host = self._host
        alias = host.identity or host.address
        ssh_config = ssh_config_of(host, self._folder)
        config = fabric.Config(
            lazy=True,  # a person's own fabric.yaml has no say in how kd connects
            ssh_config=ssh_config,
            overrides={
                "load_ssh_configs": False,
                "forward_agent": False,
                "authentication": {
                    "strategy_class": functools.partial(_KeysAlone, folder=self._folder)
                },
            },
        )
        try:
            connection = fabric.Connection(
                alias, user=host.user, port=host.port, config=config, forward_agent=False
            )
        except Exception as error:  # whatever a mistaken config file leads to
            raise TransportError(
                f"host {host.name}: {self._folder / 'config'} cannot be used for {alias}: {error}"
            ) from None
        for hop in _chain(connection):
            known = self._known_hosts(hop.ssh_config)
            address = hop.ssh_config.get("hostkeyalias", hop.host)
            port = 22 if "hostkeyalias" in hop.ssh_config else hop.port
            hop.forward_agent = False
            hop.connect_timeout = None
            hop.client.set_missing_host_key_policy(_Known(host.name, address, port, known))
            hop.connect_kwargs = {
                "timeout": self._limit_s,
                "banner_timeout": self._limit_s,
                "auth_timeout": self._limit_s,
                "channel_timeout": self._limit_s,
                "transport_factory": functools.partial(_Wire, kinds=known.kinds(address, port)),
            }
        return connection

    def _known_hosts(self, ssh_config: Mapping[str, Any]) -> KnownHosts:
        files: list[pathlib.Path] = []
        for option, folder, names in (
            ("userknownhostsfile", self._folder, ("known_hosts", "known_hosts2")),
            ("globalknownhostsfile", SYSTEM_FOLDER, ("ssh_known_hosts", "ssh_known_hosts2")),
        ):
            if option in ssh_config:
                files += [pathlib.Path(path).expanduser() for path in ssh_config[option].split()]
            else:
                files += [folder / name for name in names]
        return KnownHosts(files)

    def _open(self) -> None:
        problem = remedy = None
        with no_longer_than(self._limit_s, self.drop) as late:
            try:
                self.connection.open()
                wire = self.connection.transport
                wire.set_keepalive(KEEPALIVE_S)
                _notice_loss(wire.sock)
            except HostKeyError:
                raise
            except _LoginRefused as error:
                problem = f"{self._where}: it did not let {error.user} in"
                problem += f" with {', '.join(error.tried)}" if error.tried else ""
                problem += "" if error.tried else ", as there is no key to show"
                problem += f" ({'; '.join(error.notes)})" if error.notes else ""
                remedy = self._remedy(error)
            except socket.gaierror as error:
                problem = f"{self._where}: there is no such name ({error.strerror})"
            except paramiko.ssh_exception.NoValidConnectionsError as error:
                causes = dict.fromkeys(str(cause.strerror) for cause in error.errors.values())
                problem = f"{self._where}: {', '.join(causes)}"
                remedy = "is it up, and is sshd on that port?"
            except TimeoutError:
                problem = f"{self._where}: timed out after {self._limit_s:g} s"
            except (OSError, EOFError, paramiko.SSHException) as error:
                problem = f"{self._where}: {_in_words(error)}"
        if late.is_set():
            problem, remedy = f"{self._where}: timed out: no login within {self._limit_s:g} s", None
        if problem is not None:
            problem += last_words(self.close(), "; its ProxyCommand said: ")
            raise TransportError(problem, remedy=remedy)

    def _remedy(self, error: _LoginRefused) -> str:
        host = self._host
        config = self._folder / "config"
        if host.identity and not self.connection.ssh_config.get("identityfile"):
            return f"`Host {host.identity}` of {config} should name the key with IdentityFile"
        if not error.tried:
            return f"name a key with IdentityFile in {config}, or add one with ssh-add"
        return f"is one of these in {error.user}'s authorized_keys there?"


def ssh_config_of(host: SshHost, folder: pathlib.Path) -> paramiko.SSHConfig:
    """The person's configuration, then the machine's, below what the inventory says."""
    alias = host.identity or host.address
    # The first value counts, so that these win over whatever the files say.
    text = f"Host {alias}\nHostName {host.address}\nUser {host.user}\nPort {host.port}\n"
    for path in (folder / "config", SYSTEM_FOLDER / "ssh_config"):
        # "Host *" ends the section that the file before has left open.
        text += f"Host *\n{_with_included(path, path.parent)}"
    try:
        return paramiko.SSHConfig.from_text(text)
    except Exception as error:  # paramiko raises bare exceptions too
        raise TransportError(
            f"host {host.name}: {folder / 'config'} cannot be read: {error}"
        ) from None


class _KeysAlone(AuthStrategy):  # type: ignore[misc]
    """Shows the keys of the agent and of the files that the configuration names, and no more.

    There is no password and no passphrase: a key that has one has to be in the agent.
    """

    def __init__(
        self, ssh_config: Any, fabric_config: Any, username: str, *, folder: pathlib.Path
    ) -> None:
        super().__init__(ssh_config=ssh_config)
        self._user = username
        self._folder = folder
        self._notes: list[str] = []

    def authenticate(self, transport: paramiko.Transport) -> None:
        tried = []
        agent = paramiko.Agent()
        try:
            for name, key in self._keys(agent.get_keys()):
                tried.append(name)
                try:
                    transport.auth_publickey(self._user, key)
                except paramiko.AuthenticationException:
                    if not transport.is_active():
                        break  # it has had enough of our keys
                    continue
                if transport.is_authenticated():
                    return
                self._notes.append(f"{name} is right, but it asks for more than a key")
                break
        finally:
            agent.close()
        raise _LoginRefused(self._user, tried, self._notes)

    def _keys(self, of_agent: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
        named = [
            pathlib.Path(path).expanduser() for path in self.ssh_config.get("identityfile", [])
        ]
        paths = named or [self._folder / name for name in DEFAULT_KEYS]
        public = {_public_blob(path): path for path in paths}
        # As ssh does: first the agent's keys that a file names, then its others, then the files.
        for key in sorted(of_agent, key=lambda key: key.asbytes() not in public):
            path = public.pop(key.asbytes(), None)
            if path is not None:
                paths.remove(path)
                yield f"{path} (agent)", key
            elif self.ssh_config.get("identitiesonly", "no").lower() != "yes":
                yield f"{key.comment or key.get_name()} (agent)", key
        for path in paths:
            try:
                yield str(path), paramiko.PKey.from_path(path)
            except FileNotFoundError:
                if path in named:
                    self._notes.append(f"{path} is not there")
            except OSError as error:
                self._notes.append(f"{path}: {error.strerror}")
            except Exception:  # the key libraries raise all sorts
                self._notes.append(f"{path} has a passphrase or is no key; ssh-add {path} helps")


class _LoginRefused(paramiko.AuthenticationException):  # type: ignore[misc]
    def __init__(self, user: str, tried: list[str], notes: list[str]) -> None:
        super().__init__("no key was accepted")
        self.user, self.tried, self.notes = user, tried, notes


class _Known(paramiko.RejectPolicy):  # type: ignore[misc]
    """Lets in what the known_hosts files have. The client has no keys of its own to look at."""

    def __init__(self, host: str, address: str, port: int, known: KnownHosts) -> None:
        self._host, self._address, self._port, self._known = host, address, port, known

    def missing_host_key(self, client: Any, hostname: str, key: paramiko.PKey) -> None:
        shown = HostKey(key.get_name(), key.asbytes())
        self._known.verify(self._host, self._address, self._port, shown)


class _Wire(paramiko.Transport):  # type: ignore[misc]
    """Asks the host for the kinds of key by which it is known, and hears of deaths by signals.

    kinds: of known keys; empty for a host that is not known.
    """

    def __init__(self, sock: Any, *, kinds: list[str], **options: Any) -> None:
        super().__init__(sock, **options)
        spoken: list[str] = []
        for kind in kinds:
            spoken += ["rsa-sha2-512", "rsa-sha2-256"] if kind == "ssh-rsa" else [kind]
        security = self.get_security_options()
        able = list(security.key_types)
        first = [kind for kind in spoken if kind in able]
        security.key_types = first + [kind for kind in able if kind not in first]

    # paramiko leaves "exit-signal" out, so that a death by signal looks like a lost channel.
    _channel_handler_table = {  # noqa: RUF012
        **paramiko.Transport._channel_handler_table,
        MSG_CHANNEL_REQUEST: lambda channel, message: _heard(channel, message),
    }


def _heard(channel: paramiko.Channel, message: paramiko.Message) -> None:
    """A request about a channel. RFC 4254, 6.10: a death by signal is told by its name."""
    begin = message.packet.tell()
    if message.get_text() != "exit-signal":
        message.packet.seek(begin)
        channel._handle_request(message)
        return
    message.get_boolean()
    name = message.get_text()
    number = getattr(signal, f"SIG{name}", _UNKNOWN_SIGNAL)
    channel.kd_signal = int(number)
    channel.status_event.set()


@contextlib.contextmanager
def no_longer_than(limit_s: float, drop: Any) -> Iterator[threading.Event]:
    """Call `drop` where the block takes longer than `limit_s` seconds; the event says that it was.

    For what paramiko waits for without a limit of its own.
    """
    late = threading.Event()

    def end() -> None:
        late.set()
        drop()

    timer = threading.Timer(min(limit_s, threading.TIMEOUT_MAX), end)
    timer.daemon = True
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()
        timer.join(10)


def _with_included(path: pathlib.Path, folder: pathlib.Path, depth: int = 0) -> str:
    """A configuration file with what it includes, which paramiko passes over.

    Empty where it cannot be read. Relative names are of `folder`.
    """
    text, section = "", "Host *"
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        word, *rest = re.split(r"[\s=]+", line.strip(), maxsplit=1)
        if word.lower() in ("host", "match"):
            section = line
        if word.lower() != "include" or not rest or depth >= _DEEPEST:
            text += f"{line}\n"
            continue
        for name in shlex.split(rest[0]):
            pattern = str(folder / pathlib.Path(name).expanduser()).lstrip("/")
            for found in sorted(pathlib.Path("/").glob(pattern)):
                included = _with_included(found, folder, depth + 1)
                if section != "Host *":  # sections within a section would count for all hosts
                    included = re.split(r"(?im)^\s*(?:host|match)\b", included)[0]
                text += f"{included}{section}\n"
    return text


def _chain(connection: fabric.Connection) -> Iterator[fabric.Connection]:
    """A connection, the one that it goes through, and so on."""
    hop = connection
    while isinstance(hop, fabric.Connection):
        yield hop
        hop = hop.gateway


def _proxy_ended(sock: Any) -> str:
    """End the ProxyCommand that is used as a socket, where it is one; what it said on stderr."""
    process = getattr(sock, "process", None)
    if not isinstance(process, subprocess.Popen):
        return ""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    if process.stderr.closed:
        return ""
    with process.stdin, process.stdout, process.stderr:
        if process.poll() is None:
            process.kill()
        process.wait(5)
        os.set_blocking(process.stderr.fileno(), False)  # a child of it may hold the pipe
        return (process.stderr.read() or b"").decode("utf-8", "replace")


def _notice_loss(sock: Any) -> None:
    """Have the kernel give up a line whose other end has answered nothing for a minute."""
    if isinstance(sock, socket.socket) and hasattr(socket, "TCP_USER_TIMEOUT"):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 4 * KEEPALIVE_S * 1000)


def _public_blob(path: pathlib.Path) -> bytes:
    """The public key that belongs to the key in `path`; empty where no file has it."""
    for name in (f"{path}.pub", str(path)):
        with contextlib.suppress(Exception):
            kind, text = pathlib.Path(name).read_text(encoding="ascii").split()[:2]
            return bytes(paramiko.PublicBlob.from_string(f"{kind} {text}").key_blob)
    return os.fsencode(path)


def _in_words(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or "the connection was closed"
    return " ".join(str(text).split())
