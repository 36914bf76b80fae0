"""Adapters of other projects' kernels, tried on the CPU through stand-ins of those kernels.

A stand-in has the parameters of the real function, in its order, and computes the answer from what
it is handed alone: an argument in the wrong place or data in the wrong layout give a wrong result.
Where the real package is installed, its parameters are compared with the stand-in's.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kdtree_engine.reference import tree_verify_attention as oracle
from kdtree_engine.timing import WrongResult
from phases.peers import PEERS, Peer, lack, make_inputs, problem_with_peer, time_peer
from phases.regimes import Regime

pytestmark = pytest.mark.usefixtures("small_cpu_cache")
CPU = torch.device("cpu")
REGIME = Regime(2, 8, 9, 100)  # 109 rows: the second page of a request is partly filled
BY_NAME = {peer.name: peer for peer in PEERS}


def attention(
    q: torch.Tensor, kv: torch.Tensor, seen: torch.Tensor, sm_scale: float
) -> torch.Tensor:
    """q [t, H, 576] over rows kv [n, 576], as `seen` bool [t, n] grants: q's dtype [t, H, 512]."""
    scores = sm_scale * torch.einsum("thd,nd->thn", q.double(), kv.double())
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(dim=2)
    return torch.einsum("thn,nd->thd", weights, kv[:, :512].double()).to(q.dtype)


def chain(nodes: int, length: int) -> torch.Tensor:
    """Bottom-right aligned: the last query sees everything."""
    return torch.ones(nodes, length, dtype=torch.bool).tril(length - nodes)


class BatchMLAPagedAttentionWrapper:
    """Of flashinfer.mla, 0.6.15: what it is planned with is in reserved buffers, or remembered."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert float_workspace_buffer.numel() >= 1 << 27
        assert use_cuda_graph
        assert backend in ("fa2", "fa3")
        buffers = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        assert all(buffer is not None and buffer.dtype is torch.int32 for buffer in buffers)
        self.buffers: Any = buffers

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        for buffer, given in zip(
            self.buffers, (qo_indptr, kv_indptr, kv_indices, kv_len_arr), strict=True
        ):
            buffer[: len(given)].copy_(given)
        assert (head_dim_ckv, head_dim_kpe, page_size, causal) == (512, 64, 1, True)
        self.heads, self.sm_scale, self.dtypes = num_heads, sm_scale, (q_data_type, kv_data_type)

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor,
    ) -> torch.Tensor:
        assert (q_nope.dtype, ckv_cache.dtype) == self.dtypes
        assert q_nope.shape[1:] == (self.heads, 512)
        assert q_pe.shape[1:] == (self.heads, 64)
        assert ckv_cache.shape[1:] == (1, 512)
        assert kpe_cache.shape[1:] == (1, 64)
        assert out.shape == q_nope.shape
        q = torch.cat((q_nope, q_pe), dim=2)
        pool = torch.cat((ckv_cache, kpe_cache), dim=2)[:, 0]
        qo, kv, indices, lengths = self.buffers
        for request, length in enumerate(lengths.tolist()):
            rows = slice(int(qo[request]), int(qo[request + 1]))
            slots = indices[int(kv[request]) : int(kv[request]) + length].long()
            seen = chain(rows.stop - rows.start, length)
            out[rows] = attention(q[rows], pool[slots], seen, self.sm_scale)
        return out


def get_mla_metadata(*args: object, **kwargs: object) -> tuple[list[object], None]:
    """Of flash_mla 1.0.0: filled in at the first call."""
    return [], None


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: list[object],
    num_splits: None = None,
    softmax_scale: float = 0.0,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of flash_mla 1.0.0: one schedule serves calls of the same shapes and lengths."""
    assert k_cache.shape[1:] == (64, 1, 576)
    assert (head_dim_v, num_splits, causal) == (512, None, True)
    assert {tensor.dtype for tensor in (block_table, cache_seqlens)} == {torch.int32}
    shape = (*q.shape, *block_table.shape, *cache_seqlens.tolist())
    tile_scheduler_metadata.append(shape)
    assert tile_scheduler_metadata[0] == shape
    parts = []
    for one, pages, length in zip(q, block_table.long(), cache_seqlens.tolist(), strict=True):
        rows = k_cache[pages].reshape(-1, 576)[:length]
        parts.append(attention(one, rows, chain(len(one), length), softmax_scale))
    return torch.stack(parts), torch.empty(0)


