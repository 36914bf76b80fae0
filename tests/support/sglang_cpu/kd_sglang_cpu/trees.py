"""The trees of a draft model, in each form of mask that SGLang asks for, without a server.

    python -m kd_sglang_cpu.trees      prints one JSON object

For each form: what differs from a plain walk up the tree; nothing where the stand-in is right.
"""

from __future__ import annotations

import json
import random
import types
from typing import Any

import torch

_TOP_K, _STEPS, _NODES = 3, 3, 9
_LENGTHS = (4, 1, 17)


def drawn(draw: random.Random) -> tuple[list[int], list[int]]:
    """What a draft of three steps hands over: parents of groups of candidates, and its choice.

    Candidate c hangs below candidate parents[c // _TOP_K], or below the root where that is -1.
    The chosen ones are ascending, and none is chosen without those above it.
    """
    kept = sorted(draw.sample(range(_TOP_K, _TOP_K + _TOP_K**2), _TOP_K))
    parents = [-1, *range(_TOP_K), *kept]
    chosen: set[int] = set()
    while len(chosen) < _NODES - 1:
        below = [
            candidate
            for candidate in range(len(parents) * _TOP_K)
            if candidate not in chosen and parents[candidate // _TOP_K] in chosen | {-1}
        ]
        chosen.add(draw.choice(below))
    return parents, sorted(chosen)


def plain(parents: list[int], chosen: list[int]) -> list[int]:
    """The parent of each node, whose first is the root: -1."""
    above = [parents[candidate // _TOP_K] for candidate in chosen]
    return [-1, *(0 if candidate < 0 else 1 + chosen.index(candidate) for candidate in above)]


def differences(
    parents: list[int], length: int, mask: Any, positions: Any, links: Any
) -> list[str]:
    """What is wrong with one request's tree. mask: [T, L + T] or [T, T]; links: next, sibling."""
    wrong = []
    paths = []
    for node in range(_NODES):
        path = [node]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        paths.append(path)
    seen = torch.zeros(_NODES, _NODES, dtype=torch.bool)
    for node, path in enumerate(paths):
        seen[node, path] = True
    if not torch.equal(mask[:, -_NODES:].bool(), seen) or not mask[:, :-_NODES].all():
        wrong.append("mask")
    if positions.tolist() != [length + len(path) - 1 for path in paths]:
        wrong.append("positions")
    for node in range(_NODES):
        children, child = [], int(links[0][node])
        while child >= 0 and len(children) < _NODES:
            children.append(child)
            child = int(links[1][child])
        if children != [below for below in range(_NODES) if parents[below] == node]:
            wrong.append(f"children of {node}")
    return wrong


def built(mode: Any, buffer: torch.Tensor | None, *, other_tree: bool = False) -> list[str]:
    """What is wrong with the trees that SGLang builds, of three requests at once."""
    from sglang.srt.speculative.eagle_utils import TreeMaskMode, build_tree_kernel_efficient

    draw = random.Random(7)
    trees = [drawn(draw) for _ in _LENGTHS]
    lengths = torch.tensor(_LENGTHS)
    mask, positions, _, *links, _ = build_tree_kernel_efficient(
        torch.zeros(len(trees), dtype=torch.int64),
        torch.tensor([parents for parents, _ in trees]),
        torch.tensor([chosen for _, chosen in trees]),
        torch.zeros(len(trees), _NODES - 1, dtype=torch.int64),
        lengths,
        sum(_LENGTHS),
        _TOP_K,
        _STEPS,
        _NODES,
        mode,
        buffer,
    )
    if buffer is not None and mask.data_ptr() != buffer.data_ptr():
        return ["another buffer"]
    wrong, start = [], 0
    for number, (length, tree) in enumerate(zip(_LENGTHS, trees, strict=True)):
        width = _NODES + (length if mode == TreeMaskMode.FULL_MASK else 0)
        own = mask[start : start + _NODES * width].view(_NODES, width)
        start += _NODES * width
        expected = plain(*(trees[number - 1] if other_tree else tree))
        nodes = slice(number * _NODES, (number + 1) * _NODES)
        wrong += differences(
            expected, length, own, positions[nodes], [link[number] for link in links]
        )
    return wrong


def captured(prefix: int | None = None) -> list[str]:
    """What fails before a graph for trees is captured, with the mask that SGLang has then.

    prefix: of the plugin's buffer, where it shall have another one than the backend gives it.
    """
    from sglang.srt.model_executor.runner.base_runner import _allocate_decode_buffers
    from sglang.srt.runtime_context import get_context

    from kd_sglang_cpu.refused import runner_of_the_kit
    from kdtree_engine.sglang_ext import compat, start_up

    batch = 1  # the most that the kit's runner has room for
    runner = runner_of_the_kit()  # before the override, as it publishes settings of its own
    with get_context().override_server_args(
        speculative_algorithm="STANDALONE", speculative_num_draft_tokens=_NODES
    ):
        backend = start_up.made(runner)
        backend.num_draft_tokens = _NODES  # the kit's runner has no server's settings
        backend.init_cuda_graph_state(batch, batch * _NODES)
    # The kernel decodes, so SGLang's own has no partial results; outside of graphs it is as before.
    if backend.cuda_graph_attn_logits.shape[2] != 1 or backend.max_kv_splits < 8:
        return [f"splits: {backend.cuda_graph_attn_logits.shape[2]}, {backend.max_kv_splits}"]
    if prefix is not None:
        backend._verify_mask = compat.qlen_mask(batch, _NODES, "cpu", prefix=prefix)
    given = _allocate_decode_buffers(
        device=torch.device("cpu"),
        max_bs=batch,
        max_num_token=batch * _NODES,
        hidden_size=8,
        vocab_size=8,
        dtype=torch.float32,
        is_encoder_decoder=False,
        require_mlp_tp_gather=False,
        seq_len_fill_value=backend.get_cuda_graph_seq_len_fill_value(),
        encoder_len_fill_value=0,
        num_tokens_per_req=_NODES,
        cache_loc_dtype=torch.int64,
        enable_mamba_track=False,
    ).custom_mask
    tree = types.SimpleNamespace(custom_mask=given, num_tokens_per_req=_NODES)
    filled: list[Any] = []  # the slots are not what is tried, but that they are asked for
    backend._fill_kv_indptr_and_indices = lambda *given: filled.append(given)
    slots = torch.ones(batch, dtype=torch.int64)
    try:
        backend._update_target_verify_buffers(None, batch, slots, tree, slots)
    except RuntimeError as error:
        return [str(error)]
    if [one[-1] is backend.cuda_graph_kv_indices for one in filled] != [True]:
        return ["the slots of the graph are not refilled"]
    if not torch.equal(backend._verify_mask.buffer[: len(given)], given.to(torch.uint8)):
        return ["the mask of the graph is not refilled"]
    # What a graph reads instead of the offsets that are not refilled.
    wide = types.SimpleNamespace(max_extend_len=_NODES, kv_indptr=torch.zeros(batch + 1))
    found = [steps.tolist() for steps in backend._steps(wide)]
    expected = [[0, _NODES], [0, _NODES * _NODES]]
    return [] if found == expected else [f"offsets: expected {expected}, got {found}"]


def main() -> dict[str, list[str]]:
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    from kd_sglang_cpu import standins

    publish(
        ServerArgs(model_path="none", device="cpu", attention_backend="triton"),
        role="scheduler",
        ranks=SpawnRanks(world_rank=0),
    )
    standins.install()
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.speculative.eagle_utils import TreeMaskMode

    from kdtree_engine.sglang_ext import compat

    HookRegistry.apply_hooks()
    short, full = TreeMaskMode.QLEN_ONLY, TreeMaskMode.FULL_MASK
    room = len(_LENGTHS) + 2  # as of graphs for more requests than there are
    most = room * _NODES * (max(_LENGTHS) + _NODES)
    return {
        "T x T": built(short, None),
        "T x T in the plugin's buffer": built(short, compat.qlen_mask(room, _NODES, "cpu").buffer),
        "full": built(full, None),
        "full in a buffer": built(full, torch.zeros(most, dtype=torch.uint8)),
        "another tree": built(short, None, other_tree=True),
        "a graph": captured(),
        "a graph without room": captured(0),
    }


if __name__ == "__main__":
    print(json.dumps(main()))
