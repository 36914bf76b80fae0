"""The MoE map: a prediction that says so, and is the same each time."""

from __future__ import annotations

import pytest
from kept_evidence import imbalance

from phases.moe_imbalance import Imbalance
from phases.reporting.experts import BATCHES, experts_section
from phases.reporting.model import HeatMap, Standing


@pytest.fixture(scope="module")
def found() -> Imbalance:
    return imbalance()


def test_a_map_for_each_batch_on_one_scale_around_1(found: Imbalance) -> None:
    maps = [one for one in experts_section(found, "f" * 12).blocks if isinstance(one, HeatMap)]
    assert len(maps) == len(BATCHES)
    few, many = maps
    assert (few.low, few.high) == (many.low, many.high)
    assert few.middle - few.low == pytest.approx(few.high - few.middle)
    assert (len(few.values), len(few.values[0])) == (found.ranks, 60)
    for column in zip(*few.values, strict=True):
        assert sum(column) / len(column) == pytest.approx(1.0)

    def spread(one: HeatMap) -> float:
        return max(max(row) for row in one.values) - min(min(row) for row in one.values)

    assert spread(many) < spread(few)


def test_it_is_called_a_prediction_with_its_seed(found: Imbalance) -> None:
    section = experts_section(found, "f" * 12)
    assert section.lead.startswith("A prediction")
    for block in section.blocks:
        source = getattr(block, "source", None)
        if source is not None:
            assert source.standing is Standing.PREDICTED
            assert "seed 1" in source.remark
            assert source.file == "kd moe --batch 1,16"
