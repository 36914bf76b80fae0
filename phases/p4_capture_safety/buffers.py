"""A server's static buffers, and draws of batches that fill them, for replays of one graph."""

from __future__ import annotations

import dataclasses

import torch

from kdtree_engine.reference.masks import MaskLayout
from phases.attention_cases import AttentionCase, AttentionInputs, make_inputs

__all__ = ["Capacity", "StaticBuffers", "draw_batch"]


@dataclasses.dataclass(frozen=True)
class Capacity:
    """What one captured graph can take: as SGLang sizes its buffers for one batch size."""

    requests: int = 4
    nodes: int = 17
    prefix: int = 3000
    heads: int = 8
    layout: MaskLayout = MaskLayout.FULL

    @property
    def rows(self) -> int:
        return self.requests * self.nodes

    @property
    def slots(self) -> int:
        return 2 * (self.requests * self.prefix + self.rows)


class StaticBuffers:
    """The operation's arguments at their largest, filled anew for every replay.

    indptr_dtype: of qo_indptr and kv_indptr; slot_dtype: of kv_indices and draft_slots.
    """

    def __init__(
        self,
        capacity: Capacity,
        *,
        device: torch.device,
        indptr_dtype: torch.dtype,
        slot_dtype: torch.dtype,
    ) -> None:
        size = capacity
        mask_rows = size.nodes * (size.prefix + size.nodes)
        packed = size.layout is MaskLayout.PACKED
        self.capacity, self.device = capacity, device
        self.q = torch.zeros(size.rows, size.heads, 576, dtype=torch.bfloat16, device=device)
        self.kv_pool = torch.zeros(size.slots, 576, dtype=torch.bfloat16, device=device)
        self.qo_indptr = torch.zeros(size.requests + 1, dtype=indptr_dtype, device=device)
        self.kv_indptr = torch.zeros(size.requests + 1, dtype=indptr_dtype, device=device)
        self.kv_indices = torch.zeros(size.requests * size.prefix, dtype=slot_dtype, device=device)
        self.draft_slots = torch.zeros(size.rows, dtype=slot_dtype, device=device)
        self.mask = torch.zeros(
            size.requests * mask_rows,
            dtype=torch.int64 if packed else torch.uint8,
            device=device,
        )
        self.mask_indptr = torch.zeros(size.requests + 1, dtype=torch.int64, device=device)
        self.out = torch.zeros(size.rows, size.heads, 512, dtype=torch.bfloat16, device=device)
        self.lse = torch.zeros(size.rows, size.heads, dtype=torch.float32, device=device)

    def tensors(self) -> tuple[torch.Tensor, ...]:
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

    def fill(self, inputs: AttentionInputs) -> None:
        """Put a batch in front and leave behind it what the last one left.

        Requests that are not there have no nodes and no prefix: their offsets repeat the last.
        """
        self.kv_pool.copy_(inputs.kv_pool.view(-1, 576))
        for mine, theirs in (
            (self.q, inputs.q),
            (self.kv_indices, inputs.kv_indices),
            (self.draft_slots, inputs.draft_slots),
            (self.mask, inputs.mask),
        ):
            assert theirs is not None
            mine[: theirs.shape[0]] = theirs
        for mine, theirs in (
            (self.qo_indptr, inputs.qo_indptr),
            (self.kv_indptr, inputs.kv_indptr),
            (self.mask_indptr, inputs.mask_indptr),
        ):
            assert theirs is not None
            mine[: theirs.shape[0]] = theirs
            mine[theirs.shape[0] :] = theirs[-1]

    def poison_outputs(self) -> None:
        self.out.fill_(torch.nan)
        self.lse.fill_(torch.nan)


def draw_batch(
    capacity: Capacity, generator: torch.Generator, device: torch.device
) -> tuple[AttentionCase, AttentionInputs]:
    """A batch within the capacity: other lengths, trees, masks, slots, and often fewer requests."""

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    requests = number(1, capacity.requests)
    trees = tuple(number(1, capacity.nodes) for _ in range(requests))
    # Lengths from all scales: a third are short, as splits are then empty.
    prefixes = tuple(
        number(0, (capacity.prefix, capacity.prefix // 20, 20)[number(0, 2)])
        for _ in range(requests)
    )
    case = AttentionCase(
        f"T={trees} L={prefixes}",
        trees,
        prefixes,
        heads=capacity.heads,
        layout=capacity.layout,
        pool_slots=None,
    )
    inputs = make_inputs(case, dtype=torch.bfloat16, device=device, generator=generator)
    return case, _in_pool_of(inputs, capacity.slots)


def _in_pool_of(inputs: AttentionInputs, slots: int) -> AttentionInputs:
    """The same inputs in a pool of the static size; its further slots hold NaN."""
    pool = inputs.kv_pool.new_full((slots, 576), torch.nan)
    pool[: inputs.kv_pool.shape[0]] = inputs.kv_pool.view(-1, 576)
    return dataclasses.replace(inputs, kv_pool=pool)
