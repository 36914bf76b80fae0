"""Metrics as a server says them."""

from __future__ import annotations

from kdtree_engine.fragmentation.exported import PREFIX, read_metrics

SAID = """\
# HELP kdtree:kv_mean_runs Mean contiguous runs of KV slots that a measured request has.
# TYPE kdtree:kv_mean_runs gauge
kdtree:kv_mean_runs{engine_type="unified",model_name="a } model",tp_rank="0"} 12.5
kdtree:kv_mean_runs{engine_type="unified",model_name="a } model",tp_rank="1"} 13.5
kdtree:kv_page_locality{tp_rank="0"} 1.0 1764490000000
kdtree:kv_free_runs NaN
kdtree:kv_reserved_slots many
sglang:num_running_reqs{tp_rank="0"} 3.0
sglang:evicted_tokens_total 4e3

no sample at all
"""


def test_names_by_prefix_and_means_over_ranks() -> None:
    assert read_metrics(SAID, PREFIX) == {"kdtree:kv_mean_runs": 13.0, "kdtree:kv_page_locality": 1}


def test_all_names() -> None:
    found = read_metrics(SAID)
    assert found["sglang:num_running_reqs"] == 3
    assert found["sglang:evicted_tokens_total"] == 4000


def test_nothing_said() -> None:
    assert read_metrics("") == read_metrics("<html>not found</html>") == {}
