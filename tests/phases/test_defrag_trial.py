"""What a trial says on its way out, and what is made of it."""

from __future__ import annotations

import pathlib
import sys

import pytest

from phases import defrag_trial
from phases.gate import FailureKind, GateFailure


@pytest.fixture
def server(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A Python in the server's place; what it does is the file's text."""
    program = tmp_path / "program.py"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{program}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(defrag_trial, "server_python", lambda: str(python))
    return program


def test_the_last_line_is_its_figures(server: pathlib.Path) -> None:
    server.write_text(
        "import json, sys\n"
        "print('SGLang says something first')\n"
        "print(json.dumps({'module': sys.argv[-1], **json.load(sys.stdin)}))\n"
    )
    found = defrag_trial.run_trial("trial", {"operations": 5})
    assert found == {"module": "kdtree_engine.sglang_ext.defrag.trial", "operations": 5}


@pytest.mark.parametrize(
    ("program", "kind", "says"),
    [
        ("raise AssertionError('seed 1, operation 7: lost')", "NUMERICAL", "operation 7: lost"),
        ("raise ImportError('no SGLang')", "LAUNCH", "ImportError: no SGLang"),
        ("import os; os._exit(9)", "LAUNCH", "no message"),
    ],
)
def test_what_it_found_wrong_is_told_from_what_broke(
    server: pathlib.Path, program: str, kind: str, says: str
) -> None:
    server.write_text(program)
    with pytest.raises(GateFailure, match=says) as caught:
        defrag_trial.run_trial("trial", {})
    assert caught.value.kind is FailureKind[kind]
