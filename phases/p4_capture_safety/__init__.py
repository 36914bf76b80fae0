"""Phase 4: the kernel meets what a captured graph demands, and a service's graphs stay on."""

from phases.gate import Gate, GateKind
from phases.p4_capture_safety import checks, kit, service, speed
from phases.phase import Phase, ServiceProfile
from phases.requirement import Requirement
from phases.served import KERNELS, PLUGIN

_SOURCES = ("kdtree-engine/csrc/*", "kdtree-engine/kdtree_engine/tables/*")
_SERVER = (*PLUGIN, *KERNELS)
_KIT = (*_SERVER, "tests/support/sglang_kit/*/*.py")

PHASE = Phase(
    number=4,
    name="capture_safety",
    title="CUDA graphs over static buffers",
    plan=14,
    depends_on=(2, 3),
    gates=(
        Gate(
            "op-check",
            "torch's operator checks and torch.compile, on each implementation that is here",
            checks.op_check,
            data=_SOURCES,
        ),
        Gate(
            "graph-replay-bits",
            "one captured graph over many changed batches gives the bits of eager calls",
            checks.graph_replay_bits,
            requires=(Requirement.GPU,),
            data=_SOURCES,
        ),
        Gate(
            "no-host-sync",
            "a call waits for nothing and launches only what is documented",
            checks.no_host_sync,
            requires=(Requirement.GPU,),
            data=_SOURCES,
        ),
        Gate(
            "graph-service-token-exact",
            "the live service with graphs on gives the stock tokens",
            service.graph_tokens,
            requires=(Requirement.GPU, Requirement.SERVICE),
            time_limit_s=5400.0,
            data=_SERVER,
            token_exact=True,
        ),
        Gate(
            "conformance-kit-graph",
            "SGLang's own attention kit, graph mode and real graphs, no skip",
            kit.conformance_kit_graph,
            requires=(Requirement.GPU, Requirement.SGLANG),
            time_limit_s=300.0,
            data=_KIT,
        ),
        Gate(
            "graph-speed",
            "decode tok/s of the live service in graphs, against Triton and no speculation",
            speed.graph_speed,
            kind=GateKind.SPEED,
            requires=(Requirement.GPU, Requirement.SERVICE),
            time_limit_s=1200.0,
            data=_SERVER,
        ),
    ),
    profile=ServiceProfile(arguments=("--attention-backend", "kdtree_mla")),
)
