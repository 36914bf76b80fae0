"""A reduced set of calls, for compute-sanitizer: python -m phases.p1_offline_kernel.sanitized

Small, as racecheck slows a kernel down a thousandfold; every layout, both tile families, both
schedules, paged and contiguous, with and without an lse.
"""

from __future__ import annotations

import itertools

import torch

from kdtree_engine.reference.masks import MaskLayout
from phases.attention_cases import AttentionCase, make_inputs
from phases.candidates import naive_kernel, operation

__all__ = ["run"]


def run(device: torch.device) -> int:
    """Make the calls; returns how many. What they compute is judged by other gates."""
    calls = 0
    cases = [
        AttentionCase("", trees, prefixes, layout=layout, heads=heads)
        for (trees, prefixes, heads), layout in itertools.product(
            [((9, 3, 0), (70, 0, 5), 8), ((1,), (33,), 16), ((17,), (40,), 5)], MaskLayout
        )
    ]
    implementations = [operation] if device.type == "cpu" else [operation, naive_kernel]
    for number, case in enumerate(cases):
        for contiguous, deterministic in itertools.product((False, True), repeat=2):
            inputs = make_inputs(
                case,
                dtype=torch.bfloat16,
                device=device,
                generator=torch.Generator().manual_seed(number),
                contiguous_view=contiguous,
            )
            for implementation in implementations:
                implementation(
                    *inputs.tensors(),
                    sm_scale=case.sm_scale,
                    deterministic=deterministic,
                    return_lse=contiguous,
                )
                calls += 1
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return calls


if __name__ == "__main__":
    print(run(torch.device("cuda")))
