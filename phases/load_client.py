"""The client of a load test: many requests in flight, each chunk's arrival noted as it comes.

It runs in a process of its own, so that neither a plot nor a comparison of tokens keeps it from
noting an arrival, and sends what it saw twice a second: a `Tick`. One thread, one loop, no package:
`aiohttp`, which SGLang's own tool has, is not among what kd needs.

What is measured, for each answer whose chunks i = 1..k arrive at t(i) with n(i) new tokens:

    first token       t(1) - begun; begun is when the request was to be sent
    chunk gap         t(i) - t(i-1), i > 1, once: what a reader waits for the next piece of text
    inter-token       (t(i) - t(i-1)) / n(i), i > 1, n(i) times: a chunk's gap shared by its tokens
    answer            t(k) - begun

With speculation a chunk has several tokens, so the two gaps are different things: the reader waits
the first, and the second is what a decode step costs a token. `inter-token` is what SGLang 0.5.23's
`benchmark/serving.py` computes for its backend `sglang`, in `async_request_sglang_generate`:
`adjust_itl = chunk_gap / num_new_tokens`, as often as there are tokens. It keeps no chunk gap. For
its OpenAI backends it shares the gap out among the tokens into which the text is cut anew.
Neither is the time of a verification: where the server's front end is behind, SGLang sends what
several steps gave as one chunk, and two chunks that one read brings have no gap between them
(`together`).

A closed loop has N requests in flight: each that ends is followed by the next. It is measured from
when each of the N has had its first token, so that no gap is of an emptier server; afterwards those
in flight are let end. First token and answer are of requests that began while it was measured. An
open loop sends requests at times drawn before (a Poisson process); what a late sender or a full
server adds counts, as `begun` is the drawn time.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import multiprocessing
import random
import signal
import ssl
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

from kdtree_engine.errors import KdError
from phases.load_histogram import Histogram
from phases.load_prompts import Prompts
from phases.load_stream import Events, Pieces, StreamBroken
from phases.service import Tokens

__all__ = [
    "DRAIN",
    "MEASURED",
    "MOST_FORMS",
    "OTHER_PROMPT",
    "RAMP",
    "TOO_MANY",
    "UNTOLD",
    "ClientFailed",
    "Order",
    "Running",
    "Tick",
    "running",
]

RAMP, MEASURED, DRAIN = "ramp", "measured", "drain"

_TICK_S = 0.5
_LOOK_S = 0.02
"""Between two looks at the clock; how late one is, is how late an arrival may have been noted."""
_AFTER_ERROR_S = 0.2
_MANY_ERRORS = 10
_OF_SILENCE = 5
"""As so many errors counts one that took so long to be found."""
_MOST_SAID = 3
MOST_FORMS = 64
"""Different answers to one prompt that are kept to be compared: memory, where each is another."""
TOO_MANY = f"differ from the {MOST_FORMS} different ones that are kept of their prompt"
OTHER_PROMPT = "are of prompts of which no answer is kept"
UNTOLD = "came without token ids"
"""Why an answer is not compared."""
_STOP_S = 5.0


class ClientFailed(KdError):
    """The client's process died; nothing is known of the server."""


@dataclasses.dataclass(frozen=True)
class Order:
    """What is asked for. Either `concurrency`, the requests in flight, or `rate`, those a second.

    seconds: for how long it is measured, at least: a closed loop goes on until as many answers
        have ended as it has in flight, unless `exactly`.
    first: the number of the first request. judged: of how many prompts answers are kept.
    silence_s: how long a request may be without a token before it counts as failed; a byte that
        brings none is no sign of life.
    most: requests in flight at which an open loop is given up.
    """

    url: str
    prompts: Prompts
    new_tokens: int
    seconds: float
    concurrency: int = 0
    rate: float = 0.0
    exactly: bool = False
    first: int = 0
    judged: int = 0
    seed: int = 1
    silence_s: float = 120.0
    most: int = 1024


