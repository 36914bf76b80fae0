"""The batched tree builder on the CPU: the oracle's trees, their masks and SGLang's arrays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tree_cases import TreeCase, same_tree, standard_cases

from kdtree_engine.ops import DraftTrees, build_draft_trees
from kdtree_engine.ops.candidates import top_candidates
from kdtree_engine.reference.masks import MaskLayout, pack_masks, tree_mask, unpack_masks
from kdtree_engine.reference.tree import build_draft_tree, positions

CASE = TreeCase("quantised", batch=3, depth=5, columns=12, budget=40, top_k=6, seed=7)


def padded_masks(trees: DraftTrees) -> list[torch.Tensor]:
    """By the oracle: each tree's mask, and padding nodes that see themselves alone."""
    masks = []
    for request in range(trees.tokens.shape[0]):
        mask = torch.eye(trees.nodes, dtype=torch.bool)
        count = int(trees.counts[request])
        mask[:count, :count] = tree_mask(trees.tree(request).parents)
        masks.append(mask)
    return masks


@pytest.mark.parametrize("case", standard_cases(), ids=str)
def test_log_probs_give_the_oracles_trees(case: TreeCase) -> None:
    scores = case.log_probs()
    found = build_draft_trees(scores, case.budget, case.top_k)
    for request in range(case.batch):
        wanted = build_draft_tree(scores[request], case.budget, case.top_k)
        assert same_tree(found, request, wanted), request


@pytest.mark.parametrize("case", standard_cases()[::3], ids=str)
def test_logits_give_the_oracles_trees_over_their_candidates(case: TreeCase) -> None:
    scores = case.logits()
    found = build_draft_trees(scores, case.budget, case.top_k, from_logits=True)
    ranks = min(case.columns, case.top_k)
    log_probs, tokens = top_candidates(scores, ranks, from_logits=True)
    # The oracle wants different tokens in a row, also of the candidates that are never chosen.
    tokens = torch.where(tokens < 0, -2 - torch.arange(ranks), tokens)
    for request in range(case.batch):
        wanted = build_draft_tree(log_probs[request], case.budget, token_ids=tokens[request])
        assert same_tree(found, request, wanted), request


def test_a_large_vocabulary_with_ties_in_every_chunk() -> None:
    generator = torch.Generator().manual_seed(3)
    scores = torch.randint(0, 6, (1, 7, 163_840), generator=generator).to(torch.bfloat16)
    found = build_draft_trees(scores, 64, 16, from_logits=True)
    top = scores[0].float().sort(dim=-1, descending=True, stable=True).indices[:, :16]
    log_probs = top_candidates(scores, 16, from_logits=True)[0]
    assert same_tree(found, 0, build_draft_tree(log_probs[0], 64, token_ids=top))


def test_64_requests_each_as_alone() -> None:
    case = TreeCase("plain", batch=64, depth=16, columns=16, budget=64, top_k=16, seed=5)
    scores = case.log_probs()
    found = build_draft_trees(scores, 64, 16)
    for request in (0, 1, 31, 63):
        assert same_tree(found, request, build_draft_tree(scores[request], 64, 16))


def test_tokens_roots_and_positions() -> None:
    scores = CASE.log_probs()
    names = torch.randperm(1000, generator=torch.Generator().manual_seed(1))[: 5 * 12]
    token_ids = names.view(1, 5, 12).repeat(3, 1, 1).to(torch.int32)
    roots, prefixes = torch.tensor([5, 6, 7]), torch.tensor([0, 21, 1000], dtype=torch.int32)
    found = build_draft_trees(
        scores, 40, 6, token_ids=token_ids, root_tokens=roots, prefix_lengths=prefixes
    )
    for request in range(3):
        wanted = build_draft_tree(
            scores[request], 40, 6, token_ids=token_ids[request], root_token=int(roots[request])
        )
        assert same_tree(found, request, wanted)
        where = positions(wanted.depths, int(prefixes[request]))
        assert torch.equal(found.positions[request, : len(wanted)], where)


