"""The drawn router: its shapes, its seed, and that its two assumptions do what they say."""

from __future__ import annotations

import pytest
import torch

from kdtree_engine.errors import ConfigError
from kdtree_engine.moe.synthetic import SyntheticRouter

SMALL = SyntheticRouter(experts=64, top_k=4, layers=4)


def test_its_shapes_are_kimi_k2s() -> None:
    found = SyntheticRouter().draw(2, 3, seed=1)
    assert found.counts.shape == (2, 60, 384)
    assert (found.layers[0], found.layers[-1], found.top_k) == (1, 60, 8)
    assert found.counts.sum(2).unique().tolist() == [24]


def test_a_seed_is_a_routing() -> None:
    one, same, other = (SMALL.draw(40, 3, seed) for seed in (1, 1, 2))
    assert torch.equal(one.counts, same.counts)
    assert not torch.equal(one.counts, other.counts)


def test_without_skew_all_experts_are_alike_and_with_it_one_in_each_layer_is_not() -> None:
    def most(skew: float) -> torch.Tensor:
        router = SyntheticRouter(experts=64, top_k=4, layers=4, skew=skew, reuse=0)
        loads = router.draw(2000, 1, seed=1).counts.sum(0).double()
        return loads.amax(1) / loads.mean(1)

    assert (most(0) < 1.35).all()
    # First in four draws without replacement; in the first alone, 64 / sum(1 / sqrt(i)) = 4.4.
    assert ((most(0.5) > 3) & (most(0.5) < 4.5)).all()


def test_reuse_is_the_overlap_of_neighbours() -> None:
    def active(reuse: float) -> float:
        router = SyntheticRouter(experts=64, top_k=4, layers=4, skew=0, reuse=reuse)
        return float((router.draw(2000, 2, seed=1).counts > 0).sum(2).double().mean())

    assert active(1) == 4
    assert active(0) == pytest.approx(4 + 4 * 60 / 64, rel=0.01)
    # k of four are kept; the others are drawn from the 64 - k that are left, 4 - k of them old.
    kept = [(k, (1, 4, 6, 4, 1)[k] * 0.5**4) for k in range(5)]
    new = sum(share * (4 - k) * 60 / (64 - k) for k, share in kept)
    assert active(0.5) == pytest.approx(4 + new, rel=0.01)


@pytest.mark.parametrize(
    "wrong", [{"top_k": 385}, {"dense_layers": 61}, {"skew": -1}, {"reuse": 1.5}, {"skew": 9}]
)
def test_a_router_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        SyntheticRouter(**wrong)  # type: ignore[arg-type]


def test_a_draw_tells_how_far_it_is() -> None:
    told: list[tuple[int, int]] = []
    SyntheticRouter(experts=8, top_k=2, layers=2).draw(
        40, 1, 1, lambda done, total: told.append((done, total))
    )
    assert told == [(32, 40), (40, 40)]
