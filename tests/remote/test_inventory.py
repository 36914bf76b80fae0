"""Hosts files, whole and broken. Each fault is one line that names file, line, host and field."""

from __future__ import annotations

import pathlib
import textwrap

import pydantic
import pytest
import yaml

from kdtree_engine.errors import ConfigError, UnknownName
from remote import inventory
from remote.inventory import Inventory, LocalHost, Service, SshHost, load_inventory

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Twelve lines, so that a test that adds a field below it adds line 13.
LAB = """\
hosts:
  lab:
    kind: ssh
    address: lab.example.net
    user: kd
    root: /srv/kd
    python: /opt/sglang/bin/python
    service:
      manager: systemd
      unit: sglang
      model_path: /srv/model
      tensor_parallel: 8
"""


@pytest.fixture
def hosts_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.chdir(tmp_path)
    return pathlib.Path("hosts.yaml")  # relative, so that messages show the bare name


def test_the_repository_s_own_hosts() -> None:
    inventory = load_inventory(ROOT / "remote" / "hosts.yaml")
    assert list(inventory.hosts) == ["local", "ct200"]
    assert isinstance(inventory.host("local"), LocalHost)
    ct200 = inventory.host("ct200")
    assert isinstance(ct200, SshHost)
    assert ct200.cuda_arch == "sm_120"
    assert ct200.service is not None
    assert ct200.service.manager == "systemd"
    assert ct200.service.tensor_parallel == 8
    assert ct200.service.environment == ("HF_TOKEN", "NCCL_P2P_LEVEL")


def test_what_is_left_out_has_a_default(hosts_file: pathlib.Path) -> None:
    hosts_file.write_text(LAB)
    lab = load_inventory(hosts_file).host("lab")
    assert isinstance(lab, SshHost)
    assert (lab.port, lab.identity, lab.cuda_arch) == (22, None, None)
    assert lab.health.start_ceiling_s == 3600


def test_an_unknown_host_comes_with_the_nearest_names(hosts_file: pathlib.Path) -> None:
    hosts_file.write_text(LAB)
    with pytest.raises(UnknownName, match=r"unknown host 'lap' \(did you mean lab\?\)"):
        load_inventory(hosts_file).host("lap")


@pytest.fixture
def two(hosts_file: pathlib.Path) -> Inventory:
    """Hosts lab and local, and two groups of them."""
    more = "  local: {kind: local, root: /srv/kd}\ngroups:\n  all: [lab, local]\n  far: [lab]\n"
    hosts_file.write_text(LAB + more)
    return load_inventory(hosts_file)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("local", ["local"]),
        ("local,lab", ["local", "lab"]),
        ("all", ["lab", "local"]),
        ("far,local,all", ["lab", "local"]),
    ],
)
def test_several_hosts_are_named_with_commas_or_by_a_group(
    two: Inventory, text: str, names: list[str]
) -> None:
    assert [host.name for host in two.named(text)] == names
    assert two.groups == {"all": ("lab", "local"), "far": ("lab",)}


@pytest.mark.parametrize("text", ["", "lab,", "lab,,local", "lab local", "lab, local"])
def test_what_is_neither_host_nor_group_is_named(two: Inventory, text: str) -> None:
    with pytest.raises(UnknownName, match=r"^unknown host or group "):
        two.named(text)


def test_the_nearest_name_may_be_a_group_s(two: Inventory) -> None:
    with pytest.raises(UnknownName, match=r"unknown host or group 'fa' \(did you mean far"):
        two.named("lab,fa")


def test_a_group_is_not_one_host(two: Inventory) -> None:
    with pytest.raises(ConfigError, match=r"all is a group of hosts.* \(name one of lab, local\)"):
        two.host("all")


