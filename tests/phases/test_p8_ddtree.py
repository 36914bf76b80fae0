"""Phase 8's gates, tried on a server that is not there."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import pathlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from phases.gate import Context, FailureKind, GateFailure
from phases.p8_ddtree import PHASE, gpu_host, service, speed
from phases.p8_ddtree.service import chi_square, chi_square_limit
from phases.p8_ddtree.speed import BuildCase
from phases.requirement import Requirement
from phases.service import Answer, Tokens
from phases.trained_models import TrainedModels

MODELS = TrainedModels(pathlib.Path("/target"), pathlib.Path("/drafter"), {})
CHANCES = {(1, 1, 1, 1): 0.4, (1, 1, 1, 2): 0.2, (1, 2, 1, 1): 0.15, (2, 1, 1, 1): 0.15}
"""Of sampled answers; the rest is spread over others."""


class FakeServer:
    """Answers as stock SGLang would; `faults` name what is wrong with its trees."""

    def __init__(self, *faults: str) -> None:
        self.faults = faults
        self.started: list[tuple[Sequence[str], Mapping[str, str]]] = []

    @contextlib.contextmanager
    def __call__(
        self,
        arguments: Sequence[str],
        *,
        log: pathlib.Path,
        environment: Mapping[str, str],
        limit_s: float,
    ) -> Iterator[Any]:
        self.started.append((arguments, environment))
        faults = self.faults
        trees = "DDTREE" in arguments
        chain = trees and arguments[arguments.index("--speculative-ddtree-topk") + 1] == "1"
        counts = {"branching": 5, "short_masks": 9, "moved": 2, "accepted": 7}
        counts |= {name: 0 for name in counts if f"no {name}" in faults}
        pathlib.Path(environment["KD_TEST_OBSERVED"]).write_text(json.dumps(counts))
        log.write_text("Failed to apply hooks\n" if trees and "hooks" in faults else "well\n")
        wrong = pathlib.Path(environment["KD_TEST_WRONG_MASK"])
        draw = random.Random(5)

        def one(prompt: Tokens, count: int, *, late: bool = False) -> Tokens:
            tokens = [sum(prompt) + step for step in range(count)]
            if wrong.exists():
                tokens[-1] += "mask is ignored" not in faults
            elif trees and (("chain" in faults and chain) or (late and "at once" in faults)):
                tokens[-1] += 1
            elif trees and "short rows" in faults and len(prompt) == 40 and not late:
                tokens[-1] += near_end.count(prompt) > 0
            return tuple(tokens)

        near_end: list[Tokens] = []

        def sampled() -> Tokens:
            if "greedy" in faults:
                return (1, 1, 1, 1)
            chances = dict(CHANCES)
            if "skewed" in faults:
                chances |= {(1, 1, 1, 1): 0.5, (1, 1, 1, 2): 0.1}
            others = [(9, *more) for more in itertools.product(range(3), repeat=3)]
            rest = 1 - sum(chances.values())
            everything = {**chances, **dict.fromkeys(others, rest / len(others))}
            (found,) = draw.choices(list(everything), list(everything.values()))
            return found

        class Answers:
            def generate(self, prompts: Sequence[Tokens], count: int) -> list[Tokens]:
                near_end[:] = prompts if len(prompts) == 3 else ()
                return [one(prompt, count) for prompt in prompts]

            def generate_at_once(self, prompts: Sequence[Tokens], count: int) -> list[Tokens]:
                return [one(prompt, count, late=True) for prompt in prompts]

            def answers(
                self,
                prompts: Sequence[Tokens],
                count: int,
                *,
                sampling: Mapping[str, float] | None = None,
            ) -> list[Answer]:
                rounds = (count - 1) // (3 if chain or "no gain" in faults else 5) + 1
                if sampling is not None:
                    assert sampling == {"temperature": 0.6, "top_p": 0.9}
                    return [Answer(sampled(), verified=2) for _ in prompts]
                return [Answer(one(prompt, count), verified=rounds) for prompt in prompts]

        yield Answers()


def drafted(
    models: TrainedModels, asked: Sequence[Tokens], shape: tuple[int, int], new_tokens: int
) -> list[int]:
    """What the drafter's weights say: 3 tokens a verification of a chain, 5 of a tree."""
    return [(new_tokens - 1) // (3 if shape == (7, 1) else 5) + 1 for _ in asked]


@pytest.fixture
def ctx(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(service, "_likely_answers", lambda *_: CHANCES)
    monkeypatch.setattr(service, "rounds", drafted)
    return Context(seed=1, scratch=tmp_path)


def test_the_gates_that_the_plan_names() -> None:
    assert {gate.name: (set(gate.requires), gate.check is not None) for gate in PHASE.gates} == {
        "ddtree-token-exact": ({Requirement.SGLANG}, True),
        "ddtree-distribution": ({Requirement.SGLANG}, True),
        "ddtree-graph-token-exact": ({Requirement.GPU, Requirement.SERVICE}, True),
        "ddtree-ops-speed": ({Requirement.GPU}, True),
        "ddtree-speed": ({Requirement.GPU, Requirement.SERVICE}, True),
    }
    assert {gate.name for gate in PHASE.gates if gate.token_exact} == {
        *("ddtree-token-exact", "ddtree-distribution", "ddtree-graph-token-exact")
    }


def test_equal_tokens_pass_and_the_tree_is_held_against_its_chain(ctx: Context) -> None:
    server = FakeServer()
    figures = service.ddtree_token_exact(ctx, start=server, models=MODELS)
    found = {figure.name: figure.value for figure in figures}
    assert found["tokens equal"] == 4 * 4 * 48
    assert found["trees: tokens a verification"] > found["chain: tokens a verification"] > 1
    assert found["answers that a wrong mask changes"] == 4
    asked = [
        tuple(
            arguments[arguments.index(name) + 1] if name in arguments else None
            for name in ("--attention-backend", "--speculative-algorithm")
        )
        for arguments, _ in server.started
    ]
    assert asked == [
        ("triton", None),
        ("kdtree_mla", "DDTREE"),
        ("kdtree_mla", "DDTREE"),
        ("triton", "DDTREE"),
    ]
    adaptive = [environment["KDTREE_DDTREE_ADAPTIVE"] for _, environment in server.started]
    assert adaptive == ["0", "0", "0", "1"]


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        ("chain", FailureKind.TOKEN_MISMATCH, "chain: answer 0 differs"),
        ("at once", FailureKind.TOKEN_MISMATCH, "requests sent at once: answer 0 differs"),
        ("mask is ignored", FailureKind.TOKEN_MISMATCH, "a mask of ones changes no token"),
        ("no branching", FailureKind.TOKEN_MISMATCH, "nothing was counted of 'branching'"),
        ("no moved", FailureKind.TOKEN_MISMATCH, "nothing was counted of 'moved'"),
        ("no gain", FailureKind.NUMERICAL, "it does not draft what it was trained to"),
        ("short rows", FailureKind.TOKEN_MISMATCH, "trees, to the end of the context: answer 1"),
        ("hooks", FailureKind.LAUNCH, "trees: its log says: Failed to apply hooks"),
    ],
)
def test_what_is_wrong_fails(ctx: Context, fault: str, kind: FailureKind, says: str) -> None:
    with pytest.raises(GateFailure, match=says) as caught:
        service.ddtree_token_exact(ctx, start=FakeServer(fault), models=MODELS)
    assert caught.value.kind == kind


