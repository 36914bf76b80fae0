"""Every difference between the SGLang releases that are supported, and what each must offer.

Releases are named and not ranged: the plugin relies on names inside SGLang that no release
promises to keep, and on what they mean. A release that nobody has read is refused.

    difference                           0.5.17                        0.5.23
    backend names for the command line   sglang.srt.server_args        sglang.srt.arg_groups.choices
    where a KV row is written            KVWriteLoc(loc, swa, full)    KVWriteLoc.for_batch(batch)
    a pool whose slots are renamed       backend._translate_kv_loc     kv_index_translator
    backends of prefill and decode       server_args, on demand        fields of the runner
    the n-gram worker takes of a prompt  the whole, twice a step       its end
    slots of a draft block               as they are                   a plan numbers them anew
    what refills a verify graph's slots  the batch's fields            a plan beside them
    ranks of a drafter                   the target's                  a group of its own, at times
    slots reserved for a request         reserved_seq_lens_cpu         nxt_kv_lens_cpu
    log-probabilities of a tree          compute_spec_v2_logprobs      compute_spec_logprobs
    a step's other outputs               none                          experts, sparse indices
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from kdtree_engine.errors import MissingError
from kdtree_engine.sglang_ext.prompt_ends import given_ends, is_given_ends

__all__ = [
    "SUPPORTED",
    "add_flags",
    "around_allocator",
    "attention_backends",
    "can_register_algorithms",
    "capture_blocks",
    "draft_batch",
    "draft_on_triton",
    "draft_ranks",
    "draft_slots",
    "log_probs",
    "missing_names",
    "move_at_once",
    "qlen_mask",
    "read_prompt_ends",
    "refuse_requests",
    "register_backend",
    "renames_slots",
    "require_ddtree",
    "require_names",
    "require_supported",
    "reserved",
    "sglang_version",
    "slots_refill",
    "step_result",
    "use_qlen_masks",
    "verify_refill",
    "widen_request_rows",
    "write_location",
]

SUPPORTED = ("0.5.17", "0.5.23")

_CHOICES = {"0.5.17": "sglang.srt.server_args", "0.5.23": "sglang.srt.arg_groups.choices"}
_TRITON = "sglang.srt.layers.attention.triton_backend"
_HOOKS = "sglang.srt.plugins.hook_registry"
_DRAFT_BACKENDS = "sglang.srt.speculative.draft_utils:DraftBackendFactory._create_backend"
_ALLOCATOR = (
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
    "._build_token_to_kv_pool_allocator"
)
_NAMES = (
    "sglang.srt.layers.attention.attention_registry:register_attention_backend",
    f"{_TRITON}:TritonAttnBackend.forward_extend",
    f"{_TRITON}:TritonAttnBackend.forward_decode",
    f"{_TRITON}:TritonAttnBackend.init_cuda_graph_state",
    f"{_TRITON}:TritonAttnBackend.init_forward_metadata",
    f"{_TRITON}:TritonAttnBackend._fill_kv_indptr_and_indices",
    f"{_TRITON}:TritonAttnBackend._update_target_verify_buffers",
    f"{_TRITON}:ForwardMetadata",
    "sglang.srt.layers.radix_attention:RadixAttention",
    "sglang.srt.layers.radix_attention:AttentionType.DECODER",
    "sglang.srt.mem_cache.memory_pool:KVWriteLoc",
    "sglang.srt.mem_cache.memory_pool:MLATokenToKVPool",
    "sglang.srt.configs.model_config:AttentionArch.MLA",
    "sglang.srt.configs.model_config:is_deepseek_dsa",
    "sglang.srt.models.deepseek_common.attention_backend_handler"
    ":AttentionBackendRegistry.get_handler",
    "sglang.srt.models.deepseek_common.attention_backend_handler:handle_attention_triton",
    "sglang.srt.models.deepseek_common.utils:FORWARD_ABSORB_CORE_ATTENTION_BACKENDS",
    "sglang.srt.runtime_context:get_parallel",
    "sglang.srt.runtime_context:get_spec",
    f"{_HOOKS}:HookRegistry.register",
    f"{_HOOKS}:HookType.BEFORE",
    _DRAFT_BACKENDS,
)
_NAMES_OF = {
    "0.5.17": (
        "sglang.srt.server_args:add_attention_backend_choices",
        "sglang.srt.server_args:ServerArgs.get_attention_backends",
    ),
    "0.5.23": (
        "sglang.srt.arg_groups.choices:add_attention_backend_choices",
        "sglang.srt.mem_cache.memory_pool:KVWriteLoc.for_batch",
        "sglang.srt.mem_cache.kv_loc_plan:IdSpaceKind.FULL",
        "sglang.srt.mem_cache.kv_index_translator:KVIndexTranslator.space",
    ),
}
METADATA_FIELDS = (
    "custom_mask",
    "kv_indices",
    "kv_indptr",
    "mask_indptr",
    "max_extend_len",
    "qo_indptr",
)
"""Fields of the Triton backend's ForwardMetadata that the kernel is given."""


