"""A round of DDTREE: a draft block, a tree of its tokens, one verify pass, the accepted path.

The worker is SGLang's DFLASH worker with another round. Of the parent's are the drafter, its KV
pool and graphs, the prefill, and how target features become the drafter's KV rows. A round reads
nothing back from the GPU: the scheduler of SGLang overlaps it with its own work.

What lies where. Of a request with L committed tokens, the slots of positions L to L + N - 1 are its
window: the draft block writes the first of them in the drafter's pool, the verify pass all N in the
target's, node n at L + n. Then the rows of the accepted path move to the window's front, and the
drafter's rows of that path are made anew from the target's features.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative import dflash_utils
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.draft_worker_common import (
    build_block_pos_offsets,
    make_draft_block_spec_info,
)
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from kdtree_engine.errors import ConfigError
from kdtree_engine.ops import AcceptedPaths, DraftTrees, accept_trees, build_draft_trees, compact_kv
from kdtree_engine.ops.compaction import MAX_LAYERS
from kdtree_engine.sglang_ext import compat
from kdtree_engine.sglang_ext.ddtree import block_size, stop
from kdtree_engine.sglang_ext.ddtree_round import (
    TreeShape,
    best_of_all,
    full_mask,
    gained_tokens,
    path_rows,
    sampled_tokens,
)
from kdtree_engine.sglang_ext.ddtree_widths import Widths
from kdtree_engine.sglang_ext.settings import read_settings

__all__ = ["DDTreeWorker"]

_log = logging.getLogger(__name__)


class DDTreeWorker(DFlashWorkerV2):  # type: ignore[misc]  # SGLang is untyped here
    """One worker of one rank. Every rank builds the same tree and accepts the same path."""

    # Of the parent, which SGLang leaves untyped.
    block_size: int
    device: Any
    draft_model: Any
    draft_model_runner: Any
    model_runner: Any

    def __init__(self, *arguments: Any, **named: Any) -> None:
        version = compat.sglang_version()
        with _no_block_mismatch_said():
            super().__init__(*arguments, **named)
        self._sglang = version
        settings, warnings = read_settings(os.environ)
        for warning in warnings:
            _log.warning("DDTREE: %s", warning)
        nodes = self.block_size  # the parent takes SGLang's number of draft tokens for its block
        self._shape = TreeShape(nodes - 1, settings.ddtree_top_k, block_size())
        self._draft_this_block()
        self._widths = Widths(self, self._shape, adaptive=settings.ddtree_adaptive)
        self._steps = torch.arange(self._shape.nodes, device=self.device)
        try:
            self._head = _head_of(self.model_runner.model)
            _require_served(self)
        except ConfigError as error:
            stop(error)
        compat.capture_blocks(masks=True)
        compat.refuse_requests("DDTREE")
        # The pools are made after this: two windows, and what rounds them up to a page.
        compat.widen_request_rows(2 * self._shape.nodes + int(self.page_size))

    def _draft_this_block(self) -> None:
        """Tell the parent, which has made its buffers for all nodes, how much it drafts."""
        self.block_size = self._shape.block
        if hasattr(self.draft_model, "set_block_size"):
            self.draft_model.set_block_size(self._shape.block)
        self._block_pos_offsets = build_block_pos_offsets(
            length=self._shape.block, device=self.device
        )
        self._draft_block_spec_info = make_draft_block_spec_info(
            draft_token_num=self._shape.block, device=self.device
        )
        if self.draft_model_runner.dtype != torch.bfloat16:
            self.draft_model.forward = _in_own_dtype(self.draft_model.forward)
        processor = getattr(self, "_target_logits_processor", None)
        if processor is not None:  # it would leave each rank its part of the target's logits
            processor.defer_verify_gather = False
            self._target_logits_processor = None

    def init_attention_backends(self) -> None:
        super().init_attention_backends()
        try:
            self._masks = _mask_form(self)
            self._pools = _layers_of(self.model_runner.token_to_kv_pool)
        except ConfigError as error:
            stop(error)
        _log.info(
            "DDTREE: SGLang %s; budget: %d nodes, %s; top-k: %d; block: %d; masks: %s; ranks: %d",
            self._sglang,
            self._shape.budget,
            self._widths.described(),
            self._shape.top_k,
            self._shape.block,
            self._masks,
            get_parallel().tp_group.world_size,
        )

    def init_cuda_graphs(self) -> None:
        super().init_cuda_graphs()
        self._widths.capture()

    def _maybe_build_draft_sampler(self) -> None:
        """None: the parent's takes the likeliest token of each position, in the draft's graph."""

    def _validate_phase1_sampling_support(self, batch: Any) -> None:
        """Sampled requests are verified by `ops`, whatever kernels SGLang has here."""

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, grammar_barrier: Any = None, **named: Any
    ) -> Any:
        """One step of a batch: the parent's prefill, or one round. Returns SGLang's result."""
        extends = batch.forward_mode.is_extend() or batch.is_extend_in_batch
        if extends or batch.forward_mode.is_idle():
            return super().forward_batch_generation(
                batch, on_publish=on_publish, grammar_barrier=grammar_barrier, **named
            )
        if batch.seq_lens.is_cuda:  # made on another stream by the step before
            batch.seq_lens.record_stream(torch.cuda.current_stream())
        self._widths.round_begins(len(batch.seq_lens))
        draft_input = batch.spec_info
        prefixes = batch.seq_lens
        window = self._window(batch)
        roots = draft_input.bonus_tokens
        hidden = self._draft(batch, draft_input, window[:, : self._shape.block], roots)
        trees = self._widths.cut(self._trees(hidden, roots, prefixes))
        window = window[:, : trees.nodes].contiguous()
        verified = self._verify(batch, draft_input, window, trees, grammar_barrier)
        paths, targets = self._accept(batch, draft_input, verified.logits_output, trees)
        self._commit(batch, window, trees, paths, verified.logits_output)
        counts = paths.counts.to(torch.int32)
        new_seq_lens = prefixes + counts.to(prefixes.dtype)
        if on_publish is not None:
            on_publish(new_seq_lens)
        self._widths.round_ends()
        if batch.return_logprob:
            rows = path_rows(paths, trees.nodes)
            compat.log_probs(self._sglang, batch, verified.logits_output, targets.flatten(), rows)
        verified.logits_output.hidden_states = None  # or it would be copied to the host
        return compat.step_result(
            self._sglang,
            verified,
            next_token_ids=gained_tokens(trees, paths, self._shape.nodes).flatten(),
            accept_lens=counts,
            next_draft_input=self._make_next_draft_input_decode(
                bonus_tokens=paths.bonus, new_seq_lens=new_seq_lens
            ),
            speculative_num_draft_tokens=self._shape.nodes,
            new_seq_lens=new_seq_lens,
        )

    def _window(self, batch: Any) -> torch.Tensor:
        """The slots of positions L to L + N - 1, int64 [B, N]; the scheduler has reserved them."""
        rows = batch.req_pool_indices.to(torch.int64)[:, None]
        columns = batch.seq_lens.to(torch.int64)[:, None] + self._steps
        table: torch.Tensor = self.model_runner.req_to_token_pool.req_to_token
        return table[rows, columns].to(torch.int64)

    def _draft(
        self, batch: Any, draft_input: Any, slots: torch.Tensor, roots: torch.Tensor
    ) -> torch.Tensor:
        """The drafter's hidden states of the positions behind the root, [B, D, hidden]."""
        requests, block = slots.shape
        tokens = slots.new_full((requests, block), int(self._mask_token_id))
        tokens[:, 0] = roots
        positions = batch.seq_lens.to(torch.int64)[:, None] + self._steps[:block]
        if batch.seq_lens_cpu is None:
            lengths, _ = compat.reserved(self._sglang, draft_input)
        else:
            lengths = batch.seq_lens_cpu + block
        forward = compat.draft_batch(
            self._sglang,
            self,
            batch,
            lengths.to(torch.int32),
            input_ids=tokens.flatten(),
            positions=positions.flatten(),
            out_cache_loc=slots.flatten(),
            input_embeds=self._embedded(tokens.flatten()),
            spec_info=self._draft_block_spec_info,
        )
        with torch.inference_mode(), compat.draft_ranks(self._sglang, self):
            out = self.draft_model_runner.forward(forward)
        hidden: torch.Tensor = out.logits_output.hidden_states
        return hidden[: requests * block].view(requests, block, -1)[:, 1:]

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """The drafter's inputs: it has no embedding of its own and takes the target's."""
        own = getattr(self, "_full_embed_gpu", None)
        embedded: torch.Tensor
        if own is not None:
            embedded = torch.nn.functional.embedding(tokens, own)
        else:
            embedded = self.model_runner.model.get_input_embeddings()(tokens)
        scale: float = getattr(self, "_noise_embed_scale", 1.0)
        return embedded if scale == 1.0 else embedded * scale

    def _trees(
        self, hidden: torch.Tensor, roots: torch.Tensor, prefixes: torch.Tensor
    ) -> DraftTrees:
        """The trees of this round. With several ranks each scores its part of the vocabulary."""
        weight, first_token = self._head
        scores = torch.matmul(hidden.to(weight.dtype), weight.T)
        shape, group = self._shape, get_parallel().tp_group
        tokens = None
        if group.world_size > 1:
            scores, tokens = best_of_all(scores, shape.top_k, first_token, group)
        return build_draft_trees(
            scores,
            shape.budget,
            shape.top_k,
            from_logits=tokens is None,
            token_ids=tokens,
            root_tokens=roots,
            prefix_lengths=prefixes,
        )

    def _verify(
        self,
        batch: Any,
        draft_input: Any,
        window: torch.Tensor,
        trees: DraftTrees,
        grammar_barrier: Any,
    ) -> Any:
        """The target's pass over all nodes; logits as each request wants them."""
        nodes = window.shape[1]
        grammar = None
        if batch.has_grammar:
            grammar = GrammarTree.from_device(
                trees.retrieve_next_token, trees.retrieve_next_sibling, trees.tokens
            )
        batch.out_cache_loc = window.flatten()
        before = batch.seq_lens_cpu, batch.seq_lens_sum
        if batch.seq_lens_cpu is not None:
            batch.seq_lens_cpu = batch.seq_lens_cpu + nodes
            batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        else:
            batch.seq_lens_cpu, batch.seq_lens_sum = compat.reserved(self._sglang, draft_input)
        verify = DFlashVerifyInput(
            draft_token=trees.tokens.flatten(),
            positions=trees.positions.flatten(),
            draft_token_num=nodes,
            custom_mask=self._mask(trees, batch.seq_lens_sum),
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )
        forward, _ = verify.prepare_for_verify(batch, self.target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = before
        verified = self.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward, is_verify=True, skip_attn_backend_init=True
        )
        logits = verified.logits_output.next_token_logits
        if batch.sampling_info is not None:
            dflash_utils.apply_dflash_verify_logits_adjustments(
                next_token_logits=logits,
                sampling_info=batch.sampling_info,
                draft_token_num=nodes,
            )
        if grammar is not None:
            mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=grammar,
                sampling_info=batch.sampling_info,
                device=logits.device,
                barrier=grammar_barrier,
            )
            if mask is not None:
                mask.apply(logits)
        return verified

    def _mask(self, trees: DraftTrees, reserved: int) -> torch.Tensor:
        """Who sees whom, in the form that the target's backend reads.

        reserved: at least as many tokens as all prefixes have, known to the host.
        """
        if self._masks == "T x T":
            return trees.draft_mask
        most = trees.tokens.shape[0] * self.model_runner.model_config.context_len
        return full_mask(trees, min(int(reserved), most))

    def _accept(
        self, batch: Any, draft_input: Any, logits_output: Any, trees: DraftTrees
    ) -> tuple[AcceptedPaths, torch.Tensor]:
        """The accepted paths, and the target's token behind each node, int64 [B, N]."""
        sampling = batch.sampling_info
        logits = logits_output.next_token_logits.view(*trees.tokens.shape, -1)
        if sampling is None or sampling.is_all_greedy:
            targets = logits.argmax(-1)
        else:
            targets = sampled_tokens(logits, sampling, draft_input.max_top_k)
        group = get_parallel().tp_group
        if group.world_size > 1:
            group.broadcast(targets, src=0)  # draws differ by rank, and sums may
        return accept_trees(trees, target_tokens=targets), targets

    def _commit(
        self,
        batch: Any,
        window: torch.Tensor,
        trees: DraftTrees,
        paths: AcceptedPaths,
        logits_output: Any,
    ) -> None:
        """The accepted path's rows at the window's front, in the pools of target and drafter."""
        for layers in self._pools:
            compact_kv(layers, paths, window)
        block = self._shape.block
        features = logits_output.hidden_states
        if features is None:
            raise RuntimeError("DDTREE: the target gave no features of the layers to draft from")
        accepted = features[path_rows(paths, trees.nodes).flatten()]
        slots = compat.draft_slots(self._sglang, self, batch, window[:, :block].contiguous())
        positions = batch.seq_lens.to(torch.int64)[:, None] + self._steps[:block]
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=accepted,
            cache_loc=slots.flatten(),
            cache_loc_2d=slots,
            positions=positions.flatten(),
            commit_lens=paths.counts.to(torch.int32),
        )