@pytest.mark.parametrize(
    ("groups", "line", "fault"),
    [
        ("groups: [lab]", 13, "field groups: must be names with hosts for each"),
        ("groups:", 13, "field groups: must be names with hosts for each"),
        ("groups:\n  all: lab", 14, "group all: must be a list of one host or more"),
        ("groups:\n  all: []", 14, "group all: must be a list of one host or more"),
        ("groups:\n  lab: [lab]", 14, "group lab: is the name of a host already"),
        ("groups:\n  a,b: [lab]", 14, "group a,b: must be called as a host could be"),
        ("groups:\n  7: [lab]", 14, "group 7: must be called as a host could be"),
        (
            "groups:\n  all:\n  - lab\n  - lap",
            16,
            "group all: unknown host 'lap' (did you mean lab?)",
        ),
        ("groups:\n  all: [[lab]]", 14, "group all: unknown host '['lab']'"),
        ("groups:\n  all:\n  - lab\n  - lab", 16, "group all: names host lab twice"),
        ("groups:\n  all: {a: 1, a: 2}", 14, "group all: 'a' is there twice"),
        ("groups:\n  all: [lab]\n  all: [lab]", 15, "'all' is there twice, first on line 14"),
    ],
)
def test_a_bad_group_is_named_with_its_line(
    hosts_file: pathlib.Path, groups: str, line: int, fault: str
) -> None:
    hosts_file.write_text(f"{LAB}{groups}\n")
    with pytest.raises(ConfigError) as caught:
        load_inventory(hosts_file)
    assert str(caught.value).startswith(f"hosts.yaml:{line}: {fault}")


def test_names_with_spaces_and_quotes_in_paths_are_kept(hosts_file: pathlib.Path) -> None:
    """Quoting is the transport's work; the inventory passes them on as they are."""
    hosts_file.write_text(LAB.replace("/srv/kd", '"/srv/k d\'$(x)"'))
    assert load_inventory(hosts_file).host("lab").root == "/srv/k d'$(x)"