def sglang_version() -> str:
    """The version of the installed SGLang. Raises MissingError without one."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingError(
            "kdtree_mla: SGLang is not installed", remedy=f"pip install sglang=={SUPPORTED[-1]}"
        ) from error


def require_supported(version: str) -> None:
    """Raises MissingError for a release that nobody has read."""
    if version not in SUPPORTED:
        raise MissingError(
            f"kdtree_mla: SGLang {version} is installed, expected {' or '.join(SUPPORTED)}",
            remedy=f"pip install sglang=={SUPPORTED[-1]}, or choose --attention-backend triton",
        )


def missing_names(version: str) -> list[str]:
    """What this plugin needs of SGLang's modules and does not find, as `module:name`."""
    missing = [name for name in (*_NAMES, *_NAMES_OF[version]) if _found(name) is None]
    metadata = _found(f"{_TRITON}:ForwardMetadata")
    if metadata is not None:
        fields = getattr(metadata, "__dataclass_fields__", {})
        missing += [
            f"{_TRITON}:ForwardMetadata.{field}" for field in METADATA_FIELDS if field not in fields
        ]
    return missing


def require_names(version: str) -> None:
    """Raises MissingError that lists what SGLang lacks."""
    missing = missing_names(version)
    if missing:
        raise MissingError(
            f"kdtree_mla: this SGLang {version} lacks {', '.join(missing)}",
            remedy="reinstall the released package, or choose --attention-backend triton",
        )


def register_backend(name: str, version: str, factory: Callable[[Any], Any]) -> None:
    """Make `name` a choice of the command line, and `factory(runner)` what makes the backend.

    An unknown release is tried with the homes of each known one, newest first, so that the
    factory can refuse in words of its own. Raises MissingError where none of them has both names.
    """
    registry = "sglang.srt.layers.attention.attention_registry:register_attention_backend"
    homes = [_CHOICES[version]] if version in _CHOICES else list(reversed(_CHOICES.values()))
    wanted = [f"{home}:add_attention_backend_choices" for home in homes]
    add_choices = next(filter(None, map(_found, wanted)), None)
    register = _found(registry)
    if add_choices is None or register is None:
        lacking = [wanted[0]] * (add_choices is None) + [registry] * (register is None)
        raise MissingError(
            f"kdtree_mla: this SGLang {version} lacks {', '.join(lacking)}",
            remedy=f"pip install sglang=={SUPPORTED[-1]}, or choose --attention-backend triton",
        )
    add_choices([name])
    register(name)(factory)


def draft_on_triton(name: str) -> None:
    """Have the draft model of a server on backend `name` draft with SGLang's Triton backends.

    A draft of several steps has backends of its own, which SGLang makes by the server's backend:
    one that it does not know stops the server. Without a registry of hooks nothing is done here,
    as the server stops where the backend is made.
    """
    register = _found(f"{_HOOKS}:HookRegistry.register")
    before = _found(f"{_HOOKS}:HookType.BEFORE")
    if register is None or before is None:
        return

    def as_triton(_: Any, __: str, backends: dict[str, Any], *___: Any, **____: Any) -> None:
        backends.setdefault(name, backends["triton"])

    register(_DRAFT_BACKENDS.replace(":", "."), as_triton, before)


def around_allocator(hook: Callable[..., Any]) -> None:
    """Have `hook(stock, configurator, **arguments)` make what allocates the slots of a KV pool.

    Raises MissingError without a registry of hooks. Where SGLang lacks the function it says so in
    its log and goes on: whoever needs the hook must look at the allocator.
    """
    register = _found(f"{_HOOKS}:HookRegistry.register")
    around = _found(f"{_HOOKS}:HookType.AROUND")
    if register is None or around is None:
        raise MissingError(
            f"KDTREE_DEFRAG needs {_HOOKS}:HookRegistry, which this SGLang lacks",
            remedy="unset KDTREE_DEFRAG",
        )
    register(_ALLOCATOR, hook, around)


