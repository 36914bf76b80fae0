"""`kd`, what a person types: it parses, calls and prints; the rooms behind it do the work."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import json
import math
import os
import pathlib
import shlex
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem, get_completion_class

from kdtree_engine.errors import ConfigError, KdError, MissingError, UnknownName
from phases.exit_code import ExitCode

if TYPE_CHECKING:
    from rich.console import Console

    from kdtree_engine.machine import Machine
    from phases.bench_load import Plan
    from phases.checkout import Checkout
    from phases.evidence import Record, Store
    from phases.phase import Phase

__all__ = ["cli", "main"]

EPILOG = """\b
Exit codes:
  0    every gate passed
  1    a gate failed
  2    wrong usage or configuration
  3    nothing failed, but something is blocked or unwritten
  130  interrupted
"""

BENCH_EPILOG = """\
The column us is rotated: several calls in one CUDA graph, each on inputs of its own, divided by
their number, as figures of kernels are usually given. The column cold us is of one call a graph,
right after other kernels. Caches are flushed before both. The other columns go by the first.

\b
Exit codes:
  0    every kernel was right
  1    a kernel was wrong, or could not be run
  2    wrong usage or configuration
  3    no GPU, or no kernel library
"""


BENCH_FRAG_EPILOG = """\
The first table is of runs of a live request of 16,384 tokens or more, as requests arrive. The
second is of the second half of the arrivals: the same mean, the tenth with most runs, run length in
slots, the share of steps within 2 MiB, and the runs of all live requests. An allocation's time is
the processor's, and is of this machine; cached is the share of prompt tokens that the cache had.

\b
  stock      frees go to the end of the free list, allocations come from its beginning
  need_sort  SGLang's flag: freed slots wait, and are merged and sorted when an allocation is short
  sort       the same, when idle, and once a hundredth of the pool waits
  best_fit   each request's slots from the shortest run that has them
  tier0      best_fit, and 64 slots reserved behind each request for its decode steps

\b
Exit codes:
  0    no policy lost a slot, and all served the same requests
  1    one did not, or could not be run
  2    wrong usage or configuration
  3    no SGLang
"""


BENCH_PRICE_EPILOG = """\
A row is of an operation at batch 1, over so many tokens, whose runs lie within so many slots: the
whole pool or windows of it. Behind the contiguous time stands how far its own times were apart, and
then what runs of 1 to 64 slots cost over it, in microseconds: of one layer, but for the compaction,
which is of all. Times are cold. It takes about two minutes and 40 GB of the GPU's memory; with less
the pool is smaller.

\b
Exit codes:
  0    every output was right
  1    an output was wrong, or a time could not be taken
  2    wrong usage or configuration
  3    no GPU, too little memory, or no kernel library
"""


BENCH_SERVE_EPILOG = """\
The column accepted is of tokens a verification gave; two servers with trees are compared by speed
only where it is alike. The last column says whether the tokens are those of no speculation, and
where not, at which one they part, and whether that was a near-tie.

Under load (--concurrency, --rate, --soak, --url) requests are streamed, and repeat prompts that the
server has answered before. Times are in milliseconds. tok/s is of all requests together, each is
of one, first is the time to the first token. With speculation a chunk has several tokens: gap is
the time between two chunks, and itl that gap shared by the second one's tokens, as SGLang's own
bench has it. The last column says whether the answers are those of no speculation; of --url, those
of the same server to each prompt alone, which is told and decides nothing. On a terminal it is
plotted while it runs. Ctrl-C keeps what was measured.

\b
Exit codes:
  0    every server was measured, and gave the right tokens
  1    a server gave other tokens, or could not be measured; under load: or a request failed, an
       answer was short, or KV slots stayed in use
  2    wrong usage or configuration, or nothing answers at the URL
  3    no GPU, or no SGLang
  130  interrupted; what was measured under load is kept
"""


MOE_EPILOG = """\
Every time is a prediction: bytes and flops of the experts over the GPU's rates, and an all-reduce
behind each layer; no MoE layer was timed on any GPU. Lines below the table say where the rates are
from. A row is of all MoE layers of one step at a batch; reads are experts whose weights a rank
reads in a layer; idle is the share of ranks without an active expert, waiting the share of all
ranks' time in experts that goes by until the slowest is done.

\b
  tp           each expert is sliced over all ranks
  ep           experts are divided, the first to the first rank
  eplb         the most loaded experts have copies, which share their tokens
  eplb-joined  the same copies, but one takes all of an expert's tokens in a step

\b
Exit codes:
  0    the figures are printed
  2    wrong usage, a trace that cannot be read, or one with too few steps for a batch
"""


CAPACITY_EPILOG = """\
A row is of one step of decoding: attention, products of dense weights, routed experts, all-reduces,
drafting with the tree's operations, and the host, in milliseconds. Tokens a second are the accepted
tokens of all requests over the step. What bounds it is what most of its time goes by: bytes of
memory, flops, latency (launches, messages and the host) or bytes over the link. The second table
holds the model against steps that were measured. Lines on stderr say what all of it rests on.

\b
The label of a row:
  calibrated  every part of it was fitted to measurements on that GPU
  prediction  anything else: every step of a model, or on a GPU, that was not measured

\b
Exit codes:
  0    every row fits the GPUs' memory
  1    some row does not, or the weights alone do not
  2    wrong usage, or a config.json of another kind of model
  3    no kept evidence to calibrate by
"""


TUNE_EPILOG = """\b
Exit codes:
  0    every tile was right, and the table is written
  1    a tile was wrong, or could not be run; the table is as it was
  2    wrong usage or configuration
  3    no GPU, or no kernel library
"""


PROFILE_EPILOG = """\
A step lasts from one forward pass of the target model to the next, with the drafter's work between
them; prefill is left out where SGLang's ranges tell it. The column us shares each instant of a
step out among the kernels that run in it, or gives it to idle gaps (the next kernel has been
launched) or to host scheduling (it has not), so that the column adds up to the step. The column
kernel us is the plain sum of their durations. Where there are several GPUs the figures are their
means. GB/s are bytes that must be read, or that copies moved or collectives sent, by the kernels'
time. Of ceiling is the larger share of the GPU's DRAM and bf16 flops, and takes the note that lies
beside a trace of kd's own; of collectives it is that of the link, and takes NCCL's arguments in the
trace, and --link or --link-bandwidth. What cannot be counted says why on stderr. Of collectives the
table of ranks tells what is waiting for the last rank. SGLang's profiler slows the host, so what
the host does is overstated.

\b
What tells steps apart:
  ranges    SGLang's step[...] ranges
  profiler  torch.profiler's own steps
  graphs    replays of CUDA graphs: a round of them each
  whole     nothing: the whole trace is one step

\b
Exit codes:
  0    the steps are summed up; kernels that no rule knows are listed
  2    wrong usage, or a file is no trace, is damaged or has no GPU in it
  3    summed up, but no steps can be told apart; or no SGLang, or no server that answers
"""


DEPLOY_EPILOG = """\b
Exit codes:
  0    it is a release there, on every host that was named, and every gate of phases 0..N is
       proven (or --no-validate)
  1    it is a release there, and a gate failed
  2    wrong usage or configuration, the host cannot be reached, is locked, or has no room, or its
       Python cannot import what was sent
  3    it is a release there, no gate failed, and one is blocked or unwritten; or it is none, as
       rsync, the kernel library or a package that gates need is missing
  130  interrupted; what ran there was ended
"""
BUNDLE_EPILOG = """\b
Exit codes:
  0    it is written
  2    wrong usage or configuration, or the host cannot be reached
  3    a package cannot be fetched
"""
VALIDATE_EPILOG = """\b
Exit codes:
  0    every gate of phases 0..N is proven there
  1    a gate failed
  2    wrong usage or configuration, or the host cannot be reached
  3    no gate failed, and one is blocked or unwritten
  130  interrupted; what ran there was ended
"""
PROMOTE_EPILOG = """\b
Exit codes:
  0    it is live (of `kd record`: the tokens are written; of `kd stop`: it is down)
  1    it was not fit; what was live before is live again, or nothing where nothing was or where
       it was stopped on purpose
  2    wrong usage or configuration, or the host is locked; nothing has changed
  4    it was not fit, and what was live before does not serve either; or the lock was broken;
       or, of `kd stop`, a process of the service does not end; or the connection was lost, or the
       job there was killed, so that nobody here knows: see `kd status --host`
  130  interrupted; what was live before is live again, or will be where Ctrl-C came twice
"""


SERVE_EPILOG = """\b
Exit codes:
  2    wrong usage or configuration, or the host cannot be reached
  3    SGLang is not installed on this machine
Else those of the server; 78 where it could not be started on another host.
"""


_LOOK_S = 1.0  # between two looks at a log that is followed
_CHECK_S = 30.0  # for each command of `kd hosts check`


class _FiniteRange(click.FloatRange):
    """Numbers within bounds: click's takes NaN, which is within none, and infinity."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{number} is no number that can be reckoned with", param, ctx)
        return number


