"""`build_draft_trees`: from a drafter's scores to the trees of a batch, ready for a verify pass."""

from __future__ import annotations

import dataclasses

import torch

from kdtree_engine.ops.arguments import check_integer, check_tensor
from kdtree_engine.ops.candidates import MAX_COLUMNS, MAX_RANKS, check_scores, top_candidates
from kdtree_engine.ops.library import may_read, tree_kernels
from kdtree_engine.ops.registry import register
from kdtree_engine.ops.selection import first_children, select_nodes, visible_nodes
from kdtree_engine.reference.masks import WORD_BITS, MaskLayout, words_per_node
from kdtree_engine.reference.tree import DraftTree

__all__ = ["MAX_BUDGET", "MAX_DEPTH", "DraftTrees", "build_draft_trees"]

MAX_BUDGET = 128
"""Nodes below the root. The attention takes 128 with the root, so 127 where it shall verify."""
MAX_DEPTH = 16

_GPU_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_BYTES = (torch.uint8, torch.bool)


@dataclasses.dataclass(frozen=True, eq=False)
class DraftTrees:
    """The draft trees of B requests, N = budget + 1 nodes in each tensor, padded behind `counts`.

    Nodes are in the order of `reference.DraftTree`: the root first, then best first. A padding node
    has parent -1, depth 0, the root's token and position, and log weight -inf; it sees itself alone
    and no retrieval array leads to it.

    tokens, parents, depths, positions: int64 [B, N]. The root's parent is -1. A position is the
        prefix length plus the depth.
    log_weights: float64 [B, N], natural log of the draft's probability of the path; 0 at the root.
    counts: int64 [B], the nodes that a tree has, the root included.
    retrieve_index, retrieve_next_token, retrieve_next_sibling: int64 [B, N], SGLang's: the node's
        row in the batch, its first child and the next child of its parent, -1 where there is none.
    draft_mask: uint8 [B * N * N], and packed_mask: int64 [B * N * ceil(N / 64)], the masks of
        `reference.masks` for B trees of N nodes; `mask_indptr` gives the offsets.
    full_mask: the tensor that the caller gave, or None.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    positions: torch.Tensor
    log_weights: torch.Tensor
    counts: torch.Tensor
    retrieve_index: torch.Tensor
    retrieve_next_token: torch.Tensor
    retrieve_next_sibling: torch.Tensor
    draft_mask: torch.Tensor
    packed_mask: torch.Tensor
    full_mask: torch.Tensor | None
    prefix_lengths: torch.Tensor
    max_depth: int

    @property
    def nodes(self) -> int:
        """N: the nodes of each request in the tensors, padding included."""
        return int(self.tokens.shape[1])

    def mask_indptr(self, layout: MaskLayout) -> torch.Tensor:
        """Where each request's mask begins, int64 [B + 1], on the trees' device, unread."""
        batch, nodes = self.tokens.shape
        number = torch.arange(batch + 1, device=self.tokens.device)
        if layout is MaskLayout.PACKED:
            return number * (nodes * words_per_node(nodes))
        steps = number * (nodes * nodes)
        if layout is MaskLayout.FULL:
            steps[1:] += self.prefix_lengths.cumsum(0) * nodes
        return steps

    def qo_indptr(self) -> torch.Tensor:
        """Rows of q of each request, int64 [B + 1]: padding nodes are verified along."""
        batch, nodes = self.tokens.shape
        return torch.arange(batch + 1, device=self.tokens.device) * nodes

    def first(self, nodes: int) -> DraftTrees:
        """The trees of the first `nodes` nodes, which are the best trees of that size.

        Nodes are in best-first order, so a tree's first nodes are the tree that a smaller budget
        would have given. The `full_mask` is left out, as its rows are as wide as all nodes.
        """
        if nodes == self.nodes:
            return self
        batch, whole = self.tokens.shape
        if not 1 <= nodes <= whole:
            raise ValueError(f"nodes: expected 1..{whole}, got {nodes}")
        step = torch.arange(batch, device=self.tokens.device)[:, None] * (whole - nodes)
        mask = self.draft_mask.view(batch, whole, whole)[:, :nodes, :nodes].reshape(-1)
        words = self.packed_mask.view(batch, whole, -1)[:, :nodes, : words_per_node(nodes)]

        def kept(links: torch.Tensor) -> torch.Tensor:
            return links[:, :nodes].masked_fill(links[:, :nodes] >= nodes, -1)

        return DraftTrees(
            tokens=self.tokens[:, :nodes].contiguous(),
            parents=self.parents[:, :nodes].contiguous(),
            depths=self.depths[:, :nodes].contiguous(),
            positions=self.positions[:, :nodes].contiguous(),
            log_weights=self.log_weights[:, :nodes].contiguous(),
            counts=self.counts.clamp(max=nodes),
            retrieve_index=self.retrieve_index[:, :nodes] - step,
            retrieve_next_token=kept(self.retrieve_next_token),
            retrieve_next_sibling=kept(self.retrieve_next_sibling),
            draft_mask=mask,
            packed_mask=words.reshape(-1),
            full_mask=None,
            prefix_lengths=self.prefix_lengths,
            max_depth=self.max_depth,
        )

    def tree(self, request: int) -> DraftTree:
        """One request's tree without padding, as the oracle gives it. Waits for a GPU."""
        count = int(self.counts[request])
        return DraftTree(
            tokens=self.tokens[request, :count],
            parents=self.parents[request, :count],
            depths=self.depths[request, :count],
            log_weights=self.log_weights[request, :count],
        )