@pytest.mark.parametrize("budget", [1, 7, 62, 63, 64, 126, 127, 128])
@pytest.mark.parametrize("byte_dtype", [torch.uint8, torch.bool])
def test_masks_are_the_oracles_in_every_layout(budget: int, byte_dtype: torch.dtype) -> None:
    prefixes = [0, 21, 300]
    nodes = budget + 1
    full = torch.ones(sum(nodes * (prefix + nodes) for prefix in prefixes) + 9, dtype=byte_dtype)
    trees = build_draft_trees(
        CASE.log_probs(), budget, 6, prefix_lengths=torch.tensor(prefixes), full_mask=full
    )
    wanted = padded_masks(trees)
    for layout, mask in (
        (MaskLayout.DRAFT, trees.draft_mask),
        (MaskLayout.PACKED, trees.packed_mask),
        (MaskLayout.FULL, full[:-9]),
    ):
        packed, indptr = pack_masks(wanted, prefixes, layout, byte_dtype)
        assert torch.equal(mask.to(packed.dtype), packed), layout
        assert torch.equal(trees.mask_indptr(layout), indptr), layout
        back = unpack_masks(mask, indptr, [nodes] * 3, prefixes)
        assert all(torch.equal(a, b) for a, b in zip(back, wanted, strict=True))
    assert trees.full_mask is full
    assert bool(full[-9:].all()), "what lies behind the last request stays as it is"


def test_retrieval_arrays_are_sglangs() -> None:
    """What `build_tree_kernel_efficient` does, in Python.

    From the last node to the first, a node becomes its parent's first child, and the child that was
    first becomes its next sibling.
    """
    trees = build_draft_trees(CASE.log_probs(), CASE.budget, CASE.top_k)
    for request in range(CASE.batch):
        parents = trees.parents[request].tolist()
        child, sibling = [-1] * trees.nodes, [-1] * trees.nodes
        for node in range(int(trees.counts[request]) - 1, 0, -1):
            sibling[node], child[parents[node]] = child[parents[node]], node
        assert trees.retrieve_next_token[request].tolist() == child
        assert trees.retrieve_next_sibling[request].tolist() == sibling
        first = request * trees.nodes
        assert trees.retrieve_index[request].tolist() == list(range(first, first + trees.nodes))


def test_padding_is_harmless() -> None:
    """Two candidates in one position: of ten nodes there are two, and the others lead nowhere."""
    trees = build_draft_trees(
        torch.tensor([[[-1.0, -2.0]]]),
        10,
        root_tokens=torch.tensor([9]),
        prefix_lengths=torch.tensor([100]),
    )
    assert trees.counts.tolist() == [3]
    assert trees.tokens.tolist() == [[9, 0, 1, *[9] * 8]]
    assert trees.parents.tolist() == [[-1, 0, 0, *[-1] * 8]]
    assert trees.positions.tolist() == [[100, 101, 101, *[100] * 8]]
    assert trees.log_weights[0, 3:].tolist() == [-torch.inf] * 8
    assert trees.retrieve_next_token[0, 1:].tolist() == [-1] * 10
    assert trees.draft_mask.view(11, 11)[3:].tolist() == torch.eye(11)[3:].tolist()


