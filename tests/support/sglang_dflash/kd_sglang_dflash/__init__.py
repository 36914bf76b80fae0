"""Lets SGLang 0.5.23's own DFLASH run without a GPU, beside what `sglang_cpu` stands in for.

DFLASH asks three things of a GPU: its arguments are refused on a CPU unless the platform comes from
a plugin; it names the stream that reads a tensor, which a CPU's tensors refuse; and every model
gets embeddings in bfloat16, which a float32 model cannot multiply. The last costs the draft some
bits; what is verified is the target's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.arg_groups.speculative_hook._handle_dflash", _accept, HookType.AROUND
    )
    HookRegistry.register(
        "sglang.srt.models.dflash.DFlashDraftModel.forward", _in_its_dtype, HookType.AROUND
    )
    torch.Tensor.record_stream = lambda self, stream: None


class _Platform:
    """What a platform of a plugin would say."""

    def is_out_of_tree(self) -> bool:
        return True

    def supports_speculative_algorithm(self, _: str) -> bool:
        return True

    def supports_speculative_draft_attention_backend(self, _: str, backend: str) -> bool:
        return backend == "triton"

    def get_default_speculative_draft_attention_backend(self, _: str) -> str:
        return "triton"


def _accept(original: Callable[[Any], None], server_args: Any) -> None:
    from sglang.srt.arg_groups import speculative_hook

    before = speculative_hook.current_platform
    speculative_hook.current_platform = _Platform()
    try:
        original(server_args)
    finally:
        speculative_hook.current_platform = before


def _in_its_dtype(
    original: Callable[..., Any],
    model: Any,
    *arguments: Any,
    input_embeds: torch.Tensor,
    **others: Any,
) -> Any:
    embeddings = input_embeds.to(model.norm.weight.dtype)
    return original(model, *arguments, input_embeds=embeddings, **others)