def build_draft_trees(
    scores: torch.Tensor,
    budget: int,
    top_k: int | None = None,
    *,
    from_logits: bool = False,
    token_ids: torch.Tensor | None = None,
    root_tokens: torch.Tensor | None = None,
    prefix_lengths: torch.Tensor | None = None,
    full_mask: torch.Tensor | None = None,
) -> DraftTrees:
    """The `budget` heaviest nodes under each request's root: `reference.build_draft_tree`, batched.

    Equal to it node by node, ties included. On a GPU it reads nothing back and allocates through
    torch alone, so it can be captured: a replay takes the scores, roots and prefixes of that time.

    scores: [B, D, V], D in 1..16, V in 1..262,144, position d being tree depth d + 1; float32,
        bfloat16 or float16, the last dimension contiguous. Natural log-probabilities, of which rows
        need not be normalised, or logits with `from_logits`. On the CPU log-probabilities may also
        be float64. -inf is a token that is never chosen.
    budget: 1..128, the most nodes, the root not counted; fewer where the tree has fewer.
    top_k: at most so many ranks a depth, 1..64. None: as many as there are, at most 64.
    from_logits: normalise each row over its V columns, by `ops.candidates.log_normaliser` (within
        1e-6 of torch's log_softmax); the tree is the oracle's over these candidates.
    token_ids: int32 or int64 [B, D, V], the token of each column; None: its number. A position must
        not name a token twice.
    root_tokens: int32 or int64 [B], the token of node 0; None: -1.
    prefix_lengths: int32 or int64 [B], committed tokens in the cache, for positions and for
        `full_mask`; None: 0. (On a GPU int32 costs a launch to widen it.)
    full_mask: uint8 or bool, one dimension, written in SGLang's layout: of each request's
        N x (prefix + N) part the last N columns alone. It must be long enough for the prefixes and
        hold ones in the columns of the prefixes.

    Raises TypeError or ValueError that names the argument; MissingError where a GPU's library is
    absent. On the CPU, and on a GPU with KDTREE_CHECK=1 outside of captures, also ValueError for
    scores that are NaN, +inf or (log-probabilities) above 0, a token named twice, a negative prefix
    length and a full mask that is too short. Where that is not checked, such scores are never
    chosen and add nothing to a normaliser.
    """
    floats: tuple[torch.dtype, ...] = _GPU_FLOATS
    if not from_logits and isinstance(scores, torch.Tensor) and scores.device.type != "cuda":
        floats = (*_GPU_FLOATS, torch.float64)
    check_tensor("scores", scores, ("batch", "depth", "columns"), floats, contiguous=False)
    batch, depth, columns = scores.shape
    if depth > MAX_DEPTH:
        raise ValueError(f"scores: expected at most {MAX_DEPTH} positions, got {depth}")
    if columns > MAX_COLUMNS:
        raise ValueError(f"scores: expected at most {MAX_COLUMNS} columns, got {columns}")
    if scores.stride(2) != 1 and columns > 1:
        raise ValueError(
            f"scores: expected a contiguous last dimension, got strides {tuple(scores.stride())}"
        )
    check_integer("budget", budget, 1, MAX_BUDGET)
    if top_k is not None:
        check_integer("top_k", top_k, 1, MAX_RANKS)
    like = ("scores", scores.device)
    indices = (torch.int64, torch.int32)
    if token_ids is not None:
        check_tensor("token_ids", token_ids, (batch, depth, columns), indices, like=like)
    for name, value in (("root_tokens", root_tokens), ("prefix_lengths", prefix_lengths)):
        if value is not None:
            check_tensor(name, value, (batch,), indices, like=like)
    nodes = budget + 1
    if full_mask is not None:
        check_tensor("full_mask", full_mask, ("bytes",), _BYTES, like=like)
        if full_mask.shape[0] < batch * nodes * nodes:
            raise ValueError(
                f"full_mask: expected at least {batch * nodes * nodes} bytes for {batch} trees of "
                f"{nodes} nodes, got {full_mask.shape[0]}: it is too short"
            )

    def integers(*shape: int) -> torch.Tensor:
        return scores.new_empty(shape, dtype=torch.int64)

    def wide(value: torch.Tensor | None) -> torch.Tensor | None:
        return None if value is None else value.to(torch.int64)

    prefixes = wide(prefix_lengths)
    trees = DraftTrees(
        tokens=integers(batch, nodes),
        parents=integers(batch, nodes),
        depths=integers(batch, nodes),
        positions=integers(batch, nodes),
        log_weights=scores.new_empty((batch, nodes), dtype=torch.float64),
        counts=integers(batch),
        retrieve_index=integers(batch, nodes),
        retrieve_next_token=integers(batch, nodes),
        retrieve_next_sibling=integers(batch, nodes),
        draft_mask=scores.new_empty(batch * nodes * nodes, dtype=torch.uint8),
        packed_mask=integers(batch * nodes * words_per_node(nodes)),
        full_mask=full_mask,
        prefix_lengths=(
            scores.new_zeros(batch, dtype=torch.int64) if prefixes is None else prefixes
        ),
        max_depth=depth,
    )
    torch.ops.kdtree_engine.build_draft_trees.default(
        scores,
        wide(token_ids),
        wide(root_tokens),
        trees.prefix_lengths,
        from_logits,
        min(columns, budget, MAX_RANKS if top_k is None else top_k),
        trees.tokens,
        trees.parents,
        trees.depths,
        trees.positions,
        trees.log_weights,
        trees.counts,
        trees.retrieve_index,
        trees.retrieve_next_token,
        trees.retrieve_next_sibling,
        trees.draft_mask,
        trees.packed_mask,
        full_mask,
    )
    return trees


