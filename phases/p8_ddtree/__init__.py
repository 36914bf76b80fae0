"""Phase 8: draft trees from a DFlash drafter, built, verified and accepted in the live service."""

from phases.gate import Gate, GateKind
from phases.p8_ddtree import batch_speed, gpu_host, service, speed
from phases.phase import Phase, ServiceProfile
from phases.requirement import Requirement
from phases.served import KERNELS, PLUGIN

_SERVER = (*PLUGIN, "tests/support/sglang_cpu/*/*")
_GPU_SERVER = (*_SERVER, *KERNELS)

PHASE = Phase(
    number=8,
    name="ddtree",
    title="DDTREE: a drafter's tree instead of its chain",
    plan=20,
    depends_on=(4,),
    gates=(
        Gate(
            "ddtree-token-exact",
            "greedy tokens of DDTREE in the live service equal plain decoding; a wrong mask shows",
            service.ddtree_token_exact,
            requires=(Requirement.SGLANG,),
            time_limit_s=2400.0,
            data=_GPU_SERVER,
            token_exact=True,
        ),
        Gate(
            "ddtree-distribution",
            "tokens that DDTREE samples have the target's distribution (chi-square)",
            service.ddtree_distribution,
            requires=(Requirement.SGLANG,),
            time_limit_s=2400.0,
            data=_GPU_SERVER,
            token_exact=True,
        ),
        Gate(
            "ddtree-graph-token-exact",
            "with CUDA graphs, of drafter and target, at each width, the tokens are the stock ones",
            gpu_host.graph_tokens,
            requires=(Requirement.GPU, Requirement.SERVICE),
            time_limit_s=2400.0,
            data=_GPU_SERVER,
            token_exact=True,
        ),
        Gate(
            "ddtree-ops-speed",
            "build, walk, compaction and slots in a replayed graph, and the oracle on the CPU",
            speed.ops_speed,
            kind=GateKind.SPEED,
            requires=(Requirement.GPU,),
            data=_GPU_SERVER,
        ),
        Gate(
            "ddtree-speed",
            "tok/s of DDTREE by context and batch, against the drafter's chain and no speculation",
            batch_speed.speed,
            kind=GateKind.SPEED,
            requires=(Requirement.GPU, Requirement.SERVICE),
            time_limit_s=2400.0,
            data=_GPU_SERVER,
        ),
    ),
    profile=ServiceProfile(
        arguments=(
            *("--attention-backend", "kdtree_mla"),
            *("--speculative-algorithm", "DDTREE"),
        ),
    ),
)