def write_location(version: str, forward_batch: Any, metadata: Any) -> Any:
    """Where the KV rows of this batch's tokens are stored, as `set_kv_buffer` takes it."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    if version == "0.5.17":
        return KVWriteLoc(
            forward_batch.out_cache_loc,
            metadata.swa_out_cache_loc,
            full_loc=metadata.out_cache_loc_full_physical,
        )
    return KVWriteLoc.for_batch(forward_batch, swa_loc=metadata.swa_out_cache_loc)


def verify_refill(version: str, given: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
    """What `_fill_kv_indptr_and_indices` takes before its buffer, and the batch's `spec_info`.

    given: the arguments of `_update_target_verify_buffers`, which refills what a graph reads.
    """
    if version == "0.5.17":
        requests, lengths, rows, spec_info = given
        return (requests, lengths, rows), spec_info
    plan, requests, lengths, spec_info, rows = given
    return (plan, requests, lengths, rows), spec_info


def slots_refill(version: str, given: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """Requests' rows of `req_to_token`, their lengths, and the buffers of slots and of offsets.

    given, named: the arguments of `_fill_kv_indptr_and_indices`; SGLang's diffusion models name
    their offsets. The last is None for the backend's own.
    """
    if version == "0.5.17":
        requests, lengths, rows, kv_indices = given
        return rows[:requests], lengths, kv_indices, None
    _, requests, lengths, rows, kv_indices, *own = given
    offsets = own[0] if own else named.get("kv_indptr")
    return rows[:requests], lengths, kv_indices, offsets


def renames_slots(version: str, backend: Any) -> bool:
    """Whether the pool's rows lie elsewhere than `out_cache_loc` says (SGLang's unified pool)."""
    if version == "0.5.17":
        return backend._translate_kv_loc is not None
    from sglang.srt.mem_cache.kv_loc_plan import IdSpaceKind

    space = backend.kv_index_translator.space(IdSpaceKind.FULL)
    return space.write is not None or space.read_v2p is not None


QLEN_ALGORITHMS = ("NGRAM", "EAGLE", "EAGLE3", "STANDALONE", "DDTREE")
"""Those whose masks SGLang can make as T x T, or in words that SGLang's own code has for it: NGRAM
by a constant of its worker, DDTREE by its own, the others by what the backend says of its mask."""
CHAIN_ALGORITHMS = ("DFLASH", "DSPARK")
"""Those that verify chains, without a mask."""
_NGRAM = "sglang.srt.speculative.ngram_worker"
_VERIFY_MASK = "sglang.srt.layers.attention.verify_mask:VerifyMask"
_QLEN_ONLY = "sglang.srt.speculative.eagle_utils:TreeMaskMode.QLEN_ONLY"


def use_qlen_masks(algorithm: str) -> None:
    """Have SGLang make tree masks without their prefix columns, in this process.

    Raises MissingError where this SGLang has no way to.
    """
    wanted = [_VERIFY_MASK, _QLEN_ONLY]
    if algorithm == "NGRAM":
        wanted.append(f"{_NGRAM}:USE_FULL_MASK")
    lacking = [name for name in wanted if _found(name) is None]
    if lacking:
        raise MissingError(
            f"kdtree_mla: T x T masks need {', '.join(lacking)}, which this SGLang lacks",
            remedy="set KDTREE_QLEN_MASK=0",
        )
    if algorithm == "NGRAM":
        worker: Any = importlib.import_module(_NGRAM)
        worker.USE_FULL_MASK = False


_MOVES = "move_accept_tokens_to_target_kvcache"
_MOVERS = {
    "NGRAM": _NGRAM,
    **dict.fromkeys(
        ("EAGLE", "EAGLE3", "STANDALONE"), "sglang.srt.speculative.eagle_worker_common"
    ),
}
"""The module whose worker moves accepted rows, by algorithm; DDTREE's own does it at once."""


def move_at_once(algorithm: str) -> bool:
    """Have an algorithm's worker move accepted rows in all layers by one launch, in this process.

    False: it is an algorithm whose rows are not moved by SGLang's function.
    Raises MissingError where this SGLang lacks the function.
    """
    if algorithm not in _MOVERS:
        return False
    # Every process of a server loads this module; the operations are for the one that moves rows.
    from kdtree_engine.sglang_ext.kv_moves import at_once, is_at_once

    home = _MOVERS[algorithm]
    stock = _found(f"{home}:{_MOVES}")
    if stock is None:
        raise MissingError(
            f"kdtree_mla: this SGLang lacks {home}:{_MOVES}", remedy="set KDTREE_KV_MOVES=0"
        )
    if not is_at_once(stock):  # a process may make several backends
        setattr(importlib.import_module(home), _MOVES, at_once(stock))
    return True


