"""The draft tree around the verify pass: built, accepted and compacted, on CUDA and CPU.

    build_draft_trees   the oracle's draft trees of a batch, with masks and retrieval arrays

Plan 20 has the design.
"""

from kdtree_engine.ops.draft_trees import DraftTrees, build_draft_trees

__all__ = ["DraftTrees", "build_draft_trees"]
