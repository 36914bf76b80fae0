"""A server in SGLang's place, as a process: it starts in no time and can be unfit in every way.

    python stand_in_server.py SGLANG-ARGUMENTS

What it does stands in a file `behaviour` of the first folder on PYTHONPATH, as a release's `site`
is: nothing (it is right), `wrong`, `wrong later`, `dies`, `dies later`, `silent` (never healthy),
`no tokens` (healthy, and fails to generate), `slow` (three seconds until it is healthy), `loads`
(six, in which it prints what it does), `lively` (it prints so, and is never healthy), `deaf` (it
never listens) or `stubborn` (a child of it ignores being asked to end).
"""

from __future__ import annotations

import http.server
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

_LATER_S = 2.0
METRICS = """# TYPE kdtree:kv_mean_runs gauge
kdtree:kv_mean_runs{tp_rank="0"} 26.0
kdtree:kv_worst_decile_runs{tp_rank="0"} 52.0
kdtree:kv_mean_run_length{tp_rank="0"} 630.25
kdtree:kv_page_locality{tp_rank="0"} 0.9983
kdtree:kv_measured_requests{tp_rank="0"} 16.0
kdtree:kv_free_runs{tp_rank="0"} 40.0
kdtree:kv_reserved_slots{tp_rank="0"} 512.0
kdtree:kv_allocation_waits{tp_rank="0"} 3.0
sglang:num_running_reqs{tp_rank="0"} 16.0
"""
_SLOW_S = 3.0
_LOADS_S = 6.0


def _behaviour() -> str:
    folder = os.environ.get("PYTHONPATH", "").split(os.pathsep)[0]
    path = pathlib.Path(folder) / "behaviour"
    return path.read_text().strip() if folder and path.is_file() else ""


def tokens_after(prompt: list[int], count: int) -> list[int]:
    """The right ones."""
    return [(7 * sum(prompt) + 31 * step) % 97 for step in range(count)]


def _tells() -> None:
    while True:
        print("loads on", flush=True)
        time.sleep(0.3)


def main() -> None:
    behaviour, begun = _behaviour(), time.monotonic()

    def late() -> bool:
        return time.monotonic() - begun > _LATER_S

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if behaviour == "dies later" and late():
                os._exit(7)
            until_s = {"silent": 1e9, "lively": 1e9, "slow": _SLOW_S, "loads": _LOADS_S}
            waits = time.monotonic() - begun < until_s.get(behaviour, 0.0)
            if self.path == "/metrics":
                self._send(200, METRICS.encode())
                return
            self._say(503 if waits else 200, {"version": "0.0"})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if behaviour == "no tokens":
                self._say(500, {"error": "out of memory"})
                return
            count = asked["sampling_params"]["max_new_tokens"]
            answers = []
            for prompt in asked["input_ids"]:
                tokens = tokens_after(prompt, count)
                if behaviour == "wrong" or (behaviour == "wrong later" and late()):
                    tokens[-1] += 1
                about = {}
                if asked.get("return_logprob"):
                    likely = [[[-0.1, one, None], [-2.5, one + 1, None]] for one in tokens]
                    about = {"output_top_logprobs": likely}
                answers.append({"output_ids": tokens, "meta_info": about})
            self._say(200, answers)

        def _say(self, status: int, said: object) -> None:
            self._send(status, json.dumps(said).encode())

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            pass

    print("starts", sys.argv[1:], flush=True)
    if behaviour == "dies":
        raise SystemExit("no such model")
    if behaviour == "stubborn":
        ignore = (
            "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        )
        subprocess.Popen([sys.executable, "-c", ignore])
    if behaviour in ("loads", "lively"):
        threading.Thread(target=_tells, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *of_no_use: os._exit(0))
    if behaviour == "deaf":
        time.sleep(600)
    port = int(sys.argv[len(sys.argv) - sys.argv[::-1].index("--port")])
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
