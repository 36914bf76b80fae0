"""Phase 5: what the kernel costs, against what it must cost, and what tuning may not break."""

from phases.gate import Gate, GateKind
from phases.p5_tuning import against_peers, checks, price, roofline, table
from phases.phase import Phase, ServiceProfile
from phases.requirement import Requirement

_TABLES = "kdtree-engine/kdtree_engine/tables/*"
_SOURCES = ("kdtree-engine/csrc/*", _TABLES)

PHASE = Phase(
    number=5,
    name="tuning",
    title="tiles, splits and copies per GPU",
    plan=15,
    depends_on=(4,),
    gates=(
        Gate(
            "tuning-table",
            "the table of configurations is whole, and says what was measured",
            table.tuning_table,
            data=(*_SOURCES, "plans/evidence/kernel-versions/*", "plans/evidence/tuning/*"),
        ),
        Gate(
            "deterministic-bits",
            "deterministic mode: the same bits alone, in any batch and in any order",
            checks.deterministic_bits,
            data=_SOURCES,
        ),
        Gate(
            "sm120-resources",
            "every tile that sm_120 may pick: no spill, at most 101,376 bytes of shared memory",
            checks.sm120_resources,
            requires=(Requirement.NVCC,),
            time_limit_s=1800.0,
            data=_SOURCES,
        ),
        Gate(
            "roofline-model",
            "the plan's model against kept H200 evidence, regime by regime",
            roofline.roofline_model,
            data=(_TABLES, roofline.EVIDENCE),
        ),
        Gate(
            "kernel-regimes",
            "each regime at or below the time that it must reach on one H200",
            checks.kernel_regimes,
            kind=GateKind.SPEED,
            requires=(Requirement.GPU,),
            time_limit_s=1800.0,
            data=_SOURCES,
        ),
        Gate(
            "peers",
            "the same regimes against each installed peer, in the same run",
            against_peers.against_peers,
            kind=GateKind.SPEED,
            requires=(Requirement.GPU,),
            time_limit_s=3600.0,
            data=_SOURCES,
        ),
        Gate(
            "run-length-price",
            "the verify kernel's time against the length of contiguous runs",
            price.run_length_price,
            kind=GateKind.SPEED,
            requires=(Requirement.GPU,),
            data=(*_SOURCES, "kdtree-engine/csrc_trees/*"),
        ),
    ),
    profile=ServiceProfile(arguments=("--attention-backend", "kdtree_mla")),
)
