"""What `kd profile` shows of a profile, as rows of tables and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kdtree_engine.profiling.comparison import ClassChange, compare
from kdtree_engine.profiling.rules import COMMUNICATION
from kdtree_engine.profiling.summary import KernelTime, Profile, RankProfile
from phases.profile_ceiling import Ceilings, ceiling_remarks, levers
from phases.profile_note import Note, note_remarks

__all__ = [
    "CHANGE_COLUMNS",
    "CLASS_COLUMNS",
    "HOST_COLUMNS",
    "KERNEL_COLUMNS",
    "RANK_COLUMNS",
    "as_json",
    "change_rows",
    "class_rows",
    "host_rows",
    "kernel_rows",
    "rank_rows",
    "remarks",
]

RANK_COLUMNS = (
    *("rank", "steps", "told by", "step us", "median", "longest", "busy", "outside us"),
    *("collectives us", "of it waiting"),
)
CLASS_COLUMNS = ("class", "us", "share", "kernels", "kernel us", "GB/s", "of ceiling", "lever")
KERNEL_COLUMNS = ("kernel us", "count", "class", "name")
HOST_COLUMNS = ("host, while the GPU waits", "us", "share")
CHANGE_COLUMNS = ("class", "before us", "after us", "change us", "of the step before")

_LONGEST_NAME = 120
_LONG = 3.0
"""How many times as long as the median a step is that holds something else."""
_WAITED = 0.01
"""Of a step: less waiting in collectives is not remarked on."""


def rank_rows(profile: Profile) -> list[tuple[str, ...]]:
    return [
        (
            rank.rank,
            str(rank.steps),
            rank.told_by,
            _us(rank.step_us),
            _us(rank.median_us),
            _us(rank.longest_us),
            _share(rank.busy_us, rank.step_us),
            _us(rank.outside_us),
            *_collectives(rank),
        )
        for rank in profile.ranks
    ]


def _collectives(rank: RankProfile) -> tuple[str, str]:
    """What a rank's collectives take of a step, and what of that it waits for the last rank."""
    one = rank.class_of(COMMUNICATION)
    return _us(one.kernel_us) if one else "", "" if rank.wait_us is None else _us(rank.wait_us)


def class_rows(profile: Profile, found: Ceilings | None = None) -> list[tuple[str, ...]]:
    """The largest class first, then the step that they add up to. found: the ceilings, if any."""
    reached = found.attained if found else {}
    missing = found.missing if found else {}
    rates = {name: one.gb_s for name, one in reached.items()}
    told = levers(profile, found)
    rows = [
        (
            one.name,
            _us(one.us),
            _share(one.us, profile.step_us),
            f"{one.count:.1f}" if one.count else "",
            _us(one.kernel_us) if one.count else "",
            "" if (rate := rates.get(one.name, one.gb_s)) is None else f"{rate:,.1f}",
            f"{reached[one.name].fraction:.1%} {reached[one.name].ceiling}"
            if one.name in reached
            else "not counted" * (one.name in missing),
            told[one.name],
        )
        for one in profile.classes
    ]
    return [*rows, ("step", _us(profile.step_us), "100.0%", "", "", "", "", "")]


def kernel_rows(kernels: Sequence[KernelTime]) -> list[tuple[str, ...]]:
    return [
        (_us(one.kernel_us), f"{one.count:.1f}", one.kernel_class, _short(one.name))
        for one in kernels
    ]


def host_rows(profile: Profile) -> list[tuple[str, ...]]:
    return [(one.name, _us(one.us), _share(one.us, profile.step_us)) for one in profile.host]


def change_rows(before: Profile, after: Profile) -> list[tuple[str, ...]]:
    """The largest change first, then the step's, which they add up to."""
    step = ClassChange("step", before.step_us, after.step_us)
    return [
        (
            one.name,
            _us(one.before_us),
            _us(one.after_us),
            f"{one.change_us:+,.1f}",
            f"{one.change_us / before.step_us:+.1%}" if before.step_us else "",
        )
        for one in (*compare(before, after), step)
    ]


