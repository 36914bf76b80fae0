"""`kd plan-capacity`: its rows, its remarks, and the contexts as people write them."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest

from kdtree_engine.capacity.shapes import KIMI_K2
from kdtree_engine.capacity.step import Service
from kdtree_engine.errors import ConfigError
from kdtree_engine.gpus import GPUS, LINKS
from phases.capacity_evidence import SERVED, calibrate
from phases.capacity_table import (
    COLUMNS,
    ERROR_COLUMNS,
    Capacity,
    error_rows,
    plan_capacity,
    remarks,
    rows,
)


def service(gpu: str, **given: Any) -> Service:
    part = GPUS[gpu]
    settings: dict[str, Any] = {
        "shape": KIMI_K2,
        "gpu": part,
        "link": LINKS[part.link],
        "gpus": 8,
        "ranks": 8,
        "expert_bytes": 0.5625,
        "dense_bytes": 2.0,
    }
    return Service(**{**settings, **given})


def planned(root: pathlib.Path, served: Service, **given: Any) -> Capacity:
    settings: dict[str, Any] = {
        "contexts": [4096, 65536],
        "batches": [1, 4],
        "nodes": 9,
        "accepted": None,
    }
    calibration = calibrate(root / "plans/evidence", served.gpu)
    return plan_capacity(served, calibration, **{**settings, **given})


def test_a_row_for_each_context_and_batch_and_its_parts_are_the_step(root: pathlib.Path) -> None:
    found = planned(root, service("h200"))
    table = [dict(zip(COLUMNS, row, strict=True)) for row in rows(found)]
    assert [(row["context"], row["batch"]) for row in table] == [
        ("4096", "1"),
        ("4096", "4"),
        ("65536", "1"),
        ("65536", "4"),
    ]
    names = ("attention", "dense", "experts", "all-reduce", "drafting", "host")
    for row, step in zip(table, found.steps, strict=True):
        assert sum(float(row[name]) for name in names) == pytest.approx(
            float(row["step ms"]), abs=0.05
        )
        assert float(row["a request"]) == pytest.approx(
            float(row["tok/s"]) / step.load.batch, abs=1
        )
    assert found.fits


@pytest.mark.parametrize("gpu", ["rtx-pro-6000", "rtx-5090", "h200"])
def test_every_figure_of_kimi_k2_is_labelled_a_prediction(root: pathlib.Path, gpu: str) -> None:
    found = planned(root, service(gpu), batches=[1], contexts=[4096])
    (step,) = found.as_json()["steps"]
    assert step["label"] == "prediction"
    assert any(f"prediction: a step of Kimi K2 on 8 x {gpu}" in line for line in remarks(found))
    parts = {one["name"]: one["label"] for one in step["components"]}
    known = "calibrated" if gpu == "h200" else "prediction"
    shares = f"{gpu} is taken to reach the same shares of its own ceilings: "
    assert any(shares in line for line in remarks(found)) == (gpu != "h200")
    assert parts.pop("attention") == known
    assert set(parts.values()) == {"prediction"}


def test_the_service_that_was_measured_is_calibrated(root: pathlib.Path) -> None:
    served = service("h200", shape=SERVED, gpus=1, ranks=1)
    found = planned(root, served, batches=[1], contexts=[1024, 16384], accepted=8.86)
    assert [row[-1] for row in rows(found)] == ["calibrated"] * 2
    beyond = planned(root, served, batches=[1], contexts=[512, 131_072], accepted=8.86)
    assert [row[-1] for row in rows(beyond)] == ["prediction"] * 2, "no such step is kept"
    # 3,783 tok/s were measured at 1,024, which the host's share is fitted to.
    assert found.steps[0].tokens_per_second == pytest.approx(3783, rel=0.001)
    assert any(line.startswith("calibrated: ") for line in remarks(found))


def test_weights_that_do_not_fit_are_said_plainly_and_have_no_times(root: pathlib.Path) -> None:
    found = planned(root, service("rtx-5090"))
    assert not found.fits
    assert rows(found)[0][-1] == "does not fit: needs 76 GB of 30 usable"
    assert {cell for row in rows(found) for cell in row[2:-1]} == {"-"}
    first = next(iter(remarks(found)))
    assert first.startswith("Kimi K2 does not fit on 8 x rtx-5090: its weights take 76.")
    assert first.endswith("32 ranks would hold them")
    assert {one["tokens_per_second"] for one in found.as_json()["steps"]} == {None}


def test_a_row_whose_kv_does_not_fit_leaves_the_others(root: pathlib.Path) -> None:
    found = planned(root, service("rtx-pro-6000"))
    assert [step.memory.fits for step in found.steps] == [True, True, True, False]
    assert not found.fits
    first = next(iter(remarks(found)))
    assert first.startswith("some rows do not fit on 8 x rtx-pro-6000: beside the weights")
    assert f"{4 * (65536 + 9):,} are asked for" in first


def test_acceptance_is_given_or_assumed_and_it_is_said_which(root: pathlib.Path) -> None:
    assumed = planned(root, service("h200"))
    told = planned(root, service("h200"), accepted=4.0)
    plain = planned(root, service("h200"), nodes=1)
    assert (assumed.assumed, told.assumed, plain.assumed) == (True, False, False)
    assert any("2.74 tokens accepted of 9 verified: assumed" in one for one in remarks(assumed))
    assert any("4 tokens accepted of 9 verified, as given" in one for one in remarks(told))
    assert any(one.startswith("no speculation") for one in remarks(plain))
    assert told.steps[0].tokens_per_second == pytest.approx(
        assumed.steps[0].tokens_per_second * 4 / assumed.steps[0].load.accepted
    )


def test_every_kept_step_is_shown_beside_the_models(root: pathlib.Path) -> None:
    table = error_rows(planned(root, service("rtx-pro-6000"), batches=[1]))
    assert all(len(row) == len(ERROR_COLUMNS) for row in table)
    assert [row[-1] for row in table].count("fit") == 2
    assert [row[-1] for row in table].count("held out") == 10
    assert table[0] == (
        *("trees, h200-sglang-0.5.17-graphs.json", "1024", "2.34", "2.34", "+0.0%", "fit"),
    )


def test_what_cannot_be_is_refused(root: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="10 tokens accepted of 9 verified"):
        planned(root, service("h200"), accepted=10.0)
    with pytest.raises(ConfigError, match="Kimi K2 has 262144 positions"):
        planned(root, service("h200"), contexts=[262_140])


def test_json_is_plain_and_has_all_of_it(root: pathlib.Path) -> None:
    found = planned(root, service("rtx-pro-6000"))
    plain = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert plain["fits"] is False
    assert plain["acceptance"] == "assumed"
    assert plain["service"]["gpu"]["source"].startswith("not measured")
    assert len(plain["steps"]) == 4
    assert sum(plain["steps"][0]["by_bound"].values()) == pytest.approx(1)
    assert plain["kept_steps"][0]["error"] == pytest.approx(0)
    assert len(plain["kept_regimes"]) == 19
    assert plain["remarks"] == list(remarks(found))


def test_other_ranks_than_a_links_figures_are_of_are_said(root: pathlib.Path) -> None:
    four = planned(root, service("h200", ranks=4), batches=[2])
    assert any("is that of 8 ranks, not of 4" in line for line in remarks(four))
    alone = planned(root, dataclasses.replace(service("h200"), gpus=1, ranks=1), batches=[1])
    assert not any("all-reduce over" in line for line in remarks(alone))
