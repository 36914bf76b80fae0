"""A real SGLang server for a gate: started, waited for, asked by token ids, and always ended."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import http.client
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kdtree_engine.errors import KdError
from kdtree_engine.fragmentation.exported import read_metrics

__all__ = [
    "Answer",
    "Load",
    "Service",
    "ServiceFailed",
    "Tokens",
    "failures_in",
    "incomplete",
    "plain_text",
    "server_python",
    "server_sglang",
    "serving",
]

Tokens = tuple[int, ...]

_ASK_LIMIT_S = 30.0
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
class Answer:
    """What the server says of one prompt.

    verified: how often a tree was verified for it; 0 without speculation.
    likely: for each token the most likely ones there, best first, as (log probability, token);
        empty unless asked for.
    ending: why it ended: `length`, `stop`, `abort`; empty where the server does not say.
    """

    tokens: Tokens
    verified: int = 0
    likely: tuple[tuple[tuple[float, int], ...], ...] = ()
    ending: str = "length"


@dataclasses.dataclass(frozen=True)
class Load:
    """What the scheduler holds: requests, KV slots, graphs.

    used_slots: those that are neither free nor a cached prefix that nobody uses: with no request,
    each of them has leaked. (A flush of the cache would hide that, as it makes all slots free.)
    """

    requests: int
    used_slots: int
    slots: int
    graph_bytes: float


@dataclasses.dataclass(frozen=True)
class Service:
    """A server that answers at http://127.0.0.1:`port`; `log` has everything that it printed."""

    port: int
    log: pathlib.Path
    limit_s: float = 300.0

    def generate(self, prompts: Sequence[Tokens], new_tokens: int) -> list[Tokens]:
        """`new_tokens` greedy tokens after each prompt, all prompts in one request."""
        return [answer.tokens for answer in self.answers(prompts, new_tokens)]

    def generate_at_once(self, prompts: Sequence[Tokens], new_tokens: int) -> list[Tokens]:
        """The same by one request for each prompt, all sent at the same time."""
        with concurrent.futures.ThreadPoolExecutor(max_workers=len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.generate([prompt], new_tokens)[0], prompts))

    def answers(
        self,
        prompts: Sequence[Tokens],
        new_tokens: int,
        *,
        likely: int = 0,
        names: Sequence[str] | None = None,
        limit_s: float | None = None,
        sampling: Mapping[str, float] | None = None,
    ) -> list[Answer]:
        """As `generate`, with more said of each answer.

        sampling: how tokens are drawn, in SGLang's words; None: the likeliest is taken.
        likely: how many of the most likely tokens are told of each step. names: a request id for
        each prompt, to abort it by. limit_s: seconds after which this side hangs up, which the
        server takes for an abort.

        Raises ServiceFailed where the server gives anything else than such answers.
        """
        body: dict[str, Any] = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": {
                **(sampling or {"temperature": 0.0}),
                "max_new_tokens": new_tokens,
                "ignore_eos": True,
            },
        }
        if likely:
            # From the last token of the prompt on: logits of a long prompt would fill the memory.
            body |= {"return_logprob": True, "top_logprobs_num": likely, "logprob_start_len": -1}
        if names is not None:
            body["rid"] = list(names)
        found = self._json("/generate", body, limit_s)
        if not isinstance(found, list) or len(found) != len(prompts):
            raise self._wrong(f"{len(prompts)} answers expected", found)
        return [self._answer(one, likely) for one in found]

    def abort(self, name: str) -> None:
        """End the request of this id; one that is not there is no error, as it may have ended."""
        self._send("/abort_request", {"rid": name})

    def load(self) -> Load:
        """What the scheduler holds right now."""
        found = self._json("/v1/loads", None)
        try:
            (rank,) = found["loads"]
            return Load(
                requests=int(rank["num_running_reqs"]) + int(rank["num_waiting_reqs"]),
                used_slots=int(rank["num_used_tokens"]),
                slots=int(rank["max_total_num_tokens"]),
                graph_bytes=float((rank.get("memory") or {}).get("graph_gb", 0.0)) * 1e9,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise self._wrong("the load of one scheduler expected", found) from error

    def metrics(self) -> dict[str, float]:
        """What a server with `--enable-metrics` counts, by name, as `read_metrics` has it."""
        return read_metrics(self._send("/metrics", None).decode(errors="replace"))

    def flush(self) -> None:
        """Forget every cached prefix. Raises ServiceFailed while requests run."""
        self._send("/flush_cache", {})

    def _answer(self, found: Any, likely: int) -> Answer:
        try:
            tokens = tuple(map(int, found["output_ids"]))
            about = found.get("meta_info") or {}
            steps = about.get("output_top_logprobs") or ()
            if likely and len(steps) < len(tokens):
                raise ValueError("too few log probabilities")
            return Answer(
                tokens,
                verified=int(about.get("spec_verify_ct") or 0),
                likely=tuple(
                    tuple((float(one[0]), int(one[1])) for one in step)
                    for step in steps[-len(tokens) :]
                )
                if likely
                else (),
                ending=str((about.get("finish_reason") or {}).get("type", "")),
            )
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise self._wrong("an answer with output_ids expected", found) from error

    def _json(self, path: str, body: Mapping[str, Any] | None, limit_s: float | None = None) -> Any:
        text = self._send(path, body, limit_s)
        try:
            return json.loads(text)
        except ValueError as error:
            raise self._wrong("JSON expected", text[:200]) from error

    def _send(
        self, path: str, body: Mapping[str, Any] | None, limit_s: float | None = None
    ) -> bytes:
        """GET without a body, POST with one; what the server says."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with _DIRECT.open(request, timeout=limit_s or self.limit_s) as answer:
                said: bytes = answer.read()
                return said
        except (OSError, http.client.HTTPException) as error:
            raise ServiceFailed(
                f"no answer from the server: {error or type(error).__name__}\n{_end_of(self.log)}"
            ) from error

    def _wrong(self, expected: str, found: object) -> ServiceFailed:
        return ServiceFailed(
            f"no answer of SGLang's from the server: {expected}, got {str(found)[:200]!r}\n"
            f"{_end_of(self.log)}"
        )


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

    A port that was free can be taken before the server has it. Another one is tried then, and
    a healthy server counts only where the port is held by the one that was started here.

    Raises ServiceFailed, with the last lines of the log, where it ends or is not healthy in time.
    """
    command = command or (server_python(), "-m", "sglang.launch_server")
    for attempt in range(_PORTS):
        port = _free_port()
        line = [*command, *arguments, "--host", "127.0.0.1", "--port", str(port)]
        with log.open("wb") as printed:
            keeper = subprocess.Popen(
                [sys.executable, "-c", _KEEPER, *line],
                stdin=subprocess.PIPE,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=_without_proxy(os.environ | dict(environment or {})),
            )
        try:
            try:
                _wait_for(keeper, port, log, limit_s)
            except ServiceFailed:
                taken = keeper.poll() is not None and bool(_listeners(port))
                if taken and attempt + 1 < _PORTS:
                    continue
                raise
            yield Service(port, log)
            return
        finally:
            assert keeper.stdin is not None
            keeper.stdin.close()
            keeper.wait()


def server_python() -> str:
    """The Python that has SGLang: the one that KD_SGLANG_PYTHON names, else this one."""
    return os.environ.get("KD_SGLANG_PYTHON") or sys.executable


def server_sglang() -> str | None:
    """The release of SGLang that `server_python` has; None where it has none or says none."""
    return _sglang_of(server_python())


@functools.cache
def _sglang_of(python: str) -> str | None:
    try:
        asked = subprocess.Popen(
            [python, "-c", "import importlib.metadata as m; print(m.version('sglang'))"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return None
    try:
        said, _ = asked.communicate(timeout=_ASK_LIMIT_S)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(asked.pid, signal.SIGKILL)  # a wrapper's children too
        asked.wait()
        if asked.stdout is not None:
            asked.stdout.close()
    # The last line, as a warning may come before it.
    lines = said.decode(errors="replace").split("\n")
    release = next((line.strip() for line in reversed(lines) if line.strip()), "")
    right = asked.returncode == 0 and re.fullmatch(r"\d[\w.+!-]*", release, re.ASCII)
    return release if right else None


def incomplete(answers: Sequence[Answer], new_tokens: int) -> str | None:
    """What is wrong with the first answer that is not `new_tokens` tokens, ended by their number.

    Two servers that answer nothing agree in every token, so whoever compares must ask this first.
    """
    for number, answer in enumerate(answers):
        if len(answer.tokens) != new_tokens or answer.ending != "length":
            return (
                f"answer {number}: expected {new_tokens} tokens and ending 'length', got "
                f"{len(answer.tokens)} and {answer.ending!r}"
            )
    return None


def failures_in(log: str) -> list[str]:
    """Lines in which SGLang says that something failed; it serves on after a failed plugin."""
    return [
        line
        for line in log.splitlines()
        if "Failed to" in line and not any(harmless in line for harmless in _HARMLESS)
    ]


def plain_text(log: pathlib.Path) -> str:
    """What a log has, without the codes of colours; nothing where there is no log."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


_PORTS = 3
"""How many ports are tried."""

# Whatever the environment says of proxies: nothing but this machine can reach 127.0.0.1.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _without_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """SGLang asks itself over HTTP before it is healthy, through a proxy where one is named."""
    names = {"no_proxy", "NO_PROXY"}
    told = ",".join(filter(None, (environment.get(name, "") for name in sorted(names))))
    direct = ",".join(filter(None, (told, "127.0.0.1", "localhost")))
    return dict(environment) | dict.fromkeys(names, direct)


def _wait_for(
    keeper: subprocess.Popen[bytes], port: int, log: pathlib.Path, limit_s: float
) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if keeper.poll() is not None:
            raise ServiceFailed(f"the server ended before it was healthy\n{_end_of(log)}")
        if _healthy(port) and _holds(keeper.pid, port):
            return
        time.sleep(0.5)
    raise ServiceFailed(f"the server was not healthy after {limit_s:g} s\n{_end_of(log)}")


def _healthy(port: int) -> bool:
    """SGLang answers 503 until it has served a request of its own."""
    try:
        with _DIRECT.open(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def _holds(session: int, port: int) -> bool:
    """Whether a process of this session listens on the port."""
    wanted = {f"socket:[{inode}]" for inode in _listeners(port)}
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(process.name)) == session and any(
                _link(entry) in wanted for entry in (process / "fd").iterdir()
            ):
                return True
    return False


def _link(entry: pathlib.Path) -> str:
    """What a file descriptor is; nothing once it is closed."""
    try:
        return str(entry.readlink())
    except OSError:
        return ""


def _listeners(port: int) -> list[str]:
    """The inodes of the sockets that listen on the port, as /proc/net tells them."""
    found = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    found.append(fields[9])
    return found


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _end_of(log: pathlib.Path, lines: int = 15) -> str:
    return "\n".join(plain_text(log).splitlines()[-lines:])