def _require_served(worker: DDTreeWorker) -> None:
    """Raises ConfigError for a drafter or a target that a tree is not built for."""
    draft = worker.draft_model
    for name, kind in (
        ("candidate_selector", "a candidate selector (DFlash2)"),
        ("lilicorr", "a LiLiCorr head"),
        ("prefix_gru", "a Domino head"),
    ):
        if getattr(draft, name, None) is not None:
            raise ConfigError(
                f"DDTREE: the drafter has {kind}, expected a plain DFlash drafter, which gives a "
                "distribution for each position",
                remedy="--speculative-algorithm DFLASH runs it",
            )
    if get_parallel().attn_dp_size > 1:
        raise ConfigError("DDTREE: data-parallel attention, expected none")
    from sglang.srt.configs.hybrid_arch import mambaish_config

    if mambaish_config(worker.model_runner.model_config) is not None:
        raise ConfigError("DDTREE: the target has states (Mamba or linear attention), not KV alone")


def _head_of(model: Any) -> tuple[torch.Tensor, int]:
    """This rank's part of the target's output head, [tokens, hidden], and its first token."""
    head = getattr(model, "lm_head", None)
    weight = getattr(head, "weight", None)
    shard = getattr(head, "shard_indices", None)
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point() or weight.dim() != 2:
        raise ConfigError("DDTREE: the target's lm_head is quantised or absent, expected a matrix")
    if shard is None or shard.num_added_elements:
        raise ConfigError(
            "DDTREE: the target's lm_head does not say which tokens it has, or has added ones"
        )
    # Behind them lie rows that only pad the part.
    return weight[: int(shard.num_org_elements)], int(shard.org_vocab_start_index)


