"""Every fault of a call is refused before any launch, with the argument's name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kdtree_engine.arguments import check_arguments, least_mask_elements


def a_call(**changes: object) -> dict[str, Any]:
    """Two requests of 3 tree nodes each, prefixes of 4 and 0 tokens, a full mask."""
    call: dict[str, Any] = {
        "q": torch.zeros(6, 8, 576, dtype=torch.bfloat16),
        "kv_pool": torch.zeros(20, 1, 576, dtype=torch.bfloat16),
        "qo_indptr": torch.tensor([0, 3, 6], dtype=torch.int32),
        "kv_indptr": torch.tensor([0, 4, 4], dtype=torch.int32),
        "kv_indices": torch.arange(4),
        "draft_slots": torch.arange(4, 10),
        "mask": torch.ones(3 * 7 + 9, dtype=torch.uint8),
        "mask_indptr": torch.tensor([0, 21, 30]),
        "sm_scale": 0.1,
        "v_head_dim": 512,
        "max_nodes": None,
        "out": None,
    }
    return call | changes


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mask": torch.ones(30, dtype=torch.bool)},
        {"mask": torch.ones(6, dtype=torch.int64)},
        {"mask": None, "mask_indptr": None},
        {"kv_indices": None},
        {"q": torch.zeros(6, 8, 576), "kv_pool": torch.zeros(20, 576)},
        {"max_nodes": 3, "sm_scale": 1, "out": torch.zeros(6, 8, 512).bfloat16()},
    ],
)
def test_good_arguments_pass(changes: dict[str, object]) -> None:
    check_arguments(**a_call(**changes))


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"q": [1.0]}, TypeError, "q: expected a tensor, got list"),
        (
            {"q": torch.zeros(6, 8, 576, dtype=torch.int32)},
            TypeError,
            "q: expected dtype bfloat16 or float16 or float32 or float64, got int32",
        ),
        (
            {"q": torch.zeros(6, 8, 192, dtype=torch.bfloat16)},
            ValueError,
            r"q: expected shape \[num_tokens, heads >= 1, 576\], got \[6, 8, 192\]",
        ),
        (
            {"q": torch.zeros(6, 8 * 576, dtype=torch.bfloat16)},
            ValueError,
            r"q: expected shape .*, got \[6, 4608\]",
        ),
        (
            {"q": torch.zeros(8, 6, 576, dtype=torch.bfloat16).transpose(0, 1)},
            ValueError,
            r"q: expected contiguous strides, got \(576, 3456, 1\)",
        ),
        (
            {"kv_pool": torch.zeros(20, 1, 576, dtype=torch.float16)},
            TypeError,
            "kv_pool: expected dtype bfloat16, got float16",
        ),
        (
            {"kv_pool": torch.zeros(20, 2, 576, dtype=torch.bfloat16)},
            ValueError,
            r"kv_pool: expected shape \[num_slots, 576\] or \[num_slots, 1, 576\]",
        ),
        (
            {"kv_pool": torch.zeros(20, 577, dtype=torch.bfloat16)[:, :576]},
            ValueError,
            "kv_pool: expected contiguous strides",
        ),
        (
            {"kv_pool": torch.zeros(20, 576, dtype=torch.bfloat16, device="meta")},
            ValueError,
            "kv_pool: expected device cpu, that of q, got meta",
        ),
        (
            {"qo_indptr": torch.tensor([0.0, 3.0, 6.0])},
            TypeError,
            "qo_indptr: expected dtype int32 or int64, got float32",
        ),
        ({"qo_indptr": torch.empty(0, dtype=torch.int32)}, ValueError, "qo_indptr: expected shape"),
        (
            {"kv_indptr": torch.tensor([0, 4])},
            ValueError,
            r"kv_indptr: expected shape \[3\].*got \[2\]",
        ),
        (
            {"kv_indices": torch.zeros(2, 2, dtype=torch.int64)},
            ValueError,
            "kv_indices: expected shape one dimension",
        ),
        (
            {"kv_indices": torch.arange(8)[::2]},
            ValueError,
            "kv_indices: expected contiguous strides",
        ),
        (
            {"kv_indices": torch.zeros(4, dtype=torch.int16)},
            TypeError,
            "kv_indices: expected dtype int32 or int64, got int16",
        ),
        (
            {"draft_slots": torch.arange(5)},
            ValueError,
            r"draft_slots: expected shape \[6\], one slot for each row of q, got \[5\]",
        ),
        ({"mask_indptr": None}, ValueError, "mask_indptr: expected a tensor where mask is given"),
        ({"mask": None}, ValueError, "mask_indptr: expected None where mask is None"),
        ({"mask": torch.ones(30)}, TypeError, "mask: expected dtype uint8 or bool or int64"),
        ({"mask": torch.ones(5, 6).bool()}, ValueError, "mask: expected shape one dimension"),
        (
            {"mask_indptr": torch.tensor([0, 21])},
            ValueError,
            r"mask_indptr: expected shape \[3\], as qo_indptr, got \[2\]",
        ),
        ({"sm_scale": "0.1"}, TypeError, "sm_scale: expected a float, got str"),
        ({"sm_scale": float("nan")}, ValueError, "sm_scale: expected a finite number, got nan"),
        ({"v_head_dim": 576}, ValueError, "v_head_dim: expected 512, got 576"),
        ({"max_nodes": 0}, ValueError, "max_nodes: expected 1..128, got 0"),
        ({"max_nodes": 129}, ValueError, "max_nodes: expected 1..128, got 129"),
        ({"max_nodes": 3.0}, TypeError, "max_nodes: expected an int or None, got float"),
        (
            {"out": torch.zeros(6, 8, 576, dtype=torch.bfloat16)},
            ValueError,
            r"out: expected shape \[6, 8, 512\], got \[6, 8, 576\]",
        ),
        (
            {"out": torch.zeros(6, 8, 512)},
            TypeError,
            "out: expected dtype bfloat16, got float32",
        ),
    ],
)
def test_each_fault_names_its_argument(
    changes: dict[str, object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        check_arguments(**a_call(**changes))


@pytest.mark.parametrize("trees", [[1], [3, 9, 33], [65] * 4, [1, 128]])
def test_the_least_mask_is_never_more_than_real_trees_need(trees: list[int]) -> None:
    nodes, batch = sum(trees), len(trees)
    assert least_mask_elements(nodes, batch, packed=False) <= sum(tree**2 for tree in trees)
    words = sum(tree * -(-tree // 64) for tree in trees)
    assert least_mask_elements(nodes, batch, packed=True) <= words


def test_the_least_mask_of_equal_trees_is_exact() -> None:
    assert least_mask_elements(65 * 4, 4, packed=False) == 4 * 65**2
    assert least_mask_elements(9, 1, packed=True) == 9
    assert least_mask_elements(5, 0, packed=False) == 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (torch.ones(17, dtype=torch.uint8), "at least 18 bytes for 6 rows of q in 2 requests"),
        (torch.ones(5, dtype=torch.int64), "at least 6 words for 6 rows of q in 2 requests"),
    ],
)
def test_a_short_mask_on_a_gpu_is_seen_without_waiting(mask: torch.Tensor, text: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    call = {
        name: value.cuda() if isinstance(value, torch.Tensor) else value
        for name, value in a_call(mask=mask).items()
    }
    with pytest.raises(ValueError, match=f"mask: expected {text}, got .*: it is too short"):
        check_arguments(**call)