def test_answers_with_the_targets_distribution_pass(ctx: Context) -> None:
    figures = service.ddtree_distribution(ctx, start=FakeServer(), models=MODELS)
    found = {figure.name: figure.value for figure in figures}
    assert found["answers"] == 512
    assert found["degrees of freedom"] == 4
    assert found["chi-square"] < found["chi-square that a right server exceeds once in 10,000"]


@pytest.mark.parametrize("fault", ["greedy", "skewed"])
def test_another_distribution_fails(ctx: Context, fault: str) -> None:
    with pytest.raises(GateFailure, match="do not have the target's distribution") as caught:
        service.ddtree_distribution(ctx, start=FakeServer(fault), models=MODELS)
    assert caught.value.kind == FailureKind.TOKEN_MISMATCH


SMALL = (
    BuildCase(1, 3, True, 1e9, columns=200, budget=8, top_k=4),
    BuildCase(2, 3, True, 1e9, columns=200, budget=8, top_k=4),
    BuildCase(2, 3, False, 1e9, columns=200, budget=8, top_k=4),
)


def test_the_operations_are_timed_and_checked(ctx: Context) -> None:
    """A rehearsal on a CPU."""
    with pytest.raises(GateFailure, match="acceptance and compaction") as caught:
        speed.ops_speed(ctx, device=torch.device("cpu"), cases=SMALL, layers=2, repeats=3)
    assert caught.value.kind == FailureKind.TOO_SLOW, "it takes more than 40 us on a CPU"
    figures = caught.value.figures
    assert [figure.name for figure in figures] == [
        "acceptance and compaction of 2 layers",
        "build from logits of 200, B=1 D=3",
        "build from logits of 200, B=1 D=3: the oracle on this CPU",
        "build from logits of 200, B=2 D=3",
        "build from logits of 200, B=2 D=3: times batch 1",
        "build from top 4, B=2 D=3",
        "slots of a request of 65536 tokens",
        "slots of a request of 200000 tokens",
    ]


