"""Has a running SGLang server profile decode steps of its own: asked on the server's own machine.

It is sent there like `remote.agent`, and needs Python 3.9 and its standard library alone. It keeps
as many requests decoding as are asked for, has SGLang's own profiler record a number of passes, and
says which files that wrote, one for each rank. Nothing of the server is changed, and the requests
are aborted once the files are whole.

SGLang's names (0.5.17 and 0.5.23): `/start_profile`, `/stop_profile`, `/v1/loads`, `/server_info`,
and files called ID-TP-RANK[-...].trace.json.gz.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import pathlib
import random
import shutil
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from remote import agent

_SHORT_S = 60.0
_PREFILL_S = 1800.0  # of one request's prompt; a long one on a small machine
_STALLED_S = 60.0  # a file grows again; ranks write at about the same time
_WRITTEN_S = 600.0  # after the passes; a trace of many ranks is written rank by rank
_POLL_S = 0.02
_LOOK_S = 0.5
_FIRST_TOKEN = 16  # what lies below are often special tokens
_FEW_TOKENS = 100
_FEW, _TIMED, _TIMED_PASSES = 2, 130, 3  # tokens of short and long timed answers, and how often
_WARM = 16  # tokens of the untimed answer: it compiles, and fills the cache with the prompts
_TOLD = (
    *("version", "model_path", "dtype", "kv_cache_dtype", "tp_size", "dp_size", "pp_size"),
    *("enable_dp_attention", "quantization"),
    *("ep_size", "attention_backend", "speculative_algorithm", "speculative_num_draft_tokens"),
    *("speculative_num_steps", "speculative_eagle_topk", "disable_cuda_graph"),
    *("disable_overlap_schedule", "page_size", "context_length", "max_req_input_len"),
)
"""What is passed on of what a server says of itself: no name here can hold a secret."""

_SHAPES = (
    *("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"),
    *("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "q_lora_rank"),
    *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "intermediate_size"),
    *("first_k_dense_replace", "n_shared_experts", "moe_layer_freq"),
)
"""What is passed on of a model's config.json."""

# Whatever the environment says of proxies: nothing but this machine can reach 127.0.0.1.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class _Silent(agent.Refused):
    """No answer, so that nobody knows what the server made of it."""