@dataclasses.dataclass
class Tick:
    """What came since the one before.

    at: seconds since the client began; seconds: of this tick. tokens, chunks: all that arrived.
    answers: of requests that began while it was measured; errors: of all, by kind.
    produced, verified: tokens that verifications gave, and verifications, of ended answers.
    busy: of the processor's time of one core, the share that the client took. late: of its clock.
    forms: new answers to prompts that are judged, as (prompt, tokens). unjudged: answers that are
    neither there nor like one that was, by why.
    """

    at: float
    stage: str
    seconds: float = 0.0
    tokens: int = 0
    chunks: int = 0
    together: int = 0
    started: int = 0
    answers: int = 0
    in_flight: int = 0
    produced: int = 0
    verified: int = 0
    busy: float = 0.0
    errors: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    said: list[str] = dataclasses.field(default_factory=list)
    forms: list[tuple[int, Tokens]] = dataclasses.field(default_factory=list)
    unjudged: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    first_token: Histogram = dataclasses.field(default_factory=Histogram)
    inter_token: Histogram = dataclasses.field(default_factory=Histogram)
    chunk_gap: Histogram = dataclasses.field(default_factory=Histogram)
    answer: Histogram = dataclasses.field(default_factory=Histogram)
    late: Histogram = dataclasses.field(default_factory=Histogram)


@dataclasses.dataclass(frozen=True)
class _Done:
    """why: it ended before its time; empty where it did not."""

    why: str = ""


class Running:
    """A client at work. `ticks` ends with it; `why` then says why before its time, if so."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.why = ""

    def ticks(self) -> Iterator[Tick]:
        """Each as it comes. Raises ClientFailed where the process dies."""
        while True:
            try:
                found = self._pipe.recv()
            except (EOFError, OSError) as error:
                raise ClientFailed("the process that sends the requests died") from error
            if isinstance(found, _Done):
                self.why = found.why
                return
            yield found

    def stop(self) -> None:
        """Hang up on everything; a last tick comes, and the end."""
        with contextlib.suppress(OSError):
            self._pipe.send("stop")

    def rest(self) -> list[Tick]:
        """After `stop`: what still comes, for a few seconds at most."""
        found = []
        deadline = time.monotonic() + _STOP_S
        with contextlib.suppress(EOFError, OSError):
            while self._pipe.poll(max(0.0, deadline - time.monotonic())):
                one = self._pipe.recv()
                if isinstance(one, _Done):
                    break
                found.append(one)
        return found


@contextlib.contextmanager
def running(order: Order) -> Iterator[Running]:
    """The client's process, which is gone after the `with` block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, order), name="kd load", daemon=True)
    process.start()
    theirs.close()
    try:
        yield Running(ours)
    finally:
        ours.close()  # it ends by itself now
        process.join(_STOP_S)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


def _work(pipe: Connection, order: Order) -> None:
    # Ctrl-C reaches every process of a terminal; this one ends when it is told to.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, EOFError):  # nobody is there to be told
        pipe.send(asyncio.run(_Client(order, pipe).work()))


class _Request(asyncio.Protocol):
    """One request on a connection of its own."""

    def __init__(self, client: _Client, number: int, body: bytes, begun: float) -> None:
        self.number, self.begun = number, begun
        self.counts = client.stage == MEASURED
        self.first = self.last = 0.0
        self.heard = time.perf_counter()
        self.ended = asyncio.get_running_loop().create_future()
        self.pieces = Pieces()
        self._client, self._body = client, body
        self._events = Events()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.heard = time.perf_counter()
        transport.write(self._client.head(len(self._body)) + self._body)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self.ended.done():
            return
        try:
            for event in self._events.feed(data):
                if new := self.pieces.take(event):
                    self.heard = now
                    self._client.arrived(self, now, new)
        except StreamBroken as error:
            self.end("garbage", str(error))
            return
        wanted = self._client.order.new_tokens
        if self._events.ended:
            self._judge()
        elif self.pieces.count > wanted and not self.pieces.ending:
            self.end("endless", f"{self.pieces.count} of {wanted} tokens, and no end")

    def connection_lost(self, error: Exception | None) -> None:
        self._judge(str(error or ""))

    def _judge(self, lost: str = "") -> None:
        """How it ended, once nothing more comes."""
        pieces, events = self.pieces, self._events
        wanted = self._client.order.new_tokens
        if events.status not in (0, 200):
            said = events.body.decode(errors="replace")
            self.end(f"http {events.status}", said)
        elif pieces.error:
            self.end("abort" if pieces.ending == "abort" else "error", pieces.error)
        elif not pieces.ending:
            self.end("closed", lost or f"the server closed after {pieces.count} tokens")
        elif pieces.ending != "length" or pieces.count != wanted:
            self.end("short", f"{pieces.count} of {wanted} tokens, ended by {pieces.ending!r}")
        else:
            self.end()

    def end(self, kind: str = "", said: str = "") -> None:
        """kind: of the error; empty where it was answered."""
        if not self.ended.done():
            self.ended.set_result((kind, said))
        if self._transport is not None:
            self._transport.abort()


