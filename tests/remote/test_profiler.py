"""A server is driven, recorded and left as it was, whatever it does."""

from __future__ import annotations

import contextlib
import json
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from fake_sglang import FakeSglang, fake_sglang

from kdtree_engine.errors import MissingError
from remote import agent, profiler
from remote.releases import _BOOT, program_text


def asked(fake: FakeSglang, folder: pathlib.Path, **changed: Any) -> dict[str, Any]:
    request = {
        "port": fake.port,
        "folder": str(folder),
        "name": "kernel-40-2-run",
        "context": 40,
        "batch": 2,
        "steps": 4,
        "vocabulary": 50,
        "seed": 1,
        "new_tokens": 4096,
    }
    return request | changed


def test_requests_decode_while_it_records_and_are_aborted_after(tmp_path: pathlib.Path) -> None:
    with fake_sglang() as fake:
        found = profiler.profile(asked(fake, tmp_path))
        assert not fake.holding
    assert found["traces"] == [str(tmp_path / "kernel-40-2-run-TP-0.trace.json.gz")]
    assert (found["server"], found["beside"], found["ended"]) == ({"version": "0.5.17"}, 0, False)
    paths = fake.paths()
    begun = paths.index("/start_profile")
    assert fake.asked[begun][1]["num_steps"] == 4
    long = [
        body
        for path, body in fake.asked
        if path == "/generate" and body["sampling_params"]["max_new_tokens"] == 4096
    ]
    assert [len(body["input_ids"][0]) for body in long] == [40, 40]
    assert paths[begun + 1 :].count("/abort_request") == 2
    assert "/stop_profile" not in paths  # SGLang writes an error into its log where nothing runs


def test_each_rank_has_a_file(tmp_path: pathlib.Path) -> None:
    with fake_sglang(info={"tp_size": 2, "pp_size": 1}, ranks=2) as fake:
        found = profiler.profile(asked(fake, tmp_path))
    names = [pathlib.Path(path).name for path in found["traces"]]
    assert names == [f"kernel-40-2-run-TP-{rank}.trace.json.gz" for rank in (0, 1)]


