"""Which library carries the gradients of an engine, and what the engine has to know of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hvd_order._native import _torch as native
from hvd_order.base.config import Comm
from hvd_order.base.wings import Registry
from hvd_order.engine import horovod_library
from hvd_order.engine.job.job import Job

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

__all__: list[str] = []


class TransportPeer:
    """What an engine tells whoever is behind its transport; nobody, here."""

    def prepare(
        self,
        model: int,
        layout: native.SliceLayout,
        buffers: Sequence[torch.Tensor],
        parameters: Sequence[tuple[int, int]],
    ) -> None:
        """Prepares for a model that is about to be registered. Collective.

        Args:
            model: id of the model.
            layout, buffers: of its gradients.
            parameters: (elements, group) of each tensor, where the peer updates.
        """

    def registered(self, model: int) -> None:
        """Handles that the transport has the buffers of a prepared model."""

    def forget(self, model: int) -> None:
        """Handles the end of a model."""

    def step_taken(self) -> None:
        """Handles the end of an optimizer's step."""

    def fails_by(self, fail: Callable[[str], None]) -> None:
        """Takes what ends the job when the peer is lost."""

    def close(self) -> None:
        """Says that this rank leaves."""


@dataclass(frozen=True)
class TransportChoice:
    """A transport, and how an engine has to use it.

    Attributes:
        comm: who sums.
        peer: behind the transport.
        updates: the peer may answer with updated parameters.
        in_flight: slices that keep the transport busy.
        independent: the engine issues slices without the other ranks.
        in_step: ranks take their steps together.
        pushers: ranks that send the same slice to one place at the same time.
        credits: places that slices go to, over connections apart from each other: each has a credit
            of its own. None: the transport itself limits what is in flight.
    """

    transport: native.TorchTransport
    comm: Comm = "allreduce"
    peer: TransportPeer = field(default_factory=TransportPeer)
    updates: bool = False
    in_flight: int = 2
    independent: bool = False
    in_step: bool = True
    pushers: int = 1
    credits: int | None = 1

    @property
    def ranks_sum(self) -> bool:
        """Whether the ranks sum by themselves, over one network, in an order of their own."""
        return self.comm == "allreduce"


# By `Comm`; of a job and a group that carries objects of all ranks. Collective.
CHOICES: Registry[Callable[[Job, dist.ProcessGroup], TransportChoice]] = Registry("transport")


class _HorovodBuffers(TransportPeer):
    """Refuses buffers that Horovod cannot sum."""

    def prepare(
        self,
        model: int,
        layout: native.SliceLayout,
        buffers: Sequence[torch.Tensor],
        parameters: Sequence[tuple[int, int]],
    ) -> None:
        """See `TransportPeer`."""
        del model, layout, parameters
        horovod_library.check(buffers)


def choose_transport(
    job: Job, comm: Comm, groups: dict[str, dist.ProcessGroup], everybody: bool
) -> TransportChoice:
    """Chooses and makes the transport of an engine. Collective among its ranks.

    Args:
        job: the current job.
        comm: who sums.
        groups: of the engine's ranks; see `EngineHost`.
        everybody: these are all ranks of the job. A smaller set has torch.distributed: Horovod and
            whatever sums in place of the ranks exist once, for all ranks.
    """
    objects = groups["registration"]
    if everybody and comm != "allreduce":
        return CHOICES.find(comm)(job, objects)
    if everybody and horovod_library.chosen(job, objects):
        path = horovod_library.start(job, job.patience, objects)
        transport = native.HorovodTransport(
            str(path), gpu_on_host=not horovod_library.has_gpu(path)
        )
        # Horovod accepts new work once a cycle: with two in flight, it would accept one slice at a
        # time.
        return TransportChoice(transport, peer=_HorovodBuffers(), in_flight=3)
    return TransportChoice(native.C10dTransport(groups["gradients"]))
