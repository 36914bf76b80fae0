"""`kdtree_engine.moe.recorder` reads what SGLang's own recorder has written."""

from __future__ import annotations

import pathlib
import subprocess

import pytest

from kdtree_engine.moe.trace import read_routing
from phases.service import server_python

SCRIPT = """
import sys, types
import torch
from sglang.srt.eplb import expert_distribution as module
from sglang.srt.model_executor.forward_batch_info import ForwardMode

(mode,) = sys.argv[1:]
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
moe = types.SimpleNamespace(
    expert_distribution_recorder_mode=mode, moe_a2a_backend="none",
    expert_distribution_recorder_buffer_size=4, eplb_min_rebalancing_utilization_threshold=1.0,
)
overlap = types.SimpleNamespace(enable_two_batch_overlap=False)
module.get_exec = lambda: types.SimpleNamespace(moe=moe, overlap=overlap)
module.get_schedule = lambda: types.SimpleNamespace(chunked_prefill_size=2)
module.get_device_namespace = lambda: types.SimpleNamespace(device="cpu")
module.get_device = lambda: "cpu"
module.reports_expert_balancedness = lambda: False
module.megamoe_prefill_only_recorder_enabled = lambda: False
module.torch.get_device_module = lambda: types.SimpleNamespace(
    empty_cache=lambda: None, is_current_stream_capturing=lambda: False
)
# Four logical experts and a copy of the first, in two layers after a dense one.
metadata = types.SimpleNamespace(
    num_layers=3, num_physical_experts=5, num_logical_experts=4, num_local_physical_experts=5,
    ep_size=1, physical_to_logical_map=torch.tensor([[0, 1, 2, 3, 0]] * 3),
)
recorder = module._ExpertDistributionRecorderReal(metadata, 0)
recorder.start_record()
for number in (0, 1):
    batch = types.SimpleNamespace(
        input_ids=torch.arange(3), positions=torch.arange(3), extend_seq_lens_cpu=None,
        forward_mode=ForwardMode.TARGET_VERIFY,
    )
    with recorder.with_forward_pass(number, batch):
        for layer, chosen in ((1, [[0, 1], [4, 2], [1, 3]]), (2, [[3, 2], [3, 4], [3, 1]])):
            with recorder.with_current_layer(layer):
                recorder.on_select_experts(torch.tensor(chosen))
recorder.dump_record()
"""


@pytest.mark.parametrize("mode", ["stat", "per_pass", "per_token"])
def test_a_dump_of_the_recorder_is_read(tmp_path: pathlib.Path, mode: str) -> None:
    done = subprocess.run(
        [server_python(), "-W", "ignore", "-c", SCRIPT, mode],
        env={"SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (dump,) = tmp_path.glob("*.pt")
    found = read_routing(dump, top_k=2)
    assert (found.layers, found.tokens.tolist(), found.top_k) == ((1, 2), [3, 3], 2)
    assert found.counts.tolist() == [[[2, 2, 1, 1], [1, 1, 1, 3]]] * 2