@pytest.mark.parametrize(
    ("old", "new", "line", "fault"),
    [
        ("user: kd", "user: 7", 5, "field user: Input should be a valid string, got 7"),
        ("user: kd", "user: -oProxy", 5, "field user: String should match"),
        ("lab.example.net", "-x", 4, "field address: String should match"),
        ("    user: kd\n", "", 2, "field user: is required"),
        ("user: kd", "user: kd\n    usr: kd", 6, "field usr: is not a known field"),
        ("user: kd", "user: kd\n    name: x", 6, "field name: is not a known field"),
        (
            "user: kd",
            'user: kd\n    port: "22"',
            6,
            "field port: Input should be a valid integer, got '22'",
        ),
        (
            "user: kd",
            "user: kd\n    port: 0",
            6,
            "field port: Input should be greater than or equal to 1, got 0",
        ),
        (
            "user: kd",
            "user: kd\n    cuda_arch: 12.0",
            6,
            "field cuda_arch: Input should be a valid string, got 12.0",
        ),
        (
            "root: /srv/kd",
            "root: srv/kd",
            6,
            "field root: must be an absolute path, or begin with ~/",
        ),
        ("root: /srv/kd", 'root: "/srv\\nkd"', 6, "field root: must be one line of printable text"),
        ("kind: ssh", "kind: docker", 3, "field kind: must be local or ssh, got 'docker'"),
        ("    kind: ssh\n", "", 2, "field kind: must be local or ssh, got None"),
        ("kind: ssh", "kind: local", 4, "field address: is not a known field"),
        (
            "manager: systemd",
            "manager: screen",
            9,
            "field service.manager: Input should be 'systemd' or 'supervisor', got 'screen'",
        ),
        (
            "tensor_parallel: 8",
            "tensor_parallel: 0",
            12,
            "field service.tensor_parallel: Input should be greater than or equal to 1, got 0",
        ),
        (
            "tensor_parallel: 8",
            "tensor_parallel: 8\n      arguments: [--trust, 1]",
            13,
            "field service.arguments.1: Input should be a valid string, got 1",
        ),
        (
            "tensor_parallel: 8",
            "tensor_parallel: 8\n      arguments: [--tp=4]",
            13,
            "field service.arguments: --tp=4 is said by the field tensor_parallel",
        ),
        (
            "tensor_parallel: 8",
            "tensor_parallel: 8\n      arguments: [--api-key, s3cret]",
            13,
            "field service.arguments: --api-key would be shown by SGLang's process and log, kept "
            "in every entry of the promotion log, and lock kd out, which asks for tokens without a "
            "key: leave the service on 127.0.0.1 and let a proxy before it do that",
        ),
        (
            "tensor_parallel: 8",
            "tensor_parallel: 8\n      arguments: [--api=s3cret]",
            13,
            "field service.arguments: --api-key would be shown",
        ),
        (
            "tensor_parallel: 8",
            "tensor_parallel: 8\n      arguments: [--ssl-keyfile, /key]",
            13,
            "field service.arguments: --ssl-keyfile has the service speak TLS",
        ),
        (
            "tensor_parallel: 8",
            "tensor_parallel: 8\n      arguments: [--config, /more.yaml]",
            13,
            "field service.arguments: --config names a file that could say any of this",
        ),
        (
            "tensor_parallel: 8",
            "tensor_parallel: 8\n      arguments: [--host, 10.0.0.7]",
            13,
            "field service.arguments: --host 10.0.0.7: kd asks the service at 127.0.0.1",
        ),
        (
            "tensor_parallel: 8",
            "tensor_parallel: 8\n      environment: [HF_TOKEN=s3cret]",
            13,
            "field service.environment.0: must be the name of a variable, without a value",
        ),
        (
            "tensor_parallel: 8",
            "tensor_parallel: 8\n      environment: [HF_TOKEN, PYTHONPATH]",
            13,
            "field service.environment.1: cannot be PYTHONPATH, which is set to the release's",
        ),
        (
            "tensor_parallel: 8",
            "tensor_parallel: 8\n    health: {poll_s: 900}",
            13,
            "field health: poll_s must be shorter",
        ),
        (
            "tensor_parallel: 8",
            "tensor_parallel: 8\n    health: {poll_s: .inf}",
            13,
            "field health.poll_s: Input should be a finite number",
        ),
        ("  lab:", "  Lab_1:", 2, "field name: String should match"),
        ("  lab:", "  7:", 2, "must be a name with fields below it"),
    ],
)
def test_a_bad_field_is_named_with_its_line(
    hosts_file: pathlib.Path, old: str, new: str, line: int, fault: str
) -> None:
    assert old in LAB
    hosts_file.write_text(LAB.replace(old, new))
    name = new.strip().rstrip(":") if old == "  lab:" else "lab"
    with pytest.raises(ConfigError) as caught:
        load_inventory(hosts_file)
    assert str(caught.value).startswith(f"hosts.yaml:{line}: host {name}: {fault}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "hosts.yaml: is empty"),
        ("# nothing yet\n", "hosts.yaml: is empty"),
        ("- lab\n", "hosts.yaml:1: field hosts: is required"),
        ("hosts: lab\n", "hosts.yaml:1: field hosts: is required"),
        ("host: {}\nhosts: {}\n", "hosts.yaml:1: field host: is not a known field"),
        ("hosts:\n  lab: [1]\n", "hosts.yaml:2: host lab: must be a name with fields below it"),
        ("hosts:\n  lab: {\n", "hosts.yaml:3: is not valid YAML"),
        ("hosts:\n\tlab: 1\n", "hosts.yaml:2: is not valid YAML: found character '\\t'"),
        (
            "hosts: !!python/name:os.system\n",
            "hosts.yaml:1: is not valid YAML: could not determine",
        ),
        ("hosts: {}\n---\nhosts: {}\n", "hosts.yaml:2: is not valid YAML: but found another"),
        ("hosts:\n  lab: {}\n  lab: {}\n", "hosts.yaml:3: 'lab' is there twice, first on line 2"),
        (f"{LAB}  lab: {{}}\n", "hosts.yaml:13: 'lab' is there twice, first on line 2"),
        (
            f"{LAB}      unit: b\n",
            "hosts.yaml:13: host lab: 'unit' is there twice, first on line 10",
        ),
        ("hosts: &all\n  lab: *all\n", "hosts.yaml:2: an alias (*name) is not supported here"),
        ("hosts:\n  lab:\n    root: 2026-13-45\n", "hosts.yaml: holds a value that cannot be read"),
        ("hosts:\n  lab:\n    root: \x00\n", "hosts.yaml: is not UTF-8 text"),
    ],
)
def test_a_file_that_is_no_inventory(hosts_file: pathlib.Path, text: str, message: str) -> None:
    hosts_file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_inventory(hosts_file)
    assert str(caught.value).startswith(message)


