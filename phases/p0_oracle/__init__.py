"""Phase 0, the oracle: a plain reference that everything later is judged by."""

from phases.gate import Gate
from phases.p0_oracle import gates
from phases.phase import Phase

__all__ = ["PHASE"]

PHASE = Phase(
    number=0,
    name="oracle",
    title="The oracle: a plain, obviously right reference in float64",
    plan=10,
    depends_on=(),
    gates=(
        Gate(
            "tree-brute-force",
            "the draft tree is the best prefix-closed set, in order, by brute force",
            gates.tree_brute_force,
        ),
        Gate(
            "tree-properties",
            "what holds for every draft tree, on inputs drawn by hypothesis",
            gates.tree_properties,
        ),
        Gate(
            "mask-paths",
            "a node sees exactly the nodes on its path",
            gates.mask_paths,
        ),
        Gate(
            "mask-layouts",
            "the three mask layouts say the same, and malformed masks are refused",
            gates.mask_layouts,
        ),
        Gate(
            "attention-paths",
            "tree attention equals every path run as an ordinary causal sequence",
            gates.attention_paths,
        ),
        Gate(
            "mla-absorbed",
            "absorbed MLA over a paged cache equals plain MLA",
            gates.mla_absorbed,
        ),
        Gate(
            "greedy-token-exact",
            "speculative greedy decoding equals plain greedy decoding, token for token",
            gates.greedy_token_exact,
        ),
        Gate(
            "sampled-distribution",
            "sampled acceptance keeps the target's distribution",
            gates.sampled_distribution,
        ),
        Gate(
            "compaction-moves",
            "accepted KV rows end at the front of the window, in order",
            gates.compaction_moves,
        ),
    ),
)
