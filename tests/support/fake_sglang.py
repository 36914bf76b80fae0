"""SGLang's HTTP as `kd profile` uses it, in this process: it decodes nothing and writes traces."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import http.server
import json
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

_LONGEST_S = 20.0


@dataclasses.dataclass
class FakeSglang:
    """How it behaves, and what it was asked.

    ranks: files that its profiler writes. writes: `whole`, `cut` (each file lacks its end), or
    `nothing`. until_stopped: they are written at /stop_profile and not by themselves. answers: a
    request is answered at once where it asks for at most so many tokens, and else once it is
    aborted. step_s: that an answer takes for each token. trace: the text of each file.
    """

    port: int = 0
    info: dict[str, Any] = dataclasses.field(default_factory=lambda: {"version": "0.5.17"})
    ranks: int = 1
    writes: str = "whole"
    until_stopped: bool = False
    answers: int = 1000
    step_s: float = 0.0
    slots: int = 1 << 20
    others: int = 0
    trace: str = '{"traceEvents": []}'
    refuses: tuple[str, ...] = ()
    asked: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    holding: dict[str, threading.Event] = dataclasses.field(default_factory=dict)
    recording: dict[str, Any] | None = None

    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]

    def generate(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        count = body["sampling_params"]["max_new_tokens"]
        if count > self.answers:
            (name,) = body["rid"]
            held = self.holding.setdefault(name, threading.Event())
            held.wait(_LONGEST_S)
            self.holding.pop(name, None)
        else:
            time.sleep(self.step_s * count)
        return [
            {"output_ids": [1] * count, "meta_info": {"spec_verify_ct": count // 2}}
            for _ in body["input_ids"]
        ]

    def start(self, body: dict[str, Any]) -> None:
        self.recording = body
        if not self.until_stopped:
            self.write()

    def write(self) -> None:
        if self.recording is None or self.writes == "nothing":
            return
        text = gzip.compress(self.trace.encode())
        text = text[: len(text) // 2] if self.writes == "cut" else text
        for rank in range(self.ranks):
            name = f"{self.recording['profile_id']}-TP-{rank}.trace.json.gz"
            (pathlib.Path(self.recording["output_dir"]) / name).write_bytes(text)

    def answer(self, path: str, body: Any) -> Any:
        self.asked.append((path, body))
        if path in self.refuses:
            return None
        answers: dict[str, Callable[[], Any]] = {
            "/server_info": lambda: self.info,
            "/v1/loads": lambda: {
                "loads": [
                    {
                        "num_running_reqs": self.others + len(self.holding),
                        "num_waiting_reqs": 0,
                        "max_total_num_tokens": self.slots,
                    }
                ]
            },
            "/generate": lambda: self.generate(body),
            "/abort_request": lambda: self._release(body["rid"]),
            "/start_profile": lambda: self.start(body) or "Start profiling.",
            "/stop_profile": lambda: self.write() or "Stop profiling.",
        }
        return answers[path]()

    def _release(self, name: str) -> str:
        if name in self.holding:
            self.holding[name].set()
        return "aborted"


@contextlib.contextmanager
def fake_sglang(**behaviour: Any) -> Iterator[FakeSglang]:
    """It answers at `port` inside the `with` block."""
    fake = FakeSglang(**behaviour)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: Any) -> None:
            found = fake.answer(self.path, body)
            text = b"no" if found is None else json.dumps(found).encode()
            self.send_response(500 if found is None else 200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *words: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        fake.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield fake
        finally:
            for held in list(fake.holding.values()):
                held.set()
            server.shutdown()
            thread.join()
