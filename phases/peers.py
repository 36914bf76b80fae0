"""Kernels of other projects for the same work: FlashInfer, FlashMLA and SGLang's Triton kernels.

The adapters follow the sources of flashinfer-python 0.6.15 and 0.7.4, sglang 0.5.23, and FlashMLA
1.0.0 in the form of deepseek-ai and in that of the wheel sgl-flash-mla 1.0.0. A peer gets what its
own callers give it, in the layout that it wants; what they prepare once for a step or for all
layers (a plan, pages, the draft's dense rows) is prepared outside of what is timed. Apart from
SGLang's extend kernel none takes a tree, so the others do a causal chain, and are held against the
oracle's. They are looked up by name, when a comparison asks for them: nothing else here depends on
them, and SGLang is imported in its own room alone.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch

from kdtree_engine.timing import Method, Tensors, Timing, time_operation
from phases.regimes import Regime, draw, problem_with

__all__ = ["PEERS", "Operation", "Peer", "lack", "make_inputs", "problem_with_peer", "time_peer"]

_LATENT, _ROPE = 512, 64
_PAGE = 64
"""Rows of a page: FlashMLA's dense kernel takes no other."""
_TOLERANCE_FACTOR = 4.0
"""A peer may keep partial results in bf16: SGLang's verify kernel takes 2.2 in Triton's
interpreter. A tree that is taken for a chain takes 90 at a prefix of 40."""
_FLASHINFER_WORKSPACE_BYTES = 128 << 20
"""What FlashInfer's documentation of the wrapper recommends."""

Operation = Callable[..., torch.Tensor]
Extras = Callable[[Regime, Tensors], Tensors]


@dataclasses.dataclass(frozen=True)
class Peer:
    """A kernel of another project, in the form that a comparison needs.

    load: imports what it is of; ImportError where that is not installed.
    make: `make(loaded, regime)` gives the operation over the eight tensors of `regimes.draw` and,
        after them, those of `extras`: bf16 [batch * nodes, heads, 512].
    extras: `extras(regime, drawn)`, the same data as the peer wants them.
    tree: whether it follows the mask; else node t sees the nodes up to t.
    """

    name: str
    load: Callable[[], Any]
    make: Callable[[Any, Regime], Operation]
    extras: Extras = lambda regime, drawn: ()
    tree: bool = False

    @property
    def mask(self) -> Literal["tree", "chain"]:
        return "tree" if self.tree else "chain"


def lack(peer: Peer) -> tuple[Literal["not installed", "failed"], str] | None:
    """Why a peer cannot be run on this machine, None where nothing is known against it."""
    try:
        peer.load()
    except ModuleNotFoundError as error:
        # One of its own modules or one that it needs: both are a matter of installing.
        return "not installed", f"no module {error.name}"
    except Exception as error:  # a package that is there and breaks on import says so
        told = " ".join(str(error).split())
        return "failed", f"import: {type(error).__name__}: {told}"[:400]
    return None


def make_inputs(peer: Peer, regime: Regime, seed: int, *, device: torch.device) -> Tensors:
    """What a peer's operation is called with; slots at random, as for the kernel."""
    drawn = draw(regime, seed, device=device, scattered=True)
    return (*drawn, *peer.extras(regime, drawn))


def problem_with_peer(peer: Peer, regime: Regime, inputs: Tensors, outputs: Tensors) -> str | None:
    """What is wrong with a peer's output, by the oracle with the tree or with a chain."""
    # Six tensors, without a mask, are a causal chain to the oracle.
    judged = inputs[: 8 if peer.tree else 6]
    return problem_with(judged, outputs[0], regime.sm_scale, _TOLERANCE_FACTOR)


def time_peer(
    peer: Peer,
    regime: Regime,
    *,
    device: torch.device,
    seed: int,
    method: Method,
    repeats: int,
    copy_bandwidth: float | None = None,
) -> Timing:
    """Time a peer in a regime, its outputs held against the oracle.

    Raises WrongResult, ImplausibleTiming, and whatever the peer raises.
    """
    return time_operation(
        functools.partial(make_inputs, peer, regime, device=device),
        peer.make(peer.load(), regime),
        device=device,
        check=functools.partial(problem_with_peer, peer, regime),
        method=method,
        repeats=repeats,
        seed=seed,
        floor_bytes=regime.floor_bytes,
        copy_bandwidth=copy_bandwidth,
    )


