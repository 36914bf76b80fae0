"""The time model, by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kdtree_engine.gpus import GPUS, Link
from kdtree_engine.moe.costs import ExpertShape, busy, reduce_seconds
from kdtree_engine.moe.dispatch import Work

SHAPE = ExpertShape(hidden=10, intermediate=2, bytes_per_weight=0.5)
GPU = dataclasses.replace(GPUS["h200"], name="toy", bandwidth=60, flops=240)


def test_an_expert_of_kimi_k2_has_44_million_weights() -> None:
    shape = ExpertShape()
    assert shape.weights == 44_040_192
    assert shape.bytes == pytest.approx(24.77e6, rel=0.001)
    assert 60 * 384 * shape.bytes == pytest.approx(571e9, rel=0.001)


def test_a_rank_reads_each_active_expert_once_or_is_bound_by_its_products() -> None:
    # 60 weights: 30 bytes, half a second; 120 flop a token, half a second.
    work = Work(torch.tensor([[[2, 2, 0]]]), torch.tensor([[[2, 5, 0]]]))
    assert busy(GPU, work, SHAPE).tolist() == [[[1.0, 2.5, 0.0]]]


def test_a_slice_takes_its_part() -> None:
    work = Work(torch.tensor([[[2]]]), torch.tensor([[[2]]]), share=0.25)
    assert busy(GPU, work, SHAPE).tolist() == [[[0.25]]]


def test_an_all_reduce_is_a_latency_and_two_bytes_a_value() -> None:
    link = Link("toy", latency=3, bandwidth=40, source="none")
    assert reduce_seconds(link, torch.tensor([0, 4]), 10, 8).tolist() == [3, 5]
    assert reduce_seconds(link, torch.tensor([0, 4]), 10, 1).tolist() == [0, 0]
