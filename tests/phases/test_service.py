"""The server of a gate: waited for, asked, ended; here a few lines of Python in SGLang's place."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator

import pytest

from phases import service as module
from phases.service import (
    Answer,
    Load,
    ServiceFailed,
    failures_in,
    server_python,
    server_sglang,
    serving,
)

SERVER = r"""
import http.server, json, os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("pids", os.getpid(), child.pid, flush=True)
asked = []
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, body, code=200):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())
    def do_GET(self):
        if self.path.startswith("/v1/loads"):
            rank = {"num_running_reqs": 1, "num_waiting_reqs": 2, "num_used_tokens": 3}
            rank |= {"max_total_num_tokens": 40, "memory": {"graph_gb": 0.5}}
            return self.answer({"loads": [rank]})
        asked.append(1)
        self.answer({}, 200 if len(asked) > 2 else 503)
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "input_ids" not in body:
            return self.answer({"asked": [self.path, body]})
        count = body["sampling_params"]["max_new_tokens"]
        if count == 13:
            return self.answer({}, 500)
        if count == 14:
            return self.answer([{"text": "no ids"} for ids in body["input_ids"]])
        if count == 15:
            return self.answer({"error": "one object, no list"})
        if count == 16:
            return self.wfile.write(b"no HTTP at all\r\n\r\n")
        answers = [{"output_ids": [sum(ids)] * count} for ids in body["input_ids"]]
        if body.get("return_logprob"):
            for answer in answers:
                answer["meta_info"] = {
                    "spec_verify_ct": 2,
                    "finish_reason": {"type": "abort"},
                    "output_top_logprobs": [[[-0.5, 7, None], [-1.5, 8, None]]] * count,
                }
        self.answer(answers)
    def log_message(self, *_):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
COMMAND = (sys.executable, "-c", SERVER)


def pids(log: pathlib.Path) -> list[int]:
    (line,) = (line for line in log.read_text().splitlines() if line.startswith("pids"))
    return [int(word) for word in line.split()[1:]]


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits to be collected does not."""
    try:
        return "\nState:\tZ" not in pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def gone(wanted: list[int]) -> bool:
    for _ in range(100):
        if not any(map(alive, wanted)):
            return True
        time.sleep(0.05)
    return False


def test_it_is_asked_and_then_ended_with_its_children(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "log"
    with serving([], log=log, command=COMMAND) as service:
        assert service.generate([(1, 2), (3,)], 2) == [(3, 3), (3, 3)]
        assert service.generate_at_once([(1,), (2,), (3,)], 1) == [(1,), (2,), (3,)]
        running = pids(log)
        assert all(map(alive, running))
    assert gone(running)


def test_more_is_said_of_an_answer_where_it_is_asked_for(tmp_path: pathlib.Path) -> None:
    with serving([], log=tmp_path / "log", command=COMMAND) as service:
        likely = ((-0.5, 7), (-1.5, 8))
        assert service.answers([(1, 2)], 2, likely=2, names=["a"]) == [
            Answer((3, 3), verified=2, likely=(likely, likely), ending="abort")
        ]
        assert service.load() == Load(requests=3, used_slots=3, slots=40, graph_bytes=5e8)
        service.abort("a")


def test_an_error_in_the_block_ends_it_too(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(ZeroDivisionError), serving([], log=log, command=COMMAND):
        _ = 1 / 0
    assert gone(pids(log))


def test_a_gate_that_is_killed_leaves_no_server(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    log = tmp_path / "log"
    script = f"""
    import pathlib, time
    from phases.service import serving
    with serving([], log=pathlib.Path({str(log)!r}), command={COMMAND!r}):
        print("ready", flush=True)
        time.sleep(600)
    """
    gate = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root), str(root / "kdtree-engine")])},
    )
    assert gate.stdout is not None
    with gate.stdout as printed:
        assert printed.readline() == b"ready\n"
        gate.send_signal(signal.SIGKILL)
    gate.wait()
    assert gone(pids(log))


def test_a_server_that_ends_is_reported_with_its_last_words(tmp_path: pathlib.Path) -> None:
    command = (sys.executable, "-c", "print('no such backend'); raise SystemExit(2)")
    with (
        pytest.raises(
            ServiceFailed, match="ended before it was healthy\nno such backend"
        ) as caught,
        serving([], log=tmp_path / "log", command=command),
    ):
        pytest.fail("it is not healthy")
    assert "exit code 2" in str(caught.value)


def test_a_server_that_hangs_is_ended_after_its_time(tmp_path: pathlib.Path) -> None:
    command = (sys.executable, "-c", "import time; print('loading', flush=True); time.sleep(600)")
    begun = time.monotonic()
    with (
        pytest.raises(ServiceFailed, match=r"not healthy after 1\.5 s\nloading"),
        serving([], log=tmp_path / "log", command=command, limit_s=1.5),
    ):
        pytest.fail("it is not healthy")
    assert time.monotonic() - begun < 30


def test_an_error_of_the_server_is_an_error(tmp_path: pathlib.Path) -> None:
    with (
        serving([], log=tmp_path / "log", command=COMMAND) as service,
        pytest.raises(ServiceFailed, match="no answer from the server: HTTP Error 500"),
    ):
        service.generate([(1,)], 13)


@pytest.mark.parametrize(
    ("count", "says"),
    [
        (14, "an answer with output_ids expected, got \"{'text': 'no ids'}\""),
        (15, "1 answers expected, got \"{'error': 'one object, no list'}\""),
        (16, "no answer from the server: no HTTP at all"),
    ],
)
def test_what_is_no_answer_is_said_so(tmp_path: pathlib.Path, count: int, says: str) -> None:
    with (
        serving([], log=tmp_path / "log", command=COMMAND) as service,
        pytest.raises(ServiceFailed, match=re.escape(says)),
    ):
        service.generate([(1,)], count)


def test_a_proxy_is_never_asked(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "example.org")
    command = (sys.executable, "-c", f"import os; print(os.environ['no_proxy'])\n{SERVER}")
    with serving([], log=tmp_path / "log", command=command) as service:
        assert service.generate([(1,)], 1) == [(1,)]
    # The server asks itself, so it must know too.
    assert (tmp_path / "log").read_text().startswith("example.org,127.0.0.1,localhost\n")


@contextlib.contextmanager
def squatter(answer: bytes) -> Iterator[int]:
    """Somebody else's server, which says `answer` to whoever connects; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with listening.accept()[0] as connection:
                        connection.recv(4096)
                        connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.0 200 OK\r\n\r\n", b"SSH-2.0-x\r\n"], ids=["healthy", "no HTTP"]
)
def test_a_port_that_another_took_is_left_to_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    free = module._free_port
    with squatter(answer) as taken:
        ports = iter([taken])
        monkeypatch.setattr(module, "_free_port", lambda: next(ports, None) or free())
        with serving([], log=tmp_path / "log", command=COMMAND) as service:
            assert service.port != taken
            assert service.generate([(1,)], 1) == [(1,)]


