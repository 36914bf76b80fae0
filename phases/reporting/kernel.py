"""The verify kernel: against peers and Triton, under its roofline, and what was tuned where."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from kdtree_engine.tuning import Measured, load_table, table_path
from phases.gate import Unit
from phases.regimes import Regime
from phases.reporting.kept import Kept, KeptGate
from phases.reporting.model import (
    BarPanel,
    Bars,
    Block,
    Headline,
    Missing,
    Roofline,
    RooflinePoint,
    Section,
    Source,
    Standing,
    Table,
    number,
)

__all__ = ["kernel_headlines", "kernel_section", "roofline", "roofline_section", "speedups"]

PEERS, REGIMES, NAIVE, MODEL = "peers", "kernel-regimes", "kernel-speed", "roofline-model"
TRITON = "sglang-extend"
"""SGLang's Triton kernel as it serves trees: the one that this kernel replaces."""

_REGIME = re.compile(r"B=(\d+) H=(\d+) T=(\d+) L=(\d+)")
_OVER = re.compile(rf"(?P<regime>{_REGIME.pattern}), over (?P<peer>[\w-]+), (?P<mask>tree|chain)")
_PREDICTED = re.compile(rf"(?P<part>\S+) (?P<regime>{_REGIME.pattern}), without t0: (?P<term>.+)")


def kernel_section(kept: Kept) -> Section:
    blocks: list[Block] = []
    if peers := speedups(kept):
        blocks += [peers, _times(kept)]
    else:
        blocks.append(Missing("the kernel against its peers", kept.why_not(PEERS)))
    blocks.append(_over_naive(kept) or Missing("the kernel against naive", kept.why_not(NAIVE)))
    blocks.append(_tuned(kept))
    return Section(
        "kernel",
        "Verify kernel against peers and Triton",
        "How many times the kernel's time a peer takes for the same regime, in one run of one "
        "gate, each output held against the oracle. More than 1: the kernel is faster. B requests, "
        "H heads a rank, T tree nodes, L tokens of prefix. sglang-extend is SGLang's Triton "
        "kernel, which serves trees without this one. A peer that takes no tree mask does a chain "
        "of the same size, which is less work. No figure: the peer does not do that regime, or was "
        "wrong in it.",
        tuple(blocks),
    )


def speedups(kept: Kept) -> Bars | None:
    """Of the newest run of the gate `peers`: a panel for each peer."""
    one = kept.measured(PEERS)
    if one is None:
        return None
    found = list(_over(one))
    if not found:
        return None
    common = _commonest(dict.fromkeys(_regime(match["regime"]) for match, _ in found))
    panels: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for match, value in found:
        bars = panels.setdefault((match["peer"], match["mask"]), [])
        bars.append((_swept(_regime(match["regime"]), common)[1], value))
    return Bars(
        f"Times as fast as each peer, {_short(common)} where a row says nothing else",
        "times as fast",
        "regime",
        tuple(
            BarPanel(peer, tuple(bars), f"does a {mask}") for (peer, mask), bars in panels.items()
        ),
        one.source,
    )


def _over(one: KeptGate) -> Iterator[tuple[re.Match[str], float]]:
    """The figures of the gate `peers` that are over a peer, in its order."""
    for name, value in one.figures.items():
        if found := _OVER.fullmatch(name):
            yield found, value


def kernel_headlines(kept: Kept) -> list[Headline]:
    """The speed-up over Triton at the longest prefix, and the best share of the roof."""
    found = []
    if one := kept.measured(PEERS):
        triton = [
            (_regime(match["regime"]), value)
            for match, value in _over(one)
            if match["peer"] == TRITON
        ]
        if triton:
            regime, value = max(triton, key=lambda pair: pair[0].prefix)
            told = f"the Triton kernel that serves trees, at {_short(regime)}"
            found.append(Headline(f"{number(value)}x", told, "kernel", one.source))
    if roof := roofline(kept):
        best = max(roof.points, key=lambda point: point.achieved / roof.ceiling(point.intensity))
        share = best.achieved / roof.ceiling(best.intensity)
        told = f"of the measured roof, at {best.label}"
        found.append(Headline(f"{share:.0%}", told, "roofline", roof.source))
    return found


# ---------------------------------------------------------------------------------------------
# Roofline.


def roofline_section(kept: Kept) -> Section:
    roof = roofline(kept)
    blocks: list[Block] = [roof or Missing("achieved against the ceilings", kept.why_not(REGIMES))]
    blocks.append(_predicted(kept) or Missing("times on other GPUs", kept.why_not(MODEL)))
    return Section(
        "roofline",
        "Roofline",
        "Arithmetic intensity is a regime's flops over the bytes that must be moved, each KV row "
        "once. The roof is what the same run measured of the GPU: the bandwidth of a copy, and the "
        "rate of a matrix product. A point is a regime; times are rotated, caches flushed.",
        tuple(blocks),
    )


def roofline(kept: Kept) -> Roofline | None:
    """Of the newest run of the gate `kernel-regimes`; the ceilings are that run's."""
    one = kept.measured(REGIMES)
    if one is None or not {"copy", "matrix product"} <= one.figures.keys():
        return None
    times = {_regime(name): us for name, us in one.figures.items() if _REGIME.fullmatch(name)}
    points = [
        RooflinePoint(
            *_swept(regime, _commonest(times)),
            _short(regime),
            regime.flops / regime.floor_bytes,
            regime.flops / us / 1e6,
            us,
        )
        for regime, us in times.items()
        if us > 0
    ]
    if not points:
        return None
    return Roofline(
        "Achieved against the roof",
        one.figures["copy"],
        one.figures["matrix product"],
        tuple(points),
        one.source,
    )


