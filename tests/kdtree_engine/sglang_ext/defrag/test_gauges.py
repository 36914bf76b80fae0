"""Gauges of a table made by hand: told one interval after they were measured."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from kdtree_engine.sglang_ext.defrag.gauges import GAUGES, SAMPLE, Gauges

LABELS = {"model_name": "m", "tp_rank": "0"}


class Told:
    """What the gauges were set to, by name."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def make(self, name: str, text: str, labels: list[str]) -> Any:
        assert labels == list(LABELS)
        assert text.endswith(".")
        assert name not in self.values, "made twice"

        def set_(value: float) -> None:
            self.values[name] = value

        return types.SimpleNamespace(labels=lambda **_: types.SimpleNamespace(set=set_))


@pytest.fixture
def told() -> Told:
    return Told()


def test_a_measure_is_told_at_the_next_interval(told: Told) -> None:
    gauges = Gauges(LABELS, told.make)
    table = torch.tensor([[1, 2, 3, 4, 9], [8, 7, 6, 5, 9]], dtype=torch.int32)
    stock = types.SimpleNamespace()
    gauges.step(table, [(0, 4), (1, 4)], stock)
    assert told.values == {}
    table.zero_()  # the slots are others by then
    gauges.step(table, [], stock)
    assert told.values == {
        "kdtree:kv_measured_requests": 2,
        "kdtree:kv_mean_runs": 2.5,
        "kdtree:kv_worst_decile_runs": 4,
        "kdtree:kv_mean_run_length": 8 / 5,
        "kdtree:kv_page_locality": 1,
    }
    assert set(told.values) == set(GAUGES)


def test_what_was_relocated_is_told(told: Told) -> None:
    moved = types.SimpleNamespace(looks=5, relocations=3, rows=900)
    Gauges(LABELS, told.make).idle(types.SimpleNamespace(relocating=moved))
    assert told.values["kdtree:kv_relocation_looks"] == 5
    assert told.values["kdtree:kv_relocations"] == 3
    assert told.values["kdtree:kv_relocated_rows"] == 900


def test_where_nothing_ran_the_last_measure_stands(told: Told) -> None:
    gauges = Gauges(LABELS, told.make)
    table = torch.tensor([[1, 2, 3]])
    for held in ([], [(0, 0)], [(0, 3)], [], []):
        gauges.step(table, held, None)
    assert told.values["kdtree:kv_mean_runs"] == 1


def test_an_idle_server_says_so_once(told: Told) -> None:
    gauges = Gauges(LABELS, told.make)
    gauges.step(torch.tensor([[1, 9, 3]]), [(0, 3)], None)
    gauges.step(torch.tensor([[1, 9, 3]]), [(0, 3)], None)
    assert told.values["kdtree:kv_mean_runs"] == 3
    gauges.idle(None)
    assert told.values["kdtree:kv_measured_requests"] == told.values["kdtree:kv_mean_runs"] == 0
    told.values["kdtree:kv_mean_runs"] = -1
    gauges.idle(None)
    assert told.values["kdtree:kv_mean_runs"] == -1, "told again"
    gauges.step(torch.tensor([[1, 2, 3]]), [(0, 3)], None)
    gauges.idle(None)
    assert told.values["kdtree:kv_mean_runs"] == 0, "what was under way when it ended is not told"


def test_many_requests_are_sampled_evenly(told: Told) -> None:
    """Of 64 rows the later half is scattered: so is half of the sample."""
    table = torch.arange(1, 9, dtype=torch.int32).repeat(64, 1)
    table[32:] = table[32:].flip(1)
    gauges = Gauges(LABELS, told.make)
    for _ in range(2):
        gauges.step(table, [(row, 8) for row in range(64)], None)
    assert told.values["kdtree:kv_measured_requests"] == SAMPLE
    assert told.values["kdtree:kv_mean_runs"] == (1 + 8) / 2


def test_tier0_tells_of_its_free_runs_at_once(told: Told) -> None:
    growth = types.SimpleNamespace(runs=[(1, 5), (9, 2)], reserved=12)
    tier0 = types.SimpleNamespace(growth=growth, waits=3)
    Gauges(LABELS, told.make).step(torch.zeros(1, 1), [], tier0)
    assert told.values == {
        "kdtree:kv_free_runs": 2,
        "kdtree:kv_reserved_slots": 12,
        "kdtree:kv_allocation_waits": 3,
    }