_PROMPT_READERS = ("_prepare_draft_tokens", "_update_ngram_corpus")


def read_prompt_ends(version: str) -> bool:
    """Have the n-gram worker read the ends of prompts alone, in this process. False: it does so.

    Raises MissingError where this SGLang's worker has not the methods that read prompts.
    """
    if version != "0.5.17":
        return False
    worker: Any = _found(f"{_NGRAM}:NGRAMWorker")
    lacking = [name for name in _PROMPT_READERS if not callable(getattr(worker, name, None))]
    if lacking:
        raise MissingError(
            f"kdtree_mla: the n-gram worker of SGLang {version} lacks {', '.join(lacking)}",
            remedy="set KDTREE_PROMPT_ENDS=0",
        )
    for name in _PROMPT_READERS:
        method = getattr(worker, name)
        if not is_given_ends(method):  # a process may make several backends
            setattr(worker, name, given_ends(method))
    return True


def qlen_mask(max_bs: int, nodes: int, device: Any, *, prefix: int = 0) -> Any:
    """SGLang's word for a mask of T x T bytes a request, with a buffer for `max_bs` requests.

    prefix: of the requests that graphs are captured with. SGLang copies their mask, T x (prefix +
    T) bytes a request whatever the form, to the start of this buffer.
    """
    import torch

    buffer = torch.zeros(max_bs * nodes * (prefix + nodes), dtype=torch.uint8, device=device)
    return _found(_VERIFY_MASK)(buffer=buffer, mode=_found(_QLEN_ONLY), max_bs=max_bs, is_read=True)


def attention_backends(version: str, runner: Any) -> tuple[str, str]:
    """The names of the backends that a runner prefills and decodes with."""
    if version == "0.5.17":
        prefill, decode = runner.server_args.get_attention_backends()
    else:
        prefill = runner.prefill_attention_backend_str
        decode = runner.decode_attention_backend_str
    return prefill, decode


_NEUTRAL = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}
_DFLASH = "sglang.srt.speculative"
_DDTREE_NAMES = (
    f"{_DFLASH}.spec_info:SpeculativeAlgorithm.register",
    f"{_DFLASH}.spec_registry:CustomSpecAlgo",
    f"{_DFLASH}.dflash_info:DFlashVerifyInput.prepare_for_verify",
    f"{_DFLASH}.dflash_utils:apply_dflash_verify_logits_adjustments",
    f"{_DFLASH}.dflash_utils:parse_dflash_draft_config",
    f"{_DFLASH}.dflash_utils:resolve_dflash_verify_mask_policy",
    f"{_DFLASH}.dflash_worker_v2:DFlashWorkerV2._append_target_hidden_to_draft_kv_by_loc",
    f"{_DFLASH}.dflash_worker_v2:DFlashWorkerV2._make_next_draft_input_decode",
    f"{_DFLASH}.dflash_worker_v2:DFlashWorkerV2._maybe_build_draft_sampler",
    f"{_DFLASH}.draft_worker_common:build_block_pos_offsets",
    f"{_DFLASH}.draft_worker_common:make_draft_block_spec_info",
    f"{_DFLASH}.spec_utils:GrammarTree.from_device",
    f"{_DFLASH}.spec_utils:build_grammar_vocab_mask",
    "sglang.srt.configs.hybrid_arch:mambaish_config",
    "sglang.srt.managers.overlap_utils:FutureMap",
    "sglang.srt.managers.utils:GenerationBatchResult",
    "sglang.srt.mem_cache.kv_cache_configurator:get_req_to_token_extra_context_len",
    "sglang.srt.model_executor.forward_batch_info:ForwardBatch",
)
_DDTREE_NAMES_OF = {
    "0.5.17": ("sglang.srt.layers.logprob_processor:compute_spec_v2_logprobs",),
    "0.5.23": (
        "sglang.srt.layers.logprob_processor:compute_spec_logprobs",
        "sglang.srt.mem_cache.kv_index_translator:KVIndexTranslator.plan",
        f"{_DFLASH}.spec_utils:draft_tp_context",
    ),
}


