"""The command line of a server with a phase's profile."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kdtree_engine.errors import ConfigError, MissingError
from phases.phase import ServiceProfile
from phases.registry import find_phase, load_phases
from phases.serve import require_sglang, serve_line
from phases.service_scale import GPU, kernel, launched
from remote.inventory import Service


def test_the_profile_comes_after_the_host_and_before_the_user() -> None:
    service = Service(
        manager="systemd",
        unit="sglang",
        model_path="/srv/model",
        tensor_parallel=8,
        port=30001,
        arguments=("--page-size", "1"),
    )
    line = serve_line(
        find_phase(load_phases(), "3"),
        python="/opt/python",
        host_arguments=service.command_line(),
        extra=("--port", "1"),
    )
    assert line.command == (
        *("/opt/python", "-m", "sglang.launch_server"),
        *("--model-path", "/srv/model", "--tp-size", "8", "--port", "30001", "--page-size", "1"),
        *("--attention-backend", "kdtree_mla", "--disable-cuda-graph"),
        *("--port", "1"),
    )
    assert line.environment == {}


def test_a_phase_brings_its_variables() -> None:
    phase = find_phase(load_phases(), "4")
    profile = dataclasses.replace(phase.profile, environment={"KDTREE_DECODE": "1"})
    phase = dataclasses.replace(phase, profile=profile)
    line = serve_line(phase, python="p", extra=("--model-path=m",))
    assert line.environment == {"KDTREE_DECODE": "1"}
    assert "--disable-cuda-graph" not in line.command


def test_a_profile_that_the_plugin_would_refuse_is_not_started() -> None:
    profile = ServiceProfile(("--attention-backend", "kdtree_mla"), {"KDTREE_DEFRAG": "tier9"})
    asks = dataclasses.replace(find_phase(load_phases(), "7"), profile=profile)
    with pytest.raises(ConfigError, match=r"phase 7 .* not written yet: KDTREE_DEFRAG: expected"):
        serve_line(asks, python="p", extra=("--model-path=m",))


def test_a_phase_without_a_profile_and_a_server_without_a_model_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"phase 1 \(offline_kernel\) has no service profile"):
        serve_line(find_phase(load_phases(), "1"), python="p", extra=("--model-path", "m"))
    with pytest.raises(ConfigError, match="no model is named"):
        serve_line(find_phase(load_phases(), "4"), python="p", extra=("--port", "3"))


def test_a_python_without_sglang_is_named() -> None:
    with pytest.raises(MissingError, match=r"/nowhere/python cannot be run"):
        require_sglang("/nowhere/python")
    try:
        import sglang  # noqa: F401
    except ImportError:
        with pytest.raises(MissingError, match="SGLang is not installed for"):
            require_sglang(sys.executable)


@pytest.mark.parametrize(("number", "graphs"), [("3", False), ("4", True)])
def test_the_gates_serve_with_what_a_person_serves_with(number: str, graphs: bool) -> None:
    """What `kd serve --phase N` adds is part of what a gate of that phase starts a server with."""
    started: list[str] = []

    @contextlib.contextmanager
    def start(arguments: Sequence[str], **options: Any) -> Iterator[None]:
        started.extend(arguments)
        yield

    place = pathlib.Path("model")
    with launched(GPU, kernel(9), model=place, log=place, start=start, graphs=graphs):
        pass
    profile = find_phase(load_phases(), number).profile
    assert set(profile.arguments) <= set(started)
    assert profile.environment == {}
