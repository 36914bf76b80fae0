"""What is checked where a server makes the backend, and the one line that its log gets.

A server that was asked for this backend and cannot have it stops: with another backend it would
answer, and its user would measure the wrong thing. What SGLang's Triton backend serves as well,
layer by layer, is left to it and named in the line.
"""

from __future__ import annotations

import collections
import logging
import os
from collections.abc import Mapping
from typing import Any

import torch

from kdtree_engine.arguments import HEAD_DIM, LATENT_DIM, MAX_NODES
from kdtree_engine.errors import ConfigError
from kdtree_engine.sglang_ext import compat
from kdtree_engine.sglang_ext.defrag import gauges, relocating, service
from kdtree_engine.sglang_ext.kv_moves import can_move
from kdtree_engine.sglang_ext.plugin import NAME
from kdtree_engine.sglang_ext.settings import Settings, read_settings

__all__ = ["layer_reason", "made", "refusals"]

_log = logging.getLogger(__name__)
_DTYPES = {"cuda": (torch.bfloat16, torch.float16), "cpu": (torch.bfloat16, torch.float32)}


def made(runner: Any) -> Any:
    """The backend for `runner`, a ModelRunner whose KV pool exists, after every check.

    A draft model gets SGLang's Triton backend: the kernel verifies, it does not draft. So does a
    server whose KDTREE_ variables switch everything off.

    Raises MissingError for an unsupported SGLang, a name that it lacks, or an absent kernel
    library; ConfigError for a wrong variable, or a model that cannot be served, with the reason.
    """
    version = compat.sglang_version()
    compat.require_supported(version)
    compat.require_names(version)
    settings, warnings = read_settings(os.environ)
    for warning in warnings:
        _log.warning("kdtree_mla: %s", warning)

    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    if runner.is_draft_worker:
        _log.info("kdtree_mla: the draft model runs on SGLang's Triton backend")
        return TritonAttnBackend(runner)
    reasons = refusals(version, runner)
    if reasons:
        raise ConfigError(
            f"kdtree_mla: this server cannot run on it: {'; '.join(reasons)}",
            remedy="change that, or choose --attention-backend triton",
        )
    library = _library(runner)
    if settings.tier0 and (problem := service.problem(runner.token_to_kv_pool_allocator)):
        raise ConfigError(
            f"KDTREE_DEFRAG={_tier(settings)}: {problem}",
            remedy="change that, or unset KDTREE_DEFRAG",
        )
    if settings.tier1 and (problem := relocating.problem()):
        raise ConfigError(
            f"KDTREE_DEFRAG=tier1: {problem}", remedy="change that, or set KDTREE_DEFRAG=tier0"
        )
    if settings.gauges:
        gauges.export()
    if settings.stock:
        _log.warning("kdtree_mla: every KDTREE_ variable is off: this is SGLang's Triton backend")
        return TritonAttnBackend(runner)

    from kdtree_engine.sglang_ext.backend import KdtreeMlaBackend

    left = _left_to_triton(runner)
    qlen = _qlen(settings, left)
    if qlen is not None:
        compat.use_qlen_masks(qlen)
    if _verifies_chains():
        compat.capture_blocks(masks=False)
    ends = _wants_ends(settings) and compat.read_prompt_ends(version)
    at_once = _moves_at_once(settings, runner)
    if settings.kv_indices:
        _load_tree_kernels(runner)
    backend = KdtreeMlaBackend(runner, settings, version, qlen=qlen is not None, alone=not left)
    if compat.renames_slots(version, backend):
        raise ConfigError(
            "kdtree_mla: the unified KV pool gives its rows other numbers than out_cache_loc has",
            remedy="start without the unified pool, or choose --attention-backend triton",
        )
    device = str(runner.device)
    line = _line(version, library, settings, left, device, qlen is not None, ends, at_once)
    _log.info("%s", line)
    return backend


