"""What every tree-verify attention must pass: the oracle, the kernels, and (in vain) the cheats.

Each check takes a candidate: a callable with the signature of
`kdtree_engine.reference.attention.tree_verify_attention`. It returns figures, or raises
GateFailure that names the case and the first place that is wrong.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NoReturn

import torch

from kdtree_engine.errors import KdError
from kdtree_engine.reference.attention import tree_verify_attention
from kdtree_engine.reference.masks import MaskLayout
from kdtree_engine.reference.tiny_mla import Attention
from phases.attention_cases import (
    AttentionCase,
    AttentionInputs,
    Content,
    Shape,
    make_inputs,
    standard_cases,
)
from phases.gate import Context, FailureKind, Figure, GateFailure, Unit
from phases.threads import single_threaded

__all__ = [
    "attention_equals_paths",
    "attention_is_deterministic",
    "attention_matches_oracle",
    "path_cases",
]

_CPU = torch.device("cpu")


@single_threaded
def attention_matches_oracle(
    candidate: Attention,
    ctx: Context,
    *,
    dtype: torch.dtype,
    device: torch.device = _CPU,
    tolerance_factor: float = 2.0,
    heads: Sequence[int] = (8,),
    contiguous_view: bool = False,
    cases: Sequence[AttentionCase] | None = None,
) -> list[Figure]:
    """The candidate against the float64 oracle, case by case (`standard_cases` by default).

    Each case makes three calls: one into an `out` full of NaN; one with other content in the same
    tensors, into an `out` full of the first call's right answer; one without `out`. So a row left
    unwritten, a cached answer and a slot that should not be read all show.

    The bar: for each request, the relative error (norm of the difference over norm of the oracle's
    output) is at most `tolerance_factor` times what an exact computation whose output is rounded
    to `dtype` has; for each single row (node and head) twice that. Inputs are rounded for both.

    contiguous_view: `kv_indices` is None; entry i of the prefixes lies in slot i.
    """
    cases = standard_cases(heads) if cases is None else cases
    worst, worst_ratio = 0.0, 0.0
    for done, case in enumerate(cases):
        ctx.progress(done, len(cases), case.name)
        generator = torch.Generator().manual_seed(ctx.seed * 1000 + done)

        def draw(
            case: AttentionCase = case, generator: torch.Generator = generator
        ) -> AttentionInputs:
            return make_inputs(
                case,
                dtype=dtype,
                device=device,
                generator=generator,
                contiguous_view=contiguous_view,
            )

        inputs = draw()
        expected, lse = _expected(case, inputs)
        out = torch.full(expected.shape, torch.nan, dtype=dtype, device=device)
        answer = _call(candidate, case, inputs, out=out, return_lse=True)
        bar = _Bar(case, inputs, dtype, tolerance_factor)
        errors = [bar.judge(answer, expected, lse, out=out)]

        stale = expected.to(dtype)
        # The pool is the only large tensor, and a huge one is drawn into once.
        if case.pool_slots is None:
            inputs.overwrite(draw())
            expected, lse = _expected(case, inputs)
            bar = _Bar(case, inputs, dtype, tolerance_factor)
        answer = _call(candidate, case, inputs, out=stale)
        errors.append(bar.judge(answer, expected, None, out=stale))
        answer = _call(candidate, case, inputs, max_nodes=max(case.trees, default=0) or None)
        errors.append(bar.judge(answer, expected, None, out=None))
        worst = max(worst, *(error for error, _ in errors))
        worst_ratio = max(worst_ratio, *(ratio for _, ratio in errors))
    ctx.progress(len(cases), len(cases), "done")
    return [
        Figure("worst relative error", worst, Unit.RELATIVE_ERROR),
        Figure("worst error over an exact computation's", worst_ratio, Unit.RATIO),
        Figure("cases", len(cases), Unit.COUNT),
    ]


def path_cases(heads: int = 3, latent: int = 64, rope: int = 16) -> list[AttentionCase]:
    """Cases for `attention_equals_paths`, at widths that only the oracle takes by default."""
    # Nodes, prefixes, padded rows.
    sizes: list[tuple[tuple[int, ...], tuple[int, ...], int]] = [
        ((1,), (0,), 0),
        ((3,), (1,), 0),
        ((9,), (21,), 0),
        ((17,), (0,), 0),
        ((33,), (40,), 0),
        ((65,), (5,), 0),
        ((9, 1, 17), (0, 21, 3), 0),
        ((3, 33, 9, 2), (30, 1, 0, 7), 0),
        ((3, 9), (21, 0), 5),
        ((), (), 2),
        ((0, 3, 0, 9, 0), (0, 21, 7, 0, 0), 1),
    ]
    return [
        AttentionCase(
            f"T={trees} L={prefixes} and {padded} padded rows, "
            f"{'no' if layout is None else layout.value} mask",
            trees,
            prefixes,
            heads=heads,
            layout=layout,
            shape=Shape.CHAIN if layout is None else Shape.MIXED,
            padded_rows=padded,
            latent=latent,
            rope=rope,
        )
        for trees, prefixes, padded in sizes
        for layout in (*MaskLayout, None)
    ]


@single_threaded
def attention_equals_paths(
    candidate: Attention,
    ctx: Context,
    *,
    dtype: torch.dtype = torch.float64,
    device: torch.device = _CPU,
    tolerance_factor: float = 2.0,
    cases: Sequence[AttentionCase] | None = None,
) -> list[Figure]:
    """The candidate against no oracle at all: every path of every tree as an ordinary sequence.

    The prefix and the nodes of a root-to-leaf path make a causal sequence like any other; torch's
    scaled_dot_product_attention says what its last rows are. Nothing of the tree mask enters. The
    lse is that of the same sequence's scores. Padded rows are zeros with an lse of -inf.

    Each case makes two calls: one into an `out` full of NaN and with the lse, one with neither.
    """
    cases = path_cases() if cases is None else cases
    worst, paths = 0.0, 0
    for done, case in enumerate(cases):
        ctx.progress(done, len(cases), case.name)
        generator = torch.Generator().manual_seed(ctx.seed * 1000 + done)
        inputs = make_inputs(case, dtype=dtype, device=device, generator=generator)
        out = torch.full((*inputs.q.shape[:2], case.latent), torch.nan, dtype=dtype, device=device)
        expected, lse, found = _by_paths(case, inputs)
        paths += found
        bar = _Bar(case, inputs, dtype, tolerance_factor)
        answer = _call(candidate, case, inputs, out=out, return_lse=True)
        error, _ = bar.judge(answer, expected, lse, out=out)
        again, _ = bar.judge(_call(candidate, case, inputs), expected, None, out=None)
        worst = max(worst, error, again)
    ctx.progress(len(cases), len(cases), "done")
    return [
        Figure("worst relative error", worst, Unit.RELATIVE_ERROR),
        Figure("paths", paths, Unit.COUNT),
        Figure("cases", len(cases), Unit.COUNT),
    ]


@single_threaded
def attention_is_deterministic(
    candidate: Attention,
    ctx: Context,
    *,
    dtype: torch.dtype,
    device: torch.device = _CPU,
    heads: int = 8,
    repeats: int = 3,
    latent: int = 512,
    rope: int = 64,
) -> list[Figure]:
    """With `deterministic=True`, a request has the same bits again, alone and in reversed order."""
    case = AttentionCase(
        "ragged batch",
        (9, 1, 33, 17),
        (300, 21, 1, 700),
        heads=heads,
        layout=MaskLayout.PACKED,
        latent=latent,
        rope=rope,
    )
    generator = torch.Generator().manual_seed(ctx.seed)
    inputs = make_inputs(case, dtype=dtype, device=device, generator=generator)
    batch = range(len(case.trees))
    first = _call(candidate, case, inputs, deterministic=True)
    calls = 1
    for repeat in range(repeats):
        ctx.progress(calls, repeats + 1 + len(batch), "again")
        again = _call(candidate, case, inputs, deterministic=True)
        _same_bits(case, inputs, again, first, list(batch), f"call {repeat + 2} of the same batch")
        calls += 1
    for chosen in ([request] for request in batch):
        ctx.progress(calls, repeats + 1 + len(batch), "alone")
        alone = _call(candidate, case, _only(inputs, chosen), deterministic=True)
        _same_bits(case, inputs, alone, first, chosen, "the request alone")
        calls += 1
    backwards = list(reversed(batch))
    reordered = _call(candidate, case, _only(inputs, backwards), deterministic=True)
    _same_bits(case, inputs, reordered, first, backwards, "the batch in reversed order")
    return [Figure("calls with equal bits", calls + 1, Unit.COUNT)]


@dataclasses.dataclass(frozen=True)
class _Bar:
    """What an answer must reach in one case, and what is said where it does not."""

    case: AttentionCase
    inputs: AttentionInputs
    dtype: torch.dtype
    factor: float

    def judge(
        self,
        answer: object,
        expected: torch.Tensor,
        lse: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> tuple[float, float]:
        """The worst relative error of a request, and of that over an exact computation's."""
        if lse is not None:
            if not isinstance(answer, tuple) or len(answer) != 2:
                self._fail(FailureKind.SHAPE, "return_lse=True must give (out, lse)")
            answer, got_lse = answer
            self._judge_lse(got_lse, lse)
        if not isinstance(answer, torch.Tensor) or answer.shape != expected.shape:
            shape = list(answer.shape) if isinstance(answer, torch.Tensor) else type(answer)
            self._fail(FailureKind.SHAPE, f"out must be {list(expected.shape)}, got {shape}")
        if answer.dtype != self.dtype:
            self._fail(FailureKind.DTYPE, f"out must be {self.dtype}, got {answer.dtype}")
        if out is not None and answer.data_ptr() != out.data_ptr():
            self._fail(FailureKind.SHAPE, "the result must be the `out` that was given")
        if out is not None:
            answer = out  # what the caller looks at, whatever view of it was returned
        got = answer.to(torch.float64)
        wrong = (~got.isfinite()).nonzero()
        if len(wrong):
            token, head, column = wrong[0].tolist()
            self._fail(
                FailureKind.NUMERICAL,
                f"{self._place(token)}, head {head}, column {column}: {got[token, head, column]}",
            )
        worst, worst_ratio = 0.0, 0.0
        bounds = [0, *self.inputs.qo_indptr.tolist()[1:], len(got)]
        for request, (start, end) in enumerate(itertools.pairwise(bounds)):
            ours, exact = got[start:end], expected[start:end]
            least = _rounding(self.dtype)
            base = max(least, _relative(exact.to(self.dtype).to(torch.float64), exact))
            error = _relative(ours, exact)
            rows = (ours - exact).norm(dim=2) - 2 * self.factor * base * exact.norm(dim=2)
            if error > self.factor * base or bool((rows > 0).any()):
                token, head = divmod(int(rows.argmax()), rows.shape[1])
                self._fail(
                    FailureKind.NUMERICAL,
                    f"request {request} has a relative error of {error:.3g}, allowed is "
                    f"{self.factor * base:.3g}; first looked at: {self._place(start + token)}, "
                    f"head {head}: {_relative(ours[token, head], exact[token, head]):.3g}",
                )
            worst, worst_ratio = max(worst, error), max(worst_ratio, error / base)
        return worst, worst_ratio

    def _judge_lse(self, got: object, expected: torch.Tensor) -> None:
        if not isinstance(got, torch.Tensor) or got.shape != expected.shape:
            shape = list(got.shape) if isinstance(got, torch.Tensor) else type(got)
            self._fail(FailureKind.SHAPE, f"lse must be {list(expected.shape)}, got {shape}")
        if got.dtype not in (torch.float32, torch.float64):
            self._fail(FailureKind.DTYPE, f"lse must be float32, got {got.dtype}")
        allowed = 1e-10 if got.dtype == torch.float64 else 1e-3
        same = (got == expected) | ((got.to(torch.float64) - expected).abs() <= allowed)
        wrong = (~same).nonzero()
        if len(wrong):
            token, head = wrong[0].tolist()
            self._fail(
                FailureKind.NUMERICAL,
                f"lse of {self._place(token)}, head {head} is {float(got[token, head]):.6g}, "
                f"not {float(expected[token, head]):.6g}",
            )

    def _place(self, token: int) -> str:
        starts = self.inputs.qo_indptr.tolist()
        if token >= starts[-1]:
            return f"padded row {token}"
        request = max(number for number, start in enumerate(starts[:-1]) if start <= token)
        return f"request {request}, node {token - starts[request]}"

    def _fail(self, kind: FailureKind, problem: str) -> NoReturn:
        raise GateFailure(kind, f"{self.case.name}: {problem}")


