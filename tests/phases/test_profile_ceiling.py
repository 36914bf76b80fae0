"""What fraction of a ceiling was reached: on sums by hand, and on traces of a real server.

The traces are of SGLang 0.5.17 on one H200, four layers, graphs on, at 4,096 and 66,560 tokens:
trees of nine nodes on the kernel and on Triton, and no speculation.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest
import torch
from traces import REDUCE, VERIFY, Trace, one_of_two_ranks

from kdtree_engine.gpus import GPUS, LINKS
from kdtree_engine.moe.routing import Routing, routing_of
from kdtree_engine.profiling.summary import Profile, profile
from phases.profile_ceiling import LinkRate, attained, ceiling_remarks, ceilings, levers
from phases.profile_counted import Counted, counted
from phases.profile_note import Note, note_remarks, read_note
from phases.profile_table import as_json, class_rows

DATA = pathlib.Path(__file__).resolve().parents[1] / "data" / "profile"
H200 = GPUS["h200"].bandwidth


def trace(name: str) -> pathlib.Path:
    return DATA / f"{name}-1-TP-0.trace.json.gz"


def classes(found: Profile) -> dict[str, Any]:
    return {one.name: one for one in found.classes}


@pytest.mark.parametrize(
    ("name", "attention", "kernel_us"),
    [
        ("kernel-4096", "verify attention", 68.9),
        ("kernel-66560", "verify attention", 151.5),
        ("triton-4096", "verify attention", 2946.3),
        ("triton-66560", "verify attention", 50_889.3),
        ("plain-4096", "other attention", 135.4),
        ("plain-66560", "other attention", 440.5),
    ],
)
def test_real_traces(name: str, attention: str, kernel_us: float) -> None:
    found = profile([trace(name)])
    (rank,) = found.ranks
    assert (rank.rank, rank.told_by, rank.steps) == ("TP0", "ranges", 11)
    assert not found.unknown
    one = classes(found)[attention]
    assert one.kernel_us == pytest.approx(kernel_us, abs=0.1)
    assert sum(each.us for each in found.classes) == pytest.approx(found.step_us)
    assert ("tree build" in classes(found)) == (not name.startswith("plain"))


def test_the_kernel_against_triton_in_one_service() -> None:
    """336 times in the kernels, and 15 in the step, whose rest is the host's."""
    ours, theirs = (profile([trace(f"{name}-66560")]) for name in ("kernel", "triton"))
    times = [classes(one)["verify attention"].kernel_us for one in (theirs, ours)]
    assert times[0] / times[1] == pytest.approx(336, abs=1)
    assert theirs.step_us / ours.step_us == pytest.approx(14.5, abs=0.1)


def test_bytes_of_the_kv_by_hand() -> None:
    """Four layers of 66,560 rows of 576 numbers, two bytes each, in 151.5 us."""
    found = attained(profile([trace("kernel-66560")]), read_note(trace("kernel-66560")))
    one = found["verify attention"]
    assert one.bytes == 4 * 66_560 * 576 * 2
    assert one.gb_s == pytest.approx(one.bytes / 151.5e-6 / 1e9, rel=1e-3)
    assert one.fraction == pytest.approx(one.gb_s * 1e9 / H200)
    assert 0.4 < one.fraction < 0.5


def test_bytes_of_dense_products_by_hand() -> None:
    """Hidden 1024, 8 heads, a dense layer of 2048, 512 tokens in the vocabulary."""
    hidden, heads, layers = 1024, 8, 4
    layer = hidden * 576 + hidden * heads * 192 + 2 * heads * 128 * 512 + heads * 128 * hidden
    layer += 3 * hidden * 2048
    found = attained(profile([trace("plain-4096")]), read_note(trace("plain-4096")))
    assert found["dense GEMM"].bytes == 2 * (layers * layer + hidden * 512)


def some_note(**changed: Any) -> Note:
    note = read_note(trace("kernel-4096"))
    assert note is not None
    return dataclasses.replace(note, **changed)


@pytest.mark.parametrize(
    ("changed", "counted"),
    [
        ({}, {"verify attention", "dense GEMM"}),
        ({"gpu": "NVIDIA GeForce GTX 980"}, set()),
        ({"gpu": None}, set()),
        ({"model": {}}, set()),
        ({"model": {"kv_lora_rank": "512", "num_hidden_layers": True}}, set()),
        ({"server": {"dtype": "odd", "speculative_algorithm": "NGRAM"}}, set()),
        ({"server": {"dtype": "bfloat16", "speculative_algorithm": "NGRAM"}}, {"verify attention"}),
    ],
)
def test_what_is_not_known_is_not_counted(changed: dict[str, Any], counted: set[str]) -> None:
    assert set(attained(profile([trace("kernel-4096")]), some_note(**changed))) == counted


