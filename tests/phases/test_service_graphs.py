"""What is read of a server's log about CUDA graphs."""

from __future__ import annotations

from phases.service_graphs import Capture, Replays, capture_in, replays_in

LOG = """\
[t] Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=9, bs=[1, 2, 4]
[t] Capture target decode CUDA graph end. elapsed=1.50 s, mem usage=0.25 GB, avail mem=80.00 GB.
[t] Decode graph replay: worker=target key_size=4 (bs) mode=TARGET_VERIFY raw_bs=3
[t] Decode graph replay: worker=target key_size=4 (bs) mode=TARGET_VERIFY raw_bs=4
[t] Decode graph replay: worker=target key_size=4 (bs) mode=TARGET_VERIFY raw_bs=3
[t] Decode graph replay: worker=draft key_size=4 (bs) mode=DECODE raw_bs=4
[t] Decode batch, #running-req: 3, #token: 9, token usage: 0.00, cuda graph: True, gen throughput
"""


def test_replays_are_counted_by_padded_and_real_size() -> None:
    replays = replays_in(LOG)
    assert replays == Replays({(4, 3): 2, (4, 4): 1}, other=0, eager=0, in_graphs=1)
    assert (replays.verified, replays.padded) == (10, 2)


def test_a_step_without_a_graph_and_another_mode_are_seen() -> None:
    more = LOG.replace("cuda graph: True", "cuda graph: False").replace("draft", "target")
    assert (replays_in(more).eager, replays_in(more).other) == (1, 0)
    assert replays_in(more.replace("DECODE", "DLLM_EXTEND")).other == 1
    assert replays_in("Decode batch, #running-req: 1, cpu graph: False, gen").eager == 1
    other = replays_in(LOG.replace("cuda graph: True", "graph=on"))
    assert (other.eager, other.in_graphs) == (0, 0)


def test_plain_decode_is_counted_apart() -> None:
    replays = replays_in(LOG.replace("TARGET_VERIFY", "DECODE").replace("draft", "target"))
    assert replays == Replays({}, other=0, eager=0, in_graphs=1, decodes={(4, 3): 2, (4, 4): 2})
    assert (replays.decoded, replays.padded_decodes, replays.verified, replays.padded) == (
        *(4, 2),
        *(0, 0),
    )


def test_what_a_capture_took() -> None:
    assert capture_in(LOG) == Capture(seconds=1.5, memory_bytes=0.25e9, graphs=1)
    assert capture_in("nothing") == Capture(0.0, 0.0, 0)
