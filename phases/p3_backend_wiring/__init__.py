"""Phase 3: the kernel in the live service, eager mode, behind one overridden method."""

from phases.gate import Gate, GateKind
from phases.p3_backend_wiring import checks, kit, speed
from phases.phase import Phase, ServiceProfile
from phases.requirement import Requirement
from phases.served import KERNELS, PLUGIN

_CPU_SERVER = (*PLUGIN, "tests/support/sglang_cpu/*/*", "tests/support/sglang_refused/*/*")
_KIT = (*PLUGIN, *KERNELS, "tests/support/sglang_kit/*/*.py")
_GPU_SERVER = (*_CPU_SERVER, *KERNELS)

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
            checks.plugin_installs_clean,
            requires=(Requirement.SGLANG,),
            data=_CPU_SERVER,
        ),
        Gate(
            "plugin-self-check",
            "a missing hook or an unknown SGLang stops the server with one line",
            checks.plugin_self_check,
            requires=(Requirement.SGLANG,),
            time_limit_s=1800.0,
            data=_CPU_SERVER,
        ),
        Gate(
            "service-token-exact",
            "tokens of the live service with tree verification equal plain decoding",
            checks.service_token_exact,
            requires=(Requirement.SGLANG,),
            time_limit_s=1800.0,
            data=_GPU_SERVER,
            token_exact=True,
        ),
        Gate(
            "conformance-kit-eager",
            "SGLang's own attention kit, eager, no skip",
            kit.conformance_kit_eager,
            requires=(Requirement.GPU, Requirement.SGLANG),
            time_limit_s=300.0,
            data=_KIT,
        ),
        Gate(
            "eager-speed",
            "decode tok/s of the live service against stock Triton, both eager",
            speed.eager_speed,
            kind=GateKind.SPEED,
            requires=(Requirement.GPU, Requirement.SERVICE),
            time_limit_s=1200.0,
            data=_GPU_SERVER,
        ),
    ),
    profile=ServiceProfile(
        arguments=("--attention-backend", "kdtree_mla", "--disable-cuda-graph"),
    ),
)