def refusals(version: str, runner: Any) -> list[str]:
    """Why this server cannot run on the backend: what, and what was expected. Empty: it can."""
    from sglang.srt.configs.model_config import AttentionArch, is_deepseek_dsa
    from sglang.srt.runtime_context import get_parallel, get_spec

    config = runner.model_config
    if config.attention_arch != AttentionArch.MLA:
        return [f"the model's attention is {config.attention_arch.name}, expected MLA"]
    reasons = []
    widths = (config.kv_lora_rank, config.qk_rope_head_dim)
    if widths != (LATENT_DIM, HEAD_DIM - LATENT_DIM):
        reasons.append(
            f"kv_lora_rank {widths[0]} and qk_rope_head_dim {widths[1]}, expected "
            f"{LATENT_DIM} and {HEAD_DIM - LATENT_DIM}"
        )
    if is_deepseek_dsa(config.hf_config):
        reasons.append("the model's attention is sparse (DSA), expected dense MLA")
    if config.is_encoder_decoder:
        reasons.append("the model is an encoder-decoder, expected a decoder")
    dtype, allowed = runner.kv_cache_dtype, _DTYPES.get(str(runner.device), ())
    if dtype not in allowed or dtype != runner.dtype:
        reasons.append(
            f"the KV cache is {_short(dtype)} for a model in {_short(runner.dtype)} on "
            f"{runner.device}, expected the same of "
            f"{' or '.join(map(_short, allowed)) or 'cuda'} for both"
        )
    if get_parallel().attn_dcp_size > 1:
        reasons.append(
            f"decode context parallelism of {get_parallel().attn_dcp_size}, expected none"
        )
    verifier = _verifier(version, runner)
    if verifier not in (None, NAME):
        reasons.append(
            f"trees would be verified by {verifier}, expected {NAME}: "
            "add --speculative-attention-mode decode"
        )
    nodes = get_spec().speculative_num_draft_tokens or 1
    if nodes > MAX_NODES:
        reasons.append(f"{nodes} draft tokens, expected at most {MAX_NODES}")
    if _dispatch_problem() is not None:
        reasons.append(f"SGLang {version} hands over MLA in another form: {_dispatch_problem()}")
    return reasons


def layer_reason(layer: Any) -> str | None:
    """Why a layer is left to SGLang's Triton backend, in a few words; None where the kernel runs.

    layer: a RadixAttention. Only fields of the layer are read, and no tensor.
    """
    from sglang.srt.layers.radix_attention import AttentionType

    if layer.tp_k_head_num != 1 or (layer.qk_head_dim, layer.v_head_dim) != (HEAD_DIM, LATENT_DIM):
        return "not absorbed MLA"
    if layer.logit_cap > 0:
        return "logit cap"
    if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
        return "sliding window"
    if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
        return "encoder attention"
    if layer.k_scale is not None or layer.v_scale is not None:
        return "scaled KV"
    if layer.xai_temperature_len is not None and layer.xai_temperature_len > 0:
        return "attention temperature"
    return None


def _verifier(version: str, runner: Any) -> str | None:
    """The backend that verifies trees where prefill and decode have one each; None: no trees."""
    from sglang.srt.runtime_context import get_spec

    if get_spec().speculative_algorithm is None:
        return None
    prefill, decode = compat.attention_backends(version, runner)
    return decode if get_spec().speculative_attention_mode == "decode" else prefill


