"""What a server's `/metrics` says, in Prometheus' text format."""

from __future__ import annotations

import collections
import math
import re

__all__ = ["PREFIX", "read_metrics"]

PREFIX = "kdtree:kv_"
"""Of the gauges that `kdtree_engine.sglang_ext.defrag.gauges` adds to SGLang's."""
_SAMPLE = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(?:\{.*\})?[ \t]+(?P<value>\S+)(?:[ \t]+-?\d+)?")


def read_metrics(text: str, prefix: str = "") -> dict[str, float]:
    """By name, for the names with `prefix`: the mean over labels, of ranks say.

    Lines that are no sample, and values that are no number, are passed over.
    """
    found: dict[str, list[float]] = collections.defaultdict(list)
    for line in text.splitlines():
        sample = _SAMPLE.fullmatch(line.strip())
        if sample is None or not sample["name"].startswith(prefix):
            continue
        try:
            value = float(sample["value"])
        except ValueError:
            continue
        if math.isfinite(value):
            found[sample["name"]].append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}