def _all_slots(regime: Regime, drawn: Tensors) -> Tensors:
    """Every slot of each request, its prefix, then its nodes: int32 [batch * (prefix + nodes)]."""
    cached = drawn[4].view(regime.batch, regime.prefix)
    own = drawn[5].view(regime.batch, regime.nodes)
    return (torch.cat((cached, own), dim=1).flatten().int(),)


def _load_flashinfer() -> Any:
    return importlib.import_module("flashinfer.mla")


def _flashinfer(backend: str, mla: Any, regime: Regime) -> Operation:
    """FlashInfer's BatchMLAPagedAttentionWrapper with pages of one row."""
    planned: dict[int, tuple[Any, torch.Tensor]] = {}
    scratch: list[torch.Tensor] = []
    length = regime.prefix + regime.nodes

    def plan(slots: torch.Tensor, dtype: torch.dtype) -> Any:
        if not scratch:  # one for all: calls follow each other on one stream
            scratch.append(
                torch.empty(_FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=slots.device)
            )
        steps = torch.arange(regime.batch + 1, dtype=torch.int32, device=slots.device)
        lengths = torch.full_like(steps[1:], length)
        # Reserved buffers, as for a captured graph: the slots are read where they are refilled.
        wrapper = mla.BatchMLAPagedAttentionWrapper(
            scratch[0],
            use_cuda_graph=True,
            qo_indptr=torch.empty_like(steps),
            kv_indptr=torch.empty_like(steps),
            kv_indices=slots,
            kv_len_arr=torch.empty_like(lengths),
            backend=backend,
        )
        wrapper.plan(
            qo_indptr=steps * regime.nodes,
            kv_indptr=steps * length,
            kv_indices=slots,
            kv_len_arr=lengths,
            num_heads=regime.heads,
            head_dim_ckv=_LATENT,
            head_dim_kpe=_ROPE,
            page_size=1,
            causal=True,
            sm_scale=regime.sm_scale,
            q_data_type=dtype,
            kv_data_type=dtype,
        )
        return wrapper

    def operation(q: torch.Tensor, pool: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        slots = rest[-1]
        if slots.data_ptr() not in planned:  # the first call, before these buffers are captured
            # Kept with its slots, so that no other tensor can come to lie at that address.
            planned[slots.data_ptr()] = plan(slots, q.dtype), slots
        wrapper, _ = planned[slots.data_ptr()]
        pages = pool.unsqueeze(1)
        out: torch.Tensor = wrapper.run(
            q_nope=q[..., :_LATENT],
            q_pe=q[..., _LATENT:],
            ckv_cache=pages[..., :_LATENT],
            kpe_cache=pages[..., _LATENT:],
            out=q.new_empty((*q.shape[:2], _LATENT)),
        )
        return out

    return operation


def _draft_rows(regime: Regime, drawn: Tensors) -> Tensors:
    """The nodes' own rows, dense: k bf16 [rows, 1, 576], v bf16 [rows, 1, 512]."""
    k = drawn[1][drawn[5]].unsqueeze(1)
    return k, k[..., :_LATENT].contiguous()


def _load_sglang_extend() -> Any:
    return importlib.import_module("sglang.kernels.ops.attention.extend_attention")


def _sglang_extend(kernel: Any, regime: Regime) -> Operation:
    """SGLang's extend kernel as its Triton backend calls it for target-verify, tree included."""

    return _sglang(kernel.extend_attention_fwd, regime, tree=True)


def _load_sglang_verify_mla() -> Any:
    return importlib.import_module("sglang.kernels.ops.attention.verify_mla")


def _sglang_verify_mla(kernel: Any, regime: Regime) -> Operation:
    """SGLang's grouped-head verify kernel, which its backend uses on AMD and for chains alone."""

    launch = functools.partial(kernel.verify_shared_kv_fwd, max_bs=regime.batch)
    return _sglang(launch, regime, tree=False)


def _sglang(launch: Callable[..., object], regime: Regime, *, tree: bool) -> Operation:
    """One of SGLang's kernels, whose first arguments are the same; False from one: not taken."""

    def operation(*tensors: torch.Tensor) -> torch.Tensor:
        q, pool, qo_indptr, kv_indptr, kv_indices, _, mask, mask_indptr, k, v = tensors
        out = q.new_empty((*q.shape[:2], _LATENT))
        rows = pool.unsqueeze(1)
        taken = launch(
            q,
            k,
            v,
            out,
            rows,
            rows[..., :_LATENT],
            qo_indptr,
            kv_indptr,
            kv_indices,
            mask if tree else None,
            True,  # is_causal
            mask_indptr if tree else None,
            regime.nodes,  # max_len_extend
            1.0,  # k_scale
            1.0,  # v_scale
            sm_scale=regime.sm_scale,
        )
        if taken is False:
            raise RuntimeError(f"SGLang's kernel does not take {regime}")
        return out

    return operation


def _pages(regime: Regime, drawn: Tensors) -> Tensors:
    """The requests' rows in pages of 64 that lie in reverse order, and the table of the pages.

    bf16 [batch * pages, 64, 1, 576], int32 [batch, pages]. What is unused of a request's last page
    is NaN, as in FlashMLA's own tests.
    """
    pool = drawn[1]
    length = regime.prefix + regime.nodes
    count = -(-length // _PAGE)
    rows = pool.new_full((regime.batch, count * _PAGE, pool.shape[1]), torch.nan)
    (slots,) = _all_slots(regime, drawn)
    rows[:, :length] = pool[slots.view(regime.batch, length)]
    total = regime.batch * count
    table = torch.arange(total - 1, -1, -1, dtype=torch.int32, device=pool.device)
    pages = rows.view(total, _PAGE, 1, pool.shape[1]).flip(0)
    return pages, table.view(regime.batch, count)


def _load_flashmla() -> Any:
    return importlib.import_module("flash_mla")


def _flashmla(flash_mla: Any, regime: Regime) -> Operation:
    """FlashMLA's dense decoding kernel for sm_90."""
    parameters = inspect.signature(flash_mla.flash_mla_with_kvcache).parameters
    # The wheel sgl-flash-mla keeps this kernel among those that FlashMLA itself has dropped since.
    options = {"use_legacy": True} if "use_legacy" in parameters else {}
    scheduled: list[tuple[torch.Tensor, Any, Any]] = []

    def operation(q: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        pages, table = rest[-2:]
        if not scheduled:  # once for all calls, whose lengths are the same
            length = regime.prefix + regime.nodes
            lengths = torch.full((regime.batch,), length, dtype=torch.int32, device=q.device)
            # Version 1.0.0 ignores the arguments, and fills the metadata in at the first call.
            metadata = flash_mla.get_mla_metadata(lengths, regime.nodes * regime.heads, 1)
            scheduled.append((lengths, *metadata))
        lengths, schedule, splits = scheduled[0]
        out, _ = flash_mla.flash_mla_with_kvcache(
            q.view(regime.batch, regime.nodes, regime.heads, q.shape[2]),
            pages,
            table,
            lengths,
            _LATENT,
            schedule,
            splits,
            softmax_scale=regime.sm_scale,
            causal=True,
            **options,
        )
        found: torch.Tensor = out.reshape(-1, regime.heads, _LATENT)
        return found

    return operation


PEERS = (
    Peer("sglang-extend", _load_sglang_extend, _sglang_extend, _draft_rows, tree=True),
    Peer("sglang-verify-mla", _load_sglang_verify_mla, _sglang_verify_mla, _draft_rows),
    Peer("flashinfer-fa2", _load_flashinfer, functools.partial(_flashinfer, "fa2"), _all_slots),
    Peer("flashinfer-fa3", _load_flashinfer, functools.partial(_flashinfer, "fa3"), _all_slots),
    Peer("flashmla", _load_flashmla, _flashmla, _pages),
)
