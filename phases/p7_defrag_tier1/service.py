"""Phase 7 in the live service: Tier 1 under churn, for the tokens."""

from __future__ import annotations

from kdtree_engine.errors import MissingError
from kdtree_engine.fragmentation.exported import PREFIX
from phases.gate import Context, Figure
from phases.p6_defrag_tier0.service import Churn, Tier, churn_tokens
from phases.service import server_sglang, serving
from phases.service_scale import Start

__all__ = ["TIER1", "relocated_tokens"]

_RELEASE = "0.5.23"
"""Whose holders of slot numbers are known."""

TIER1 = Tier(
    "tier1",
    arguments=("--disable-overlap-schedule",),
    # As often as may be: ten minutes of a CPU have few steps.
    environment={"KDTREE_DEFRAG_EVERY": "1"},
    moved=(f"{PREFIX}relocated_rows", "rows moved"),
)


def relocated_tokens(
    ctx: Context,
    *,
    start: Start = serving,
    seconds: float | None = None,
    churn: Churn | None = None,
) -> list[Figure]:
    """Mixed traffic in a full pool whose rows move while requests run: tokens are stock's.

    As phase 6's gate, of which it has the servers, the traffic and the check that can fail.
    Raises MissingError where servers have another release than the one whose holders are known.
    """
    if (release := server_sglang()) != _RELEASE:
        raise MissingError(
            f"relocation knows the holders of SGLang {_RELEASE}, and {release} is installed",
            remedy=f"name a Python with SGLang {_RELEASE} in KD_SGLANG_PYTHON",
        )
    return churn_tokens(ctx, start=start, seconds=seconds, churn=churn, tier=TIER1)
