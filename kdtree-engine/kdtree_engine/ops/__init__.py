"""The draft tree around the verify pass: built, accepted and compacted, on CUDA and CPU.

    build_draft_trees   the oracle's draft trees of a batch, with masks and retrieval arrays
    accept_trees        the nodes that the target accepts, greedy or sampled
    compact_kv          the accepted rows to the front of each window, in all layers

Plan 20 has the design.
"""

from kdtree_engine.ops.acceptance import AcceptedPaths, accept_trees
from kdtree_engine.ops.compaction import compact_kv
from kdtree_engine.ops.draft_trees import DraftTrees, build_draft_trees

__all__ = ["AcceptedPaths", "DraftTrees", "accept_trees", "build_draft_trees", "compact_kv"]