def test_experts_are_not_counted_as_dense() -> None:
    """Three of four layers have experts: their projections are dense, and one layer's MLP."""
    note = some_note()
    model = {**note.model, "first_k_dense_replace": 1}
    whole, rest = (
        attained(profile([trace("kernel-4096")]), one)["dense GEMM"]
        for one in (note, some_note(model=model))
    )
    assert whole.bytes - rest.bytes == 2 * 3 * 3 * 1024 * 2048
    assert rest.basis == "without the router and shared experts"


def test_an_fp8_cache_has_half_the_bytes() -> None:
    note = some_note()
    server = {**note.server, "kv_cache_dtype": "fp8_e4m3"}
    whole = attained(profile([trace("kernel-4096")]), note)["verify attention"].bytes
    half = attained(profile([trace("kernel-4096")]), some_note(server=server))
    assert 2 * half["verify attention"].bytes == whole


def test_a_profiler_that_slows_the_host_is_told() -> None:
    found = profile([trace("kernel-4096")])
    (line,) = note_remarks(found, some_note(step_us=2289.0))
    assert "a step took 2,289 us before the profiler ran and 4,152 under it" in line
    assert not note_remarks(found, some_note(step_us=4000.0))
    (line,) = note_remarks(found, some_note(step_us=None))
    assert "which slows the host by an amount that was not measured here" in line
    assert not note_remarks(found, None)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", '{"asked": 1}', '{"asked": {"context": 1e400, "batch": 1}}']
)
def test_another_file_of_that_name_is_no_note(text: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "run.json").write_text(text)
    assert read_note(tmp_path / "run-TP-0.trace.json.gz") is None
    assert read_note(tmp_path / "run.trace.json.gz") is None


def test_notes_of_real_traces_name_what_they_are_of() -> None:
    for path in sorted(DATA.glob("*.json")):
        told = json.loads(path.read_text())
        note = read_note(DATA / told["traces"][0])
        assert note is not None
        assert note.gpu == "NVIDIA H200"
        assert path.name == f"{told['command'][3]}-{note.context}-{note.batch}.json"


# Experts: two layers of which one is dense, 8 experts, 2 of a token, hidden 16, width 4.

EXPERTS: dict[str, Any] = {
    **{"num_hidden_layers": 2, "first_k_dense_replace": 1, "hidden_size": 16},
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 4},
}
EXPERT = 3 * 16 * 4
"""Weights of one."""


def expert_note(batch: int = 1, model: dict[str, Any] | None = None, **server: Any) -> Note:
    told = {"dtype": "bfloat16", "tp_size": 1, "speculative_algorithm": None, **server}
    return some_note(batch=batch, server=told, model={**EXPERTS, **(model or {})})


def expert_work(*given: Any, routing: Routing | None = None, **more: Any) -> Counted:
    found = counted(expert_note(*given, **more), routing)["MoE GEMM"]
    assert isinstance(found, Counted), found
    return found


def why_not(name: str, note: Note, routing: Routing | None = None) -> str:
    found = counted(note, routing)[name]
    return "" if isinstance(found, Counted) else found.why


def test_one_token_reads_its_experts() -> None:
    found = expert_work()
    assert found.bytes == pytest.approx(2 * EXPERT * 2)
    assert found.flops == pytest.approx(2 * 2 * EXPERT)
    assert found.basis.startswith("2.0 of 8 experts active a layer by 1 tokens (uniform routing")


def test_tokens_share_experts() -> None:
    """Two tokens leave an expert idle with (6/8)^2: 8 * 7/16 are active. Trees add tokens."""
    assert expert_work(2).bytes == pytest.approx(8 * 7 / 16 * EXPERT * 2)
    trees = expert_work(3, speculative_algorithm="NGRAM", speculative_num_draft_tokens=2)
    assert trees.bytes == pytest.approx(8 * (1 - 0.75**6) * EXPERT * 2)
    assert trees.flops == pytest.approx(6 * 2 * 2 * EXPERT)
    assert expert_work(10**6).bytes == pytest.approx(8 * EXPERT * 2), "all of them, once"


def test_ranks_divide_experts_whole_or_in_slices() -> None:
    assert expert_work(tp_size=4).bytes == pytest.approx(expert_work().bytes / 4)


