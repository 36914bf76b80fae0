"""Phase 8's speeds by context and batch, on servers whose answers and pace are known."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from phases.gate import Context, FailureKind, GateFailure
from phases.p8_ddtree import batch_speed as work
from phases.p8_ddtree.batch_speed import Points, lengthened, speed
from phases.service import Answer, ServiceFailed, Tokens
from phases.service_scale import CPU
from phases.trained_models import TrainedModels

POINTS = Points((64, 128), (1, 2), new_tokens=24)


@dataclasses.dataclass
class Clock:
    """Seconds that pass only where a server says so."""

    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now


@dataclasses.dataclass
class Paced:
    """A server that takes a second for each step, of whatever batch.

    accepts: tokens of a verification; 0: no speculation, one token a step. wrong: what is added
    to each token, from the `after`th call of a batch size on. A request with a shorter
    prompt gets other tokens.
    """

    clock: Clock
    accepts: int
    slower: float = 1.0
    wrong: int = 0
    after: int = 0
    asked: list[int] = dataclasses.field(default_factory=list)

    def answers(
        self, prompts: Sequence[Tokens], new_tokens: int, *, likely: int = 0
    ) -> list[Answer]:
        wrong = self.wrong if self.asked.count(len(prompts)) >= self.after else 0
        self.asked.append(len(prompts))
        verified = -(-(new_tokens - 1) // self.accepts) if self.accepts else 0
        self.clock.now += 0.5 + self.slower * (verified or new_tokens - 1)
        return [
            Answer(
                tuple(len(prompt) + step + wrong for step in range(new_tokens)),
                verified=verified,
                likely=tuple(((-0.1, len(prompt) + step), (-9.0, 0)) for step in range(new_tokens)),
            )
            for prompt in prompts
        ]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(work, "time", types.SimpleNamespace(perf_counter=clock.perf_counter))
    return clock


@pytest.fixture
def models(tmp_path: pathlib.Path) -> TrainedModels:
    for name in ("target", "drafter"):
        (tmp_path / name).mkdir()
        about: dict[str, Any] = {"max_position_embeddings": 4096}
        if name == "target":
            about["rope_scaling"] = {"factor": 1.0, "original_max_position_embeddings": 4096}
        (tmp_path / name / "config.json").write_text(json.dumps(about))
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
    return TrainedModels(tmp_path / "target", tmp_path / "drafter", {})


def gate(
    clock: Clock, models: TrainedModels, folder: pathlib.Path, **servers: Mapping[str, Any]
) -> dict[str, float]:
    """The gate, with servers that the keywords change: plain, trees, adaptive, chain."""
    folder.mkdir()

    @contextlib.contextmanager
    def start(
        arguments: Sequence[str], *, environment: Mapping[str, str], **rest: Any
    ) -> Iterator[Any]:
        name = "plain"
        if "DFLASH" in arguments:
            name = "chain"
        elif "DDTREE" in arguments:
            name = "adaptive" if environment["KDTREE_DDTREE_ADAPTIVE"] == "1" else "trees"
        assert arguments[-2:] == ("--max-total-tokens", "2097152")
        paces = {"plain": 0, "trees": 6, "adaptive": 6, "chain": 4}
        yield Paced(clock, **({"accepts": paces[name]} | dict(servers.get(name, {}))))

    ctx = Context(seed=1, scratch=folder)
    figures = speed(ctx, scale=CPU, points=POINTS, start=start, models=models)
    return {figure.name: figure.value for figure in figures}


def test_the_speeds_of_each_point(
    clock: Clock, models: TrainedModels, tmp_path: pathlib.Path
) -> None:
    found = gate(clock, models, tmp_path / "gate")
    assert found["plain at 64 x 1"] == pytest.approx(1)
    assert found["plain at 128 x 2"] == pytest.approx(2)
    assert found["chain at 64 x 1"] == pytest.approx(25 / 7)  # seven verifications for 25 tokens
    assert found["trees at 64 x 2"] == pytest.approx(2 * 5)
    assert found["trees at 64 x 2: tokens a verification"] == pytest.approx(5)
    assert found["least gain over no speculation"] == pytest.approx(5)
    assert found["least of adaptive over the chain"] == pytest.approx(5 / (25 / 7))
    assert len(found) == 2 + 4 + 3 * 4 * 2  # plain decoding has no verifications


@pytest.mark.parametrize(
    ("servers", "says"),
    [
        ({"trees": {"accepts": 4}}, "at 64 tokens, batch 1, a tree gives 3.57 .* a chain 3.57"),
        ({"chain": {"accepts": 0}}, "at 64 x 1: an answer without a verification"),
        ({"adaptive": {"accepts": 0}}, "at 64 x 1: an answer without a verification"),
        ({"trees": {"accepts": 6, "slower": 6.0}}, "0.83 times the speed of no speculation"),
        ({"adaptive": {"accepts": 6, "slower": 2.0}}, "an adaptive tree has 0.70 times the speed"),
    ],
)
def test_a_tree_that_does_not_pay_fails_the_gate(
    clock: Clock,
    models: TrainedModels,
    tmp_path: pathlib.Path,
    servers: dict[str, Any],
    says: str,
) -> None:
    with pytest.raises(GateFailure, match=says) as caught:
        gate(clock, models, tmp_path / "gate", **servers)
    assert caught.value.kind is FailureKind.TOO_SLOW
    assert len(caught.value.figures) == 30


@pytest.mark.parametrize("after", [0, 4])
def test_other_tokens_are_other_work(
    clock: Clock, models: TrainedModels, tmp_path: pathlib.Path, after: int
) -> None:
    """In the first pass, which is not timed, or in those that are."""
    with pytest.raises(GateFailure, match="beyond rounding: adaptive trees L=64 B=1 #0") as caught:
        gate(clock, models, tmp_path / "gate", adaptive={"accepts": 6, "wrong": 1, "after": after})
    assert caught.value.kind is FailureKind.TOKEN_MISMATCH


def test_where_nothing_was_decoded_there_is_no_speed(clock: Clock) -> None:
    server = Paced(clock, accepts=4, slower=0.0)
    with pytest.raises(ServiceFailed, match="nothing was decoded"):
        work.batch_speed(server, [(1, 2, 3)], new_tokens=8, repeats=2)  # type: ignore[arg-type]


def test_a_short_answer_is_no_answer(clock: Clock) -> None:
    class Short(Paced):
        def answers(self, *asked: Any, **options: Any) -> list[Answer]:
            found = super().answers(*asked, **options)
            return [dataclasses.replace(one, tokens=one.tokens[:3]) for one in found]

    with pytest.raises(ServiceFailed, match=r"2 prompts of 3 tokens: .* expected 10 tokens"):
        work.batch_speed(
            Short(clock, accepts=4),  # type: ignore[arg-type]
            [(1, 2, 3), (1, 2)],
            new_tokens=8,
            repeats=2,
        )


def test_prompts_of_a_batch_begin_alike_and_are_of_unlike_lengths(tmp_path: pathlib.Path) -> None:
    ctx = Context(seed=3, scratch=tmp_path)
    first, *others = work.starts(ctx, 200, 3)
    assert [len(first), *map(len, others)] == [200, 192, 184]
    assert all(first[: len(one)] == one for one in others)
    assert work.starts(ctx, 200, 1) == [first]


def test_longer_contexts_have_the_same_weights(
    models: TrainedModels, tmp_path: pathlib.Path
) -> None:
    longer = lengthened(models, tmp_path / "longer", 70_000)
    about = json.loads((longer.target / "config.json").read_text())
    assert about["max_position_embeddings"] == 70_000
    assert about["rope_scaling"]["original_max_position_embeddings"] == 70_000
    assert (longer.drafter / "model.safetensors").read_bytes() == b"weights"
