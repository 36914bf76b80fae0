"""What changes the live service of the host that it runs on: to another release, and back.

It is sent there like `remote.agent` and runs as a job, so that a connection that breaks leaves no
service half changed. It needs Python 3.9 and its standard library alone. Each line that it prints
is JSON, `{"step": NAME, "text": ...}`; the last one has `result` as well:

    promoted   what was asked for is live
    restored   it was not fit, and what was live before is live again
    stopped    it was not fit, and nothing was live before, or that was stopped on purpose
    down       it was not fit, and what was live before does not serve either
    recorded   the tokens that releases are held against are written
    off        it was taken down, as was asked for
    refused    nothing was changed
    lost       somebody broke its lock meanwhile; what is live is for whoever has the lock now

What is live is what the promotion log says last. `current` and `service.json` follow it: whoever
is killed in between leaves them behind, and the next promotion starts from the log.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import pathlib
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from remote import agent, launch, managers

_GPU_LIMIT_S = 90.0
_SMI_S = 15.0
"""How long nvidia-smi is asked again where it is there and fails: a driver may be busy."""
GPU_LEFT = 0.03
"""Of a GPU's memory: what drivers keep while nobody uses it, and more."""
_COMPARED = 0.5
"""Of the tokens, at least: near-ties excuse the rest, as in the gates."""
_ASKS = 4
"""How often the tokens are asked for while a service must stay well."""

FREE = 32 << 20
"""Bytes without which no service is stopped, as the next one could not be written down."""
NOTHING = 0
"""As `seen`: nothing was live."""
_ROOM = 1 << 20
_SECRET = 6
"""Characters from which a value of `secrets.env` is kept out of what is said: a flag is `1`."""
_MOST = 64 << 20
"""Bytes of an answer: what logprobs of all prompts take, and more."""


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *of_no_use: Any) -> None:
        """Nowhere: what another place says is nothing of this service."""


# Nothing but this machine can be reached at 127.0.0.1, whatever the environment says of proxies.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Stay)


class Unfit(Exception):
    """What was started does not serve as it should; one line."""


class Cancelled(BaseException):
    """Somebody asks for the state before."""


class Lost(BaseException):
    """Somebody broke the lock and another has it: nothing may be changed any more."""


