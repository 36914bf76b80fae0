"""A whole step."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kdtree_engine.capacity.attention import AttentionFit, Regime
from kdtree_engine.capacity.drafting import DFLASH
from kdtree_engine.capacity.shapes import KIMI_K2
from kdtree_engine.capacity.step import Host, Load, Service, Step, decode_step
from kdtree_engine.errors import ConfigError
from kdtree_engine.gpus import GPUS, LINKS

H200 = GPUS["h200"]
MEASURED = tuple(
    Regime(batch, 8, nodes, prefix)
    for batch in (1, 16)
    for nodes in (1, 65)
    for prefix in (1024, 204_800)
)
FITS = {
    name: AttentionFit(name, H200.device, 15e-6, 0.8, 0.4, MEASURED) for name in ("sm_90", "sm_120")
}
SMALL = dataclasses.replace(
    KIMI_K2, layers=4, dense_layers=4, hidden=1024, heads=8, experts=0, top_k=0
)
HOST = Host(2e-3, 1e-3, device=H200.device, shape=SMALL, nodes=9, contexts=(1024, 65_536))
LOAD = Load(context=4096, batch=4, nodes=9, accepted=3.0)


def service(gpu: str = "h200", **given: Any) -> Service:
    part = GPUS[gpu]
    settings: dict[str, Any] = {
        "shape": KIMI_K2,
        "gpu": part,
        "link": LINKS[part.link],
        "gpus": 8,
        "ranks": 8,
        "expert_bytes": 0.5625,
        "dense_bytes": 2.0,
        "drafter": DFLASH,
    }
    return Service(**{**settings, **given})


def taken(served: Service, load: Load = LOAD, **changed: Any) -> Step:
    load = dataclasses.replace(load, **changed)
    return decode_step(served, load, FITS[served.gpu.architecture], HOST)


def test_tokens_a_second_are_the_accepted_ones_of_all_requests_over_the_step() -> None:
    step = taken(service())
    assert step.seconds == pytest.approx(sum(one.seconds for one in step.components))
    assert step.tokens_per_second == pytest.approx(3.0 * 4 / step.seconds)
    assert sum(step.shares.values()) == pytest.approx(1)
    twice = taken(service(), accepted=6.0)
    assert twice.tokens_per_second == pytest.approx(2 * step.tokens_per_second)


def test_longer_contexts_larger_batches_and_wider_trees_never_take_less() -> None:
    for gpu in ("h200", "rtx-pro-6000", "rtx-5090"):
        for name, steps in (
            ("context", [1, 1024, 4096, 16384, 65536, 200_000]),
            ("batch", [1, 2, 4, 16, 64]),
            ("nodes", [2, 5, 9, 17, 33]),
        ):
            seconds = [taken(service(gpu), **{name: value}).seconds for value in steps]
            assert seconds == sorted(seconds), (gpu, name)


def test_a_faster_gpu_never_takes_longer() -> None:
    slow = taken(service())
    for name in ("bandwidth", "flops", "mma_flops"):
        faster = dataclasses.replace(H200, **{name: 2 * getattr(H200, name)})
        step = decode_step(dataclasses.replace(service(), gpu=faster), LOAD, FITS["sm_90"], HOST)
        assert step.seconds <= slow.seconds


def test_drafting_is_the_drafters_the_callers_or_the_hosts() -> None:
    def names(step: Step) -> list[str]:
        return [one.name for one in step.components]

    assert names(taken(service()))[-3:] == ["drafting", "tree", "host"]
    assert names(taken(service(drafter=None)))[-2:] == ["all-reduce", "host"]
    assert names(taken(service(), nodes=1, accepted=1.0))[-2:] == ["all-reduce", "host"]
    told = taken(service(draft_seconds=0.25)).components[-2]
    assert (told.name, told.seconds, told.basis) == ("drafting", 0.25, "given")


def test_without_speculation_the_host_has_less_to_do() -> None:
    assert taken(service()).components[-1].seconds == 2e-3
    assert taken(service(), nodes=1, accepted=1.0).components[-1].seconds == 1e-3


def test_a_gpu_that_was_not_measured_gives_predictions_alone() -> None:
    for gpu in ("rtx-pro-6000", "rtx-5090"):
        step = taken(service(gpu))
        assert {one.basis for one in step.components} == {"prediction"}
        assert (step.basis, step.rests_on_measurement) == ("prediction", 0)


def test_on_the_measured_gpu_attention_is_calibrated_within_its_range() -> None:
    step = taken(service())
    assert step.components[0].basis == "calibrated"
    assert step.basis == "prediction", "its experts were never timed"
    assert 0 < step.rests_on_measurement < 1
    assert taken(service(), batch=17).components[0].basis == "extrapolated"
    assert taken(service(), context=210_000).components[0].basis == "extrapolated"


def test_only_the_measured_service_is_calibrated_as_a_whole() -> None:
    own = service(shape=SMALL, gpus=1, ranks=1, drafter=None)
    assert taken(own, batch=1).basis == "calibrated"
    assert taken(own, batch=1).rests_on_measurement == 1
    for other, changed in (
        (own, {"batch": 2}),
        (own, {"batch": 1, "nodes": 8}),
        (own, {"batch": 1, "context": 1023}),
        (own, {"batch": 1, "context": 65_537}),
        (dataclasses.replace(own, reach=0.7), {"batch": 1}),
        (dataclasses.replace(own, drafter=DFLASH), {"batch": 1}),
        (dataclasses.replace(own, shape=dataclasses.replace(SMALL, value=64)), {"batch": 1}),
        (service("rtx-5090", shape=SMALL, gpus=1, ranks=1, drafter=None), {"batch": 1}),
    ):
        assert taken(other, **changed).basis == "prediction"


def test_replicas_share_the_requests() -> None:
    whole, halves = service(), service(ranks=4)
    assert halves.replicas == 2
    step = taken(halves, batch=5)
    assert step.seconds == taken(service(gpus=4, ranks=4), batch=3).seconds
    assert step.tokens_per_second == pytest.approx(15 / step.seconds)
    assert step.memory.weights > taken(whole, batch=5).memory.weights


def test_what_cannot_be_divided_or_was_fitted_for_others_is_refused() -> None:
    with pytest.raises(ConfigError, match="8 GPUs are not to be divided among 3 ranks"):
        service(ranks=3)
    with pytest.raises(ConfigError, match="64 heads are not to be divided among 6 ranks"):
        service(gpus=6, ranks=6)
    odd = dataclasses.replace(KIMI_K2, experts=380)
    with pytest.raises(ConfigError, match="380 experts are not to be divided among 8 ranks"):
        service(shape=odd, placement="ep")
    with pytest.raises(ConfigError, match="a fit of sm_120 is none of sm_90"):
        decode_step(service(), LOAD, FITS["sm_120"], HOST)


def test_the_head_is_read_as_bf16_whatever_the_other_weights_are() -> None:
    """Between a model with its vocabulary and one with next to none lies the head alone."""
    read = []
    for dense_bytes in (2.0, 0.5):
        whole, small = (
            taken(
                dataclasses.replace(
                    service(shape=dataclasses.replace(KIMI_K2, vocabulary=vocabulary)),
                    dense_bytes=dense_bytes,
                ),
                batch=1,
            ).components[1]
            for vocabulary in (163_840, 8)
        )
        read.append(whole.parts["bytes"] - small.parts["bytes"])
    assert read[0] > 0
    assert read[0] == pytest.approx(read[1])
