"""Ways to make a release unfit to be the live service, each by one change of its source.

tests/sglang/test_live_service.py deploys them, which takes SGLang and half an hour;
tests/kdtree_engine/test_unfit_releases.py holds them against the source in a moment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator

_PLUGIN = "kdtree-engine/kdtree_engine/sglang_ext/plugin.py"
_BACKEND = "kdtree-engine/kdtree_engine/sglang_ext/backend.py"


@dataclasses.dataclass(frozen=True)
class Break:
    """text: stands once in the file, which is named from the checkout's root."""

    file: str
    text: str
    instead: str

    def applied(self, source: str) -> str:
        count = source.count(self.text)
        assert count == 1, f"{self.file} has {self.text!r} {count} times: break it in another way"
        return source.replace(self.text, self.instead)


_REGISTERS = "        version = compat.sglang_version()\n"
_HEADS = "        heads = layer.tp_q_head_num\n"
HANGS = Break(
    _PLUGIN,
    _REGISTERS,
    "        import time\n\n        print('kd test: hangs here', flush=True)\n"
    f"        time.sleep(1e6)\n{_REGISTERS}",
)
"""SGLang calls this while it starts."""
FAILS = Break(
    _BACKEND,
    _HEADS,
    "        if mask is not None and qo_indptr.numel() > 2:\n"
    f"            raise RuntimeError('kd test: no kernel for this batch')\n{_HEADS}",
)
"""Of several requests: SGLang's warm-up and its answers to /health are of one."""
SEES_ALL = Break(
    _BACKEND, "mask=metadata.custom_mask,", "mask=torch.ones_like(metadata.custom_mask),"
)
"""Every node sees every other one."""
UNFIT = {"hangs": HANGS, "fails": FAILS, "sees all": SEES_ALL}


@contextlib.contextmanager
def broken(checkout: pathlib.Path, *breaks: Break) -> Iterator[None]:
    """The checkout with these changes, and as it was afterwards."""
    before = {one.file: (checkout / one.file).read_text() for one in breaks}
    try:
        for one in breaks:
            path = checkout / one.file
            path.write_text(one.applied(path.read_text()))
        yield
    finally:
        for name, text in before.items():
            (checkout / name).write_text(text)
