"""Stand-ins for what SGLang has only as CUDA code: where it has a Triton body too, that one.

Read from SGLang's hook registry, so that its files stay as they are. Two compiled packages that
cannot load here are replaced by modules: `vllm._custom_ops`, which the rotary embedding imports on
an unknown device, and `sgl_kernel.speculative`.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

import torch

OPS = "sglang.kernels.ops.speculative"


def install() -> None:
    """Before SGLang imports a model. Safe to call in every process of the server."""
    _module("vllm")
    _module("vllm._custom_ops", rotary_embedding=rotary_embedding)
    _module("sgl_kernel")
    _module("sgl_kernel.speculative", reconstruct_indices_from_tree_mask=_reconstruct)

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, stand_in in (
        (f"{OPS}.cache_locs.assign_extend_cache_locs_func", assign_extend_cache_locs),
        (f"{OPS}.spec_tree.build_tree_kernel_efficient_func", build_tree),
        (f"{OPS}.spec_tree.verify_tree_greedy_func", verify_tree_greedy),
        # Verifying a sampled request needs a CUDA kernel; SGLang's own CPU engine is greedy too.
        ("sglang.srt.speculative.eagle_utils._verify_uses_greedy", lambda **_: True),
    ):
        HookRegistry.register(target, stand_in, HookType.REPLACE)


def assign_extend_cache_locs(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> torch.Tensor:
    """The slots of columns start..end of each request's row of `req_to_token`, end to end."""
    from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs as body
    from sglang.srt.utils import next_power_of_2

    out = torch.empty(batch_size * draft_token_num, dtype=torch.int64, device=device)
    body[(batch_size,)](
        req_pool_indices,
        req_to_token,
        start_offset,
        end_offset,
        out,
        req_to_token.shape[1],
        next_power_of_2(batch_size),
    )
    return out


def build_tree(*arguments: Any) -> None:
    """A draft model's tree: mask, positions and links, which SGLang's Triton body writes in place.

    The last argument is the form of the mask, T x T bytes a request or T x (L + T); the buffer is
    SGLang's, and may have room for more requests than there are.
    """
    from sglang.kernels.ops.speculative.spec_tree import sgl_build_tree_kernel_triton as body

    body(*arguments)


def verify_tree_greedy(**tensors: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The longest path whose tokens are the target's, which SGLang's Triton body finds."""
    from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_triton

    from kd_sglang_cpu import observe

    tensors.pop("topk", None)
    verify_tree_greedy_triton(**tensors)
    observe.accepted(tensors["accept_index"], tensors["accept_token_num"], tensors["candidates"])
    return tensors["predicts"], tensors["accept_index"], tensors["accept_token_num"]


def _reconstruct(*arguments: Any) -> None:
    from sglang.kernels.ops.speculative.reconstruct_tree import (
        reconstruct_indices_from_tree_mask_triton as body,
    )

    body(*arguments)


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """Turn the first values of each head by the position's angles, in place.

    positions: [tokens]; query, key: [tokens, heads * head_size] or [tokens, heads, head_size];
    cos_sin_cache: [positions, rotated], the cosines of the pairs and then their sines.
    is_neox: value i is paired with i + rotated / 2; otherwise neighbours are pairs.
    """
    cosine, sine = cos_sin_cache[positions.flatten()].unsqueeze(1).chunk(2, dim=-1)
    rotated = cos_sin_cache.shape[-1]
    for heads in filter(lambda given: given is not None, (query, key)):
        part = heads.view(positions.numel(), -1, head_size)[..., :rotated]
        shape = (2, rotated // 2) if is_neox else (rotated // 2, 2)
        pairs = part.reshape(*part.shape[:2], *shape)
        first, second = pairs.unbind(2 if is_neox else 3)
        turned = (first * cosine - second * sine, second * cosine + first * sine)
        part.copy_(torch.stack(turned, dim=2 if is_neox else 3).flatten(2))


def _module(name: str, **contents: Any) -> None:
    """A module of this name in sys.modules, unless the real one is there."""
    if name in sys.modules:
        return
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=not contents)
    if not contents:
        module.__path__ = []
    vars(module).update(contents)
    sys.modules[name] = module
    above, _, last = name.rpartition(".")
    if above:
        setattr(sys.modules[above], last, module)
