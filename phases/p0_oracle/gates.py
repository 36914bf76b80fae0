"""The gates of phase 0: the checks that later phases use too, put to the oracle itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from unittest import mock

import torch

from kdtree_engine.reference import attention as oracle
from kdtree_engine.reference.acceptance import accept_sampled, apply_compaction
from kdtree_engine.reference.attention import tree_verify_attention
from kdtree_engine.reference.masks import tree_mask
from kdtree_engine.reference.tree import build_draft_tree
from phases.attention_cases import Content, standard_cases
from phases.attention_checks import (
    attention_equals_paths,
    attention_matches_oracle,
    path_cases,
)
from phases.gate import Context, Figure
from phases.p0_oracle.acceptance_checks import compaction_moves_rows, sampling_keeps_distribution
from phases.p0_oracle.mask_checks import layouts_hold, masks_equal_paths
from phases.p0_oracle.model_checks import absorbed_equals_plain
from phases.p0_oracle.tree_checks import tree_equals_brute_force, tree_has_properties
from phases.token_checks import speculation_equals_plain

__all__ = [
    "attention_paths",
    "compaction_moves",
    "greedy_token_exact",
    "mask_layouts",
    "mask_paths",
    "mla_absorbed",
    "sampled_distribution",
    "tree_brute_force",
    "tree_properties",
]


_FEW_SCORES = (1, 1000)
"""Scores that the oracle may hold at once: of less than one row, and of a few rows."""


def tree_brute_force(ctx: Context) -> Sequence[Figure]:
    return tree_equals_brute_force(build_draft_tree, ctx)


def tree_properties(ctx: Context) -> Sequence[Figure]:
    return tree_has_properties(build_draft_tree, ctx)


def mask_paths(ctx: Context) -> Sequence[Figure]:
    return masks_equal_paths(tree_mask, ctx)


def mask_layouts(ctx: Context) -> Sequence[Figure]:
    return layouts_hold(ctx)


def attention_paths(ctx: Context) -> Sequence[Figure]:
    """Against torch's attention along every path, and against counted means where scores are 0.

    The oracle works off the rows of a long request in parts. No case is so long, so all paths run
    again with parts made small: of one row, and of several with a shorter one at the end.
    """
    full_width = [
        dataclasses.replace(case, latent=512, rope=64) for case in path_cases(heads=2)[::5]
    ]
    figures = attention_equals_paths(tree_verify_attention, ctx, cases=[*path_cases(), *full_width])
    for most in _FEW_SCORES:
        with mock.patch.object(oracle, "_MOST_SCORES", most):
            in_parts = attention_equals_paths(tree_verify_attention, ctx)
        worst = max(figures[0].value, in_parts[0].value)
        figures[0] = dataclasses.replace(figures[0], value=worst)
    counted = [case for case in standard_cases() if case.content is Content.UNIFORM]
    means = attention_matches_oracle(tree_verify_attention, ctx, dtype=torch.float64, cases=counted)
    return [
        figures[0],
        *figures[1:],
        dataclasses.replace(means[0], name="worst relative error to counted means"),
    ]


def mla_absorbed(ctx: Context) -> Sequence[Figure]:
    return absorbed_equals_plain(tree_verify_attention, ctx)


def greedy_token_exact(ctx: Context) -> Sequence[Figure]:
    return speculation_equals_plain(ctx)


def sampled_distribution(ctx: Context) -> Sequence[Figure]:
    return sampling_keeps_distribution(accept_sampled, ctx)


def compaction_moves(ctx: Context) -> Sequence[Figure]:
    return compaction_moves_rows(apply_compaction, ctx)
