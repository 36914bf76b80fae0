"""SGLang's plain decode as a peer: what it is given, by a stand-in with its signature."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from phases import decode_peers
from phases.decode_peers import DECODE_PEERS
from phases.peers import lack, make_inputs, problem_with_peer
from phases.regimes import Regime

CPU = torch.device("cpu")
REGIME = Regime(batch=3, heads=8, nodes=1, prefix=40)
(PEER,) = DECODE_PEERS


def decode_attention_fwd(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    o: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    attn_logits: torch.Tensor,
    attn_lse: torch.Tensor,
    num_kv_splits: torch.Tensor,
    max_kv_splits: int,
    sm_scale: float,
    k_scale: float,
    v_scale: float,
    *,
    has_mla: bool = False,
    use_pdl: bool = False,
) -> None:
    """Of sglang 0.5.17 and 0.5.23: the new token is the last of its request's."""
    batch, heads, _ = q.shape
    assert k_buffer.shape[1:] == (1, 576)
    assert v_buffer.shape[1:] == (1, 512)
    assert attn_logits.shape == (batch, heads, max_kv_splits, 512)
    assert attn_lse.shape == attn_logits.shape[:3]
    assert num_kv_splits.tolist() == [5] * batch
    assert (k_scale, v_scale, has_mla, use_pdl) == (1.0, 1.0, True, False)
    for request in range(batch):
        slots = kv_indices[int(kv_indptr[request]) : int(kv_indptr[request + 1])]
        rows = k_buffer[slots, 0].double()
        weights = torch.softmax(q[request].double() @ rows.T * sm_scale, dim=-1)
        o[request] = (weights @ rows[:, :512]).to(o.dtype)


class Counted:
    """`get_num_kv_splits_triton`, launched on one block: five splits for each request."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert grid == (1,)

        def launch(splits: torch.Tensor, lengths: torch.Tensor, *sizes: int, **more: int) -> None:
            assert lengths.tolist() == [REGIME.prefix + 1] * REGIME.batch
            assert sizes == (3, 1, 8, 1, 8, 1)
            assert more == {"MAX_NUM_SEQ": 256}
            splits.fill_(5)

        return launch


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = "sglang.kernels.ops.attention"
    members = {
        "decode_attention": {"decode_attention_fwd": decode_attention_fwd},
        "metadata": {"get_num_kv_splits_triton": Counted()},
    }
    parts = parent.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name, content in members.items():
        module = types.ModuleType(f"{parent}.{name}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("stand_in")
def test_what_it_is_given_gives_the_oracles_answer() -> None:
    assert lack(PEER) is None
    operation = PEER.make(PEER.load(), REGIME)
    for seed in (1, 2):
        drawn = make_inputs(PEER, REGIME, seed, device=CPU)
        assert problem_with_peer(PEER, REGIME, drawn, (operation(*drawn),)) is None


def test_a_tree_is_no_plain_decode() -> None:
    with pytest.raises(ValueError, match="one node a request, got B=1 H=8 T=9 L=40"):
        PEER.make(None, Regime(1, 8, 9, 40))


@pytest.mark.parametrize(("processors", "most"), [(1, 8), (82, 128), (132, 256), (188, 256)])
def test_splits_are_bounded_as_by_the_backend(processors: int, most: int) -> None:
    assert decode_peers._most_splits(processors) == most