class Server:
    """SGLang's HTTP at one port of this machine. Refused is raised wherever it does not answer."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def json(self, path: str, body: Any = None, limit_s: float = _SHORT_S) -> Any:
        """GET without a body, POST with one; the JSON that it answers."""
        text = self.text(path, body, limit_s)
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise agent.Refused(f"{self._url}{path}: expected JSON, got {text[:200]!r}") from None

    def text(self, path: str, body: Any = None, limit_s: float = _SHORT_S) -> str:
        request = urllib.request.Request(
            f"{self._url}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with _DIRECT.open(request, timeout=limit_s) as answer:
                said: bytes = answer.read()
                return said.decode("utf-8", "replace")
        except urllib.error.HTTPError as error:
            text = ""
            with contextlib.suppress(OSError, http.client.HTTPException), error:
                text = " ".join(error.read(2000).decode("utf-8", "replace").split())
            raise agent.Refused(f"{self._url}{path}: HTTP {error.code} {text[-300:]}") from None
        except (OSError, http.client.HTTPException) as error:
            raise _Silent(f"{self._url}{path}: no answer: {error or error!r}") from None

    def about(self) -> dict[str, Any]:
        """What it says of itself, of `_TOLD`."""
        said = self.json("/server_info")
        if not isinstance(said, dict):
            raise agent.Refused(f"{self._url}/server_info: expected an object, got {said!r:.200}")
        return {name: said[name] for name in _TOLD if name in said}

    def load(self) -> tuple[int, int, int]:
        """Requests that run, that wait, and KV slots in all: of all ranks with requests."""
        said = self.json("/v1/loads")
        try:
            loads = said["loads"]
            return (
                sum(int(one["num_running_reqs"]) for one in loads),
                sum(int(one["num_waiting_reqs"]) for one in loads),
                sum(int(one["max_total_num_tokens"]) for one in loads),
            )
        except (LookupError, OverflowError, TypeError, ValueError):
            raise agent.Refused(
                f"{self._url}/v1/loads: not what SGLang says: {said!r:.200}"
            ) from None

    def abort(self, name: str, limit_s: float = _SHORT_S) -> None:
        """End a request; one that has ended already is no error."""
        with contextlib.suppress(agent.Refused):
            self.text("/abort_request", {"rid": name}, limit_s)


class _Requests:
    """Prompts that decode until they are aborted, each a request of its own."""

    def __init__(self, server: Server, prompts: list[list[int]], count: int, tag: str) -> None:
        self._server = server
        self._names = [f"kd-profile-{tag}-{number}" for number in range(len(prompts))]
        self._failed: list[str] = []
        self._threads = [
            threading.Thread(target=self._ask, args=(name, prompt, count), daemon=True)
            for name, prompt in zip(self._names, prompts)  # noqa: B905 (Python 3.9 has no strict)
        ]

    def __enter__(self) -> _Requests:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *why: object) -> None:
        # A limit of all of them together: a server that hangs would be waited for once for each.
        until = time.monotonic() + _SHORT_S
        for name in self._names:
            if (left := until - time.monotonic()) > 0:
                self._server.abort(name, left)
        until = time.monotonic() + _SHORT_S
        for thread in self._threads:
            if thread.ident is not None:  # it was begun
                thread.join(max(0.0, until - time.monotonic()))

    def running(self) -> bool:
        """Whether none of them has ended. Raises Refused where one failed."""
        if self._failed:
            raise agent.Refused(f"the server does not decode: {self._failed[0]}")
        return all(thread.is_alive() for thread in self._threads)

    def _ask(self, name: str, prompt: list[int], count: int) -> None:
        try:
            self._server.json("/generate", _body([prompt], count, [name]), _PREFILL_S)
        except agent.Refused as error:
            self._failed.append(str(error))


def profile(request: dict[str, Any]) -> dict[str, Any]:
    """Profile `steps` passes while `batch` requests of `context` tokens decode.

    request: port; folder, where the files go, as an absolute path of the server's machine; name,
    which each file's name begins with; context, batch, steps; vocabulary, of the drawn prompts'
    tokens; seed; new_tokens, of each request at most; root and leader, where the port must be
    answered by that process or what it has started.

    Returns traces (paths), server (`Server.about`), model (its shapes), step_us (of a step while
    nothing is recorded; None where that could not be told), beside (requests of others that ran
    when this began) and ended (whether a request ended before all passes were recorded).

    Raises Refused where the server does not do it. Nothing keeps on running or recording then.
    """
    port, leader = int(request["port"]), request.get("leader")
    server = Server(port)
    if leader is not None and agent.listens(request["root"], leader, port) is False:
        raise agent.Refused(f"port {port} is answered by another process than the service's")
    folder, name = pathlib.Path(request["folder"]), str(request["name"])
    about = server.about()
    ranks = _ranks(about)
    running, waiting, slots = server.load()
    model = model_of(about)
    tokens = _tokens(int(request["vocabulary"]), model.get("vocab_size"))
    prompts = draw_prompts(int(request["context"]), int(request["batch"]), tokens, request["seed"])
    count = _new_tokens(request, about, slots)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # By itself, so that the others find it in the cache; then all, in which kernels are compiled.
    server.json("/generate", _body(prompts[:1], 1), _PREFILL_S)
    server.json("/generate", _body(prompts, _WARM), _PREFILL_S)
    step_us = _step_us(server, prompts, min(_TIMED, count))
    files = _Files(folder, name, ranks)
    with _Requests(server, prompts, count, name) as requests:
        _await(lambda: _decoding(server, requests, running + len(prompts)), _PREFILL_S)
        with _recording(server, files, name, int(request["steps"])):
            deadline = time.monotonic() + _WRITTEN_S
            while requests.running() and not files.whole():
                if time.monotonic() > deadline:
                    raise agent.Refused(
                        f"{folder}: SGLang's profiler wrote no whole files of {ranks} ranks "
                        f"within {_WRITTEN_S:g} s; its log may say why"
                    )
                time.sleep(_LOOK_S)
        ended = not requests.running()
    return {
        "traces": [str(path) for path in _await(files.whole, _WRITTEN_S, _LOOK_S)],
        "server": about,
        "model": model,
        "step_us": step_us,
        "beside": running + waiting,
        "ended": ended,
    }


def asked_here(request: dict[str, Any]) -> dict[str, Any]:
    """`profile`, of a server of this machine. Raises MissingError where it does not do it."""
    from kdtree_engine.errors import MissingError  # not there where this is sent to

    try:
        return profile(request)
    except agent.Refused as error:
        raise MissingError(str(error)) from None


def _tokens(wanted: int, vocabulary: int | None) -> range:
    """Which tokens prompts are drawn from. A server ends over one that its model does not have.

    vocabulary: of the model; None where nobody can say: then few are taken, as no model has fewer.
    """
    if vocabulary is None or vocabulary < 1:
        return range(_FIRST_TOKEN, _FIRST_TOKEN + min(wanted, _FEW_TOKENS))
    first = min(_FIRST_TOKEN, vocabulary // 4)
    return range(first, min(first + wanted, vocabulary))


def draw_prompts(context: int, batch: int, tokens: range, seed: object) -> list[list[int]]:
    """`batch` prompts of `context` tokens: the first quarter is one for all, as a system prompt is.

    Of few distinct tokens an n-gram is soon seen again, so that trees of n-grams branch.
    """
    draw = random.Random(f"{seed} {context}")
    shared = draw.choices(tokens, k=context // 4)
    return [shared + draw.choices(tokens, k=context - len(shared)) for _ in range(batch)]


def _body(prompts: list[list[int]], count: int, names: list[str] | None = None) -> dict[str, Any]:
    body: dict[str, Any] = {
        "input_ids": prompts,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True},
    }
    return body | ({} if names is None else {"rid": names})


def _step_us(server: Server, prompts: list[list[int]], count: int) -> float | None:
    """Microseconds of a step, by what longer answers take more than short ones.

    A batch takes as many steps as the answer of it that takes most.
    """

    def timed(tokens: int) -> tuple[float, int]:
        begun = time.perf_counter()
        said = server.json("/generate", _body(prompts, tokens), _PREFILL_S)
        seconds = time.perf_counter() - begun
        verified = [(one.get("meta_info") or {}).get("spec_verify_ct") for one in said]
        return seconds, max(int(one) if one else tokens - 1 for one in verified)

    try:
        passes = [(timed(_FEW), timed(count)) for _ in range(_TIMED_PASSES)]
        (short, few), (long, many) = (min(one) for one in zip(*passes))  # noqa: B905
    except (AttributeError, OverflowError, TypeError, ValueError):
        return None
    taken, steps = long - short, many - few
    return taken / steps * 1e6 if taken > 0 and steps > 0 else None


def _new_tokens(request: dict[str, Any], about: dict[str, Any], slots: int) -> int:
    """How long a request may decode: as asked, or as the server's KV slots and context allow."""
    context, batch, steps = (int(request[name]) for name in ("context", "batch", "steps"))
    drafted = about.get("speculative_num_draft_tokens")
    per_pass = 1 + (drafted if isinstance(drafted, int) and drafted > 0 else 0)
    room = slots // batch - context - per_pass
    longest = about.get("context_length") or about.get("max_req_input_len")
    if isinstance(longest, int):
        room = min(room, longest - context - per_pass)
    count = min(int(request["new_tokens"]), room)
    if count < 2 * steps * per_pass:
        raise agent.Refused(
            f"{batch} requests of {context} tokens leave room for {max(0, room)} new tokens each "
            f"({slots} KV slots, context length {longest}), expected {2 * steps * per_pass} for "
            f"{steps} steps: ask for a smaller context, batch or number of steps"
        )
    return count


