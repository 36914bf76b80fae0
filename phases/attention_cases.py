"""Hard inputs for a tree-verify attention, made so that a wrong implementation cannot pass.

- Slots are scattered, and every slot that no request names holds NaN.
- Trees branch, so that siblings share a position and index order is not ancestry.
- UNIFORM content makes all scores equal: each row is then the plain mean of the rows of V that its
  node sees, and a single key too many or too few shows.
- Sizes are no powers of two, prefixes may be empty, batches are ragged.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterator, Sequence

import torch

from kdtree_engine.reference.masks import MaskLayout, pack_masks, tree_mask

__all__ = [
    "FIRST_OVERFLOWING_SLOT",
    "AttentionCase",
    "AttentionInputs",
    "Content",
    "Shape",
    "huge_slot_case",
    "make_inputs",
    "random_parents",
    "standard_cases",
]

FIRST_OVERFLOWING_SLOT = -(-(2**31) // 576)
"""3,728,271: from here on, slot * 576 does not fit a signed 32-bit integer."""

_Arguments = tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor | None,
    torch.Tensor,
    torch.Tensor | None,
    torch.Tensor | None,
]
_I32, _I64 = torch.int32, torch.int64
_INDEX_DTYPES = (
    (_I32, _I32, _I64, _I64, _I64),  # SGLang, eager
    (_I64, _I32, _I64, _I64, _I64),  # SGLang, captured graph
    (_I32,) * 5,
    (_I64,) * 5,
    (_I32, _I64, _I32, _I64, _I32),
    (_I64, _I32, _I32, _I32, _I64),
    (_I64, _I64, _I64, _I32, _I32),
)


class Content(enum.Enum):
    """What q and the pool hold."""

    RANDOM = "random"
    UNIFORM = "uniform"
    """All scores are 0: q is 0 in the latent part, the pool's rows are 0 in the rope part."""


class Shape(enum.Enum):
    """What the trees look like."""

    MIXED = "mixed"
    FAN = "fan"
    """All nodes are children of the root: all share one position."""
    CHAIN = "chain"


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """One call. `trees` and `prefixes` are T and L of each request; both may be 0.

    layout: of the mask, None for no mask (a causal chain; `shape` must be CHAIN).
    index_dtypes: of (qo_indptr, kv_indptr, kv_indices, draft_slots, mask_indptr).
    shared_prefix: tokens at the front of each prefix whose slots all requests share.
    padded_rows: rows of q behind the last request.
    spare: stale elements behind the end of kv_indices and of the mask, as in a persistent buffer.
    pool_slots: size of the pool; None for about twice what is used.
    """

    name: str
    trees: tuple[int, ...]
    prefixes: tuple[int, ...]
    heads: int = 8
    layout: MaskLayout | None = MaskLayout.FULL
    content: Content = Content.RANDOM
    shape: Shape = Shape.MIXED
    index_dtypes: tuple[torch.dtype, ...] = (torch.int64,) * 5
    byte_dtype: torch.dtype = torch.uint8
    shared_prefix: int = 0
    padded_rows: int = 0
    spare: int = 0
    pool_slots: int | None = None
    pool_3d: bool = False
    latent: int = 512
    rope: int = 64

    @property
    def sm_scale(self) -> float:
        """That of Kimi K2.6 at the full width: 1 / sqrt(128 + 64)."""
        return float((128 * self.latent / 512 + self.rope) ** -0.5)


@dataclasses.dataclass
class AttentionInputs:
    """Arguments of one call, and `parents`: the trees that the mask was made of."""

    q: torch.Tensor
    kv_pool: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor | None
    draft_slots: torch.Tensor
    mask: torch.Tensor | None
    mask_indptr: torch.Tensor | None
    parents: list[list[int]]

    def tensors(self) -> _Arguments:
        """The positional arguments of `tree_verify_attention`, in order."""
        return (
            self.q,
            self.kv_pool,
            self.qo_indptr,
            self.kv_indptr,
            self.kv_indices,
            self.draft_slots,
            self.mask,
            self.mask_indptr,
        )

    def overwrite(self, other: AttentionInputs) -> None:
        """Put the content of `other`, of the same case, into these very tensors."""
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            if mine is not None and theirs is not None and mine is not theirs:
                mine.copy_(theirs)
        self.parents = other.parents


