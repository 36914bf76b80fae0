"""Calibration by the kept evidence: what is fitted, what is held out, and how far it is off."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import pytest

from kdtree_engine.capacity.shapes import read_shape
from kdtree_engine.errors import ConfigError, MissingError
from kdtree_engine.gpus import GPUS
from phases.capacity_evidence import ALONE, KERNEL, SERVE, SERVED, SWEEP, Calibration, calibrate
from phases.service_scale import GPU as SCALE
from phases.small_model import write_service_model


@pytest.fixture(scope="module")
def kept(root: pathlib.Path) -> pathlib.Path:
    return root / "plans/evidence"


@pytest.fixture(scope="module")
def h200(kept: pathlib.Path) -> Calibration:
    return calibrate(kept, GPUS["h200"])


@pytest.fixture(scope="module")
def sm_120(kept: pathlib.Path) -> Calibration:
    return calibrate(kept, GPUS["rtx-pro-6000"])


def test_the_served_models_sizes_are_those_of_the_model_that_is_written(
    tmp_path: pathlib.Path,
) -> None:
    write_service_model(tmp_path, seed=1, vocabulary=SCALE.vocabulary, layers=1)
    written = vars(read_shape(tmp_path))
    assert {**written, "name": SERVED.name, "layers": 4, "dense_layers": 4} == vars(SERVED)


def test_the_kernels_regimes_are_fitted_and_the_sweeps_other_ones_held_out(
    h200: Calibration,
) -> None:
    assert (h200.attention.architecture, h200.attention.device) == ("sm_90", "NVIDIA H200")
    fitted = [one for one in h200.regimes if one.fitted]
    held = [one for one in h200.regimes if not one.fitted]
    assert {one.source for one in fitted} == {KERNEL}
    assert {one.source for one in held} == {SWEEP}
    places = [
        {(t.batch, t.heads, t.nodes, t.prefix) for t in _timed(some)} for some in (fitted, held)
    ]
    assert len(places[0]) == 12
    assert len(places[1]) == 7
    assert not places[0] & places[1]
    assert max(abs(one.error) for one in fitted) < 0.1
    assert max(abs(one.error) for one in held) < 0.25


def test_another_architecture_is_fitted_to_its_own_tiles_on_the_gpu_they_were_tried_on(
    sm_120: Calibration, h200: Calibration
) -> None:
    assert (sm_120.attention.architecture, sm_120.attention.device) == ("sm_120", "NVIDIA H200")
    assert sm_120.attention.flops_share < h200.attention.flops_share
    assert {one.source for one in sm_120.regimes} == {SWEEP}
    assert sum(one.fitted for one in sm_120.regimes) == 12
    assert max(abs(one.error) for one in sm_120.regimes) < 0.25


def test_the_host_is_fitted_to_the_shortest_context_of_one_run_and_held_against_the_rest(
    h200: Calibration, sm_120: Calibration
) -> None:
    assert h200.host == sm_120.host, "it is a host's, whatever GPU is asked for"
    assert [(one.step.served, one.step.context) for one in h200.steps if one.step.fitted] == [
        ("trees", 1024),
        ("no speculation", 1024),
    ]
    held = [one for one in h200.steps if not one.step.fitted]
    assert len(held) == 10
    same_run = [abs(one.error) for one in held if one.step.source == SERVE]
    other_run = [abs(one.error) for one in held if one.step.source == ALONE]
    assert max(same_run) < 0.1
    # The host was not alike from run to run, and no model of the GPU explains that.
    assert max(other_run) > 0.5
    assert h200.worst(fitted=False)[1] == max(same_run + other_run)
    assert all(one.error == pytest.approx(0) for one in h200.steps if one.step.fitted)


def test_what_is_kept_is_read_anew(kept: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Nothing of it is written into the model: other evidence, another calibration."""
    folder = copied(kept, tmp_path)
    document = json.loads((folder / SERVE).read_text())
    for server in document["servers"]:
        for speed in server["speeds"]:
            speed["step_us"] *= 2
    (folder / SERVE).write_text(json.dumps(document))
    before, after = (calibrate(one, GPUS["h200"]).host for one in (kept, folder))
    assert after.trees > 2 * before.trees
    assert after.plain == before.plain


@pytest.mark.parametrize("name", [KERNEL, SWEEP, SERVE, ALONE])
def test_evidence_that_is_not_there_is_missing(
    kept: pathlib.Path, tmp_path: pathlib.Path, name: str
) -> None:
    folder = copied(kept, tmp_path)
    (folder / name).unlink()
    with pytest.raises(MissingError, match=name):
        calibrate(folder, GPUS["h200"])


@pytest.mark.parametrize("name", [SWEEP, SERVE])
def test_evidence_that_is_damaged_is_one_line(
    kept: pathlib.Path, tmp_path: pathlib.Path, name: str
) -> None:
    folder = copied(kept, tmp_path)
    for text in ("{", "{}", "[]"):
        (folder / name).write_text(text)
        with pytest.raises(ConfigError, match=name) as refused:
            calibrate(folder, GPUS["h200"])
        assert "\n" not in str(refused.value)


def test_a_gpu_that_the_table_does_not_have_is_refused(
    kept: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    folder = copied(kept, tmp_path)
    text = (folder / SERVE).read_text()
    (folder / SERVE).write_text(text.replace("NVIDIA H200", "NVIDIA H20Z"))
    with pytest.raises(ConfigError, match="H20Z"):
        calibrate(folder, GPUS["h200"])


def copied(kept: pathlib.Path, where: pathlib.Path) -> pathlib.Path:
    for name in (KERNEL, SWEEP, SERVE, ALONE):
        (where / name).parent.mkdir(exist_ok=True)
        shutil.copy(kept / name, where / name)
    return where


def _timed(some: Any) -> Any:
    return [one.timed for one in some]
