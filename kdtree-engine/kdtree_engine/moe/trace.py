"""A router trace: lines of JSON, one for each step and MoE layer, behind one line that says what.

    {"format": "router-trace", "version": 1, "experts": 384, "top_k": 8}
    {"step": 0, "layer": 1, "experts": [[5, 17, 80, 81, 200, 201, 300, 383], [...], ...]}
    {"step": 0, "layer": 2, "experts": [...]}

`experts` of a line are [tokens, top_k] numbers of logical experts, from 0 on. Every step has the
same layers, in any order, and as many tokens in each of them. A step is best of one request.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import torch

from kdtree_engine.errors import ConfigError
from kdtree_engine.moe.recorder import read_recorder
from kdtree_engine.moe.routing import Routing, counts_of_choices, routing_of

__all__ = ["read_routing", "read_trace"]

_MOST = 1 << 12
"""Experts, layers and top_k are fewer in any model."""
_LONGEST_LINE = 1 << 24
"""Characters of one step in one layer: a million choices."""


def read_routing(path: pathlib.Path, *, top_k: int) -> Routing:
    """Of SGLang's recorder where the name ends in .pt, else of a router trace.

    top_k: experts of a token, for the dumps that do not say. Raises ConfigError.
    """
    return read_recorder(path, top_k=top_k) if path.suffix == ".pt" else read_trace(path)


def read_trace(path: pathlib.Path) -> Routing:
    """Raises ConfigError, with the file and the line, for any other file."""
    number, counts = 0, dict[int, dict[int, torch.Tensor]]()
    try:
        with path.open(encoding="utf-8") as lines:
            header = json.loads(lines.readline(_LONGEST_LINE))
            if header["format"] != "router-trace" or header["version"] != 1:
                raise ValueError("expected format router-trace, version 1")
            experts, top_k = (_whole(header[name], name) for name in ("experts", "top_k"))
            if not 1 <= top_k <= experts:
                raise ValueError(f"top_k is {top_k} of {experts} experts")
            while line := lines.readline(_LONGEST_LINE):
                number += 1
                if len(line) == _LONGEST_LINE:
                    raise ValueError(f"a line of {_LONGEST_LINE} characters or more")
                if not line.strip():
                    continue
                one = json.loads(line)
                step, layer = _whole(one["step"], "step", 1 << 40), _whole(one["layer"], "layer")
                if layer in counts.setdefault(step, {}):
                    raise ValueError(f"step {step}, layer {layer} stands there twice")
                counts[step][layer] = counts_of_choices(_choices(one["experts"], top_k), experts)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, ConfigError) as error:
        raise ConfigError(
            f"{path}: line {number + 1}: {type(error).__name__}: {error}",
            remedy="a router trace is JSON lines: a header with experts and top_k, then step, "
            "layer and experts [tokens, top_k]; SGLang's dumps end in .pt",
        ) from error
    if not counts:
        raise ConfigError(f"{path}: no step")
    layers = sorted(next(iter(counts.values())))
    for step, found in counts.items():
        if sorted(found) != layers:
            raise ConfigError(f"{path}: step {step} has other layers than the first step")
    stacked = torch.stack(
        [torch.stack([counts[step][layer] for layer in layers]) for step in sorted(counts)]
    )
    return routing_of(stacked, top_k=top_k, layers=layers, source=path.name)


def _choices(given: Any, top_k: int) -> torch.Tensor:
    """[tokens, top_k], at least one token."""
    rows = [[_whole(expert, "expert") for expert in token] for token in given]
    if not rows or any(len(row) != top_k for row in rows):
        raise ValueError(f"expected a list of tokens with {top_k} experts each")
    return torch.tensor(rows)


def _whole(value: object, what: str, most: int = _MOST) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < most:
        raise ValueError(f"{what}: expected a whole number below {most}, got {value!r:.40}")
    return value
