"""`fill_kv_indices`: the KV slots of a batch's requests, listed one request after the other.

Attention kernels read a paged cache through such a list. SGLang makes it before each pass, with a
sum, a copy, and a kernel of one block a request: 57 us for a request of 65k tokens on an H200, on
which the first layer waits (tests/data/profile). Here it is one launch over the whole GPU.
"""

from __future__ import annotations

import torch

from kdtree_engine.ops.arguments import check_tensor
from kdtree_engine.ops.library import may_read, tree_kernels
from kdtree_engine.ops.registry import register

__all__ = ["fill_kv_indices", "refill_kv_indices"]

_INDEX = (torch.int64, torch.int32)


def fill_kv_indices(
    req_to_token: torch.Tensor,
    requests: torch.Tensor,
    lengths: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
) -> None:
    """Writes where each request's slots begin, and the slots.

    kv_indptr[0] = 0 and kv_indptr[b + 1] = kv_indptr[b] + lengths[b];
    kv_indices[kv_indptr[b] : kv_indptr[b + 1]] = req_to_token[requests[b], : lengths[b]].
    What lies behind in `kv_indices` stays as it is. Reads nothing back, so it can be captured.

    req_to_token: int32 [rows, width], contiguous. requests: int64 or int32 [B], rows of it.
    lengths: int64 or int32 [B], 0 to width; their sum is below 2^31.
    kv_indptr: int32 [B + 1]. kv_indices: int64 [room], room for that sum.

    Raises TypeError or ValueError that names the argument. On the CPU, and on a GPU with
    KDTREE_CHECK=1 outside of captures, also ValueError for what the tensors hold; without that a
    GPU cuts lengths to the table and the list, and lists nothing of a row that is not there.
    """
    like = ("req_to_token", req_to_token.device)
    check_tensor("req_to_token", req_to_token, ("rows", "width"), (torch.int32,))
    check_tensor("requests", requests, (requests.shape[0],), _INDEX, like=like)
    batch = requests.shape[0]
    check_tensor("lengths", lengths, (batch,), _INDEX, like=like)
    check_tensor("kv_indptr", kv_indptr, (batch + 1,), (torch.int32,), like=like)
    check_tensor("kv_indices", kv_indices, tuple(kv_indices.shape[:1]), (torch.int64,), like=like)
    torch.ops.kdtree_engine.fill_kv_indices.default(
        req_to_token, requests, lengths, kv_indptr, kv_indices
    )


def refill_kv_indices(*given: torch.Tensor) -> None:
    """`fill_kv_indices` for a step of a service: the library alone checks shapes and dtypes."""
    (_cuda if given[0].is_cuda else _cpu)(*given)


def _cuda(*given: torch.Tensor) -> None:
    if may_read(given[0].device):
        _check(*given)
    tree_kernels().fill_kv_indices(*given)


def _cpu(*given: torch.Tensor) -> None:
    _check(*given)
    req_to_token, requests, lengths, kv_indptr, kv_indices = given
    kv_indptr[:1] = 0
    torch.cumsum(lengths, 0, dtype=torch.int32, out=kv_indptr[1:])
    bounds = kv_indptr.tolist()
    for request, row in enumerate(requests.tolist()):
        begin, end = bounds[request], bounds[request + 1]
        kv_indices[begin:end] = req_to_token[row, : end - begin]


def _check(*given: torch.Tensor) -> None:
    """Raises ValueError where a request has no row, or a length no room. Reads all of both."""
    req_to_token, requests, lengths, _, kv_indices = given
    rows, width = req_to_token.shape
    total = 0
    for request, (row, length) in enumerate(zip(requests.tolist(), lengths.tolist(), strict=True)):
        if not 0 <= row < rows:
            raise ValueError(
                f"requests[{request}]: expected 0..{rows - 1}, a row of req_to_token, got {row}"
            )
        if not 0 <= length <= width:
            raise ValueError(
                f"lengths[{request}]: expected 0..{width}, the width of req_to_token, got {length}"
            )
        total += length
    if total > min(kv_indices.shape[0], 2**31 - 1):
        raise ValueError(
            f"kv_indices: expected room for {total} slots, the sum of lengths, "
            f"got {kv_indices.shape[0]}"
        )


register(
    "fill_kv_indices(Tensor req_to_token, Tensor requests, Tensor lengths, Tensor(a!) kv_indptr, "
    "Tensor(b!) kv_indices) -> ()",
    cpu=_cpu,
    cuda=_cuda,
)
