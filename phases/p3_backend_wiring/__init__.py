"""Phase 3: the kernel in the live service, eager mode, behind one overridden method."""

from phases.gate import Gate, GateKind
from phases.phase import Phase, ServiceProfile
from phases.requirement import Requirement

PHASE = Phase(
    number=3,
    name="backend_wiring",
    title="SGLang backend kdtree_mla, eager",
    plan=13,
    depends_on=(2,),
    gates=(
        Gate(
            "plugin-installs-clean",
            "the wheel changes no other package of SGLang's environment",
            requires=(Requirement.SGLANG,),
        ),
        Gate(
            "plugin-self-check",
            "a missing hook or an unknown SGLang stops the server with one line",
            requires=(Requirement.SGLANG,),
        ),
        Gate(
            "service-token-exact",
            "tokens of the live service with tree verification equal plain decoding",
            requires=(Requirement.SERVICE,),
        ),
        Gate(
            "conformance-kit-eager",
            "SGLang's own attention kit, eager, no skip",
            requires=(Requirement.GPU, Requirement.SGLANG),
        ),
        Gate(
            "eager-speed",
            "decode tok/s of the live service against stock Triton, both eager",
            kind=GateKind.SPEED,
            requires=(Requirement.GPU, Requirement.SERVICE),
        ),
    ),
    profile=ServiceProfile(
        arguments=("--attention-backend", "kdtree_mla", "--disable-cuda-graph"),
    ),
)
