"""What stands around the verify pass, on CUDA and CPU: draft trees, accepted rows, slots.

    build_draft_trees   the oracle's draft trees of a batch, with masks and retrieval arrays
    accept_trees        the nodes that the target accepts, greedy or sampled
    compact_kv          the accepted rows to the front of each window, in all layers
    fill_kv_indices     the slots that the pass reads, of all requests

Plan 20 has the design.
"""

from kdtree_engine.ops.acceptance import AcceptedPaths, accept_trees
from kdtree_engine.ops.compaction import compact_kv
from kdtree_engine.ops.draft_trees import DraftTrees, build_draft_trees
from kdtree_engine.ops.kv_indices import fill_kv_indices

__all__ = [
    "AcceptedPaths",
    "DraftTrees",
    "accept_trees",
    "build_draft_trees",
    "compact_kv",
    "fill_kv_indices",
]
