"""Collectives: the bytes that NCCL's arguments in a trace tell, and which rank waited for which.

Kineto writes the arguments of a torch.distributed call beside the NCCL kernel that it launched:
`Collective name`, `In msg nelems`, `Out msg nelems`, `dtype` and `Group size`. Kernels of a CUDA
graph, of a library that calls NCCL itself and of all-reduces of SGLang's own have none: of those
nothing is counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Collectives", "link_bytes", "waits"]

Collectives = Sequence[Sequence[tuple[str, float]]]
"""Of one rank: of each step, (kernel, us) of each of its collectives, in order of time."""

_SIZES = {
    **dict.fromkeys(("Double", "Long"), 8),
    **dict.fromkeys(("Float", "Int"), 4),
    **dict.fromkeys(("BFloat16", "Half", "Short"), 2),
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2"), 1),
}
"""Bytes of torch's types, as c10 calls them."""
_MOST = 1 << 53

_STAGE = re.compile(r"PP\d+")


def link_bytes(args: Mapping[str, Any]) -> int:
    """What a rank sends over its link in a collective with these arguments; 0: that is not told.

    The factors are those of nccl-tests' bus bandwidth (its doc/PERFORMANCE.md): of a message S
    over n ranks 2 (n - 1) / n * S in an all-reduce, (n - 1) / n * S in an all-gather (S: what comes
    out), a reduce-scatter and an all-to-all (S: what goes in), and S otherwise. So it is to be held
    against the bandwidth of one direction of a rank's link.
    """
    size = _SIZES.get(str(args.get("dtype")))
    given, made, ranks = (
        _whole(args.get(name)) for name in ("In msg nelems", "Out msg nelems", "Group size")
    )
    if size is None or ranks < 2:
        return 0
    name = str(args.get("Collective name")).replace("_", "").lower()
    if name.startswith("allreduce"):
        return round(2 * (ranks - 1) / ranks * given * size)
    if name.startswith("allgather"):
        return round((ranks - 1) / ranks * made * size)
    if name.startswith(("reducescatter", "alltoall")):
        return round((ranks - 1) / ranks * given * size)
    if name.startswith(("broadcast", "reduce", "send", "recv")):
        return max(given, made) * size
    return 0


def _whole(value: Any) -> int:
    """0 for what is no count."""
    good = isinstance(value, int) and not isinstance(value, bool) and 0 < value < _MOST
    return value if good else 0


def waits(ranks: Sequence[str], of_ranks: Sequence[Collectives]) -> list[float | None]:
    """us that each rank's collectives took, over all steps, beyond the shortest rank's same one.

    A collective ends on all ranks at once, so the rank that came last has the shortest and the
    others wait for it. Needs no common clock: the k-th collective of a step is the same on all
    ranks, where all have as many steps and the same kernels in each. None where they have not, for
    one rank alone, and under DP attention, whose ranks meet in groups that no name tells. Stages
    of a pipeline (`PP`) are compared each for itself. ranks: as `Timeline.rank` has them.
    """
    groups: dict[str, list[int]] = {}
    for number, rank in enumerate(ranks):
        groups.setdefault("".join(_STAGE.findall(rank)), []).append(number)
    found: list[float | None] = [None] * len(ranks)
    for members in groups.values():
        told = [of_ranks[number] for number in members]
        if len(members) < 2 or any("DP" in ranks[number] for number in members):
            continue
        shapes = [[[name for name, _ in step] for step in one] for one in told]
        if any(shape != shapes[0] for shape in shapes) or not any(shapes[0]):
            continue
        for number in members:
            found[number] = 0.0
        for steps in zip(*told, strict=True):
            for same in zip(*steps, strict=True):
                shortest = min(us for _, us in same)
                for number, (_, us) in zip(members, same, strict=True):
                    found[number] = (found[number] or 0.0) + us - shortest
    return found
