"""`target_probs`: what a target samples from behind each node, as its request asks for."""

from __future__ import annotations

import torch

__all__ = ["target_probs"]


def target_probs(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    *,
    top_ks: torch.Tensor | None = None,
    top_ps: torch.Tensor | None = None,
    min_ps: torch.Tensor | None = None,
    most: int | None = None,
) -> torch.Tensor:
    """The distributions of B requests behind their N nodes, float32 [B, N, V], each sums to 1.

    The order is that of SGLang's sampler: temperature; the `top_ks` likeliest; of these, in falling
    order, those that have at most `top_ps` of the whole before them; of these, those at least
    `min_ps` times as likely as the likeliest. Which of several equals is cut is not said.

    logits: [B, N, V], any float type. temperatures: [B], above 0; a greedy request has 1, and 1 for
    `top_ks`. top_ks, top_ps, min_ps: [B]; None where no request asks for one. most: the largest of
    `top_ks`, where the host knows it: so many columns are sorted then, and not all. Reads nothing
    back from a GPU.
    """
    probs = torch.softmax(logits.float() / temperatures.float().view(-1, 1, 1), dim=-1)
    if top_ks is None and top_ps is None and min_ps is None:
        return probs
    columns = probs.shape[-1]
    if top_ks is not None and most is not None and most < columns:
        ordered, tokens = torch.topk(probs, most, dim=-1)
    else:
        ordered, tokens = torch.sort(probs, dim=-1, descending=True)
    likeliest = ordered[..., :1].clone()
    if top_ks is not None:
        rank = torch.arange(ordered.shape[-1], device=probs.device)
        ordered = ordered.masked_fill(rank >= top_ks.view(-1, 1, 1), 0.0)
    if top_ps is not None:
        before = ordered.cumsum(dim=-1) - ordered
        ordered = ordered.masked_fill(before > top_ps.view(-1, 1, 1), 0.0)
    if min_ps is not None:
        ordered = ordered.masked_fill(ordered < likeliest * min_ps.view(-1, 1, 1), 0.0)
    ordered = ordered / ordered.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(-1, tokens, ordered)
