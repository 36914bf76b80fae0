"""The inventory: which hosts there are and how each is set up. Read from `remote/hosts.yaml`.

Each fault is reported as `file:line: host NAME: field NAME: what is wrong`, one of a group as
`file:line: group NAME: what is wrong`.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import pydantic
import yaml

from kdtree_engine.errors import ConfigError, UnknownName

__all__ = ["Health", "Host", "Inventory", "LocalHost", "Service", "SshHost", "load_inventory"]

_Place = tuple[str | int, ...]
"""Where a value stands in the file: ("hosts", "ct200", "service", "arguments", 0)."""

_HOST_NAME = r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"

# No leading dash anywhere below: what begins with one could be taken for an option.
_Address = Annotated[str, pydantic.Field(pattern=r"^[A-Za-z0-9:][A-Za-z0-9.:_-]*$")]
_User = Annotated[str, pydantic.Field(pattern=r"^[a-z_][a-z0-9_.-]*$")]
_Alias = Annotated[str, pydantic.Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")]
_Port = Annotated[int, pydantic.Field(ge=1, le=65535)]
_Seconds = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]


def _one_line(text: str) -> str:
    if not text or not text.isprintable():
        raise ValueError("must be one line of printable text, and not empty")
    return text


def _a_path(text: str) -> str:
    if not text.startswith(("/", "~/")):
        raise ValueError("must be an absolute path, or begin with ~/")
    return text


def _a_variable(text: str) -> str:
    # A message of our own, as pydantic's would show the text: it may hold a secret.
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text, re.ASCII):
        raise ValueError("must be the name of a variable, without a value")
    if text == "PYTHONPATH":
        raise ValueError("cannot be PYTHONPATH, which is set to the release's engine")
    return text


_Line = Annotated[str, pydantic.AfterValidator(_one_line)]
_Path = Annotated[_Line, pydantic.AfterValidator(_a_path)]
_Variable = Annotated[str, pydantic.AfterValidator(_a_variable)]


class _Model(pydantic.BaseModel):
    # strict: `port: "22"` is a mistake to point out, not to repair.
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)


class Health(_Model):
    """How a started service is judged.

    start_ceiling_s: the longest that a start may take, however lively its log is.
    stalled_log_s: how long the log of a starting service may stand still.
    poll_s: seconds between two looks.
    sustain_s: how long the service must stay healthy before it counts.
    answer_s: the longest that it may take to answer the prompts whose tokens are compared.
    prompts, new_tokens: how many those are, and how many tokens follow each.
    """

    start_ceiling_s: _Seconds = 3600.0
    stalled_log_s: _Seconds = 600.0
    poll_s: _Seconds = 5.0
    sustain_s: _Seconds = 120.0
    answer_s: _Seconds = 300.0
    prompts: Annotated[int, pydantic.Field(ge=1, le=64)] = 6
    new_tokens: Annotated[int, pydantic.Field(ge=1, le=512)] = 48

    @pydantic.model_validator(mode="after")
    def _looks_often_enough(self) -> Health:
        if self.poll_s >= min(self.start_ceiling_s, self.stalled_log_s):
            raise ValueError("poll_s must be shorter than start_ceiling_s and stalled_log_s")
        return self


_PROXY = "leave the service on 127.0.0.1 and let a proxy before it do that"
_KEY = (
    "would be shown by SGLang's process and log, kept in every entry of the promotion log, and "
    f"lock kd out, which asks for tokens without a key: {_PROXY}"
)
_TLS = f"has the service speak TLS, and kd asks it in plain HTTP on its own host: {_PROXY}"
_NO_HTTP = "has the service speak no HTTP, and kd asks it in that"
_LOCKS_OUT = {
    "--api-key": _KEY,
    "--admin-api-key": _KEY,
    "--ssl-keyfile-password": _KEY,
    "--ssl-keyfile": _TLS,
    "--ssl-certfile": _TLS,
    "--ssl-ca-certs": _TLS,
    "--grpc-mode": _NO_HTTP,
    "--smg-grpc-mode": _NO_HTTP,
    "--config": "names a file that could say any of this: write its options out here",
}
"""Arguments of SGLang's with which kd could not ask the service for its health and tokens."""
_HEARD_AT = ("0.0.0.0", "127.0.0.1", "localhost")  # not `::`: asyncio has that for IPv6 alone


def _meant(name: str, options: Iterable[str]) -> str | None:
    """The option that `name` is, or could be short for.

    SGLang takes whatever one of its options alone begins with, and each release has others: `--ap`
    is `--api-key` in 0.5.23. None of its options is what one of those here begins with, but for
    those that are here themselves.
    """
    if name in options:
        return name
    short = name.startswith("--") and len(name) > len("--")
    return next((option for option in options if short and option.startswith(name)), None)


