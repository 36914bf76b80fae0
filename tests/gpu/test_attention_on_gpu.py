"""What only a GPU shows and no gate covers: `pytest -m gpu` on a GPU host with the library built.

The gates of phases 1, 2, 4 and 5 judge the kernel itself; `kd phase run` runs them.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kdtree_engine.attention import tree_verify_attention
from kdtree_engine.library import asked_body, built_in_tuning, kernels
from kdtree_engine.tuning import BUILT_IN, architecture_of, choice, table_of
from phases.attention_cases import AttentionCase, AttentionInputs, make_inputs
from phases.candidates import naive_kernel
from phases.regimes import problem_with

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
CASE = AttentionCase("ragged", (9, 3, 1), (300, 21, 0))


@pytest.fixture
def inputs() -> AttentionInputs:
    return make_inputs(
        CASE,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
        generator=torch.Generator().manual_seed(1),
    )


def test_a_slot_outside_the_pool_is_named_where_checks_are_wanted(
    inputs: AttentionInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert inputs.kv_indices is not None
    inputs.kv_indices[310] = 99_999
    monkeypatch.setenv("KDTREE_CHECK", "1")
    with pytest.raises(ValueError, match=r"kv_indices: .*slot 99999 at index 310, request 1"):
        tree_verify_attention(*inputs.tensors(), sm_scale=CASE.sm_scale)


def test_checks_leave_a_capture_alone(
    inputs: AttentionInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDTREE_CHECK", "1")
    eager = tree_verify_attention(*inputs.tensors(), sm_scale=CASE.sm_scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = tree_verify_attention(*inputs.tensors(), sm_scale=CASE.sm_scale)
    graph.replay()
    torch.cuda.synchronize()
    assert isinstance(eager, torch.Tensor)
    assert isinstance(captured, torch.Tensor)
    assert torch.equal(captured, eager)


def test_float32_is_refused_on_a_gpu(inputs: AttentionInputs) -> None:
    inputs.q, inputs.kv_pool = inputs.q.float(), inputs.kv_pool.float()
    with pytest.raises(TypeError, match="q: expected dtype bfloat16 or float16, got float32"):
        tree_verify_attention(*inputs.tensors(), sm_scale=CASE.sm_scale)


def test_the_naive_kernel_is_right_too(inputs: AttentionInputs) -> None:
    out = naive_kernel(*inputs.tensors(), sm_scale=CASE.sm_scale)
    assert problem_with(inputs.tensors(), out, CASE.sm_scale) is None  # type: ignore[arg-type]


def test_it_follows_the_current_stream(inputs: AttentionInputs) -> None:
    """A long wait on another stream must hold the call back, not be overtaken by it."""
    wanted = tree_verify_attention(*inputs.tensors(), sm_scale=CASE.sm_scale)
    right = inputs.q.clone()
    inputs.q.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        inputs.q.copy_(right)
        found = tree_verify_attention(*inputs.tensors(), sm_scale=CASE.sm_scale)
    stream.synchronize()
    assert isinstance(wanted, torch.Tensor)
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, wanted)


def test_every_entry_of_this_gpus_table_is_right(inputs: AttentionInputs) -> None:
    """Forced one after another, those of the body that is not taken included."""
    table = table_of(architecture_of(torch.cuda.get_device_capability()))
    if table is None:
        pytest.skip("no table for this architecture")
    library = kernels()
    for _, entry in table.everything():
        library.set_tuning(*dataclasses.astuple(entry.configuration))
        try:
            out = tree_verify_attention(*inputs.tensors(), sm_scale=CASE.sm_scale)
        finally:
            library.set_tuning(*built_in_tuning())
        assert isinstance(out, torch.Tensor)
        problem = problem_with(inputs.tensors(), out, CASE.sm_scale)  # type: ignore[arg-type]
        assert problem is None, entry.configuration


def test_what_is_launched_is_what_the_table_says(inputs: AttentionInputs) -> None:
    def launched(*numbers: int) -> list[str]:
        """Names of the kernels of a call; the attention's has its tile in it."""
        library.set_tuning(*numbers)
        cuda = torch.profiler.ProfilerActivity.CUDA
        try:
            with torch.profiler.profile(activities=[cuda], acc_events=True) as profile:
                tree_verify_attention(
                    *inputs.tensors(), sm_scale=CASE.sm_scale, max_nodes=max(CASE.trees)
                )
                torch.cuda.synchronize()
        finally:
            library.set_tuning(*built_in_tuning())
        return [event.name for event in profile.events() if "kdtree" in event.name]

    library = kernels()
    rows, batch = max(CASE.trees) * inputs.q.shape[1], len(CASE.trees)
    architecture = architecture_of(torch.cuda.get_device_capability())
    said = choice(architecture, rows, batch, deterministic=False, body=asked_body())
    if said == BUILT_IN:
        pytest.skip("no table for this architecture and body")
    by_table = launched(*built_in_tuning())
    assert by_table
    assert by_table == launched(*dataclasses.astuple(said))
    other = 16 if said.row_tile != 16 else 24
    assert by_table != launched(other, said.block_tokens, 0)