def can_register_algorithms() -> bool:
    """Whether this SGLang takes algorithms from outside; cheap, as every process asks it."""
    return all(_found(name) is not None for name in _DDTREE_NAMES[:2])


def require_ddtree(version: str) -> None:
    """Raises MissingError for an unread release, or one that lacks what DDTREE needs."""
    require_supported(version)
    wanted = (*_DDTREE_NAMES, *_DDTREE_NAMES_OF[version])
    missing = [name for name in wanted if _found(name) is None]
    if missing:
        raise MissingError(
            f"DDTREE: this SGLang {version} lacks {', '.join(missing)}",
            remedy="reinstall the released package",
        )


def add_flags(flags: Mapping[str, tuple[str, str]]) -> None:
    """Let the server's command line take `flags`: the environment variable of each, and its help.

    Without SGLang's registry of hooks there are the variables alone.
    """
    register = _found(f"{_HOOKS}:HookRegistry.register")
    after, before = _found(f"{_HOOKS}:HookType.AFTER"), _found(f"{_HOOKS}:HookType.BEFORE")
    if register is None or before is None or after is None:
        return

    def add(_: Any, parser: Any) -> None:
        for flag, (variable, text) in flags.items():
            parser.add_argument(flag, type=int, help=f"{text} Sets {variable}.")

    def read(_: Any, arguments: Any) -> None:
        for flag, (variable, _text) in flags.items():
            value = getattr(arguments, flag.lstrip("-").replace("-", "_"), None)
            if value is not None:
                os.environ[variable] = str(value)

    register("sglang.srt.server_args.ServerArgs.add_cli_args", add, after)
    register("sglang.srt.server_args.ServerArgs.from_cli_args", read, before)


def capture_blocks(*, masks: bool) -> None:
    """Whether graphs of DFLASH-like verify passes are captured with a mask, in this process.

    SGLang goes by the backend's class name: a class that it does not know is captured with a mask,
    which DFLASH and DSPARK then never fill, as they verify chains, and a graph would go on reading
    what it was captured with. DDTREE fills it, whatever the backend.
    """
    utils: Any = importlib.import_module(f"{_DFLASH}.dflash_utils")
    policy = utils.resolve_dflash_verify_mask_policy
    stock = getattr(policy, "_kdtree_stock", policy)

    def decided(backend: Any) -> tuple[str, bool]:
        name, _ = stock(backend)
        return name, masks

    decided._kdtree_stock = stock  # type: ignore[attr-defined]
    utils.resolve_dflash_verify_mask_policy = decided


def refuse_requests(algorithm: str) -> None:
    """Have this process's scheduler refuse requests that the algorithm cannot serve, with a reason.

    It asks `validate_dflash_request` of every algorithm of DFLASH's kind. Penalties and a least
    number of tokens depend on what a request has said so far, which SGLang does not keep up for
    these algorithms: DFLASH serves such requests without them. 0.5.23 would also take requests
    for the mask that a token was sampled under.
    """
    scheduler: Any = sys.modules.get("sglang.srt.managers.scheduler")
    if scheduler is None:
        return
    stock = scheduler.validate_dflash_request

    def refused(request: Any, enable_overlap: bool) -> str | None:
        asked = request.sampling_params
        for name, neutral in _NEUTRAL.items():
            value = getattr(asked, name, neutral)
            if value is not None and value != neutral:
                return f"{algorithm}: {name} is not supported, expected {neutral:g}, got {value:g}"
        found: str | None = stock(request, enable_overlap)
        return found

    scheduler.validate_dflash_request = refused
    if hasattr(scheduler, "validate_spec_sampling_mask_request"):
        scheduler.validate_spec_sampling_mask_request = lambda *_: (
            f"{algorithm}: return_sampling_mask is not supported"
        )


def widen_request_rows(columns: int) -> None:
    """Give each request's row of slots, in pools made from now on, `columns` beyond the context.

    SGLang reserves two windows of draft tokens for a request and gives its row room for one and
    four tokens. Near the end of the context the rest is written into the next request's row.
    """
    pools: Any = importlib.import_module("sglang.srt.mem_cache.kv_cache_configurator")
    stock = pools.get_req_to_token_extra_context_len

    def wide(*arguments: Any) -> int:
        return max(int(stock(*arguments)), columns)

    pools.get_req_to_token_extra_context_len = wide


