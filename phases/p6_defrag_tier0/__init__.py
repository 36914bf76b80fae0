"""Phase 6: an allocation policy that keeps a churned KV pool contiguous, if contiguity pays."""

from phases.gate import Gate
from phases.p6_defrag_tier0 import checks, service
from phases.phase import Phase, ServiceProfile
from phases.requirement import Requirement
from phases.served import KERNELS, PLUGIN

__all__ = ["LIVE", "PHASE"]

_SERVER = (
    "kdtree-engine/kdtree_engine/sglang_ext/defrag/*.py",
    "kdtree-engine/kdtree_engine/fragmentation/*.py",
)
"""What runs in the server's Python, so no import of the gates leads to all of it."""
LIVE = (*PLUGIN, *KERNELS, "tests/support/sglang_cpu/*/*")
"""And what serves it."""

PHASE = Phase(
    number=6,
    name="defrag_tier0",
    title="Tier 0 defragmentation: contiguous slots for new allocations",
    plan=16,
    depends_on=(4,),
    gates=(
        Gate(
            "allocator-invariants",
            "100,000 random operations on SGLang's real allocator leak no slot and refuse none",
            checks.allocator_invariants,
            requires=(Requirement.SGLANG,),
            time_limit_s=1800.0,
            data=_SERVER,
        ),
        Gate(
            "runs-per-request",
            "mean contiguous runs of a 16k request under churn, against the stock policy",
            checks.runs_per_request,
            requires=(Requirement.SGLANG,),
            time_limit_s=1800.0,
            data=_SERVER,
        ),
        Gate(
            "churn-service-token-exact",
            "ten minutes of mixed traffic in a full pool: Tier 0 gives the tokens of stock",
            service.churn_tokens,
            requires=(Requirement.SGLANG,),
            time_limit_s=2700.0,
            data=LIVE,
            token_exact=True,
        ),
    ),
    profile=ServiceProfile(
        arguments=("--attention-backend", "kdtree_mla"),
        environment={"KDTREE_DEFRAG": "tier0"},
    ),
)
