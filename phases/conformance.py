"""SGLang's own attention kit, on the kernel's backend and on stock Triton in the same run.

The kit (`sglang/test/kits/attention_unittest`, in both supported releases) has a mock model runner,
an oracle in torch over dense masks, and a runner for graph mode. `tests/support/sglang_kit` runs
cases of it in the Python that has SGLang; here it is said which cases, and what their results
mean. Each backend has a process of its own, so that neither can harm the other's.

The kit's graph runner has a fault, which fails correct backends too. Its fixture scatters a prefix
over the slots of a shuffled layout; then the same rows are written again, to the slots of a
contiguous layout, and the first comparison still reads the shuffled slots. Where the two layouts
meet in a slot, some tokens are read twice and others not at all. Nothing of a graph has run by
then. The longer the prefix, the more meet: about L^2 / context. So each case of graph mode also
runs in a form of ours, in which both writers use the shuffled layout and the forward pass is
captured in a real CUDA graph (the kit's runner captures none) and replayed with NaN in its output.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import enum
import itertools
import json
import os
import pathlib
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from kdtree_engine.library import library_path
from phases.candidates import require_current_library
from phases.gate import FailureKind, Figure, GateFailure, Unit
from phases.service import server_python

__all__ = [
    "BACKENDS",
    "Form",
    "KitCase",
    "Outcome",
    "Result",
    "decode_cases",
    "judge",
    "kit_environment",
    "kit_process",
    "run_backend",
    "run_both",
    "spoiled_cases",
    "tree_cases",
]

KERNEL, STOCK = BACKENDS = ("kdtree_mla", "triton")
PREFIXES = ((0, 1), (7, 16, 40), (61, 64), (129,), (1000, 3))
"""Prefix lengths of the requests of a batch."""

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_CONTEXT = 2048
_KIT_NODES = 3
_OWN_NODES = (9, 33, 64)
_SEEN_WITHIN = 40
"""Prefixes up to which a wrong mask moves the output by more than the kit's tolerance."""


class Form(enum.StrEnum):
    """How the kit runs a case."""

    EAGER = "eager"
    DECODE = "decode"
    """Eager, one token a request."""
    SHIPPED = "graph mode as shipped"
    """The kit's own runner of graph mode, its fault included."""
    CAPTURED = "captured graph"
    """The same runner without the fault, around a real CUDA graph; on a CPU, without a graph."""


class Outcome(enum.StrEnum):
    """What became of a case."""

    PASSED = "passed"
    DIFFERS = "differs"
    """The output is not the oracle's."""
    ERROR = "error"
    """Anything else that was raised."""
    SKIPPED = "skipped"


@dataclasses.dataclass(frozen=True)
class KitCase:
    """One case, as it is sent to the kit's process.

    kind: SGLang's name of what drafts. drawn: the tree is drawn from a seed, `nodes` wide; else it
    is the kit's own, a chain (topk 1) or a root with two leaves. context: slots that a request may
    fill. spoiled: the kernel's mask is replaced by ones.
    """

    name: str
    form: Form
    prefixes: tuple[int, ...]
    page: int
    kind: str = "eagle"
    topk: int = 1
    nodes: int = _KIT_NODES
    drawn: bool = False
    heads: int = 4
    context: int = _CONTEXT
    spoiled: bool = False


@dataclasses.dataclass(frozen=True)
class Result:
    """One case on one backend.

    says: the first line of what was raised, and where in the kit. calls: calls of the kernel.
    replays: replays of a captured graph. misread: prefix tokens that the kit's fault hides in this
    case, so that no backend can find them.
    """

    outcome: Outcome
    says: str = ""
    calls: int = 0
    replays: int = 0
    misread: int = 0


def tree_cases(
    form: Form,
    *,
    prefixes: Iterable[tuple[int, ...]] = PREFIXES,
    pages: Iterable[int] = (1, 16),
    kinds: Iterable[str] = ("eagle", "ngram"),
    own_nodes: Iterable[int] = _OWN_NODES,
) -> list[KitCase]:
    """The kit's chains and trees, then this project's, over every choice of the rest."""
    places = list(itertools.product(tuple(kinds), tuple(pages), tuple(prefixes)))
    shapes = [(f"topk {topk}", topk, _KIT_NODES, False, 4) for topk in (1, 3)]
    # Eight heads are what a rank of eight has of a model with 64.
    shapes += [(f"drawn tree of {nodes}", 1, nodes, True, 8) for nodes in own_nodes]
    return [
        KitCase(
            name=f"{form}, {kind}, {shape}, page {page}, prefixes {'+'.join(map(str, lengths))}",
            form=form,
            prefixes=lengths,
            page=page,
            kind=kind,
            topk=topk,
            nodes=nodes,
            drawn=drawn,
            heads=heads,
        )
        for (shape, topk, nodes, drawn, heads), (kind, page, lengths) in itertools.product(
            shapes, places
        )
    ]


