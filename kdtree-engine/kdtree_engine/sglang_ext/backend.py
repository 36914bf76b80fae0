"""The attention backend `kdtree_mla`: SGLang's Triton backend with two calls of ours in it.

Target-verify and plain decode run `tree_verify_attention`, unless switched off, on the buffers that
SGLang's Triton backend has filled: nothing is copied, nothing waits for the GPU, and a captured
graph replays with whatever the buffers hold then. Everything else is the parent's: prefill, drafts,
layers with a feature that the kernel does not have, the metadata, the graphs.

SGLang decides by the class's name whether graphs of DFLASH-like algorithms are captured with a
mask: a class that is called otherwise than the stock one is.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

from kdtree_engine.arguments import HEAD_DIM, LATENT_DIM
from kdtree_engine.attention import tree_verify_attention
from kdtree_engine.ops.kv_indices import refill_kv_indices
from kdtree_engine.sglang_ext import compat
from kdtree_engine.sglang_ext.settings import Settings
from kdtree_engine.sglang_ext.start_up import layer_reason

__all__ = ["KdtreeMlaBackend"]


class KdtreeMlaBackend(TritonAttnBackend):  # type: ignore[misc]  # SGLang is untyped here
    """One backend of one model runner; ranks share nothing through it."""

    num_draft_tokens: Any  # of the parent: T, None without speculation
    req_to_token: torch.Tensor  # of the parent: int32 [rows, max_context]
    kv_indptr: torch.Tensor  # of the parent: int32 [max_batch + 1]
    max_kv_splits: int  # of the parent's own decode kernel

    def __init__(
        self, runner: Any, settings: Settings, version: str, *, qlen: bool, alone: bool
    ) -> None:
        """qlen: SGLang makes masks of T x T bytes a request, and not of T x (L + T).

        alone: no layer of the model is left to SGLang's Triton kernels.
        """
        super().__init__(runner)
        self._decodes_alone = settings.decode and alone
        self._kdtree = settings
        self._qlen = qlen
        self._qlen_steps: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        if qlen:
            # Room for no request: SGLang then makes a mask for each batch. Graphs get theirs below.
            self._verify_mask = compat.qlen_mask(0, self.num_draft_tokens, self.device)
        self._sglang = version
        # Plain decode as a tree of one node. `kv_indptr` counts the new token among the prefix
        # already, so its own column is masked out: a byte of zero for each request.
        requests = runner.req_to_token_pool.size
        self._one_each = torch.arange(requests + 1, dtype=torch.int32, device=self.device)
        self._unseen = torch.zeros(requests, dtype=torch.uint8, device=self.device)

    @property
    def reads_short_masks(self) -> bool:
        """Whether masks have T x T bytes a request, and not T x (L + T)."""
        return self._qlen

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **features: Any,
    ) -> torch.Tensor:
        """Attention of several new tokens a request; the kernel's where they are a draft tree.

        q: [tokens, H * 576]; k: [tokens, 1, 576] and v: [tokens, 1, 512], rows of the tree nodes,
        stored at `forward_batch.out_cache_loc` first; both None where the model has stored them
        there already. Returns [tokens, H * 512].
        """
        verifies = forward_batch.forward_mode.is_target_verify()
        if not (
            self._kdtree.verify
            and verifies
            and (k is None) == (v is None)
            and _plain(layer, features)
        ):
            if verifies and self._qlen and self.forward_metadata.custom_mask is not None:
                raise RuntimeError(
                    f"kdtree_mla: a call of layer {layer.layer_id} has features that the kernel "
                    "has not, and SGLang's Triton kernel cannot read a mask of T x T bytes "
                    "(set KDTREE_QLEN_MASK=0)"
                )
            stock: torch.Tensor = super().forward_extend(
                q, k, v, layer, forward_batch, save_kv_cache, **features
            )
            return stock
        if save_kv_cache and k is not None:
            self._store(k, v, layer, forward_batch)
        metadata = self.forward_metadata
        qo_indptr, mask_indptr = metadata.qo_indptr, None
        if metadata.custom_mask is not None:
            qo_indptr, mask_indptr = self._steps(metadata)
        return self._attend(
            q,
            layer,
            forward_batch,
            qo_indptr=qo_indptr,
            mask=metadata.custom_mask,
            mask_indptr=mask_indptr,
            max_nodes=metadata.max_extend_len,
        )

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **features: Any,
    ) -> torch.Tensor:
        """Attention of one new token a request. Shapes as in `forward_extend`, tokens = requests.

        Steps of a draft have lengths of their own (`spec_info`), and stay with the parent.
        """
        if not (
            self._kdtree.decode
            and forward_batch.forward_mode.is_decode()
            and forward_batch.spec_info is None
            and _plain(layer, features)
        ):
            partial = self.forward_metadata.attn_logits
            if partial is not None and partial.shape[2] != self.max_kv_splits:
                raise RuntimeError(
                    f"kdtree_mla: a call of layer {layer.layer_id} has features that the kernel "
                    "has not, and graphs have no room for the splits of SGLang's Triton kernel "
                    "(set KDTREE_GRAPH_BUFFERS=0)"
                )
            stock: torch.Tensor = super().forward_decode(
                q, k, v, layer, forward_batch, save_kv_cache, **features
            )
            return stock
        if save_kv_cache and k is not None:
            self._store(k, v, layer, forward_batch)
        requests = self.forward_metadata.kv_indptr.shape[0] - 1
        return self._attend(
            q,
            layer,
            forward_batch,
            qo_indptr=self._one_each[: requests + 1],
            mask=self._unseen,
            mask_indptr=self._one_each[: requests + 1],
            max_nodes=1,
        )

    def init_cuda_graph_state(
        self,
        max_bs: int,
        max_num_tokens: int,
        kv_indices_buf: torch.Tensor | None = None,
        cuda_graph_num_kv_splits_buf: torch.Tensor | None = None,
    ) -> None:
        """The parent's buffers, but for the slots: max_bs * max_context of them, int64.

        The parent takes max_num_tokens * max_context, as if each tree node had a prefix of its
        own: 545 GB at batch 4, 65 nodes and 262,144 tokens. A request has one prefix.

        Where the kernel decodes all layers, the partial results of the parent's decode kernel get
        room for one split: its max_num_tokens * heads * splits * 512 of float32 are 17 GB at batch
        64, 65 nodes, 8 heads and the 256 splits that it takes on a GPU of more than 128 processors.
        """
        if kv_indices_buf is None and self._kdtree.graph_buffers:
            kv_indices_buf = torch.zeros(
                max_bs * self.max_context_len, dtype=torch.int64, device=self.device
            )
        nodes, splits = self.num_draft_tokens, self.max_kv_splits
        if self._kdtree.graph_buffers and self._decodes_alone:
            self.max_kv_splits = 1
        if self._qlen:
            self.num_draft_tokens = None  # so the parent makes no mask of T x max_context a request
        try:
            super().init_cuda_graph_state(
                max_bs, max_num_tokens, kv_indices_buf, cuda_graph_num_kv_splits_buf
            )
        finally:
            self.num_draft_tokens, self.max_kv_splits = nodes, splits
        if self._qlen:
            self._verify_mask = compat.qlen_mask(
                max_bs, nodes, self.device, prefix=self.get_cuda_graph_seq_len_fill_value()
            )
            self._steps_of(nodes)  # made in a capture, they would be of its graph

    def _fill_kv_indptr_and_indices(self, *given: Any, **named: Any) -> torch.Tensor:
        """List the slots of the batch's requests, before a pass and before a graph's replay.

        The parent takes a sum, a copy and a kernel of one block a request, which is 57 us for one
        request of 65k tokens on an H200 while the first layer waits. This is one launch.
        """
        if not self._kdtree.kv_indices:
            stock: torch.Tensor = super()._fill_kv_indptr_and_indices(*given, **named)
            return stock
        rows, lengths, kv_indices, own = compat.slots_refill(self._sglang, given, named)
        kv_indptr: torch.Tensor = self.kv_indptr[: rows.shape[0] + 1] if own is None else own
        refill_kv_indices(self.req_to_token, rows, lengths, kv_indptr, kv_indices)
        return kv_indptr

    def _update_target_verify_buffers(self, *given: Any) -> Any:
        """Refill what a captured graph of verification reads, before it is captured and replayed.

        With masks of T x T bytes the rows and masks of a request begin where T alone says, so what
        the parent computes for that is left out: six of its launches, while the GPU waits.
        """
        slots, spec_info = compat.verify_refill(self._sglang, given)
        mask = getattr(spec_info, "custom_mask", None)
        if not self._qlen or mask is None:
            return super()._update_target_verify_buffers(*given)
        self._fill_kv_indptr_and_indices(*slots, self.cuda_graph_kv_indices)
        self._verify_mask.buffer[: mask.shape[0]] = mask
        return None

    def _steps(self, metadata: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Where each request's rows of q and its mask begin: by SGLang's offsets, or by ours.

        Ours, with masks of T x T bytes, follow from T alone and are kept: a captured graph reads
        them at each replay. SGLang's of such a graph are not filled.
        """
        if not self._qlen:
            return metadata.qo_indptr, metadata.mask_indptr
        rows, masks = self._steps_of(metadata.max_extend_len)
        requests = metadata.kv_indptr.shape[0]
        return rows[:requests], masks[:requests]

    def _steps_of(self, nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where rows and masks of trees of `nodes` nodes begin, for all requests that fit."""
        known = self._qlen_steps.get(nodes)
        if known is None:
            known = (self._one_each * nodes, self._one_each.long() * (nodes * nodes))
            self._qlen_steps[nodes] = known
        return known

    def _store(
        self, k: torch.Tensor, v: torch.Tensor | None, layer: Any, forward_batch: Any
    ) -> None:
        location = compat.write_location(self._sglang, forward_batch, self.forward_metadata)
        self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)

    def _attend(
        self,
        q: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        *,
        qo_indptr: torch.Tensor,
        mask: torch.Tensor | None,
        mask_indptr: torch.Tensor | None,
        max_nodes: int,
    ) -> torch.Tensor:
        heads = layer.tp_q_head_num
        given = getattr(forward_batch, "_attn_output", None)
        out = (
            q.new_empty((q.shape[0], heads, LATENT_DIM))
            if given is None
            else given.view(-1, heads, LATENT_DIM)
        )
        tree_verify_attention(
            q.view(-1, heads, HEAD_DIM),
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            qo_indptr,
            self.forward_metadata.kv_indptr,
            self.forward_metadata.kv_indices,
            forward_batch.out_cache_loc,
            mask,
            mask_indptr,
            sm_scale=layer.scaling,
            max_nodes=max_nodes,
            out=out,
            deterministic=self.enable_deterministic,
        )
        return out.view(-1, heads * LATENT_DIM)


def _plain(layer: Any, features: dict[str, Any]) -> bool:
    """Whether a call is attention and nothing more: no sinks, score changes or layer features."""
    return all(value is None for value in features.values()) and layer_reason(layer) is None