def random_parents(
    nodes: int, shape: Shape, generator: torch.Generator, branching: float = 0.5
) -> list[int]:
    """Parents of a tree; with `branching`, how often a MIXED node does not just follow the last."""
    if shape is Shape.CHAIN:
        return [node - 1 for node in range(nodes)]
    if shape is Shape.FAN:
        return [-1, *[0] * (nodes - 1)][:nodes]
    draws = torch.rand(nodes, 2, generator=generator).tolist()
    return [
        int(where * node) if node and turn < branching else node - 1
        for node, (turn, where) in enumerate(draws)
    ]


def make_inputs(
    case: AttentionCase,
    *,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
    contiguous_view: bool = False,
) -> AttentionInputs:
    """Inputs of a case, drawn from a CPU generator, so that they are the same on every device.

    contiguous_view: `kv_indices` is None, as entry i of the prefixes lies in slot i.
    """
    dim = case.latent + case.rope
    rows = sum(case.trees) + case.padded_rows
    prefix_total = sum(case.prefixes)
    slots = case.pool_slots or 2 * (prefix_total + rows) + 17
    draft_slots, kv_indices = _place(case, slots, generator, contiguous_view)

    # In float64 every bit is drawn: values that fit float32 would not show a rounding to it.
    drawn = torch.float64 if dtype == torch.float64 else torch.float32
    q = torch.randn(rows, case.heads, dim, generator=generator, dtype=drawn).to(dtype)
    written = torch.randn(
        len(draft_slots) + len(kv_indices), dim, generator=generator, dtype=drawn
    ).to(dtype)
    if case.content is Content.UNIFORM:
        q[..., : case.latent] = 0
        written[:, case.latent :] = 0
    used = torch.cat([draft_slots, kv_indices])
    pool = torch.empty(slots, dim, dtype=dtype, device=device)
    if case.pool_slots is None or device.type != "cpu":
        # A huge pool on a CPU is left untouched, as its pages would all have to be there.
        pool.fill_(torch.nan)
    pool[used.to(device)] = written.to(device)

    parents = [random_parents(nodes, case.shape, generator) for nodes in case.trees]
    mask, starts = None, None
    if case.layout is not None:
        masks = [tree_mask(torch.tensor(tree, dtype=torch.int64)) for tree in parents]
        mask, starts = pack_masks(masks, case.prefixes, case.layout, case.byte_dtype)
        mask = torch.cat([mask, torch.ones(case.spare, dtype=mask.dtype)]).to(device)
        starts = starts.to(device, case.index_dtypes[4])
    qo_dtype, kv_dtype, indices_dtype, slots_dtype, _ = case.index_dtypes
    stale = torch.full((case.spare,), 2**30)
    # Padded rows belong to no request: whatever their slot says must not be followed.
    padded = torch.zeros(case.padded_rows, dtype=torch.int64)
    return AttentionInputs(
        q=q.to(device),
        kv_pool=pool[:, None] if case.pool_3d else pool,
        qo_indptr=_indptr(case.trees, qo_dtype, device),
        kv_indptr=_indptr(case.prefixes, kv_dtype, device),
        kv_indices=None
        if contiguous_view
        else torch.cat([kv_indices, stale]).to(device, indices_dtype),
        draft_slots=torch.cat([draft_slots, padded]).to(device, slots_dtype),
        mask=mask,
        mask_indptr=starts,
        parents=parents,
    )


