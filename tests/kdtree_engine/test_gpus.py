"""The table of GPUs and links."""

from __future__ import annotations

import pytest
import torch

from kdtree_engine.errors import UnknownName
from kdtree_engine.gpus import GPUS, LINKS, Link, find_gpu
from kdtree_engine.tuning import table_of


def test_every_preset_says_where_it_is_from_and_has_a_link_and_a_tuning_table() -> None:
    for name, gpu in GPUS.items():
        assert (gpu.name, find_gpu(name)) == (name, gpu)
        assert gpu.source
        assert LINKS[gpu.link].source
        assert gpu.mma_flops <= gpu.flops
        assert table_of(gpu.architecture) is not None
    with pytest.raises(UnknownName, match="did you mean rtx-5090"):
        find_gpu("rtx5090")


def test_fewer_ranks_send_less_of_a_message_and_one_sends_nothing() -> None:
    link = Link("toy", latency=3, bandwidth=10, source="none")
    assert link.seconds(70.0) == link.seconds(70.0, ranks=8) == 10
    assert link.seconds(70.0, ranks=2) == pytest.approx(3 + 7 * (1 / 2) / (7 / 8))
    assert link.seconds(70.0, ranks=1) == 0
    assert link.seconds(torch.tensor([0.0, 70.0])).tolist() == [3, 10]
