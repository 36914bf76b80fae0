"""The host's share of a step."""

from __future__ import annotations

import pytest

from kdtree_engine.capacity.calibration import MeasuredStep, checked, fit_host
from kdtree_engine.errors import ConfigError


def step(seconds: float, *, fitted: bool) -> MeasuredStep:
    return MeasuredStep("trees", "by hand", 1024, 9, seconds, fitted)


def test_the_host_has_what_the_rest_does_not_explain() -> None:
    steps = [step(5.0, fitted=True), step(7.0, fitted=True), step(11.0, fitted=False)]
    rest = [1.0, 2.0, 5.0]
    host = fit_host(steps, rest)
    assert host == 4.5
    found = checked(steps, rest, host)
    assert [one.model_seconds for one in found] == [5.5, 6.5, 9.5]
    assert [one.error for one in found] == pytest.approx([0.1, -0.5 / 7, -1.5 / 11])


def test_synthetic_steps_give_the_host_they_were_made_with() -> None:
    rest = [0.001, 0.002, 0.004]
    steps = [step(0.002 + one, fitted=number == 0) for number, one in enumerate(rest)]
    host = fit_host(steps, rest)
    assert host == pytest.approx(0.002)
    assert [one.error for one in checked(steps, rest, host)] == pytest.approx([0, 0, 0])


def test_a_host_takes_no_negative_time_and_needs_a_step_to_be_fitted_to() -> None:
    assert fit_host([step(1.0, fitted=True)], [2.0]) == 0
    with pytest.raises(ConfigError, match="no measured step"):
        fit_host([step(1.0, fitted=False)], [0.5])