def extend_attention_fwd(
    q_extend: torch.Tensor,
    k_extend: torch.Tensor,
    v_extend: torch.Tensor,
    o_extend: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    custom_mask: torch.Tensor | None,
    is_causal: bool,
    mask_indptr: torch.Tensor | None,
    max_len_extend: int,
    k_scale: float,
    v_scale: float,
    sm_scale: float | None = None,
) -> None:
    """Of sglang 0.5.23: the prefix by slots, the nodes' own rows dense."""
    assert all(tensor.is_contiguous() for tensor in (q_extend, k_extend, v_extend, o_extend))
    assert k_buffer.shape[1:] == k_extend.shape[1:] == (1, 576)
    assert v_buffer.shape[1:] == v_extend.shape[1:] == (1, 512)
    assert (k_scale, v_scale) == (1.0, 1.0)
    assert sm_scale is not None
    for request in range(len(qo_indptr) - 1):
        rows = slice(int(qo_indptr[request]), int(qo_indptr[request + 1]))
        nodes = rows.stop - rows.start
        assert nodes <= max_len_extend
        slots = kv_indices[int(kv_indptr[request]) : int(kv_indptr[request + 1])]
        kv = torch.cat((k_buffer[slots, 0], k_extend[rows, 0]))
        assert torch.equal(v_extend[rows], k_extend[rows, :, :512])
        seen = chain(nodes, len(kv)) if is_causal else torch.ones(nodes, len(kv)).bool()
        if custom_mask is not None:
            assert mask_indptr is not None
            part = custom_mask[int(mask_indptr[request]) : int(mask_indptr[request + 1])]
            seen = part.view(nodes, len(kv)).bool()
        o_extend[rows] = attention(q_extend[rows], kv, seen, sm_scale)


def verify_shared_kv_fwd(
    q_extend: torch.Tensor,
    k_extend: torch.Tensor,
    v_extend: torch.Tensor,
    o_extend: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    custom_mask: torch.Tensor | None,
    is_causal: bool,
    mask_indptr: torch.Tensor | None,
    max_len_extend: int,
    k_scale: float,
    v_scale: float,
    sm_scale: float | None = None,
    *,
    max_bs: int | None = None,
) -> bool:
    """Of sglang 0.5.23: the same for a chain; says whether it took it."""
    assert max_bs == len(qo_indptr) - 1
    if q_extend.shape[0] != max_bs * max_len_extend or kv_indices.numel() == 0:
        return False
    extend_attention_fwd(
        q_extend, k_extend, v_extend, o_extend, k_buffer, v_buffer, qo_indptr, kv_indptr,
        kv_indices, custom_mask, is_causal, mask_indptr, max_len_extend, k_scale, v_scale, sm_scale,
    )  # fmt: skip
    return True


STAND_INS: dict[str, list[Any]] = {
    "flashinfer.mla": [BatchMLAPagedAttentionWrapper],
    "flash_mla": [get_mla_metadata, flash_mla_with_kvcache],
    "sglang.kernels.ops.attention.extend_attention": [extend_attention_fwd],
    "sglang.kernels.ops.attention.verify_mla": [verify_shared_kv_fwd],
}


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, members in STAND_INS.items():
        fake = types.ModuleType(name)
        for member in members:
            setattr(fake, member.__name__, member)
        parts = name.split(".")
        for depth in range(1, len(parts)):
            parent = ".".join(parts[:depth])
            monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
        monkeypatch.setitem(sys.modules, name, fake)


def test_the_registry_names_the_peers_of_the_plan() -> None:
    assert {peer.name: peer.mask for peer in PEERS} == {
        "sglang-extend": "tree",
        "sglang-verify-mla": "chain",
        "flashinfer-fa2": "chain",
        "flashinfer-fa3": "chain",
        "flashmla": "chain",
    }


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_what_a_peer_is_given_gives_the_oracles_answer(peer: Peer) -> None:
    """Twice over, with buffers that are refilled, as `time_operation` does it."""
    assert lack(peer) is None
    operation = peer.make(peer.load(), REGIME)
    buffers = make_inputs(peer, REGIME, 1, device=CPU)
    for seed in (1, 2):
        drawn = make_inputs(peer, REGIME, seed, device=CPU)
        for buffer, tensor in zip(buffers, drawn, strict=True):
            buffer.copy_(tensor)
        out = operation(*buffers)
        assert (out.shape, out.dtype) == ((18, 8, 512), torch.bfloat16)
        assert problem_with_peer(peer, REGIME, drawn, (out,)) is None


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_peer_is_timed_by_both_methods(peer: Peer) -> None:
    regime = Regime(1, 8, 3, 20)
    cold = time_peer(peer, regime, device=CPU, seed=1, method="cold", repeats=3)
    rotated = time_peer(peer, regime, device=CPU, seed=900, method="rotated", repeats=3)
    assert (cold.method, rotated.method) == ("cold", "rotated")


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_each_is_judged_by_the_mask_that_it_takes(peer: Peer) -> None:
    inputs = make_inputs(peer, REGIME, 1, device=CPU)
    tree, chains = (oracle(*inputs[:count], sm_scale=REGIME.sm_scale) for count in (8, 6))
    assert isinstance(tree, torch.Tensor)
    assert isinstance(chains, torch.Tensor)
    own, other = (tree, chains) if peer.tree else (chains, tree)
    assert problem_with_peer(peer, REGIME, inputs, (own.bfloat16(),)) is None
    assert problem_with_peer(peer, REGIME, inputs, (other.bfloat16(),)) is not None