class Service(_Model):
    """The SGLang server of a host.

    manager: what keeps it running.
    unit: its name there.
    model_path: folder of the model on the host.
    tensor_parallel: GPUs that share the model.
    port: where it answers HTTP, on the host's loopback address.
    arguments: further arguments of `sglang.launch_server`; a phase adds its own after these.
    environment: names of variables that it is given; their values come from the host.
    """

    manager: Literal["systemd", "supervisor"]
    unit: _Alias
    model_path: _Path
    tensor_parallel: Annotated[int, pydantic.Field(ge=1)]
    port: _Port = 30000
    arguments: Annotated[tuple[_Line, ...], pydantic.Field(strict=False)] = ()
    environment: Annotated[tuple[_Variable, ...], pydantic.Field(strict=False)] = ()

    def command_line(self) -> tuple[str, ...]:
        """The arguments of `sglang.launch_server` that these fields say."""
        return (
            *("--model-path", self.model_path),
            *("--tp-size", str(self.tensor_parallel)),
            *("--port", str(self.port)),
            *self.arguments,
        )

    @pydantic.field_validator("arguments")
    @classmethod
    def _no_second_way_to_say_it(cls, arguments: tuple[str, ...]) -> tuple[str, ...]:
        fields = {
            "--model-path": "model_path",
            "--model": "model_path",
            "--tp": "tensor_parallel",
            "--tp-size": "tensor_parallel",
            "--tensor-parallel-size": "tensor_parallel",
            "--port": "port",
        }
        for place, argument in enumerate(arguments):
            name, equals, value = argument.partition("=")
            if field := _meant(name, fields):
                raise ValueError(f"{argument} is said by the field {fields[field]}")
            # A value is not shown: it may be a secret.
            if refused := _meant(name, _LOCKS_OUT):
                raise ValueError(f"{refused} {_LOCKS_OUT[refused]}")
            address = value if equals else (*arguments, "")[place + 1]
            if _meant(name, ("--host",)) and address not in _HEARD_AT:
                raise ValueError(
                    f"--host {address}: kd asks the service at 127.0.0.1 of its host: leave it "
                    f"out, or say {' or '.join(_HEARD_AT[:2])}"
                )
        return arguments


class _AnyHost(_Model):
    """What every host has.

    name: what `--host` calls it.
    root: the folder that everything of kd is put in.
    cuda_arch: what kernels are built for, such as sm_120; None for a host without a GPU.
    service: None for a host that only checks kernels.
    keep: how many promoted releases stay, beside the current and the previous one.
    """

    name: Annotated[str, pydantic.Field(pattern=_HOST_NAME)]
    root: _Path
    cuda_arch: Annotated[str, pydantic.Field(pattern=r"^sm_\d{2,3}[af]?$")] | None = None
    service: Service | None = None
    health: Health = Health()
    keep: Annotated[int, pydantic.Field(ge=1)] = 5


class LocalHost(_AnyHost):
    """This machine.

    python: path of the Python that SGLang is installed for; None is the one that runs kd.
    """

    kind: Literal["local"]
    python: _Path | None = None


class SshHost(_AnyHost):
    """A machine that is reached over SSH.

    address: DNS name or IP address.
    user: whom to log in as.
    identity: the `Host` entry of ~/.ssh/config that names the key; None is ssh's own choice.
    python: path of the Python that SGLang is installed for.
    """

    kind: Literal["ssh"]
    address: _Address
    port: _Port = 22
    user: _User
    identity: _Alias | None = None
    python: _Path


Host = LocalHost | SshHost
_KINDS: Mapping[str, type[LocalHost] | type[SshHost]] = {"local": LocalHost, "ssh": SshHost}


@dataclasses.dataclass(frozen=True)
class Inventory:
    """All hosts of one file, in the file's order.

    groups: names of hosts, under a name for all of them.
    """

    hosts: Mapping[str, Host]
    groups: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def host(self, name: str) -> Host:
        """The host called `name`. Raises UnknownName with the nearest names."""
        if name in self.groups:
            raise ConfigError(
                f"{name} is a group of hosts, and one host is needed here",
                remedy=f"name one of {', '.join(self.groups[name])}",
            )
        if name not in self.hosts:
            raise UnknownName("host", name, self.hosts)
        return self.hosts[name]

    def named(self, text: str) -> list[Host]:
        """The hosts of a text such as `ct200,lab`, each once; a group stands for its hosts.

        Raises UnknownName with the nearest names of hosts and groups.
        """
        found: dict[str, Host] = {}
        for name in text.split(","):
            if name not in self.hosts and name not in self.groups:
                raise UnknownName("host or group", name, [*self.hosts, *self.groups])
            for one in self.groups.get(name, (name,)):
                found.setdefault(one, self.hosts[one])
        return list(found.values())


