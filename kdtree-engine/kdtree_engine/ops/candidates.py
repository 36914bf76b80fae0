"""The best candidates of each position and their log-probabilities, defined to the last bit.

Plan 20, "The oracle is the law": `csrc_trees/exact.h` does the same operations, so a CPU and a GPU
give the same bits. Every step is a basic IEEE operation, rounded for itself, or integer arithmetic.
"""

from __future__ import annotations

import torch

__all__ = [
    "CHUNK_COLUMNS",
    "MAX_COLUMNS",
    "MAX_RANKS",
    "check_scores",
    "fixed_exp",
    "log_normaliser",
    "top_candidates",
]

CHUNK_COLUMNS = 4096
"""Columns of one block of the GPU; part of the definition, as each chunk has its own maximum."""
MAX_COLUMNS = 64 * CHUNK_COLUMNS
MAX_RANKS = 64
"""The most candidates of a position: a rank tuple is digits of 7 bits."""

_LEAST_EXPONENT = -30.0
"""exp of less is below 2^-43, and 0 in units of 2^-40."""
_LOG2_E = 1.44269502
_LN2_HIGH = 0.693145752
"""16 significant bits: its product with a number of 6 bits is exact in float32."""
_LN2_LOW = 1.42860677e-06
_EXP_TAYLOR = (
    1.98412701e-04,
    1.38888892e-03,
    8.33333377e-03,
    4.16666679e-02,
    1.66666672e-01,
    0.5,
    1.0,
    1.0,
)
"""1/7! down to 1/0!, as float32."""
_LN2 = 0.6931471805599453
_SQRT_HALF = 0.7071067811865476
_ATANH_TERMS = 11