def test_positions_without_a_candidate_leave_the_root() -> None:
    scores = torch.full((2, 3, 4), -torch.inf)
    for from_logits in (False, True):
        trees = build_draft_trees(scores, 5, from_logits=from_logits)
        assert trees.counts.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"scores": [[1.0]]}, TypeError, "scores: expected a tensor, got list"),
        ({"scores": torch.zeros(2, 3)}, ValueError, r"scores: expected shape \[batch, depth, col"),
        ({"scores": torch.zeros(1, 17, 2)}, ValueError, "scores: expected at most 16 positions"),
        ({"scores": torch.zeros(1, 0, 2)}, ValueError, r"scores: expected shape .*got \[1, 0, 2\]"),
        ({"scores": torch.zeros(1, 1, 262_145)}, ValueError, "scores: expected at most 262144 col"),
        ({"scores": torch.zeros(1, 2, 2).long()}, TypeError, "scores: expected dtype float32 or"),
        (
            {"scores": torch.zeros(1, 2, 6)[..., ::2]},
            ValueError,
            "scores: expected a contiguous la",
        ),
        ({"budget": 0}, ValueError, r"budget: expected 1\.\.128, got 0"),
        ({"budget": 129}, ValueError, r"budget: expected 1\.\.128, got 129"),
        ({"budget": 2.5}, TypeError, "budget: expected an int, got float"),
        ({"top_k": 65}, ValueError, r"top_k: expected 1\.\.64, got 65"),
        (
            {"token_ids": torch.zeros(1, 2, 4)},
            TypeError,
            "token_ids: expected dtype int64 or int32",
        ),
        (
            {"token_ids": torch.zeros(1, 2, 3).long()},
            ValueError,
            r"token_ids: expected shape \[1, 2",
        ),
        ({"root_tokens": torch.zeros(2).long()}, ValueError, r"root_tokens: expected shape \[1\]"),
        ({"prefix_lengths": torch.tensor([-3])}, ValueError, r"prefix_lengths\[0\]: .*got -3"),
        (
            {"full_mask": torch.ones(24).bool()},
            ValueError,
            "full_mask: .*at least 25 bytes.*too sh",
        ),
        (
            {"full_mask": torch.ones(29).bool(), "prefix_lengths": torch.tensor([1])},
            ValueError,
            "full_mask: expected at least 30 bytes for 1 trees of 5 nodes and 1 prefix tokens",
        ),
        (
            {"from_logits": True, "scores": torch.zeros(1, 2, 4).double()},
            TypeError,
            "scores: expec",
        ),
    ],
)
def test_a_wrong_argument_is_named(
    change: dict[str, Any], error: type[Exception], text: str
) -> None:
    arguments: dict[str, Any] = {"scores": torch.zeros(1, 2, 4), "budget": 4} | change
    with pytest.raises(error, match=text):
        build_draft_trees(arguments.pop("scores"), arguments.pop("budget"), **arguments)


def test_nan_is_refused() -> None:
    scores = torch.zeros(1, 2, 4)
    scores[0, 0, 3] = torch.nan
    with pytest.raises(ValueError, match=r"scores\[0, 0, 3\]: .*got nan"):
        build_draft_trees(scores, 4, from_logits=True)


@pytest.mark.parametrize("options", ["none", "all"])
def test_opcheck(options: str) -> None:
    scores, nodes = CASE.logits(), 9
    given = options == "all"

    def integers(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    torch.library.opcheck(
        torch.ops.kdtree_engine.build_draft_trees.default,
        (
            scores,
            torch.arange(12).repeat(3, 5, 1) if given else None,
            torch.tensor([1, 2, 3]) if given else None,
            integers(3),
            True,
            6,
            *(integers(3, nodes) for _ in range(4)),
            torch.zeros(3, nodes, dtype=torch.float64),
            integers(3),
            *(integers(3, nodes) for _ in range(3)),
            torch.zeros(3 * nodes * nodes, dtype=torch.uint8),
            integers(3 * nodes),
            torch.ones(3 * nodes * nodes, dtype=torch.bool) if given else None,
        ),
    )


def test_meta_tensors_give_shapes_alone() -> None:
    trees = build_draft_trees(torch.zeros(2, 3, 50, device="meta"), 8, from_logits=True)
    assert trees.tokens.shape == (2, 9)
    assert trees.draft_mask.device.type == "meta"


def test_compiled_it_gives_the_same_trees() -> None:
    def step(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        trees = build_draft_trees(scores, 20, 4, from_logits=True)
        return trees.tokens + 1, trees.packed_mask

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(compiled(CASE.logits()), step(CASE.logits()), strict=True):
        assert torch.equal(found, wanted)
