"""What tests of compiled C++ share: trees as the struct `TreeOutputs` of csrc_trees/select.h."""

from __future__ import annotations

import ctypes

import torch

from kdtree_engine.ops import DraftTrees

__all__ = ["OUTPUTS", "TreeOutputs", "junk_trees", "outputs_of", "pointer"]

OUTPUTS = (
    "tokens",
    "parents",
    "depths",
    "positions",
    "log_weights",
    "counts",
    "retrieve_index",
    "retrieve_next_token",
    "retrieve_next_sibling",
    "draft_mask",
    "packed_mask",
    "full_mask",
)


class TreeOutputs(ctypes.Structure):
    """`TreeOutputs` of select.h."""

    _fields_ = [*((name, ctypes.c_void_p) for name in OUTPUTS), ("nodes", ctypes.c_int)]


def pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    """Where a tensor's first element lies; null for None."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def junk_trees(batch: int, depth: int, budget: int, prefixes: torch.Tensor) -> DraftTrees:
    """Outputs that hold something else before; the full mask holds ones."""
    nodes = budget + 1

    def junk(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full(shape, 77, dtype=dtype)

    return DraftTrees(
        **{name: junk(batch, nodes) for name in OUTPUTS[:4]},
        log_weights=junk(batch, nodes, dtype=torch.float64),
        counts=junk(batch),
        **{name: junk(batch, nodes) for name in OUTPUTS[6:9]},
        draft_mask=junk(batch * nodes * nodes, dtype=torch.uint8),
        packed_mask=junk(batch * nodes * -(-nodes // 64)),
        full_mask=torch.ones(nodes * int((prefixes + nodes).sum()), dtype=torch.uint8),
        prefix_lengths=prefixes,
        max_depth=depth,
    )


def outputs_of(trees: DraftTrees) -> TreeOutputs:
    """The struct that points at a batch's tensors."""
    return TreeOutputs(*(pointer(getattr(trees, name)).value for name in OUTPUTS), trees.nodes)
