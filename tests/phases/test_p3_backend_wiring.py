"""Phase 3's gates, tried on a server that is not there."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from phases.gate import Context, FailureKind, GateFailure
from phases.p3_backend_wiring import PHASE, checks
from phases.requirement import Requirement
from phases.service import ServiceFailed, Tokens


class FakeServer:
    """Answers as stock SGLang would; `faults` name what is wrong with it.

    A fault that begins with `ngram: ` or `draft: ` is one of the server with such trees.
    """

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
        tree = "ngram" if "NGRAM" in arguments else "draft" if "STANDALONE" in arguments else None
        kernel = "kdtree_mla" in arguments
        faults = [fault.removeprefix(f"{tree}: ") for fault in self.faults]
        counts = {"decode": 9} if kernel and tree is None else {}
        if tree is not None:
            counts = {"verify": 9, "branching": 5, "short_masks": 9, "moved": 2, "accepted": 7}
            counts |= {name: 0 for name in counts if f"no {name}" in faults}
        seen = pathlib.Path(environment["KD_TEST_OBSERVED"])
        if kernel:
            seen.write_text(json.dumps(counts))
        log.write_text("Failed to apply hooks\n" if tree and "hooks" in faults else "well\n")

        def one(prompt: Tokens, count: int, *, late: bool = False) -> Tokens:
            tokens = [sum(prompt) + step for step in range(count)]
            if pathlib.Path(environment["KD_TEST_WRONG_MASK"]).exists():
                # Counts go on; those of the right mask must have been read before.
                more = {"spoiled": 0 if "mask is not spoiled" in faults else 9, "branching": 99}
                seen.write_text(json.dumps(counts | more))
                tokens[-1] += "mask is ignored" not in faults
            elif tree is not None and (
                ("late token" in faults and len(prompt) > 9) or (late and "at once" in faults)
            ):
                tokens[-1] += 1
            return tuple(() if "empty answers" in self.faults else tokens)

        class Answers:
            def generate(self, prompts: Sequence[Tokens], count: int) -> list[Tokens]:
                return [one(prompt, count) for prompt in prompts]

            def generate_at_once(self, prompts: Sequence[Tokens], count: int) -> list[Tokens]:
                return [one(prompt, count, late=True) for prompt in prompts]

        yield Answers()


@pytest.fixture
def ctx(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return Context(seed=1, scratch=tmp_path)


def test_the_gates_that_the_plan_names() -> None:
    assert {gate.name: (set(gate.requires), gate.check is not None) for gate in PHASE.gates} == {
        "plugin-installs-clean": ({Requirement.SGLANG}, True),
        "plugin-self-check": ({Requirement.SGLANG}, True),
        "service-token-exact": ({Requirement.SGLANG}, True),
        "conformance-kit-eager": ({Requirement.GPU, Requirement.SGLANG}, True),
        "eager-speed": ({Requirement.GPU, Requirement.SERVICE}, True),
    }


def test_the_gates_change_with_the_plugin_and_with_the_test_support(root: pathlib.Path) -> None:
    for gate in PHASE.gates:
        if gate.check is not None:
            files = {path for pattern in gate.data for path in root.glob(pattern)}
            assert root / "kdtree-engine/kdtree_engine/sglang_ext/backend.py" in files
            support = (
                "sglang_kit/kd_sglang_kit/graph.py"
                if gate.name == "conformance-kit-eager"
                else "sglang_cpu/kd_sglang_cpu/standins.py"
            )
            assert root / "tests/support" / support in files


def test_equal_tokens_pass(ctx: Context) -> None:
    server = FakeServer()
    figures = checks.service_token_exact(ctx, start=server, new_tokens=4)
    assert [(figure.name, figure.value) for figure in figures] == [
        ("tokens equal", 2 * (2 * 6 + 3) * 4),
        ("branching trees", 5),
        ("masks of T x T bytes", 9),
        ("accepted nodes", 7),
        ("moved rows", 2),
        ("answers that a wrong mask changes", 6),
        ("draft model: branching trees", 5),
        ("draft model: masks of T x T bytes", 9),
        ("draft model: accepted nodes", 7),
        ("draft model: moved rows", 2),
        ("draft model: answers that a wrong mask changes", 3),
    ]
    names = [
        arguments[arguments.index("--attention-backend") + 1] for arguments, _ in server.started
    ]
    assert names == ["triton", "kdtree_mla", "kdtree_mla", "kdtree_mla"]
    algorithms = [
        arguments[arguments.index("--speculative-algorithm") + 1]
        for arguments, _ in server.started
        if "--speculative-algorithm" in arguments
    ]
    assert algorithms == ["NGRAM", "STANDALONE"]
    drafted, _ = server.started[3]
    model, draft = (
        pathlib.Path(drafted[drafted.index(name) + 1])
        for name in ("--model-path", "--speculative-draft-model-path")
    )
    weights = [(folder / "model.safetensors").read_bytes() for folder in (model, draft)]
    assert weights[0] != weights[1]  # the model itself would predict every token


def test_a_long_answer_is_compared_as_far_as_each_server_gives_it(ctx: Context) -> None:
    (tokens, *_) = checks.service_token_exact(ctx, start=FakeServer(), new_tokens=20)
    assert tokens.value == 2 * (2 * 6 * 20 + 3 * 16)


NGRAM, DRAFT = "trees on the kernel", "trees of a draft model"


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("late token", r"{}: answer \d differs .* 3:"),
        ("at once", r"{}: answer [36] differs .* 3:"),
        ("mask is ignored", "{}: a mask of ones changes no token"),
        ("mask is not spoiled", "{}: nothing was verified with the wrong mask"),
        ("no branching", "{}: no tree branched"),
        ("no short_masks", "{}: no mask had T x T bytes"),
        ("no accepted", "{}: no node was accepted"),
        ("no moved", "{}: no accepted row was moved"),
    ],
)
@pytest.mark.parametrize(("trees", "name"), [("ngram", NGRAM), ("draft", DRAFT)])
def test_a_fault_of_a_server_with_trees_fails(
    ctx: Context, trees: str, name: str, fault: str, says: str
) -> None:
    with pytest.raises(GateFailure, match=says.format(name)) as caught:
        checks.service_token_exact(ctx, start=FakeServer(f"{trees}: {fault}"), new_tokens=4)
    assert caught.value.kind is FailureKind.TOKEN_MISMATCH


@pytest.mark.parametrize(("trees", "name"), [("ngram", "trees"), ("draft", "draft-trees")])
def test_a_failed_hook_fails(ctx: Context, trees: str, name: str) -> None:
    with pytest.raises(GateFailure, match=f"^{name}: its log says: Failed to apply") as caught:
        checks.service_token_exact(ctx, start=FakeServer(f"{trees}: hooks"), new_tokens=4)
    assert caught.value.kind is FailureKind.LAUNCH


def test_empty_answers_are_not_equal_ones(ctx: Context) -> None:
    with pytest.raises(GateFailure, match="stock: expected answers of 4 tokens, got one of 0"):
        checks.service_token_exact(ctx, start=FakeServer("empty answers"), new_tokens=4)


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the server's Python, whatever this machine has."""
    monkeypatch.setattr(checks, "server_sglang", lambda: "0.5.23")


