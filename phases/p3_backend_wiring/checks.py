"""Phase 3: the plugin in the real SGLang server, eager, on a machine without a GPU.

What a GPU host does of it is in `gpu_host`.

The server is the released one. What it lacks to verify trees on a CPU comes from the plugin in
`tests/support/sglang_cpu`, which also counts trees and can spoil the mask. Everything is in
float32: in 16 bits, near-ties make batched and single runs of stock SGLang differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import subprocess
from collections.abc import Mapping, Sequence

import torch

from kdtree_engine.errors import MissingError
from phases.gate import Context, FailureKind, Figure, GateFailure, Unit
from phases.p3_backend_wiring import gpu_host
from phases.service import (
    Service,
    ServiceFailed,
    Tokens,
    failures_in,
    server_python,
    server_sglang,
    serving,
)
from phases.service_scale import GPU, Start
from phases.small_model import write_service_model, write_small_model

__all__ = [
    "REFUSALS",
    "Refusal",
    "need_cpu_server",
    "plugin_installs_clean",
    "plugin_self_check",
    "service_token_exact",
]

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_CPU_SUPPORT = _ROOT / "tests" / "support" / "sglang_cpu"
_REFUSED = _ROOT / "tests" / "support" / "sglang_refused"
_PROMPT_LENGTHS = (3, 5, 9, 17, 24, 40)
_NEW_TOKENS = 48
_VOCABULARY = 64
_KERNEL = ("--attention-backend", "kdtree_mla")
_STOCK = (*("--attention-backend", "triton"), *("--triton-attention-num-kv-splits", "1"))
"""One split, as each costs the interpreter a pass over its program."""
_NODES = 9
_TREE = (
    *("--speculative-algorithm", "NGRAM"),
    *("--speculative-num-draft-tokens", str(_NODES)),
    *("--speculative-ngram-max-bfs-breadth", "4"),
)
_DRAFT_TREE = (
    *("--speculative-algorithm", "STANDALONE", "--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "3", "--speculative-num-draft-tokens", str(_NODES)),
    *("--max-running-requests", "16", "--triton-attention-num-kv-splits", "1"),
)
_SPOILED_TOKENS = 12
"""A mask of ones shows within 8."""
_DRAFT_PROMPTS = slice(1, None, 2)
_DRAFT_TOKENS = 16
_DRAFT_WIDTH = 1.7
_IMPORT_LIMIT_S = 1.0


@dataclasses.dataclass(frozen=True)
class _Seen:
    """What one server answered, first to a batch and then to requests sent at once.

    counts: what `observe` saw of the first batch: the n-gram drafter learns from what it served.
    spoiled: its answers with a mask in which every node sees every other; verified_wrong: how many
        trees were verified with it.
    """

    tokens: list[Tokens]
    counts: Mapping[str, int]
    spoiled: list[Tokens]
    verified_wrong: int


def service_token_exact(
    ctx: Context, *, start: Start = serving, new_tokens: int = _NEW_TOKENS
) -> list[Figure]:
    """On a GPU host its own part, `gpu_host.tokens_of_service`; elsewhere, on the CPU:

    The server's greedy tokens with trees on the kernel are those of stock plain decoding.

    Four servers, one after the other: stock Triton without speculation; plain decode on the kernel;
    trees of n-grams on the kernel; trees of a draft model on the kernel. Each answers a ragged
    batch, and all but the first also the same prompts as requests sent at once. Those with trees
    then answer once more with a mask in which every node sees every other, which must differ.
    """
    if torch.cuda.is_available():
        return gpu_host.tokens_of_service(ctx, start=start)
    model = write_small_model(ctx.scratch / "model", seed=ctx.seed, vocabulary=_VOCABULARY)
    # The same weights but for the queries: its likeliest tokens are often the model's.
    draft = write_small_model(
        ctx.scratch / "draft", seed=ctx.seed, vocabulary=_VOCABULARY, width=_DRAFT_WIDTH
    )
    draw = random.Random(ctx.seed)
    prompts = [
        tuple(draw.randrange(2, _VOCABULARY) for _ in range(length)) for length in _PROMPT_LENGTHS
    ]

    def answers(
        number: int,
        name: str,
        arguments: Sequence[str],
        asked: Sequence[Tokens] = prompts,
        count: int = new_tokens,
        **environment: str,
    ) -> _Seen:
        ctx.progress(number, 4, name)
        log, seen = ctx.scratch / f"{name}.log", ctx.scratch / f"{name}.json"
        spoils = ctx.scratch / f"{name}.wrong-mask"
        environment |= {"KD_TEST_OBSERVED": str(seen), "KD_TEST_WRONG_MASK": str(spoils)}
        spoiled: list[Tokens] = []
        with _cpu_server(model, arguments, log, environment, start) as service:
            found = service.generate(asked, count)
            counts = _observed(seen)
            if name != "stock":
                found += service.generate_at_once(asked, count)
            for answer in found:
                if len(answer) != count:
                    raise GateFailure(
                        FailureKind.TOKEN_MISMATCH,
                        f"{name}: expected answers of {count} tokens, got one of {len(answer)}",
                    )
            if "--speculative-algorithm" in arguments:
                spoils.touch()
                spoiled = service.generate(asked, min(count, _SPOILED_TOKENS))
        failures = failures_in(log.read_text(errors="replace"))
        if failures:
            raise GateFailure(FailureKind.LAUNCH, f"{name}: its log says: {failures[0]}")
        return _Seen(found, counts, spoiled, _observed(seen).get("spoiled", 0))

    stock = answers(0, "stock", _STOCK, SGLANG_DISABLE_LEAN_ATTENTION="1").tokens
    decoded = answers(1, "decode", _KERNEL)
    _same_tokens("plain decode on the kernel", decoded.tokens, stock * 2)
    _at_least_one(decoded.counts, "decode", "no token was decoded on the kernel")
    trees = answers(2, "trees", (*_KERNEL, *_TREE))
    different = _check_trees("trees on the kernel", trees, stock)
    # A draft model is slow in the interpreter, which its own attention runs in.
    count = min(new_tokens, _DRAFT_TOKENS)
    drafted = answers(
        3,
        "draft-trees",
        (*_KERNEL, *_DRAFT_TREE, "--speculative-draft-model-path", str(draft)),
        asked=prompts[_DRAFT_PROMPTS],
        count=count,
    )
    expected = [answer[:count] for answer in stock[_DRAFT_PROMPTS]]
    drafted_different = _check_trees("trees of a draft model", drafted, expected)
    equal = sum(map(len, (*decoded.tokens, *trees.tokens, *drafted.tokens)))
    return [
        Figure("tokens equal", equal, Unit.TOKENS),
        *_tree_figures("", trees, different),
        *_tree_figures("draft model: ", drafted, drafted_different),
    ]


def _check_trees(what: str, seen: _Seen, expected: list[Tokens]) -> int:
    """Right where the mask is, and wrong where it is not; returns how many answers were wrong.

    expected: of stock plain decoding, an answer a prompt.
    """
    # What it must be in a batch, it must be in requests sent at once.
    _same_tokens(what, seen.tokens, expected * 2)
    for name, otherwise in (
        ("branching", "no tree branched, so its mask was not tried"),
        ("short_masks", "no mask had T x T bytes"),
        ("accepted", "no node was accepted"),
        ("moved", "no accepted row was moved, so no side branch was accepted"),
    ):
        _at_least_one(seen.counts, name, f"{what}: {otherwise}")
    if not seen.verified_wrong:
        raise GateFailure(
            FailureKind.TOKEN_MISMATCH, f"{what}: nothing was verified with the wrong mask"
        )
    pairs = zip(seen.spoiled, expected, strict=True)
    different = sum(got != wanted[: len(got)] for got, wanted in pairs)
    if not different:
        raise GateFailure(
            FailureKind.TOKEN_MISMATCH,
            f"{what}: a mask of ones changes no token: the check sees nothing",
        )
    return different


def _tree_figures(prefix: str, seen: _Seen, different: int) -> list[Figure]:
    return [
        Figure(f"{prefix}branching trees", seen.counts["branching"], Unit.COUNT),
        Figure(f"{prefix}masks of T x T bytes", seen.counts["short_masks"], Unit.COUNT),
        Figure(f"{prefix}accepted nodes", seen.counts["accepted"], Unit.COUNT),
        Figure(f"{prefix}moved rows", seen.counts["moved"], Unit.COUNT),
        Figure(f"{prefix}answers that a wrong mask changes", different, Unit.COUNT),
    ]


def _observed(path: pathlib.Path) -> dict[str, int]:
    found: dict[str, int] = json.loads(path.read_text()) if path.is_file() else {}
    return found


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A server that must stop, and what its one line must say.

    latent: kv_lora_rank of its model.
    """

    name: str
    says: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    latent: int = 512