def test_sixteen_trees_may_take_as_long_as_the_issue_says() -> None:
    """80 us from logits and 25 from top-K at batch 1, two and a half times that at batch 16."""
    assert [case.most_us for case in speed.CASES] == [80, 200, 80, 200, 25, 62.5, 25, 62.5]


def test_a_slow_build_fails(ctx: Context) -> None:
    case = dataclasses.replace(SMALL[0], most_us=0.001)
    with pytest.raises(GateFailure, match=r"build from logits of 200, B=1 D=3: .* at most 0\.0"):
        speed.ops_speed(ctx, device=torch.device("cpu"), cases=[case], layers=2, repeats=3)


def test_chi_square_counts_rare_outcomes_together() -> None:
    drawn = {(1,): 60, (2,): 30, (3,): 4, (4,): 6}
    value, freedom = chi_square(drawn, {(1,): 0.5, (2,): 0.3, (3,): 0.04}, rare=10)
    assert freedom == 2, "1, 2 and all others"
    assert value == pytest.approx(100 / 50 + 0 + 100 / 20)


def test_chi_square_joins_a_rest_that_is_too_small() -> None:
    value, freedom = chi_square({(1,): 50, (2,): 47, (3,): 3}, {(1,): 0.5, (2,): 0.49}, rare=10)
    assert (value, freedom) == (pytest.approx(0), 1)


@pytest.mark.parametrize(
    ("freedom", "surprise", "expected"),
    [(1, 0.05, 3.8415), (10, 0.01, 23.209), (30, 0.001, 59.703)],
)
def test_the_limit_of_chi_square(freedom: int, surprise: float, expected: float) -> None:
    """Against a printed table."""
    assert chi_square_limit(freedom, surprise) == pytest.approx(expected, rel=1e-4)


def test_what_is_a_near_tie_at_one_length_is_one_at_all() -> None:
    assert gpu_host.near_ties({64: 0.01, 3000: 0.3}, torch.bfloat16) == {64: 0.6, 3000: 0.6}
    least = 4 * torch.finfo(torch.bfloat16).eps  # a step between logits, where nothing moved
    assert gpu_host.near_ties({64: 0.0}, torch.bfloat16) == {64: least}
    with pytest.raises(GateFailure, match=r"differs from itself by 0\.510"):
        gpu_host.near_ties({64: 0.51, 3000: 0.0}, torch.bfloat16)


GRAPHS = "Decode graph replay: worker=target key_size=2 (bs) mode=TARGET_VERIFY raw_bs=1\n"
DRAFTS = GRAPHS.replace("target", "draft")
STEP = "Decode batch, cuda graph: True, gen\n"


@pytest.mark.parametrize(
    ("log", "says"),
    [
        (GRAPHS * 3 + DRAFTS * 3 + STEP, None),
        (GRAPHS * 2 + DRAFTS * 3 + STEP, "3 trees were verified, and 2 of them in graphs"),
        (GRAPHS * 3 + DRAFTS * 2 + STEP, "3 trees were drafted, and 2 of them in graphs"),
        (GRAPHS * 3 + DRAFTS * 3, "expected lines 'Decode batch'"),
        (GRAPHS * 3 + DRAFTS * 3 + STEP.replace("True", "False"), "ran without a graph"),
    ],
)
def test_every_pass_must_come_from_a_graph(log: str, says: str | None) -> None:
    if says is None:
        assert len(gpu_host._all_in_graphs(gpu_host.TREES, log, 3)) == 2
        return
    with pytest.raises(GateFailure, match=says):
        gpu_host._all_in_graphs(gpu_host.TREES, log, 3)


def test_top_p_keeps_the_likeliest_that_have_little_before_them() -> None:
    kept = service._kept([0.05, 0.5, 0.42, 0.03])
    assert kept == pytest.approx({1: 0.5 / 0.92, 2: 0.42 / 0.92})


@pytest.mark.parametrize(
    ("found", "right"),
    [([8, 13], True), ([9, 12], True), ([10, 13], False), ([9, 14, 12], False)],
)
def test_verifications_are_those_of_the_drafters_weights(found: list[int], right: bool) -> None:
    expected = [8, 13, 11][: len(found)]
    if right:
        service._as_drafted("trees", found, expected)
        return
    with pytest.raises(GateFailure, match=r"trees: answers took .* by the drafter's weights"):
        service._as_drafted("trees", found, expected)
