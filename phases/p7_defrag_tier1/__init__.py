"""Phase 7, deferred: live relocation of the KV of running requests."""

from phases.gate import Gate
from phases.p7_defrag_tier1 import decision
from phases.phase import Phase, ServiceProfile
from phases.requirement import Requirement

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
            "relocation-token-exact",
            "tokens do not change while the KV of running requests moves",
            requires=(Requirement.SERVICE,),
        ),
    ),
    profile=ServiceProfile(
        arguments=("--attention-backend", "kdtree_mla"),
        environment={"KDTREE_DEFRAG": "tier1"},
    ),
)
