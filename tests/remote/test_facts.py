"""What a host says about itself, and what it may say instead. The hosts' Pythons are scripts."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest
import torch

from kdtree_engine.errors import MissingError
from kdtree_engine.machine import Machine
from remote.errors import CommandTimeout, FactsError
from remote.facts import read_facts
from remote.local import LocalTransport

HERE = LocalTransport("lab")
FACTS = Machine(
    hostname="lab", system="Linux", python="3.11.7", torch=None, cuda=None, driver=None, gpus=(),
    nvcc=None, compute_sanitizer=None, sglang=None, ssh=None, rsync=None,
)  # fmt: skip


@pytest.fixture
def python(tmp_path: pathlib.Path) -> pathlib.Path:
    """Where a test writes the host's Python, as a shell script."""
    path = tmp_path / "the python"
    path.touch(mode=0o755)
    return path


def test_this_machine_through_the_transport() -> None:
    assert read_facts(HERE, sys.executable).torch == torch.__version__


def test_a_message_before_the_facts_is_no_harm(python: pathlib.Path) -> None:
    python.write_text(f"#!/bin/sh\necho 'Welcome to lab'\necho '{json.dumps(FACTS.as_json())}'\n")
    assert read_facts(HERE, str(python)) == FACTS


def test_a_host_without_that_python(tmp_path: pathlib.Path) -> None:
    with pytest.raises(MissingError, match=r"^host lab: .*/none is not there or cannot be run"):
        read_facts(HERE, str(tmp_path / "none"))


def test_a_host_without_the_engine(python: pathlib.Path) -> None:
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    with pytest.raises(MissingError) as caught:
        read_facts(HERE, str(python))
    assert caught.value.problem == f"host lab: kdtree_engine is not installed for {python}"
    assert caught.value.remedy is not None
    assert "pip install ./kdtree-engine" in caught.value.remedy


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("echo hello", "described the machine in something other than JSON: hello"),
        ("true", "described the machine in something other than JSON"),
        ("printf '[%.0s' $(seq 100000)", "described the machine in something other than JSON: ["),
        ("echo '{}'", "host lab: field hostname: is required"),
        ("echo '[]'", "host lab: field (top level): must be an object, got []"),
        ("echo 'Segmentation fault' >&2; exit 139", "(exit code 139, Segmentation fault)"),
    ],
)
def test_an_answer_that_is_no_description(python: pathlib.Path, answer: str, message: str) -> None:
    python.write_text(f"#!/bin/sh\n{answer}\n")
    with pytest.raises(FactsError) as caught:
        read_facts(HERE, str(python))
    assert message in caught.value.problem


def test_a_host_that_does_not_answer(python: pathlib.Path) -> None:
    python.write_text("#!/bin/sh\nsleep 300\n")
    with pytest.raises(CommandTimeout):
        read_facts(HERE, str(python), timeout=0.5)
