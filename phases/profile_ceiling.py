"""What fraction of a ceiling a class of kernels reached, where its bytes or flops can be counted.

Bytes and flops of attention and products are those of `phases.profile_counted`. Their ceilings are
what that GPU's DRAM gives and its bf16 flops, of the table `kdtree_engine.gpus`: of the two the one
that takes longer is the ceiling.

Bytes of collectives are told by NCCL's arguments in the trace, and held against one direction of a
rank's link, which the caller names. Where it is known what of their time is waiting for another
rank, it is left out.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from kdtree_engine.gpus import GPUS, Gpu
from kdtree_engine.moe.routing import Routing
from kdtree_engine.profiling.rules import COMMUNICATION
from kdtree_engine.profiling.summary import ClassTime, Profile
from phases.profile_counted import Counted, Uncounted, counted
from phases.profile_note import Note

__all__ = [
    "Attained",
    "Ceilings",
    "LinkRate",
    "attained",
    "ceiling_remarks",
    "ceilings",
    "levers",
]

_NEAR = 0.6
"""Of a ceiling, from where a better kernel has little left to give."""
_MOSTLY = 0.5
"""Of collectives' time, from where waiting is what they take."""
_FEWER = {
    "DRAM": "fewer bytes (a smaller format, more tokens a pass, more ranks), not a faster kernel",
    "flops": "fewer or cheaper products, not a faster kernel",
    "link": "fewer or smaller messages or a faster link, not another algorithm",
}


@dataclasses.dataclass(frozen=True)
class LinkRate:
    """bandwidth: bytes a second that a rank can send. source: where that is from."""

    name: str
    bandwidth: float
    source: str


@dataclasses.dataclass(frozen=True)
class Attained:
    """bytes, flops: that a class must have taken in a step; of collectives, that a rank sent.

    fraction: of `ceiling`, which is that of `of`, a GPU or a link. basis: what else it rests on.
    """

    bytes: float
    flops: float | None
    gb_s: float
    fraction: float
    ceiling: Literal["DRAM", "flops", "link"]
    of: str
    basis: str = ""


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """By class. missing: why there is none, of classes that could have one."""

    attained: dict[str, Attained]
    missing: dict[str, str]


def ceilings(
    profile: Profile,
    note: Note | None,
    link: LinkRate | None = None,
    routing: Routing | None = None,
) -> Ceilings:
    """Of the classes that the profile has. routing: recorded of the model that was profiled."""
    found, missing = dict[str, Attained](), dict[str, str]()
    gpu = _gpu(note.gpu) if note is not None else None
    for name, work in (counted(note, routing) if note is not None else {}).items():
        one = next((each for each in profile.classes if each.name == name), None)
        if one is None or not one.kernel_us:
            continue
        if isinstance(work, Uncounted):
            missing[name] = work.why
        elif gpu is None:
            missing[name] = "the rates of its GPU are not known"
        else:
            found[name] = _of_gpu(work, one.kernel_us * 1e-6, gpu)
    reduced = next((one for one in profile.classes if one.name == COMMUNICATION), None)
    if reduced is not None and reduced.kernel_us:
        sent = _of_link(profile, reduced, link)
        if isinstance(sent, Uncounted):
            missing[COMMUNICATION] = sent.why
        else:
            found[COMMUNICATION] = sent
    return Ceilings(found, missing)


def attained(
    profile: Profile,
    note: Note | None,
    link: LinkRate | None = None,
    routing: Routing | None = None,
) -> dict[str, Attained]:
    """By class; nothing where the note, the GPU or a size is not known."""
    return ceilings(profile, note, link, routing).attained


def levers(profile: Profile, found: Ceilings | None = None) -> dict[str, str]:
    """By class: that of the rule table, or another where these figures point to it."""
    told = {one.name: one.lever for one in profile.classes}
    for name, one in (found.attained if found else {}).items():
        if one.fraction >= _NEAR:
            told[name] = f"{one.fraction:.0%} of {one.ceiling} is reached: {_FEWER[one.ceiling]}"
    reduced = next((one for one in profile.classes if one.name == COMMUNICATION), None)
    waited = profile.wait_us or 0.0
    if reduced is not None and reduced.kernel_us and waited >= _MOSTLY * reduced.kernel_us:
        told[COMMUNICATION] = (
            f"{waited / reduced.kernel_us:.0%} of it is waiting for the rank that comes last: what "
            "that rank does before, such as its experts (kd moe), and not the link"
        )
    return told


def ceiling_remarks(found: Ceilings) -> list[str]:
    """What ceilings rest on, and why a class has none; each a line."""
    lines = [f"{name}: {one.basis}" for name, one in found.attained.items() if one.basis]
    return [*lines, *(f"{name}: not counted: {why}" for name, why in found.missing.items())]


def _of_gpu(work: Counted, seconds: float, gpu: Gpu) -> Attained:
    read, product = work.bytes / gpu.bandwidth, (work.flops or 0.0) / gpu.flops
    return Attained(
        work.bytes,
        work.flops,
        work.bytes / seconds / 1e9,
        max(read, product) / seconds,
        "DRAM" if read >= product else "flops",
        gpu.name,
        work.basis,
    )


def _of_link(profile: Profile, one: ClassTime, link: LinkRate | None) -> Attained | Uncounted:
    if not one.counted:
        return Uncounted(
            "no kernel has NCCL's arguments, as in CUDA graphs and in all-reduces of SGLang's own"
        )
    if link is None:
        return Uncounted("what the link gives is not known: name it (--link, --link-bandwidth)")
    # Waiting is told of all collectives together, so only where all of them have bytes.
    whole = one.counted == one.count
    waited = profile.wait_us if whole else None
    seconds = (one.counted_us - (waited or 0.0)) * 1e-6
    if seconds <= 0:
        return Uncounted("its kernels take no time but waiting")
    notes = [f"{link.name}, {link.bandwidth / 1e9:,.1f} GB/s a direction: {link.source}"]
    if not whole:
        notes.append(f"of {one.counted:.1f} of {one.count:.1f} kernels a step alone")
    notes.append("its time has waiting for other ranks in it" if waited is None else "no waiting")
    rate = one.bytes / seconds
    told = "; ".join(notes)
    return Attained(one.bytes, None, rate / 1e9, rate / link.bandwidth, "link", link.name, told)


def _gpu(name: str | None) -> Gpu | None:
    return next((gpu for gpu in GPUS.values() if name and name.startswith(gpu.device)), None)