@pytest.mark.usefixtures("stand_ins")
def test_the_wheel_that_keeps_flashmlas_dense_kernel_apart_is_asked_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of_the_wheel(*arguments: Any, use_legacy: bool = False, **options: Any) -> Any:
        assert use_legacy, "dense decoding was removed from the current kernels"
        return flash_mla_with_kvcache(*arguments, **options)

    monkeypatch.setattr(sys.modules["flash_mla"], "flash_mla_with_kvcache", of_the_wheel)
    peer = BY_NAME["flashmla"]
    inputs = make_inputs(peer, REGIME, 1, device=CPU)
    out = peer.make(peer.load(), REGIME)(*inputs)
    assert problem_with_peer(peer, REGIME, inputs, (out,)) is None


@pytest.mark.usefixtures("stand_ins")
def test_a_shape_that_the_verify_kernel_does_not_take_is_an_error() -> None:
    peer, regime = BY_NAME["sglang-verify-mla"], Regime(1, 8, 3, 0)
    with pytest.raises(RuntimeError, match="does not take B=1 H=8 T=3 L=0"):
        peer.make(peer.load(), regime)(*make_inputs(peer, regime, 1, device=CPU))


@pytest.mark.usefixtures("stand_ins")
def test_a_peer_that_computes_something_else_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys.modules["sglang.kernels.ops.attention.extend_attention"],
        "extend_attention_fwd",
        lambda *arguments, **options: arguments[3].zero_(),
    )
    with pytest.raises(WrongResult, match="relative error 1"):
        time_peer(BY_NAME["sglang-extend"], REGIME, device=CPU, seed=1, method="rotated", repeats=3)


def test_what_is_not_installed_is_named_and_what_breaks_on_import_fails() -> None:
    def absent() -> None:
        import no_such_module.at_all  # noqa: F401

    def broken() -> None:
        raise OSError("libcudart.so.12:\ncannot open")

    assert lack(Peer("p", absent, make=lambda loaded, regime: torch.zeros_like)) == (
        "not installed",
        "no module no_such_module",
    )
    assert lack(Peer("p", broken, make=lambda loaded, regime: torch.zeros_like)) == (
        "failed",
        "import: OSError: libcudart.so.12: cannot open",
    )


def functions() -> Iterator[Any]:
    for name, members in STAND_INS.items():
        for member in members:
            if isinstance(member, type):
                for method in ("__init__", "plan", "run"):
                    path = f"{member.__name__}.{method}"
                    yield pytest.param(name, path, getattr(member, method), id=f"{name}.{path}")
            else:
                yield pytest.param(name, member.__name__, member, id=f"{name}.{member.__name__}")


@pytest.mark.parametrize(("name", "path", "stand_in"), list(functions()))
@pytest.mark.filterwarnings("ignore")  # what a package says while it is imported is its own
def test_a_stand_in_has_the_parameters_of_the_real_function(
    name: str, path: str, stand_in: Callable[..., object]
) -> None:
    """In their order where they may be given by place; every one that has no default is given."""
    try:
        package = importlib.import_module(name)
    except (ImportError, OSError) as error:
        pytest.skip(f"{name} cannot be imported: {error}")
    real = functools.reduce(getattr, path.split("."), package)
    ours = inspect.signature(stand_in).parameters
    theirs = inspect.signature(real).parameters
    placed = [one.name for one in ours.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert list(theirs)[: len(placed)] == placed
    assert ours.keys() <= theirs.keys()
    needed = {
        one.name
        for one in theirs.values()
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    }
    assert needed <= ours.keys()
