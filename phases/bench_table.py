"""What a person reads of a `Bench`: rows, and the ceilings. Nothing here runs or prints."""

from __future__ import annotations

from phases.bench import Bench, Measurement

__all__ = ["COLUMNS", "bench_rows", "ceilings"]

COLUMNS = (
    "implementation",
    "tile",
    "regime",
    "us",
    "cold us",
    "of copy",
    "of product",
    "must",
    "aim",
    "against it",
)


def bench_rows(bench: Bench) -> list[tuple[str, ...]]:
    """A row for each figure, the peers last; a peer that is not installed takes one row in all.

    "us" is by the rotated method, as are the shares and what it must reach; "cold us" by the other.
    The last column of a peer is how many times its time is that of the first library and tile.
    """
    first = {entry.regime: entry for entry in reversed(bench.kernels)}
    rows = [_row(entry, str(entry.tile or "automatic"), "") for entry in bench.kernels]
    idle: set[str] = set()
    for peer in bench.peers:
        if peer.status == "not installed":
            if peer.implementation not in idle:
                rows.append((peer.implementation, "", "all", peer.status, *[""] * 6))
            idle.add(peer.implementation)
            continue
        kernel = first.get(peer.regime)
        ratio = bench.ratio(peer, kernel) if kernel else None
        rows.append(_row(peer, peer.mask, f"{ratio:.2f}x" if ratio else ""))
    return rows


def ceilings(bench: Bench) -> str:
    """`copy 4.28 TB/s, matrix product 790 TFLOP/s`: what the fractions are fractions of."""
    return (
        f"copy {bench.copy_bytes_per_second / 1e12:.2f} TB/s, "
        f"matrix product {bench.product_flops_per_second / 1e12:.0f} TFLOP/s"
    )


def _row(entry: Measurement, tile: str, ratio: str) -> tuple[str, ...]:
    if entry.median_us is None:
        time = entry.status if entry.status == "wrong" else f"{entry.status}: {entry.why}"
        shares = ("", "", "")
    else:
        assert entry.cold_us is not None
        assert entry.of_copy is not None
        assert entry.of_product is not None
        time = f"{entry.median_us:.1f}"
        shares = (f"{entry.cold_us:.1f}", f"{entry.of_copy:.2f}", f"{entry.of_product:.2f}")
    bars = ("" if bar is None else f"{bar:g}" for bar in (entry.must_us, entry.aim_us))
    return (entry.implementation, tile, str(entry.regime), time, *shares, *bars, ratio)