@pytest.mark.parametrize(
    ("server", "model", "a_weight"),
    [
        ({}, {}, 2),
        ({"dtype": "float32"}, {}, 4),
        ({"quantization": "fp8"}, {}, 1),
        ({}, {"quant_method": "fp8"}, 1),
        ({}, {"quant_method": "compressed-tensors", "weight_bits": 4, "weight_group": 32}, 0.5625),
    ],
)
def test_bytes_of_a_weight(server: dict[str, Any], model: dict[str, Any], a_weight: float) -> None:
    found = expert_work(model=model, **server)
    assert found.bytes == pytest.approx(2 * EXPERT * a_weight)
    assert (found.flops is None) == (a_weight == 1)


@pytest.mark.parametrize(
    ("server", "model", "why"),
    [
        ({"quantization": "awq"}, {}, "quantised by awq"),
        ({}, {"quant_method": "gptq", "weight_bits": 4}, "quantised by gptq"),
        ({"dtype": None}, {}, "what type weights have"),
        ({"enable_dp_attention": True}, {}, "DP attention"),
        ({"pp_size": 2}, {}, "pipeline stages"),
        ({"tp_size": 0}, {}, "how many ranks"),
        ({"speculative_algorithm": "NGRAM"}, {}, "how many tokens are verified"),
        ({}, {"moe_layer_freq": 2}, "not every layer has experts"),
        ({}, {"moe_intermediate_size": None}, "no moe_intermediate_size of the model"),
        ({}, {"first_k_dense_replace": 2}, "no layer of the model has experts"),
        ({}, {"num_experts_per_tok": 9}, "a token takes 9 of 8 experts"),
    ],
)
def test_experts_that_cannot_be_counted_say_why(
    server: dict[str, Any], model: dict[str, Any], why: str
) -> None:
    assert why in why_not("MoE GEMM", expert_note(model=model, **server))


def test_dense_weights_that_are_quantised_somehow_are_not_counted_as_bf16() -> None:
    note = some_note()
    told = some_note(server={**note.server, "quantization": "awq"})
    assert "quantised by awq" in why_not("dense GEMM", told)
    assert "dense GEMM" not in attained(profile([trace("kernel-4096")]), told)


def test_recorded_routing_takes_the_place_of_the_assumption() -> None:
    """Every token of the recording chose experts 0 and 1."""
    counts = torch.zeros(10, 1, 8, dtype=torch.int32)
    counts[:, :, :2] = 3  # three tokens a step
    recorded = routing_of(counts, top_k=2, layers=None, source="a recording")
    found = expert_work(6, routing=recorded)
    assert found.bytes == pytest.approx(2 * EXPERT * 2)
    assert "2.0 of 8 experts active a layer by 6 tokens (a recording, 6 tokens" in found.basis
    assert "has 10 steps, and it takes 33" in why_not("MoE GEMM", expert_note(100), recorded)
    other = expert_note(model={"n_routed_experts": 16})
    assert "is of 8 experts, 2 a token" in why_not("MoE GEMM", other, recorded)


def test_the_longer_of_bytes_and_flops_is_the_ceiling(tmp_path: pathlib.Path) -> None:
    """Each takes 1 ms of kernels; many tokens make products the longer."""
    wide = {"hidden_size": 4096, "moe_intermediate_size": 2048}
    written = Trace()
    written.kernel("fused_moe_kernel", 0, 1000)
    found = profile([written.write(tmp_path / "trace.json")])
    few, many = (
        attained(found, expert_note(batch, model=wide))["MoE GEMM"] for batch in (1, 10_000)
    )
    expert = 3 * 4096 * 2048
    assert (few.ceiling, many.ceiling) == ("DRAM", "flops")
    assert few.fraction == pytest.approx(2 * expert * 2 / H200 / 1e-3)
    assert many.fraction == pytest.approx(2 * 10_000 * 2 * expert / GPUS["h200"].flops / 1e-3)


def test_attention_over_many_rows_is_bound_by_flops(tmp_path: pathlib.Path) -> None:
    written = Trace()
    written.kernel(VERIFY, 0, 1000)
    found = profile([written.write(tmp_path / "trace.json")])
    note = some_note()
    wide = some_note(model={**note.model, "num_attention_heads": 128})
    one, other = (attained(found, each)["verify attention"] for each in (note, wide))
    assert (one.ceiling, other.ceiling) == ("DRAM", "flops")
    flops = 4 * 4096 * 2 * (512 + 64 + 512) * 128 * 9
    assert other.flops == flops
    assert other.fraction == pytest.approx(flops / GPUS["h200"].flops / 1e-3)


