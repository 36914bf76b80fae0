"""Phase 8: what stands around the verify pass and what it costs, on one GPU.

Each is timed alone in a replayed graph and checked against the CPU's result, which is the oracle's.
Beside it stands the oracle itself on this host's CPU: a heap, as the published algorithm has it.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence

import torch

from kdtree_engine.ops import AcceptedPaths, build_draft_trees, compact_kv, fill_kv_indices
from kdtree_engine.ops.candidates import top_candidates
from kdtree_engine.reference.tree import build_draft_tree
from kdtree_engine.timing import Method, Tensors, Timing, time_operation
from phases.gate import Context, FailureKind, Figure, GateFailure, Unit

__all__ = ["BuildCase", "ops_speed"]

_CUDA = torch.device("cuda")
_LAYERS, _SLOTS, _ROW = 61, 512, 576
_BATCH_LIMIT = 2.5
_PATH = 8
_FROM_LOGITS = 20  # timed calls


@dataclasses.dataclass(frozen=True)
class BuildCase:
    """A batch's trees. from_logits: from all columns; else from the `top_k` best of each position.

    most_us: what it may take.
    """

    batch: int
    depth: int
    from_logits: bool
    most_us: float
    columns: int = 163_840
    budget: int = 64
    top_k: int = 16

    def __str__(self) -> str:
        source = f"logits of {self.columns}" if self.from_logits else f"top {self.top_k}"
        return f"build from {source}, B={self.batch} D={self.depth}"


CASES = tuple(
    BuildCase(batch, depth, from_logits, limit if batch == 1 else _BATCH_LIMIT * limit)
    for from_logits, limit in ((True, 80.0), (False, 25.0))
    for depth in (7, 15)
    for batch in (1, 16)
)
_ACCEPT_MOST_US = 40.0
_LISTED = (65_536, 200_000)  # tokens of a request
_LIST_MOST_US = 15.0


def ops_speed(
    ctx: Context,
    *,
    device: torch.device = _CUDA,
    cases: Sequence[BuildCase] = CASES,
    layers: int = _LAYERS,
    repeats: int = 50,
) -> list[Figure]:
    """Builds, acceptance with compaction of all layers, lists of slots; all limits must hold."""
    figures, slow = [], []
    alone: dict[tuple[int, bool], float] = {}
    for done, case in enumerate(cases):
        ctx.progress(done, len(cases) + 1, str(case))
        timing = _time_build(case, device, ctx.seed, repeats)
        figures.append(Figure(str(case), timing.median_us, Unit.MICROSECONDS))
        if case.batch == 1:
            alone[case.depth, case.from_logits] = timing.median_us
            figures.append(
                Figure(
                    f"{case}: the oracle on this CPU", _oracle_us(case, ctx.seed), Unit.MICROSECONDS
                )
            )
        elif (case.depth, case.from_logits) in alone:
            ratio = timing.median_us / alone[case.depth, case.from_logits]
            figures.append(Figure(f"{case}: times batch 1", ratio, Unit.RATIO))
        if timing.median_us > case.most_us:
            slow.append(f"{case}: {timing.median_us:.1f} us, expected at most {case.most_us:.1f}")
    ctx.progress(len(cases), len(cases) + 1, "acceptance and compaction")
    timing = _time_accept(layers, device, ctx.seed, repeats)
    name = f"acceptance and compaction of {layers} layers"
    figures.insert(0, Figure(name, timing.median_us, Unit.MICROSECONDS))
    if timing.median_us > _ACCEPT_MOST_US:
        slow.append(f"{name}: {timing.median_us:.1f} us, expected at most {_ACCEPT_MOST_US:.1f}")
    for tokens in _LISTED:
        timing = _time_list(tokens, device, ctx.seed, repeats)
        name = f"slots of a request of {tokens} tokens"
        figures.append(Figure(name, timing.median_us, Unit.MICROSECONDS))
        if timing.median_us > _LIST_MOST_US:
            slow.append(f"{name}: {timing.median_us:.1f} us, expected at most {_LIST_MOST_US:.1f}")
    if slow:
        raise GateFailure(FailureKind.TOO_SLOW, "; ".join(slow), figures)
    return figures


def _time_build(case: BuildCase, device: torch.device, seed: int, repeats: int) -> Timing:
    def make_inputs(number: int) -> Tensors:
        generator = torch.Generator(device).manual_seed(number)
        shape = (case.batch, case.depth, case.columns)
        logits = (3 * torch.randn(shape, generator=generator, device=device)).bfloat16()
        roots = torch.randint(1000, (case.batch,), generator=generator, device=device)
        prefixes = torch.randint(1000, (case.batch,), generator=generator, device=device)
        if case.from_logits:
            return logits, roots, prefixes
        best = logits.float().log_softmax(-1).topk(case.top_k, -1)
        return best.values, roots, prefixes, best.indices

    def build(
        scores: torch.Tensor,
        roots: torch.Tensor,
        prefixes: torch.Tensor,
        tokens: torch.Tensor | None = None,
    ) -> Tensors:
        trees = build_draft_trees(
            scores,
            case.budget,
            case.top_k,
            from_logits=case.from_logits,
            token_ids=tokens,
            root_tokens=roots,
            prefix_lengths=prefixes,
        )
        return trees.tokens, trees.parents, trees.positions, trees.draft_mask

    def check(inputs: Tensors, outputs: Tensors) -> str | None:
        expected = build(*(tensor.cpu() for tensor in inputs))
        names = ("tokens", "parents", "positions", "mask")
        for name, ours, theirs in zip(names, outputs, expected, strict=True):
            if not torch.equal(ours.cpu(), theirs):
                return f"{name} are not those of the CPU"
        return None

    # The CPU takes up to a second to find the best of 39 million scores, so outputs from logits are
    # few: one call at a time, which adds a launch to each. Their caches are flushed either way.
    method: Method = "cold" if case.from_logits else "rotated"
    return time_operation(
        make_inputs,
        build,
        device=device,
        check=check,
        method=method,
        repeats=min(repeats, _FROM_LOGITS) if case.from_logits else repeats,
        seed=seed,
    )


def _time_accept(layers: int, device: torch.device, seed: int, repeats: int) -> Timing:
    """One request whose tree has 65 nodes, of which a path of 8 and its root are accepted."""

    def make_inputs(number: int) -> Tensors:
        generator = torch.Generator().manual_seed(number)
        nodes = 65
        path = torch.cat(
            [
                torch.zeros(1, dtype=torch.int64),
                (torch.randperm(nodes - 1, generator=generator)[:_PATH] + 1).sort().values,
            ]
        )
        parents = torch.zeros(nodes, dtype=torch.int64)
        parents[0] = -1
        parents[path[1:]] = path[:-1]
        tokens = torch.arange(nodes) + 10  # no two alike, so one child at most fits
        targets = torch.full((nodes,), 1)
        targets[path[:-1]] = tokens[path[1:]]
        window = torch.randperm(_SLOTS, generator=generator)[:nodes]
        pools = torch.randn(layers, _SLOTS, _ROW, generator=generator).bfloat16()
        given = (tokens[None], parents[None], targets[None], window[None], pools)
        return tuple(tensor.to(device) for tensor in given)

    def accept(
        tokens: torch.Tensor,
        parents: torch.Tensor,
        targets: torch.Tensor,
        window: torch.Tensor,
        pools: torch.Tensor,
    ) -> Tensors:
        made = AcceptedPaths(
            nodes=tokens.new_empty((1, _PATH + 1)),
            counts=tokens.new_empty(1),
            bonus=tokens.new_empty(1),
        )
        torch.ops.kdtree_engine.accept_trees.default(
            tokens, parents, targets, made.nodes, made.counts, made.bonus
        )
        compact_kv(pools, made, window)
        return made.nodes, made.counts, pools

    def check(inputs: Tensors, outputs: Tensors) -> str | None:
        expected = accept(*(tensor.cpu().clone() for tensor in inputs))
        if int(expected[1]) != _PATH + 1:
            return f"the case is wrong: {int(expected[1])} nodes are accepted"
        for name, ours, theirs in zip(("path", "count", "pools"), outputs, expected, strict=True):
            if not torch.equal(ours.cpu(), theirs):
                return f"{name} are not those of the CPU"
        return None

    return time_operation(
        make_inputs, accept, device=device, check=check, repeats=repeats, seed=seed
    )


def _time_list(tokens: int, device: torch.device, seed: int, repeats: int) -> Timing:
    """The slots of one request, of a table of 16 requests."""

    def make_inputs(number: int) -> Tensors:
        generator = torch.Generator(device).manual_seed(number)
        table = torch.randint(
            2**31 - 1, (16, tokens + 64), generator=generator, device=device, dtype=torch.int32
        )
        requests = torch.randint(16, (1,), generator=generator, device=device)
        return table, requests, torch.full_like(requests, tokens)

    def fill(table: torch.Tensor, requests: torch.Tensor, lengths: torch.Tensor) -> Tensors:
        kv_indptr = table.new_empty(2)
        kv_indices = requests.new_empty(tokens)
        fill_kv_indices(table, requests, lengths, kv_indptr, kv_indices)
        return kv_indptr, kv_indices

    def check(inputs: Tensors, outputs: Tensors) -> str | None:
        expected = fill(*(tensor.cpu() for tensor in inputs))
        for name, ours, theirs in zip(("offsets", "slots"), outputs, expected, strict=True):
            if not torch.equal(ours.cpu(), theirs):
                return f"{name} are not those of the CPU"
        return None

    return time_operation(make_inputs, fill, device=device, check=check, repeats=repeats, seed=seed)


def _oracle_us(case: BuildCase, seed: int, repeats: int = 7) -> float:
    """The oracle's heap over candidates that are given, and where from logits, finding them too."""
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(1, case.depth, case.columns, generator=generator)).bfloat16()
    best = top_candidates(logits, case.top_k, from_logits=True, token_ids=None)
    taken = []
    for _ in range(repeats):
        begun = time.perf_counter()
        if case.from_logits:
            best = top_candidates(logits, case.top_k, from_logits=True, token_ids=None)
        build_draft_tree(best[0][0], case.budget, case.top_k)
        taken.append(1e6 * (time.perf_counter() - begun))
    return statistics.median(taken)
