"""What tree masks and their layouts must pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from kdtree_engine.reference.masks import (
    MaskLayout,
    mask_layout,
    pack_masks,
    parents_from_mask,
    tree_mask,
    unpack_masks,
)
from phases.attention_cases import Shape, random_parents
from phases.gate import Context, FailureKind, Figure, GateFailure, Unit
from phases.threads import single_threaded

__all__ = ["layouts_hold", "masks_equal_paths"]

_SIZES = (1, 2, 3, 9, 17, 33, 63, 64, 65, 128, 130)


@single_threaded
def masks_equal_paths(
    make: Callable[[torch.Tensor], torch.Tensor], ctx: Context, *, draws: int = 4
) -> list[Figure]:
    """A node sees exactly the nodes of its path, found by following parents.

    And the mask tells the tree: `parents_from_mask` gives the parents back.
    """
    trees = entries = 0
    for done, nodes in enumerate(_SIZES):
        ctx.progress(done, len(_SIZES), f"{nodes} nodes")
        generator = torch.Generator().manual_seed(ctx.seed * 1000 + done)
        for shape in Shape:
            for branching in torch.rand(draws, generator=generator).tolist():
                parents = random_parents(nodes, shape, generator, branching)
                mask = make(torch.tensor(parents))
                if mask.dtype != torch.bool or mask.shape != (nodes, nodes):
                    raise GateFailure(
                        FailureKind.SHAPE,
                        f"the mask of {nodes} nodes is {mask.dtype} {list(mask.shape)}",
                    )
                for node, row in enumerate(mask.tolist()):
                    path = _path(parents, node)
                    for other, sees in enumerate(row):
                        if sees != (other in path):
                            _fail(
                                f"node {node} {'sees' if sees else 'does not see'} node {other}, "
                                f"its path is {sorted(path)} (parents {parents})"
                            )
                if parents_from_mask(mask).tolist() != parents:
                    _fail(f"the mask does not give back its tree (parents {parents})")
                trees, entries = trees + 1, entries + nodes * nodes
    ctx.progress(len(_SIZES), len(_SIZES), "done")
    return [Figure("mask entries", entries, Unit.COUNT), Figure("trees", trees, Unit.COUNT)]


@single_threaded
def layouts_hold(ctx: Context, *, draws: int = 12) -> list[Figure]:
    """Every layout says entry by entry what its definition says, and converts back and across.

    Malformed masks must be refused, each with a ValueError that names the argument.
    """
    entries = 0
    for draw in range(draws):
        ctx.progress(draw, draws, "ragged batches")
        generator = torch.Generator().manual_seed(ctx.seed * 1000 + draw)
        count = 1 + draw % 4
        sizes = [
            _SIZES[int(one)] for one in torch.randint(len(_SIZES), (count,), generator=generator)
        ]
        if draw % 5 == 4:
            sizes[0] = 0  # a request of no nodes
        prefixes = torch.randint(0, 40, (count,), generator=generator).tolist()
        masks = [
            tree_mask(
                torch.tensor(random_parents(nodes, Shape.MIXED, generator), dtype=torch.int64)
            )
            for nodes in sizes
        ]
        for layout in MaskLayout:
            flat, indptr = pack_masks(masks, prefixes, layout)
            entries += _equals_definition(flat, indptr.tolist(), masks, prefixes, layout)
            # A longer, stale buffer must make no difference.
            longer = torch.cat([flat, torch.ones(50, dtype=flat.dtype)])
            for other in MaskLayout:
                try:
                    back = unpack_masks(longer, indptr, sizes, prefixes)
                    across, starts = pack_masks(back, prefixes, other)
                    again = unpack_masks(across, starts, sizes, prefixes)
                except ValueError as error:
                    _fail(f"{layout.value} to {other.value} is refused: {error}")
                for request, (mask, found) in enumerate(zip(masks, again, strict=True)):
                    if not torch.equal(mask, found):
                        _fail(f"{layout.value} to {other.value} changes the mask of {request}")
    refused = _malformed_are_refused()
    ctx.progress(draws, draws, "done")
    return [
        Figure("mask entries", entries, Unit.COUNT),
        Figure("malformed masks refused", refused, Unit.COUNT),
    ]


def _equals_definition(
    flat: torch.Tensor,
    indptr: Sequence[int],
    masks: Sequence[torch.Tensor],
    prefixes: Sequence[int],
    layout: MaskLayout,
) -> int:
    """Read `flat` by the table of the layouts, element by element; how many there were."""
    values, entries = flat.tolist(), 0
    sizes = [len(mask) for mask in masks]
    told = mask_layout(flat.dtype, indptr, sizes, prefixes)
    same_bytes = not any(nodes * prefix for nodes, prefix in zip(sizes, prefixes, strict=True))
    if told is not layout and not (same_bytes and told is MaskLayout.DRAFT):
        _fail(f"a {layout.value} mask is taken for {told.value}")
    for request, (mask, prefix) in enumerate(zip(masks, prefixes, strict=True)):
        start, nodes = indptr[request], len(mask)
        words = (nodes + 63) // 64
        for node, row in enumerate(mask.tolist()):
            for other, sees in enumerate(row):
                if layout is MaskLayout.FULL:
                    found = values[start + node * (prefix + nodes) + prefix + other] == 1
                elif layout is MaskLayout.DRAFT:
                    found = values[start + node * nodes + other] == 1
                else:
                    word = values[start + node * words + other // 64] % 2**64
                    found = word >> other % 64 & 1 == 1
                if found != sees:
                    _fail(f"{layout.value}: request {request}, node {node}, node {other}")
                entries += 1
            if layout is MaskLayout.FULL:
                columns = start + node * (prefix + nodes)
                if any(value != 1 for value in values[columns : columns + prefix]):
                    _fail(f"full: request {request}, node {node} does not see the whole prefix")
                entries += prefix
    return entries


def _malformed_are_refused() -> int:
    mask = tree_mask(torch.tensor([-1, 0, 0, 1]))
    full, full_starts = pack_masks([mask], [3], MaskLayout.FULL)
    draft, draft_starts = pack_masks([mask], [3], MaskLayout.DRAFT)
    packed, packed_starts = pack_masks([mask], [3], MaskLayout.PACKED)
    two, two_starts = pack_masks([mask, mask], [3, 2], MaskLayout.FULL)

    def hidden(request: int, node: int, column: int) -> Callable[[], object]:
        holed = two.clone()
        holed[int(two_starts[request]) + node * ((3, 2)[request] + 4) + column] = 0
        return lambda: unpack_masks(holed, two_starts, [4, 4], [3, 2])

    attempts: dict[str, Callable[[], object]] = {
        "a mask that is too short": lambda: unpack_masks(full[:-1], full_starts, [4], [3]),
        "steps of no layout": lambda: unpack_masks(full, full_starts - 1, [4], [3]),
        "the steps of another prefix": lambda: unpack_masks(full, full_starts, [4], [2]),
        **{
            f"a hidden prefix column {column} of node {node} of request {request}": hidden(
                request, node, column
            )
            for request, prefix in enumerate((3, 2))
            for node in range(4)
            for column in range(prefix)
        },
        "a byte of 2": lambda: unpack_masks(draft * 2, draft_starts, [4], [3]),
        "a bit beyond the nodes": lambda: unpack_masks(packed | 16, packed_starts, [4], [3]),
        "a float mask": lambda: unpack_masks(draft.float(), draft_starts, [4], [3]),
        "two layouts in one batch": lambda: unpack_masks(
            torch.cat([full, draft]), torch.tensor([0, 28, 44]), [4, 4], [3, 3]
        ),
        "an offset too few": lambda: unpack_masks(draft, draft_starts[:1], [4], [3]),
        "a mask with two dimensions": lambda: unpack_masks(draft[None], draft_starts, [4], [3]),
        "a tree whose node precedes its parent": lambda: tree_mask(torch.tensor([-1, 2, 0])),
        "a tree of two roots": lambda: tree_mask(torch.tensor([-1, -1])),
        "a row that sees a later node": lambda: parents_from_mask(mask.t().contiguous()),
        "a row that skips an ancestor": lambda: parents_from_mask(
            torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 1]], dtype=torch.bool)
        ),
    }
    for what, attempt in attempts.items():
        try:
            attempt()
        except ValueError:
            continue
        _fail(f"{what} is accepted")
    return len(attempts)


def _path(parents: Sequence[int], node: int) -> set[int]:
    path = {node}
    while parents[node] >= 0:
        node = parents[node]
        path.add(node)
    return path


def _fail(problem: str) -> NoReturn:
    raise GateFailure(FailureKind.NUMERICAL, problem)
