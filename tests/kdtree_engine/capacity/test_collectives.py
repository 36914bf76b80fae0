"""All-reduces of a step."""

from __future__ import annotations

import dataclasses

import pytest

from kdtree_engine.capacity.collectives import collective_parts, reduces
from kdtree_engine.capacity.shapes import KIMI_K2
from kdtree_engine.gpus import LINKS, Link

LINK = Link("toy", latency=2, bandwidth=100, source="none")


def test_a_pass_reduces_twice_a_layer_once_before_and_gathers_its_logits() -> None:
    shape = dataclasses.replace(KIMI_K2, layers=3, hidden=25, vocabulary=400)
    parts = collective_parts(shape, LINK, tokens=4, ranks=8)
    # Seven of 200 bytes, and 4 * 400 * 2 bytes at half the price.
    assert parts == {"latency": 8 * 2, "link": pytest.approx(7 * 2 + 16)}


def test_one_rank_reduces_with_nobody() -> None:
    assert collective_parts(KIMI_K2, LINK, tokens=9, ranks=1) == {}
    assert reduces(LINK, 5, 100.0, 1) == {}


def test_a_batch_over_pcie_is_bound_by_the_link() -> None:
    few, many = (
        collective_parts(KIMI_K2, LINKS["pcie"], tokens=tokens, ranks=8) for tokens in (9, 1152)
    )
    assert few["latency"] > few["link"]
    assert many["link"] > many["latency"] == few["latency"]
