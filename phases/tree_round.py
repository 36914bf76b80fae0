"""One round of tree speculative decoding on the oracle's tiny model, to be looked at.

The round is what a service runs: a tree by `kdtree_engine.ops`, one verify pass over its nodes in a
paged cache, the walk. Nothing here prints.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from kdtree_engine.ops import accept_trees, build_draft_trees
from kdtree_engine.reference.attention import tree_verify_attention
from kdtree_engine.reference.masks import MaskLayout
from kdtree_engine.reference.speculative import NoisyDrafter, plain_greedy
from kdtree_engine.reference.tiny_mla import TinyMLA, TinyMLAConfig, TreeBatch

__all__ = ["RoundNode", "TreeRound", "one_round"]

_PROMPT_TOKENS = 6


@dataclasses.dataclass(frozen=True)
class RoundNode:
    """A node of the draft tree, after the round.

    draft: the drafter's probability of the token at its depth; path: of all tokens from the root.
    Both are 1 at the root. target: the target's own next token behind the node.
    """

    number: int
    parent: int
    depth: int
    token: int
    draft: float
    path: float
    target: int
    accepted: bool


@dataclasses.dataclass(frozen=True)
class TreeRound:
    """A round: the prompt, whose last token is the root, the tree, and the tokens gained."""

    prompt: tuple[int, ...]
    nodes: tuple[RoundNode, ...]
    gained: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return dataclasses.asdict(self)


def one_round(*, budget: int, top_k: int, depth: int, noise: float, seed: int) -> TreeRound:
    """Draft, verify and accept once, greedily, behind a drawn prompt.

    budget, top_k: of the tree. depth: positions that the drafter fills, 1..16. noise: standard
    deviation of what the drafter adds to the target's logits; with 0 it knows them. seed: of the
    model, the prompt and the noise.
    """
    model = TinyMLA(TinyMLAConfig(), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(model.config.vocabulary, (_PROMPT_TOKENS,), generator=generator)
    prompt: list[int] = drawn.tolist()
    _, crib = plain_greedy(model, [prompt], depth)
    drafter = NoisyDrafter(crib, [len(prompt)], depth=depth, noise=noise, generator=generator)
    prefix = list(range(len(prompt) - 1))
    trees = build_draft_trees(
        drafter(0, prompt)[None],
        budget,
        top_k,
        root_tokens=torch.tensor([prompt[-1]]),
        prefix_lengths=torch.tensor([len(prefix)]),
    )
    pools = model.new_pools(len(prefix) + trees.nodes)
    before = TreeBatch.of([prompt[:-1]], [prefix], [prefix], [[]], None)
    model.forward_absorbed(before, pools, tree_verify_attention)
    batch = TreeBatch(
        tokens=trees.tokens.flatten(),
        positions=trees.positions.flatten(),
        draft_slots=torch.arange(trees.nodes) + len(prefix),
        qo_indptr=trees.qo_indptr(),
        kv_indptr=torch.tensor([0, len(prefix)]),
        kv_indices=torch.tensor(prefix),
        mask=trees.draft_mask,
        mask_indptr=trees.mask_indptr(MaskLayout.DRAFT),
    )
    targets = model.forward_absorbed(batch, pools, tree_verify_attention).argmax(-1)
    paths = accept_trees(trees, target_tokens=targets[None])
    tree, wanted = trees.tree(0), targets.tolist()
    path = paths.nodes[0, : int(paths.counts[0])].tolist()
    weights, parents, tokens = (
        values.tolist() for values in (tree.log_weights, tree.parents, tree.tokens)
    )
    nodes = tuple(
        RoundNode(
            number=number,
            parent=parent,
            depth=int(tree.depths[number]),
            token=tokens[number],
            draft=math.exp(weights[number] - weights[parent]) if number else 1.0,
            path=math.exp(weights[number]),
            target=wanted[number],
            accepted=number in path,
        )
        for number, parent in enumerate(parents)
    )
    gained = (*(tokens[number] for number in path[1:]), int(paths.bonus[0]))
    return TreeRound(prompt=tuple(prompt), nodes=nodes, gained=gained)
