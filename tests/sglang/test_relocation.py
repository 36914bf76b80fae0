"""Relocation on SGLang's own structures: what is right, what is refused, what a kill leaves."""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import subprocess
import time
from typing import Any

import pytest

from phases.service import server_python

pytestmark = [pytest.mark.sglang]

TRIAL = ("-m", "kdtree_engine.sglang_ext.defrag.relocation_trial")


def started(root: pathlib.Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """A process of the server's Python; pipes for all that it says."""
    return subprocess.Popen(
        [server_python(), "-W", "ignore", *arguments],
        env=os.environ
        | {"PYTHONPATH": str(root / "kdtree-engine"), "TORCHDYNAMO_DISABLE": "1"}
        | options.pop("env", {}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def tried(root: pathlib.Path, **asked: Any) -> tuple[int, str, str]:
    process = started(root, *TRIAL)
    said, wrong = process.communicate(json.dumps(asked))
    return process.returncode, said, wrong


def test_random_operations_with_relocations_between_them(root: pathlib.Path) -> None:
    """The trial names its seed and operation where it fails."""
    code, said, wrong = tried(root, operations=3000, seed=3)
    assert code == 0, wrong
    figures = json.loads(said.splitlines()[-1])
    assert figures["relocated"] > 50
    assert figures["rows_moved"] > 1000
    for count in ("shared_rows_moved", "hits_after_moves", "evictions", "retracted", "aborted"):
        assert figures[count] > 0, count


@pytest.mark.parametrize(
    ("forget", "wrong"),
    [
        ("rows", "other rows"),
        ("nodes", "other rows|other prefix"),
        ("release", "a slot is lost or in two places"),
    ],
)
def test_an_update_that_is_left_out_is_noticed(root: pathlib.Path, forget: str, wrong: str) -> None:
    code, _, said = tried(root, operations=3000, seed=3, forget=forget)
    assert code == 1
    assert any(each in said.splitlines()[-1] for each in wrong.split("|")), said


REASONS = {
    "in flight": "1 batches are in flight",
    "open group": "a free group is open",
    "stock allocator": "expected RunAllocator",
    "rust": "RustUnifiedTreeCore",
    "unknown cache": "expected UnifiedRadixCache",
    "unknown pool": "expected MLATokenToKVPool or MHATokenToKVPool",
    "no pool": "no KV pool is named",
    "draft pool of another size": "expected 6001 slots",
    "a request is not named": "a row is in use by a request that is not named",
    "named twice": "two requests have one row",
    "hicache": "cache_controller",
    "linker": "linker",
    "session": "a streaming session is open",
    "node on the host": "in another tier",
    "node being written": "in another tier",
    "beam": "beam search",
    "backup": "a backup on the host",
    "page size": "page size 16",
    "disaggregation": "disaggregation_mode is prefill",
    "canary": "kv_canary is log",
    "eagle": "the speculative algorithm is EAGLE",
    "captured experts": "experts_capturer",
    "held by nobody": "1 slots are held by nobody known",
    "locked by another": "a node is locked by others",
    "another row": "has another prefix than its nodes",
    "failing copy": "raised no room",
}


def test_what_is_not_understood_is_not_moved(root: pathlib.Path) -> None:
    process = started(root, str(root / "tests" / "support" / "relocation_fenced.py"))
    said, wrong = process.communicate()
    assert process.returncode == 0, wrong
    found = json.loads(said.splitlines()[-1])
    assert found.pop("plain") == ["", False]  # there was something to move all the time
    assert found.keys() == REASONS.keys()
    for case, (reason, unchanged) in found.items():
        assert REASONS[case] in reason, case
        assert unchanged, case


def written(pid: int) -> list[str]:
    """What others could see of a process: shared memory, and files open for writing, but no log."""
    maps = pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines()
    shared = [line for line in maps if line.split()[1] == "rw-s"]
    opened = []
    for entry in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        target = str(entry.readlink())
        flags = (pathlib.Path(f"/proc/{pid}/fdinfo") / entry.name).read_text().split("flags:")[1]
        if int(flags.split()[0], 8) & os.O_ACCMODE and target.startswith("/"):
            opened.append(target)
    return shared + [target for target in opened if not target.endswith((".log", "/dev/null"))]


def files(folder: pathlib.Path) -> set[tuple[pathlib.Path, int, int]]:
    """All of them, each with its size and when it was last written."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {(path, path.stat().st_size, path.stat().st_mtime_ns) for path in found}


RELOCATES = """
from kdtree_engine.sglang_ext.defrag.relocation_trial import Asked, Trial

trial = Trial(Asked())
while True:
    trial.operate()
    trial.relocate()
    if trial.counts["relocated"] == 20:
        print("it relocates", flush=True)
"""


def test_a_kill_at_any_time_leaves_nothing_behind(
    root: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """All holders are in the process, so nothing that outlives it can have a wrong slot."""
    random_ = random.Random(1)
    with started(root, "-c", RELOCATES, cwd=tmp_path, env={"TMPDIR": str(tmp_path)}) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "it relocates\n"
            before = files(tmp_path)  # what imports leave in a folder for scratch
            for _ in range(5):
                time.sleep(random_.uniform(0.1, 1))
                process.send_signal(signal.SIGSTOP)
                assert written(process.pid) == []
                process.send_signal(signal.SIGCONT)
            assert process.poll() is None
        finally:
            process.kill()
    assert files(tmp_path) == before
