"""The loop of tree speculative decoding over a batch: draft, tree, verify, accept, commit.

Each round, every request that is not done gets a draft tree whose root is its last committed
token. One forward pass verifies all nodes of all requests, the accepted paths are committed, and
their KV rows are moved to the front of each window so that they follow the prefix. What the
target says decides every token, so the output is the target's own, whatever the drafter does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from kdtree_engine.reference.acceptance import (
    Acceptance,
    Compaction,
    accept_greedy,
    apply_compaction,
    compaction_plan,
)
from kdtree_engine.reference.attention import tree_verify_attention
from kdtree_engine.reference.masks import MaskLayout, tree_mask
from kdtree_engine.reference.slots import SlotAllocator
from kdtree_engine.reference.tiny_mla import Attention, TinyMLA, TreeBatch
from kdtree_engine.reference.tree import DraftTree, build_draft_tree, positions

__all__ = [
    "Drafter",
    "Generation",
    "NoisyDrafter",
    "Parts",
    "TreeBuilder",
    "plain_greedy",
    "speculative_decode",
]


class Drafter(Protocol):
    """Proposes what may follow: `drafter(request, tokens) -> log_probs [depth, vocabulary]`.

    request: index of the prompt; tokens: everything that is committed, the prompt included.
    """

    def __call__(self, request: int, tokens: Sequence[int]) -> torch.Tensor: ...


class TreeBuilder(Protocol):
    """`build_draft_tree`, or a candidate in its place."""

    def __call__(
        self,
        log_probs: torch.Tensor,
        budget: int,
        top_k: int | None = ...,
        *,
        token_ids: torch.Tensor | None = ...,
        root_token: int = ...,
    ) -> DraftTree: ...


@dataclasses.dataclass(frozen=True)
class Parts:
    """The replaceable parts of the loop; by default each is the oracle's.

    accept: takes a tree and the target's logits [N, vocabulary] behind its nodes.
    """

    attention: Attention = tree_verify_attention
    build_tree: TreeBuilder = build_draft_tree
    accept: Callable[[DraftTree, torch.Tensor], Acceptance] = dataclasses.field(
        default=lambda tree, logits: accept_greedy(tree, logits.argmax(-1))
    )
    compact: Callable[[torch.Tensor, Compaction], None] = apply_compaction


@dataclasses.dataclass(frozen=True)
class Generation:
    """What the loop made.

    tokens: the new tokens of each request. logits: float64 [new, vocabulary] of each request, what
    each new token was chosen from. rounds: verifications, each request of a batch counted for
    itself. drafted, accepted: draft nodes that were verified, and those that were accepted.
    """

    tokens: tuple[tuple[int, ...], ...]
    logits: tuple[torch.Tensor, ...]
    rounds: int
    drafted: int
    accepted: int


@dataclasses.dataclass
class _Request:
    number: int
    tokens: list[int]
    prefix: list[int]
    """Pool slots of all committed tokens but the last, which is the next tree's root."""
    wanted: int
    """Tokens still to make; below 0 once the last round made more."""
    logits: list[torch.Tensor] = dataclasses.field(default_factory=list)

    def commit(self, acceptance: Acceptance, plan: Compaction, behind: torch.Tensor) -> None:
        self.prefix.extend(plan.kept)
        self.tokens.extend(acceptance.tokens)
        self.logits.append(behind[list(acceptance.nodes)])
        self.wanted -= len(acceptance.tokens)


class NoisyDrafter:
    """A drafter that is right some of the time, in the form of a block-diffusion drafter.

    It looks at the target's logits along one continuation and adds noise. Like such a drafter it
    gives one distribution a position, which knows nothing of the path taken inside the block.
    """

    def __init__(
        self,
        crib: Sequence[torch.Tensor],
        prompt_lengths: Sequence[int],
        *,
        depth: int,
        noise: float,
        generator: torch.Generator,
    ) -> None:
        """Set up from the target's own logits.

        crib: per request, floating [n, vocabulary], row i being the target's logits for its i-th
            new token; beyond them it guesses from noise alone. depth: length of the block.
        noise: standard deviation of what is added to each logit.
        """
        self._crib = [logits.to(torch.float64).cpu() for logits in crib]
        self._prompt_lengths = list(prompt_lengths)
        self._depth, self._noise, self._generator = depth, noise, generator

    def __call__(self, request: int, tokens: Sequence[int]) -> torch.Tensor:
        """Log-probabilities float64 [depth, vocabulary] of the tokens after `tokens`."""
        crib = self._crib[request]
        noise = torch.randn(
            self._depth, crib.shape[1], generator=self._generator, dtype=torch.float64
        )
        made = len(tokens) - self._prompt_lengths[request]
        known = crib[made : made + self._depth]
        logits = noise * self._noise
        logits[: len(known)] += known
        return logits.log_softmax(-1)


