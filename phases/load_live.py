"""A server that already runs, at any address: what `kd promote` made live, for one."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import pathlib
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from kdtree_engine.errors import ConfigError
from phases.service import Answer, Service, ServiceFailed

__all__ = ["Live", "told", "vocabulary"]


@dataclasses.dataclass(frozen=True)
class Live(Service):
    """A server that already runs, at any address."""

    url: str = ""

    @classmethod
    def at(cls, url: str) -> Live:
        """Raises ConfigError where this is no address of a server."""
        try:
            parts = urllib.parse.urlsplit(url)
            right = parts.scheme in ("http", "https") and bool(parts.hostname)
            right = right and not (parts.query or parts.fragment or parts.username)
            port = parts.port or 0
        except ValueError:
            right, port = False, 0
        if not right:
            raise ConfigError(
                f"{url!r} is no address of a server", remedy="write it as http://127.0.0.1:30000"
            )
        return cls(port, pathlib.Path(os.devnull), url=url.rstrip("/"))

    def get(self, path: str) -> Any:
        """What it says there, as JSON."""
        return self._json(path, None)

    def answer(self, body: bytes, likely: int) -> Answer:
        """To one request; with its likely tokens where the server tells them."""
        asked: dict[str, Any] = json.loads(body)
        more = {"return_logprob": True, "top_logprobs_num": likely, "logprob_start_len": -1}
        try:
            return self._answer(self._json("/generate", asked | more), likely)
        except ServiceFailed:  # some servers refuse probabilities, under speculation for one
            return self._answer(self._json("/generate", asked), 0)

    def _send(
        self, path: str, body: Mapping[str, Any] | None, limit_s: float | None = None
    ) -> bytes:
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with _DIRECT.open(request, timeout=limit_s or self.limit_s) as answer:
                said: bytes = answer.read()
                return said
        except (OSError, http.client.HTTPException) as error:
            raise ServiceFailed(
                f"no answer from {self.url}: {error or type(error).__name__}"
            ) from error


# The client goes to the address that was named too, and through no proxy.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def told(service: Live) -> dict[str, Any]:
    """What a live server says of itself, as far as it concerns figures.

    Raises ServiceFailed where nothing of SGLang's answers.
    """
    model, info = service.get("/model_info"), {}
    with contextlib.suppress(ServiceFailed):
        info = service.get("/server_info")
    if not isinstance(model, dict) or not isinstance(info, dict):
        raise ServiceFailed(f"{service.url}: expected what SGLang says of its model")
    names = (
        *("attention_backend", "decode_attention_backend", "speculative_algorithm"),
        *("speculative_num_draft_tokens", "tp_size", "dtype", "kv_cache_dtype"),
        *("max_running_requests", "disable_cuda_graph", "incremental_streaming_output"),
    )
    return {
        "url": service.url,
        "model": model.get("model_path"),
        "sglang": info.get("version"),
        **{name: info[name] for name in names if name in info},
    }


def vocabulary(server: Mapping[str, Any]) -> int:
    """How many token ids the model has, from its config, where that lies on this machine.

    Of a config that says it twice the smaller: a server ends over an id that its model lacks.
    Raises ConfigError where it does not, as a made-up id can be one that the model does not have.
    """
    path = pathlib.Path(str(server.get("model") or "")) / "config.json"
    config: Any = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        config = json.loads(path.read_text(encoding="utf-8"))
    parts = [config, config.get("text_config")] if isinstance(config, dict) else []
    sizes = [part.get("vocab_size") for part in parts if isinstance(part, dict)]
    found = min((one for one in sizes if isinstance(one, int)), default=0)
    if found < 3:
        raise ConfigError(
            f"{path} does not tell how many tokens the model at {server.get('url')} knows",
            remedy="name a file of prompts: --prompts FILE",
        )
    return found
