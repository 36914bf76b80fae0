"""The KDTREE_ environment variables, read once and typed.

Every variable of the engine is in VARIABLES, those that other modules read too, so that a name
that is not there is a typing mistake and can be warned about.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping

from kdtree_engine.errors import ConfigError

__all__ = ["PREFIX", "VARIABLES", "Settings", "Variable", "read_settings"]

PREFIX = "KDTREE_"


@dataclasses.dataclass(frozen=True)
class Variable:
    """One environment variable.

    values: what it may be; empty where any text will do, such as a path.
    default: what stands for an unset or empty variable.
    integers: the least and the most, for a whole number; then `values` is not looked at.
    """

    name: str
    meaning: str
    values: tuple[str, ...] = ("0", "1")
    default: str = "0"
    integers: tuple[int, int] | None = None


VARIABLES = (
    Variable("KDTREE_VERIFY", "tree verification runs on the kernel", default="1"),
    Variable("KDTREE_DECODE", "plain decode, one token a request, runs on the kernel", default="1"),
    Variable(
        "KDTREE_GRAPH_BUFFERS",
        "CUDA graphs keep max_batch x max_context slots and not max_tokens x max_context, and no "
        "room for splits of a decode kernel that is not used",
        default="1",
    ),
    Variable(
        "KDTREE_QLEN_MASK",
        "tree masks have T x T bytes a request and not T x (L + T): NGRAM, and EAGLE's family",
        default="1",
    ),
    Variable(
        "KDTREE_PROMPT_ENDS",
        "SGLang 0.5.17: the n-gram drafter takes the end of a prompt, not the whole twice a step",
        default="1",
    ),
    Variable(
        "KDTREE_KV_MOVES",
        "NGRAM, and EAGLE's family: accepted rows move in all layers by one launch",
        default="1",
    ),
    Variable(
        "KDTREE_KV_INDICES",
        "the slots of a batch are listed by one launch over the whole GPU, not a block a request",
        default="1",
    ),
    Variable(
        "KDTREE_DDTREE_BUDGET",
        "DDTREE: nodes of a draft tree below its root, 1 to 127; "
        "unset: `--speculative-num-draft-tokens` less one, or 32",
        default="",
        integers=(1, 127),
    ),
    Variable(
        "KDTREE_DDTREE_TOPK",
        "DDTREE: tokens of each position that a draft tree may take, 1 to 64",
        default="8",
        integers=(1, 64),
    ),
    Variable(
        "KDTREE_DDTREE_ADAPTIVE",
        "DDTREE: verify as many nodes a round as pay for their time, up to the budget",
    ),
    Variable(
        "KDTREE_DEFRAG",
        "tier0: the KV pool's slots are given out in runs, and reserved in chunks for growth; "
        "tier1, experimental: rows of running requests move into longer runs as well",
        ("off", "tier0", "tier1"),
        "off",
    ),
    Variable(
        "KDTREE_DEFRAG_EVERY",
        "tier1: batches from one look for rows to move to the next, 1 to 1,000,000",
        default="256",
        integers=(1, 1_000_000),
    ),
    Variable(
        "KDTREE_GAUGES",
        "with --enable-metrics: fragmentation of the KV pool as Prometheus gauges, kdtree:kv_*",
        default="1",
    ),
    Variable("KDTREE_LIBRARY", "path of the kernel library to load", (), ""),
    Variable("KDTREE_TREES_LIBRARY", "path of the draft tree library to load", (), ""),
    Variable("KDTREE_WGMMA", "sm_90: take the wgmma kernels, or those on mma.sync", default=""),
    Variable("KDTREE_CHECK", "check the contents of index tensors at each call (slow)"),
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the plugin does. All off: the server behaves as with `--attention-backend triton`."""

    verify: bool = True
    decode: bool = True
    graph_buffers: bool = True
    qlen_mask: bool = True
    prompt_ends: bool = True
    kv_moves: bool = True
    kv_indices: bool = True
    ddtree_budget: int | None = None
    ddtree_top_k: int = 8
    ddtree_adaptive: bool = False
    tier0: bool = False
    tier1: bool = False  # and tier0 with it
    relocate_every: int = 256
    gauges: bool = True

    @property
    def stock(self) -> bool:
        """Nothing is switched on."""
        return not (self.verify or self.decode or self.graph_buffers or self.tier0)


def read_settings(environment: Mapping[str, str]) -> tuple[Settings, list[str]]:
    """The settings, and a line for each KDTREE_ name that nothing reads.

    Raises ConfigError that names the first variable whose value is not one of those it may have.
    A value is taken as it stands: `kdtree_engine.library` reads some of these variables itself and
    takes no space away, so what this strips would be set for one of them alone.
    """
    known = {variable.name: variable for variable in VARIABLES}
    given: dict[str, str] = {}
    for variable in VARIABLES:
        value = environment.get(variable.name, "") or variable.default
        if value != value.strip():
            raise ConfigError(
                f"{variable.name}: {value!r} begins or ends with a space",
                remedy="take the space away",
            )
        if variable.integers is not None:
            _require_integer(variable, value)
        elif variable.values and value not in (*variable.values, variable.default):
            raise ConfigError(
                f"{variable.name}: expected {' or '.join(variable.values)}, got {value!r}",
                remedy=f"it says: {variable.meaning}; unset it for the default",
            )
        given[variable.name] = value
    warnings = []
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            warnings.append(f"{name} is set and nothing reads it ({hint})")
    settings = Settings(
        verify=given["KDTREE_VERIFY"] == "1",
        decode=given["KDTREE_DECODE"] == "1",
        graph_buffers=given["KDTREE_GRAPH_BUFFERS"] == "1",
        qlen_mask=given["KDTREE_QLEN_MASK"] == "1",
        prompt_ends=given["KDTREE_PROMPT_ENDS"] == "1",
        kv_moves=given["KDTREE_KV_MOVES"] == "1",
        kv_indices=given["KDTREE_KV_INDICES"] == "1",
        ddtree_budget=int(given["KDTREE_DDTREE_BUDGET"] or 0) or None,
        ddtree_top_k=int(given["KDTREE_DDTREE_TOPK"]),
        ddtree_adaptive=given["KDTREE_DDTREE_ADAPTIVE"] == "1",
        tier0=given["KDTREE_DEFRAG"] in ("tier0", "tier1"),
        tier1=given["KDTREE_DEFRAG"] == "tier1",
        relocate_every=int(given["KDTREE_DEFRAG_EVERY"]),
        gauges=given["KDTREE_GAUGES"] == "1",
    )
    return settings, warnings


def _require_integer(variable: Variable, value: str) -> None:
    assert variable.integers is not None
    low, high = variable.integers
    plain = value.isascii() and value.isdigit()
    if value != variable.default and not (plain and low <= int(value) <= high):
        raise ConfigError(
            f"{variable.name}: expected a whole number in {low}..{high}, got {value!r}",
            remedy=f"it says: {variable.meaning}; unset it for the default",
        )