def _decoding(server: Server, requests: _Requests, expected: int) -> bool:
    if not requests.running():
        raise agent.Refused("a request ended before it could be profiled: ask for more new tokens")
    running, waiting, _ = server.load()
    return running >= expected and not waiting


def _ranks(about: dict[str, Any]) -> int:
    """How many files there will be. Ranks of DP attention are among those of tensor parallelism.

    Raises Refused for replicas beside each other: one that gets no request would record for ever.
    """

    def size(name: str) -> int:
        said = about.get(name)
        return said if isinstance(said, int) and said > 0 else 1

    if size("dp_size") > 1 and not about.get("enable_dp_attention"):
        raise agent.Refused(
            f"the server has {size('dp_size')} replicas (--dp-size), of which one may get no "
            "request and never end recording: profile a server with one"
        )
    return size("tp_size") * size("pp_size")


@contextlib.contextmanager
def _recording(server: Server, files: _Files, name: str, steps: int) -> Iterator[None]:
    """SGLang records inside the `with` block, `steps` passes or until the block ends."""
    asked = {
        "output_dir": str(files.folder),
        "num_steps": steps,
        "activities": ["CPU", "GPU"],
        # Both slow the host down, and are of no use here.
        "with_stack": False,
        "record_shapes": False,
        "profile_id": name,
    }
    refused = False
    try:
        try:
            server.text("/start_profile", asked, _WRITTEN_S)
        except agent.Refused as error:  # another one may record: that is not stopped
            refused = not isinstance(error, _Silent)
            raise
        yield
    finally:
        # One that has stopped by itself would have an error of this in its log.
        if not files.seen and not refused:
            with contextlib.suppress(agent.Refused):
                server.text("/stop_profile", {}, _WRITTEN_S)