def top_candidates(
    scores: torch.Tensor,
    ranks: int,
    *,
    from_logits: bool,
    token_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `ranks` best candidates of each position, best first; of equal ones the lower column.

    scores: floating [B, D, V], logits or natural log-probabilities. Entries that no candidate can
        have (NaN, +inf, and a log-probability above 0) are left out, like -inf.
    ranks: 1..V. token_ids: int64 [B, D, V], the token of each column; None: its number.

    Returns log-probabilities float64 [B, D, ranks] and tokens int64 [B, D, ranks]. Where there are
    fewer candidates the rest is -inf and -1. From logits they are float64(logit) - float64(z), z
    being `log_normaliser` of the row.
    """
    batch, depth, _ = scores.shape
    log_probs = torch.full((batch, depth, ranks), -torch.inf, dtype=torch.float64)
    tokens = torch.full((batch, depth, ranks), -1, dtype=torch.int64)
    exact = torch.float64 if scores.dtype is torch.float64 and not from_logits else torch.float32
    # One request after the other: the integers of all would be many times what the scores take.
    for request in range(batch):
        rows = scores[request].to(exact)
        usable = rows.isfinite() if from_logits else (rows <= 0) & rows.isfinite()
        rows = rows.masked_fill(~usable, -torch.inf)
        order = _best_columns(rows, ranks)
        best = rows.gather(1, order).to(torch.float64)
        if from_logits:
            best = best - log_normaliser(rows)[:, None].to(torch.float64)
        # An empty row has no normaliser: -inf - -inf.
        found = usable.gather(1, order)
        log_probs[request] = best.masked_fill(~found, -torch.inf)
        chosen = order if token_ids is None else token_ids[request].gather(1, order)
        tokens[request] = chosen.masked_fill(~found, -1)
    return log_probs, tokens


def log_normaliser(logits: torch.Tensor) -> torch.Tensor:
    """The log of the sum of exp over each row, float32 [D], by the arithmetic of plan 20.

    logits: float32 [D, V]; entries that are not finite add nothing. A row without any gives -inf.
    """
    depth, columns = logits.shape
    chunks = -(-columns // CHUNK_COLUMNS)
    padded = torch.full((depth, chunks * CHUNK_COLUMNS), -torch.inf, dtype=torch.float32)
    padded[:, :columns] = logits.masked_fill(~logits.isfinite(), -torch.inf)
    parts = padded.view(depth, chunks, CHUNK_COLUMNS)
    tops = parts.amax(-1)
    sums = fixed_exp(parts - tops[..., None]).sum(-1)
    top = tops.amax(-1)
    scale = fixed_exp(tops - top[:, None])
    # Each product is rounded once, then cut to an integer, so that their sum needs no order.
    terms = sums.to(torch.float64) * scale.to(torch.float64) * 2.0**-40
    total = terms.to(torch.int64).sum(-1)
    log_sum = top.to(torch.float64) + _log_of_fixed(total.clamp(min=1))
    return log_sum.to(torch.float32)


def fixed_exp(x: torch.Tensor) -> torch.Tensor:
    """exp(x) in units of 2^-40, int64, for float32 x <= 0; 0 for NaN and below -30.

    Cody and Waite's reduction to |r| <= log(2) / 2, then Taylor's polynomial of degree 7, whose
    remainder is below 6e-9 there, a tenth of float32's rounding.
    """
    within = x >= _LEAST_EXPONENT
    x = x.masked_fill(~within, 0.0)
    halvings = (x * _LOG2_E).round()
    rest = x - halvings * _LN2_HIGH
    rest = rest - halvings * _LN2_LOW
    power = torch.full_like(x, _EXP_TAYLOR[0])
    for coefficient in _EXP_TAYLOR[1:]:
        power = power * rest + coefficient
    # float32 below 2 is a whole number of 2^-24.
    mantissa = (power * 2.0**24).to(torch.int64) << 16
    return (mantissa >> (-halvings).to(torch.int64)).masked_fill(~within, 0)


def check_scores(
    scores: torch.Tensor, token_ids: torch.Tensor | None, *, from_logits: bool
) -> None:
    """Raises ValueError where an entry is no score, or a token stands twice in a position.

    NaN and +inf are no scores, and a log-probability is at most 0. Reads every value.
    """
    wrong = ~(scores < torch.inf) if from_logits else ~(scores <= 0)
    if bool(wrong.any()):
        request, depth, column = wrong.nonzero()[0].tolist()
        wanted = "a logit below +inf" if from_logits else "a log-probability of at most 0"
        raise ValueError(
            f"scores[{request}, {depth}, {column}]: expected {wanted}, "
            f"got {float(scores[request, depth, column])}"
        )
    if token_ids is not None:
        ordered = token_ids.sort(dim=-1).values
        twice = ordered[..., 1:] == ordered[..., :-1]
        if bool(twice.any()):
            request, depth, place = twice.nonzero()[0].tolist()
            # Two siblings that carry one token would make the acceptance walk ambiguous.
            raise ValueError(
                f"token_ids[{request}, {depth}]: expected each token once, "
                f"got {int(ordered[request, depth, place])} twice"
            )


def _best_columns(rows: torch.Tensor, ranks: int) -> torch.Tensor:
    """Columns int64 [D, ranks] of the largest entries of [D, V], equal ones by lower column."""
    if rows.dtype is torch.float64:
        return rows.sort(dim=1, descending=True, stable=True).indices[:, :ranks]
    # topk promises nothing about ties, so it is given none: value and column in one integer.
    bits = (rows + 0.0).view(torch.int32)  # -0 becomes 0
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(torch.int64)
    columns = torch.arange(rows.shape[1])
    return ((ordered << 32) | (0xFFFFFFFF - columns)).topk(ranks, dim=1).indices


def _log_of_fixed(total: torch.Tensor) -> torch.Tensor:
    """Natural log, float64, of int64 values >= 1 in units of 2^-40: 2 atanh((f - 1) / (f + 1))."""
    fraction, exponent = torch.frexp(total.to(torch.float64))
    low = fraction < _SQRT_HALF
    fraction = torch.where(low, fraction * 2.0, fraction)
    exponent = torch.where(low, exponent - 1, exponent) - 40
    ratio = (fraction - 1.0) / (fraction + 1.0)
    square = ratio * ratio
    series = torch.full_like(ratio, 1.0 / (2 * _ATANH_TERMS - 1))
    for term in range(_ATANH_TERMS - 2, -1, -1):
        series = series * square + 1.0 / (2 * term + 1)
    return exponent.to(torch.float64) * _LN2 + ratio * 2.0 * series
