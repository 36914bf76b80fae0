"""The kit's graph mode without its fault, around a real CUDA graph.

The kit's runner makes three forward passes: eager, with the metadata of a capture, and with that of
a replay. All three are plain calls. Here the second is captured, and the third copies its inputs
into the captured batch's tensors and replays.
"""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import torch

SEED = 3090
"""What the kit's fixture adds the length of a case's name to, to shuffle its pages."""


def slots_of(case: Any, context: int) -> Callable[[int, int], int]:
    """The slot of (request, position) in the layout that the kit's fixture of `case` uses."""
    from sglang.test.kits.attention_unittest.attention_methods.dense_attention import make_loc_fn

    slot: Callable[[int, int], int] = make_loc_fn(
        "shuffled_pages",
        batch_size=case.batch_size,
        seq_lens=case.seq_lens,
        prefix_lens=case.prefix_lens,
        page_size=case.page_size,
        max_context_len=context,
        seed=SEED + len(case.name),
    )
    return slot


class Passes:
    """The three forward passes of one case.

    captures: whether there is a GPU whose graphs can be used. replays: how many there were.
    second: whether the eager pass is over.
    """

    def __init__(self, captures: bool) -> None:
        self.captures = captures
        self.replays = 0
        self._done = 0
        self._graph: Any = None
        self._batch: Any = None
        self._hidden: Any = None
        self._out: Any = None

    @property
    def second(self) -> bool:
        return self._done > 0

    def forward(self, fixture: Any, batch: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """In place of the kit's `run_mla_forward`."""
        number = self._done
        try:
            if number == 0 or not self.captures:
                out: torch.Tensor = fixture.actual_module(inputs["input_hidden"], batch)
                return out
            return (
                self._capture(fixture, batch, inputs)
                if number == 1
                else self._replay(batch, inputs)
            )
        finally:
            self._done += 1

    def _capture(self, fixture: Any, batch: Any, inputs: dict[str, Any]) -> torch.Tensor:
        self._batch, self._hidden = batch, inputs["input_hidden"]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles kernels and fills caches, as SGLang's warm-up does
            for _ in range(2):
                fixture.actual_module(self._hidden, batch)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._out = fixture.actual_module(self._hidden, batch)
        return torch.full_like(self._out, torch.nan)  # nothing has been computed yet

    def _replay(self, batch: Any, inputs: dict[str, Any]) -> torch.Tensor:
        self._hidden.copy_(inputs["input_hidden"])
        self._batch.out_cache_loc.copy_(batch.out_cache_loc)
        self._out.fill_(torch.nan)
        self._graph.replay()
        self.replays += 1
        return self._out.clone()


@contextlib.contextmanager
def one_layout(verify: Any, mla: Any, context: int, passes: Passes) -> Iterator[None]:
    """Inside, the kit's batches and second writes use its fixture's layout, and `passes` runs.

    verify, mla: the kit's modules speculative_target_verify_runner and mla_attention.
    """
    make_batch = verify._make_mla_forward_batch

    def batch_of(case: Any, runner: Any, **options: Any) -> Any:
        return make_batch(case, runner, loc_fn=slots_of(case, context), **options)

    def store_prefix(fixture: Any, case: Any, batch: Any, inputs: Any, **options: Any) -> None:
        mla._populate_prefix_kv(
            fixture.actual_module,
            case,
            fixture.runner,
            fixture.backend,
            inputs["prefix_hidden"],
            loc_fn=slots_of(case, context),
            **options,
        )

    replaced = {
        "_make_mla_forward_batch": batch_of,
        "prepare_mla_runner_inputs": store_prefix,
        "run_mla_forward": passes.forward,
    }
    with unittest.mock.patch.multiple(verify, **replaced):
        yield