def _call(
    candidate: Attention,
    case: AttentionCase,
    inputs: AttentionInputs,
    *,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    max_nodes: int | None = None,
    deterministic: bool = False,
) -> object:
    try:
        return candidate(
            *inputs.tensors(),
            sm_scale=case.sm_scale,
            v_head_dim=case.latent,
            max_nodes=max_nodes,
            out=out,
            return_lse=return_lse,
            deterministic=deterministic,
        )
    except KdError:
        raise  # what this machine lacks says nothing about the candidate
    except Exception as error:
        raise GateFailure(
            FailureKind.LAUNCH, f"{case.name}: raised {type(error).__name__}: {error}"
        ) from error


def _expected(case: AttentionCase, inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The right answer and its lse, float64; for UNIFORM content by counting, not by the oracle."""
    if case.content is Content.UNIFORM:
        return _means(case, inputs)
    out, lse = tree_verify_attention(
        *inputs.tensors(), sm_scale=case.sm_scale, v_head_dim=case.latent, return_lse=True
    )
    return out, lse


def _means(case: AttentionCase, inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Where all scores are 0: the mean of V over prefix and path, and the log of their number."""
    rows, heads = inputs.q.shape[:2]
    device = inputs.q.device
    out = torch.zeros(rows, heads, case.latent, dtype=torch.float64, device=device)
    lse = torch.full((rows, heads), -torch.inf, dtype=torch.float64, device=device)
    for first, prefix, own, parents in _requests(case, inputs):
        for node in range(len(parents)):
            seen = torch.cat([prefix, own[_path(parents, node)]])
            out[first + node] = seen[:, : case.latent].mean(0)
            lse[first + node] = math.log(len(seen))
    return out, lse


def _by_paths(
    case: AttentionCase, inputs: AttentionInputs
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The right answer by running each root-to-leaf path as a causal sequence.

    Returns out, lse, and the number of paths.
    """
    q = inputs.q.to(torch.float64)
    out = torch.zeros(*q.shape[:2], case.latent, dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64, device=q.device)
    paths = 0
    for first, prefix, own, parents in _requests(case, inputs):
        for leaf in sorted(set(range(len(parents))) - set(parents)):
            nodes = _path(parents, leaf)
            keys = torch.cat([prefix, own[nodes]]).expand(q.shape[1], -1, -1)
            queries = torch.zeros_like(keys)
            rows = [first + node for node in nodes]
            queries[:, len(prefix) :] = q[rows].transpose(0, 1)
            attended = torch.nn.functional.scaled_dot_product_attention(
                queries, keys, keys[..., : case.latent], is_causal=True, scale=case.sm_scale
            )
            out[rows] = attended[:, len(prefix) :].transpose(0, 1)
            for place, row in enumerate(rows, start=len(prefix)):
                scores = (keys[0, : place + 1] @ q[row].T) * case.sm_scale
                lse[row] = scores.exp().sum(0).log()
            paths += 1
    return out, lse, paths


def _requests(
    case: AttentionCase, inputs: AttentionInputs
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, list[int]]]:
    """Of each request: its first row of q, its prefix's and its nodes' latent rows, its tree."""
    pool = inputs.kv_pool.view(inputs.kv_pool.shape[0], -1)
    indices = inputs.kv_indices
    if indices is None:
        indices = torch.arange(sum(case.prefixes), device=pool.device)
    first = start = 0
    for nodes, prefix, parents in zip(case.trees, case.prefixes, inputs.parents, strict=True):
        slots = indices[start : start + prefix].to(torch.int64)
        own = inputs.draft_slots[first : first + nodes].to(torch.int64)
        yield first, pool[slots].to(torch.float64), pool[own].to(torch.float64), parents
        first, start = first + nodes, start + prefix


def _path(parents: Sequence[int], node: int) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def _only(inputs: AttentionInputs, chosen: Sequence[int]) -> AttentionInputs:
    """The same call with only the chosen requests, in that order. Needs kv_indices and a mask."""
    assert inputs.kv_indices is not None
    assert inputs.mask is not None
    assert inputs.mask_indptr is not None

    def pick(values: torch.Tensor, indptr: torch.Tensor) -> torch.Tensor:
        return torch.cat([values[int(indptr[one]) : int(indptr[one + 1])] for one in chosen])

    def offsets(indptr: torch.Tensor) -> torch.Tensor:
        sizes = [0, *(int(indptr[one + 1] - indptr[one]) for one in chosen)]
        return torch.tensor(sizes, device=indptr.device).cumsum(0).to(indptr.dtype)

    return AttentionInputs(
        q=pick(inputs.q, inputs.qo_indptr),
        kv_pool=inputs.kv_pool,
        qo_indptr=offsets(inputs.qo_indptr),
        kv_indptr=offsets(inputs.kv_indptr),
        kv_indices=pick(inputs.kv_indices, inputs.kv_indptr),
        draft_slots=pick(inputs.draft_slots, inputs.qo_indptr),
        mask=pick(inputs.mask, inputs.mask_indptr),
        mask_indptr=offsets(inputs.mask_indptr),
        parents=[inputs.parents[one] for one in chosen],
    )


def _same_bits(
    case: AttentionCase,
    inputs: AttentionInputs,
    got: object,
    first: object,
    chosen: Sequence[int],
    what: str,
) -> None:
    """`got` holds the chosen requests, in that order; `first` the whole batch."""
    assert isinstance(first, torch.Tensor)
    starts = inputs.qo_indptr.tolist()
    place = 0
    for request in chosen:
        wanted = first[starts[request] : starts[request + 1]]
        part = got[place : place + len(wanted)] if isinstance(got, torch.Tensor) else None
        place += len(wanted)
        if part is None or part.shape != wanted.shape:
            raise GateFailure(FailureKind.SHAPE, f"{case.name}: {what} has another shape")
        wrong = (part != wanted).nonzero()
        if len(wrong):
            node, head, column = wrong[0].tolist()
            raise GateFailure(
                FailureKind.NUMERICAL,
                f"{case.name}: {what} differs from the first call at request {request}, node "
                f"{node}, head {head}, column {column}: {float(part[node, head, column])!r}, "
                f"then {float(wanted[node, head, column])!r}",
            )


def _relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Norm of the difference over norm of `exact`; inf where only `exact` is 0."""
    difference, size = float((got - exact).norm()), float(exact.norm())
    if size:
        return difference / size
    return math.inf if difference else 0.0


def _rounding(dtype: torch.dtype) -> float:
    """The least relative error that an answer in `dtype` is credited with.

    16-bit types: about what rounding alone costs (eps / 2 / sqrt(3) for a mantissa of 1, less for
    larger ones), as a single row may by luck round to itself. Wider types: the sums' own rounding
    decides, in whatever order they are made.
    """
    eps = torch.finfo(dtype).eps
    return 0.2 * eps if dtype.itemsize == 2 else 100 * eps