def _cuda(
    scores: torch.Tensor,
    token_ids: torch.Tensor | None,
    root_tokens: torch.Tensor | None,
    prefix_lengths: torch.Tensor,
    from_logits: bool,
    ranks: int,
    *outputs: torch.Tensor | None,
) -> None:
    full_mask, nodes = outputs[-1], _width(outputs)
    if may_read(scores.device):
        check_scores(scores, token_ids, from_logits=from_logits)
        _check_full_mask(prefix_lengths, full_mask, nodes)
    library = tree_kernels()
    batch, depth, columns = scores.shape
    # A fresh tensor for each call, as the attention's: torch's allocator knows streams and graphs.
    workspace = torch.empty(
        library.build_workspace_bytes(batch, depth, columns, ranks),
        dtype=torch.uint8,
        device=scores.device,
    )
    library.build_draft_trees(
        scores, token_ids, root_tokens, prefix_lengths, from_logits, ranks, *outputs, workspace
    )


def _cpu(
    scores: torch.Tensor,
    token_ids: torch.Tensor | None,
    root_tokens: torch.Tensor | None,
    prefix_lengths: torch.Tensor,
    from_logits: bool,
    ranks: int,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    positions: torch.Tensor,
    log_weights: torch.Tensor,
    counts: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    draft_mask: torch.Tensor,
    packed_mask: torch.Tensor,
    full_mask: torch.Tensor | None,
) -> None:
    check_scores(scores, token_ids, from_logits=from_logits)
    batch, depth, _ = scores.shape
    nodes = tokens.shape[1]
    _check_full_mask(prefix_lengths, full_mask, nodes)
    log_probs, candidates = top_candidates(
        scores, ranks, from_logits=from_logits, token_ids=token_ids
    )
    chosen = select_nodes(log_probs, nodes - 1)
    roots = torch.full((batch,), -1) if root_tokens is None else root_tokens
    place = (chosen.depths - 1).clamp(min=0) * ranks + chosen.ranks
    carried = candidates.flatten(1).gather(1, place)
    tokens.copy_(torch.where(chosen.depths > 0, carried, roots[:, None]))
    parents.copy_(chosen.parents)
    depths.copy_(chosen.depths)
    positions.copy_(chosen.depths + prefix_lengths[:, None])
    log_weights.copy_(chosen.log_weights)
    counts.copy_(chosen.counts)
    retrieve_index.copy_(torch.arange(batch * nodes).view(batch, nodes))
    next_token, next_sibling = first_children(chosen.parents)
    retrieve_next_token.copy_(next_token)
    retrieve_next_sibling.copy_(next_sibling)

    seen = visible_nodes(chosen.parents, depth)
    draft_mask.copy_(seen.flatten())
    words = words_per_node(nodes)
    bits = torch.zeros(batch, nodes, words * WORD_BITS, dtype=torch.int64)
    bits[..., :nodes] = seen
    # A sum of different bits is their union, the sign bit too: int64 wraps.
    shifts = torch.arange(WORD_BITS)
    packed_mask.copy_((bits.view(batch, nodes, words, WORD_BITS) << shifts).sum(-1).flatten())
    if full_mask is not None:
        begin = 0
        for request, prefix in enumerate(prefix_lengths.tolist()):
            end = begin + nodes * (prefix + nodes)
            part = full_mask[begin:end].view(nodes, prefix + nodes)
            part[:, prefix:] = seen[request].to(full_mask.dtype)
            begin = end


