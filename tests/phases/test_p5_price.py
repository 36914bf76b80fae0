"""`run-length-price` without a GPU: small sizes on a CPU, and clocks that are not there."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kdtree_engine.attention import tree_verify_attention
from kdtree_engine.errors import MissingError
from kdtree_engine.fragmentation.layouts import slots_needed
from kdtree_engine.timing import Tensors, Timing, WrongResult
from phases.evidence import FigureRecord
from phases.gate import Context, FailureKind, Figure, GateFailure, GateKind, Unit
from phases.p5_tuning import PHASE, price
from phases.p5_tuning.price_figures import PriceSeries, price_series, price_series_json
from phases.p5_tuning.price_subjects import Compaction, Gather, Place, Slots, Verify
from phases.regimes import Regime
from phases.requirement import Requirement

CPU = torch.device("cpu")
SMALL = price.PricePlan(
    contexts=(60, 200),
    run_lengths=(1, 8),
    trees={3: (None, 128), 5: (None,)},
    gather=(128,),
    heads=2,
    pool=3000,
    layers=2,
    layer_pool=200,
    tree=12,
)


@pytest.fixture
def ctx(tmp_path: pathlib.Path) -> Context:
    return Context(seed=1, scratch=tmp_path)


@pytest.fixture(autouse=True)
def _no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(price, "copy_bandwidth", lambda device: 1e12)


def clock_of(us: Callable[[Tensors], float]) -> price.Timer:
    """Checks one call, as the real one does each, and says what `us` makes of its inputs."""

    def timer(
        make_inputs: Callable[[int], Tensors],
        operation: Callable[..., torch.Tensor],
        *,
        check: Callable[[Tensors, Tensors], str | None],
        seed: int,
        repeats: int,
        **_: Any,
    ) -> Timing:
        drawn = make_inputs(seed)
        output = operation(*(tensor.clone() for tensor in drawn))
        if (problem := check(drawn, (output,))) is not None:
            raise WrongResult(problem)
        found = us(drawn)
        return Timing(found, found, found, repeats, 3, "graph", "cold", 1, None, None)

    return timer


def by_runs(drawn: Tensors) -> float:
    """20 us, and a tenth of one for each step of its slots to another run."""
    slots = drawn[1] if len(drawn) == 3 else drawn[3][0] if len(drawn) == 5 else drawn[4]
    return 20 + 0.1 * int((slots.diff() != 1).sum())


def run(ctx: Context, **options: Any) -> list[Figure]:
    given = {"timer": clock_of(by_runs), "plan": SMALL} | options
    return price.run_length_price(ctx, device=CPU, **given)


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> list[Figure]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(price, "copy_bandwidth", lambda device: 1e12)
        return run(Context(seed=1, scratch=tmp_path_factory.mktemp("price")))


def test_the_gate_is_one_of_speed_that_needs_a_gpu_alone() -> None:
    gate = next(gate for gate in PHASE.gates if gate.name == "run-length-price")
    assert gate.check is price.run_length_price
    assert (gate.kind, gate.requires) == (GateKind.SPEED, (Requirement.GPU,))
    assert {"kdtree-engine/csrc/*", "kdtree-engine/csrc_trees/*"} < set(gate.data)


def test_each_context_and_run_length_has_a_time_and_a_price(figures: list[Figure]) -> None:
    named = {figure.name: figure for figure in figures}
    assert len(named) == len(figures)
    title = "verify of 3 nodes, 200 tokens, runs of 8 within 3000 slots"
    assert named[title].value == pytest.approx(20 + 0.1 * 24)
    assert named[f"{title}: price"].value == pytest.approx(2.4)
    assert named[f"{title}: price"].unit is Unit.MICROSECONDS
    assert named[f"{title}: contiguous instead"].value == pytest.approx(1.12)
    assert named["verify of 3 nodes, 200 tokens, contiguous"].value == 20
    assert named["verify of 3 nodes, 200 tokens, contiguous: its times apart by"].value == 0
    assert "gather, 60 tokens, runs of 1 within 128 slots" in named
    assert "compaction of 2 layers, 12 tokens, runs of 1 within 200 slots: price" in named
    headline = figures[0]
    assert headline.name == "most that contiguity saves in verify, a layer"
    assert headline.value == pytest.approx(0.1 * 199)
    checked = named["outputs over slots, checked before their time"].value
    assert checked == named["of them with the bits of contiguous rows"].value


def test_progress_says_how_many_times_there_are(ctx: Context) -> None:
    seen: list[tuple[int, int, str]] = []
    plan = dataclasses.replace(SMALL, contexts=(60,), trees={3: (None, 128)}, gather=(None,))
    watched = dataclasses.replace(ctx, progress=lambda *told: seen.append(told))
    run(watched, plan=plan)
    assert [told[:2] for told in seen] == [(number, 14) for number in range(14)]
    assert seen[1][2] == "verify of 3 nodes, 60 tokens, runs of 1 within 3000 slots"


def test_prices_are_read_back_from_what_is_kept(figures: list[Figure]) -> None:
    kept = [
        FigureRecord.model_validate_json(FigureRecord.of(figure).model_dump_json())
        for figure in figures
    ]
    series = price_series(kept)
    assert series == price_series(figures)
    assert [(one.operation, one.tokens, one.within) for one in series][:4] == [
        ("verify of 3 nodes", 60, 3000),
        ("verify of 3 nodes", 60, 128),
        ("verify of 5 nodes", 60, 3000),
        ("gather", 60, 128),
    ]
    first = json.loads(json.dumps(price_series_json(series)))[0]
    assert first["price_us"] == pytest.approx({"1": 6.1 - 0.2, "8": 0.7}, abs=0.1)
    assert first["price_percent"]["8"] == pytest.approx(100 * first["price_us"]["8"] / 20)
    assert first["us"].keys() == first["price_us"].keys()


def test_figures_that_do_not_hold_together_are_refused() -> None:
    title = "gather, 60 tokens"
    alone = Figure(f"{title}, runs of 1 within 99 slots", 3.0, Unit.MICROSECONDS)
    base = Figure(f"{title}, contiguous", 2.0, Unit.MICROSECONDS)
    derived = Figure(f"{alone.name}: price", 1.0, Unit.MICROSECONDS)
    assert price_series([base, alone, derived]) == [PriceSeries("gather", 60, 99, 2.0, {1: 3.0})]
    with pytest.raises(ValueError, match="no time of 'gather, 60 tokens, contiguous'"):
        price_series([alone])
    with pytest.raises(ValueError, match="runs of 1 within 99 slots' stands there twice"):
        price_series([base, alone, alone])


@pytest.mark.slow
def test_the_real_clock_times_all_of_it_on_a_cpu(ctx: Context) -> None:
    plan = dataclasses.replace(SMALL, contexts=(60,), trees={3: (None,)})
    figures = price.run_length_price(ctx, device=CPU, plan=plan, repeats=3)
    assert len(price_series(figures)) == 3
    assert all(
        one.us.keys() <= {1, 8} and min(one.us.values()) > 0 for one in price_series(figures)
    )


def ignores_the_slots(q: torch.Tensor, pool: torch.Tensor, *rest: Any, **options: Any) -> Any:
    """Reads the prefix as if it began at its first slot and were contiguous."""
    qo_indptr, kv_indptr, kv_indices, *others = rest
    wrong = kv_indices[0] + torch.arange(len(kv_indices))
    wrong = wrong.clamp(max=pool.shape[0] - 1)
    return tree_verify_attention(q, pool, qo_indptr, kv_indptr, wrong, *others, **options)


def swaps_two_rows(q: torch.Tensor, pool: torch.Tensor, *rest: Any, **options: Any) -> Any:
    """Takes one row of the prefix twice and leaves the next out, unless they are neighbours."""
    qo_indptr, kv_indptr, kv_indices, *others = rest
    wrong = kv_indices.clone()
    if kv_indices[1] != kv_indices[0] + 1:
        wrong[1] = wrong[0]
    return tree_verify_attention(q, pool, qo_indptr, kv_indptr, wrong, *others, **options)


@pytest.mark.parametrize("wrong", [ignores_the_slots, swaps_two_rows])
def test_a_kernel_that_is_right_over_contiguous_slots_alone_fails(
    ctx: Context, wrong: Callable[..., Any]
) -> None:
    with pytest.raises(
        GateFailure, match=r"3 nodes, 60 tokens, runs of 1 within 3000 slots: over slots: rel"
    ) as failed:
        run(ctx, candidate=wrong)
    assert failed.value.kind is FailureKind.NUMERICAL


def test_a_kernel_that_turns_wrong_under_the_clock_fails(ctx: Context) -> None:
    calls = 0

    def late(*tensors: torch.Tensor, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        right = tree_verify_attention(*tensors, **options)
        assert isinstance(right, torch.Tensor)
        return right if calls < 3 else right * 1.1

    with pytest.raises(GateFailure, match="60 tokens, contiguous: relative error 0") as failed:
        run(ctx, candidate=late)
    assert failed.value.kind is FailureKind.NUMERICAL


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, None])
@pytest.mark.parametrize("of", ["contiguous", "runs of 8 within 128 slots"])
def test_a_time_that_is_missing_or_no_number_does_not_pass(
    figures: list[Figure], of: str, bad: float | None
) -> None:
    title = f"verify of 3 nodes, 200 tokens, {of}"
    price._require_complete(SMALL, 3000, figures)
    others = [one for one in figures if one.name != title]
    assert len(others) == len(figures) - 1
    worse = others if bad is None else [*others, Figure(title, bad, Unit.MICROSECONDS)]
    with pytest.raises(ValueError, match="verify of 3 nodes, 200 tokens"):
        price._require_complete(SMALL, 3000, worse)


def test_the_pool_is_as_large_as_the_memory_allows() -> None:
    assert price._sizes(price.PLAN, 140_000_000_000, 8) == (4_000_000, 65_536)
    pool, layer_pool = price._sizes(price.PLAN, 24_000_000_000, 8)
    assert 1_000_000 < pool < 4_000_000
    assert 10_000 < layer_pool < 65_536
    assert price._sizes(price.PLAN, None, 8) == (4_000_000, 65_536)
    # What the timer holds of thirty compactions beside: an H200 ran out at 65,536 slots a layer.
    _, layer_pool = price._sizes(price.PLAN, 148_000_000_000, 38)
    assert 38 * 61 * layer_pool * 1152 < 0.9 * 148_000_000_000
    assert 40_000 < layer_pool < 65_536


def test_a_card_that_is_too_small_is_said_so(ctx: Context) -> None:
    with pytest.raises(MissingError, match=r"^8\.0 GB of .* a pool of 524288 slots .* takes 10\.7"):
        run(ctx, plan=price.PLAN, free_bytes=8_000_000_000)


def test_every_layout_of_the_plan_fits_its_pool() -> None:
    tokens = 204_800 + 65
    for window in price.PLAN.windows:
        for run_length in price.PLAN.run_lengths:
            assert slots_needed(tokens, run_length, window) <= 524_288


def scattered(pool: int = 300) -> Place:
    return Place(pool, Slots(1, pool))


def test_rows_are_the_same_wherever_they_lie() -> None:
    verify = Verify(Regime(1, 2, 3, 40), tree_verify_attention, CPU)
    near, far = (verify.inputs(5, place) for place in (Place(300), scattered()))
    for number in (0, 6, 8):  # queries, mask, rows in prefix order
        assert torch.equal(near[number], far[number])
    slots = torch.cat([far[4], far[5]])
    assert torch.equal(far[1][slots], far[8][:43])
    assert far[1].isnan().any(1).sum() == 300 - 43
    assert int((near[4].diff() != 1).sum()) == 0


def test_a_gather_of_other_rows_is_wrong() -> None:
    gather = Gather(40, CPU)
    drawn = gather.inputs(5, scattered())
    output = gather.run(*drawn)
    assert gather.problem(drawn, (output,)) is None
    assert gather.try_contiguous(drawn, (output,)) == (None, True)
    assert gather.problem(drawn, (output.flip(0),)) == "rows are not those of the slots"


def test_a_compaction_moves_every_accepted_row_and_no_other() -> None:
    subject = Compaction(3, 12, CPU)
    drawn = subject.inputs(5, scattered())
    path = drawn[1][0]
    assert len(path) == 9
    assert (path[1:] > torch.arange(1, 9)).all()
    buffers: Sequence[torch.Tensor] = [tensor.clone() for tensor in drawn]
    output = subject.run(*buffers)
    assert subject.problem(drawn, (output,)) is None
    assert subject.try_contiguous(drawn, (output,)) == (None, True)
    assert subject.problem(drawn, (drawn[0],)) is not None