def _in_own_dtype(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A drafter's `forward` that takes its inputs as they are: SGLang rounds them to bfloat16."""

    @functools.wraps(forward)
    def taken(
        input_ids: Any, positions: Any, forward_batch: Any, input_embeds: Any = None, **named: Any
    ) -> Any:
        if forward_batch.input_embeds is not None:
            input_embeds = forward_batch.input_embeds
        return forward(input_ids, positions, forward_batch, input_embeds, **named)

    return taken


@contextlib.contextmanager
def _no_block_mismatch_said() -> Iterator[None]:
    """The parent warns that the number of draft tokens is not the block: here it never is."""

    def other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("DFLASH block size mismatch")

    logger = logging.getLogger(DFlashWorkerV2.__module__)
    logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)


def _mask_form(worker: DDTreeWorker) -> str:
    """The form of mask that the target's backend reads: `T x T` or `T x (L + T)`."""
    backend = worker.model_runner.attn_backend
    if type(backend).__name__ == "HybridAttnBackend":  # one backend for prefill, one for the rest
        if worker._widths.adaptive:
            raise ConfigError(
                "DDTREE: an adaptive budget with one backend for prefill and one for the rest",
                remedy="set KDTREE_DDTREE_ADAPTIVE=0, or name one --attention-backend",
            )
        backend = backend._select_backend(ForwardMode.TARGET_VERIFY)
    name = type(backend).__name__
    if name == "TritonAttnBackend":
        return "T x (L + T)"
    if name == "KdtreeMlaBackend":
        return "T x T" if backend.reads_short_masks else "T x (L + T)"
    raise ConfigError(
        f"DDTREE: trees would be verified by {name}, expected kdtree_mla or triton",
        remedy="--attention-backend kdtree_mla, or --decode-attention-backend kdtree_mla "
        "--speculative-attention-mode decode",
    )


def _layers_of(pool: Any) -> list[list[torch.Tensor]]:
    """The KV tensors of all layers, in lists that `compact_kv` takes: latent rows, or K and V."""
    kinds = {"MLATokenToKVPool": ("kv_buffer",), "MHATokenToKVPool": ("k_buffer", "v_buffer")}
    names = kinds.get(type(pool).__name__)
    if names is None:
        raise ConfigError(
            f"DDTREE: the KV pool is a {type(pool).__name__}, expected {' or '.join(kinds)}"
        )
    layers: list[list[torch.Tensor]] = []
    for name in names:
        tensors = list(getattr(pool, name))
        layers += [tensors[at : at + MAX_LAYERS] for at in range(0, len(tensors), MAX_LAYERS)]
    return layers