class _Group(click.Group):
    """A group that answers a mistyped command with the nearest ones."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise UnknownName("command", args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)


_Group.group_class = _Group


@click.group(cls=_Group, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, envvar="KD_DEBUG", help="Show the traceback of an error.")
@click.version_option(package_name="kd", prog_name="kd")
def cli(debug: bool) -> None:
    """Take an MLA tree-verify attention kernel from a plain oracle to a live service.

    Each phase has a plan and acceptance gates; each run of a gate leaves evidence.
    """


def main() -> None:
    """The console script: one line for an error, and honest exit codes."""
    debug = "--debug" in sys.argv[1:] or os.environ.get("KD_DEBUG", "0") not in ("", "0")
    try:
        code = cli.main(prog_name="kd", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = ExitCode.USAGE
    except (click.Abort, KeyboardInterrupt):
        click.echo("kd: interrupted", err=True)
        code = ExitCode.INTERRUPTED
    except SystemExit as error:
        # click ends with 1 where the reader went away, and wraps stdout for Python's last flush.
        if not type(sys.stdout).__name__.endswith("PacifyFlushWrapper"):
            raise
        code = 128 + signal.SIGPIPE if error.code == 1 else error.code
    except BrokenPipeError:  # the reader went away, as in `kd status | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    except (KdError, OSError) as error:
        if debug:
            traceback.print_exc()
        from remote.errors import UnknownEnd

        click.echo(f"kd: {_one_line(error)}", err=True)
        code = ExitCode.BLOCKED if isinstance(error, MissingError) else ExitCode.USAGE
        if isinstance(error, UnknownEnd):
            code = ExitCode.DOWN
    sys.exit(code)


def _one_line(error: KdError | OSError) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return _shown(f"{error.filename}: {error.strerror}")
    return _shown(" ".join(str(error).split()))


# ---------------------------------------------------------------------------------------------
# Names that the shell can complete.


def _completing(names: Callable[[], Iterable[str]]) -> Callable[..., list[CompletionItem]]:
    def complete(ctx: click.Context, param: click.Parameter, word: str) -> list[CompletionItem]:
        try:
            return [CompletionItem(name) for name in names() if name.startswith(word)]
        except Exception:  # a shell that asks for names wants no traceback
            return []

    return complete


def _phase_names() -> Iterable[str]:
    return ["all", *(str(phase.number) for phase in _phases())]


def _promotable_names() -> Iterable[str]:
    return ["stock", *(str(phase.number) for phase in _phases() if phase.profile.arguments)]


def _gate_names() -> Iterable[str]:
    return [gate.name for phase in _phases() for gate in phase.gates]


def _plan_names() -> Iterable[str]:
    from phases.plan import load_plans

    return [plan.path.stem for plan in load_plans(_checkout().plans)]


def _host_names() -> Iterable[str]:
    from remote.inventory import load_inventory

    return list(load_inventory(_checkout().hosts_file).hosts)


def _host_and_group_names() -> Iterable[str]:
    from remote.inventory import load_inventory

    inventory = load_inventory(_checkout().hosts_file)
    return [*inventory.hosts, *inventory.groups]


def _complete_hosts(ctx: click.Context, param: click.Parameter, word: str) -> list[CompletionItem]:
    """The last name of `ct200,la`."""
    before = word[: word.rfind(",") + 1]
    return _completing(lambda: [before + name for name in _host_and_group_names()])(
        ctx, param, word
    )


def _run_names() -> Iterable[str]:
    return ["latest", *(record.run for record in _store(_checkout()).own_records())]


_json_option = click.option("--json", "as_json", is_flag=True, help="Plain JSON on stdout.")
_host_option = click.option(
    "--host",
    "host_name",
    default="local",
    show_default=True,
    metavar="NAME",
    help="A host of remote/hosts.yaml.",
    shell_complete=_completing(_host_names),
)
# Its commands do one host after the other: see `_on_each`.
_hosts_option = click.option(
    "--host",
    "host_names",
    default="local",
    show_default=True,
    metavar="NAME[,NAME...]",
    help="Hosts or groups of remote/hosts.yaml; one host after the other.",
    shell_complete=_complete_hosts,
)


def _gpu_names() -> list[str]:
    from kdtree_engine.gpus import GPUS

    return list(GPUS)


def _phase_option(what: str, *, required: bool = False) -> Callable[..., Any]:
    """--phase N, as the parameter `wanted`. what: what it says of itself."""
    return click.option(
        "--phase",
        "wanted",
        required=required,
        metavar="N",
        help=what,
        shell_complete=_completing(_phase_names),
    )


_jobs_option = click.option(
    "--jobs",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    metavar="N",
    help="Run so many gates at once; those of speed still run alone, after all others.",
)


def _run_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        _host_option,
        click.option("--fail-fast", is_flag=True, help="Stop after the first gate that fails."),
        _jobs_option,
        click.option(
            "--require",
            multiple=True,
            type=click.Choice(["gpu", "nvcc", "sanitizer", "sglang", "service"]),
            help="Count gates that are blocked for lack of this as failed. Repeatable.",
        ),
        click.option(
            "--seed",
            type=click.IntRange(0, 2**31 - 1),
            default=1,
            show_default=True,
            help="Seed of every random draw.",
        ),
        click.option("--no-input", is_flag=True, help="Never ask anything (kd never does)."),
        _json_option,
    ):
        command = option(command)
    return command


# ---------------------------------------------------------------------------------------------
# Phases and gates.


@cli.group("phase")
def phase_group() -> None:
    """List and run phases."""


@phase_group.command("list")
@_json_option
def phase_list(as_json: bool) -> None:
    """Every phase, what it builds on, and its gates."""
    phases = _phases()
    if as_json:
        _print_json(
            [
                {
                    "number": phase.number,
                    "name": phase.name,
                    "title": phase.title,
                    "plan": phase.plan,
                    "depends_on": phase.depends_on,
                    "gates": [
                        {
                            "name": gate.name,
                            "title": gate.title,
                            "kind": gate.kind,
                            "requires": gate.requires,
                            "written": gate.check is not None,
                        }
                        for gate in phase.gates
                    ],
                    "profile": {
                        "arguments": phase.profile.arguments,
                        "environment": dict(phase.profile.environment),
                    },
                }
                for phase in phases
            ]
        )
        return
    _print_table(
        ("phase", "builds on", "gate", "needs", "what it shows"),
        [
            (
                phase.package,
                ", ".join(map(str, phase.depends_on)),
                gate.name,
                ", ".join(gate.requires),
                gate.title,
            )
            for phase in phases
            for gate in phase.gates
        ],
    )


@phase_group.command("run", epilog=EPILOG)
@click.argument(
    "wanted", metavar="N|all...", nargs=-1, required=True, shell_complete=_completing(_phase_names)
)
@click.option(
    "--only",
    multiple=True,
    metavar="GATE",
    help="Run this gate alone. Repeatable.",
    shell_complete=_completing(_gate_names),
)
@_run_options
@click.pass_context
def phase_run(
    ctx: click.Context,
    wanted: tuple[str, ...],
    only: tuple[str, ...],
    host_name: str,
    fail_fast: bool,
    jobs: int,
    require: tuple[str, ...],
    seed: int,
    no_input: bool,
    as_json: bool,
) -> None:
    """Run the acceptance gates of one phase, of several, or of all in dependency order."""
    from phases.registry import find_gate, find_phase
    from phases.runner import select

    phases = _phases()
    named = phases if "all" in wanted else [find_phase(phases, name) for name in wanted]
    chosen = [phase for phase in phases if phase in named]
    for name in only:
        owner, _ = find_gate(phases, name)
        if owner not in chosen:
            raise ConfigError(
                f"gate {name} is one of {owner.package}", remedy=f"kd phase run {owner.number}"
            )
    record = _run(select(chosen, only), host_name, fail_fast, jobs, seed)
    ctx.exit(_report(record, phases, require, as_json))


@cli.command("verify", epilog=EPILOG)
@click.option("--all", "everything", is_flag=True, help="Run every gate, fresh or not.")
@_phase_option("The gates of phases 0..N alone.")
@click.option("--dry-run", is_flag=True, help="Say where each gate stands, and run nothing.")
@_run_options
@click.pass_context
def verify(
    ctx: click.Context,
    everything: bool,
    wanted: str | None,
    dry_run: bool,
    host_name: str,
    fail_fast: bool,
    jobs: int,
    require: tuple[str, ...],
    seed: int,
    no_input: bool,
    as_json: bool,
) -> None:
    """Run every gate that has not passed with the code as it is now.

    With --dry-run each gate is proven, stale, missing, failed, blocked (with what a run would find
    in its way) or unwritten; the exit code is 0 where all are proven, 1 where one failed, else 3.
    """
    from phases.evidence import Platform
    from phases.promotable import exit_code_of, up_to
    from phases.registry import find_phase
    from phases.runner import engine_environment, run_that_goes_on, select, unproven
    from phases.states import gate_states

    phases = _phases()
    if wanted is not None:
        phases = up_to(phases, find_phase(phases, wanted))
    machine = _local_machine(host_name)
    platform = Platform.of(machine, engine_environment())
    store = _store(_checkout())
    known = store.newest(phases, host_name, socket.gethostname())
    if dry_run:
        known = {} if everything else known
        running = run_that_goes_on(_checkout(), store)
        found = gate_states(select(phases), known, machine, platform, running)
        states = [one.as_json() for one in found]
        if as_json:
            _print_json({"exit_code": exit_code_of(states), "gates": states})
        else:
            _print_states(states)
        ctx.exit(exit_code_of(states))
    selection, fresh = unproven(select(phases), {} if everything else known, platform)
    if selection:
        record = _run(selection, host_name, fail_fast, jobs, seed, machine)
        ctx.exit(_report(record, phases, require, as_json, fresh))
    if as_json:
        _print_json({"exit_code": 0, "gates": [], "fresh": [entry.gate for entry in fresh]})
    else:
        click.echo(f"{len(fresh)} gates passed before, with the code as it is now; none to run")


@cli.command("status")
@click.option("--host", "host_name", metavar="NAME", shell_complete=_completing(_host_names))
@_json_option
def status(host_name: str | None, as_json: bool) -> None:
    """Phases x hosts from the newest evidence; stale means that the code has changed since.

    What is kept in the repository has a column for each GPU, and with --json one for each record.
    With --host, first what is live there: its service, the lock, what was done last.
    """
    from phases.report import kept_by_gpu, status_now, status_rows
    from phases.runner import run_that_goes_on

    live = None
    if host_name is not None and _host(host_name).service is not None:
        live = _live_status(host_name)
    phases, store, here = _phases(), _store(_checkout()), socket.gethostname()
    running = run_that_goes_on(_checkout(), store)
    places = [place for place in store.machines() if place != ("local", here)]
    columns = {
        host if host != "local" else f"local ({hostname})": (
            host,
            hostname,
            store.newest(phases, host, hostname),
        )
        for host, hostname in places
    }
    columns = {"local": ("local", here, store.newest(phases, "local", here))} | columns
    for name, record in store.kept_records().items():
        kept = store.among([record], phases)
        columns[f"kept: {name}"] = (record.host, record.machine.hostname, kept)
    if host_name is not None:
        columns = {label: column for label, column in columns.items() if column[0] == host_name}
        if not columns and live is None:
            click.echo(f"no evidence of host {host_name}", err=True)
    if as_json:
        evidence = [
            {
                "host": host,
                "hostname": hostname,
                "label": label,
                "gates": {
                    name: {
                        "status": status_now(evidence, running),
                        "stale": evidence.stale,
                        "run": evidence.record.run,
                    }
                    for name, evidence in gates.items()
                },
            }
            for label, (host, hostname, gates) in columns.items()
        ]
        _print_json(evidence if live is None else {**live, "evidence": evidence})
        return
    if live is not None:
        _print_live(live)
    shown = {
        label: gates for label, (_, _, gates) in columns.items() if not label.startswith("kept: ")
    }
    by_gpu = kept_by_gpu(store, phases, host_name)
    shown |= {f"kept: {gpu}": gates for gpu, gates in by_gpu.items()}
    if shown:
        rows = status_rows(phases, list(shown.values()), running)
        _print_table(("phase", "gate", *shown), rows)


def _live_status(host_name: str) -> dict[str, Any]:
    """What is live on a host, as its promotion log, its manager, its lock and its metrics say."""
    from kdtree_engine.fragmentation.exported import PREFIX, read_metrics

    host = _host(host_name)
    assert host.service is not None
    with _live_service(host) as live:
        found = live.releases.promotions()
        shown = ("name", "release", "phase", "by", "at")
        now, before = (
            None if entry is None else {name: entry.get(name) for name in shown}
            for entry in (found["live"], found["previous"])
        )
        record = live.releases.tokens()
        service = live.manager.status()
        said = ""
        if service.pid is not None:
            said = live.releases.metrics(service.pid, host.service.port, PREFIX)
        return {
            "host": host.name,
            "service": dataclasses.asdict(service),
            "live": now,
            "followed": found["followed"],
            "stopped": found["stopped"]
            and {name: found["stopped"].get(name) for name in ("by", "at")},
            "previous": before,
            "lock": live.releases.lock_holder(),
            "jobs": live.releases.jobs(),
            "tokens": record and {name: record.get(name) for name in ("at", "by", "server")},
            "fragmentation": read_metrics(said, PREFIX),
            "audit": live.releases.audited(5),
        }


_UNLIKE = {
    True: "another is set up there: kd restart, or promote",
    False: "another is set up there, which was never live: kd stop ends what runs of it",
}
"""What is said where what a manager would start is not what is live, by whether anything is."""


def _print_live(found: dict[str, Any]) -> None:
    from phases.report import fragmentation_lines

    def when(at: Any) -> str:
        if not isinstance(at, (int, float)) or not 0 <= at < 1e11:
            return "at an unknown time"
        return f"{datetime.datetime.fromtimestamp(at, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"

    def stopped(one: dict[str, Any]) -> str:
        return f"stopped on purpose, by {one['by']}, {when(one['at'])}: kd restart starts it"

    service, live, lock = found["service"], found["live"], found["lock"]
    pid = f", process {service['pid']}" if service["pid"] else ""
    unrecorded = f"not recorded (kd record --host {found['host']})"
    rows = [
        ("service", f"{service['state']}{pid}"),
        ("live", f"{live['name']}, by {live['by']}, {when(live['at'])}" if live else "nothing"),
        *([("", stopped(found["stopped"]))] if found["stopped"] else []),
        *([] if found["followed"] else [("", _UNLIKE[live is not None])]),
        ("before", found["previous"]["name"] if found["previous"] else "nothing"),
        ("lock", f"{lock['owner']}, {when(lock['at'])}: {lock['command']}" if lock else "free"),
        *(("runs", f"{job['name']}, {when(job['at'])}") for job in found["jobs"]),
        ("tokens", when(found["tokens"]["at"]) if found["tokens"] else unrecorded),
        *(("KV slots", text) for text in fragmentation_lines(found["fragmentation"])),
    ]
    rows += [
        (
            "done",
            f"{when(one.get('at'))} {one.get('by')}: {one.get('did')}, {one.get('result')}"
            + (
                f"; {text}"
                if (text := one.get("text") or one.get("to") or one.get("release"))
                else ""
            ),
        )
        for one in found["audit"]
    ]
    _print_table((f"{found['host']}", ""), rows)


# ---------------------------------------------------------------------------------------------
# The kernel library.


@cli.command("build")
@_json_option
def build(as_json: bool) -> None:
    """Compile the kernels with nvcc (no GPU needed) into the libraries that the wheel carries.

    Two: the attention, and the draft tree around it.
    """
    import dataclasses

    from kdtree_engine.build import build as build_attention
    from kdtree_engine.ops.library import build_tree_kernels

    reports = [make(progress=_say_compiled) for make in (build_attention, build_tree_kernels)]
    if as_json:
        # The attention's at the top, as it was when there was no other.
        attention, trees = map(dataclasses.asdict, reports)
        _print_json(attention | {"trees": trees})
        return
    _print_table(
        ("kernel", "arch", "registers", "spilled bytes", "shared bytes"),
        [
            (
                kernel.kernel,
                kernel.architecture,
                str(kernel.registers),
                str(kernel.spill_bytes),
                str(kernel.shared_bytes),
            )
            for report in reports
            for kernel in report.kernels
        ],
    )
    for report in reports:
        click.echo(
            f"{report.library}: {report.compiled} sources compiled, {report.reused} reused, "
            f"{report.seconds:.1f} s"
        )


def _say_compiled(done: int, total: int, source: str) -> None:
    click.echo(f"[{done}/{total}] {source}", err=True)


# ---------------------------------------------------------------------------------------------
# Speed, outside of any gate.


@cli.group("bench")
def bench_group() -> None:
    """Measure, with correctness first; what must be reached is the gates' business."""


@bench_group.command("kernel", epilog=BENCH_EPILOG)
@click.option(
    "--regime",
    "regimes",
    multiple=True,
    metavar="B,H,T,L",
    help="Batch, heads, tree nodes, prefix (default: the twelve of plan 15). Repeatable.",
)
@click.option(
    "--tile",
    "tiles",
    multiple=True,
    metavar="ROWSxTOKENS",
    help="Force this tile, as 72x32 (default: the built-in choice). Repeatable.",
)
@click.option(
    "--library",
    "libraries",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=pathlib.Path),
    help="A kernel library (default: the one that kd build made). Repeatable.",
)
@click.option(
    "--repeats",
    type=click.IntRange(3),
    default=50,
    show_default=True,
    help="Cold calls; half as many rotated replays.",
)
@click.option(
    "--peers/--no-peers",
    default=True,
    show_default=True,
    help="Also time the kernels of other projects that are installed, each checked first.",
)
@click.option(
    "--peer",
    "named",
    multiple=True,
    metavar="NAME",
    help="Of the peers only this one; sglang-decode where T is 1. Repeatable.",
)
@_json_option
@click.pass_context
def bench_kernel(
    ctx: click.Context,
    regimes: tuple[str, ...],
    tiles: tuple[str, ...],
    libraries: tuple[pathlib.Path, ...],
    repeats: int,
    peers: bool,
    named: tuple[str, ...],
    as_json: bool,
) -> None:
    """Time the kernel on this machine's GPU, against the card's ceilings and installed peers."""
    from phases import bench as work
    from phases.bench_table import COLUMNS, bench_rows, ceilings
    from phases.decode_peers import DECODE_PEERS
    from phases.peers import PEERS
    from phases.requirement import Requirement

    chosen = [work.parse_regime(text) for text in regimes] or list(work.REGIMES)
    forced: list[work.Tile | None] = [work.parse_tile(text) for text in tiles]
    decodes = DECODE_PEERS if all(regime.nodes == 1 for regime in chosen) else ()
    beside = {peer.name: peer for peer in (*PEERS, *decodes)}
    for name in named:
        if name not in beside:
            raise click.BadParameter(
                f"no peer {name} here, there are: {', '.join(beside)}", param_hint="--peer"
            )
    if named and not peers:
        raise click.UsageError("--peer says nothing beside --no-peers")
    checkout, machine = _checkout(), _this_machine()
    if (lack := Requirement.GPU.missing(machine)) is not None:
        raise MissingError(lack, remedy=Requirement.GPU.remedy)
    bench, file = work.bench_this_machine(
        libraries,
        chosen,
        forced or [None],
        repeats=repeats,
        checkout=checkout,
        machine=machine,
        command=["kd", *sys.argv[1:]],
        progress=_say_timed,
        peers=[beside[name] for name in named or beside] if peers else [],
    )
    if as_json:
        click.echo(file.read_text(encoding="utf-8"), nl=False)
    else:
        _print_table(COLUMNS, bench_rows(bench))
        click.echo(f"{ceilings(bench)}; {file}")
    ctx.exit(ExitCode.PASSED if bench.right else ExitCode.FAILED)


