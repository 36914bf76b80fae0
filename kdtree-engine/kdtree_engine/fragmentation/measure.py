"""Runs, mean run length and page locality of the slots that requests hold.

Of a request with slots a_0 .. a_(n-1) in prefix order, at page size 1:

    runs             1 + the number of j with a_(j+1) != a_j + 1; 0 for n = 0
    mean run length  n / runs; 0 for n = 0
    page locality    the share of the n - 1 steps a_j -> a_(j+1) that stay in one page of the pool,
                     a_j // ROWS_PER_PAGE == a_(j+1) // ROWS_PER_PAGE; 1 for n < 2

A slot's row is 1,152 bytes, nine whole cache lines, so that cache lines do not notice distance.
Address translation does: a page is the 2 MiB that one entry of it covers on the supported GPUs.
"""

from __future__ import annotations

import dataclasses

import torch

__all__ = ["ROWS_PER_PAGE", "ROW_BYTES", "Fragmentation", "Summary", "measure", "steps_of"]

ROW_BYTES = 1152
"""One slot in one layer: 576 numbers of 16 bits."""
ROWS_PER_PAGE = 2 * 2**20 // ROW_BYTES
"""Whole rows in 2 MiB: 1,820."""


@dataclasses.dataclass(frozen=True)
class Summary:
    """Of several requests, on the host. All 0 but locality, which is 1, where there are none.

    worst_decile: mean runs of the tenth of the requests, rounded up, that has the most runs.
    """

    requests: int
    mean_tokens: float
    mean_runs: float
    worst_decile_runs: float
    mean_run_length: float
    page_locality: float


@dataclasses.dataclass(frozen=True)
class Fragmentation:
    """Of B requests, on the device of their rows.

    tokens, runs: int64 [B]. mean_run_length: float64 [B], slots. page_locality: float64 [B].
    """

    tokens: torch.Tensor
    runs: torch.Tensor
    mean_run_length: torch.Tensor
    page_locality: torch.Tensor

    @staticmethod
    def of(tokens: torch.Tensor, breaks: torch.Tensor, near: torch.Tensor) -> Fragmentation:
        """From what `steps_of` counts. All int64 [B]."""
        runs = torch.where(tokens > 0, breaks + 1, 0)
        steps = tokens - 1
        return Fragmentation(
            tokens,
            runs,
            tokens.double() / runs.clamp(min=1),
            torch.where(steps > 0, near.double() / steps.clamp(min=1), 1.0),
        )

    def summary(self) -> Summary:
        """The one part that waits for the device. mean_run_length: tokens of all / runs of all."""
        if not self.runs.numel():
            return Summary(0, 0.0, 0.0, 0.0, 0.0, 1.0)
        worst = self.runs.double().topk(-(-self.runs.numel() // 10)).values.mean()
        tokens, runs = self.tokens.double(), self.runs.double()
        together = tokens.sum() / runs.sum().clamp(min=1)
        asked = torch.stack(
            [tokens.mean(), runs.mean(), worst, together, self.page_locality.mean()]
        )
        return Summary(self.runs.numel(), *asked.tolist())


def measure(rows: torch.Tensor, lengths: torch.Tensor) -> Fragmentation:
    """Fragmentation of B requests; launches work on the device of `rows` and never waits for it.

    rows: [B, L] of any integer type, slots in prefix order, as of a request table.
    lengths: [B] of any integer type, 0 to L, on the same device; what follows them is not read.
    Raises ValueError for other shapes. Lengths are not checked, as that would wait.
    """
    if rows.dim() != 2 or lengths.shape != rows.shape[:1]:
        raise ValueError(f"rows {tuple(rows.shape)} and lengths {tuple(lengths.shape)}")
    tokens = lengths.long()
    before, after = rows[:, :-1].long(), rows[:, 1:].long()
    places = torch.arange(1, max(rows.shape[1], 1), device=rows.device)
    inside = places < tokens[:, None]  # whether step j - 1 -> j is between two slots of the request
    breaks = ((after != before + 1) & inside).sum(1)
    near = ((before // ROWS_PER_PAGE == after // ROWS_PER_PAGE) & inside).sum(1)
    return Fragmentation.of(tokens, breaks, near)


def steps_of(slots: torch.Tensor) -> torch.Tensor:
    """How many steps of one request break a run, and how many stay in one page: int64 [2].

    slots: [n] of int32 or int64, in prefix order. Copies none of them, takes 5 n bytes at most for
    a moment where they are int32, and does not wait for their device.
    """
    before, after = slots[:-1], slots[1:]
    breaks = (after - before != 1).sum()
    page = slots.div(ROWS_PER_PAGE, rounding_mode="floor")
    return torch.stack([breaks, (page[1:] == page[:-1]).sum()])
