"""A real SGLang server for a gate: started, waited for, asked by token ids, and always ended."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence

from kdtree_engine.errors import KdError

__all__ = ["Service", "ServiceFailed", "Tokens", "failures_in", "server_python", "serving"]

Tokens = tuple[int, ...]

_HARMLESS = ("Failed to get yes/no token IDs",)
"""SGLang says so of every model without a tokenizer."""

# The server lives as long as the pipe to this keeper: when whoever holds the other end closes it,
# or dies in whatever way, the keeper ends its own process group, and with it every rank.
_KEEPER = """
import os, signal, subprocess, sys, threading
def watch():
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=watch, daemon=True).start()
code = subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL)
print(f"the server ended with exit code {code}", flush=True)
os.killpg(0, signal.SIGKILL)
"""


class ServiceFailed(KdError):
    """The server did not start, or did not answer; the text ends with its last log lines."""


@dataclasses.dataclass(frozen=True)
class Service:
    """A server that answers at http://127.0.0.1:`port`; `log` has everything that it printed."""

    port: int
    log: pathlib.Path
    limit_s: float = 300.0

    def generate(self, prompts: Sequence[Tokens], new_tokens: int) -> list[Tokens]:
        """`new_tokens` greedy tokens after each prompt, all prompts in one request."""
        answers = self._ask(
            {
                "input_ids": [list(prompt) for prompt in prompts],
                "sampling_params": {
                    "temperature": 0.0,
                    "max_new_tokens": new_tokens,
                    "ignore_eos": True,
                },
            }
        )
        return [tuple(answer["output_ids"]) for answer in answers]

    def generate_at_once(self, prompts: Sequence[Tokens], new_tokens: int) -> list[Tokens]:
        """The same by one request for each prompt, all sent at the same time."""
        with concurrent.futures.ThreadPoolExecutor(max_workers=len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.generate([prompt], new_tokens)[0], prompts))

    def _ask(self, body: Mapping[str, object]) -> list[dict[str, list[int]]]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/generate",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=self.limit_s) as answer:
                found: list[dict[str, list[int]]] = json.load(answer)
                return found
        except (OSError, ValueError) as error:
            raise ServiceFailed(
                f"no answer from the server: {error}\n{_end_of(self.log)}"
            ) from error


@contextlib.contextmanager
def serving(
    arguments: Sequence[str],
    *,
    log: pathlib.Path,
    environment: Mapping[str, str] | None = None,
    limit_s: float = 180.0,
    command: Sequence[str] | None = None,
) -> Iterator[Service]:
    """A server that is healthy inside the `with` block and gone after it.

    arguments: of `sglang.launch_server`, without host and port. environment: added to this one's.
    limit_s: how long it may take until it is healthy. command: what is started, instead of
    `sglang.launch_server` in `server_python()`; the port is its last argument.

    Raises ServiceFailed, with the last lines of the log, where it ends or is not healthy in time.
    """
    port = _free_port()
    command = command or (server_python(), "-m", "sglang.launch_server")
    line = [*command, *arguments, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as printed:
        keeper = subprocess.Popen(
            [sys.executable, "-c", _KEEPER, *line],
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | dict(environment or {}),
        )
    try:
        _wait_for(keeper, port, log, limit_s)
        yield Service(port, log)
    finally:
        assert keeper.stdin is not None
        keeper.stdin.close()
        keeper.wait()


def server_python() -> str:
    """The Python that has SGLang: the one that KD_SGLANG_PYTHON names, else this one."""
    return os.environ.get("KD_SGLANG_PYTHON") or sys.executable


def failures_in(log: str) -> list[str]:
    """Lines in which SGLang says that something failed; it serves on after a failed plugin."""
    return [
        line
        for line in log.splitlines()
        if "Failed to" in line and not any(harmless in line for harmless in _HARMLESS)
    ]


def _wait_for(
    keeper: subprocess.Popen[bytes], port: int, log: pathlib.Path, limit_s: float
) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if keeper.poll() is not None:
            raise ServiceFailed(f"the server ended before it was healthy\n{_end_of(log)}")
        if _healthy(port):
            return
        time.sleep(0.5)
    raise ServiceFailed(f"the server was not healthy after {limit_s:g} s\n{_end_of(log)}")


def _healthy(port: int) -> bool:
    """SGLang answers 503 until it has served a request of its own."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _end_of(log: pathlib.Path, lines: int = 15) -> str:
    text = log.read_text(errors="replace") if log.is_file() else ""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return "\n".join(plain.splitlines()[-lines:])
