"""Split-KV tree-verify attention in torch: the CPU implementation of the operation.

It is the kernel's algorithm and not only its formula. The KV tokens of a request, its prefix and
then its tree nodes, are cut into the splits that `schedule` names; each split gives a partial
output with its maximum and softmax sum; a merge weighs the partials together. So what can go wrong
in the kernel's partition and merge can go wrong, and is tested, here.

Sums are float32, as the kernel's, but float64 for float64 inputs: then a single token too many or
too few shows among 200,000.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from kdtree_engine.arguments import LATENT_DIM
from kdtree_engine.contents import MaskRows, check_contents
from kdtree_engine.schedule import Grid, splits_of_batch

__all__ = [
    "Partial",
    "merge_partials",
    "partial_attention",
    "split_kv_attention",
    "visible_nodes",
]

PROCESSORS = 188
"""The schedule needs a number of processors: the RTX PRO 6000's, the GPU that matters."""


def split_kv_attention(
    q: torch.Tensor,
    kv_pool: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor | None,
    draft_slots: torch.Tensor,
    mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    sm_scale: float,
    max_nodes: int,
    deterministic: bool,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    processors: int = PROCESSORS,
) -> None:
    """Writes `out` and `lse`; the arguments are those of `tree_verify_attention`.

    Rows that no request owns get zeros and an lse of -inf. ValueError for contents that are wrong.
    """
    pool = kv_pool.view(-1, kv_pool.shape[-1])
    qo, kv, mask_rows = check_contents(
        q.shape[0],
        pool.shape[0],
        qo_indptr,
        kv_indptr,
        kv_indices,
        draft_slots,
        mask,
        mask_indptr,
        max_nodes,
    )
    heads = q.shape[1]
    sums = torch.float64 if q.dtype is torch.float64 else torch.float32
    # Rows that no request owns.
    out[qo[-1] :] = 0
    if lse is not None:
        lse[qo[-1] :] = -torch.inf

    nodes = [end - begin for begin, end in itertools.pairwise(qo)]
    prefixes = [end - begin for begin, end in itertools.pairwise(kv)]
    grid = Grid.of(max_nodes * heads, processors)
    batch_splits = splits_of_batch(prefixes, nodes, heads, grid, deterministic=deterministic)
    for request, splits in enumerate(batch_splits):
        if not splits:
            continue
        rows = slice(qo[request], qo[request + 1])
        slots = _slots(kv_indices, kv[request], kv[request + 1], draft_slots[rows])
        place = mask_rows[request] if mask_rows else MaskRows(0, 0)
        visible = visible_nodes(mask, place, nodes[request])
        # Rows that share one pass over the KV: every head of every node.
        packed = q[rows].to(sums).reshape(nodes[request] * heads, -1)
        visible_rows = visible.repeat_interleave(heads, dim=0)
        partials = []
        for first_stage, last_stage in splits:
            begin = first_stage * grid.block_tokens
            end = min(last_stage * grid.block_tokens, len(slots))
            seen = _columns(visible_rows, begin - prefixes[request], end - prefixes[request])
            partials.append(
                partial_attention(packed, pool[slots[begin:end]].to(sums), seen, sm_scale)
            )
        merged, merged_lse = merge_partials(partials)
        out[rows] = merged.view(nodes[request], heads, LATENT_DIM).to(out.dtype)
        if lse is not None:
            lse[rows] = merged_lse.view(nodes[request], heads)


@dataclasses.dataclass(frozen=True)
class Partial:
    """What one split leaves for each packed row, in the dtype of sums.

    out: [rows, 512], not divided by the sum. maximum: [rows], the greatest score, -inf where a row
    sees nothing in this split. total: [rows], the sum of exponentials below that maximum.
    """

    out: torch.Tensor
    maximum: torch.Tensor
    total: torch.Tensor


def partial_attention(
    q: torch.Tensor, kv: torch.Tensor, visible: torch.Tensor | None, sm_scale: float
) -> Partial:
    """One split of a request: what its packed rows make of a run of its tokens.

    q: [rows, 576]. kv: [tokens, 576], K and V at once. Both in the dtype of sums.
    visible: [rows, tokens] bool, or None where every row sees every token.
    """
    scores = (q @ kv.T) * sm_scale
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    maximum = scores.amax(dim=1)
    weights = (scores - _finite(maximum)[:, None]).exp()
    return Partial(weights @ kv[:, :LATENT_DIM], maximum, weights.sum(dim=1))


def merge_partials(partials: Sequence[Partial]) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, 512] and the lse [rows] of the splits of one request.

    A split in which a row sees nothing does not count for it, whatever it left. A row that sees
    nothing at all gets zeros and an lse of -inf.
    """
    maxima = torch.stack([partial.maximum for partial in partials])
    maximum = maxima.amax(dim=0)
    factors = (maxima - _finite(maximum)).exp()
    total = torch.zeros_like(maximum)
    out = torch.zeros_like(partials[0].out)
    for partial, factor in zip(partials, factors, strict=True):
        counts = factor != 0  # NaN counts: what is wrong in a row that is seen must show
        total += torch.where(counts, partial.total * factor, 0.0)
        out += torch.where(counts[:, None], partial.out * factor[:, None], 0.0)
    seen = total != 0
    out = torch.where(seen[:, None], out / total[:, None], 0.0)
    return out, torch.where(seen, maximum + total.log(), -torch.inf)


def visible_nodes(mask: torch.Tensor | None, place: MaskRows, nodes: int) -> torch.Tensor:
    """[T, T] bool: whether node t sees node j, of the request whose mask rows lie at `place`."""
    if mask is None:
        return torch.ones(nodes, nodes, dtype=torch.bool).tril()
    rows = mask[place.start : place.start + nodes * place.stride].view(nodes, place.stride)
    if mask.dtype is not torch.int64:
        return rows[:, place.stride - nodes :] != 0
    bits = (rows[:, :, None] >> torch.arange(64)) & 1
    return bits.view(nodes, place.stride * 64)[:, :nodes] != 0


def _finite(maximum: torch.Tensor) -> torch.Tensor:
    """Zero for a maximum of -inf, as -inf - -inf is NaN where nothing is seen."""
    return maximum.masked_fill(maximum == -torch.inf, 0.0)


def _slots(
    kv_indices: torch.Tensor | None, begin: int, end: int, draft_slots: torch.Tensor
) -> torch.Tensor:
    """int64 pool slots of a request's KV tokens: its prefix, then its tree nodes."""
    prefix = torch.arange(begin, end) if kv_indices is None else kv_indices[begin:end].long()
    return torch.cat((prefix, draft_slots.long()))


def _columns(visible_rows: torch.Tensor, begin: int, end: int) -> torch.Tensor | None:
    """Visibility of tokens [begin, end), numbered from the first tree node; None: all visible."""
    if end <= 0:
        return None
    tree = visible_rows[:, max(begin, 0) : end]
    if begin >= 0:
        return tree
    return torch.cat((tree.new_ones(tree.shape[0], -begin), tree), dim=1)
