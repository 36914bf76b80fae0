"""Dumps of SGLang's expert-distribution recorder, written as its release 0.5.23 writes them.

`tests/sglang/test_expert_recorder.py` has the recorder itself write them.
"""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

from kdtree_engine.errors import ConfigError
from kdtree_engine.moe.trace import read_routing

LAYERS, EXPERTS, PHYSICAL = 3, 6, 8
MAP = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1], [0, 1, 2, 3, 4, 5, 5, 4], [5, 4, 3, 2, 1, 0, 0, 0]])
"""Of physical experts to logical ones; the first layer is dense."""
TOPK = torch.full((LAYERS, 3, 8), -1, dtype=torch.int32)
TOPK[1, :2, :2] = torch.tensor([[0, 6], [5, 7]])
TOPK[2, :2, :2] = torch.tensor([[0, 6], [1, 7]])
LOGICAL = [[1, 0, 0, 0, 1, 2], [2, 0, 0, 0, 1, 1]]
"""Of TOPK, whose last row is padding."""


def stat(counts: torch.Tensor) -> dict[str, Any]:
    return {
        "rank": 0,
        "logical_count": counts,
        "average_utilization_rate_over_window": None,
    }


def detail(*records: dict[str, Any]) -> dict[str, Any]:
    shared = {"forward_pass_id": 5, "rank": 0, "gatherer_key": "primary"}
    return {
        "records": [{**shared, **one} for one in records],
        "last_physical_to_logical_map": MAP,
    }


def per_token(mode: int, topk: torch.Tensor = TOPK) -> dict[str, Any]:
    tokens = topk.shape[1]
    return {
        "input_ids": list(range(tokens)),
        "positions": list(range(tokens)),
        "extend_seq_lens": None,
        "forward_mode": mode,
        "topk_ids_of_layer": topk,
        "misc_objects": [],
        "global_physical_count": torch.zeros(LAYERS, PHYSICAL, dtype=torch.int32),
    }


def write(folder: pathlib.Path, content: object) -> pathlib.Path:
    path = folder / "expert_distribution_recorder_1.5.pt"
    torch.save(content, path)
    return path


def test_per_token_is_read_through_the_map_without_prefills(tmp_path: pathlib.Path) -> None:
    dump = detail(per_token(1), per_token(2), per_token(5))
    found = read_routing(write(tmp_path, dump), top_k=8)
    assert (found.top_k, found.layers, found.tokens.tolist()) == (2, (1, 2), [2, 2])
    assert found.counts.tolist() == [LOGICAL, LOGICAL]


def test_per_pass_is_read_through_the_map(tmp_path: pathlib.Path) -> None:
    counts = torch.zeros(LAYERS, PHYSICAL, dtype=torch.int32)
    counts[1, [0, 5, 6, 7]] = 1
    counts[2, [0, 1, 6, 7]] = 1
    dump = detail({"global_physical_count": counts})
    found = read_routing(write(tmp_path, dump), top_k=2)
    assert found.counts.tolist() == [LOGICAL]


def test_stat_counts_each_token_once_whatever_the_number_of_ranks(tmp_path: pathlib.Path) -> None:
    counts = torch.zeros(4, LAYERS, EXPERTS, dtype=torch.int32)  # a ring with two unused places
    counts[:2, 1:] = torch.tensor(LOGICAL)
    for ranks in (1, 8):
        found = read_routing(write(tmp_path, stat(counts * ranks)), top_k=2)
        assert (found.layers, found.tokens.tolist()) == ((1, 2), [2, 2])
        assert found.counts.tolist() == [LOGICAL, LOGICAL]


def test_counts_that_deepep_has_rounded_are_refused(tmp_path: pathlib.Path) -> None:
    counts = torch.tensor([[[128, 0, 0, 0, 128, 128], [256, 0, 0, 0, 128, 256]]])
    with pytest.raises(ConfigError, match="stat_approx"):
        read_routing(write(tmp_path, stat(counts)), top_k=2)


@pytest.mark.parametrize(
    "content",
    [
        [],
        7,
        {},
        {"logical_count": [1, 2]},
        stat(torch.zeros(2, LAYERS, EXPERTS, dtype=torch.int32)),
        stat(torch.ones(LAYERS, EXPERTS, dtype=torch.int32)),
        stat(torch.ones(2, LAYERS, EXPERTS)),
        stat(torch.ones(2, LAYERS, EXPERTS, dtype=torch.bool)),
        stat(torch.ones(2, LAYERS, EXPERTS, dtype=torch.int32).to_sparse()),
        stat(torch.full((2, LAYERS, EXPERTS), 2**62)),
        stat(torch.zeros(0, LAYERS, EXPERTS, dtype=torch.int32)),
        torch.ones(3),
        detail(),
        detail(per_token(1)),
        detail(per_token(2), {"forward_mode": 2}),
        detail(per_token(2)) | {"records": {"a": 1}},
        detail(per_token(2)) | {"last_physical_to_logical_map": MAP * 2**40},
        detail(per_token(2, TOPK[:2])),
        detail(per_token(2, TOPK + 9)),
        detail({"nothing": 1}),
        {"records": [1], "last_physical_to_logical_map": MAP},
        detail(per_token(2)) | {"last_physical_to_logical_map": MAP - 1},
        detail(per_token(2)) | {"last_physical_to_logical_map": None},
    ],
)
def test_another_content_is_one_line_with_the_file(tmp_path: pathlib.Path, content: object) -> None:
    path = write(tmp_path, content)
    with pytest.raises(ConfigError, match=r"expert_distribution_recorder_1\.5\.pt") as caught:
        read_routing(path, top_k=2)
    assert "\n" not in str(caught.value)


def test_a_damaged_file_and_one_with_code_in_it_are_refused(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, detail(per_token(2)))
    whole = path.read_bytes()
    for damaged in (b"", whole[:100], whole[: len(whole) // 2], b"\x80\x04." + whole, b"no dump"):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match="no dump"):
            read_routing(path, top_k=2)
    path = write(tmp_path, {"records": pathlib.PurePosixPath("/")})
    with pytest.raises(ConfigError, match="no dump"):
        read_routing(path, top_k=2)
