"""What a machine lacks, as the runner asks it."""

from __future__ import annotations

import dataclasses

from kdtree_engine.machine import Machine
from phases.requirement import Requirement

BARE = Machine(
    hostname="here", system="Linux", python="3.12", torch="2.11", cuda=None, driver=None, gpus=(),
    nvcc=None, compute_sanitizer=None, sglang=None, ssh=None, rsync=None,
)  # fmt: skip


def test_sglang_is_that_of_the_servers() -> None:
    """A machine's SGLang is that of the Python that starts servers: `tasks._this_machine`."""
    served = dataclasses.replace(BARE, sglang="0.5.23")
    for need in (Requirement.SGLANG, Requirement.SERVICE):
        assert "SGLang is not installed" in str(need.missing(BARE))
        assert need.missing(served) is None
    assert Requirement.GPU.missing(BARE) is not None
