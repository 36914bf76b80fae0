"""Phase 1: a KV-split verify kernel over a contiguous cache, judged before any service sees it."""

from phases.gate import Gate, GateKind
from phases.p1_offline_kernel import checks, speed
from phases.phase import Phase
from phases.requirement import Requirement

_SOURCES = ("kdtree-engine/csrc/*", "kdtree-engine/kdtree_engine/tables/*")

PHASE = Phase(
    number=1,
    name="offline_kernel",
    title="KV-split verify kernel, contiguous",
    plan=11,
    depends_on=(0,),
    gates=(
        Gate(
            "library-builds",
            "csrc compiles for every architecture, no warning, within its limits, and loads",
            checks.library_builds,
            requires=(Requirement.NVCC,),
            time_limit_s=1800.0,  # 160 s on two cores that do nothing else
            data=_SOURCES,
        ),
        Gate(
            "split-kv-matches-oracle",
            "the split-KV algorithm on the CPU equals the oracle, in float64 and 16 bits",
            checks.split_kv_matches_oracle,
        ),
        Gate(
            "kernel-matches-oracle",
            "the CUDA kernel equals the oracle over every regime",
            checks.kernel_matches_oracle,
            requires=(Requirement.GPU,),
            time_limit_s=1800.0,
            data=_SOURCES,
        ),
        Gate(
            "kernel-traps",
            "the traps that public reports of other kernels name",
            checks.kernel_traps,
            requires=(Requirement.GPU,),
            data=_SOURCES,
        ),
        Gate(
            "kernel-memcheck",
            "compute-sanitizer memcheck and racecheck find nothing",
            checks.kernel_memcheck,
            requires=(Requirement.GPU, Requirement.SANITIZER),
            time_limit_s=1800.0,
            data=_SOURCES,
        ),
        Gate(
            "kernel-speed",
            "time against the naive CUDA kernel in the same run",
            speed.kernel_speed,
            kind=GateKind.SPEED,
            requires=(Requirement.GPU,),
            data=_SOURCES,
        ),
    ),
)
