"""Slots of one request in runs of a given length: what the price of fragmentation is timed over.

A run and the one slot behind it, which stays empty, make a cell, so that no two runs of a layout
ever touch: their number and length are exact, in whatever order they come. Cells are not aligned to
anything.
"""

from __future__ import annotations

import torch

__all__ = ["lay_out", "slots_needed"]


def slots_needed(tokens: int, run_length: int, window: int | None = None) -> int:
    """The smallest pool, in slots, that `lay_out` takes. Raises ValueError as it does."""
    if tokens < 1 or run_length < 1:
        raise ValueError(f"{tokens} tokens in runs of {run_length}: both must be at least 1")
    runs = -(-tokens // run_length)
    if window is None:
        return runs * (run_length + 1)
    return -(-runs // _runs_of_a_window(run_length, window)) * window


def lay_out(
    tokens: int,
    run_length: int,
    pool: int,
    *,
    seed: int,
    window: int | None = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Slots of `tokens` tokens in prefix order, int64 [tokens] on `device`, no slot twice.

    They lie in ceil(tokens / run_length) runs of just `run_length` slots, the last one shorter
    where it does not divide; with run_length = tokens the request is contiguous, wherever it lies.

    pool: slots of the pool; those that come out are 0 to pool - 1.
    window: None: each run lies anywhere in the pool. Else the prefix is cut into stretches that
        fill half of a window of so many slots each. Runs lie anywhere in the window of their
        stretch, and windows anywhere in the pool, none over another.
    seed: equal arguments give equal slots on one kind of device.
    Raises ValueError where there is no room: `slots_needed` says how much it takes.
    """
    if pool < (needed := slots_needed(tokens, run_length, window)):
        raise ValueError(
            f"{tokens} tokens in runs of {run_length}"
            f"{'' if window is None else f' within {window} slots'} take a pool of {needed} slots, "
            f"this one has {pool}"
        )
    generator = torch.Generator(device=device).manual_seed(seed)
    runs = -(-tokens // run_length)
    width = window or pool
    cells = width // (run_length + 1)
    each = runs if window is None else _runs_of_a_window(run_length, window)
    order = torch.randperm(pool // width, generator=generator, device=device)
    windows = order[: -(-runs // each)]
    # In float64 two draws are hardly ever equal, where a sort would fall back to the pool's order.
    drawn = torch.rand(len(windows), cells, generator=generator, device=device, dtype=torch.float64)
    places = drawn.argsort(dim=1)[:, :each] * (run_length + 1)
    starts = (windows[:, None] * width + places).flatten()[:runs]
    within = torch.arange(run_length, device=device)
    return (starts[:, None] + within).flatten()[:tokens]


def _runs_of_a_window(run_length: int, window: int) -> int:
    if window < run_length + 1:
        raise ValueError(f"no run of {run_length} and the slot behind it fits {window} slots")
    return max(1, window // 2 // run_length)
