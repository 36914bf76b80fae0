"""`compact_kv`: the accepted paths' KV rows, moved to the front of each window, in all layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kdtree_engine.ops.acceptance import AcceptedPaths
from kdtree_engine.ops.arguments import check_tensor, short
from kdtree_engine.ops.library import may_read, tree_kernels
from kdtree_engine.ops.registry import register

__all__ = ["MAX_LAYERS", "Compaction", "compact_kv"]

MAX_LAYERS = 256
"""Their pointers travel in a launch's parameters."""
_VECTOR_BYTES = 16
_INDEX = (torch.int64, torch.int32)


def compact_kv(
    pools: Sequence[torch.Tensor] | torch.Tensor, paths: AcceptedPaths, windows: torch.Tensor
) -> None:
    """Moves rows in place: `reference.compaction_plan` and `apply_compaction`, for all at once.

    Afterwards the first `paths.counts[b]` slots of request b's window hold its accepted path, in
    path order; its other slots may be given back. Reads nothing back from a GPU, so it can be
    captured; a graph keeps the pools' addresses.

    pools: one pool a layer, [slots, ...], at most 256, all of one shape and dtype and contiguous;
        or one tensor [layers, slots, ...]. On a GPU a row must be a multiple of 16 bytes.
    paths: as of `accept_trees`; the nodes on a path rise. A count of 0 or 1 moves nothing.
    windows: int32 or int64 [B, N], the pool slot of each tree node. No slot may be in two places
        of it that paths read or write.

    Raises TypeError or ValueError that names the argument. On the CPU, and on a GPU with
    KDTREE_CHECK=1 outside of captures, also ValueError for paths that do not rise from 0 and slots
    outside the pools.
    """
    layers = _checked_layers(pools)
    first = layers[0]
    like = ("pools", first.device)
    check_tensor("windows", windows, ("batch", "nodes"), _INDEX, like=like)
    batch = windows.shape[0]
    check_tensor("paths.nodes", paths.nodes, (batch, "steps"), (torch.int64,), like=like)
    check_tensor("paths.counts", paths.counts, (batch,), (torch.int64,), like=like)
    torch.ops.kdtree_engine.compact_kv.default(
        layers, paths.nodes, paths.counts, windows.to(torch.int64)
    )


class Compaction:
    """`compact_kv` of pools that stay: what it checks of them is checked once.

    Of 61 pools that takes longer than the launch, at every step of a service. A pool that is freed
    must not be moved in any more.

    pools: as of `compact_kv`. Raises what it raises for them; on a GPU also MissingError where the
    library of the tree kernels is absent.
    """

    def __init__(self, pools: Sequence[torch.Tensor] | torch.Tensor) -> None:
        self._layers = _checked_layers(pools)
        self._kernels = tree_kernels() if self._layers[0].is_cuda else None
        self._pointers, self._row_bytes = _rows_of(self._layers)

    def move(self, nodes: torch.Tensor, counts: torch.Tensor, windows: torch.Tensor) -> None:
        """As `compact_kv` with paths of `nodes` and `counts`; all three int64 and contiguous.

        On a GPU the library alone checks them, for shape and dtype and not for what they hold.
        """
        if self._kernels is None:
            _cpu(self._layers, nodes, counts, windows)
            return
        if may_read(nodes.device):
            _check_paths(self._layers[0].shape[0], nodes, counts, windows)
        self._kernels.compact_kv(nodes, counts, windows, self._pointers, self._row_bytes)


def _checked_layers(pools: Sequence[torch.Tensor] | torch.Tensor) -> list[torch.Tensor]:
    """A list of pools that can be moved in. Raises TypeError or ValueError that names one."""
    layers = list(pools.unbind(0)) if isinstance(pools, torch.Tensor) else list(pools)
    if not 1 <= len(layers) <= MAX_LAYERS:
        raise ValueError(f"pools: expected 1..{MAX_LAYERS} layers, got {len(layers)}")
    first = layers[0]
    for layer, pool in enumerate(layers):
        if not isinstance(pool, torch.Tensor):
            raise TypeError(f"pools[{layer}]: expected a tensor, got {type(pool).__name__}")
        if pool.dim() < 2:
            raise ValueError(f"pools[{layer}]: expected shape [slots, ...], got {list(pool.shape)}")
        check_tensor(
            f"pools[{layer}]",
            pool,
            tuple(first.shape),
            (first.dtype,),
            like=("pools", first.device),
        )
    row_bytes = first[0].numel() * first.element_size() if first.shape[0] else _VECTOR_BYTES
    if first.is_cuda and row_bytes % _VECTOR_BYTES:
        raise ValueError(
            f"pools: expected rows of a multiple of {_VECTOR_BYTES} bytes on a GPU, "
            f"got {row_bytes} bytes of {short(first.dtype)}"
        )
    return layers


def _rows_of(layers: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Where each pool begins, int64 on the host, and a row's bytes. Raises ValueError."""
    row_bytes = layers[0][:1].numel() * layers[0].element_size()
    pointers = torch.tensor([pool.data_ptr() for pool in layers], dtype=torch.int64)
    # Tensors of the host, so nothing waits.
    if layers[0].is_cuda and bool((pointers % _VECTOR_BYTES).any()):
        raise ValueError(f"pools: expected addresses that are multiples of {_VECTOR_BYTES}")
    return pointers, row_bytes


def _cuda(
    pools: list[torch.Tensor], nodes: torch.Tensor, counts: torch.Tensor, windows: torch.Tensor
) -> None:
    if may_read(nodes.device):
        _check_paths(pools[0].shape[0], nodes, counts, windows)
    pointers, row_bytes = _rows_of(pools)
    tree_kernels().compact_kv(nodes, counts, windows, pointers, row_bytes)


def _cpu(
    pools: list[torch.Tensor], nodes: torch.Tensor, counts: torch.Tensor, windows: torch.Tensor
) -> None:
    _check_paths(pools[0].shape[0], nodes, counts, windows)
    place = torch.arange(nodes.shape[1])
    moved = (place < counts[:, None]) & (nodes != place)
    destination = windows[:, : nodes.shape[1]][moved[:, : windows.shape[1]]]
    source = windows.gather(1, nodes.clamp(min=0))[moved]
    for pool in pools:
        # Every row is read before any is written: a destination may be another move's source.
        pool[destination] = pool[source]


def _check_paths(
    num_slots: int, nodes: torch.Tensor, counts: torch.Tensor, windows: torch.Tensor
) -> None:
    """Raises ValueError where a path does not rise from 0 or a slot is no pool row. Reads all."""
    for request, (path, count, window) in enumerate(
        zip(nodes.tolist(), counts.tolist(), windows.tolist(), strict=True)
    ):
        if not 0 <= count <= len(path):
            raise ValueError(
                f"paths.counts[{request}]: expected 0..{len(path)}, the width of paths.nodes, "
                f"got {count}"
            )
        walked = path[:count]
        rises = walked == sorted(set(walked)) and walked[:1] in ([], [0])
        if not rises or (walked and walked[-1] >= len(window)):
            raise ValueError(
                f"paths.nodes[{request}]: expected nodes below {len(window)} that rise from 0, "
                f"got {walked}"
            )
        for slot in (*window[:count], *(window[node] for node in walked)):
            if not 0 <= slot < num_slots:
                raise ValueError(
                    f"windows[{request}]: expected slots in 0..{num_slots - 1}, the rows of a "
                    f"pool, got {slot}"
                )


register(
    "compact_kv(Tensor(a!)[] pools, Tensor nodes, Tensor counts, Tensor windows) -> ()",
    cpu=_cpu,
    cuda=_cuda,
)