def remarks(profile: Profile, before: Profile | None = None) -> list[str]:
    """What limits these figures: each a line."""
    found = _limits(profile)
    if before is not None:
        found += [f"before: {line}" for line in _limits(before)]
        kinds = [sorted({rank.told_by for rank in one.ranks}) for one in (before, profile)]
        if kinds[0] != kinds[1] or len(before.ranks) != len(profile.ranks):
            found.append("before and after differ in their ranks or in how steps are told apart")
    return found


def _limits(profile: Profile) -> list[str]:
    """What limits one side's figures. Files are named where a rank's name may not be enough."""
    found: list[str] = []
    whole = dict.fromkeys(rank.file for rank in profile.ranks if rank.told_by == "whole")
    if whole:
        found.append(
            f"{', '.join(whole)}: no decode steps can be told apart; "
            "the figures are of the whole trace as one step"
        )
    for rank in profile.ranks:
        if rank.longest_us > _LONG * rank.median_us:
            found.append(
                f"{rank.rank}: its longest step took {_us(rank.longest_us)} us, the median "
                f"{_us(rank.median_us)}: a prefill or a wait for requests is in it, and in the "
                "shares; profile under steady load"
            )
        if rank.told_by == "graphs":
            found.append(
                f"{rank.rank}: steps are told by replays of graphs alone, a round of them each: a "
                "drafter's that is like the target's, or a prefill, cannot be told from it"
            )
    left_out = max(rank.left_out for rank in profile.ranks)
    if left_out:
        found.append(f"{left_out} passes that were no decode are left out")
    return [*found, *_waiting(profile)]


def _waiting(profile: Profile) -> list[str]:
    """Of several ranks: whether their collectives could be compared, and which is waited for."""
    told = {rank.rank: rank.wait_us for rank in profile.ranks if rank.wait_us is not None}
    meet = [rank for rank in profile.ranks if rank.class_of(COMMUNICATION) is not None]
    if len(profile.ranks) < 2 or not meet:
        return []
    if len(told) < len(profile.ranks):
        return [
            "what ranks wait for each other in collectives is not told: it takes the same steps "
            "with the same collectives on all of them, and no DP attention"
        ]
    last = min(told, key=lambda rank: told[rank])
    if max(told.values()) < _WAITED * profile.step_us:
        return []
    return [
        f"ranks wait {_us(sum(told.values()) / len(told))} us of a step in collectives, "
        f"{last} the least ({_us(told[last])}): it comes last most of the time"
    ]


def as_json(
    profile: Profile,
    before: Profile | None = None,
    note: Note | None = None,
    found: Ceilings | None = None,
) -> dict[str, Any]:
    """All figures, with full names of kernels. note: of what was profiled, where there is one."""
    document: dict[str, Any] = {"version": 1, **_plain(profile)}
    told = levers(profile, found)
    document["classes"] = [{**one, "lever": told[one["name"]]} for one in document["classes"]]
    if note is not None:
        document["of"] = dataclasses.asdict(note)
    if found is not None:
        document["ceilings"] = {
            name: dataclasses.asdict(one) for name, one in found.attained.items()
        }
        document["not_counted"] = found.missing
    if before is not None:
        document["before"] = _plain(before)
        document["changes"] = [
            {**dataclasses.asdict(one), "change_us": one.change_us}
            for one in compare(before, profile)
        ]
    document["remarks"] = [
        *note_remarks(profile, note),
        *remarks(profile, before),
        *(ceiling_remarks(found) if found else ()),
    ]
    return document


def _plain(profile: Profile) -> dict[str, Any]:
    return {
        **dataclasses.asdict(profile),
        "classes": [{**dataclasses.asdict(one), "gb_s": one.gb_s} for one in profile.classes],
        "unknown": [one.name for one in profile.unknown],
    }


def _us(value: float) -> str:
    return f"{value:,.1f}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _short(name: str) -> str:
    """A demangled name fills pages: its beginning and its end tell kernels apart."""
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[: _LONGEST_NAME - 33]}...{name[-30:]}"
