"""The dumps of SGLang's expert-distribution recorder, as release 0.5.23 writes them.

A server records with `--expert-distribution-recorder-mode MODE` between the requests
/start_expert_distribution_record and /dump_expert_distribution_record, and writes a torch file into
SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR. By mode it holds:

    stat         logical_count [steps, layers, logical experts], summed over the ranks, one file
    per_pass     records with global_physical_count [layers, physical experts], a file of each rank
    per_token    records with topk_ids_of_layer [layers, tokens, 8], -1 where a layer is dense or a
                 row is padding, and forward_mode; a file of each rank
    stat_approx  as stat, in which DeepEP has rounded the counts up: refused, as such counts differ
                 from layer to layer

The experts of the last two kinds are physical: `last_physical_to_logical_map` [layers, physical
experts] leads back. It is the map at the end of the recording; a server that rebalances meanwhile
gives wrong numbers, which nothing in the file betrays.

Only per_token says which passes are prefills; those are left out. Of the others
`Routing.at_most` leaves them out by their size.
"""

from __future__ import annotations

import math
import pathlib
import warnings
from typing import Any

import torch

from kdtree_engine.errors import ConfigError
from kdtree_engine.moe.routing import Routing, counts_of_choices, routing_of

__all__ = ["read_recorder"]

_MOST = 1 << 24
"""Counts and experts' numbers are lower: sums of them then fit, and nothing huge is made room for.
"""
_DECODE, _TARGET_VERIFY = 2, 5
"""ForwardMode's values for a step of plain decoding and for a verification."""


def read_recorder(path: pathlib.Path, *, top_k: int) -> Routing:
    """top_k: experts of a token, which stat and per_pass do not say. Raises ConfigError.

    Without DP attention every rank counts the same tokens, and stat has each as often as there are
    ranks. The largest number that divides all counts is taken for that, and divided by: in a
    recording of some hundred steps an expert with a single token is bound to occur.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of damaged files, before it refuses them
            # A dump is tensors and plain values; anything else in it would be someone else's code.
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what a damaged file raises in an unpickler is not bounded
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{path} is no dump of SGLang's recorder: {said:.200}") from error
    try:
        counts, top_k, divisor = _counts(found, top_k)
        source = path.name if divisor == 1 else f"{path.name}, its counts divided by {divisor}"
        return routing_of(counts, top_k=top_k, layers=None, source=source)
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
        RuntimeError,
        OverflowError,
    ) as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(f"{path} is no dump of SGLang's recorder: {said:.200}") from error
    except ConfigError as error:
        if error.problem.startswith(path.name):
            raise
        raise ConfigError(f"{path}: {error.problem}", remedy=error.remedy) from error


def _counts(found: Any, top_k: int) -> tuple[torch.Tensor, int, int]:
    """Logical experts: integers [steps, layers, experts], top_k as the file has it, the divisor."""
    if not isinstance(found, dict):
        raise TypeError(f"expected names and values, got {type(found).__name__}")
    if "logical_count" in found:
        counts = _integers(found["logical_count"], 3, "logical_count")
        divisor = _divisor(counts)
        return counts // divisor, top_k, divisor
    records = found["records"]
    to_logical = _integers(found["last_physical_to_logical_map"], 2, "the map of experts")
    if not isinstance(records, list) or not records:
        raise ValueError("no pass was recorded")
    if "topk_ids_of_layer" in records[0]:
        modes = (_DECODE, _TARGET_VERIFY)
        steps = [one for one in records if int(one["forward_mode"]) in modes]
        if not steps:
            raise ValueError("no pass was a decoding or a verification")
        physical = torch.stack([_of_choices(one, to_logical.shape[1]) for one in steps])
        ids = torch.stack([(one["topk_ids_of_layer"] >= 0).sum(-1).max() for one in steps])
        top_k = int(ids.max())
    else:
        physical = torch.stack(
            [_integers(one["global_physical_count"], 2, "a count") for one in records]
        )
    if physical.shape[1:] != to_logical.shape:
        raise ValueError(
            f"counts are of {list(physical.shape[1:])} layers and experts, the map of "
            f"{list(to_logical.shape)}"
        )
    if not 0 <= int(to_logical.min()) <= int(to_logical.max()) < to_logical.shape[1]:
        raise ValueError("the map of experts leads to an expert that is none")
    logical = torch.zeros(*physical.shape[:2], int(to_logical.max()) + 1, dtype=torch.int64)
    logical.scatter_add_(2, to_logical.expand(len(physical), -1, -1), physical)
    return logical, top_k, 1


def _divisor(counts: torch.Tensor) -> int:
    """The largest number that divides all counts; 1 where all are 0."""
    left, divisor = counts[counts != 0], 0
    while left.numel():
        divisor = math.gcd(divisor, int(left[0]))
        left = left[left % divisor != 0]
    return divisor or 1


def _of_choices(record: Any, experts: int) -> torch.Tensor:
    return counts_of_choices(
        _integers(record["topk_ids_of_layer"], 3, "topk_ids_of_layer"), experts
    ).to(torch.int64)


def _integers(given: Any, dims: int, what: str) -> torch.Tensor:
    """As int64. ValueError for anything else than a tensor of integers with `dims` dimensions."""
    if (
        not isinstance(given, torch.Tensor)
        or given.layout != torch.strided
        or given.dtype not in (torch.int32, torch.int64)
        or given.dim() != dims
        or not given.numel()
    ):
        raise ValueError(f"{what}: expected integers in {dims} dimensions")
    if not -_MOST < int(given.min()) <= int(given.max()) < _MOST:
        raise ValueError(f"{what}: a number is not below {_MOST}")
    return given.to(torch.int64)