def reserved(version: str, draft_input: Any) -> tuple[Any, int]:
    """How many slots each request of DFLASH's draft input has, on the host, and their sum."""
    if version == "0.5.17":
        return draft_input.reserved_seq_lens_cpu, int(draft_input.reserved_seq_lens_sum)
    return draft_input.nxt_kv_lens_cpu, int(draft_input.nxt_kv_lens_sum)


def draft_ranks(version: str, worker: Any) -> contextlib.AbstractContextManager[Any]:
    """In it, SGLang's layers run on the ranks that a DFLASH worker's drafter runs on."""
    if version == "0.5.17":
        return contextlib.nullcontext()
    from sglang.srt.speculative.spec_utils import draft_tp_context

    context: contextlib.AbstractContextManager[Any] = draft_tp_context(worker.draft_parallel_layout)
    return context


def draft_batch(version: str, worker: Any, batch: Any, lengths: Any, **given: Any) -> Any:
    """The forward batch of a draft block, behind the committed tokens of `batch`.

    worker: a DFLASH worker. lengths: the tokens of each request, the block included or more, int32
    [B] on the host. given: ForwardBatch's `input_ids`, `positions`, `out_cache_loc`, [B * block]
    each, `input_embeds` and `spec_info`.
    """
    from sglang.srt.model_executor.forward_batch_info import (
        CaptureHiddenMode,
        ForwardBatch,
        ForwardMode,
    )
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    requests, tokens = len(batch.seq_lens), given["input_ids"].shape[0]
    more: dict[str, Any] = {}
    if version != "0.5.17":
        from sglang.srt.model_executor.forward_batch_info import enable_num_token_non_padded

        more["can_run_decode_cuda_graph"] = batch.can_run_decode_cuda_graph
        more["global_num_token_non_padded_cpu"] = tokens
        if enable_num_token_non_padded():
            import torch

            more["num_token_non_padded"] = torch.full(
                (), tokens, dtype=torch.int32, device=given["input_ids"].device
            )
    made = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=requests,
        req_pool_indices=batch.req_pool_indices,
        seq_lens=batch.seq_lens,
        seq_lens_cpu=lengths,
        seq_lens_sum=int(lengths.sum()),
        spec_algorithm=SpeculativeAlgorithm.DFLASH,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        **given,
        **more,
    )
    if version != "0.5.17":
        translator = worker.draft_model_runner.kv_index_translator
        plan = _slot_plan(worker, batch, given["out_cache_loc"], tokens // requests)
        plan.bind(made, translator)
    return made


def draft_slots(version: str, worker: Any, batch: Any, slots: Any) -> Any:
    """`slots` [B, block], of the target's pool, as a DFLASH worker's drafter numbers them."""
    if version == "0.5.17":
        return slots
    plan = _slot_plan(worker, batch, slots.flatten(), slots.shape[1])
    return plan.write_ids(worker.draft_model_runner.kv_index_translator).view(slots.shape)


def _slot_plan(worker: Any, batch: Any, slots: Any, width: int) -> Any:
    return worker.model_runner.kv_index_translator.plan(
        req_pool_indices=batch.req_pool_indices,
        seq_lens=batch.seq_lens,
        seq_lens_cpu=batch.seq_lens_cpu,
        write_virtual=slots,
        read_extent=width,
    )


def log_probs(version: str, batch: Any, logits_output: Any, targets: Any, rows: Any) -> None:
    """Fill in the log-probabilities of accepted tokens.

    targets: [B * N], the target's token behind each node. rows: [B, D + 1], the accepted nodes.
    """
    if version == "0.5.17":
        from sglang.srt.layers.logprob_processor import compute_spec_v2_logprobs

        compute_spec_v2_logprobs(batch, logits_output, targets, rows, rows.shape[1] - 1)
        return
    from sglang.srt.layers.logprob_processor import compute_spec_logprobs

    compute_spec_logprobs(batch, logits_output, targets, accept_index=rows)


def step_result(version: str, verified: Any, **given: Any) -> Any:
    """SGLang's result of a step, from that of the verify pass and what was made of it."""
    from sglang.srt.managers.utils import GenerationBatchResult

    more = () if version == "0.5.17" else ("routed_experts_output", "indexer_topk_output")
    return GenerationBatchResult(
        logits_output=verified.logits_output,
        can_run_cuda_graph=verified.can_run_cuda_graph,
        **{name: getattr(verified, name) for name in more},
        **given,
    )


def _found(name: str) -> Any:
    """The object that `module:a.b` names, or None."""
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        return None
    for part in path.split("."):
        found = getattr(found, part, None)
    return found