@bench_group.command("serve", epilog=BENCH_SERVE_EPILOG)
@click.option(
    "--length",
    "lengths",
    multiple=True,
    type=click.IntRange(64, 250_000),
    help="Prompt tokens (default: 1024, 4096, 16384, 65536). Repeatable.",
)
@click.option(
    "--nodes", type=click.IntRange(2, 128), default=9, show_default=True, help="Nodes of a tree."
)
@click.option("--eager", is_flag=True, help="Without CUDA graphs.")
@click.option(
    "--new-tokens",
    type=click.IntRange(8, 4096),
    default=256,
    show_default=True,
    help="Tokens that are decoded and timed.",
)
@click.option(
    "--concurrency",
    metavar="N,N,...",
    help="Load: so many requests in flight, one point after the other, as 1,4,16.",
)
@click.option("--rate", metavar="R,R,...", help="Load: so many requests a second, as they come.")
@click.option(
    "--soak",
    type=_FiniteRange(1),
    metavar="SECONDS",
    help="Load: one point (default: 16 in flight) for so long, in windows.",
)
@click.option("--url", help="Load on a server that already runs, and on no other.")
@click.option(
    "--seconds",
    type=_FiniteRange(1),
    default=20.0,
    show_default=True,
    help="Of each point of --concurrency and --rate, at least.",
)
@click.option("--fresh", is_flag=True, help="Load with a new prompt, to be prefilled, each time.")
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=pathlib.Path),
    help="With --url: prompts from a file of JSON lines, each with input_ids or text.",
)
@click.option(
    "--silence",
    type=_FiniteRange(0, min_open=True),
    default=120.0,
    show_default=True,
    help="Seconds without a token after which a request under load has failed.",
)
@_json_option
@click.pass_context
def bench_serve(
    ctx: click.Context,
    /,
    lengths: tuple[int, ...],
    nodes: int,
    eager: bool,
    new_tokens: int,
    as_json: bool,
    **load: Any,
) -> None:
    """Decode tok/s of SGLang on this GPU: on the kernel, on Triton, and without speculation.

    One request at a time, or under load.
    """
    from phases import bench_serve as work
    from phases.requirement import Requirement
    from phases.serve import require_sglang
    from phases.service import server_python
    from phases.service_scale import GPU

    under_load = any(load[name] for name in ("concurrency", "rate", "soak", "url"))
    plan = _load_plan(sorted(set(lengths)), new_tokens, **load) if under_load else None
    if plan is None and (load["fresh"] or load["prompts"]):
        raise click.UsageError("--fresh and --prompts are of a load: add --concurrency or --url")
    if plan is not None and load["url"]:
        ctx.exit(_bench_load(plan, as_json, url=load["url"]))
    checkout, machine = _checkout(), _this_machine()
    if (lack := Requirement.GPU.missing(machine)) is not None:
        raise MissingError(lack, remedy=Requirement.GPU.remedy)
    require_sglang(server_python())
    if plan is not None:
        ctx.exit(_bench_load(plan, as_json, nodes=nodes, graphs=not eager))
    bench, file = work.bench_serve(
        sorted(set(lengths)) or GPU.speed_lengths,
        nodes=nodes,
        graphs=not eager,
        new_tokens=new_tokens,
        checkout=checkout,
        machine=machine,
        command=["kd", *sys.argv[1:]],
        progress=_say_timed,
    )
    if as_json:
        click.echo(file.read_text(encoding="utf-8"), nl=False)
    else:
        _print_table(work.COLUMNS, work.rows(bench))
        click.echo(f"{file}; the servers' logs are in {file.with_suffix('')}")
    ctx.exit(ExitCode.PASSED if bench.right else ExitCode.FAILED)


def _load_plan(
    lengths: Sequence[int],
    new_tokens: int,
    *,
    concurrency: str | None,
    rate: str | None,
    soak: float | None,
    url: str | None,
    seconds: float,
    fresh: bool,
    prompts: pathlib.Path | None,
    silence: float,
) -> Plan:
    """What the options ask for. Raises UsageError where they contradict each other."""
    from phases.bench_load import Plan, parse_numbers

    if concurrency and rate:
        raise click.UsageError("--concurrency and --rate are two ways to load: name one")
    if prompts and (not url or lengths or fresh):
        raise click.UsageError("--prompts goes with --url, and without --length and --fresh")
    usual = "16" if soak else "1,2,4,8,16"
    many = () if rate else parse_numbers(concurrency or usual, "--concurrency", whole=True)
    rates = parse_numbers(rate, "--rate", whole=False) if rate else ()
    if soak and len(many) + len(rates) > 1:
        raise click.UsageError("--soak is of one load: one number of --concurrency or --rate")
    return Plan(
        (0,) if prompts else tuple(lengths) or (1024,),
        tuple(map(int, many)),
        rates,
        seconds=soak or seconds,
        soak=bool(soak),
        new_tokens=new_tokens,
        prompts=max(4, *map(int, many)) if many else 16,
        fresh=fresh,
        file=prompts,
        silence_s=silence,
    )


def _bench_load(plan: Plan, as_json: bool, *, url: str | None = None, **servers: Any) -> ExitCode:
    """A load test from its plots to its tables."""
    from phases import bench_load as work
    from phases import load_table as table
    from phases.load_plot import screen_for

    console = _console(stderr=True)
    with screen_for(console, functools.partial(click.echo, err=True)) as screen:
        facts: dict[str, Any] = {
            "checkout": _checkout(),
            "machine": _this_machine(),
            "command": ["kd", *sys.argv[1:]],
            "screen": screen,
        }
        if url:
            bench, file = work.bench_live(url, plan, **facts)
        else:
            bench, file = work.bench_load(plan, **servers, **facts)
    if as_json:
        click.echo(file.read_text(encoding="utf-8"), nl=False)
    else:
        _print_table(table.COLUMNS, table.rows(bench))
        if plan.soak:
            click.echo()
            _print_table(table.WINDOW_COLUMNS, table.window_rows(bench))
        for line in table.remarks(bench):
            click.echo(line)
        click.echo(file if url else f"{file}; the servers' logs are in {file.with_suffix('')}")
    if bench.interrupted:
        raise KeyboardInterrupt
    return ExitCode.PASSED if bench.right else ExitCode.FAILED


@bench_group.command("frag", epilog=BENCH_FRAG_EPILOG)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME",
    help="stock, need_sort, sort, best_fit or tier0 (default: all). Repeatable.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Of the requests.")
@click.option(
    "--requests",
    type=click.IntRange(2),
    default=400,
    show_default=True,
    help="Requests, of the trace its first.",
)
@click.option(
    "--rate",
    type=_FiniteRange(0, min_open=True),
    default=1.5,
    show_default=True,
    help="Arrivals a second; exponential gaps.",
)
@click.option(
    "--prompt",
    metavar="LENGTHS",
    default="lognormal:12288:0.5",
    show_default=True,
    help="Prompt tokens: fixed:N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA.",
)
@click.option(
    "--output",
    metavar="LENGTHS",
    default="lognormal:512:0.8",
    show_default=True,
    help="Output tokens.",
)
@click.option(
    "--shared",
    type=_FiniteRange(0, 1),
    default=0.5,
    show_default=True,
    help="Share of the prompts with a common beginning.",
)
@click.option(
    "--prefixes",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Common beginnings.",
)
@click.option(
    "--prefix", metavar="LENGTHS", default="fixed:2048", show_default=True, help="Their tokens."
)
@click.option(
    "--aborts",
    type=_FiniteRange(0, 1),
    default=0.1,
    show_default=True,
    help="Share of the requests whose client leaves before the end.",
)
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=pathlib.Path),
    help="Requests from a trace instead: Azure's CSV or Mooncake's JSON lines.",
)
@click.option(
    "--pool",
    type=click.IntRange(1024),
    default=1_000_000,
    show_default=True,
    help="Slots of the KV pool.",
)
@click.option(
    "--running",
    type=click.IntRange(1),
    default=48,
    show_default=True,
    help="Most requests at once.",
)
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=1_000_000,
    show_default=True,
    help="Most prefill and decode steps.",
)
@click.option(
    "--every",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="Steps between two samples.",
)
@_json_option
@click.pass_context
def bench_frag(
    ctx: click.Context,
    policies: tuple[str, ...],
    seed: int,
    requests: int,
    rate: float,
    prompt: str,
    output: str,
    shared: float,
    prefixes: int,
    prefix: str,
    aborts: float,
    trace: pathlib.Path | None,
    pool: int,
    running: int,
    steps: int,
    every: int,
    as_json: bool,
) -> None:
    """Scatter of KV slots under churn, by allocation policy, on SGLang's structures; no GPU."""
    from kdtree_engine.fragmentation.traffic import Lengths, Traffic
    from kdtree_engine.sglang_ext.defrag.churn import Settings
    from phases import bench_frag as work
    from phases.serve import require_sglang
    from phases.service import server_python

    for name in policies:
        if name not in work.POLICIES:
            raise UnknownName("policy", name, work.POLICIES)
    lengths = Lengths.parse(prompt), Lengths.parse(output), Lengths.parse(prefix)
    require_sglang(server_python())
    bench, file = work.bench_frag(
        list(dict.fromkeys(policies)) or list(work.POLICIES),
        Traffic(requests, rate, lengths[0], lengths[1], shared, prefixes, lengths[2], aborts),
        Settings("stock", pool=pool, running=running, steps=steps, every=every),
        seed=seed,
        trace=trace,
        checkout=_checkout(),
        machine=_this_machine(),
        command=["kd", *sys.argv[1:]],
        progress=_say_timed,
    )
    if as_json:
        click.echo(file.read_text(encoding="utf-8"), nl=False)
    else:
        _print_table(work.time_columns(bench), work.over_time(bench))
        click.echo()
        _print_table(work.COLUMNS, work.rows(bench))
        click.echo(f"seed {seed}; {file}")
    ctx.exit(ExitCode.PASSED if bench.right else ExitCode.FAILED)


@bench_group.command("price", epilog=BENCH_PRICE_EPILOG)
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="Of all draws.")
@_json_option
@click.pass_context
def bench_price(ctx: click.Context, seed: int, as_json: bool) -> None:
    """What scattered KV slots cost the kernel, by length of their runs, on this machine's GPU."""
    from kdtree_engine.timing import ImplausibleTiming
    from phases import bench_price as work
    from phases.gate import GateFailure
    from phases.requirement import Requirement

    checkout, machine = _checkout(), _this_machine()
    if (lack := Requirement.GPU.missing(machine)) is not None:
        raise MissingError(lack, remedy=Requirement.GPU.remedy)
    try:
        figures, file = work.bench_price(
            seed=seed,
            checkout=checkout,
            machine=machine,
            command=["kd", *sys.argv[1:]],
            progress=_say_timed,
        )
    except (GateFailure, ImplausibleTiming) as failure:
        click.echo(f"kd: {failure}", err=True)
        ctx.exit(ExitCode.FAILED)
    if as_json:
        click.echo(file.read_text(encoding="utf-8"), nl=False)
    else:
        _print_table(work.COLUMNS, work.rows(figures))
        click.echo(f"seed {seed}; {file}")
    ctx.exit(ExitCode.PASSED)


@cli.command("serve", epilog=SERVE_EPILOG)
@_host_option
@_phase_option("Whose service profile is added.")
@click.option(
    "--release", metavar="ID", help="Of another host: the release (default: its newest good one)."
)
@click.option("--dry-run", is_flag=True, help="Print what would be started, and start nothing.")
@click.option("--end", "job", metavar="JOB", help="Of another host: end a server left running.")
@_json_option
@click.argument("extra", nargs=-1, metavar="[-- SGLANG ARGUMENTS]", type=click.UNPROCESSED)
@click.pass_context
def serve(
    ctx: click.Context,
    host_name: str,
    wanted: str | None,
    release: str | None,
    dry_run: bool,
    job: str | None,
    as_json: bool,
    extra: tuple[str, ...],
) -> None:
    """Start SGLang in the foreground with a phase's profile, to try it.

    A profile names the attention backend and its variables. Speculation, without which there is
    no tree to verify, comes after --, as in --speculative-algorithm NGRAM
    --speculative-num-draft-tokens 9. --json prints with --dry-run. Ctrl-C ends the server.

    On this machine it is this checkout that serves. On another host it is a release that kd deploy
    has placed there, with the inventory's arguments, beside the live service and unknown to it.
    """
    from phases.registry import find_phase

    host = _host(host_name)
    if (job is None) == (wanted is None):
        raise click.UsageError("name a phase with --phase, or with --end what is to end")
    if host.kind == "local" and (release is not None or job is not None):
        raise click.UsageError("--release and --end are of another host than this machine")
    if job is not None:
        with _live_service(host) as live:
            live.end_trial(job, _note)
        return
    assert wanted is not None
    phase = find_phase(_phases(), wanted)
    if host.kind != "local":
        ctx.exit(_serve_there(host, phase, release, extra, dry_run=dry_run, as_json=as_json))
    _serve_here(host, phase, extra, dry_run=dry_run, as_json=as_json)