def load_inventory(path: pathlib.Path) -> Inventory:
    """Read and check `path`. Raises ConfigError, which names every fault of the file."""
    document = _Document(path)
    content = document.content
    if not isinstance(content, dict) or not isinstance(content.get("hosts"), dict):
        raise document.fault((), "field hosts: is required, with a name and fields for each host")
    for key in content:
        if key not in ("hosts", "groups"):
            raise document.fault((key,), f"field {key}: is not a known field")
    hosts: dict[str, Host] = {}
    faults: list[ConfigError] = []
    for name, fields in content["hosts"].items():
        try:
            hosts[name] = _host(document, name, fields)
        except ConfigError as fault:
            faults.append(fault)
    groups: dict[str, tuple[str, ...]] = {}
    for name, members in _groups(document).items():
        try:
            groups[name] = _group(document, name, members)
        except ConfigError as fault:
            faults.append(fault)
    if faults:
        raise ConfigError("; ".join(fault.problem for fault in faults))
    return Inventory(hosts, groups)


def _groups(document: _Document) -> Mapping[Any, object]:
    groups = document.content.get("groups", {})
    if not isinstance(groups, dict):
        raise document.fault(("groups",), "field groups: must be names with hosts for each")
    return groups


def _group(document: _Document, name: object, members: object) -> tuple[str, ...]:
    here: _Place = ("groups", str(name))
    hosts = document.content["hosts"]
    if not isinstance(name, str) or not re.fullmatch(_HOST_NAME, name):
        raise document.fault(here, f"group {name}: must be called as a host could be")
    if name in hosts:
        raise document.fault(here, f"group {name}: is the name of a host already")
    if not isinstance(members, list) or not members:
        raise document.fault(here, f"group {name}: must be a list of one host or more")
    for index, member in enumerate(members):
        if not isinstance(member, str) or member not in hosts:
            unknown = UnknownName("host", str(member), map(str, hosts))
            raise document.fault((*here, index), f"group {name}: {unknown}")
        if member in members[:index]:
            raise document.fault((*here, index), f"group {name}: names host {member} twice")
    return tuple(members)


def _host(document: _Document, name: object, fields: object) -> Host:
    here: _Place = ("hosts", str(name))
    if not isinstance(name, str) or not isinstance(fields, dict):
        raise document.fault(here, f"host {name}: must be a name with fields below it")
    kind = fields.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise document.fault(
            (*here, "kind"), f"host {name}: field kind: must be local or ssh, got {kind!r}"
        )
    if "name" in fields:
        raise document.fault((*here, "name"), f"host {name}: field name: is not a known field")
    try:
        return _KINDS[kind].model_validate(fields | {"name": name})
    except pydantic.ValidationError as error:
        problems = [
            ConfigError.from_validation(
                f"{document.at((*here, *fault['loc']))}: host {name}", _OneFault(fault)
            ).problem
            for fault in error.errors()
        ]
        raise ConfigError("; ".join(problems)) from None


class _OneFault:
    """One fault of a validation, so that each can be reported with its own line."""

    def __init__(self, fault: Any) -> None:
        self._fault = fault

    def errors(self) -> list[Any]:
        return [self._fault]


class _Document:
    """A YAML file, with the line that each value stands on."""

    content: Any

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._lines: dict[_Place, int] = {}
        try:
            loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
        except (UnicodeDecodeError, yaml.reader.ReaderError):
            raise ConfigError(f"{path}: is not UTF-8 text") from None
        try:
            root = loader.get_single_node()
            if root is None:
                raise ConfigError(f"{path}: is empty")
            self._visit(root, (), set())
            self.content = loader.construct_document(root)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = f":{mark.line + 1}" if mark else ""
            raise ConfigError(f"{path}{line}: is not valid YAML: {error.problem}") from None
        except ValueError as error:
            raise ConfigError(f"{path}: holds a value that cannot be read: {error}") from None
        finally:
            loader.dispose()

    def at(self, place: _Place) -> str:
        """`file:line` of a value, or of the nearest thing around it that the file does have."""
        while place and place not in self._lines:
            place = place[:-1]
        return f"{self._path}:{self._lines.get(place, 1)}"

    def fault(self, place: _Place, problem: str) -> ConfigError:
        return ConfigError(f"{self.at(place)}: {problem}")

    def _visit(self, node: yaml.Node, place: _Place, seen: set[int]) -> None:
        """Note each value's line; refuse what YAML allows and a person would be surprised by."""
        self._lines.setdefault(place, node.start_mark.line + 1)
        if isinstance(node, yaml.ScalarNode):
            return
        if id(node) in seen:
            raise self.fault(place, "an alias (*name) is not supported here, write the value out")
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self._visit(item, (*place, index), seen)
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                inner = (*place, str(key.value))
                if inner in self._lines:
                    host = f"{str(place[0])[:-1]} {place[1]}: " if len(place) > 1 else ""
                    raise ConfigError(
                        f"{self._path}:{key.start_mark.line + 1}: {host}'{key.value}' is there "
                        f"twice, first on line {self._lines[inner]}"
                    )
                self._lines[inner] = key.start_mark.line + 1
                self._visit(value, inner, seen)