def _check_full_mask(
    prefix_lengths: torch.Tensor, full_mask: torch.Tensor | None, nodes: int
) -> None:
    """Raises ValueError for a negative prefix length, or a mask without room. Reads the lengths."""
    lengths = prefix_lengths.tolist()
    for request, prefix in enumerate(lengths):
        if prefix < 0:
            raise ValueError(f"prefix_lengths[{request}]: expected 0 or more, got {prefix}")
    wanted = sum(nodes * (prefix + nodes) for prefix in lengths)
    if full_mask is not None and full_mask.shape[0] < wanted:
        raise ValueError(
            f"full_mask: expected at least {wanted} bytes for {len(lengths)} trees of {nodes} "
            f"nodes and {sum(lengths)} prefix tokens, got {full_mask.shape[0]}: it is too short"
        )


def _width(outputs: tuple[torch.Tensor | None, ...]) -> int:
    tokens = outputs[0]
    assert tokens is not None
    return int(tokens.shape[1])


register(
    "build_draft_trees(Tensor scores, Tensor? token_ids, Tensor? root_tokens, "
    "Tensor prefix_lengths, bool from_logits, SymInt ranks, Tensor(a!) tokens, "
    "Tensor(b!) parents, Tensor(c!) depths, Tensor(d!) positions, Tensor(e!) log_weights, "
    "Tensor(f!) counts, Tensor(g!) retrieve_index, Tensor(h!) retrieve_next_token, "
    "Tensor(i!) retrieve_next_sibling, Tensor(j!) draft_mask, Tensor(k!) packed_mask, "
    "Tensor(l!)? full_mask) -> ()",
    cpu=_cpu,
    cuda=_cuda,
)