# Collectives: two ranks, two all-reduces of 18,432 bytes a step, of which a rank sends as many.

LINK = LinkRate("a wire", 1e9, "made up")


def two_ranks(folder: pathlib.Path, *, told: bool = True) -> Profile:
    return profile(
        [
            one_of_two_ranks(rank, told=told).write(folder / f"1-TP-{rank}.trace.json")
            for rank in (0, 1)
        ]
    )


def test_collectives_are_held_against_the_link_without_the_waiting(tmp_path: pathlib.Path) -> None:
    """31 us a step in the mean, of which 11 are waiting."""
    one = attained(two_ranks(tmp_path), None, LINK)["communication"]
    assert (one.bytes, one.ceiling, one.of) == (36_864, "link", "a wire")
    assert one.fraction == pytest.approx(36_864 / 20e-6 / 1e9)
    assert one.basis == "a wire, 1.0 GB/s a direction: made up; no waiting"


def test_what_is_told_of_some_collectives_is_held_against_their_own_time(
    tmp_path: pathlib.Path,
) -> None:
    written = one_of_two_ranks(0)
    written.collective(REDUCE, 1070, 10)
    found = profile([written.write(tmp_path / "1-TP-0.trace.json")])
    one = attained(found, None, LINK)["communication"]
    assert one.fraction == pytest.approx(36_864 / 40e-6 / 1e9)
    assert "of 2.0 of 2.5 kernels a step" in one.basis
    assert "its time has waiting for other ranks in it" in one.basis


def test_collectives_that_tell_nothing_are_not_counted(tmp_path: pathlib.Path) -> None:
    (without,) = ceiling_remarks(ceilings(two_ranks(tmp_path), None))
    assert without.startswith("communication: not counted: what the link gives is not known")
    silent = ceilings(two_ranks(tmp_path, told=False), None, LINK)
    assert not silent.attained
    assert "no kernel has NCCL's arguments" in silent.missing["communication"]


def test_the_links_of_the_table_are_those_that_were_measured() -> None:
    """A bus bandwidth of 38 to 41 GB/s over PCIe, where 22.5 GB/s of a message were taken."""
    assert GPUS["rtx-pro-6000"].link == "pcie"
    assert LINKS["pcie"].sent == pytest.approx(22.5e9 * 7 / 4)
    assert 38e9 < LINKS["pcie"].sent < 41e9


def test_the_lever_is_what_the_figures_point_to(tmp_path: pathlib.Path) -> None:
    """Far from its ceiling a kernel can be better; near it only fewer bytes help."""
    note = some_note(context=66_560)
    floor = 4 * 66_560 * 576 * 2 / H200 * 1e6
    said = []
    for name, took in (("far", floor * 2), ("near", floor / 0.8)):
        written = Trace()
        written.kernel(VERIFY, 0, took)
        found = profile([written.write(tmp_path / f"{name}.json")])
        assert levers(found)["verify attention"].startswith("tile, stages and splits")
        said.append(levers(found, ceilings(found, note))["verify attention"])
    assert said[0].startswith("tile, stages and splits")
    assert said[1].startswith("80% of DRAM is reached: fewer bytes")


def test_collectives_that_wait_point_to_the_rank_that_comes_last(tmp_path: pathlib.Path) -> None:
    """11 of 31 us are waiting in the mean; with a rank that is later still, more than half."""
    even = two_ranks(tmp_path)
    assert levers(even)["communication"].startswith("the all-reduce's algorithm and link")
    paths = []
    for rank, took in ((0, 10.0), (1, 90.0)):
        written = Trace()
        for at in (0.0, 200.0, 400.0):
            written.span("step[DECODE bs=1]", at, at + 50)
            written.kernel("fused_moe_kernel", at + 1, took, written.launch(at))
            written.collective(REDUCE, at + 1 + took, 100 - took)
        paths.append(written.write(tmp_path / f"late-TP-{rank}.trace.json"))
    late = levers(profile(paths))["communication"]
    assert late.startswith("80% of it is waiting for the rank that comes last")


def test_the_same_lever_is_printed_and_kept(tmp_path: pathlib.Path) -> None:
    found = profile([trace("kernel-66560")])
    reached = ceilings(found, read_note(trace("kernel-66560")))
    shown = {row[0]: row[-1] for row in class_rows(found, reached) if row[0] != "step"}
    kept = {one["name"]: one["lever"] for one in as_json(found, None, None, reached)["classes"]}
    assert shown == kept == levers(found, reached)
