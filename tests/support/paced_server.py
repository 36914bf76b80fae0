"""A server that streams tokens at a known pace, in SGLang's words, and can fail in every way.

    python paced_server.py PORT PACE_S TOKENS_A_CHUNK

A prompt's right tokens are a rule's (`right_tokens`). As the same rule is every server's, tests of
comparison change a server's `faults`. It notes the times between its own writes, so that what a
client adds to them can be told: GET /gaps.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import json
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from phases.load_histogram import Histogram

__all__ = ["PacedServer", "right_tokens"]


def right_tokens(prompt: list[int] | str, count: int) -> list[int]:
    start = sum(prompt) if isinstance(prompt, list) else len(prompt)
    return [(7 * start + 31 * step) % 97 for step in range(count)]


class PacedServer:
    """pace_s: between two chunks of an answer. a_chunk: tokens of one, the first one's is 1.

    faults, of every `every`-th request: `http 500`, `error`, `abort`, `closes`, `resets`,
    `hangs`, `short`, `garbage`; of all requests: `wrong` (the last streamed token), `near-tie`
    (the third), `drifts` (the last one is another each time), `leaks`, `runs on` (a request
    that never ends), `silent` (no byte at all), `no probabilities`.
    """

    def __init__(
        self,
        *faults: str,
        pace_s: float = 0.01,
        a_chunk: int = 1,
        incremental: bool = False,
        every: int = 1,
        model: str = "",
    ) -> None:
        self.faults, self.pace_s, self.a_chunk = frozenset(faults), pace_s, a_chunk
        self.incremental, self.every, self.model = incremental, every, model
        self.port = 0
        self.gaps = Histogram()
        self.streamed: list[Any] = []
        self.open = self.most_open = 0
        self.seen: collections.Counter[str] = collections.Counter()
        self._count = itertools.count(1)
        self._up = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextlib.contextmanager
    def serving(self) -> Iterator[PacedServer]:
        """In a thread, on a port of its own."""
        thread = threading.Thread(target=asyncio.run, args=(self.serve(0),), daemon=True)
        thread.start()
        assert self._up.wait(10)
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._over.set)
            thread.join(10)

    async def serve(self, port: int) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._connected, "127.0.0.1", port)
        self.port = server.sockets[0].getsockname()[1]
        self._up.set()
        await self._over.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._one(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split(" ")[1]
        self.seen[path] += 1
        size = next(
            (int(line.split(":")[1]) for line in head.lower().split("\r\n") if "length:" in line), 0
        )
        body = json.loads(await reader.readexactly(size)) if size else None
        if body is None or not body.get("stream"):
            said = json.dumps(self._say(path, body)).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(said) + said)
            await writer.drain()
            return
        self.streamed.append(body)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await self._stream(body, writer)
        finally:
            self.open -= 1

    def _say(self, path: str, body: Any) -> Any:
        if path == "/generate":
            prompts = body.get("input_ids", body.get("text"))
            several = isinstance(prompts[0], list)
            found = [self._whole(one, body) for one in (prompts if several else [prompts])]
            return found if several else found[0]
        if path == "/v1/loads":
            slots = {"num_used_tokens": 7 if "leaks" in self.faults else 0}
            slots["max_total_num_tokens"] = 4096
            slots["num_running_reqs"] = 1 if "runs on" in self.faults else 0
            return {"loads": [{"num_waiting_reqs": 0, **slots}]}
        if path == "/gaps":
            return self.gaps.as_json()
        return {"model_path": self.model, "version": "0.5.23", "tp_size": 1}

    def _whole(self, prompt: list[int] | str, body: Any) -> Any:
        tokens = right_tokens(prompt, body["sampling_params"]["max_new_tokens"])
        about: dict[str, Any] = {"finish_reason": {"type": "length"}}
        if body.get("return_logprob"):
            if "no probabilities" in self.faults:
                return {"error": "no probabilities"}
            likely = [[[-0.5, one, None], [-0.5 - 1e-9, one + 1, None]] for one in tokens]
            about["output_top_logprobs"] = likely
        return {"output_ids": tokens, "meta_info": about}

    async def _stream(self, body: Any, writer: asyncio.StreamWriter) -> None:
        fault = "" if next(self._count) % self.every else " ".join(self.faults)
        count = body["sampling_params"]["max_new_tokens"]
        tokens = right_tokens(body.get("input_ids", body.get("text")), count)
        if "wrong" in self.faults:
            tokens[-1] += 3
        if "drifts" in self.faults:
            tokens[-1] += 100 + len(self.streamed)
        if "near-tie" in self.faults:
            tokens[2] += 1
        if "silent" in self.faults:
            await asyncio.sleep(600)
        if "http 500" in fault:
            writer.write(b"HTTP/1.1 500 Bad\r\nContent-Length: 13\r\n\r\nout of memory")
            await writer.drain()
            return
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while "drips" in fault:
            self._raw(writer, b": nothing yet\n\n")
            await writer.drain()
            await asyncio.sleep(0.05)
        if "endless" in fault:
            tokens = right_tokens(body.get("input_ids", body.get("text")), count := 4 * count)
        if "garbage" in fault:
            writer.write(b"xyz\r\n")
            await writer.drain()
            return
        sent, steps, last = 0, 0, 0.0
        due = time.perf_counter()
        while sent < count:
            due += self.pace_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            new = min(count - sent, self.a_chunk if sent else 1)
            sent, steps = sent + new, steps + (1 if sent else 0)
            ending: Any = {"type": "length"} if sent == count else None
            if sent > count // 2 and fault:
                if "hangs" in fault:
                    await asyncio.sleep(600)
                if "resets" in fault:
                    writer.transport.abort()
                    return
                if "closes" in fault:
                    return
                if "error" in fault:
                    self._event(writer, {"error": {"message": "no more slots"}})
                    break
                if "abort" in fault:
                    ending = {"type": "abort", "message": "told to"}
                if "short" in fault:
                    ending = {"type": "stop"}
            if "endless" in fault:
                ending = None
            ids = tokens[sent - new : sent] if self.incremental else tokens[:sent]
            about: dict[str, Any] = {"finish_reason": ending, "completion_tokens": sent}
            if self.a_chunk > 1:
                about["spec_verify_ct"] = steps
            text = " ".join(map(str, tokens[:sent]))
            said = {"text": text, "output_ids": ids, "meta_info": about}
            if "no ids" in self.faults:
                del said["output_ids"]
            self._event(writer, said)
            now = time.perf_counter()
            if last:
                self.gaps.add(now - last)
            last = now
            await writer.drain()
            if ending:
                break
        self._raw(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _event(self, writer: asyncio.StreamWriter, said: Any) -> None:
        self._raw(writer, b"data: " + json.dumps(said, separators=(",", ":")).encode() + b"\n\n")

    def _raw(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))


if __name__ == "__main__":
    port, pace_s, a_chunk = sys.argv[1:4]
    asyncio.run(PacedServer(pace_s=float(pace_s), a_chunk=int(a_chunk)).serve(int(port)))
