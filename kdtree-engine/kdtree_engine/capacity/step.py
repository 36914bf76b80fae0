"""One step of decoding: all components, its seconds, and the tokens a second that follow.

Components follow one another; the host's share too, as in the steps that were measured, which grew
with the attention although the host took most of them.
"""

from __future__ import annotations

import dataclasses
import math

from kdtree_engine.capacity.attention import AttentionFit, Regime, attention_parts
from kdtree_engine.capacity.collectives import collective_parts
from kdtree_engine.capacity.dense import END_BYTES, REACH, SMALL_KERNELS, head, parts_of, products
from kdtree_engine.capacity.drafting import TREE, Drafter, drafter_parts
from kdtree_engine.capacity.experts import expert_parts
from kdtree_engine.capacity.memory import USABLE, Memory, memory_of
from kdtree_engine.capacity.parts import Basis, Bound, Component, by_bound, weakest
from kdtree_engine.capacity.shapes import ModelShape
from kdtree_engine.errors import ConfigError
from kdtree_engine.gpus import Gpu, Link

__all__ = [
    "Host",
    "Load",
    "Service",
    "Step",
    "components_without_host",
    "decode_step",
    "memory_for",
]


_MEASURED_TOGETHER = ("host", "dense", "attention")


@dataclasses.dataclass(frozen=True)
class Host:
    """Seconds of a step that belong to the host: scheduling, n-gram drafting, sampling.

    trees: of a step that verifies trees. plain: of one token a request. device, shape, nodes: of
    the service with trees that was measured, one request on one rank in bf16 with an n-gram
    drafter. contexts: the shortest and the longest of those steps. For any other service, and
    beyond these contexts, they are predictions.
    """

    trees: float
    plain: float
    device: str
    shape: ModelShape
    nodes: int
    contexts: tuple[int, int]

    def measured(self, service: Service, load: Load) -> bool:
        """Whether that service and load are the ones whose steps were measured."""
        there, here = (
            dataclasses.replace(one, name="", positions=0) for one in (self.shape, service.shape)
        )
        return (
            there == here
            and service.gpu.device == self.device
            and service.gpus == service.ranks == load.batch == 1
            and load.nodes == self.nodes
            and self.contexts[0] <= load.context <= self.contexts[1]
            and service.drafter is None
            and service.draft_seconds is None
            and (service.dense_bytes, service.reach) == (2.0, REACH)
        )


@dataclasses.dataclass(frozen=True)
class Service:
    """A model on GPUs. ranks: of tensor parallelism, one replica's. gpus: of all replicas.

    drafter: None is the n-gram drafter, or none at all where a tree has one node.
    draft_seconds: of drafting, where the caller knows it.
    """

    shape: ModelShape
    gpu: Gpu
    link: Link
    gpus: int
    ranks: int
    expert_bytes: float
    dense_bytes: float
    placement: str = "tp"
    drafter: Drafter | None = None
    draft_seconds: float | None = None
    reach: float = REACH
    usable: float = USABLE

    def __post_init__(self) -> None:
        for what, count in (("GPUs", self.gpus), ("heads", self.shape.heads)):
            if count % self.ranks:
                raise ConfigError(f"{count} {what} are not to be divided among {self.ranks} ranks")
        if self.placement == "ep" and self.shape.experts % self.ranks:
            raise ConfigError(
                f"{self.shape.experts} experts are not to be divided among {self.ranks} ranks"
            )

    @property
    def replicas(self) -> int:
        return self.gpus // self.ranks


@dataclasses.dataclass(frozen=True)
class Load:
    """What is asked of a service.

    batch: requests at once, on all replicas. nodes: of a request's tree, the root included; 1: no
    speculation. accepted: tokens that a verification gives.
    """

    context: int
    batch: int
    nodes: int
    accepted: float


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of the fullest replica. batch: of all replicas."""

    load: Load
    components: tuple[Component, ...]
    memory: Memory

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.components)

    @property
    def tokens_per_second(self) -> float:
        """Of all requests together."""
        return self.load.accepted * self.load.batch / self.seconds

    @property
    def basis(self) -> Basis:
        return weakest(self.components)

    @property
    def rests_on_measurement(self) -> float:
        """Share of the step's seconds that are calibrated."""
        sure = sum(one.seconds for one in self.components if one.basis == "calibrated")
        return sure / self.seconds

    @property
    def largest(self) -> Component:
        return max(self.components, key=lambda one: one.seconds)

    @property
    def shares(self) -> dict[Bound, float]:
        """Of the step's seconds, by what bounds them; together 1."""
        return {bound: one / self.seconds for bound, one in by_bound(self.components).items()}


