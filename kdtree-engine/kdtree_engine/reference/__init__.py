"""The oracle: float64 torch, simple before fast, the definition that kernels are judged by.

tree         the draft tree, best first under a budget
masks        who sees whom, and the three layouts of it
attention    tree-verify MLA attention
acceptance   the walk that accepts drafted tokens, and the KV moves that follow from it
tiny_mla     a small MLA transformer over a paged latent pool
speculative  draft, verify, accept, commit: the loop that a service runs
"""

from kdtree_engine.reference.attention import tree_verify_attention
from kdtree_engine.reference.masks import MaskLayout, tree_mask
from kdtree_engine.reference.tree import DraftTree, build_draft_tree, positions

__all__ = [
    "DraftTree",
    "MaskLayout",
    "build_draft_tree",
    "positions",
    "tree_mask",
    "tree_verify_attention",
]
