"""The real server profiles itself while requests decode, and is as before afterwards."""

from __future__ import annotations

import gzip
import json
import pathlib

import pytest

from phases.profile_run import served
from phases.service import Service
from phases.service_scale import CPU, kernel
from remote.profiler import asked_here

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


def test_a_trace_of_the_real_server(tmp_path: pathlib.Path) -> None:
    """Without a GPU it has no kernels: SGLang's ranges are there, and the server goes on."""
    with served(kernel(9), scale=CPU, logs=tmp_path, batch=2, seed=1, graphs=False) as port:
        service = Service(port, tmp_path / "kdtree_mla-9.log")
        before = service.generate([(2, 3, 4)], 4)
        found = asked_here(
            {
                "port": port,
                "folder": str(tmp_path / "traces"),
                "name": "kernel-48-2",
                "context": 48,
                "batch": 2,
                "steps": 3,
                "vocabulary": 480,
                "seed": 1,
                "new_tokens": 4096,
            }
        )
        assert service.generate([(2, 3, 4)], 4) == before
        assert service.load().requests == 0
    assert found["server"]["speculative_num_draft_tokens"] == 9
    assert found["model"]["kv_lora_rank"] == 512
    assert (found["beside"], found["ended"]) == (0, False)
    assert found["step_us"] > 0
    (trace,) = found["traces"]
    events = json.loads(gzip.decompress(pathlib.Path(trace).read_bytes()))["traceEvents"]
    names = {str(event.get("name")) for event in events}
    assert any(name.startswith("step[VERIFY") for name in names)
    assert "scheduler.run_batch" in names
