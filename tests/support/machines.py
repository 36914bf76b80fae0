"""A machine for what a benchmark writes down, where none is looked at."""

from __future__ import annotations

from kdtree_engine.machine import Machine

HERE = Machine(
    hostname="here",
    system="Linux",
    python="3.12",
    torch="2.11",
    cuda="13.0",
    driver="580",
    gpus=(),
    nvcc=None,
    compute_sanitizer=None,
    sglang="0.5.23",
    ssh=None,
    rsync=None,
)
