"""A load test as a person reads it: rows of points and windows, and what else must be known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from phases.bench_load import LoadBench
from phases.load_histogram import PERCENTILES
from phases.load_point import Point, drift

__all__ = ["COLUMNS", "WINDOW_COLUMNS", "remarks", "rows", "window_rows"]

COLUMNS = (
    *("server", "context", "load", "tok/s", "each", "acc"),
    *("first p50/99", "itl p50/90/99", "gap p99/max", "answers", "tokens"),
)
WINDOW_COLUMNS = (
    *("server", "context", "at s", "tok/s", "itl p50", "itl p99", "gap max"),
    *("answers", "errors", "in flight", "slots"),
)


def rows(bench: LoadBench) -> list[tuple[str, ...]]:
    """A row for each point; times in milliseconds, tok/s of all requests and of each."""
    found: list[tuple[str, ...]] = []
    for point in bench.points:
        gap = point.chunk_gap
        found.append(
            (
                point.server,
                str(point.length or "file"),
                point.load,
                f"{point.tokens_per_second:.1f}",
                _number(point.request_tokens_per_second),
                f"{point.accept_length:.2f}" if point.accept_length else "",
                _several(point.first_token.percentile(one) for one in (50, 99)),
                _several(point.inter_token.percentile(one) for one in PERCENTILES),
                _several((gap.percentile(99), gap.largest if gap.count else None)),
                f"{point.answers}{f', {point.failed} failed' if point.failed else ''}",
                _verdict(bench, point),
            )
        )
    blank = ("",) * (len(COLUMNS) - 4)
    # The last line of what a server said is the nearest to a reason.
    found += [
        (name, "", "failed", *blank, (said.strip() or "no message").splitlines()[-1])
        for name, said in bench.failed.items()
    ]
    return found


def _several(times: Iterable[float | None]) -> str:
    """Milliseconds with slashes between; nothing where nothing was timed."""
    found = [_ms(one) for one in times]
    return "/".join(found) if all(found) else ""


def window_rows(bench: LoadBench) -> list[tuple[str, ...]]:
    """A row for each window of a soak."""
    return [
        (
            point.server,
            str(point.length or "file"),
            f"{window.begun:.0f}",
            f"{window.tokens_per_second:.1f}",
            *(_ms(window.inter_token.percentile(one)) for one in (50, 99)),
            _ms(window.chunk_gap.largest if window.chunk_gap.count else None),
            str(window.answers),
            str(window.errors),
            str(window.in_flight),
            "" if window.used_slots is None else str(window.used_slots),
        )
        for point in bench.points
        for window in point.windows
    ]


def remarks(bench: LoadBench) -> list[str]:
    """What a reader of the figures must know besides them."""
    lines = [f"{point.where}: {why}" for point in bench.points if (why := point.client_bound)]
    for point in bench.points:
        lines += [f"{point.where}: {said}" for said in point.said]
        needed = point.most_in_flight * (point.length + point.new_tokens)
        slots = bench.slots.get(point.server, 0)
        if 0 < slots < needed and bench.plan.fresh:
            lines.append(
                f"{point.where}: {slots} KV slots hold fewer than these requests at once; the "
                "server lets some wait"
            )
        lines += [
            f"{point.where}: {count} answers were not judged: they {why}"
            for why, count in point.unjudged.items()
        ]
        if len(point.windows) > 2:
            found = drift(point.windows)
            lines.append(
                f"{point.where}: from the first third to the last tok/s x {_times(found, 0)}, itl "
                f"p99 x {_times(found, 1)}; {found['silent']} windows without a token, longest gap "
                f"{_ms(found['longest_gap'])} ms"
            )
    for name, slots_held in bench.leaked.items():
        if slots_held:
            lines.append(f"{name}: {slots_held} KV slots are in use with no request: they leaked")
        elif slots_held is None:
            lines.append(f"{name}: requests of others run, so leaked KV slots cannot be told")
    return lines


def _times(found: Mapping[str, float | int | None], which: int) -> str:
    value = found[("tokens_per_second", "inter_token_p99")[which]]
    return "?" if value is None else f"{value:.2f}"


def _ms(seconds: float | None) -> str:
    """Three digits, and no exponent."""
    if seconds is None:
        return ""
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _verdict(bench: LoadBench, point: Point) -> str:
    """What the tokens of a point are worth."""
    if point.why:
        return point.why
    judged = bench.judged(point)
    if not judged:
        return "not compared"
    found = bench.differences.get(point.where, [])
    if not found:
        return "equal"
    wrong = [one for one in found if not one.near_tie]
    what = f"{len(wrong)} differ" if wrong else f"{len(found)} near-ties"
    return f"{what} of {judged} answers, {(wrong or found)[0].how}"