def standard_cases(heads: Sequence[int] = (8,)) -> list[AttentionCase]:
    """The cases that every implementation passes through; `heads` are taken in turn.

    Every T of 1, 3, 9, 17, 33, 65 with every L of 0, 1, 21, 300; ragged batches; every mask layout
    and index dtype; shared prefixes, empty requests, padded rows, word borders, a long prefix.
    """
    cases = list(_grid())
    ragged: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = [
        ("ragged", (1, 3, 9, 17), (0, 1, 21, 300)),
        ("ragged, long first", (65, 1, 33), (300, 0, 21)),
        ("equal trees", (9, 9, 9, 9), (21, 300, 0, 1)),
    ]
    for name, trees, prefixes in ragged:
        for layout, content in itertools.product(MaskLayout, Content):
            cases.append(
                AttentionCase(
                    f"{name}, {layout.value} mask, {content.value}",
                    trees,
                    prefixes,
                    layout=layout,
                    content=content,
                )
            )
    cases += [
        AttentionCase(
            "chains without a mask", (3, 17, 1), (5, 0, 40), layout=None, shape=Shape.CHAIN
        ),
        AttentionCase("siblings only", (33, 9), (21, 1), content=Content.UNIFORM, shape=Shape.FAN),
        AttentionCase("empty requests", (0, 3, 0, 9, 0), (0, 21, 7, 0, 0)),
        AttentionCase("buffers longer than needed", (9, 3), (21, 7), spare=100),
        AttentionCase("padded rows", (3, 9), (21, 0), padded_rows=5),
        AttentionCase("padded rows alone", (), (), padded_rows=2),
        AttentionCase("shared prefix", (9, 17, 3), (150, 128, 130), shared_prefix=128),
        AttentionCase("word border", (64, 63, 65), (3, 0, 2), layout=MaskLayout.PACKED),
        AttentionCase("largest tree", (128,), (50,), layout=MaskLayout.PACKED),
        AttentionCase("long prefix", (9,), (4100,), content=Content.UNIFORM),
        AttentionCase("long and short", (9, 3), (2500, 1), pool_3d=True),
    ]
    return [
        dataclasses.replace(case, heads=heads[place % len(heads)])
        for place, case in enumerate(cases)
    ]


def huge_slot_case(heads: int = 8) -> AttentionCase:
    """Slots beyond the reach of int32 arithmetic; 4.4 GB of pool, on a CPU only as addresses."""
    return AttentionCase(
        "slots from 3,728,271 on",
        (9, 3),
        (21, 70),
        heads=heads,
        pool_slots=FIRST_OVERFLOWING_SLOT + 4096,
    )


def _grid() -> Iterator[AttentionCase]:
    layouts = itertools.cycle(MaskLayout)
    # Cycles of lengths that share no factor, so that every pairing comes up.
    index_dtypes = itertools.cycle(_INDEX_DTYPES)
    byte_dtypes = itertools.cycle((torch.uint8, torch.bool))
    contents = itertools.cycle(
        (Content.RANDOM, Content.UNIFORM, Content.RANDOM, Content.UNIFORM, Content.RANDOM)
    )
    for nodes, prefix in itertools.product((1, 3, 9, 17, 33, 65), (0, 1, 21, 300)):
        layout, content = next(layouts), next(contents)
        yield AttentionCase(
            f"T={nodes} L={prefix}, {layout.value} mask, {content.value}",
            (nodes,),
            (prefix,),
            layout=layout,
            content=content,
            index_dtypes=next(index_dtypes),
            byte_dtype=next(byte_dtypes),
        )


def _place(
    case: AttentionCase, slots: int, generator: torch.Generator, contiguous_view: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of the nodes and of the prefixes, int64."""
    rows, prefix_total = sum(case.trees), sum(case.prefixes)
    if contiguous_view:
        behind = torch.randperm(slots - prefix_total, generator=generator)[:rows] + prefix_total
        return behind, torch.arange(prefix_total)
    first = FIRST_OVERFLOWING_SLOT if case.pool_slots is not None else 0
    order = torch.randperm(slots - first, generator=generator) + first
    draft_slots, free = order[:rows], order[rows:]
    common, free = free[: case.shared_prefix], free[case.shared_prefix :]
    parts = [torch.empty(0, dtype=torch.int64)]
    for prefix in case.prefixes:
        shared = common[:prefix]
        own = prefix - len(shared)
        parts += [shared, free[:own]]
        free = free[own:]
    return draft_slots, torch.cat(parts)


def _indptr(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(sizes)], dtype=dtype, device=device)