_TAKEN_OUT = "sglang.srt.models.deepseek_common.attention_backend_handler:handle_attention_triton"
"""Of both releases; nothing of SGLang's looks for it by that name again."""
REFUSALS = (
    Refusal(
        "unknown-release",
        "kdtree_mla: SGLang 0.5.99 is installed, expected 0.5.17 or 0.5.23",
        environment={"KD_TEST_SGLANG_VERSION": "0.5.99"},
    ),
    Refusal(
        "missing-hook",
        f" lacks {_TAKEN_OUT}",
        environment={"KD_TEST_REMOVED": _TAKEN_OUT},
    ),
    Refusal(
        "wrong-value",
        "KDTREE_DECODE: expected 0 or 1, got 'maybe'",
        environment={"KDTREE_DECODE": "maybe"},
    ),
    Refusal(
        "other-pages",
        "KDTREE_DEFRAG=tier0: the KV pool has a PagedTokenToKVPoolAllocator with pages of 16",
        arguments=("--page-size", "16"),
        environment={"KDTREE_DEFRAG": "tier0"},
    ),
    Refusal(
        "other-model",
        "kv_lora_rank 256 and qk_rope_head_dim 64, expected 512 and 64",
        latent=256,
    ),
)


def plugin_self_check(
    ctx: Context, *, start: Start = serving, refusals: Sequence[Refusal] = REFUSALS
) -> list[Figure]:
    """One server that serves and says so in one line; and servers that must stop with one line.

    They run on the GPU where there is one.
    """
    total = len(refusals) + 1
    for number, case in enumerate(refusals):
        ctx.progress(number, total, case.name)
        log = ctx.scratch / f"{case.name}.log"
        model = write_small_model(
            ctx.scratch / f"model-{case.latent}", seed=ctx.seed, latent=case.latent
        )
        try:
            with _small_server(model, (*_KERNEL, *case.arguments), log, case.environment, start):
                problem = "it serves"
        except ServiceFailed:
            said = [line for line in _plain_lines(log) if "the server stops" in line]
            if len(said) == 1 and case.says in said[0]:
                continue
            problem = f"it stopped and said {said or 'nothing of it'}"
        raise GateFailure(
            FailureKind.LAUNCH, f"{case.name}: expected a line with '{case.says}'; {problem}"
        )
    ctx.progress(total - 1, total, "serves")
    log = ctx.scratch / "serves.log"
    on_gpu = torch.cuda.is_available()
    model = ctx.scratch / "model-that-serves"
    if on_gpu:
        write_service_model(model, seed=ctx.seed, vocabulary=_VOCABULARY, layers=1)
    else:
        write_small_model(model, seed=ctx.seed)
    with _small_server(model, _KERNEL, log, {"KDTREE_VERFY": "0"}, start) as service:
        service.generate([(2, 3, 4)], 2)
    lines = _plain_lines(log)
    where = torch.cuda.get_device_name() if on_gpu else "cpu; library: CPU implementation"
    for wanted in (
        f"kdtree_mla: SGLang {server_sglang()}; {where}",
        "KDTREE_VERFY is set and nothing reads it (did you mean KDTREE_VERIFY?)",
    ):
        found = sum(wanted in line for line in lines)
        if found != 1:
            raise GateFailure(
                FailureKind.LAUNCH, f"expected one line of the log with '{wanted}', got {found}"
            )
    failures = failures_in("\n".join(lines))
    if failures:
        raise GateFailure(FailureKind.LAUNCH, f"the log of a right server says: {failures[0]}")
    return [Figure("cases", total, Unit.COUNT)]


