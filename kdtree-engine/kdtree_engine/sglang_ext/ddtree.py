"""`--speculative-algorithm DDTREE`: DFLASH's drafter, and a tree of its tokens instead of a chain.

A drafter of DFLASH gives a distribution for each of the next positions at once. DFLASH verifies the
likeliest token of each, one chain; DDTREE (arXiv 2604.12989) verifies the likeliest paths through
them, a tree. Here is what SGLang must know of the algorithm: its name, its arguments, and which of
DFLASH's plumbing it shares. The rounds are in `ddtree_worker`.

Two widths that are one in DFLASH are told apart: the drafter fills `block` positions, the first of
which holds the last committed token, and the target verifies `budget + 1` nodes, the root included.
"""

from __future__ import annotations

import json
import logging
import os
from typing import Any, NoReturn

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from kdtree_engine.errors import ConfigError, KdError
from kdtree_engine.sglang_ext import compat
from kdtree_engine.sglang_ext.ddtree_round import tree_shape
from kdtree_engine.sglang_ext.settings import read_settings

__all__ = ["NAME", "block_size", "register", "stop"]

NAME = "DDTREE"

_REQUESTS = 48
"""As many as DFLASH admits where nothing is said: each holds a window of slots."""
_log = logging.getLogger(__name__)


class DDTreeAlgorithm(CustomSpecAlgo):  # type: ignore[misc]  # SGLang is untyped here
    """What SGLang asks of an algorithm: in most of it this one is DFLASH."""

    def is_dflash(self) -> bool:
        return True

    def is_dflash_family(self) -> bool:
        return True

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def supports_grammar_overlap(self) -> bool:
        return True

    def has_draft_kv(self) -> bool:
        return True

    # SGLang asks these of its own algorithms and does not define them for others.

    def need_topk(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def create_future_map(self, *arguments: Any, **named: Any) -> Any:
        """As SGLang's own algorithms make it; its second argument is the algorithm."""
        from sglang.srt.managers.overlap_utils import FutureMap

        device, *others = arguments
        return FutureMap(device, self, *others, **named)

    def get_num_tokens_per_req_for_target_verify(
        self, num_draft_tokens: int, is_draft_worker: bool
    ) -> int:
        """Rows of a request in a pass of target or drafter, for which graphs are captured."""
        if not is_draft_worker:
            return num_draft_tokens
        return block_size()

    def handle_server_args(self, server_args: Any) -> None:
        """Fill in what the algorithm needs of the arguments, or end the process in one line."""
        try:
            _fill_in(server_args)
        except ConfigError as error:
            stop(error)


def block_size() -> int:
    """The positions of a draft block, once this process has the server's arguments."""
    from sglang.srt.runtime_context import get_spec

    return int(get_spec().speculative_dflash_block_size)


def register() -> None:
    """Make DDTREE a name of `--speculative-algorithm`, and add its two flags."""
    if _registered():
        return  # a process may load plugins twice

    registered = SpeculativeAlgorithm.register(
        NAME, supports_overlap=True, spec_class=DDTreeAlgorithm
    )
    registered(_worker_class)
    compat.add_flags(_FLAGS)


def _worker_class(_: Any) -> type:
    try:
        compat.require_ddtree(compat.sglang_version())
    except KdError as error:
        stop(error)
    from kdtree_engine.sglang_ext.ddtree_worker import DDTreeWorker

    return DDTreeWorker


_FLAGS = {
    "--speculative-ddtree-budget": (
        "KDTREE_DDTREE_BUDGET",
        "Nodes of a DDTREE draft tree below its root, 1 to 127.",
    ),
    "--speculative-ddtree-topk": (
        "KDTREE_DDTREE_TOPK",
        "Tokens of each position that a DDTREE draft tree may take, 1 to 64.",
    ),
}
"""SGLang's arguments are a class that takes no others, so each flag sets an environment variable,
which the server's other processes inherit."""


def _registered() -> bool:
    try:
        SpeculativeAlgorithm.from_string(NAME)
    except ValueError:
        return False
    return True


def _fill_in(arguments: Any) -> None:
    if arguments.speculative_draft_model_path is None:
        raise ConfigError(
            "DDTREE: no drafter", remedy="--speculative-draft-model-path names a DFlash drafter"
        )
    if arguments.pp_size != 1:
        raise ConfigError(f"DDTREE: pipeline parallelism of {arguments.pp_size}, expected none")
    if arguments.disaggregation_mode != "null":
        raise ConfigError(
            f"DDTREE: --disaggregation-mode {arguments.disaggregation_mode}, expected none"
        )
    if arguments.speculative_draft_window_size is not None:
        raise ConfigError(
            "DDTREE: --speculative-draft-window-size is not supported", remedy="leave it out"
        )
    settings, _ = read_settings(os.environ)
    trained, block = _block_of(arguments), arguments.speculative_dflash_block_size
    if block is None and trained is None:
        raise ConfigError(
            f"DDTREE: {arguments.speculative_draft_model_path} says no block_size, as a DFlash "
            "drafter does",
            remedy="name a DFlash drafter, or say how many positions it drafts, and one, with "
            "--speculative-dflash-block-size",
        )
    if block not in (None, trained):
        _log.warning(
            "DDTREE: blocks of %s positions, and the drafter was trained with %s", block, trained
        )
    shape = tree_shape(
        block=int(trained if block is None else block),  # type: ignore[arg-type]
        budget=settings.ddtree_budget,
        num_draft_tokens=arguments.speculative_num_draft_tokens,
        top_k=settings.ddtree_top_k,
    )
    # DFLASH has neither steps nor top-k of EAGLE's kind, but SGLang sizes buffers by them.
    arguments.speculative_num_steps = 1
    arguments.speculative_eagle_topk = 1
    arguments.speculative_num_draft_tokens = shape.nodes
    arguments.speculative_dflash_block_size = shape.block
    if arguments.speculative_draft_attention_backend is None:
        arguments.speculative_draft_attention_backend = "triton"
    if arguments.max_running_requests is None:
        arguments.max_running_requests = _REQUESTS
        _log.info("DDTREE: --max-running-requests is %d, as nothing was said", _REQUESTS)


def _block_of(arguments: Any) -> int | None:
    """The block that the drafter was trained with, as its configuration says; None: it does not."""
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
    from sglang.srt.utils.hf_transformers_utils import get_config

    path = arguments.speculative_draft_model_path
    try:
        config = get_config(
            path,
            trust_remote_code=arguments.trust_remote_code,
            revision=arguments.speculative_draft_model_revision,
            model_override_args=json.loads(arguments.json_model_override_args),
        )
        block = parse_dflash_draft_config(draft_hf_config=config).resolve_block_size(default=None)
    except Exception as error:  # of transformers, of a hub, of a file: all the same to the user
        said = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"DDTREE: the drafter {path} cannot be read: {said}",
            remedy="--speculative-draft-model-path names a folder or a repository of one",
        ) from error
    return None if block is None else int(block)


def stop(error: KdError) -> NoReturn:
    _log.error("%s; the server stops", error)
    raise SystemExit(1) from error