def test_ports_that_are_always_taken_end_in_the_servers_words(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with squatter(b"HTTP/1.0 200 OK\r\n\r\n") as taken:
        monkeypatch.setattr(module, "_free_port", lambda: taken)
        with (
            pytest.raises(ServiceFailed, match="Address already in use"),
            serving([], log=tmp_path / "log", command=COMMAND),
        ):
            pytest.fail("the port is another's")


def test_failures_that_sglang_only_logs() -> None:
    log = "all well\nFailed to get yes/no token IDs\n[x] Failed to apply hooks to sglang.y\n"
    assert failures_in(log) == ["[x] Failed to apply hooks to sglang.y"]


def test_which_python_has_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KD_SGLANG_PYTHON", raising=False)
    assert server_python() == sys.executable
    monkeypatch.setenv("KD_SGLANG_PYTHON", "elsewhere/python")
    assert server_python() == "elsewhere/python"


def test_the_servers_sglang_is_asked_of_its_python(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, body in (
        ("has", "echo 0.5.17"),
        ("warns", "echo 'a warning: 1.2'; echo 0.5.23.post1; echo"),
        ("lacks", "echo 0.5.17; exit 1"),
        ("silent", "true"),
        ("talks", "echo no version"),
        ("junk", "printf '\\377\\n'"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    found = {}
    for name in ("has", "warns", "lacks", "silent", "talks", "junk", "absent", "."):
        monkeypatch.setenv("KD_SGLANG_PYTHON", str(tmp_path / name))
        found[name] = server_sglang()
    assert {name: one for name, one in found.items() if one} == {
        "has": "0.5.17",
        "warns": "0.5.23.post1",
    }


def test_a_python_that_hangs_has_no_sglang_and_leaves_nothing_behind(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hangs").write_text(f"#!/bin/sh\nsleep 600 & echo $! > {tmp_path}/child\nwait\n")
    (tmp_path / "hangs").chmod(0o755)
    monkeypatch.setattr("phases.service._ASK_LIMIT_S", 0.5)
    monkeypatch.setenv("KD_SGLANG_PYTHON", str(tmp_path / "hangs"))
    assert server_sglang() is None
    child = pathlib.Path("/proc") / (tmp_path / "child").read_text().strip()
    deadline = time.monotonic() + 5
    while child.exists() and "Z" not in (child / "stat").read_text().rpartition(")")[2].split()[0]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
