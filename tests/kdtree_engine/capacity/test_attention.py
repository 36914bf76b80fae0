"""The roofline of tree verification, and its fit."""

from __future__ import annotations

import dataclasses

import pytest

from kdtree_engine.capacity.attention import (
    AttentionFit,
    Regime,
    attention_parts,
    error_of,
    fit_attention,
    tile_of,
)
from kdtree_engine.errors import ConfigError
from kdtree_engine.gpus import GPUS
from kdtree_engine.tuning import TimedRegime

H200, PRO = GPUS["h200"], GPUS["rtx-pro-6000"]

REGIMES = [
    Regime(batch, heads, nodes, prefix)
    for batch, heads, nodes, prefix in (
        (1, 8, 9, 4096),
        (1, 8, 9, 65536),
        (1, 8, 1, 65536),
        (16, 8, 1, 16384),
        (1, 8, 65, 16384),
        (4, 8, 9, 16384),
    )
]


def timed(fit: AttentionFit, regime: Regime, off: float = 1.0) -> TimedRegime:
    """What a kernel that is as the model says would take, `off` times that."""
    fixed, read, product = attention_parts(fit, H200, regime)
    us = (fixed + max(read, product)) * 1e6 * off
    return TimedRegime(regime.batch, regime.heads, regime.nodes, regime.prefix, us)


def test_a_long_prefix_by_hand() -> None:
    fit = AttentionFit("sm_90", H200.device, 15e-6, 0.5, 0.25, ())
    regime = Regime(batch=1, heads=8, nodes=9, prefix=65527)
    assert tile_of("sm_90", regime)[0] == 72, "nine nodes of eight heads fill a tile"
    fixed, read, product = attention_parts(fit, H200, regime)
    assert fixed == 15e-6
    assert read == pytest.approx(1152 * 65536 / 4.46e12 / 0.5)
    assert product == pytest.approx(2176 * 72 * 65536 / 989e12 / 0.25)


def test_rows_are_padded_to_whole_tiles() -> None:
    fit = AttentionFit("sm_120", H200.device, 0.0, 1.0, 1.0, ())
    nine = attention_parts(fit, PRO, Regime(1, 8, 9, 1000))
    assert tile_of("sm_120", Regime(1, 8, 17, 1000))[0] == 32
    more = attention_parts(fit, PRO, Regime(1, 8, 17, 992))
    assert more[2] / nine[2] == pytest.approx(160 * 1009 / (72 * 1009)), "136 rows are five tiles"


def test_another_architecture_goes_by_mma_sync() -> None:
    fit = AttentionFit("sm_120", H200.device, 0.0, 1.0, 1.0, ())
    on_h200, on_pro = (attention_parts(fit, gpu, Regime(1, 8, 9, 4096)) for gpu in (H200, PRO))
    assert on_h200[2] / on_pro[2] == pytest.approx(PRO.mma_flops / H200.mma_flops)
    assert on_h200[1] / on_pro[1] == pytest.approx(PRO.bandwidth / H200.bandwidth)


def test_a_fit_finds_the_numbers_that_times_were_made_of() -> None:
    true = AttentionFit("sm_90", H200.device, 14e-6, 0.8, 0.4, ())
    found = fit_attention([timed(true, one) for one in REGIMES], H200, "sm_90")
    assert found.fixed == pytest.approx(14e-6, rel=1e-6)
    assert (found.bandwidth_share, found.flops_share) == (0.8, 0.4)
    assert (found.architecture, found.device) == ("sm_90", "NVIDIA H200")
    assert all(error_of(found, H200, timed(true, one)) == pytest.approx(0) for one in REGIMES)


def test_a_fit_of_noisy_times_is_within_the_noise() -> None:
    true = AttentionFit("sm_90", H200.device, 14e-6, 0.8, 0.4, ())
    noisy = [timed(true, one, 1.05 if number % 2 else 0.95) for number, one in enumerate(REGIMES)]
    found = fit_attention(noisy, H200, "sm_90")
    assert max(abs(error_of(found, H200, one)) for one in noisy) < 0.08
    assert error_of(found, H200, dataclasses.replace(noisy[0], us=noisy[0].us * 2)) < -0.4


def test_longer_wider_and_more_are_never_cheaper() -> None:
    fit = AttentionFit("sm_90", H200.device, 15e-6, 0.9, 0.5, ())
    for name, steps in (
        ("prefix", [0, 1, 4096, 4097, 65536, 10**6]),
        ("batch", [1, 2, 16, 64, 1024]),
        ("nodes", [1, 2, 9, 33, 128]),
        ("heads", [8, 16, 64, 128]),
    ):
        taken = []
        for value in steps:
            regime = dataclasses.replace(Regime(2, 8, 9, 4096), **{name: value})
            fixed, read, product = attention_parts(fit, H200, regime)
            taken.append(fixed + max(read, product))
        assert taken == sorted(taken), name


STAR = (
    *(TimedRegime(1, 8, 9, prefix, 20) for prefix in (4096, 16384, 65536, 204_800)),
    *(TimedRegime(1, 8, nodes, 16384, 30) for nodes in (1, 65)),
    *(TimedRegime(batch, 8, 9, 16384, 40) for batch in (4, 16)),
)
"""Each of prefix, nodes and batch is varied alone, as in plan 15's regimes."""


def test_beyond_what_was_measured_it_is_no_calibration() -> None:
    fit = fit_attention(STAR, H200, "sm_90")
    assert len(fit.measured) == len(STAR)
    assert all(fit.covers(one) for one in fit.measured)
    for prefix, nodes, batch in ((8000, 9, 1), (100_000, 9, 1), (16384, 33, 1), (16384, 9, 9)):
        assert fit.covers(Regime(batch, 8, nodes, prefix)), "between two that were measured"
    for prefix, nodes, batch in ((4095, 9, 1), (204_801, 9, 1), (16384, 66, 1), (16384, 9, 17)):
        assert not fit.covers(Regime(batch, 8, nodes, prefix))


def test_a_corner_of_the_box_is_far_from_all_that_was_measured() -> None:
    """No measured batch, tree or prefix is larger; none has two of them large at once."""
    fit = fit_attention(STAR, H200, "sm_90")
    assert not fit.covers(Regime(16, 8, 9, 204_800))
    assert not fit.covers(Regime(16, 8, 65, 16384))
    assert not fit.covers(Regime(1, 8, 65, 204_800))
    assert fit.covers(Regime(2, 8, 9, 65536)), "a little of both lies between them"


def test_rows_count_and_not_whose_they_are() -> None:
    fit = fit_attention(STAR, H200, "sm_90")
    assert fit.covers(Regime(1, 72, 1, 16384))


def _three() -> list[TimedRegime]:
    return [TimedRegime(1, 8, 1, 100, 10)]


def test_what_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(ConfigError, match="three numbers cannot be fitted to 1 times"):
        fit_attention(_three(), H200, "sm_90")
    with pytest.raises(ConfigError, match="no tuning table of sm_70"):
        tile_of("sm_70", Regime(1, 8, 9, 100))
