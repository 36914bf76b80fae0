"""`kdtree_engine.reference.speculative`: draft, verify, accept, commit."""

from __future__ import annotations

import pytest
import torch

from kdtree_engine.reference.acceptance import accept_sampled
from kdtree_engine.reference.masks import MaskLayout
from kdtree_engine.reference.slots import SlotAllocator
from kdtree_engine.reference.speculative import (
    NoisyDrafter,
    Parts,
    plain_greedy,
    speculative_decode,
)
from kdtree_engine.reference.tiny_mla import TinyMLA, TinyMLAConfig

SEED = 20264
MODEL = TinyMLA(TinyMLAConfig(), seed=SEED)
SHARED = [8, 9, 10]
PROMPTS = [[1], [2, 3, 4, 5], [6, 7]]
NEW = 12


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def drafter(noise: float) -> NoisyDrafter:
    whole = [[*SHARED, *prompt] for prompt in PROMPTS]
    _, logits = plain_greedy(MODEL, whole, NEW)
    return NoisyDrafter(logits, [*map(len, whole)], depth=5, noise=noise, generator=generator())


def decode(noise: float, budget: int, **changes: object) -> tuple[tuple[int, ...], ...]:
    allocator = SlotAllocator(200, generator())
    made = speculative_decode(
        MODEL,
        PROMPTS,
        drafter(noise),
        budget=budget,
        new_tokens=NEW,
        allocator=allocator,
        pools=MODEL.new_pools(200),
        shared=SHARED,
        **changes,  # type: ignore[arg-type]
    )
    assert allocator.free_slots == 200, "a slot leaked"
    return made.tokens


@pytest.mark.parametrize("layout", list(MaskLayout))
@pytest.mark.parametrize("budget", [0, 1, 8])
def test_speculation_changes_no_token(budget: int, layout: MaskLayout) -> None:
    plain, _ = plain_greedy(MODEL, [[*SHARED, *prompt] for prompt in PROMPTS], NEW)
    assert [*map(list, decode(0.7, budget, layout=layout))] == plain


def test_a_better_drafter_needs_fewer_rounds() -> None:
    rounds = []
    for noise in (0.0, 1.0, 100.0):
        made = speculative_decode(
            MODEL,
            PROMPTS,
            drafter(noise),
            budget=5,
            new_tokens=NEW,
            allocator=SlotAllocator(200),
            pools=MODEL.new_pools(200),
            shared=SHARED,
            top_k=1,
        )
        assert made.rounds - len(PROMPTS) <= 3 * NEW
        rounds.append(made.rounds)
    assert rounds[0] == 3 * NEW / 6  # five drafted tokens and a bonus each time
    assert rounds[0] < rounds[1] < rounds[2]


def test_a_prompt_of_one_token_needs_no_prefix() -> None:
    plain, logits = plain_greedy(MODEL, [[42]], NEW)
    made = speculative_decode(
        MODEL,
        [[42]],
        NoisyDrafter(logits, [1], depth=5, noise=0.5, generator=generator()),
        budget=6,
        new_tokens=NEW,
        allocator=SlotAllocator(40),
        pools=MODEL.new_pools(40),
    )
    assert list(made.tokens[0]) == plain[0]
    torch.testing.assert_close(made.logits[0], logits[0], rtol=1e-9, atol=1e-9)


def test_sampling_is_as_random_as_its_generator() -> None:
    def sampled(seed: int) -> tuple[tuple[int, ...], ...]:
        draws = torch.Generator().manual_seed(seed)
        return decode(
            0.7,
            8,
            parts=Parts(
                accept=lambda tree, logits: accept_sampled(tree, logits.softmax(-1), draws)
            ),
        )

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


def test_empty_prompts_are_named() -> None:
    with pytest.raises(ValueError, match=r"prompts\[1\]: is empty"):
        plain_greedy(MODEL, [[1], []], 1)
    with pytest.raises(ValueError, match=r"prompts\[0\]: is empty"):
        speculative_decode(
            MODEL,
            [[]],
            drafter(1.0),
            budget=1,
            new_tokens=1,
            allocator=SlotAllocator(5),
            pools=MODEL.new_pools(5),
        )
