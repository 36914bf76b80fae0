"""Small traces of a GPU, put together event by event, in the form that Kineto writes."""

from __future__ import annotations

import gzip
import json
import pathlib
from typing import Any

VERIFY = "void kdtree::tree_verify_kernel<kdtree::Tile<16>>(kdtree::TreeVerifyParams)"
MERGE = "void kdtree::(anonymous namespace)::merge_kernel<2>(kdtree::TreeVerifyParams)"
BUILD = "kdtree::(anonymous namespace)::select_kernel(kdtree::BuildParams)"
GEMM = "nvjet_tst_64x8_64x16_2x1_v_bz_TNT"
REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
NORM = "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*)"


class Trace:
    """Events of one process. Times and durations are in microseconds."""

    def __init__(self, prefix: str = "") -> None:
        self.events: list[dict[str, Any]] = []
        self._prefix = prefix
        self._correlation = 0

    def launch(self, at: float, *, graph: bool = False, thread: int = 1) -> int:
        """A launch on the host; its correlation id."""
        self._correlation += 1
        name = "cudaGraphLaunch" if graph else "cudaLaunchKernel"
        args = {"correlation": self._correlation}
        self._add("cuda_runtime", name, self._pid(4242), thread, at, 3.0, args)
        return self._correlation

    def kernel(
        self, name: str, begin: float, took: float, launch: int = -1, stream: int = 7
    ) -> None:
        args = {"device": 0, "stream": stream, "correlation": launch}
        self._add("kernel", name, self._pid(0), stream, begin, took, args)

    def collective(
        self, name: str, begin: float, took: float, launch: int = -1, **args: object
    ) -> None:
        """A kernel of NCCL on a stream of its own. args: of the call, in Kineto's words."""
        told = {"device": 0, "stream": 9, "correlation": launch, **args}
        self._add("kernel", name, self._pid(0), 9, begin, took, told)

    def copy(self, begin: float, took: float, nbytes: int, launch: int = -1) -> None:
        args = {"device": 0, "stream": 7, "correlation": launch, "bytes": nbytes}
        name = "Memcpy DtoD (Device -> Device)"
        self._add("gpu_memcpy", name, self._pid(0), 7, begin, took, args)

    def span(self, name: str, begin: float, end: float, thread: int = 1) -> None:
        self._add("user_annotation", name, self._pid(4242), thread, begin, end - begin, {})

    def write(self, path: pathlib.Path, *, bare: bool = False) -> pathlib.Path:
        document = {"schemaVersion": 1, "deviceProperties": [], "traceEvents": self.events}
        text = json.dumps(self.events if bare else document, indent=1)
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text)
        return path

    def _pid(self, pid: int) -> int | str:
        return f"{self._prefix} {pid}" if self._prefix else pid

    def _add(
        self,
        category: str,
        name: str,
        pid: int | str,
        tid: int,
        at: float,
        took: float,
        args: dict[str, Any],
    ) -> None:
        event = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid}
        self.events.append(event | {"ts": at, "dur": took, "args": args})


def two_rounds(prefix: str = "", reduce_us: float = 20.0) -> Trace:
    """Two whole rounds of 200 us each, and the first kernel of a third.

    A round from its first kernel on, in us:

        0..100    verification, of which 60..80 has the all-reduce beside it on another stream
        100..110  idle: the GEMM was launched before, in the same graph
        110..140  GEMM
        140..170  idle: the tree build's launch begins at 160
        170..180  tree build
        180..190  a kernel that no rule knows, launched at 150
        190..200  idle: the next graph's launch begins at 195
    """
    trace = Trace(prefix)
    for number in range(2):
        at = 1000.0 + 200 * number
        trace.span("step[VERIFY bs=1]", at - 10, at + 50)
        graph = trace.launch(at - 5, graph=True)
        trace.kernel(VERIFY, at, 100, graph)
        trace.kernel(REDUCE, at + 60, reduce_us, graph, stream=8)
        trace.kernel(GEMM, at + 110, 30, graph)
        trace.kernel(BUILD, at + 170, 10, trace.launch(at + 160))
        trace.kernel("mystery_kernel", at + 180, 10, trace.launch(at + 150))
    trace.span("step[VERIFY bs=1]", 1390, 1450)
    trace.kernel(VERIFY, 1400, 100, trace.launch(1395, graph=True))
    return trace


def one_of_two_ranks(rank: int, *, told: bool = True) -> Trace:
    """Two steps of 100 us of a rank of two, eager, and the first kernel of a third.

    Rank 1 has the longer experts (30 us against 10), and so comes last to the first all-reduce:

        rank 0   0..10 experts, 10..40 all-reduce, 40..50 GEMM, 50..60 all-reduce
        rank 1   0..30 experts, 30..40 all-reduce, 40..48 GEMM, 48..60 all-reduce

    Each all-reduce is of [9, 1024] in bf16, 18,432 bytes. told: whether its arguments are there.
    """
    trace = Trace()
    shape = {"In msg nelems": 9216, "Out msg nelems": 9216, "Group size": 2, "dtype": "BFloat16"}
    args: dict[str, object] = {"Collective name": "allreduce", **shape} if told else {}
    experts, product = ((10, 10), (30, 8))[rank]
    for number in range(2):
        at = 1000.0 + 100 * number
        trace.span("step[DECODE bs=9]", at - 10, at + 80)
        trace.kernel("fused_moe_kernel", at, experts, trace.launch(at - 5))
        trace.collective(REDUCE, at + experts, 40 - experts, trace.launch(at - 4), **args)
        trace.kernel(GEMM, at + 40, product, trace.launch(at - 3))
        trace.collective(REDUCE, at + 40 + product, 20 - product, trace.launch(at - 2), **args)
    trace.span("step[DECODE bs=9]", 1190, 1280)
    trace.kernel("fused_moe_kernel", 1200, experts, trace.launch(1195))
    return trace