_SWEPT = {"batch": "B", "heads": "H", "nodes": "T", "prefix": "L"}


def _commonest(regimes: Iterable[Regime]) -> Regime:
    """The shape that the others vary: of each dimension what most regimes have."""
    known = list(regimes)
    values = {name: [getattr(one, name) for one in known] for name in _SWEPT}
    return Regime(**{name: max(of, key=of.count) for name, of in values.items()})


def _swept(regime: Regime, common: Regime) -> tuple[str, str]:
    """What makes a regime differ from the commonest shape, and that in short: `T=65`."""
    differ = [name for name in _SWEPT if getattr(regime, name) != getattr(common, name)]
    words = dict(word.split("=") for word in _short(regime).split())
    shown = differ or ["prefix"]
    return shown[0], " ".join(f"{_SWEPT[name]}={words[_SWEPT[name]]}" for name in shown)


def _predicted(kept: Kept) -> Table | None:
    """What the model says of parts on which nothing was measured."""
    one = kept.measured(MODEL)
    if one is None:
        return None
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for figure in one.entry.figures:
        found = _PREDICTED.fullmatch(figure.name)
        if found and figure.unit is Unit.PREDICTED_MICROSECONDS:
            key = (found["part"], _short(_regime(found["regime"])))
            rows.setdefault(key, {})[found["term"]] = figure.value
    if not rows:
        return None
    terms = list(dict.fromkeys(term for row in rows.values() for term in row))
    return Table.of(
        "Predicted, not measured: us of a call by the model of plan 15, without launch",
        ("regime", "GPU", *(f"#{term}" for term in terms)),
        [
            (regime, part, *(number(row[term]) if term in row else "" for term in terms))
            for (part, regime), row in rows.items()
        ],
        source=_as_prediction(one),
        folded=True,
    )


def _as_prediction(one: KeptGate) -> Source:
    source = one.source
    remark = f"the gate's evidence is {source.standing}"
    return Source(
        source.file, Standing.PREDICTED, source.where, source.date, source.revision, remark
    )


# ---------------------------------------------------------------------------------------------
# Tables beside the bars.


def _times(kept: Kept) -> Table:
    """Microseconds of the kernel, and of each peer: its time over the kernel's, times that."""
    one = kept.measured(PEERS)
    assert one is not None
    ours = {name: us for name, us in one.figures.items() if _REGIME.fullmatch(name)}
    ratios: dict[str, dict[str, float]] = {}
    for match, value in _over(one):
        ratios.setdefault(match["peer"], {})[match["regime"]] = value
    rows = [
        (
            _short(_regime(name)),
            number(us),
            *(number(us * ratio[name]) if name in ratio else "" for ratio in ratios.values()),
        )
        for name, us in ours.items()
    ]
    return Table.of(
        "Microseconds of a call",
        ("regime", "#kernel", *(f"#{peer}" for peer in ratios)),
        rows,
        source=one.source,
        folded=True,
    )


def _over_naive(kept: Kept) -> Table | None:
    """The project's own first kernel, without splits: what a serial walk of the prefix costs."""
    one = kept.measured(NAIVE)
    if one is None:
        return None
    figures = one.figures
    rows = [
        (
            _short(_regime(name)),
            number(us),
            number(figures[f"{name}, naive"]),
            f"{number(figures[f'{name}, naive'] / us)}x",
        )
        for name, us in figures.items()
        if _REGIME.fullmatch(name) and f"{name}, naive" in figures and us > 0
    ]
    return Table.of(
        "Against a naive kernel that walks the prefix in one piece",
        ("regime", "#kernel us", "#naive us", "#times as fast"),
        rows,
        source=one.source,
    )


def _tuned(kept: Kept) -> Table:
    """The tables that pick tiles: which of their entries somebody timed."""
    rows = []
    for path in sorted(table_path("sm_90").parent.glob("sm_*.json")):
        table = load_table(path)
        entries = [entry for _, entry in table.everything()]
        measured = [one.provenance for one in entries if isinstance(one.provenance, Measured)]
        where = ", ".join(sorted({f"{one.gpu}, {one.date}" for one in measured}))
        rows.append(
            (
                table.architecture,
                table.body,
                str(len(entries)),
                str(len(measured)),
                where or "none: predicted by the model, never timed",
            )
        )
    rows.sort(key=lambda row: int(row[0].partition("_")[2]))
    return Table.of(
        "Tuning tables: entries that pick a tile, and where they were timed",
        ("architecture", "body", "#entries", "#timed", "where"),
        rows,
    )


def _regime(name: str) -> Regime:
    """Of `B=1 H=8 T=9 L=4096`."""
    found = _REGIME.fullmatch(name)
    assert found is not None, name
    return Regime(*map(int, found.groups()))


def _short(regime: Regime) -> str:
    """`B=1 H=8 T=9 L=16k`: a k is 1,024 tokens, as everywhere here."""
    whole = regime.prefix % 1024 == 0
    prefix = f"{regime.prefix // 1024}k" if whole else str(regime.prefix)
    return f"B={regime.batch} H={regime.heads} T={regime.nodes} L={prefix}"
