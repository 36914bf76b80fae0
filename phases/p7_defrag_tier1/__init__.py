"""Phase 7, deferred: live relocation of the KV of running requests."""

from phases.gate import Gate
from phases.p6_defrag_tier0 import LIVE
from phases.p7_defrag_tier1 import checks, decision, service
from phases.phase import Phase, ServiceProfile
from phases.requirement import Requirement

_SERVER = (
    "kdtree-engine/kdtree_engine/sglang_ext/defrag/*.py",
    "kdtree-engine/kdtree_engine/fragmentation/*.py",
    "kdtree-engine/kdtree_engine/ops/*.py",
)
"""What runs in the server's Python, so no import of the gates leads to all of it."""

PHASE = Phase(
    number=7,
    name="defrag_tier1",
    title="Tier 1 defragmentation: live relocation (deferred)",
    plan=17,
    depends_on=(6,),
    gates=(
        Gate(
            "deferral-figures",
            "the figures that justify the deferral are kept evidence and still hold",
            decision.deferral_figures,
        ),
        Gate(
            "relocation-bytes-exact",
            "requests and the cache read the right bytes while KV moves in SGLang's structures",
            checks.relocation_bytes_exact,
            requires=(Requirement.SGLANG,),
            time_limit_s=3600.0,
            data=_SERVER,
        ),
        Gate(
            "relocation-service-token-exact",
            "ten minutes of mixed traffic while rows move: Tier 1 gives the tokens of stock",
            service.relocated_tokens,
            requires=(Requirement.SGLANG,),
            time_limit_s=2700.0,
            data=LIVE,
            token_exact=True,
        ),
    ),
    profile=ServiceProfile(
        arguments=("--attention-backend", "kdtree_mla", "--disable-overlap-schedule"),
        environment={"KDTREE_DEFRAG": "tier1"},
    ),
)