def decode_cases(*, pages: Iterable[int] = (1, 16)) -> list[KitCase]:
    """Plain decode, which the kernel serves where KDTREE_DECODE says so."""
    return [
        KitCase(
            name=f"decode, page {page}, prefixes {'+'.join(map(str, lengths))}",
            form=Form.DECODE,
            prefixes=lengths,
            page=page,
            nodes=1,
        )
        for page, lengths in itertools.product(tuple(pages), ((6,), (14, 15, 16)))
    ]


def spoiled_cases(cases: Iterable[KitCase]) -> list[KitCase]:
    """The same with a mask of ones, which must differ. Only prefixes that are short enough for it.

    One row among a thousand hides in the tolerance of 16 bits.
    """
    return [
        dataclasses.replace(case, name=f"{case.name}, mask of ones", spoiled=True)
        for case in cases
        if case.form in (Form.EAGER, Form.CAPTURED) and max(case.prefixes) <= _SEEN_WITHIN
    ]


Run = Callable[[str, Sequence[KitCase], Callable[[str], None]], Mapping[str, Result]]
"""`run(backend, cases, seen)` gives each case's result and calls `seen(name)` after each."""


def run_both(
    cases: Sequence[KitCase], progress: Callable[[int, int, str], None], run: Run
) -> list[Figure]:
    """Run `cases` on both backends at once and judge them; spoiled ones on the kernel alone."""
    asked = {
        KERNEL: list(cases),
        STOCK: [case for case in cases if not case.spoiled],
    }
    total, lock = sum(map(len, asked.values())), threading.Lock()
    done = itertools.count(1)

    def seen(name: str) -> None:
        with lock:  # the pipe behind `progress` is one
            progress(next(done), total, name)

    progress(0, total, "importing SGLang")
    with concurrent.futures.ThreadPoolExecutor(max_workers=len(asked)) as pool:
        runs = {name: pool.submit(run, name, wanted, seen) for name, wanted in asked.items()}
        found = {name: future.result() for name, future in runs.items()}
    return judge(cases, found[KERNEL], found[STOCK])


def judge(
    cases: Sequence[KitCase], kernel: Mapping[str, Result], stock: Mapping[str, Result]
) -> list[Figure]:
    """The figures of a run that passes, headline first; GateFailure for any other.

    The kernel may fail a case only where stock Triton gives another output than the oracle too and
    the kit's fault is at work. Each of these is a figure of its own.
    """
    plain = [case for case in cases if not case.spoiled]
    spoiled = [case for case in cases if case.spoiled]
    for backend, results, asked in ((KERNEL, kernel, cases), (STOCK, stock, plain)):
        absent = [case.name for case in asked if case.name not in results]
        if absent or not asked:
            raise GateFailure(
                FailureKind.LAUNCH,
                f"{backend}: {len(absent)} of {len(asked)} cases have no result: {absent[:3]}",
            )
        _none_skipped(backend, results)
    failed = [case for case in plain if kernel[case.name].outcome is not Outcome.PASSED]
    stock_failed = [case for case in plain if stock[case.name].outcome is not Outcome.PASSED]
    excused = [
        case
        for case in failed
        if kernel[case.name].outcome is stock[case.name].outcome is Outcome.DIFFERS
        and kernel[case.name].misread
    ]
    unseen = [case for case in spoiled if kernel[case.name].outcome is not Outcome.DIFFERS]
    figures = [
        Figure("cases", len(plain), Unit.COUNT),
        Figure(f"failures of {KERNEL}", len(failed), Unit.COUNT),
        Figure(f"failures of {STOCK}", len(stock_failed), Unit.COUNT),
        Figure("skips", 0, Unit.COUNT),
        Figure("cases with a mask of ones, which fail", len(spoiled) - len(unseen), Unit.COUNT),
        Figure("calls of the kernel", sum(kernel[case.name].calls for case in plain), Unit.COUNT),
    ]
    replays = [kernel[case.name].replays for case in plain if case.form is Form.CAPTURED]
    if replays:
        figures.append(Figure("replays of captured graphs", sum(replays), Unit.COUNT))
    for case in stock_failed:
        which = "both fail" if case in failed else f"{STOCK} fails"
        figures.append(
            Figure(
                f"{which}: {case.name}: tokens that the kit hides",
                stock[case.name].misread,
                Unit.COUNT,
            )
        )
    wrong = [case for case in failed if case not in excused]
    if wrong:
        first = wrong[0].name
        raise GateFailure(
            FailureKind.NUMERICAL,
            f"{len(wrong)} of {len(plain)} cases fail on {KERNEL} and the kit's fault does not "
            f"explain it; first: {first}: {kernel[first].says} "
            f"({STOCK}: {stock[first].outcome})",
            figures,
        )
    idle = [case.name for case in plain if not kernel[case.name].calls]
    if idle:
        raise GateFailure(
            FailureKind.LAUNCH,
            f"{len(idle)} cases never called the kernel, as its parent served them: {idle[0]}",
            figures,
        )
    borrowed = [case.name for case in plain if stock[case.name].calls]
    if borrowed:
        raise GateFailure(FailureKind.LAUNCH, f"{STOCK} called the kernel: {borrowed[0]}", figures)
    if unseen:
        result = kernel[unseen[0].name]
        raise GateFailure(
            FailureKind.NUMERICAL,
            f"{len(unseen)} of {len(spoiled)} cases do not see a mask of ones; first: "
            f"{unseen[0].name}: {result.outcome} {result.says}",
            figures,
        )
    return figures


