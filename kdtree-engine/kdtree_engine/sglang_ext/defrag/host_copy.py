"""A tensor on its way to the host, which nothing waits for until it is wanted."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["HostCopy"]


class HostCopy:
    """A copy of `tensor` as it is at this point of the current stream.

    On the CPU it is made at once, as the tensor may be a view that changes under way.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: Any = None
        if tensor.device.type == "cpu":
            self._host = tensor.clone()
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def is_over(self) -> bool:
        """Whether `tensor` would not wait."""
        return self._event is None or bool(self._event.query())

    def tensor(self) -> torch.Tensor:
        """The copy, on the host. Waits until it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
