"""Phase 2: the kernel reads the paged latent pool where it lies, through kv_indices."""

from phases.gate import Gate, GateKind
from phases.p2_paged_bf16 import checks, speed
from phases.phase import Phase
from phases.requirement import Requirement

_SOURCES = ("kdtree-engine/csrc/*", "kdtree-engine/kdtree_engine/tables/*")

PHASE = Phase(
    number=2,
    name="paged_bf16",
    title="paged bf16 KV through kv_indices",
    plan=12,
    depends_on=(1,),
    gates=(
        Gate(
            "paged-split-kv-matches-oracle",
            "the split-KV algorithm on the CPU over scattered and shared slots",
            checks.paged_split_kv_matches_oracle,
        ),
        Gate(
            "paged-matches-oracle",
            "the CUDA kernel over every regime, slots in random order",
            checks.paged_matches_oracle,
            requires=(Requirement.GPU,),
            time_limit_s=1800.0,
            data=_SOURCES,
        ),
        Gate(
            "paged-traps",
            "slots and token counts beyond int32, stale buffers, poisoned memory",
            checks.paged_traps,
            requires=(Requirement.GPU,),
            data=_SOURCES,
        ),
        Gate(
            "workspace-bound",
            "the workspace's formula holds, and stays below 256 MB at batch 64",
            checks.workspace_bound,
            data=_SOURCES,
        ),
        Gate(
            "tinymla-tokens",
            "TinyMLA's greedy tokens in bf16 equal the oracle's but for counted near-ties",
            checks.tinymla_tokens,
            time_limit_s=1800.0,
            data=_SOURCES,
        ),
        Gate(
            "paged-speed",
            "random slots against contiguous ones in the same run",
            speed.paged_speed,
            kind=GateKind.SPEED,
            requires=(Requirement.GPU,),
            data=_SOURCES,
        ),
    ),
)