def decode_step(service: Service, load: Load, fit: AttentionFit, host: Host) -> Step:
    """fit: of the architecture of the service's GPU."""
    seconds = host.trees if load.nodes > 1 else host.plain
    parts = (
        *components_without_host(service, load, fit),
        Component("host", {"latency": seconds}, "prediction"),
    )
    if host.measured(service, load):
        # The host's share was taken with the others in place: it has what they are off.
        parts = tuple(
            dataclasses.replace(one, basis="calibrated") if one.name in _MEASURED_TOGETHER else one
            for one in parts
        )
    return Step(load, parts, memory_for(service, load))


def memory_for(service: Service, load: Load) -> Memory:
    """What the fullest replica holds; a drafter too, where there are trees."""
    return memory_of(
        service.shape,
        service.gpu,
        context=load.context,
        batch=math.ceil(load.batch / service.replicas),
        nodes=load.nodes,
        ranks=service.ranks,
        expert_bytes=service.expert_bytes,
        dense_bytes=service.dense_bytes,
        drafter=service.drafter if load.nodes > 1 else None,
        usable=service.usable,
    )


def components_without_host(
    service: Service, load: Load, fit: AttentionFit
) -> tuple[Component, ...]:
    """What a step does on its GPUs; what it is measured for is the host's share."""
    requests = math.ceil(load.batch / service.replicas)
    shape, gpu, ranks = service.shape, service.gpu, service.ranks
    tokens = requests * load.nodes
    of_products = parts_of(
        products(shape),
        gpu,
        tokens=tokens,
        ranks=ranks,
        bytes_per_weight=service.dense_bytes,
        reach=service.reach,
        small_kernels=SMALL_KERNELS * shape.layers,
    )
    # Logits are made of every node of a tree.
    of_head = parts_of(
        (head(shape),),
        gpu,
        tokens=tokens,
        ranks=ranks,
        bytes_per_weight=END_BYTES,
        reach=service.reach,
    )
    dense = {bound: of_products[bound] + of_head[bound] for bound in of_products}
    experts = expert_parts(
        shape,
        gpu,
        batch=requests,
        nodes=load.nodes,
        ranks=ranks,
        placement=service.placement,
        bytes_per_weight=service.expert_bytes,
        reach=service.reach,
    )
    link = collective_parts(shape, service.link, tokens=tokens, ranks=ranks)
    return (
        _attention(service, fit, Regime(requests, shape.heads // ranks, load.nodes, load.context)),
        Component("dense", dense, "prediction"),
        Component("experts", experts, "prediction"),
        Component("all-reduce", link, "prediction"),
        *_drafting(service, load, requests),
    )


def _attention(service: Service, fit: AttentionFit, regime: Regime) -> Component:
    gpu, layers = service.gpu, service.shape.layers
    if fit.architecture != gpu.architecture:
        raise ConfigError(f"a fit of {fit.architecture} is none of {gpu.architecture}")
    fixed, read, product = attention_parts(fit, gpu, regime)
    bound: Bound = "bytes" if read >= product else "flops"
    basis: Basis = "prediction"
    if fit.device == gpu.device:
        basis = "calibrated" if fit.covers(regime) else "extrapolated"
    parts: dict[Bound, float] = {"latency": layers * fixed, bound: layers * max(read, product)}
    return Component("attention", parts, basis)


def _drafting(service: Service, load: Load, requests: int) -> tuple[Component, ...]:
    """The drafter's pass, and the tree's operations on the GPU. An n-gram drafter has neither."""
    if load.nodes == 1:
        return ()
    if service.draft_seconds is not None:
        return (Component("drafting", {"latency": service.draft_seconds}, "given"),)
    if service.drafter is None:
        return ()
    parts = drafter_parts(
        service.drafter,
        service.shape,
        service.gpu,
        service.link,
        context=load.context,
        batch=requests,
        ranks=service.ranks,
        reach=service.reach,
    )
    return (Component("drafting", parts, "prediction"), Component("tree", TREE, "prediction"))