class Promoter:
    """One change of the live service.

    request: root, manager (of `managers.manager_of`), port, health (the inventory's), gpu (whether
    the service has one), by, command, token (of the lock), keep, new_tokens (of a recording) and
    checks.
    checks: of each prompt `prompt`, `tokens` that must follow, and `others`: {step: tokens} that
    may stand there instead, after which nothing is compared, as what follows is another text.
    """

    def __init__(self, request: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> None:
        self._root = str(request["root"])
        self._request = request
        self._health = request["health"]
        self._checks = request["checks"]
        self._port = int(request["port"])
        self._say = say
        self._manager = managers.manager_of(self._root, request["manager"])
        self._log = agent.in_home(self._root) / "service" / "service.log"
        self._log_start = 0
        self._hidden = _secrets(agent.in_home(self._root) / "secrets.env")
        self._going_back = False
        self._was_stopped = False
        self._begun: tuple[dict[str, Any] | None, dict[str, Any]] | None = None

    def activate(self, target: dict[str, Any], *, back: bool) -> dict[str, Any]:
        """Make `target` live, or what was before live again.

        target: release (None for stock SGLang), phase, name, service (what `service.json` says).
        back: it was live once, and what came after it no longer counts.
        """
        live = self._begins(target)

        def log() -> None:
            restarts = self._request["what"] == "restart"
            if restarts and not self._was_stopped:
                return  # it was live, and is
            self._keep_lock()
            how = {"result": "started"} if restarts else {"result": "promoted", "back": back}
            agent.promoted(self._root, {**target, **how, "by": self._request["by"]})

        why = self._attempt(lambda: self._try(target)) or self._attempt(log)
        if why is not None:
            return self._restore(why, live, target)
        if self._request["what"] != "restart":
            self._not_bad(target["release"])
            self._prune()
        return self._ends("promoted", f"{target['name']} is live", live, target)

    def stop(self) -> dict[str, Any]:
        """Take down what is live, and write down that this was on purpose.

        Where nothing is, what runs all the same goes down: a first recording or promotion that was
        killed has left it, and nothing of it is in the promotion log.

        It is over in a moment and never half done, so that no signal takes it back. A disk that is
        full is no reason against it: what cannot be written down is said.
        """
        known = agent.promotions(self._root)
        live: dict[str, Any] | None = known["live"]
        self._require_seen(live)
        target = self._left_running() if live is None else {"name": "what was live", **live}
        _ignore_signals()
        name = str(target["name"])
        try:
            self._audit("begins", live, target)
        except OSError as error:
            self._step("audit", f"cannot be written: {error}")
        try:
            self._keep_lock()
            self._step("stops", "the service and every process of its group")
            self._manager.stop()
            if self._request["gpu"]:
                self._wait_for_gpus(strict=False)
        except Exception as error:
            return self._ends("down", f"{name} does not stop: {_told(error)}", live, target)
        if live is None:
            try:
                agent.remove_service(self._root)  # else a manager would start it again
            except (agent.Refused, OSError) as error:
                self._step("stops", f"what a manager would start stays: {_told(error)}")
        elif known["stopped"] is None:
            kept = {one: live.get(one) for one in ("release", "phase", "name")}
            try:
                how = {"result": "stopped", "by": self._request["by"]}
                agent.promoted(self._root, {**kept, **how})
            except OSError as error:
                text = f"{name} is stopped, and the promotion log cannot say so: {_told(error)}"
                return self._ends("down", text, live, target)
        return self._ends("off", f"{name} is stopped, on purpose", live, target)

    def _left_running(self) -> dict[str, Any]:
        """What runs and was never live, as a target. Refused where nothing runs."""
        runs = self._manager.status()["pid"] is not None
        if not runs and not agent.service_left(self._root)["processes"]:
            raise agent.Refused("nothing is live, and nothing runs")
        release = None
        with contextlib.suppress(agent.Refused, OSError):  # whatever else is damaged, it goes down
            release = agent.current(self._root)
        what = "no release" if release is None else f"release {release}"
        return {"name": f"what an unfinished change left running ({what})", "release": release}

    def _require_seen(self, live: dict[str, Any] | None) -> None:
        """Refused where what is live is another by now than when somebody chose what to do.

        seen: when what was live became so, `NOTHING` where nothing was; None: nobody looked.
        """
        seen = self._request.get("seen")
        if seen is not None and seen != (NOTHING if live is None else live.get("at")):
            now = "nothing" if live is None else f"{live.get('name')}, by {live.get('by')},"
            raise agent.Refused(
                f"another was quicker: {now} is live by now, which was not so when this was asked "
                f"for: look at kd status, then ask again"
            )

    def _begins(self, target: dict[str, Any]) -> dict[str, Any] | None:
        """What is live. Refused, with nothing changed, where the target cannot come to be."""
        known = agent.promotions(self._root)
        live: dict[str, Any] | None = known["live"]
        self._was_stopped = known["stopped"] is not None
        if self._request["what"] == "restart" and (
            live is None or any(live.get(one) != target[one] for one in ("release", "phase"))
        ):
            raise agent.Refused(f"{target['name']} is not what is live by now")
        self._require_seen(live)
        if self._request["what"] in ("rollback", "restart") and not self._is_of_the_model(target):
            raise agent.Refused(
                f"{target['name']} was started with the model {_model(target)}, and the recorded "
                f"tokens are of {self._request['model']}: give model_path that value in "
                f"remote/hosts.yaml and run kd record, or promote it with the other model"
            )
        place = pathlib.Path(agent.prepare(self._root)["root"])
        release = target["release"]
        if release is not None and not (place / "releases" / release / "release.json").is_file():
            raise agent.Refused(f"there is no release {release}")
        serves = None if live is None or self._was_stopped else live.get("release")
        if serves is not None and not (place / "releases" / serves / "release.json").is_file():
            raise agent.Refused(
                f"release {serves}, which is live, is not there any more and could not be put back "
                f"if this fails: kd stop first, if that is to be so"
            )
        if shutil.disk_usage(place).free < FREE:
            raise agent.Refused(f"less than {FREE >> 20} MB are free below {place}: make room")
        # Kept for what must be written to bring back what is live, should the disk be filled.
        agent.put_service(self._root, "room", "-" * _ROOM)
        self._audit("begins", live, target)
        return live

    def _attempt(self, do: Callable[[], str | None]) -> str | None:
        """Do it, and be deaf to signals from then on; why it failed, or None.

        Whatever fails, a fault of this program too: what was live must serve again.
        """
        try:
            try:
                return do()
            except Exception as error:
                return _told(error)
            finally:
                _ignore_signals()
        except Cancelled:
            return "cancelled"

    def _keep_lock(self) -> None:
        """Where the lock was broken and nobody has it since, all that is done is to go back."""
        mine = agent.has_lock(self._root, self._request["token"])
        if mine is None and not self._going_back:
            raise agent.Refused("its lock was broken")
        if mine is False:
            raise Lost

    def _is_of_the_model(self, entry: dict[str, Any]) -> bool:
        """Whether the recorded tokens say anything of an entry of the promotion log."""
        named = _model(entry)
        here, there = (
            None if path is None else agent.in_home(path)
            for path in (named, str(self._request["model"]))
        )
        return here is None or here == there

    def _not_bad(self, release: str | None) -> None:
        """One that failed before and is live now is the newest that is not bad, as it may be."""
        if release is None:
            return
        try:
            agent.mark_good(self._root, release)
        except OSError as error:
            self._step("marks", f"{release} stays marked as bad: {error}")

    def _prune(self) -> None:
        """Remove old releases; what cannot be removed is no reason to take anything back."""
        try:
            found = agent.prune(self._root, int(self._request["keep"]))
        except (agent.Refused, OSError) as error:
            self._step("prunes", f"old releases stay: {error}")
            return
        if found["removed"]:
            self._step("prunes", f"removed {', '.join(found['removed'])}")
        if found["in_use"]:
            self._step("prunes", f"{', '.join(found['in_use'])} stays, as gates run with it")

    def record(self, target: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
        """Ask a server that does nothing but plain decoding, and write down what it says.

        What was live before is live again afterwards.
        """
        live = self._begins(target)

        def ask() -> None:
            self._stop()
            self._start(target)
            self._step("asks", f"{len(prompts)} prompts, alone and together")
            count = int(self._request["new_tokens"])
            alone = [self._ask([prompt], count, likely=True)[0] for prompt in prompts]
            together = self._ask(prompts, count, likely=True)
            found = {
                "model": agent.model_of(self._root, self._request["model"]),
                "prompts": prompts,
                "new_tokens": count,
                "alone": alone,
                "together": together,
                "server": self._server_info(),
                "at": time.time(),
                "by": self._request["by"],
            }
            agent.put_tokens(self._root, found)

        why = self._attempt(ask)
        if why is not None:
            return self._restore(why, live, target)
        back = self._bring_back(live)
        if back is not None:
            return self._ends("down", f"the tokens are written, but {back}", live, target)
        return self._ends("recorded", "the tokens are written", live, target)

    def _try(self, target: dict[str, Any]) -> str | None:
        """Stop what is, start it and hold it against everything; None where it is fit, else why.

        One that is not fit is marked bad, if it is a release; a host without room is not its fault.
        """
        self._stop()
        try:
            self._start(target)
            self._judge()
        except Unfit as error:
            if target["release"] is not None and self._request["what"] == "promote":
                agent.mark_bad(self._root, target["release"], self._shown(_told(error)))
            return _told(error)
        return None

    def _restore(
        self, why: str, live: dict[str, Any] | None, target: dict[str, Any]
    ) -> dict[str, Any]:
        self._step("restores", why)
        back = self._bring_back(live)
        name = target["name"]
        if back is not None:
            return self._ends("down", f"{name}: {why}; and {back}", live, target)
        if live is None or self._was_stopped:
            before = "nothing was live before" if live is None else "it was stopped on purpose"
            text = f"{name}: {why}; stopped, as {before}"
            return self._ends("stopped", text, live, target)
        text = f"{name}: {why}; {live.get('name', 'what was before')} serves again"
        return self._ends("restored", text, live, target)

    def _bring_back(self, live: dict[str, Any] | None) -> str | None:
        """Let what was live serve again, or nothing where nothing did; why that failed.

        What was stopped on purpose is only set up again: whoever restarts it gets that.
        """
        self._going_back = True
        try:
            self._free_room()
            if live is not None:  # the inventory may name another port by now
                self._port = int(live.get("port") or self._port)
            self._stop(strict=False)
            if live is None:
                agent.remove_service(self._root)
                return None
            if self._was_stopped:
                self._set_up(live)
                return None
            self._start(live)
            if not self._is_of_the_model(live):
                self._checks = []
                self._step("asks", "nothing, as what was live has another model than these tokens")
            self._judge()
        except Exception as error:  # an entry that cannot be used, too
            return f"what was live before does not serve: {_told(error)}"
        return None

    def _stop(self, *, strict: bool = True) -> None:
        """strict: whether memory that somebody else holds is a reason to go no further."""
        self._keep_lock()
        self._step("stops", "the service and every process of its group")
        self._manager.stop()
        taken = listens(self._port)
        deadline = time.monotonic() + 10
        while taken and time.monotonic() < deadline:
            time.sleep(0.2)
            taken = listens(self._port)
        if taken:
            raise agent.Refused(
                f"port {self._port} is held by something that kd does not manage: end that, or "
                f"choose another port in remote/hosts.yaml"
            )
        if self._request["gpu"]:
            self._wait_for_gpus(strict)

    def _wait_for_gpus(self, strict: bool) -> None:
        """Until the memory of the GPUs is really free: a process that is gone may still hold it."""
        begun = time.monotonic()
        deadline = begun + _GPU_LIMIT_S
        while True:
            held = gpus_held()
            asks = shutil.which("nvidia-smi") and time.monotonic() - begun < _SMI_S
            if held is None and asks:
                time.sleep(1.0)
                continue
            if held is None:
                self._step("gpus", "nvidia-smi says nothing, so that nobody knows who holds memory")
                return
            if not held:
                return
            if time.monotonic() > deadline:
                why = f"the service has ended, and GPU memory is still held: {', '.join(held)}"
                if strict:
                    raise agent.Refused(why)
                self._step("gpus", why)
                return
            time.sleep(1.0)

    def _start(self, target: dict[str, Any]) -> None:
        """Start it, and wait until it is healthy: as long as it lives and its log grows."""
        self._keep_lock()
        self._step("starts", str(target["name"]))
        self._set_up(target)
        with contextlib.suppress(FileNotFoundError):
            self._log_start = self._log.stat().st_size
        try:
            self._manager.start()
        except agent.Refused as error:
            raise Unfit(f"it does not start: {error}{self._last_words()}") from None
        begun = grown = time.monotonic()
        size, told = -1, begun
        while True:
            self._lives()
            if self._healthy():
                self._step("healthy", f"after {time.monotonic() - begun:.0f} s")
                return
            now = time.monotonic()
            with contextlib.suppress(FileNotFoundError):
                if self._log.stat().st_size != size:
                    size, grown = self._log.stat().st_size, now
            if now - grown > self._health["stalled_log_s"]:
                raise Unfit(
                    f"not healthy, and its log has stood still for "
                    f"{self._health['stalled_log_s']:g} s{self._last_words()}"
                )
            if now - begun > self._health["start_ceiling_s"]:
                raise Unfit(
                    f"not healthy after {self._health['start_ceiling_s']:g} s{self._last_words()}"
                )
            if now - told > 30:
                told = now
                self._step("waits", f"{now - begun:.0f} s; its log: {self._last_words('')[:160]}")
            # A small model is up in seconds, and a large one need not be asked so often.
            time.sleep(min(self._health["poll_s"], 1.0 if now - begun < 60 else 60.0))

    def _set_up(self, target: dict[str, Any]) -> None:
        """Let it be what a manager would start."""
        agent.put_service(self._root, "service.json", json.dumps(target["service"], indent=1))
        if target["release"] is None:
            agent.no_release(self._root)
        else:
            agent.switch(self._root, target["release"])

    def _judge(self) -> None:
        """Whether what was started is fit: what is new and what is put back alike."""
        self._check("tokens")
        self._sustain()

    def _sustain(self) -> None:
        seconds = float(self._health["sustain_s"])
        self._step("sustains", f"must stay well for {seconds:g} s")
        begun = asked = time.monotonic()
        while True:
            left = begun + seconds - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(left, self._health["poll_s"]))
            self._lives()
            if not self._healthy():
                raise Unfit(f"it was healthy, and is not any more{self._last_words()}")
            if time.monotonic() - asked > seconds / _ASKS:
                asked = time.monotonic()
                self._check("tokens again")
        self._check("tokens at the end")

    def _lives(self) -> None:
        status = self._manager.status()
        if status["state"] != managers.RUNNING:
            raise Unfit(f"its process has ended{self._last_words()}")

    def _healthy(self) -> bool:
        url = f"http://127.0.0.1:{self._port}/health"
        try:
            with agent.within(10.0), _DIRECT.open(url, timeout=10) as answer:
                return bool(answer.status == 200)
        except (OSError, ValueError, http.client.HTTPException):
            return False

    def _check(self, what: str) -> None:
        """Whether the tokens after each prompt are those that were recorded."""
        checks = self._checks
        if not checks:
            return
        count = len(checks[0]["tokens"])
        self._step("asks", f"{what}: {len(checks)} prompts of {count} tokens")
        answers = self._ask([check["prompt"] for check in checks], count)
        for number, check in enumerate(checks):
            fault = difference(check, answers[number]["tokens"])
            if fault is not None:
                raise Unfit(f"other tokens than recorded: prompt {number}, {fault}")
        equal = sum(_equal(check, answers[number]["tokens"]) for number, check in enumerate(checks))
        if equal < _COMPARED * count * len(checks):
            raise Unfit(
                f"other tokens than recorded: {equal} of {count * len(checks)} are equal before a "
                f"near-tie, expected at least {_COMPARED:.0%}"
            )

    def _ask(
        self, prompts: list[list[int]], count: int, likely: bool = False
    ) -> list[dict[str, Any]]:
        """`count` tokens after each, greedily; `likely`: the likeliest of each step as well."""
        first = self._manager.status()["pid"]
        if first is not None and agent.listens(self._root, first, self._port) is False:
            raise agent.Refused(
                f"port {self._port} is answered by another process than the service's: end that"
            )
        body: dict[str, Any] = {
            "input_ids": prompts,
            "sampling_params": {
                "temperature": 0.0,
                "max_new_tokens": count,
                "ignore_eos": True,
            },
        }
        if likely:
            body.update(return_logprob=True, top_logprobs_num=4, logprob_start_len=-1)
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/generate",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        limit_s = self._health["answer_s"]
        try:
            with agent.within(limit_s), _DIRECT.open(request, timeout=limit_s) as answer:
                said = _json_of(answer)
        except urllib.error.HTTPError as error:
            text = ""
            quietly = contextlib.suppress(OSError, ValueError, http.client.HTTPException)
            with quietly, agent.within(10.0), error:
                text = self._shown(" ".join(error.read(4096).decode("utf-8", "replace").split()))
                text = text[:300]
            raise Unfit(f"it does not generate: HTTP {error.code} {text}") from None
        except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
            raise Unfit(f"it does not generate: {error}{self._last_words()}") from None
        try:
            if len(said) != len(prompts):
                raise ValueError(f"{len(said)} answers to {len(prompts)} prompts")
            return [_answer(one, likely) for one in said]
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise Unfit(f"it does not generate as SGLang does: {error!r:.300}") from None

    def _server_info(self) -> dict[str, Any]:
        """What the server says of itself: its release, model, dtype."""
        wanted = ("version", "model_path", "dtype", "attention_backend", "kv_cache_dtype")
        for path in ("/server_info", "/get_server_info"):
            url = f"http://127.0.0.1:{self._port}{path}"
            with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
                with agent.within(30.0), _DIRECT.open(url, timeout=30) as answer:
                    said = _json_of(answer)
                if isinstance(said, dict):
                    return {name: said[name] for name in wanted if name in said}
        return {}

    def _last_words(self, before: str = "; its log ends: ") -> str:
        """The last line that the service printed since it was started."""
        try:
            with self._log.open("rb") as printed:
                end = printed.seek(0, 2)
                start = self._log_start if self._log_start <= end else 0  # it was begun anew
                printed.seek(max(start, end - 8192))
                text = printed.read().decode("utf-8", "replace")
        except OSError:
            return ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return before + self._shown(lines[-1])[:300] if lines else ""

    def _shown(self, text: str) -> str:
        """What a log or a terminal may have: no secret that a service has printed, on one line."""
        for secret in self._hidden:
            text = text.replace(secret, "***")
        return _printable(text)

    def _step(self, step: str, text: str) -> None:
        self._say({"step": step, "text": self._shown(text)})

    def _free_room(self) -> None:
        (self._log.parent / "room").unlink(missing_ok=True)

    def _ends(
        self, result: str, text: str, live: dict[str, Any] | None, target: dict[str, Any]
    ) -> dict[str, Any]:
        text = self._shown(text)
        try:
            self._free_room()
            self._audit(result, live, target, text)
        except (agent.Refused, OSError) as error:  # it is so, whether that says it or not
            self._step("audit", f"cannot be written: {error}")
        return {"step": "ends", "result": result, "text": text}

    def lost(self) -> dict[str, Any]:
        """How it ends where another has the lock: that it was begun stands in the audit log."""
        text = "its lock was broken: what is live is for whoever has the lock now"
        if self._begun is not None:
            try:
                self._audit("lost", *self._begun, text)
            except (agent.Refused, OSError) as error:
                self._step("audit", f"cannot be written: {error}")
        return {"step": "ends", "result": "lost", "text": text}

    def _audit(
        self, result: str, live: dict[str, Any] | None, target: dict[str, Any], text: str = ""
    ) -> None:
        self._begun = (live, target)
        agent.audit(
            self._root,
            {
                "did": self._request["what"],
                "by": self._request["by"],
                "command": self._request["command"],
                "from": None if live is None else live.get("name"),
                "to": target["name"],
                "release": target["release"],
                "result": result,
                "text": text,
                **({"forced": self._request["forced"]} if self._request.get("forced") else {}),
            },
        )


def difference(check: dict[str, Any], tokens: list[int]) -> str | None:
    """Where `tokens` part from what a check wants, if not by a near-tie; None where they do not."""
    wanted = check["tokens"]
    if len(tokens) != len(wanted):
        return f"{len(tokens)} tokens instead of {len(wanted)}"
    for step, right in enumerate(wanted):
        if tokens[step] != right:
            if tokens[step] in check["others"].get(str(step), []):
                return None
            return f"token {step}: {tokens[step]} instead of {right}"
    return None


def _model(entry: dict[str, Any]) -> str | None:
    """The model that an entry of the promotion log is started with."""
    command = entry["service"]["command"]
    return command[command.index("--model-path") + 1] if "--model-path" in command else None


def _equal(check: dict[str, Any], tokens: list[int]) -> int:
    """How many tokens are those that a check wants, up to the first other one."""
    wanted = check["tokens"]
    return next((step for step, one in enumerate(tokens) if one != wanted[step]), len(tokens))


def gpus_held() -> list[str] | None:
    """GPUs whose memory is held by what nvidia-smi does not name; None where it says nothing."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    ask = [program, "--format=csv,noheader,nounits"]
    try:
        gpus, users = (
            subprocess.run(
                [*ask, query], capture_output=True, text=True, check=True, timeout=30
            ).stdout
            for query in (
                "--query-gpu=uuid,index,memory.used,memory.total",
                "--query-compute-apps=gpu_uuid,used_memory",
            )
        )
        named: dict[str, float] = {}
        for line in users.splitlines():
            gpu, _, used = line.partition(",")
            with contextlib.suppress(ValueError):  # "[N/A]", where it may not be told
                named[gpu.strip()] = named.get(gpu.strip(), 0.0) + float(used)
        held = []
        for line in gpus.splitlines():
            gpu, index, used, total = (part.strip() for part in line.split(","))
            if float(used) - named.get(gpu, 0.0) > GPU_LEFT * float(total):
                held.append(f"{used} MiB of GPU {index}")
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return held


def _told(error: Exception) -> str:
    """One line of it, and no more than one can read: a server may have said anything."""
    known = isinstance(error, (Unfit, agent.Refused, OSError))
    return _printable(str(error) if known else f"a fault of kd: {error!r}")[:700]


def _secrets(path: pathlib.Path) -> list[str]:
    """Values that a service may print and kd must not, the longest first; short ones hide words."""
    try:
        found = launch.secrets(path).values()
    except (launch.Refused, OSError):
        return []
    return sorted((one for one in found if len(one) >= _SECRET), key=len, reverse=True)


def _printable(text: str) -> str:
    """What a terminal only shows: no control character that a service has printed."""
    return "".join(one if one.isprintable() else "?" for one in text)


def _json_of(answer: Any) -> Any:
    body = answer.read(_MOST + 1)
    if len(body) > _MOST:
        raise ValueError(f"an answer of more than {_MOST >> 20} MB")
    return json.loads(body)


def _answer(said: dict[str, Any], likely: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"tokens": [int(token) for token in said["output_ids"]]}
    if likely:
        steps = said["meta_info"]["output_top_logprobs"][-len(found["tokens"]) :]
        found["likely"] = [[[float(one[0]), int(one[1])] for one in step] for step in steps]
        if len(found["likely"]) != len(found["tokens"]):
            raise ValueError("too few log probabilities")
    return found


_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def _ignore_signals() -> None:
    """From here on nobody ends this halfway: what is live is written down, or put back."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=2).close()
    except OSError:
        return False
    return True


def main(request: dict[str, Any]) -> int:
    """Do what is asked, and give the lock back. 0 where that is how it is now."""

    def say(line: dict[str, Any]) -> None:
        # Whoever reads may be gone; what is under way goes on.
        with contextlib.suppress(OSError):
            print(json.dumps({**line, "at": time.time()}), flush=True)

    def cancel(number: int, frame: object) -> None:
        _ignore_signals()
        raise Cancelled

    for number in _SIGNALS:
        signal.signal(number, cancel)
    promoter = Promoter(request, say)
    try:
        if request["what"] == "stop":
            ends = promoter.stop()
        elif request["what"] == "record":
            ends = promoter.record(request["target"], request["prompts"])
        else:
            ends = promoter.activate(request["target"], back=request["what"] == "rollback")
    except Cancelled:
        ends = {"step": "ends", "result": "refused", "text": "cancelled"}
    except Lost:
        ends = promoter.lost()
    except Exception as error:  # before anything was changed
        ends = {"step": "ends", "result": "refused", "text": _told(error)}
    try:
        agent.unlock(request["root"], request["token"])
    except (agent.Refused, OSError) as error:
        say({"step": "lock", "text": str(error)})
    say(ends)
    return 0 if ends["result"] in ("promoted", "recorded", "off") else 1