def test_a_file_that_is_not_there_or_not_text(hosts_file: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"^hosts\.yaml: cannot be read: No such file"):
        load_inventory(hosts_file)
    hosts_file.write_bytes(b"hosts: \xff\xfe")
    with pytest.raises(ConfigError, match=r"^hosts\.yaml: is not UTF-8 text$"):
        load_inventory(hosts_file)


def test_every_fault_of_a_file_is_named_at_once(hosts_file: pathlib.Path) -> None:
    hosts_file.write_text(LAB.replace("user: kd", "user: 7").replace("/srv/kd", "kd"))
    with pytest.raises(ConfigError) as caught:
        load_inventory(hosts_file)
    first, second = str(caught.value).split("; ")
    assert first.startswith("hosts.yaml:6: host lab: field root: ")
    assert second.startswith("hosts.yaml:5: host lab: field user: ")


def test_lines_are_those_of_the_file_and_not_of_the_parsed_text(hosts_file: pathlib.Path) -> None:
    hosts_file.write_text(textwrap.dedent(f"# a comment\n\n{LAB.replace('user: kd', 'user: no')}"))
    assert yaml.safe_load(hosts_file.read_text())["hosts"]["lab"]["user"] is False
    with pytest.raises(ConfigError, match=r"^hosts\.yaml:7: host lab: field user: .*, got False$"):
        load_inventory(hosts_file)


def service(*arguments: str) -> Service:
    return Service(
        manager="supervisor",
        unit="sglang",
        model_path="/model",
        tensor_parallel=1,
        arguments=arguments,
    )


@pytest.mark.parametrize("option", [*inventory._LOCKS_OUT, "--port", "--tp-size", "--model-path"])
def test_what_an_option_begins_with_is_that_option(option: str) -> None:
    """SGLang's parser takes `--ap` for `--api-key`, and `--ap=secret` too."""
    for end in range(len("--") + 1, len(option) + 1):
        for argument in (option[:end], f"{option[:end]}=s3cret"):
            with pytest.raises(pydantic.ValidationError, match="arguments"):
                service(argument, "value")


def test_a_host_in_short_is_looked_at_as_well() -> None:
    for short in ("--ho", "--hos", "--host"):
        assert service(short, "127.0.0.1").arguments == (short, "127.0.0.1")
        for elsewhere in ("::", "::1", "10.0.0.7", ""):
            for arguments in ((short, elsewhere or "-h"), (f"{short}={elsewhere}",)):
                with pytest.raises(pydantic.ValidationError, match=r"kd asks .* at 127\.0\.0\.1"):
                    service(*arguments)


@pytest.mark.parametrize(
    "option",
    [
        *(
            "--context-length",
            "--chunked-prefill-size",
            "--cuda-graph-config",
            "--attention-backend",
        ),
        *(
            "--page-size",
            "--grpc-port",
            "--model-impl",
            "--model-loader-extra-config",
            "--hicache-size",
        ),
        *(
            "--tokenizer-path",
            "--trust-remote-code",
            "--mem-fraction-static",
            "--served-model-name",
        ),
        *("--speculative-draft-model-path", "--smg-http-sidecar-port", "--grammar-backend", "-h"),
    ],
)
def test_other_options_are_left_alone(option: str) -> None:
    """Each begins like one that is refused, or is begun by a letter of one."""
    assert service(option, "1").arguments == (option, "1")


def test_a_secret_written_into_the_file_is_not_repeated(hosts_file: pathlib.Path) -> None:
    hosts_file.write_text(f"{LAB}      environment: [HF_TOKEN=s3cret]\n")
    with pytest.raises(ConfigError) as caught:
        load_inventory(hosts_file)
    assert "s3cret" not in str(caught.value)