def _none_skipped(backend: str, results: Mapping[str, Result]) -> None:
    skipped = [name for name, result in results.items() if result.outcome is Outcome.SKIPPED]
    if skipped:
        raise GateFailure(
            FailureKind.LAUNCH,
            f"{backend}: {len(skipped)} cases were skipped, expected none; first: {skipped[0]}: "
            f"{results[skipped[0]].says}",
        )


def run_backend(
    backend: str,
    cases: Sequence[KitCase],
    seen: Callable[[str], None],
    *,
    device: str = "cuda",
    command: Sequence[str] | None = None,
) -> dict[str, Result]:
    """Run `cases` on `backend` in a process of its own.

    device: "cuda", in bf16, or "cpu", in float32 and with SGLang's Triton kernels interpreted.
    command: what is started instead of the kit's process.

    Raises GateFailure where the process ends before its last case, in whatever way, and where the
    kernel library is not the one that csrc makes; MissingError where a GPU has none.
    """
    if device == "cuda":
        library_path()
        require_current_library(torch.device(device))
    request = {
        "backend": backend,
        "device": device,
        "cases": [dataclasses.asdict(case) for case in cases],
    }
    results: dict[str, Result] = {}
    begun = "SGLang's import"
    with tempfile.TemporaryFile("w+") as asked:  # a pipe would break where the process dies early
        json.dump(request, asked)
        asked.seek(0)
        process = subprocess.Popen(
            command or kit_process(),
            stdin=asked,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env=os.environ | kit_environment(device),
        )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            told = json.loads(line)
            if "begins" in told:
                begun = told["begins"]
                continue
            name = told.pop("case")
            results[name] = Result(**told | {"outcome": Outcome(told["outcome"])})
            seen(name)
        code = process.wait()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    if code:
        raise GateFailure(
            FailureKind.LAUNCH,
            f"{backend}: the kit's process ended with exit code {code} after {len(results)} of "
            f"{len(cases)} cases, in {begun}",
        )
    return results


def kit_process() -> list[str]:
    """The command of the process that runs the kit; it reads a request from its input."""
    return [server_python(), "-W", "ignore", "-m", "kd_sglang_kit"]


def kit_environment(device: str) -> dict[str, str]:
    """What that process needs of its environment beside this one's."""
    paths = (_ROOT / "tests/support/sglang_kit", _ROOT / "kdtree-engine")
    given = os.environ.get("PYTHONPATH", "")
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, (*map(str, paths), given))),
        "KDTREE_DECODE": "1",
        "KDTREE_QLEN_MASK": "0",  # the kit makes its masks itself, with their prefix columns
    }
    if device == "cpu":
        environment |= {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
    return environment