class _Client:
    def __init__(self, order: Order, pipe: Connection) -> None:
        self.order = order
        self.stage = RAMP if order.concurrency else MEASURED
        self._pipe = pipe
        parts = urllib.parse.urlsplit(order.url)
        self._host = parts.hostname or ""
        self._secure = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._secure else 80)
        self._head = (
            f"POST {parts.path.rstrip('/')}/generate HTTP/1.1\r\nHost: {parts.netloc}\r\n"
            "Content-Type: application/json\r\nAccept: text/event-stream\r\n"
            "Connection: close\r\nContent-Length: "
        )
        self._number = order.first
        self._open: set[_Request] = set()
        self._forms: dict[int, set[Tokens]] = {}
        self._warm: set[int] = set()
        self._in_a_row = 0
        self._stopped = asyncio.Event()
        self._why = ""
        self._began = self._since = self._from = time.perf_counter()
        self._processor = time.process_time()
        self._ended = 0
        self._tick = Tick(0.0, self.stage)

    def head(self, size: int) -> bytes:
        return f"{self._head}{size}\r\n\r\n".encode()

    def arrived(self, request: _Request, now: float, new: int) -> None:
        """A chunk with new tokens."""
        tick = self._tick
        tick.tokens += new
        tick.chunks += 1
        if request.first:
            gap = now - request.last
            tick.together += gap == 0
            tick.chunk_gap.add(gap)
            tick.inter_token.add(gap / new, new)
        else:
            request.first = now
            if request.counts:
                tick.first_token.add(now - request.begun)
        request.last = now

    async def work(self) -> _Done:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pipe.fileno(), self._told)
        clock = asyncio.create_task(self._watch())
        load = asyncio.create_task(self._closed() if self.order.concurrency else self._arrivals())
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            done, _ = await asyncio.wait(
                (clock, load, stopped), return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
        finally:
            loop.remove_reader(self._pipe.fileno())
            for task in (clock, load, stopped):
                task.cancel()
            await asyncio.gather(clock, load, stopped, return_exceptions=True)
        self._send(self.stage)
        return _Done(self._why)

    def _told(self) -> None:
        """The other side says stop, or is gone; both mean the same."""
        with contextlib.suppress(EOFError, OSError):
            self._pipe.recv()
        self._why = self._why or "stopped"
        self._stopped.set()

    async def _closed(self) -> None:
        slots = [asyncio.create_task(self._slot(one)) for one in range(self.order.concurrency)]
        try:
            await asyncio.gather(*slots)
        finally:
            for slot in slots:
                slot.cancel()
            await asyncio.gather(*slots, return_exceptions=True)

    async def _slot(self, slot: int) -> None:
        while self.stage != DRAIN:
            if not await self._one(time.perf_counter(), slot):
                await asyncio.sleep(_AFTER_ERROR_S)

    async def _arrivals(self) -> None:
        draw = random.Random(f"arrivals {self.order.seed} {self.order.rate}")
        due, requests = self._began, set[asyncio.Task[bool]]()
        try:
            while True:
                due += draw.expovariate(self.order.rate)
                if due > self._began + self.order.seconds:
                    break
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                if len(self._open) >= self.order.most:
                    self._give_up(f"{len(self._open)} requests in flight: the server falls behind")
                requests.add(asyncio.create_task(self._one(due, 0)))
            await asyncio.sleep(max(0.0, self._began + self.order.seconds - time.perf_counter()))
            self._enter(DRAIN)
            await asyncio.gather(*requests)
        finally:
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)

    async def _one(self, begun: float, slot: int) -> bool:
        """One request from its beginning to its end; whether it was answered."""
        number, self._number = self._number, self._number + 1
        body = self.order.prompts.body(number, self.order.new_tokens)
        request = _Request(self, number, body, begun)
        self._open.add(request)
        self._tick.started += 1
        try:
            try:
                await asyncio.get_running_loop().create_connection(
                    lambda: request,
                    self._host,
                    self._port,
                    ssl=self._secure,
                    ssl_handshake_timeout=self.order.silence_s if self._secure else None,
                )
            except OSError as error:
                request.end("refused", str(error))
            kind, said = await request.ended
        finally:
            request.end()
            self._open.discard(request)
        self._note(request, kind, said)
        self._warm.add(slot)
        return not kind

    def _note(self, request: _Request, kind: str, said: str) -> None:
        tick = self._tick
        self._ended += 1
        if kind:
            tick.errors[kind] += 1
            if len(tick.said) < _MOST_SAID:
                tick.said.append(f"{kind}: {' '.join(said.split())[:200]}")
            self._in_a_row += _OF_SILENCE if kind == "silent" else 1
            if self._in_a_row >= max(_MANY_ERRORS, self.order.concurrency):
                self._give_up(f"requests failed one after the other, the last one: {kind}")
            return
        self._in_a_row = 0
        if request.pieces.verified:
            # The first token of an answer comes from the prefill.
            tick.produced += request.pieces.count - 1
            tick.verified += request.pieces.verified
        if request.counts:
            tick.answers += 1
            tick.answer.add(request.last - request.begun)
        self._keep(self.order.prompts.number(request.number), request.pieces.tokens)

    def _keep(self, prompt: int, tokens: Sequence[int] | None) -> None:
        """An answer, where it is the first of its kind; else why it will not be compared."""
        if not self._is_judged(prompt):
            self._tick.unjudged[OTHER_PROMPT] += 1
            return
        if tokens is None:
            self._tick.unjudged[UNTOLD] += 1
            return
        forms, form = self._forms.setdefault(prompt, set()), tuple(tokens)
        if form in forms:
            return
        if len(forms) == MOST_FORMS:
            self._tick.unjudged[TOO_MANY] += 1
            return
        forms.add(form)
        self._tick.forms.append((prompt, form))

    def _is_judged(self, prompt: int) -> bool:
        begin = self.order.first if self.order.prompts.fresh else 0
        return begin <= prompt < begin + self.order.judged

    def _give_up(self, why: str) -> None:
        self._why = self._why or why
        self._stopped.set()

    async def _watch(self) -> None:
        """The clock: stages, ticks, silent requests, and how late the loop is."""
        due = time.perf_counter()
        while True:
            due += _LOOK_S
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            now = time.perf_counter()
            self._tick.late.add(max(0.0, now - due))
            due = max(due, now - _LOOK_S)
            self._move_on(now)
            if now - self._since >= _TICK_S:
                for request in list(self._open):
                    if now - request.heard > self.order.silence_s:
                        request.end("silent", f"no token for {self.order.silence_s:g} s")
                self._send(self.stage)

    def _move_on(self, now: float) -> None:
        order = self.order
        if self.stage == RAMP:
            under_way = sum(1 for request in self._open if request.first)
            if under_way == order.concurrency or len(self._warm) == order.concurrency:
                self._enter(MEASURED)
        elif self.stage == MEASURED and order.concurrency:
            enough = order.exactly or self._ended >= order.concurrency
            if enough and now - self._from >= order.seconds:
                self._enter(DRAIN)

    def _enter(self, stage: str) -> None:
        self._send(self.stage)
        self.stage, self._from, self._ended = stage, time.perf_counter(), 0
        self._tick.stage = stage

    def _send(self, stage: str) -> None:
        now, processor = time.perf_counter(), time.process_time()
        tick = self._tick
        tick.at, tick.stage, tick.seconds = now - self._began, stage, now - self._since
        tick.in_flight = len(self._open)
        tick.busy = (processor - self._processor) / tick.seconds if tick.seconds > 0 else 0.0
        self._since, self._processor = now, processor
        self._tick = Tick(0.0, stage)
        self._pipe.send(tick)
