"""One case of the kit on one backend.

The kit's functions are called as they are. What is not theirs: trees of more than three nodes, a
count of the kernel's calls (a case that the parent class served would pass too), and a mask of
ones on request.
"""

from __future__ import annotations

import random
import traceback
import unittest
import unittest.mock
from typing import Any

import torch

from kd_sglang_kit.graph import Passes, one_layout
from kd_sglang_kit.hidden import hidden

KERNEL = "kdtree_mla"


def drawn_tree(nodes: int) -> torch.Tensor:
    """Who sees whom in a random tree, parents first, drawn from its size: [nodes, nodes] bool."""
    draw = random.Random(nodes)
    sees = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        sees[node] |= sees[draw.randrange(node)]
    return sees


class Kit:
    """The kit for one backend; a process makes one."""

    def __init__(self, backend: str, device: str) -> None:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from sglang.test.kits.attention_unittest.attention_methods import mla_attention
        from sglang.test.kits.attention_unittest.runner_modes import (
            speculative_target_verify_runner,
        )

        from kdtree_engine.sglang_ext import plugin

        plugin.register()  # not through SGLang, which would only log what goes wrong
        self.backend, self.device = backend, device
        self.mla, self.verify, self.modes = (
            mla_attention,
            speculative_target_verify_runner,
            ForwardMode,
        )
        self.widths = {
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "dtype": torch.float32 if device == "cpu" else torch.bfloat16,
            "device": device,
        }
        self.calls = 0
        self.spoils: Any = lambda: False
        if backend == KERNEL:
            self._watch()

    def run(self, case: dict[str, Any]) -> dict[str, Any]:
        """The fields of `phases.conformance.Result` for a case, given as its fields."""
        form = case["form"]
        passes = Passes(self.device == "cuda")
        # Only the replay: a spoiled eager pass would fail before anything is captured.
        self.spoils = lambda: case["spoiled"] and (form == "eager" or passes.second)
        before, given = self.calls, self._given(case)
        outcome, says = "passed", ""
        try:
            with torch.no_grad(), self._trees(case):
                self._attempt(form, given, case, passes)
                if self.device == "cuda":
                    torch.cuda.synchronize()
        except unittest.SkipTest as skipped:
            outcome, says = "skipped", str(skipped)
        except (Exception, SystemExit) as error:  # the plugin refuses by SystemExit
            cause = error.__cause__ if isinstance(error, SystemExit) else None
            text = str(cause or error).strip().splitlines()
            differs = isinstance(error, AssertionError) and "not close" in str(error)
            outcome = "differs" if differs else "error"
            detail = next((line for line in text if "Mismatched" in line), "")
            says = " ".join(filter(None, (type(error).__name__, *text[:1], detail, _place(error))))[
                :400
            ]
            if not differs:
                traceback.print_exc()
        return {
            "outcome": outcome,
            "says": says,
            "calls": self.calls - before,
            "replays": passes.replays,
            "misread": hidden(given, case["context"]) if form == "graph mode as shipped" else 0,
        }

    def _attempt(self, form: str, given: Any, case: dict[str, Any], passes: Passes) -> None:
        test, options = unittest.TestCase(), {"max_context_len": case["context"], **self.widths}
        if form == "decode":
            self.mla.run_mla_attention_case(test, given, **options)
            return
        options |= {"topk": case["topk"], "spec_kind": case["kind"]}
        if form == "eager":
            self.verify.run_mla_eagle_verify_case(test, given, **options)
            return
        options["cuda_graph_capture_batch_size"] = given.batch_size + 1  # a padded replay
        if form == "graph mode as shipped":
            self.verify.run_mla_eagle_verify_cuda_graph_case(test, given, **options)
            return
        with one_layout(self.verify, self.mla, case["context"], passes):
            self.verify.run_mla_eagle_verify_cuda_graph_case(test, given, **options)

    def _given(self, case: dict[str, Any]) -> Any:
        prefixes = tuple(case["prefixes"])
        decode = case["form"] == "decode"
        return self.mla.MLAAttentionCase(
            name="verify",
            backend=self.backend,
            forward_mode=self.modes.DECODE if decode else self.modes.TARGET_VERIFY,
            num_heads=case["heads"],
            page_size=case["page"],
            prefix_lens=prefixes,
            extend_lens=() if decode else (case["nodes"],) * len(prefixes),
        )

    def _trees(self, case: dict[str, Any]) -> Any:
        kits_own = self.verify._draft_tree_mask

        def tree(*, draft_token_num: int, topk: int, device: str) -> torch.Tensor:
            if case["drawn"]:
                return drawn_tree(draft_token_num).to(device)
            mask: torch.Tensor = kits_own(draft_token_num=draft_token_num, topk=topk, device=device)
            return mask

        return unittest.mock.patch.object(self.verify, "_draft_tree_mask", tree)

    def _watch(self) -> None:
        """Wrap the one method through which every call of the kernel goes."""
        from kdtree_engine.sglang_ext.backend import KdtreeMlaBackend

        attend = KdtreeMlaBackend._attend

        def watched(backend: Any, *given: Any, **rest: Any) -> torch.Tensor:
            self.calls += 1
            if self.spoils():
                rest["mask"] = torch.ones_like(rest["mask"])
            return attend(backend, *given, **rest)

        KdtreeMlaBackend._attend = watched


def _place(error: BaseException) -> str:
    """Where in the kit it was raised, as file:line."""
    frames = [
        f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if "attention_unittest" in frame.filename
    ]
    return f"at {frames[-1]}" if frames else ""
