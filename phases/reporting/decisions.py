"""Decisions: what was decided, on which figures, and what would reopen or overturn it."""

from __future__ import annotations

import re

from phases.plan import Plan, PlanStatus
from phases.reporting.gates import GateStanding, standing_of
from phases.reporting.kept import Kept
from phases.reporting.model import Cell, Entries, Entry, Missing, Section, Tone

__all__ = ["decisions_section", "paragraphs", "part", "plain"]

_TONES = {PlanStatus.DONE: Tone.GOOD, PlanStatus.DEFERRED: Tone.WARN}
_OVERTURN, _CONTEXT = "What would overturn it", "Context"


def decisions_section(kept: Kept) -> Section:
    decided = [plan for plan in kept.plans if plan.decision]
    decided.sort(key=lambda plan: (plan.status is not PlanStatus.DEFERRED, plan.id))
    entries = Entries(
        "Decisions, deferrals first",
        tuple(
            Entry(
                f"{plan.id:04d} {plan.title}",
                Cell(plan.status, _TONES.get(plan.status, Tone.PLAIN)),
                f"plans/{plan.path.name}, {plan.date}",
                (
                    ("decided", plan.decision or ""),
                    *_reasons(kept, plan),
                    ("reopened by", plan.reopen_when or _overturn(plan)),
                ),
            )
            for plan in decided
        ),
    )
    return Section(
        "decisions",
        "Decisions",
        "From the plans' own front matter and text. A deferral says what reopens it. Figures here "
        "are in the plans' words, from their reasons; those of kept evidence stand above.",
        (entries,) if decided else (Missing("decisions", "no plan has one"),),
    )


def _overturn(plan: Plan) -> str:
    return " ".join(paragraphs(plan.text, _OVERTURN)) or "nothing is named"


def _reasons(kept: Kept, plan: Plan) -> list[tuple[str, str]]:
    """A phase's decision rests on its gates; others, and deferrals, on figures in their text."""
    gates = [gate for phase in kept.phases if phase.plan == plan.id for gate in phase.gates]
    found = []
    if gates:
        by_state: dict[GateStanding, list[str]] = {}
        for gate in gates:
            by_state.setdefault(standing_of(kept, gate), []).append(gate.name)
        told = "; ".join(f"{state}: {', '.join(names)}" for state, names in by_state.items())
        found.append(("its gates", told))
    if not gates or plan.status is PlanStatus.DEFERRED:
        told = " ".join(_with_figures(plan)) or " ".join(paragraphs(plan.text, _CONTEXT))
        found.append(("rests on", told or "no figures are given"))
    return found


_FIGURE = re.compile(
    r"\d[\d,.]*( (percent|us|ms|x|[KMGT]B|TB/s|tok/s|bytes|splits|slots|of \d)\b|%)"
)
_REASONS = ("Why", "Context", "Options", "Consequences")


def _with_figures(plan: Plan) -> list[str]:
    """Paragraphs and list items of the plan's reasons that have a figure with its unit."""
    pieces = [
        plain(piece)
        for heading in _REASONS
        for piece in re.split(r"\n[ \t]*\n|^[-*] ", part(plan.text, heading), flags=re.M)
    ]
    return [piece for piece in pieces if _FIGURE.search(piece) and not piece.startswith("|")]


def part(text: str, heading: str) -> str:
    """The Markdown of the section `## heading`; nothing where there is none."""
    found = re.search(rf"^## {re.escape(heading)}[ \t]*\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    return found[1].strip() if found else ""


def paragraphs(text: str, heading: str) -> list[str]:
    """Of the section `## heading`, each as one line, lists and tables left out."""
    pieces = re.split(r"\n[ \t]*\n", part(text, heading))
    return [plain(piece) for piece in pieces if piece and not piece.startswith(("|", "- "))]


_EMPHASIS = re.compile(r"(?<![\w*])(\*{1,2})(?! )([^*]+?)(?<! )\1(?![\w*])")


def plain(markdown: str) -> str:
    """Without the marks of code, links and emphasis, on one line."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", markdown).replace("`", "")
    return " ".join(_EMPHASIS.sub(r"\2", text).split())