def plugin_installs_clean(ctx: Context) -> list[Figure]:
    """The wheel, installed where SGLang is seen, changes no other package; it loads in under 1 s.

    SGLang's own environment is left as it is: the wheel goes into a virtual environment that sees
    all of it, so that pip resolves and would upgrade just as there.
    """
    python = server_python()
    ctx.progress(0, 3, "wheel")
    source, wheels = ctx.scratch / "kdtree-engine", ctx.scratch / "wheels"
    _copy_sources(_ROOT / "kdtree-engine", source)
    build = ("wheel", "--no-deps", "--no-build-isolation", "--quiet", "-w", str(wheels))
    _run([python, "-m", "pip", *build, str(source)])
    (wheel,) = wheels.glob("*.whl")
    ctx.progress(1, 3, "install")
    above = _run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
    _run([python, "-m", "venv", "--without-pip", str(ctx.scratch / "venv")])
    inside = str(ctx.scratch / "venv" / "bin" / "python")
    (own,) = (ctx.scratch / "venv").glob("lib/python*/site-packages")
    (own / "above.pth").write_text(f"{above}\n")
    before = _packages(inside)
    _run([inside, "-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", str(wheel)])
    _run([inside, "-m", "pip", "install", "--quiet", str(wheel)])  # with its dependencies
    after = _packages(inside)
    if before != after:
        changed = sorted(set(before) ^ set(after))
        raise GateFailure(FailureKind.LAUNCH, f"installing the wheel changes {', '.join(changed)}")
    if not any("sglang==" in package for package in after):
        raise GateFailure(FailureKind.LAUNCH, "the environment does not see SGLang")
    ctx.progress(2, 3, "import")
    seconds = float(_run([inside, "-W", "ignore", "-c", _TIMED_IMPORT]).split()[-1])
    if seconds >= _IMPORT_LIMIT_S:
        raise GateFailure(
            FailureKind.TOO_SLOW,
            f"loading the plugin takes {seconds:.2f} s beyond SGLang, expected under "
            f"{_IMPORT_LIMIT_S:g} s",
        )
    return [Figure("other packages, unchanged", len(after), Unit.COUNT)]