def test_replicas_beside_each_other_are_refused_before_anything_is_sent(
    tmp_path: pathlib.Path,
) -> None:
    with fake_sglang(info={"dp_size": 2}) as fake, pytest.raises(agent.Refused, match="2 replicas"):
        profiler.profile(asked(fake, tmp_path))
    assert "/generate" not in fake.paths()
    with fake_sglang(
        info={"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}, ranks=2
    ) as fake:
        assert len(profiler.profile(asked(fake, tmp_path))["traces"]) == 2


def test_a_step_is_timed_while_nothing_is_recorded(tmp_path: pathlib.Path) -> None:
    """A token takes 2 ms and a verification gives two."""
    with fake_sglang(step_s=0.002) as fake:
        found = profiler.profile(asked(fake, tmp_path))
    assert found["step_us"] > 3500  # 4,000; sleeping takes a little longer, never less


def test_prompts_hold_only_tokens_that_the_model_has(tmp_path: pathlib.Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 20, "hidden_size": 8}')
    with fake_sglang(info={"model_path": str(tmp_path / "model")}) as fake:
        found = profiler.profile(asked(fake, tmp_path / "out"))
    tokens = {
        token
        for path, body in fake.asked
        if path == "/generate"
        for prompt in body["input_ids"]
        for token in prompt
    }
    assert tokens <= set(range(5, 20))
    assert found["model"] == {"vocab_size": 20, "hidden_size": 8}


def test_of_an_unknown_model_few_tokens_are_taken() -> None:
    assert profiler._tokens(480, None) == range(16, 116)
    assert profiler._tokens(480, 163_840) == range(16, 496)
    assert profiler._tokens(480, 64) == range(16, 64)


def test_what_a_server_says_of_itself_holds_no_secret(tmp_path: pathlib.Path) -> None:
    with fake_sglang(info={"version": "1", "api_key": "hidden", "tp_size": 1}) as fake:
        found = profiler.profile(asked(fake, tmp_path))
    assert "hidden" not in json.dumps(found)


def test_requests_of_others_are_told(tmp_path: pathlib.Path) -> None:
    with fake_sglang(others=3) as fake:
        assert profiler.profile(asked(fake, tmp_path))["beside"] == 3


def test_a_recording_that_goes_on_is_stopped(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler, "_WRITTEN_S", 3.0)
    with fake_sglang(writes="nothing") as fake:
        with pytest.raises(agent.Refused, match=r"wrote no whole files of 1 ranks within 3 s"):
            profiler.profile(asked(fake, tmp_path))
        assert not fake.holding
    assert fake.paths()[-3:] == ["/stop_profile", "/abort_request", "/abort_request"]


def test_half_a_file_is_not_taken(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "_WRITTEN_S", 3.0)
    with fake_sglang(writes="cut") as fake, pytest.raises(agent.Refused, match="no whole files"):
        profiler.profile(asked(fake, tmp_path))


def test_a_file_that_grows_no_more_is_not_waited_for(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk: the requests are aborted at once, and the profiler is stopped."""
    monkeypatch.setattr(profiler, "_STALLED_S", 0.8)
    with fake_sglang(writes="cut") as fake:
        with pytest.raises(agent.Refused, match=r"1 of 1 traces .* grow no more; \d+ MB are free"):
            profiler.profile(asked(fake, tmp_path))
        assert not fake.holding
    assert "/stop_profile" in fake.paths()


def test_where_requests_end_early_what_was_recorded_counts(tmp_path: pathlib.Path) -> None:
    with fake_sglang(until_stopped=True) as fake:
        fake.start = lambda body: _ends(fake, body)  # type: ignore[method-assign]
        found = profiler.profile(asked(fake, tmp_path))
    assert found["ended"]
    assert "/stop_profile" in fake.paths()


def _ends(fake: FakeSglang, body: dict[str, Any]) -> None:
    fake.recording = body
    for held in list(fake.holding.values()):
        held.set()


@pytest.mark.parametrize("path", ["/server_info", "/v1/loads", "/generate", "/start_profile"])
def test_a_server_that_refuses_is_named_with_what_it_was_asked(
    path: str, tmp_path: pathlib.Path
) -> None:
    with fake_sglang(refuses=(path,)) as fake:
        with pytest.raises(MissingError, match=rf"127.0.0.1:{fake.port}{path}: HTTP 500"):
            profiler.asked_here(asked(fake, tmp_path))
        assert not fake.holding


def test_an_interruption_while_it_begins_stops_the_recording(tmp_path: pathlib.Path) -> None:
    with fake_sglang(until_stopped=True) as fake:
        begin = fake.start

        def start(body: dict[str, Any]) -> None:
            begin(body)
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.3)

        fake.start = start  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            profiler.profile(asked(fake, tmp_path))
        assert not fake.holding
    assert "/stop_profile" in fake.paths()


def test_one_that_does_not_say_whether_it_records_is_stopped(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler, "_WRITTEN_S", 0.5)
    with fake_sglang() as fake:
        fake.start = lambda body: time.sleep(1.0)  # type: ignore[method-assign]
        with pytest.raises(agent.Refused, match="/start_profile: no answer"):
            profiler.profile(asked(fake, tmp_path))
    assert "/stop_profile" in fake.paths()


def test_the_recording_of_somebody_else_goes_on(tmp_path: pathlib.Path) -> None:
    with fake_sglang(refuses=("/start_profile",)) as fake, pytest.raises(agent.Refused):
        profiler.profile(asked(fake, tmp_path))
    assert "/stop_profile" not in fake.paths()


def test_a_server_that_hangs_is_waited_for_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of twenty requests by itself would take four seconds, twice."""
    monkeypatch.setattr(profiler, "_SHORT_S", 4.0)
    monkeypatch.setattr(profiler, "_WRITTEN_S", 3.0)
    with fake_sglang(writes="nothing") as fake:
        fake._release = lambda name: time.sleep(8) or ""  # type: ignore[method-assign,func-returns-value]
        begun = time.monotonic()
        with pytest.raises(agent.Refused, match="no whole files"):
            profiler.profile(asked(fake, tmp_path, batch=20))
        assert time.monotonic() - begun < 60


@pytest.mark.parametrize(
    ("info", "loads"),
    [({"speculative_num_draft_tokens": "many"}, 1), ({}, 10**400), ({}, float("inf"))],
)
def test_sizes_that_are_none_are_no_fault_of_ours(
    info: dict[str, Any], loads: Any, tmp_path: pathlib.Path
) -> None:
    with fake_sglang(info=info, others=loads) as fake, contextlib.suppress(agent.Refused):
        profiler.profile(asked(fake, tmp_path, batch=1))


def test_a_vocabulary_of_nothing_is_none() -> None:
    assert profiler._tokens(480, 0) == profiler._tokens(480, -5) == range(16, 116)


def test_what_has_no_room_is_refused_before_anything_is_sent(tmp_path: pathlib.Path) -> None:
    said = r"2 requests of 40 tokens leave room for 7 new tokens each .*, expected 8 for 4 steps"
    with fake_sglang(slots=96) as fake, pytest.raises(agent.Refused, match=said):
        profiler.profile(asked(fake, tmp_path))
    assert set(fake.paths()) == {"/server_info", "/v1/loads"}


def test_no_server_is_one_line(tmp_path: pathlib.Path) -> None:
    with fake_sglang() as fake:
        pass
    with pytest.raises(MissingError, match="no answer") as caught:
        profiler.asked_here(asked(fake, tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_killed_on_a_host_it_leaves_nothing_running(
    number: signal.Signals, tmp_path: pathlib.Path
) -> None:
    """As it is sent to a host, by the interpreter alone."""
    with fake_sglang(until_stopped=True) as fake:
        text = program_text("profiler", ("agent", "managers", "profiler"), asked(fake, tmp_path))
        running = subprocess.Popen(
            [sys.executable, "-I", "-c", _BOOT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert running.stdin is not None
        running.stdin.write(text.encode())
        running.stdin.close()
        deadline = time.monotonic() + 60
        while "/start_profile" not in fake.paths() and time.monotonic() < deadline:
            time.sleep(0.05)
        running.send_signal(number)
        assert running.wait(60) == 128 + number
        assert running.stdout is not None
        running.stdout.close()
        assert not fake.holding
        assert fake.paths()[-3:] == ["/stop_profile", "/abort_request", "/abort_request"]


def test_sent_to_a_host_it_answers_in_one_line(tmp_path: pathlib.Path) -> None:
    with fake_sglang() as fake:
        text = program_text("profiler", ("agent", "managers", "profiler"), asked(fake, tmp_path))
        done = subprocess.run(
            [sys.executable, "-I", "-c", _BOOT],
            input=text.encode(),
            capture_output=True,
            check=True,
            timeout=60,
        )
    (line,) = done.stdout.decode().splitlines()
    assert json.loads(line)["done"]["traces"]


INT4 = {"num_bits": 4, "group_size": 32}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, {"quant_method": "fp8"}),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}},
            {"quant_method": "gptq", "weight_bits": 4, "weight_group": 128},
        ),
        (  # as Kimi K2.6 has it, of its text model
            {
                "text_config": {
                    "quantization_config": {
                        "quant_method": "compressed-tensors",
                        "config_groups": {"group_0": {"weights": INT4}},
                    }
                }
            },
            {"quant_method": "compressed-tensors", "weight_bits": 4, "weight_group": 32},
        ),
        (
            {"text_config": {}, "quantization_config": {"quant_method": "awq"}},
            {"quant_method": "awq"},
        ),
        ({"quantization_config": {"config_groups": {"group_0": 3}}}, {"quant_method": "None"}),
        ({"quantization_config": []}, {}),
        ({"quantization_config": {"quant_method": "x", "bits": "4"}}, {"quant_method": "x"}),
    ],
)
def test_how_a_model_keeps_its_weights_is_told(
    config: dict[str, Any], told: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert profiler.model_of({"model_path": str(tmp_path)}) == told