class _Files:
    """What SGLang's profiler writes under a name: one file for each rank."""

    def __init__(self, folder: pathlib.Path, name: str, ranks: int) -> None:
        self.folder = folder
        self.seen = False
        """Whether all were found whole."""
        self._pattern = f"{name}-TP-*.trace.json.gz"
        self._ranks = ranks
        self._sizes: list[int] = []
        self._grown_at = time.monotonic()

    def whole(self) -> list[pathlib.Path]:
        """The files, once each rank's is whole. One that still grows is not read for that.

        Raises Refused where what is there grows no more and is not whole, as on a full disk.
        """
        found = sorted(self.folder.glob(self._pattern))
        before, self._sizes = self._sizes, [path.stat().st_size for path in found]
        if self._sizes != before:
            self._grown_at = time.monotonic()
        elif len(found) >= self._ranks:
            self.seen = all(map(_whole, found))
        if not self.seen and found and time.monotonic() - self._grown_at > _STALLED_S:
            free = shutil.disk_usage(self.folder).free >> 20
            raise agent.Refused(
                f"{self.folder}: {len(found)} of {self._ranks} traces are there, not whole, and "
                f"grow no more; {free} MB are free"
            )
        return found if self.seen else []


def _whole(path: pathlib.Path) -> bool:
    """Whether a gzip file has its end: it is written in place, block by block."""
    try:
        with gzip.open(path) as given:
            while given.read(1 << 20):
                pass
        return True
    except (EOFError, OSError, zlib.error):
        return False


def _await(look: Callable[[], Any], limit_s: float, pause_s: float = _POLL_S) -> Any:
    """What `look` finds, as soon as that is something."""
    deadline = time.monotonic() + limit_s
    while not (found := look()):
        if time.monotonic() > deadline:
            raise agent.Refused(f"the server was not where it should be within {limit_s:g} s")
        time.sleep(pause_s)
    return found


def model_of(about: dict[str, Any]) -> dict[str, Any]:
    """The shapes that the model's config.json names, of `_SHAPES`, and how it keeps its weights.

    Nothing where it has none.
    """
    path = pathlib.Path(str(about.get("model_path") or "")) / "config.json"
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(said, dict):
        return {}
    whole = said
    if isinstance(said.get("text_config"), dict):  # of a model that also sees
        said = said["text_config"]
    shapes = {name: said[name] for name in _SHAPES if isinstance(said.get(name), int)}
    return {**shapes, **_weights(said.get("quantization_config", whole.get("quantization_config")))}


def _weights(told: Any) -> dict[str, Any]:
    """quant_method, and of groups of weights weight_bits and weight_group, as far as it is told.

    told: a config's quantization_config: `bits` and `group_size`, or compressed-tensors' groups.
    """
    if not isinstance(told, dict):
        return {}
    groups = told.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    inner = first.get("weights") if isinstance(first, dict) else told
    inner = inner if isinstance(inner, dict) else {}
    bits, group = inner.get("num_bits", inner.get("bits")), inner.get("group_size")
    return {
        "quant_method": str(told.get("quant_method")),  # one that is not told is none we know
        **({"weight_bits": bits} if isinstance(bits, int) else {}),
        **({"weight_group": group} if isinstance(group, int) else {}),
    }


def main(request: dict[str, Any]) -> None:
    """Say on stdout what `profile` returns, or why it does not. SIGTERM ends it in order."""
    os.umask(0o077)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    said: dict[str, Any]
    try:
        said = {"done": profile(request)}
    except agent.Refused as error:
        said = {"error": str(error)}
    except OSError as error:
        said = {"error": agent.told(error)}
    print(json.dumps(said), flush=True)