_TIMED_IMPORT = """
import importlib.metadata, time
import sglang.launch_server, sglang.srt.managers.scheduler
begun = time.perf_counter()
(point,) = {
    point for point in importlib.metadata.entry_points(group="sglang.srt.plugins")
    if point.name == "kdtree_mla"
}
point.load()()
print(time.perf_counter() - begun)
"""


def _cpu_server(
    model: pathlib.Path,
    arguments: Sequence[str],
    log: pathlib.Path,
    environment: Mapping[str, str],
    start: Start,
) -> contextlib.AbstractContextManager[Service]:
    support = (str(_CPU_SUPPORT), str(_REFUSED))
    paths = [*support, str(_ROOT / "kdtree-engine"), os.environ.get("PYTHONPATH", "")]
    return start(
        (
            *("--model-path", str(model), "--device", "cpu", "--dtype", "float32"),
            *("--max-total-tokens", "8192", "--mem-fraction-static", "0.3"),
            *("--skip-tokenizer-init", "--disable-overlap-schedule", "--disable-cuda-graph"),
            *arguments,
        ),
        log=log,
        environment={
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "CUDA_VISIBLE_DEVICES": "",
            "TRITON_INTERPRET": "1",
            "TORCHDYNAMO_DISABLE": "1",
            **environment,
        },
        limit_s=300.0,
    )


def _small_server(
    model: pathlib.Path,
    arguments: Sequence[str],
    log: pathlib.Path,
    environment: Mapping[str, str],
    start: Start,
) -> contextlib.AbstractContextManager[Service]:
    """On the GPU where there is one, else as `_cpu_server`; it may be one that must stop."""
    if not torch.cuda.is_available():
        return _cpu_server(model, arguments, log, environment, start)
    paths = [str(_REFUSED), str(_ROOT / "kdtree-engine"), os.environ.get("PYTHONPATH", "")]
    return start(
        (
            *("--model-path", str(model), "--skip-tokenizer-init", "--disable-cuda-graph"),
            *GPU.arguments,
            *arguments,
        ),
        log=log,
        environment={"PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment},
        limit_s=GPU.limit_s,
    )


def need_cpu_server() -> None:
    """Raises MissingError where SGLang would not take its CPU path."""
    if torch.cuda.is_available():
        raise MissingError(
            "this gate has no part for a GPU host yet, and SGLang's CPU path needs a machine "
            "without a GPU",
            remedy="run it with CUDA_VISIBLE_DEVICES= to hide the GPUs",
        )


def _same_tokens(what: str, found: Sequence[Tokens], expected: Sequence[Tokens]) -> None:
    for number, (got, wanted) in enumerate(zip(found, expected, strict=True)):
        step = _first_difference(got, wanted)
        if step is not None:
            raise GateFailure(
                FailureKind.TOKEN_MISMATCH,
                f"{what}: answer {number} differs from stock plain decoding at token {step}: "
                f"{got[step : step + 1]}, expected {wanted[step : step + 1]}",
            )


def _first_difference(got: Tokens, wanted: Tokens) -> int | None:
    if got == wanted:
        return None
    pairs = enumerate(zip(got, wanted, strict=False))
    return next((step for step, (a, b) in pairs if a != b), min(len(got), len(wanted)))


def _at_least_one(counts: Mapping[str, int], name: str, otherwise: str) -> None:
    if not counts.get(name):
        raise GateFailure(FailureKind.TOKEN_MISMATCH, otherwise)


def _plain_lines(log: pathlib.Path) -> list[str]:
    return log.read_text(errors="replace").splitlines() if log.is_file() else []


def _copy_sources(source: pathlib.Path, target: pathlib.Path) -> None:
    """What the wheel is built from, without caches and what an editable install left."""
    for path in source.rglob("*"):
        part = path.relative_to(source)
        skipped = any(
            name in ("build", "__pycache__") or name.startswith(".") or name.endswith(".egg-info")
            for name in part.parts
        )
        if path.is_file() and not skipped:
            (target / part).parent.mkdir(parents=True, exist_ok=True)
            (target / part).write_bytes(path.read_bytes())


def _packages(python: str) -> list[str]:
    """`pip freeze`, without this project's own package."""
    lines = _run([python, "-m", "pip", "freeze", "--all"]).splitlines()
    return [line for line in lines if "kdtree" not in line.lower()]


def _run(line: Sequence[str]) -> str:
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(line)[:200]} failed: {done.stderr[-2000:]}")
    return done.stdout
