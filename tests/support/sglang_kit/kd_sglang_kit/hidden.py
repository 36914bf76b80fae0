"""The fault of the kit's graph mode, and a minimal case: python -m kd_sglang_kit.hidden [DEVICE]

`run_speculative_cuda_graph_case` builds a fixture, which stores the prefix at the slots of layout
"shuffled_pages" and points `req_to_token` at them. Then, before the eager comparison, it calls
`prepare_inputs`, which stores the same rows at the slots of the contiguous layout: without the
fixture's layout, and without touching `req_to_token`. A slot that both layouts use for different
positions now holds another token's row. `seen` counts what is left.

The minimal case runs stock Triton on a prefix that the fault hides tokens of, and on one that it
does not; each in eager mode, in the kit's graph mode, and with the second write kept to the
fixture's layout. If the backend were wrong, the last would fail too.
"""

from __future__ import annotations

import collections
import sys
from typing import Any


def hidden(case: Any, context: int) -> int:
    """How many prefix tokens of a case the kit's graph mode leaves nowhere to be read.

    case: the kit's MLAAttentionCase; context: slots of a request.
    """
    from kd_sglang_kit.graph import slots_of

    slot = slots_of(case, context)
    lost = 0
    for request, length in enumerate(case.prefix_lens):
        first = case.page_size + request * context
        read = collections.Counter(
            # The second write wins: a slot of the contiguous prefix holds its own position's row.
            slot(request, position) - first
            if slot(request, position) - first < length
            else position
            for position in range(length)
        )
        lost += length - len(read)
    return lost


def main(device: str, backend: str = "triton") -> bool:
    """Print each run and a verdict; whether the kit is what is wrong."""
    from kd_sglang_kit.cases import Kit

    kit = Kit(backend, device)
    verdicts = []
    for prefix, faulty in ((8, False), (512, True)):
        outcomes = {}
        for form in ("eager", "graph mode as shipped", "captured graph"):
            outcomes[form] = kit.run(
                {
                    "form": form,
                    "prefixes": [prefix],
                    "page": 1,
                    "kind": "eagle",
                    "topk": 3,
                    "nodes": 3,
                    "drawn": False,
                    "heads": 4,
                    "context": 2048,
                    "spoiled": False,
                }
            )
        for form, result in outcomes.items():
            print(f"{backend}, prefix {prefix}, {form}: {result['outcome']} {result['says']}")
        shipped = outcomes["graph mode as shipped"]
        print(f"  tokens that the kit hides: {shipped['misread']}")
        verdicts.append(
            bool(shipped["misread"]) is faulty
            and shipped["outcome"] == ("differs" if faulty else "passed")
            and outcomes["eager"]["outcome"] == outcomes["captured graph"]["outcome"] == "passed"
        )
    wrong = all(verdicts)
    print(
        f"verdict: {backend} is right and the kit is wrong: it fails before any graph exists, and "
        "passes once both of its writers use one layout"
        if wrong
        else "verdict: not explained by the kit's two layouts"
    )
    return wrong


if __name__ == "__main__":
    sys.exit(0 if main(*sys.argv[1:] or ["cuda"]) else 1)