def plain_greedy(
    model: TinyMLA, prompts: Sequence[Sequence[int]], new_tokens: int
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Greedy decoding by the definition: no cache, no absorption, no tree, one token at a time.

    Returns the new tokens of each prompt, and the logits float64 [new_tokens, vocabulary] that
    they were chosen from. Raises ValueError for an empty prompt.
    """
    lengths = [len(prompt) for prompt in prompts]
    if not all(lengths):
        raise ValueError(f"prompts[{lengths.index(0)}]: is empty")
    tokens = torch.zeros(len(prompts), max(lengths) + new_tokens, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(list(prompt))
    tokens = tokens.to(model.device)
    rows = torch.arange(len(prompts), device=model.device)
    ends = torch.tensor(lengths, device=model.device)
    logits = []
    for _ in range(new_tokens):
        # What stands behind a sequence's end is not seen from its last token.
        behind = model.forward_plain(tokens[:, : int(ends.max())])[rows, ends - 1]
        tokens[rows, ends] = behind.argmax(-1)
        logits.append(behind)
        ends = ends + 1
    made = [
        row[start : start + new_tokens] for row, start in zip(tokens.tolist(), lengths, strict=True)
    ]
    return made, list(torch.stack(logits, dim=1)) if logits else []


def speculative_decode(
    model: TinyMLA,
    prompts: Sequence[Sequence[int]],
    drafter: Drafter,
    *,
    budget: int,
    new_tokens: int,
    allocator: SlotAllocator,
    pools: Sequence[torch.Tensor],
    shared: Sequence[int] = (),
    top_k: int | None = None,
    layout: MaskLayout = MaskLayout.FULL,
    parts: Parts | None = None,
) -> Generation:
    """Decode `new_tokens` tokens of each prompt, all prompts in one ragged batch.

    prompts: token lists. budget, top_k: of the draft trees. shared: tokens that stand in front of
    every prompt; they are computed once and all requests refer to the same slots. pools: latent
    pools as of `model.new_pools`, whose slots `allocator` hands out; every slot is given back at
    the end.

    Raises ValueError for an empty prompt, or where the pool is too small.
    """
    parts = parts or Parts()
    requests = _admit(model, prompts, shared, new_tokens, allocator, pools, parts)
    rounds = drafted = accepted = 0
    while active := [request for request in requests if request.wanted > 0]:
        trees = [
            parts.build_tree(
                drafter(request.number, request.tokens),
                budget,
                top_k,
                root_token=request.tokens[-1],
            )
            for request in active
        ]
        windows = [allocator.take(len(tree)) for tree in trees]
        batch = _verify_batch(active, trees, windows, layout, model.device)
        logits = model.forward_absorbed(batch, pools, parts.attention)
        starts = batch.qo_indptr.tolist()
        for place, (request, tree, window) in enumerate(zip(active, trees, windows, strict=True)):
            behind = logits[starts[place] : starts[place + 1]]
            acceptance = parts.accept(tree, behind)
            plan = compaction_plan(acceptance.nodes, window)
            for pool in pools:
                parts.compact(pool, plan)
            allocator.give(plan.freed)
            request.commit(acceptance, plan, behind)
            rounds += 1
            drafted += len(tree) - 1
            accepted += len(acceptance.drafted)
    for request in requests:
        allocator.give(request.prefix)
    return Generation(
        tokens=tuple(
            tuple(request.tokens[len(shared) + len(prompt) :][:new_tokens])
            for request, prompt in zip(requests, prompts, strict=True)
        ),
        logits=tuple(torch.cat(request.logits)[:new_tokens] for request in requests),
        rounds=rounds,
        drafted=drafted,
        accepted=accepted,
    )


def _admit(
    model: TinyMLA,
    prompts: Sequence[Sequence[int]],
    shared: Sequence[int],
    new_tokens: int,
    allocator: SlotAllocator,
    pools: Sequence[torch.Tensor],
    parts: Parts,
) -> list[_Request]:
    """Prefill: the shared tokens once, then what is each prompt's own, but for its last token."""
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompts[{number}]: is empty")
    common = allocator.take(len(shared))
    _prefill(model, pools, parts, [shared], [[]], [common])
    own = [allocator.take(len(prompt) - 1) for prompt in prompts]
    _prefill(model, pools, parts, [prompt[:-1] for prompt in prompts], [common] * len(own), own)
    requests = []
    for number, (prompt, slots) in enumerate(zip(prompts, own, strict=True)):
        allocator.share(common)
        requests.append(_Request(number, [*shared, *prompt], [*common, *slots], wanted=new_tokens))
    allocator.give(common)
    return requests


def _verify_batch(
    active: Sequence[_Request],
    trees: Sequence[DraftTree],
    windows: Sequence[Sequence[int]],
    layout: MaskLayout,
    device: torch.device,
) -> TreeBatch:
    return TreeBatch.of(
        [tree.tokens.tolist() for tree in trees],
        [
            positions(tree.depths, len(request.prefix)).tolist()
            for request, tree in zip(active, trees, strict=True)
        ],
        windows,
        [request.prefix for request in active],
        [tree_mask(tree.parents) for tree in trees],
        layout,
        device,
    )


def _prefill(
    model: TinyMLA,
    pools: Sequence[torch.Tensor],
    parts: Parts,
    tokens: Sequence[Sequence[int]],
    prefixes: Sequence[Sequence[int]],
    windows: Sequence[Sequence[int]],
) -> None:
    """Write the latent rows of `tokens` into `windows`; a chain is a tree without branches."""
    if not any(tokens):
        return
    where = [
        range(len(prefix), len(prefix) + len(own))
        for own, prefix in zip(tokens, prefixes, strict=True)
    ]
    batch = TreeBatch.of(tokens, where, windows, prefixes, None, device=model.device)
    model.forward_absorbed(batch, pools, parts.attention)