CASE = checks.Refusal("case", "kdtree_mla: this is why")
SERVES = (
    "kdtree_mla: SGLang 0.5.23; cpu; library: CPU implementation (for tests, slow); verify\n"
    "kdtree_mla: KDTREE_VERFY is set and nothing reads it (did you mean KDTREE_VERIFY?)\n"
)
OTHER_RELEASE = SERVES.replace("0.5.23", "0.5.17")


def logging_server(refused: str | None, served: str = SERVES) -> Any:
    """A server that stops with `refused` in its log, or serves; the right one prints `served`."""

    @contextlib.contextmanager
    def start(
        arguments: Sequence[str], *, log: pathlib.Path, environment: Mapping[str, str], **_: Any
    ) -> Iterator[Any]:
        right = "KDTREE_VERFY" in environment
        log.write_text(served if right else refused or "")
        if not right and refused is not None:
            raise ServiceFailed("ended")

        class Answers:
            def generate(self, prompts: Sequence[Tokens], count: int) -> list[Tokens]:
                return [(1,) * count for _ in prompts]

        yield Answers()

    return start


@pytest.mark.usefixtures("release")
def test_a_plugin_that_refuses_in_one_line_and_serves_passes(ctx: Context) -> None:
    start = logging_server("[x] kdtree_mla: this is why (do that); the server stops\n")
    (figure,) = checks.plugin_self_check(ctx, start=start, refusals=[CASE])
    assert figure.value == 2


@pytest.mark.usefixtures("release")
@pytest.mark.parametrize(
    ("start", "says"),
    [
        (logging_server(None), "case: expected a line with .* it serves"),
        (logging_server("Traceback\n"), "it stopped and said nothing of it"),
        (logging_server("kdtree_mla: other; the server stops\n"), "said .*kdtree_mla: other"),
        (logging_server("kdtree_mla: this is why; the server stops\n", ""), "got 0"),
        (logging_server("kdtree_mla: this is why; the server stops\n", SERVES * 2), "got 2"),
        (
            logging_server(
                "kdtree_mla: this is why; the server stops\n", SERVES.replace("23", "17")
            ),
            "one line of the log with 'kdtree_mla: SGLang 0.5.23; cpu",
        ),
        (
            logging_server("kdtree_mla: this is why; the server stops\n", SERVES + "Failed to x\n"),
            "the log of a right server says: Failed to x",
        ),
    ],
)
def test_a_plugin_that_says_too_little_or_too_much_fails(
    ctx: Context, start: Any, says: str
) -> None:
    with pytest.raises(GateFailure, match=says):
        checks.plugin_self_check(ctx, start=start, refusals=[CASE])