def _dispatch_problem() -> str | None:
    """What would make q and k arrive in another form than concatenated rows of 576 values."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        handle_attention_triton,
    )
    from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS

    if NAME in FORWARD_ABSORB_CORE_ATTENTION_BACKENDS:
        return f"{NAME} is among FORWARD_ABSORB_CORE_ATTENTION_BACKENDS"
    if AttentionBackendRegistry.get_handler(NAME) is not handle_attention_triton:
        return f"{NAME} is not dispatched as triton is"
    return None


def _library(runner: Any) -> str:
    """What computes: the kernel library, which is loaded here and not in the first request."""
    if str(runner.device) == "cpu":
        return "CPU implementation (for tests, slow)"
    from kdtree_engine.library import kernels, library_path

    kernels()
    return str(library_path())


def _qlen(settings: Settings, left: Mapping[str, int]) -> str | None:
    """The algorithm whose masks shall have T x T bytes a request; None where they stay as they are.

    They stay where SGLang's Triton kernel verifies a layer too, as it reads them with a prefix.
    """
    from sglang.srt.runtime_context import get_spec

    algorithm = _algorithm(get_spec())
    wanted = settings.qlen_mask and settings.verify and not left
    return algorithm if wanted and algorithm in compat.QLEN_ALGORITHMS else None


def _verifies_chains() -> bool:
    """Whether the algorithm verifies chains of a drafter's block, and fills no mask."""
    from sglang.srt.runtime_context import get_spec

    return _algorithm(get_spec()) in compat.CHAIN_ALGORITHMS


def _wants_ends(settings: Settings) -> bool:
    """Whether an n-gram drafter is to read the ends of prompts alone, which drafts the same."""
    from sglang.srt.runtime_context import get_spec

    return settings.prompt_ends and settings.verify and _algorithm(get_spec()) == "NGRAM"


def _moves_at_once(settings: Settings, runner: Any) -> bool:
    """Whether accepted rows are moved in all layers at once, which is arranged here.

    Raises MissingError where the library that does it on a GPU is absent.
    """
    from sglang.srt.runtime_context import get_spec

    wanted = settings.kv_moves and settings.verify and can_move(runner.token_to_kv_pool)
    if not wanted or not compat.move_at_once(_algorithm(get_spec())):
        return False
    _load_tree_kernels(runner)
    return True


def _load_tree_kernels(runner: Any) -> None:
    """Here and not in the first request. Raises MissingError where a GPU has no library."""
    if str(runner.device) != "cpu":
        from kdtree_engine.ops.library import tree_kernels

        tree_kernels()


def _left_to_triton(runner: Any) -> collections.Counter[str]:
    """How many attention layers stay with SGLang's Triton backend, by the reason."""
    handed: collections.Counter[str] = collections.Counter()
    model = getattr(runner, "model", None)  # SGLang's conformance kit has none
    for module in () if model is None else model.modules():
        if type(module).__name__ == "RadixAttention":
            reason = layer_reason(module)
            if reason not in (None, "not absorbed MLA"):
                handed[str(reason)] += 1
    return handed


def _line(
    version: str,
    library: str,
    settings: Settings,
    handed: Mapping[str, int],
    device: str,
    qlen: bool,
    ends: bool,
    at_once: bool,
) -> str:
    if device == "cuda":
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        device = f"{torch.cuda.get_device_name()} (compute capability {capability})"
    left = ", ".join(f"{count} layers ({reason})" for reason, count in sorted(handed.items()))
    return (
        f"kdtree_mla: SGLang {version}; {device}; library: {library}; "
        f"verify: {_who(settings.verify)}; decode: {_who(settings.decode)}; "
        f"masks: {'T x T' if qlen else 'stock'}; "
        f"n-gram prompts: {'ends' if ends else 'stock'}; "
        f"accepted rows: {'one launch' if at_once else 'stock'}; "
        f"slots: {'one launch' if settings.kv_indices else 'stock'}; "
        f"graph buffers: {'max_batch x max_context' if settings.graph_buffers else 'stock'}; "
        f"defrag: {_tier(settings)}; left to triton: {left or 'no layer'}"
    )


def _tier(settings: Settings) -> str:
    return "tier1" if settings.tier1 else "tier0" if settings.tier0 else "off"


def _who(ours: bool) -> str:
    return "kernel" if ours else "triton"


def _algorithm(spec: Any) -> str:
    return str(spec.speculative_algorithm)


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
