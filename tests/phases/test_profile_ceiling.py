"""What fraction of a ceiling was reached: on sums by hand, and on traces of a real server.

The traces are of SGLang 0.5.17 on one H200, four layers, graphs on, at 4,096 and 66,560 tokens:
trees of nine nodes on the kernel and on Triton, and no speculation.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest

from kdtree_engine.gpus import GPUS
from kdtree_engine.profiling.summary import Profile, profile
from phases.profile_ceiling import Note, attained, note_remarks, read_note

DATA = pathlib.Path(__file__).resolve().parents[1] / "data" / "profile"
H200 = GPUS["h200"].bandwidth


def trace(name: str) -> pathlib.Path:
    return DATA / f"{name}-1-TP-0.trace.json.gz"


def classes(found: Profile) -> dict[str, Any]:
    return {one.name: one for one in found.classes}


@pytest.mark.parametrize(
    ("name", "attention", "kernel_us"),
    [
        ("kernel-4096", "verify attention", 68.9),
        ("kernel-66560", "verify attention", 151.5),
        ("triton-4096", "verify attention", 2946.3),
        ("triton-66560", "verify attention", 50_889.3),
        ("plain-4096", "other attention", 135.4),
        ("plain-66560", "other attention", 440.5),
    ],
)
def test_real_traces(name: str, attention: str, kernel_us: float) -> None:
    found = profile([trace(name)])
    (rank,) = found.ranks
    assert (rank.rank, rank.told_by, rank.steps) == ("TP0", "ranges", 11)
    assert not found.unknown
    one = classes(found)[attention]
    assert one.kernel_us == pytest.approx(kernel_us, abs=0.1)
    assert sum(each.us for each in found.classes) == pytest.approx(found.step_us)
    assert ("tree build" in classes(found)) == (not name.startswith("plain"))


def test_the_kernel_against_triton_in_one_service() -> None:
    """336 times in the kernels, and 15 in the step, whose rest is the host's."""
    ours, theirs = (profile([trace(f"{name}-66560")]) for name in ("kernel", "triton"))
    times = [classes(one)["verify attention"].kernel_us for one in (theirs, ours)]
    assert times[0] / times[1] == pytest.approx(336, abs=1)
    assert theirs.step_us / ours.step_us == pytest.approx(14.5, abs=0.1)


def test_bytes_of_the_kv_by_hand() -> None:
    """Four layers of 66,560 rows of 576 numbers, two bytes each, in 151.5 us."""
    found = attained(profile([trace("kernel-66560")]), read_note(trace("kernel-66560")))
    one = found["verify attention"]
    assert one.bytes == 4 * 66_560 * 576 * 2
    assert one.gb_s == pytest.approx(one.bytes / 151.5e-6 / 1e9, rel=1e-3)
    assert one.fraction == pytest.approx(one.gb_s * 1e9 / H200)
    assert 0.4 < one.fraction < 0.5


def test_bytes_of_dense_products_by_hand() -> None:
    """Hidden 1024, 8 heads, a dense layer of 2048, 512 tokens in the vocabulary."""
    hidden, heads, layers = 1024, 8, 4
    layer = hidden * 576 + hidden * heads * 192 + 2 * heads * 128 * 512 + heads * 128 * hidden
    layer += 3 * hidden * 2048
    found = attained(profile([trace("plain-4096")]), read_note(trace("plain-4096")))
    assert found["dense GEMM"].bytes == 2 * (layers * layer + hidden * 512)


def some_note(**changed: Any) -> Note:
    note = read_note(trace("kernel-4096"))
    assert note is not None
    return dataclasses.replace(note, **changed)


@pytest.mark.parametrize(
    ("changed", "counted"),
    [
        ({}, {"verify attention", "dense GEMM"}),
        ({"gpu": "NVIDIA GeForce GTX 980"}, set()),
        ({"gpu": None}, set()),
        ({"model": {}}, set()),
        ({"model": {"kv_lora_rank": "512", "num_hidden_layers": True}}, set()),
        ({"server": {"dtype": "odd", "speculative_algorithm": "NGRAM"}}, set()),
        ({"server": {"dtype": "bfloat16", "speculative_algorithm": "NGRAM"}}, {"verify attention"}),
    ],
)
def test_what_is_not_known_is_not_counted(changed: dict[str, Any], counted: set[str]) -> None:
    assert set(attained(profile([trace("kernel-4096")]), some_note(**changed))) == counted


def test_experts_are_not_counted_as_dense() -> None:
    note = some_note()
    model = {**note.model, "first_k_dense_replace": 1}
    found = attained(profile([trace("kernel-4096")]), some_note(model=model))
    assert set(found) == {"verify attention"}


def test_an_fp8_cache_has_half_the_bytes() -> None:
    note = some_note()
    server = {**note.server, "kv_cache_dtype": "fp8_e4m3"}
    whole = attained(profile([trace("kernel-4096")]), note)["verify attention"].bytes
    half = attained(profile([trace("kernel-4096")]), some_note(server=server))
    assert 2 * half["verify attention"].bytes == whole


def test_a_profiler_that_slows_the_host_is_told() -> None:
    found = profile([trace("kernel-4096")])
    (line,) = note_remarks(found, some_note(step_us=2289.0))
    assert "a step took 2,289 us before the profiler ran and 4,152 under it" in line
    assert not note_remarks(found, some_note(step_us=4000.0))
    (line,) = note_remarks(found, some_note(step_us=None))
    assert "which slows the host by an amount that was not measured here" in line
    assert not note_remarks(found, None)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", '{"asked": 1}', '{"asked": {"context": 1e400, "batch": 1}}']
)
def test_another_file_of_that_name_is_no_note(text: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "run.json").write_text(text)
    assert read_note(tmp_path / "run-TP-0.trace.json.gz") is None
    assert read_note(tmp_path / "run.trace.json.gz") is None


def test_notes_of_real_traces_name_what_they_are_of() -> None:
    for path in sorted(DATA.glob("*.json")):
        told = json.loads(path.read_text())
        note = read_note(DATA / told["traces"][0])
        assert note is not None
        assert note.gpu == "NVIDIA H200"
        assert path.name == f"{told['command'][3]}-{note.context}-{note.batch}.json"