def _serve_here(
    host: Any, phase: Phase, extra: tuple[str, ...], *, dry_run: bool, as_json: bool
) -> None:
    """Become the server, or say what it would be."""
    from phases.serve import require_sglang, serve_line
    from phases.service import server_python

    service = host.service
    line = serve_line(
        phase,
        python=str(pathlib.Path(host.python or server_python()).expanduser()),
        host_arguments=() if service is None else service.command_line(),
        extra=extra,
    )
    shown = _shown_line(line.command, line.environment)
    if dry_run:
        if as_json:
            _print_json({"command": line.command, "environment": dict(line.environment)})
        else:
            click.echo(shown)
        return
    require_sglang(line.command[0])
    click.echo(f"kd: {shown}", err=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(line.command[0], line.command, os.environ | line.environment)


def _serve_there(
    host: Any,
    phase: Phase,
    release: str | None,
    extra: tuple[str, ...],
    *,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Follow a server of a release on another host; its exit code."""
    from phases.serve import require_profile
    from remote.errors import TransportError
    from remote.promotion import Target

    require_profile(phase)
    with _live_service(host) as live:
        chosen = _release_of(live.releases, release)
        try:
            target = _target_of(live, host, chosen, phase)
        except TransportError as error:  # one that was sent without the tools of gates
            _note(f"kd: as this checkout says, because {error.problem}")
            profile = phase.profile
            target = Target(chosen, phase.number, profile.arguments, profile.environment)
        trial = live.trial(target, extra)
        service = trial["service"]
        shown = _shown_line(service["command"], service["environment"])
        if dry_run:
            if as_json:
                _print_json({**service, "release": chosen, "port": trial["port"]})
            else:
                click.echo(shown)
            return ExitCode.PASSED
        click.echo(f"kd: {host.name}: {shown}", err=True)
        click.echo(f"kd: it will answer at 127.0.0.1:{trial['port']} of {host.name}", err=True)
        code: int = live.serve(trial, said=lambda line: click.echo(_shown(line)), note=_note)
        return code


def _shown_line(command: Sequence[str], environment: Mapping[str, str]) -> str:
    return shlex.join([*(f"{name}={value}" for name, value in environment.items()), *command])


@cli.command("tune", epilog=TUNE_EPILOG)
@click.option(
    "--regime",
    "regimes",
    multiple=True,
    metavar="B,H,T,L",
    help="Batch, heads, tree nodes, prefix (default: the twelve of plan 15, and some more). "
    "Only the entries that these launches go by are changed. Repeatable.",
)
@click.option("--repeats", type=click.IntRange(3), default=20, show_default=True)
@click.option("--dry-run", is_flag=True, help="Print what would be swept, and run nothing.")
@_json_option
@click.pass_context
def tune(
    ctx: click.Context, regimes: tuple[str, ...], repeats: int, dry_run: bool, as_json: bool
) -> None:
    """Sweep the compiled tiles on this machine's GPU and write its architecture's tuning table."""
    from phases import tune as work
    from phases.bench import parse_regime
    from phases.requirement import Requirement
    from phases.tune_table import ENTRY_COLUMNS, TRIAL_COLUMNS, entry_rows, trial_rows

    chosen = [parse_regime(text) for text in regimes]
    checkout, machine = _checkout(), _this_machine()
    if (lack := Requirement.GPU.missing(machine)) is not None:
        raise MissingError(lack, remedy=Requirement.GPU.remedy)
    if dry_run:
        from kdtree_engine.library import kernels

        part = work.this_part(kernels())
        tried = work.candidates(part.tiles, deterministic=not chosen)
        swept = chosen or list(work.REGIMES)
        if as_json:
            _print_json(
                {
                    "architecture": part.architecture,
                    "regimes": [str(regime) for regime in swept],
                    "configurations": [str(candidate) for candidate in tried],
                }
            )
            return
        _print_table(("configuration",), [(str(candidate),) for candidate in tried])
        _print_table(("regime",), [(str(regime),) for regime in swept])
        click.echo(f"{len(tried) * len(swept)} trials for the table of {part.architecture}")
        return
    outcome = work.tune(
        chosen,
        repeats=repeats,
        checkout=checkout,
        machine=machine,
        command=["kd", *sys.argv[1:]],
        progress=_say_timed,
    )
    if as_json:
        click.echo(outcome.record.read_text(encoding="utf-8"), nl=False)
    elif outcome.table is not None:
        _print_table(ENTRY_COLUMNS, entry_rows(outcome.table))
    else:
        _print_table(TRIAL_COLUMNS, trial_rows(outcome.sweep.trials))
    written = f"{outcome.file}" if outcome.file else "no table was written, as not all were right"
    click.echo(f"{written}; {outcome.record}", err=as_json)
    ctx.exit(ExitCode.PASSED if outcome.sweep.right else ExitCode.FAILED)


def _say_timed(done: int, total: int, what: str) -> None:
    click.echo(f"[{done + 1}/{total}] {what}", err=True)


@bench_group.command("keep")
@click.argument("run")
@click.option("--name", metavar="NAME", help="Name there (default: the run's id).")
def bench_keep(run: str, name: str | None) -> None:
    """Copy what kd bench serve measured to plans/evidence/serve/, to be committed.

    RUN is its id, what it begins with, or `latest`. What failed or was interrupted is not kept.
    """
    from phases.bench_kept import keep_bench

    click.echo(keep_bench(_checkout(), run, name))


# ---------------------------------------------------------------------------------------------
# Where the time of a step goes.


@cli.command("profile", epilog=PROFILE_EPILOG)
@click.option(
    "--trace",
    "traces",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=pathlib.Path),
    metavar="FILE",
    help="A saved torch-profiler trace, .json or .json.gz; once for each rank. Repeatable.",
)
@click.option("--host", "host_name", metavar="NAME", help="Profile the live service of a host.")
@click.option(
    "--port", type=click.IntRange(1, 65_535), help="Profile the SGLang at a port of this machine."
)
@click.option(
    "--serve",
    "fresh",
    type=click.Choice(["kernel", "triton", "plain", "decode"]),
    help="Serve a small model here and profile it: with trees on the kernel or on Triton, or "
    "without, decoded on Triton (plain) or on the kernel (decode).",
)
@click.option(
    "--context",
    "contexts",
    default="4k,16k,65k",
    show_default=True,
    metavar="TOKENS,...",
    help="Tokens of a prompt; 4k is 4,096.",
)
@click.option(
    "--batch",
    "batches",
    default="1",
    show_default=True,
    metavar="REQUESTS,...",
    help="Requests that decode at the same time.",
)
@click.option(
    "--steps",
    type=click.IntRange(2, 1000),
    default=20,
    show_default=True,
    help="Passes to record, a drafter's among them.",
)
@click.option(
    "--nodes",
    type=click.IntRange(2, 128),
    default=9,
    show_default=True,
    help="Nodes of a tree, with --serve.",
)
@click.option("--eager", is_flag=True, help="Without CUDA graphs, with --serve.")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**31 - 1),
    default=1,
    show_default=True,
    help="Of the prompts.",
)
@click.option(
    "--before",
    "earlier",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=pathlib.Path),
    metavar="FILE",
    help="A saved trace to compare with. Repeatable.",
)
@click.option(
    "--link",
    metavar="NAME",
    help="nvlink or pcie: what all-reduces are held against (default: their ceiling is not told).",
)
@click.option(
    "--link-bandwidth",
    type=_FiniteRange(1e-3, 1e6),
    help="GB/s that a rank's link gives in one direction, for a link of yours.",
)
@click.option(
    "--routing",
    type=click.Path(exists=True, dir_okay=False, path_type=pathlib.Path),
    metavar="FILE",
    help="Recorded routing of the model, as kd moe --trace takes it (default: every expert is as "
    "likely as another).",
)
@click.option(
    "--top",
    type=click.IntRange(0),
    default=10,
    show_default=True,
    help="Kernels to list, the largest first; those that no rule knows are all listed.",
)
@_json_option
@click.pass_context
def profile_command(
    ctx: click.Context,
    traces: tuple[pathlib.Path, ...],
    host_name: str | None,
    port: int | None,
    fresh: str | None,
    contexts: str,
    batches: str,
    steps: int,
    nodes: int,
    eager: bool,
    seed: int,
    earlier: tuple[pathlib.Path, ...],
    link: str | None,
    link_bandwidth: float | None,
    routing: pathlib.Path | None,
    top: int,
    as_json: bool,
) -> None:
    """Where the time of a decode step goes on the GPU, by class of work.

    Of saved traces, of a host's live service, of a server on this machine, or of one that is
    started for it. A service's traces are kept, so that they can be looked at again.
    """
    from kdtree_engine.profiling.summary import profile
    from phases import profile_table as work
    from phases.profile_ceiling import ceilings
    from phases.profile_note import read_note

    sources = [traces or None, host_name, port, fresh]
    named = sum(source is not None for source in sources)
    if named != 1:
        only = "only " if named else ""
        raise click.UsageError(f"name {only}one of --trace, --host, --port and --serve")
    if traces:
        _no_use_of(ctx, "--trace", "contexts", "batches", "steps", "nodes", "eager", "seed")
    before = profile(earlier, progress=_Reading()) if earlier else None
    rate, chosen = _link_rate(link, link_bandwidth), _recorded_routing(routing)
    found: list[tuple[Any, Any, Any]] = []
    remarks: list[str] = []

    def add(some: Sequence[pathlib.Path]) -> None:
        one, note = profile(some, progress=_Reading()), read_note(some[0])
        found.append((note, one, ceilings(one, note, rate, chosen)))

    if traces:
        add(traces)
    else:
        points = _profile_points(contexts, batches)
        for one in _profiled(points, host_name, port, fresh, steps, nodes, not eager, seed):
            add(one.traces)
            remarks.append(f"{one.point}: its traces lie beside {one.note}")
            if not as_json:
                click.echo(f"{one.point}\n")
                _print_profile(found[-1][1], before, top, found[-1][2])
                click.echo()
    documents = [work.as_json(one, before, note, reached) for note, one, reached in found]
    if as_json:
        _print_json(documents[0] if traces else documents)
    elif traces:
        _print_profile(found[0][1], before, top, found[0][2])
    remarks += [line for document in documents for line in document["remarks"]]
    for line in dict.fromkeys(remarks):
        click.echo(f"kd: {line}", err=True)
    profiles = [one for _, one, _ in found] + ([before] if before is not None else [])
    told = all(rank.told_by != "whole" for one in profiles for rank in one.ranks)
    ctx.exit(ExitCode.PASSED if told else ExitCode.BLOCKED)


def _link_rate(name: str | None, gb_s: float | None) -> Any:
    """The link that collectives are held against; None where none is named."""
    from kdtree_engine.gpus import LINKS
    from phases.profile_ceiling import LinkRate

    if name is not None and gb_s is not None:
        raise click.UsageError("name only one of --link and --link-bandwidth")
    if gb_s is not None:
        return LinkRate("the link", gb_s * 1e9, "as given")
    if name is None:
        return None
    if name not in LINKS:
        raise UnknownName("link", name, LINKS)
    return LinkRate(name, LINKS[name].sent, LINKS[name].source)


def _recorded_routing(path: pathlib.Path | None) -> Any:
    if path is None:
        return None
    from kdtree_engine.moe.trace import read_routing

    return read_routing(path, top_k=8)


def _no_use_of(ctx: click.Context, beside: str, *parameters: str) -> None:
    """Raises UsageError where one of these options was given beside one that has no use of it."""
    for option in ctx.command.params:
        given = ctx.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
        if option.name in parameters and given:
            raise click.UsageError(f"{option.opts[0]} says nothing beside {beside}")


def _profile_points(contexts: str, batches: str) -> list[Any]:
    from phases.numbers import counts, lengths
    from phases.profile_run import Point

    return [
        Point(context, batch)
        for context in lengths(contexts, "--context", 1 << 20)
        for batch in counts(batches, "--batch", 1024)
    ]


def _profiled(
    points: Sequence[Any],
    host_name: str | None,
    port: int | None,
    fresh: str | None,
    steps: int,
    nodes: int,
    graphs: bool,
    seed: int,
) -> Iterator[Any]:
    """What is recorded at each point, of the service that was named; one after the other."""
    from phases import profile_run as work
    from phases.runner import signals_interrupt
    from phases.serve import require_sglang
    from phases.service import server_python
    from phases.service_scale import CPU, GPU
    from remote.profiler import asked_here

    checkout, machine = _checkout(), _this_machine()
    folder = checkout.state / "profile"
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        here: Machine | None = machine
        if host_name is not None:
            live = stack.enter_context(_live_service(_host(host_name)))
            here = machine if host_name == "local" else None

            def drive(request: Mapping[str, Any]) -> Mapping[str, Any]:
                found: Mapping[str, Any] = live.profile(request, folder)
                return found

        else:
            stack.enter_context(signals_interrupt())
            if fresh is not None:
                require_sglang(server_python())
                scale = GPU if machine.gpus else CPU
                variant = work.VARIANTS[fresh](nodes)
                most = max(point.batch for point in points)
                click.echo(f"{variant.name}: starts; its log is in {folder}", err=True)
                port = stack.enter_context(
                    work.served(
                        variant, scale=scale, logs=folder, batch=most, seed=seed, graphs=graphs
                    )
                )

            def drive(request: Mapping[str, Any]) -> Mapping[str, Any]:
                return asked_here({**request, "port": port, "folder": str(folder)})

        yield from work.profile_points(
            drive,
            points,
            folder=folder,
            steps=steps,
            seed=seed,
            machine=here,
            command=["kd", *sys.argv[1:]],
            revision=checkout.revision(),
            what=fresh or host_name or f"port-{port}",
            note=_say_timed,
        )


def _print_profile(found: Any, before: Any, top: int, reached: Any) -> None:
    from kdtree_engine.profiling.host import ELSEWHERE
    from phases import profile_table as work

    _print_table(work.RANK_COLUMNS, work.rank_rows(found))
    click.echo()
    _print_table(work.CLASS_COLUMNS, work.class_rows(found, reached))
    if any(one.name != ELSEWHERE for one in found.host):
        click.echo()
        _print_table(work.HOST_COLUMNS, work.host_rows(found))
    if top:
        click.echo()
        _print_table(work.KERNEL_COLUMNS, work.kernel_rows(found.kernels[:top]))
    if found.unknown:
        click.echo("\nkernels that no rule knows:")
        _print_table(work.KERNEL_COLUMNS, work.kernel_rows(found.unknown))
    if before is not None:
        click.echo()
        _print_table(work.CHANGE_COLUMNS, work.change_rows(before, found))


class _Reading:
    """Progress through long files on stderr: a line for each tenth."""

    _LONG = 64 << 20

    def __init__(self) -> None:
        self._told: tuple[pathlib.Path, int] | None = None

    def __call__(self, path: pathlib.Path, done: int, size: int) -> None:
        tenths = 10 * done // size if size else 10
        if size >= self._LONG and self._told != (path, tenths):
            self._told = path, tenths
            click.echo(f"[{tenths}/10] {path.name}: {done >> 20} of {size >> 20} MiB", err=True)


# ---------------------------------------------------------------------------------------------
# A draft tree to look at.


@cli.group("tree")
def tree_group() -> None:
    """Look at draft trees."""


@tree_group.command("show")
@click.option("--budget", type=click.IntRange(1, 128), default=16, show_default=True)
@click.option("--top-k", type=click.IntRange(1, 64), default=4, show_default=True)
@click.option("--depth", type=click.IntRange(1, 16), default=5, show_default=True)
@click.option(
    "--noise",
    type=_FiniteRange(0),
    default=0.7,
    show_default=True,
    help="How far the drafter is off the target's logits.",
)
@click.option(
    "--seed", type=click.IntRange(0, 2**31 - 1), default=1, show_default=True, help="Of it all."
)
@_json_option
def tree_show(budget: int, top_k: int, depth: int, noise: float, seed: int, as_json: bool) -> None:
    """Draft, verify and accept once on the oracle's tiny model, and print the tree.

    A line is a node: its token, the drafter's probability of it, and of the whole path. The
    accepted path is marked.
    """
    from phases.tree_round import one_round

    shown = one_round(budget=budget, top_k=top_k, depth=depth, noise=noise, seed=seed)
    if as_json:
        _print_json(shown.as_json())
        return
    _print_tree(shown)


def _print_tree(shown: Any) -> None:
    """A rich tree, in colours on a terminal; the accepted path is also marked by words."""
    from rich.text import Text
    from rich.tree import Tree

    def line(node: Any) -> Text:
        words = f"{node.token}"
        if node.number:
            words += f"  {node.draft:.3f}  path {node.path:.4f}"
        if node.accepted:
            words += "  accepted" if node.number else "  root"
        return Text(words, style="bold green" if node.accepted else "")

    branches: dict[int, Tree] = {}
    for node in shown.nodes:
        above = branches.get(node.parent)
        branches[node.number] = Tree(line(node)) if above is None else above.add(line(node))
    _console().print(branches[0])
    *drafted, bonus = shown.gained
    click.echo(
        f"{len(shown.nodes) - 1} nodes behind {' '.join(map(str, shown.prompt))}; accepted: "
        f"{' '.join(map(str, drafted)) or 'none'}; the target's own next token: {bonus}"
    )


# ---------------------------------------------------------------------------------------------
# Experts on ranks.


@cli.command("moe", epilog=MOE_EPILOG)
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=pathlib.Path),
    help="Recorded routing instead: a dump of SGLang's recorder (.pt), or a router trace.",
)
@click.option(
    "--batch",
    "batches",
    default="1,4,16,64,256",
    show_default=True,
    metavar="B[,B...]",
    help="Requests a step; of a trace, recorded steps taken together.",
)
@click.option(
    "--nodes",
    type=click.IntRange(1, 128),
    default=9,
    show_default=True,
    help="Tokens of a request in a step: the draft tree, or 1.",
)
@click.option(
    "--gpu",
    default="rtx-pro-6000",
    show_default=True,
    metavar="NAME",
    shell_complete=_completing(_gpu_names),
    help="Its rates: h200, rtx-pro-6000 or rtx-5090.",
)
@click.option(
    "--link", metavar="NAME", help="nvlink or pcie: its all-reduce (default: that of the GPU)."
)
@click.option("--bandwidth", type=_FiniteRange(1e-3, 1e6), help="TB/s of memory, for the GPU's.")
@click.option("--flops", type=_FiniteRange(1e-3, 1e9), help="Tflop/s, for the GPU's.")
@click.option(
    "--alpha",
    type=_FiniteRange(0, 1e9),
    help="Latency of an all-reduce in microseconds, for the link's.",
)
@click.option("--beta", type=_FiniteRange(1e-3, 1e9), help="GB/s of its message, for the link's.")
@click.option("--ranks", type=click.IntRange(1, 64), default=8, show_default=True)
@click.option(
    "--redundant", type=click.IntRange(0), default=32, show_default=True, help="Copies beyond one."
)
@click.option(
    "--weights",
    default="int4",
    show_default=True,
    metavar="TYPE",
    help="int4, fp8 or bf16: of the routed experts.",
)
@click.option(
    "--skew",
    type=_FiniteRange(0, 4),
    default=0.4,
    show_default=True,
    help="Of the drawn router: the i-th expert's popularity is i^-SKEW.",
)
@click.option(
    "--reuse",
    type=_FiniteRange(0, 1),
    default=0.35,
    show_default=True,
    help="Of the drawn router: how likely an expert is the next token's too.",
)
@click.option(
    "--top-k",
    type=click.IntRange(1, 64),
    default=8,
    show_default=True,
    help="Experts of a token: of the drawn router, and of dumps that do not say.",
)
@click.option(
    "--most-tokens",
    type=click.IntRange(1),
    help="Leave recorded steps of more tokens out, as prefills are.",
)
@click.option(
    "--samples", type=click.IntRange(1, 256), default=16, show_default=True, help="Of each batch."
)
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=1, show_default=True)
@_json_option
@click.pass_context
def moe(
    ctx: click.Context,
    trace: pathlib.Path | None,
    batches: str,
    nodes: int,
    gpu: str,
    link: str | None,
    bandwidth: float | None,
    flops: float | None,
    alpha: float | None,
    beta: float | None,
    ranks: int,
    redundant: int,
    weights: str,
    skew: float,
    reuse: float,
    top_k: int,
    most_tokens: int | None,
    samples: int,
    seed: int,
    as_json: bool,
) -> None:
    """Predict what imbalance of experts costs a step, by batch and placement; no GPU needed."""
    from kdtree_engine.gpus import LINKS, find_gpu
    from kdtree_engine.moe.costs import BYTES_PER_WEIGHT, ExpertShape
    from kdtree_engine.moe.synthetic import SyntheticRouter
    from kdtree_engine.moe.trace import read_routing
    from phases import moe_imbalance as work
    from phases.moe_imbalance import require_divided
    from phases.numbers import counts

    if trace is not None:
        _no_use_of(ctx, "--trace", "nodes", "skew", "reuse")
    part = find_gpu(gpu)
    for kind, name, known in (
        ("link", link or part.link, LINKS),
        ("weights", weights, BYTES_PER_WEIGHT),
    ):
        if name not in known:
            raise UnknownName(kind, name, known)
    wanted = counts(batches, "--batch", 1024)
    part = _replaced(part, "the GPU's rates", bandwidth=(bandwidth, 1e12), flops=(flops, 1e12))
    between = _replaced(
        LINKS[link or part.link], "all-reduce", latency=(alpha, 1e-6), bandwidth=(beta, 1e9)
    )
    if trace is None:
        # Half of the steps are for the placement, and a batch is drawn from the other half.
        steps = 2 * max(256, 2 * max(wanted))
        router = SyntheticRouter(top_k=top_k, skew=skew, reuse=reuse)
        require_divided(router.experts, ranks)
        _note(f"drawing {steps} steps of {nodes} tokens")
        routing = router.draw(steps, nodes, seed, _Drawing())
    else:
        routing = read_routing(trace, top_k=top_k)
    if most_tokens is not None:
        routing = routing.at_most(most_tokens)
    found = work.study(
        routing,
        wanted,
        ranks=ranks,
        redundant=redundant,
        shape=ExpertShape(bytes_per_weight=BYTES_PER_WEIGHT[weights]),
        gpu=part,
        link=between,
        samples=samples,
        seed=seed,
    )
    if as_json:
        _print_json(found.as_json())
        return
    _print_table(work.COLUMNS, work.rows(found))
    for line in ("", *work.findings(found), ""):
        click.echo(line)
    click.echo(f"{found.source}; {found.steps} steps, {found.ranks} ranks, {weights} weights")
    click.echo("every time is a prediction: no MoE layer was timed on any GPU")
    click.echo(f"rates of {part.name}: {part.source}")
    click.echo(f"all-reduce over {between.name}: {between.source}")
    if ranks not in (1, 8) and alpha is None:
        click.echo(f"the latency of an all-reduce is that of 8 ranks, not of {ranks}: --alpha")


class _Drawing:
    """Progress of a long draw on stderr: a line every ten seconds."""

    _EVERY_S = 10.0

    def __init__(self) -> None:
        self._told = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._told >= self._EVERY_S:
            self._told = time.monotonic()
            _note(f"{done} of {total} steps drawn")


def _replaced(preset: Any, what: str, **given: tuple[float | None, float]) -> Any:
    """A preset of `kdtree_engine.gpus` with what the caller gave, times a unit."""
    own = {name: value * unit for name, (value, unit) in given.items() if value is not None}
    if not own:
        return preset
    source = f"{what}: {' and '.join(own)} given on the command line; else {preset.source}"
    return dataclasses.replace(preset, **own, source=source)


# ---------------------------------------------------------------------------------------------
# Capacity.


@cli.command("plan-capacity", epilog=CAPACITY_EPILOG)
@click.option(
    "--gpu",
    default="rtx-pro-6000",
    show_default=True,
    metavar="NAME",
    shell_complete=_completing(_gpu_names),
    help="Its rates: h200, rtx-pro-6000 or rtx-5090.",
)
@click.option("--gpus", type=click.IntRange(1, 1024), default=8, show_default=True)
@click.option(
    "--tp",
    type=click.IntRange(1, 64),
    help="Ranks of tensor parallelism; more GPUs are replicas (default: all, up to 64).",
)
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=pathlib.Path),
    help="A folder with a config.json of DeepSeek V2's or V3's kind (default: Kimi K2).",
)
@click.option(
    "--context",
    "contexts",
    default="4k,16k,65k",
    show_default=True,
    metavar="L[,L...]",
    help="Tokens of each request before the step; 65k is 65,536.",
)
@click.option(
    "--batch",
    "batches",
    default="1,4,16",
    show_default=True,
    metavar="B[,B...]",
    help="Requests at once, on all replicas.",
)
@click.option(
    "--nodes",
    type=click.IntRange(1, 128),
    default=9,
    show_default=True,
    help="Of a request's draft tree, its root included; 1: no speculation.",
)
@click.option(
    "--accepted",
    type=_FiniteRange(1, 128),
    help="Tokens that a verification gives (default: an assumed law, which stderr names).",
)
@click.option(
    "--drafter",
    type=click.Choice(["dflash", "ngram"]),
    default="dflash",
    show_default=True,
    help="ngram works on the host, and its time is the host's.",
)
@click.option(
    "--draft-ms", type=_FiniteRange(0, 1e6), help="Of drafting and building the tree, a step."
)
@click.option(
    "--placement",
    type=click.Choice(["tp", "ep"]),
    default="tp",
    show_default=True,
    help="Of routed experts: each sliced over all ranks, or divided among them.",
)
@click.option(
    "--weights",
    default="int4",
    show_default=True,
    metavar="TYPE",
    help="int4, fp8 or bf16: of the routed experts.",
)
@click.option(
    "--dense-weights",
    default="bf16",
    show_default=True,
    metavar="TYPE",
    help="int4, fp8 or bf16: of everything else.",
)
@click.option(
    "--reach",
    type=_FiniteRange(0.01, 1),
    help="Share of bandwidth and of flops that products of weights reach (default: 0.8, assumed).",
)
@_json_option
@click.pass_context
def plan_capacity(
    ctx: click.Context,
    gpu: str,
    gpus: int,
    tp: int | None,
    model: pathlib.Path | None,
    contexts: str,
    batches: str,
    nodes: int,
    accepted: float | None,
    drafter: str,
    draft_ms: float | None,
    placement: str,
    weights: str,
    dense_weights: str,
    reach: float | None,
    as_json: bool,
) -> None:
    """Predict tokens a second of a model on GPUs, what bounds them, and whether it fits."""
    from kdtree_engine.capacity.dense import REACH
    from kdtree_engine.capacity.drafting import DFLASH
    from kdtree_engine.capacity.shapes import KIMI_K2, read_shape
    from kdtree_engine.capacity.step import Service
    from kdtree_engine.gpus import LINKS, find_gpu
    from kdtree_engine.moe.costs import BYTES_PER_WEIGHT
    from phases import capacity_table as work
    from phases.capacity_evidence import calibrate
    from phases.checkout import find_checkout
    from phases.numbers import counts, lengths

    part = find_gpu(gpu)
    for kind in (weights, dense_weights):
        if kind not in BYTES_PER_WEIGHT:
            raise UnknownName("weights", kind, BYTES_PER_WEIGHT)
    service = Service(
        shape=read_shape(model) if model else KIMI_K2,
        gpu=part,
        link=LINKS[part.link],
        gpus=gpus,
        ranks=tp or min(gpus, 64),
        expert_bytes=BYTES_PER_WEIGHT[weights],
        dense_bytes=BYTES_PER_WEIGHT[dense_weights],
        placement=placement,
        drafter=DFLASH if drafter == "dflash" else None,
        draft_seconds=None if draft_ms is None else draft_ms * 1e-3,
        reach=reach or REACH,
    )
    found = work.plan_capacity(
        service,
        calibrate(find_checkout().kept_evidence, part),
        lengths(contexts, "--context", 1 << 22),
        counts(batches, "--batch", 1024),
        nodes=nodes,
        accepted=accepted,
    )
    if as_json:
        _print_json(found.as_json())
    else:
        _print_table(work.COLUMNS, work.rows(found))
        click.echo()
        _print_table(work.ERROR_COLUMNS, work.error_rows(found))
    for line in work.remarks(found):
        _note(line)
    ctx.exit(ExitCode.PASSED if found.fits else ExitCode.FAILED)


# ---------------------------------------------------------------------------------------------
# Plans.


@cli.group("plan")
def plan_group() -> None:
    """Read the design documents that the phases follow."""


@plan_group.command("list")
@_json_option
def plan_list(as_json: bool) -> None:
    """Every plan: number, phase, status, title."""
    from phases.plan import load_plans

    plans = load_plans(_checkout().plans)
    if as_json:
        _print_json(
            [
                {
                    "id": plan.id,
                    "file": plan.path.name,
                    "title": plan.title,
                    "phase": plan.phase,
                    "status": plan.status,
                    "depends_on": plan.depends_on,
                    "date": plan.date.isoformat(),
                    "decision": plan.decision,
                    "reopen_when": plan.reopen_when,
                    "gates": plan.gates,
                }
                for plan in plans
            ]
        )
        return
    _print_table(
        ("plan", "phase", "status", "title"),
        [
            (
                f"{plan.id:04d}",
                "" if plan.phase is None else str(plan.phase),
                plan.status,
                plan.title,
            )
            for plan in plans
        ],
    )


@plan_group.command("show")
@click.argument("wanted", metavar="N", shell_complete=_completing(_plan_names))
def plan_show(wanted: str) -> None:
    """One plan, rendered on a terminal and as it is elsewhere. N is its number, file or slug."""
    from phases.plan import find_plan, load_plans

    plan = find_plan(load_plans(_checkout().plans), wanted)
    console = _console()
    if not console.is_terminal:
        click.echo(plan.path.read_text(encoding="utf-8"), nl=False)
        return
    from rich.markdown import Markdown
    from rich.panel import Panel

    facts = [f"plan {plan.id:04d}", f"status {plan.status}", f"{plan.date}"]
    facts += [f"phase {plan.phase}"] if plan.phase is not None else []
    facts += (
        [f"builds on {', '.join(f'{n:04d}' for n in plan.depends_on)}"] if plan.depends_on else []
    )
    lines = [" · ".join(facts)]
    lines += [f"decision: {plan.decision}"] if plan.decision else []
    lines += [f"reopen when: {plan.reopen_when}"] if plan.reopen_when else []
    console.print(Panel("\n".join(lines), title=plan.title, highlight=False), markup=False)
    console.print(Markdown(plan.text))


# ---------------------------------------------------------------------------------------------
# Evidence.


@cli.group("evidence")
def evidence_group() -> None:
    """List, show and keep records of runs."""


@evidence_group.command("list")
@_json_option
def evidence_list(as_json: bool) -> None:
    """Every record: this checkout's runs, newest first, then those kept in the repository."""
    from phases.report import counts

    store = _store(_checkout())
    named = [(record.run, record) for record in reversed(store.own_records())]
    named += list(store.kept_records().items())
    if as_json:
        _print_json([{"name": name} | record.model_dump(mode="json") for name, record in named])
        return
    _print_table(
        ("record", "day", "host", "gpu", "revision", "gates"),
        [
            (
                name,
                f"{record.started:%Y-%m-%d}",
                record.host,
                record.machine.gpus[0].name if record.machine.gpus else "none",
                (record.revision or "unknown")[:12],
                counts(record.gates),
            )
            for name, record in named
        ],
    )


@evidence_group.command("show")
@click.argument("run", shell_complete=_completing(_run_names))
@_json_option
def evidence_show(run: str, as_json: bool) -> None:
    """One run's record. RUN is an id, its beginning, or `latest`."""
    from phases.tables import source

    record = _store(_checkout()).find(run)
    if as_json:
        click.echo(record.as_text(), nl=False)
        return
    _print_record(record)
    click.echo(source(record))


@evidence_group.command("keep")
@click.argument("run", shell_complete=_completing(_run_names))
@click.option("--name", metavar="NAME", help="Name in plans/evidence/ (default: the run's id).")
def evidence_keep(run: str, name: str | None) -> None:
    """Copy one run's record to plans/evidence/, to be committed."""
    store = _store(_checkout())
    record = store.find(run)
    click.echo(store.keep(record, record.run if name is None else name, _phases()))


@evidence_group.command("tables")
@click.option("--check", is_flag=True, help="Write nothing; exit 1 where a table differs.")
@click.pass_context
def evidence_tables(ctx: click.Context, check: bool) -> None:
    """Write the tables of figures in README and plans anew from kept evidence.

    A document marks the place by a line '<!-- figures: NAME -->' (a row for each gate of the kept
    record NAME), '<!-- figures: NAME GATE -->' (a row for each figure of one gate) or
    '<!-- output: NAME -->' (what kd printed), and its end by '<!-- /figures -->' or
    '<!-- /output -->'.
    """
    from kdtree_engine.atomic import write_atomically
    from phases.tables import documents, filled

    checkout = _checkout()
    kept = _store(checkout).kept_records()
    changed = [
        (path, text)
        for path in documents(checkout.root)
        if path.exists() and (text := filled(path, kept)) != path.read_text(encoding="utf-8")
    ]
    for path, text in changed:
        if not check:
            write_atomically(path, text)
        click.echo(f"{'differs' if check else 'wrote'} {path.relative_to(checkout.root)}")
    ctx.exit(1 if check and changed else 0)


# ---------------------------------------------------------------------------------------------
# The report.


@cli.command("report")
@click.option(
    "--html",
    "page",
    type=click.Path(dir_okay=False, path_type=pathlib.Path),
    metavar="FILE",
    help="Write it as one HTML page that needs nothing else, and print where.",
)
@_json_option
def report_command(page: pathlib.Path | None, as_json: bool) -> None:
    """All that kept evidence shows: gates, speed, roofline, bottleneck, slots, decisions, gaps."""
    from kdtree_engine.atomic import write_atomically
    from phases.reporting import model, terminal
    from phases.reporting.gather import gather
    from phases.reporting.kept import read_kept
    from phases.reporting.page import as_html

    if page is not None and not page.absolute().parent.is_dir():
        raise ConfigError(f"--html {page}: there is no folder {page.absolute().parent}")
    checkout = _checkout()
    _note("reading kept evidence, and drawing a router for the MoE prediction")
    report = gather(read_kept(checkout, _phases()), checkout)
    if page is not None:
        write_atomically(page, as_html(report))
    if as_json:
        _print_json(model.as_json(report))
    elif page is not None:
        click.echo(page)
    else:
        terminal.show(report, _console())


# ---------------------------------------------------------------------------------------------
# Machines and hosts.


@cli.command("doctor")
@_host_option
@_json_option
def doctor(host_name: str, as_json: bool) -> None:
    """What a machine can run, and the command that would add what is missing."""
    from kdtree_engine.tuning import architecture_of, table_of
    from phases.requirement import Requirement
    from phases.tune_table import ENTRY_COLUMNS, entry_rows

    machine = _machine_of(host_name)
    architectures = dict.fromkeys(architecture_of(gpu.capability) for gpu in machine.usable_gpus)
    tables = {name: table_of(name) for name in architectures}
    missing = {need: need.missing(machine) for need in Requirement}
    if as_json:
        needs = {
            need: {"missing": lack, "remedy": need.remedy if lack else None}
            for need, lack in missing.items()
        }
        tuning = {
            name: [dict(zip(ENTRY_COLUMNS, row, strict=True)) for row in entry_rows(table)]
            if table
            else None
            for name, table in tables.items()
        }
        _print_json(
            {"host": host_name, "machine": machine.as_json(), "needs": needs, "tuning": tuning}
        )
        return
    gpus = ", ".join(
        f"{gpu.name} (sm_{gpu.capability[0]}{gpu.capability[1]}{'' if gpu.usable else ', no use'})"
        for gpu in machine.gpus
    )
    tools = {
        "system": machine.system,
        "Python": machine.python,
        "torch": machine.torch,
        "torch's CUDA": machine.cuda,
        "NVIDIA driver": machine.driver,
        "GPUs": gpus or None,
        "nvcc": machine.nvcc,
        "compute-sanitizer": machine.compute_sanitizer,
        "SGLang": machine.sglang,
        "ssh": machine.ssh,
        "rsync": machine.rsync,
    }
    hints = {"ssh": "apt-get install openssh-client", "rsync": "apt-get install rsync"}
    _print_table(("on this host", "found"), [(k, v or "-") for k, v in tools.items()])
    click.echo()
    rows = [
        (str(need), lack or "yes", need.remedy if lack else "") for need, lack in missing.items()
    ]
    rows += [
        (tool, "not on PATH", hint)
        for tool, hint in hints.items()
        if getattr(machine, tool) is None
    ]
    _print_table(("gates that need", "can run", "to add it"), rows)
    for name, table in tables.items():
        click.echo()
        if table is None:
            click.echo(f"{name} has no tuning table: the library chooses (kd tune makes one)")
        else:
            _print_table(ENTRY_COLUMNS, entry_rows(table))


@cli.group("hosts")
def hosts_group() -> None:
    """The hosts that kd knows."""


@hosts_group.command("list")
@_json_option
def hosts_list(as_json: bool) -> None:
    """Every host of remote/hosts.yaml, with the groups that it is in."""
    from remote.inventory import load_inventory

    inventory = load_inventory(_checkout().hosts_file)
    hosts = inventory.hosts
    groups = {
        name: [group for group, members in inventory.groups.items() if name in members]
        for name in hosts
    }
    if as_json:
        _print_json(
            {
                name: host.model_dump(mode="json") | {"groups": groups[name]}
                for name, host in hosts.items()
            }
        )
        return
    _print_table(
        ("host", "kind", "address", "groups"),
        [
            (name, str(host.kind), str(getattr(host, "address", "")), ", ".join(groups[name]))
            for name, host in hosts.items()
        ],
    )


@cli.command("deploy", epilog=DEPLOY_EPILOG)
@_hosts_option
@click.option("--dry-run", is_flag=True, help="Say what would change there, and write nothing.")
@_phase_option("Run the gates of phases 0..N there (default: the highest with a service profile).")
@click.option("--no-validate", is_flag=True, help="Run no gate there.")
@_jobs_option
@click.option(
    "--bundle",
    type=click.Path(dir_okay=False, path_type=pathlib.Path),
    help="Send what `kd bundle` wrote to this file, and nothing of this checkout.",
)
@click.option("--build-on-host", is_flag=True, help="Compile the kernels there, by its nvcc.")
@_json_option
@click.pass_context
def deploy(
    ctx: click.Context,
    host_names: str,
    dry_run: bool,
    wanted: str | None,
    no_validate: bool,
    jobs: int,
    bundle: pathlib.Path | None,
    build_on_host: bool,
    as_json: bool,
) -> None:
    """Send this checkout and its kernels to hosts, as a release there, and run the gates on it.

    One host after the other; where one fails, those after it are left alone.

    What git knows is sent, as it is in the working tree, and the engine's wheel with the library
    that `kd build` made. What arrived is held against hashes, and imported by the host's Python,
    before it is a release. Gates that passed there with the same code are not run again. The live
    service is not touched.
    """
    from phases.promotable import lacking
    from phases.runner import signals_interrupt
    from remote.connection import connect
    from remote.deploy import Deployment, deploy_bundle, preview_bundle

    checkout = _checkout()
    deployment = Deployment(checkout.root, checkout.revision(), checkout.state / "tools")
    phase = _phase_to_validate(wanted)
    send = deployment.run if bundle is None else functools.partial(deploy_bundle, bundle)

    def one(host: Any) -> tuple[dict[str, Any], int]:
        with contextlib.closing(connect(host)) as transport:
            if dry_run:
                found = (
                    deployment.preview(transport, host)
                    if bundle is None
                    else preview_bundle(bundle, transport, host)
                )
                if build_on_host:
                    found["kernels"] = "compiled there"
                if not as_json:
                    _print_preview(found)
                return found, ExitCode.PASSED
            with signals_interrupt():
                placed = send(
                    transport,
                    host,
                    with_tools=not no_validate,
                    build_there=build_on_host,
                    note=_note,
                )
                click.echo(f"placed below {host.root}, and not promoted", err=True)
                if not as_json:
                    click.echo(placed["release"])
                release = placed["release"]
                states = [] if no_validate else _validate(transport, host, release, phase, jobs)
        for line in lacking(states):
            _note(line)
        validated = {"phase": None if no_validate else phase.package, "gates": states}
        return placed | validated, _judge(states)

    ctx.exit(_on_each(_hosts(host_names), one, as_json))


def _print_preview(found: dict[str, Any]) -> None:
    """Each file that changes; where there is nothing yet, how much comes in each folder."""
    if found["base"] is None:
        _print_table(
            ("new", "files", "KiB"),
            [
                (one["folder"], str(one["files"]), f"{one['bytes'] / 1024:.1f}")
                for one in found["sends"]
            ],
        )
    else:
        for what in ("new", "changed", "removed"):
            for name in found[what]:
                click.echo(_shown(f"{what:<8} {name.removeprefix('source/')}"))
    counts = ", ".join(f"{len(found[what])} {what}" for what in ("new", "changed", "removed"))
    size = sum(one["bytes"] for one in found["sends"]) / 1024
    _note(f"{counts}, against {found['base'] or 'nothing'}: {size:.1f} KiB to send")
    _note(f"kernels (`kd build`): {found['kernels']}")


@cli.command("bundle", epilog=BUNDLE_EPILOG)
@_host_option
@click.option(
    "--python",
    "version",
    metavar="3.N",
    help="The Python that its tools are for, on Linux and this machine's kind of processor "
    "(default: the host is asked).",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=pathlib.Path),
    help="Default: kd-REVISION.tar, in this folder.",
)
def bundle(host_name: str, version: str | None, output: pathlib.Path | None) -> None:
    """Write one file that `kd deploy --bundle` can send, where nothing can be built or fetched.

    It holds what git knows, the engine's wheel with the library that `kd build` made, and the
    packages that gates need beside SGLang's own.
    """
    from remote.connection import connect
    from remote.deploy import Deployment, releases_of
    from remote.tools import some_python

    checkout = _checkout()
    commit, changed = checkout.revision()
    if version is not None:
        python = some_python(version)
    else:
        host = _host(host_name)
        with contextlib.closing(connect(host)) as transport:
            python = releases_of(transport, host).look_at_python()
    name = f"kd-{(commit or 'unknown')[:7]}{'-changed' if changed else ''}.tar"
    target = output or pathlib.Path(name)
    deployment = Deployment(checkout.root, (commit, changed), checkout.state / "tools")
    deployment.bundle(target, python, note=_note)
    click.echo(target)


@cli.command("validate", epilog=VALIDATE_EPILOG)
@click.argument("wanted", metavar="N", shell_complete=_completing(_phase_names))
@_host_option
@click.option("--release", metavar="ID", help="Default: the newest there.")
@click.option("--dry-run", is_flag=True, help="Say where each gate stands there, and run nothing.")
@_jobs_option
@_json_option
@click.pass_context
def validate(
    ctx: click.Context,
    wanted: str,
    host_name: str,
    release: str | None,
    dry_run: bool,
    jobs: int,
    as_json: bool,
) -> None:
    """Run the gates of phases 0..N on a host, with a release that is there.

    Those that passed there with the same code are not run again. Ctrl-C ends the run there too.
    """
    from phases.runner import signals_interrupt
    from remote.connection import connect
    from remote.deploy import releases_of
    from remote.validation import Validation

    phase = _phase_to_validate(wanted)
    host = _host(host_name)
    with contextlib.closing(connect(host)) as transport, signals_interrupt():
        if release is None:
            known = releases_of(transport, host).known()["releases"]
            if not known:
                raise ConfigError(f"host {host.name} has no release", remedy="run `kd deploy`")
            release = str(known[-1]["release"])
        if dry_run:
            states = Validation(transport, host).states(release, phase.number)
        else:
            states = _validate(transport, host, release, phase, jobs)
    if as_json:
        _print_json({"release": release, "phase": phase.package, "gates": states})
    else:
        _print_states(states)
    ctx.exit(_judge(states))


def _phase_to_validate(wanted: str | None) -> Phase:
    from phases.promotable import default_phase
    from phases.registry import find_phase

    return default_phase(_phases()) if wanted is None else find_phase(_phases(), wanted)


def _validate(
    transport: Any, host: Any, release: str, phase: Phase, jobs: int
) -> list[dict[str, Any]]:
    """Run the gates of phases 0..`phase` on a host; progress goes to stderr."""
    from remote.validation import Validation

    click.echo(f"runs the gates of phases 0..{phase.number} on {host.name}", err=True)
    states = Validation(transport, host).run(release, phase.number, _note, jobs=jobs)
    proven = sum(one["state"] == "proven" for one in states)
    click.echo(f"{proven} of {len(states)} gates are proven there", err=True)
    return states


def _judge(states: Sequence[Any]) -> int:
    from phases.promotable import exit_code_of

    return exit_code_of(states)


@cli.command("releases")
@_host_option
@_json_option
def releases(host_name: str, as_json: bool) -> None:
    """The releases of a host, oldest first."""
    from remote.connection import connect
    from remote.deploy import releases_of

    host = _host(host_name)
    with contextlib.closing(connect(host)) as transport:
        known = releases_of(transport, host).known()
    if as_json:
        _print_json(known)
        return
    _print_table(
        ("release", "revision", "by", "kernels", "gates", "state"),
        [
            (
                one["release"],
                str(one.get("revision") or "unknown")[:12] + ("+" if one.get("changed") else ""),
                str(one.get("by", "")),
                "yes" if one.get("kernels") else "no",
                _proven_of(one.get("evidence")),
                ", ".join(what for what in ("current", "promoted", "bad") if one[what]),
            )
            for one in known["releases"]
        ],
    )


def _proven_of(evidence: Any) -> str:
    """As in `0..3: 17 of 26`; when it was looked at last, as code and gates change."""
    if evidence is None:
        return "not run"
    proven = sum(one["state"] == "proven" for one in evidence["gates"])
    return f"0..{evidence['phase']}: {proven} of {len(evidence['gates'])}"


@cli.command("record", epilog=PROMOTE_EPILOG)
@_hosts_option
@_json_option
@click.pass_context
def record_tokens(ctx: click.Context, host_names: str, as_json: bool) -> None:
    """Write down what a host's model says, for every promotion to be held against.

    SGLang is started there as the inventory says, without kd's engine and without speculation, and
    asked for greedy tokens. What is live stops meanwhile, and is live again afterwards.
    """
    from phases.recorded import draw_prompts, expected, without_speculation
    from remote.releases import ReleaseRefused

    def one(host: Any) -> tuple[dict[str, Any], int]:
        with _live_service(host) as live:
            try:
                before = live.releases.tokens()
                live.checks_of_live = () if before is None else expected(before).checks
            except (ConfigError, ReleaseRefused) as error:  # that is why it is recorded anew
                _note(f"what is live will be started again unchecked: {error.problem}")
            model = live.model()
            prompts = draw_prompts(
                vocabulary=model["vocabulary"],
                positions=model["positions"],
                count=host.health.prompts,
                new_tokens=host.health.new_tokens,
            )
            outcome = live.record(
                without_speculation(host.service.command_line()),
                prompts,
                command=f"kd record --host {host.name}",
                note=_note,
            )
        return _changed(outcome, host.name, as_json)

    ctx.exit(_on_each(_hosts(host_names), one, as_json))


@cli.command("promote", epilog=PROMOTE_EPILOG)
@click.argument("wanted", metavar="N|stock", shell_complete=_completing(_promotable_names))
@_hosts_option
@click.option("--release", metavar="ID", help="Which release. Default: the newest that is not bad.")
@click.option(
    "--force",
    metavar="REASON",
    help="Promote without the evidence that lacks, and say why; never without token-exactness.",
)
@_json_option
@click.pass_context
def promote(
    ctx: click.Context,
    wanted: str,
    host_names: str,
    release: str | None,
    force: str | None,
    as_json: bool,
) -> None:
    """Make phase N's profile the live service of a host, if its gates have passed there.

    The service is stopped, started with the release, waited for, and must give the tokens that `kd
    record` wrote down, for as long as the inventory says. If it does not, what was live before is
    started again and checked in the same way. The host does this by itself: a connection that
    breaks changes nothing. Ctrl-C puts back what was live. `stock` is SGLang without kd's engine.
    """
    if wanted == "stock" and release is not None:
        raise ConfigError("stock SGLang is no release", remedy="leave --release out")

    def one(host: Any) -> tuple[dict[str, Any], int]:
        from remote.promotion import Target

        with _live_service(host) as live:
            if wanted == "stock":
                target, forced = Target(None, None, (), {}), None
            else:
                target, forced = _proven_target(live, host, wanted, release, force)
            found = live.releases.promotions()
            now = found["live"]
            # Another service of the inventory is another thing to be live.
            wanted_now = live.entry(target)
            same = now is not None and all(
                now.get(name) == wanted_now[name] for name in ("release", "phase", "service")
            )
            set_up = found["followed"] and found["stopped"] is None
            if same and set_up and live.manager.status().state == "running":
                click.echo(f"{target.name} is live already (kd restart starts it anew)", err=True)
                text = f"{target.name} is live already"
                return {"result": "promoted", "text": text, "job": None}, ExitCode.PASSED
            outcome = live.promote(
                target,
                _checks(live),
                command=f"kd promote {wanted} --host {host.name}",
                note=_note,
                forced=forced,
            )
        return _changed(outcome, host.name, as_json)

    ctx.exit(_on_each(_hosts(host_names), one, as_json))


def _proven_target(
    live: Any, host: Any, wanted: str, release: str | None, force: str | None
) -> tuple[Any, dict[str, Any] | None]:
    """What is to be live of a release whose gates have passed there; what was forced, and why.

    Raises ConfigError where a gate is not proven and nobody, or nobody rightly, says why not.
    """
    from phases.promotable import completed, lacking, refused_even_if_forced, up_to
    from phases.registry import find_phase
    from phases.serve import require_profile
    from remote.validation import Validation

    phase = find_phase(_phases(), wanted)
    require_profile(phase)
    chosen = _release_of(live.releases, release)
    target = _target_of(live, host, chosen, phase)
    said = Validation(live.transport, host).states(chosen, phase.number)
    states = completed(said, up_to(_phases(), phase))
    lacks, never = lacking(states), refused_even_if_forced(states)
    if not lacks:
        return target, None
    if force is not None and force.strip() and not never:
        return target, {"reason": force, "lacks": lacks}
    for line in lacks:
        _note(f"kd: {line}")
    why = f"{len(lacks)} gates are not proven"
    if never:
        why += f", {len(never)} of them of token-exactness, which nothing can force"
    raise ConfigError(
        f"host {host.name}: phase {phase.number} cannot be promoted with {chosen}: {why}",
        remedy=f"kd validate {phase.number} --host {host.name} --release {chosen}"
        + ("" if never else ", or --force REASON"),
    )


def _target_of(live: Any, host: Any, release: str, phase: Phase) -> Any:
    """A release at a phase, started as that release says: its gates have run with nothing else."""
    from remote.promotion import Target
    from remote.validation import Validation

    arguments, environment = Validation(live.transport, host).profile(release, phase.number)
    if not arguments:
        raise ConfigError(
            f"host {host.name}: phase {phase.number} of release {release} has no service profile",
            remedy="kd deploy, which sends this checkout's",
        )
    return Target(release, phase.number, arguments, environment)


@cli.command("rollback", epilog=PROMOTE_EPILOG)
@_hosts_option
@click.option("--to", "release", metavar="ID", help="The release. Default: what was live before.")
@_json_option
@click.pass_context
def rollback(ctx: click.Context, host_names: str, release: str | None, as_json: bool) -> None:
    """Make live again what was live before, just as it was started then.

    It is held against the recorded tokens, as a promotion is. A second rollback goes further back.
    """

    def one(host: Any) -> tuple[dict[str, Any], int]:
        with _live_service(host) as live:
            found = live.releases.promotions()
            if release is None:
                entry = found["previous"]
            else:
                named = [
                    one
                    for one in found["entries"]
                    if one.get("result") == "promoted" and one["release"] == release
                ]
                entry = named[-1] if named else None
            remedy = f"kd releases --host {host.name}"
            if found["live"] is None or entry is None:
                what = f"release {release} was never live" if release else "nothing was live before"
                raise ConfigError(f"host {host.name}: {what}", remedy=remedy)
            there = {one["release"] for one in live.releases.known()["releases"]}
            if entry["release"] is not None and entry["release"] not in there:
                raise ConfigError(
                    f"host {host.name}: release {entry['release']} is not there any more",
                    remedy=remedy,
                )
            command = f"kd rollback --host {host.name}" + (f" --to {release}" if release else "")
            outcome = live.again(
                *("rollback", entry, _checks(live)), seen=found["live"], command=command, note=_note
            )
        return _changed(outcome, host.name, as_json)

    ctx.exit(_on_each(_hosts(host_names), one, as_json))


@cli.command("restart", epilog=PROMOTE_EPILOG)
@_hosts_option
@_json_option
@click.pass_context
def restart(ctx: click.Context, host_names: str, as_json: bool) -> None:
    """Stop what is live on a host and start it again; its tokens are checked.

    So is started again what `kd stop` has taken down.
    """

    def one(host: Any) -> tuple[dict[str, Any], int]:
        with _live_service(host) as live:
            entry = live.releases.promotions()["live"]
            if entry is None:
                raise ConfigError(
                    f"host {host.name}: nothing is live",
                    remedy=f"kd promote N --host {host.name}",
                )
            command = f"kd restart --host {host.name}"
            outcome = live.again(
                *("restart", entry, _checks(live)), seen=entry, command=command, note=_note
            )
        return _changed(outcome, host.name, as_json)

    ctx.exit(_on_each(_hosts(host_names), one, as_json))


@cli.command("stop", epilog=PROMOTE_EPILOG)
@_hosts_option
@_json_option
@click.pass_context
def stop(ctx: click.Context, host_names: str, as_json: bool) -> None:
    """Take down what is live on a host, with every process of it; `kd status` says so then.

    Where nothing is live, what a change that was killed left running is taken down.

    It stays down until `kd restart`, `kd promote` or `kd rollback`: a promotion that fails
    meanwhile does not start it either. Ctrl-C does not take a stop back.
    """

    def one(host: Any) -> tuple[dict[str, Any], int]:
        with _live_service(host) as live:
            entry = live.releases.promotions()["live"]
            if entry is None and not live.runs():
                raise ConfigError(
                    f"host {host.name}: nothing is live, so there is nothing to stop",
                    remedy=f"kd status --host {host.name}",
                )
            outcome = live.stop(entry, command=f"kd stop --host {host.name}", note=_note)
        return _changed(outcome, host.name, as_json)

    ctx.exit(_on_each(_hosts(host_names), one, as_json))


@cli.command("logs")
@_host_option
@click.option("-f", "--follow", is_flag=True, help="Go on as the service prints, until Ctrl-C.")
@click.option("-n", "--lines", type=click.IntRange(0, 10_000), default=50, show_default=True)
@_json_option
def logs(host_name: str, follow: bool, lines: int, as_json: bool) -> None:
    """What the live service of a host has printed. --json: one object a look, with its text."""
    host = _host(host_name)
    with _live_service(host) as live:
        found = live.releases.look_at_log(None, lines)
        while True:
            if as_json:
                click.echo(json.dumps({"host": host.name, **found}))
            else:
                click.echo(_shown(found["text"]), nl=False)
            sys.stdout.flush()
            if not follow:
                return
            offset = found["offset"]
            while not found["text"] or found["offset"] == offset:
                time.sleep(_LOOK_S)
                found = live.releases.look_at_log(offset)
                if found["text"]:
                    break


def _shown(text: str) -> str:
    """What a host has said, as a terminal may have it: no control character but those of lines."""
    lines = text.replace("\r\n", "\n")
    return "".join(one if one.isprintable() or one in "\n\t" else "?" for one in lines)


def _note(text: str) -> None:
    """A message, of which a host may have said a part."""
    click.echo(_shown(text), err=True)


@contextlib.contextmanager
def _live_service(host: Any) -> Iterator[Any]:
    """The live service of a host, connected inside the `with` block; SIGTERM is Ctrl-C there.

    A closed terminal is not: what was begun on the host goes on there.
    """
    from phases.runner import signals_interrupt
    from phases.service import server_python
    from remote.connection import connect
    from remote.deploy import releases_of
    from remote.promotion import LiveService

    with contextlib.closing(connect(host)) as transport, signals_interrupt(), _hangup_leaves():
        yield LiveService(
            transport,
            releases_of(transport, host),
            host,
            python=host.python or server_python(),
            manager_python=host.python or sys.executable,
        )


@contextlib.contextmanager
def _hangup_leaves() -> Iterator[None]:
    """A closed terminal (SIGHUP) ends this process alone; under nohup it does not even do that."""
    from phases.runner import signals_raise

    left = False
    code = 128 + signal.SIGHUP  # as a shell says of what that signal has ended

    def leave() -> SystemExit | None:
        nonlocal left
        first, left = not left, True
        return SystemExit(code) if first else None

    with signals_raise(leave, signal.SIGHUP):
        yield
    if left:  # something in between took it for its own: no further host is begun with
        raise SystemExit(code)


def _checks(live: Any) -> list[dict[str, Any]]:
    """What a service must say, of the model that is there now."""
    from phases.recorded import expected

    host = live.transport.host
    remedy = f"kd record --host {host}"
    record = live.releases.tokens()
    if record is None:
        raise ConfigError(
            f"host {host}: no tokens are recorded that a service could be held against",
            remedy=remedy,
        )
    found = expected(record)
    model, recorded = live.model(), record.get("model")
    if not isinstance(recorded, dict) or any(
        recorded.get(name) != model[name] for name in ("path", "config", "files")
    ):
        raise ConfigError(
            f"host {host}: the recorded tokens are of another model than {model['path']} is now",
            remedy=remedy,
        )
    return found.checks


def _release_of(releases: Any, wanted: str | None) -> str:
    """The release called so; the newest that is not bad where none is named."""
    known = releases.known()["releases"]
    names = [one["release"] for one in known]
    if wanted is not None:
        if wanted not in names:
            raise UnknownName("release", wanted, names)
        return wanted
    good = [one["release"] for one in known if not one["bad"]]
    if not good:
        raise ConfigError("there is no release that is not bad", remedy="kd deploy")
    newest: str = good[-1]
    return newest


def _changed(outcome: Any, host_name: str, as_json: bool) -> tuple[dict[str, Any], int]:
    """Tell how a change of the live service ended."""
    if not as_json:
        click.echo(_shown(f"{host_name}: {outcome.text}"), err=not outcome.done)
    if outcome.done:
        code = ExitCode.PASSED
    else:
        codes = {"down": ExitCode.DOWN, "lost": ExitCode.DOWN, "refused": ExitCode.USAGE}
        code = codes.get(outcome.result, ExitCode.FAILED)
    return {"result": outcome.result, "text": outcome.text, "job": outcome.job}, code


@cli.command("unlock")
@_host_option
@click.option("--owner", metavar="NAME", help="Whose lock it must be; what is typed on a terminal.")
@_json_option
def unlock(host_name: str, owner: str | None, as_json: bool) -> None:
    """Show who has a host's lock, and break it once their name has been typed.

    A deployment that was killed leaves its lock behind. One that is still running loses it. The
    owner of a lock file that cannot be read is `damaged`.
    """
    from remote.connection import connect
    from remote.deploy import releases_of, this_person
    from remote.errors import TransportError

    host = _host(host_name)
    with contextlib.closing(connect(host)) as transport:
        releases = releases_of(transport, host)
        holder = releases.lock_holder()
        if holder is None:
            if as_json:
                _print_json({"holder": None, "broken": False})
            else:
                click.echo(f"nobody has the lock of {host.name}")
            return
        since = datetime.datetime.fromtimestamp(holder["at"], datetime.UTC)
        when = f"since {since:%Y-%m-%d %H:%M:%S} UTC"
        if holder["owner"] == "damaged":
            said = f"the lock of {host.name} is damaged {when}, and says no owner: type `damaged`"
        else:
            said = f"{holder['owner']} has had the lock of {host.name} {when}: {holder['command']}"
        _note(said)
        if owner is None and sys.stdin.isatty():
            owner = click.prompt("break it? type the owner's name", default="", err=True)
        broken = owner == holder["owner"]
        if broken:
            releases.break_lock(holder)
            text = f"{holder['owner']}'s: {holder['command']}"
            did = {"did": "unlock", "by": this_person(), "result": "broken", "text": text}
            try:
                releases.audit({**did, "from": holder["owner"], "to": None})
            except TransportError as error:  # a full disk is a reason to break a lock
                _note(f"the audit log does not say so: {_one_line(error)}")
        elif owner:
            raise ConfigError(f"the lock is not {owner}'s", remedy=f"--owner {holder['owner']}")
    if as_json:
        _print_json({"holder": holder, "broken": broken})
    else:
        click.echo("broken" if broken else "left as it is")


@hosts_group.command("check")
@_json_option
@click.argument(
    "names", nargs=-1, metavar="[NAME...]", shell_complete=_completing(_host_and_group_names)
)
@click.pass_context
def hosts_check(ctx: click.Context, as_json: bool, names: tuple[str, ...]) -> None:
    """Whether hosts can be reached, and have what a promotion will need. Default: every host.

    That is SGLang, the service manager, the model, a free port, room on the disk, what earlier
    promotions wrote down, the secrets that are named, and GPUs with free memory. Nothing is changed
    there, and nothing started: whether SGLang can serve that model is seen by `kd record`. Exit
    code 1 where a host cannot be reached or lacks something; what is on stderr.
    """
    from remote.inventory import load_inventory

    inventory = load_inventory(_checkout().hosts_file)
    hosts = inventory.named(",".join(names)) if names else inventory.hosts.values()
    found = {host.name: _checked(host) for host in hosts}
    if as_json:
        _print_json(found)
    else:
        words = {True: "yes", False: "no", None: "-"}
        _print_table(
            ("host", "address", "reached", "python", "rsync", "promotion"),
            [
                (
                    *(name, found[name]["address"]),
                    *(words[found[name][key]] for key in ("reached", "python", "rsync")),
                    words[found[name]["ready"]],
                )
                for name in found
            ],
        )
    well = all(one["reached"] and one["ready"] is not False for one in found.values())
    ctx.exit(ExitCode.PASSED if well else ExitCode.FAILED)


def _checked(host: Any) -> dict[str, Any]:
    """What a host answers; None for what cannot be known of one that is not reached.

    ready: whether it has all that a promotion needs; None of a host without a service. needs: each
    of those things, with what was found.
    """
    from remote.connection import connect
    from remote.errors import TransportError

    address = getattr(host, "address", "")
    transport = connect(host)
    try:
        transport.run(["true"], timeout=_CHECK_S)
        python = transport.exists(host.python or sys.executable)
        rsync = transport.run(["rsync", "--version"], timeout=_CHECK_S, check=False).exit_code == 0
    except TransportError as error:
        click.echo(f"kd: {_one_line(error)}", err=True)
        nothing = dict.fromkeys(("python", "rsync", "ready"))
        return {"address": address, "reached": False, **nothing, "needs": [], "why": str(error)}
    finally:
        transport.close()
    found = {"address": address, "reached": True, "python": python, "rsync": rsync}
    if host.service is None:
        return {**found, "ready": None, "needs": [], "why": None}
    needs = _needs(host, python, rsync)
    for one in needs:
        if not one["ok"]:
            _note(f"kd: host {host.name}: {one['what']}: {one['said']}")
    return {**found, "ready": all(one["ok"] for one in needs), "needs": needs, "why": None}


def _needs(host: Any, python: bool, rsync: bool) -> list[dict[str, Any]]:
    """What a promotion needs of a host: what, whether it is ok, and what was said."""
    needs = [{"what": "rsync", "ok": rsync, "said": "is there" if rsync else "is not on PATH"}]
    if not python:
        said = f"{host.python or sys.executable} is not there, so that nothing else was looked at"
        return [*needs, {"what": "python", "ok": False, "said": said}]
    try:
        with _live_service(host) as live:
            return [*needs, *live.readiness()]
    except KdError as error:
        return [*needs, {"what": "promotion", "ok": False, "said": _one_line(error)}]


@cli.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of SHELL: `eval "$(kd completion bash)"`."""
    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(cli, {}, "kd", "_KD_COMPLETE").source())


# ---------------------------------------------------------------------------------------------
# What the commands share.


def _checkout() -> Checkout:
    from phases.checkout import find_checkout

    return find_checkout()


def _store(checkout: Checkout) -> Store:
    from phases.evidence import Store

    return Store(checkout.evidence, checkout.kept_evidence, checkout.root)


def _phases() -> list[Phase]:
    from phases.registry import load_phases

    return load_phases()


def _host(name: str) -> Any:
    from remote.inventory import load_inventory

    return load_inventory(_checkout().hosts_file).host(name)


def _hosts(text: str) -> list[Any]:
    """The hosts that `--host a,b` or a group's name stand for."""
    from remote.inventory import load_inventory

    return load_inventory(_checkout().hosts_file).named(text)


def _on_each(hosts: list[Any], do: Callable[[Any], tuple[Any, int]], as_json: bool) -> ExitCode:
    """Do one host after the other, until one fails; which comes next is said on stderr.

    do: the answer of one host, and how it ended. What is blocked is no failure.
    With as_json the answer is printed: of several hosts by their names, those alone that were done.
    """
    answers: dict[str, Any] = {}
    worst = ExitCode.PASSED

    def stopped() -> None:
        if len(hosts) > 1:
            rest = ", ".join(other.name for other in hosts[number:])
            click.echo(f"stopped at host {host.name}; not reached: {rest or 'none'}", err=True)
            if as_json:
                _print_json(answers)

    for number, host in enumerate(hosts, 1):
        if len(hosts) > 1:
            click.echo(f"host {host.name} ({number} of {len(hosts)})", err=True)
        try:
            answers[host.name], code = do(host)
        except SystemExit:  # the terminal was closed: nobody is there to be told
            raise
        except BaseException:  # an interrupt too
            stopped()
            raise
        if code not in (ExitCode.PASSED, ExitCode.BLOCKED):
            if len(hosts) > 1:
                stopped()
            elif as_json:
                _print_json(answers[host.name])
            return ExitCode(code)
        worst = max(worst, ExitCode(code))
    if as_json:
        _print_json(answers if len(hosts) > 1 else answers[hosts[0].name])
    return worst


def _this_machine() -> Machine:
    """Its facts; its SGLang is the one that servers are started with."""
    from kdtree_engine.machine import read_machine
    from phases.service import server_sglang

    return dataclasses.replace(read_machine(), sglang=server_sglang())


def _machine_of(host_name: str) -> Machine:
    """The facts of a host, read there through its transport."""
    from remote.connection import connect
    from remote.facts import read_facts

    host = _host(host_name)
    transport = connect(host)
    try:
        machine = read_facts(transport, host.python or sys.executable)
    finally:
        transport.close()
    if host.kind == "local" and host.python is None:
        from phases.service import server_sglang

        machine = dataclasses.replace(machine, sglang=server_sglang())
    return machine


def _local_machine(host_name: str) -> Machine:
    """This machine, after making sure that `host_name` means this machine."""
    _here(host_name)
    return _this_machine()


def _here(host_name: str) -> Any:
    """The host called so, where it is this machine. Raises MissingError for another."""
    host = _host(host_name)
    if host.kind != "local":
        raise MissingError(
            f"host {host.name} is reached over SSH; this runs on this machine alone so far",
            remedy="use --host local, or type the command on that host",
        )
    return host


def _run(
    selection: Sequence[Any],
    host_name: str,
    fail_fast: bool,
    jobs: int,
    seed: int,
    machine: Machine | None = None,
) -> Record:
    from phases import runner

    checkout = _checkout()
    store = _store(checkout)
    machine = machine or _local_machine(host_name)
    try:
        with _Watch(len(selection)) as watch:
            return runner.run(
                selection,
                checkout=checkout,
                store=store,
                machine=machine,
                host=host_name,
                seed=seed,
                command=["kd", *sys.argv[1:]],
                fail_fast=fail_fast,
                jobs=jobs,
                watch=watch,
            )
    except KeyboardInterrupt:
        run = store.find("latest").run
        click.echo(f"what had not ended is interrupted: kd evidence show {run}", err=True)
        raise


def _report(
    record: Record,
    phases: Sequence[Phase],
    require: Sequence[str],
    as_json: bool,
    fresh: Sequence[Any] = (),
) -> int:
    """Print a finished run; returns its exit code. `fresh` gates passed before and were not run."""
    from phases.report import exit_code
    from phases.requirement import Requirement

    gates = {gate.name: gate for phase in phases for gate in phase.gates}
    required = frozenset(Requirement(word) for word in require)
    code = exit_code(record.gates, gates=gates, machine=record.machine, required=required)
    if as_json:
        _print_json(
            record.model_dump(mode="json")
            | {"exit_code": code, "fresh": [entry.gate for entry in fresh]}
        )
        return code
    _print_record(record)
    if fresh:
        click.echo(f"{len(fresh)} more passed before, with the code as it is now")
    return code


def _print_record(record: Record) -> None:
    from phases.report import GATE_COLUMNS, ending, gate_rows

    rows = gate_rows(record.gates)
    _print_table(GATE_COLUMNS, rows)
    for line in ending(record)[1 + len(rows) :]:
        click.echo(line)


def _print_states(states: Sequence[Any]) -> None:
    _print_table(
        ("phase", "gate", "state", "why"),
        [(one["phase"], one["gate"], str(one["state"]), one["why"] or "") for one in states],
    )


class _Watch:
    """Progress on stderr: a live line on a terminal, one plain line for each gate elsewhere."""

    def __init__(self, gates: int) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._gates = gates
        self._ended = 0
        self._console = _console(stderr=True)
        self._live = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> _Watch:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def __call__(self, event: Any) -> None:
        name = event.gate.name
        if event.result is not None:
            self._ended += 1
            if name in self._tasks:
                self._live.remove_task(self._tasks.pop(name))
            self._say(event)
        elif name not in self._tasks:
            self._tasks[name] = self._live.add_task(name, total=None, note="")
        else:
            self._live.update(
                self._tasks[name], completed=event.done, total=event.total or None, note=event.note
            )

    def _say(self, event: Any) -> None:
        seconds = f" {event.result.seconds:.1f} s" if event.result.seconds is not None else ""
        line = f"[{self._ended}/{self._gates}] {event.phase.package} {event.gate.name}: "
        line += f"{event.result.status}{seconds}"
        if self._console.is_terminal:
            self._console.print(line, markup=False, highlight=False)
        else:
            with contextlib.suppress(OSError):  # nobody reads on: no reason to stop a run
                click.echo(line, err=True)


def _console(stderr: bool = False) -> Console:
    from rich.console import Console

    class Piped(Console):
        def on_broken_pipe(self) -> None:
            """rich would exit with 1, which says here that a gate failed; `main` knows better."""
            raise BrokenPipeError

    return Piped(stderr=stderr, highlight=False)


_COLOURS = {
    "passed": "green",
    "proven": "green",
    "failed": "red",
    "error": "red",
    "blocked": "yellow",
    "unwritten": "bright_black",
    "interrupted": "magenta",
}


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A rich table on a terminal with room for it; else aligned plain text, a line for each row.

    A number or name that is cut or folded can be neither read nor typed, so the last column alone
    gives way, and where that is not enough the terminal breaks whole lines.
    """
    console = _console()
    # A host may have said what is in a cell.
    rows = [[_shown(cell).replace("\n", " ") for cell in row] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    if console.is_terminal and sum(widths[:-1]) + 3 * len(widths) + 20 <= console.width:
        from rich.table import Table
        from rich.text import Text

        table = Table(header_style="bold")
        for number, (column, width) in enumerate(zip(columns, widths, strict=True), 1):
            last = number == len(columns)
            table.add_column(column, overflow="fold", min_width=None if last else width)
        for row in rows:
            table.add_row(
                *(
                    Text(cell, style=_COLOURS.get(cell.partition(":")[0].split(" ")[0], ""))
                    for cell in row
                )
            )
        console.print(table)
        return
    from phases.report import plain_table

    for line in plain_table(columns, rows):
        click.echo(line)


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=1, ensure_ascii=False, default=str))


if __name__ == "__main__":
    main()
