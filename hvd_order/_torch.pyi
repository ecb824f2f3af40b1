"""The engine of ``_core`` with the transports of tensors."""

from collections.abc import Callable
from typing import final

import torch
from torch.distributed import ProcessGroup

from hvd_order._core import Agreement as Agreement
from hvd_order._core import AgreementKind as AgreementKind
from hvd_order._core import ControlChannel as ControlChannel
from hvd_order._core import Engine as Engine
from hvd_order._core import Handover as Handover
from hvd_order._core import LoopbackWorld as LoopbackWorld
from hvd_order._core import Policy as Policy
from hvd_order._core import Scheduler as Scheduler
from hvd_order._core import Slice as Slice
from hvd_order._core import SliceEvent as SliceEvent
from hvd_order._core import SliceLayout as SliceLayout
from hvd_order._core import Transport as Transport
from hvd_order._core import engine_api as engine_api

class TorchTransport(Transport):
    """Carries slices of tensors."""

    def set_buffers(self, model: int, buffers: list[torch.Tensor], layout: SliceLayout) -> None: ...
    def remove_buffers(self, model: int) -> None: ...
    def time_stream(self, pieces: list[torch.Tensor], in_flight: int) -> float:
        """Sums the pieces over all ranks, so many at a time; the seconds it took."""

@final
class C10dTransport(TorchTransport):
    """Carries slices over a process group of any back end."""

    def __init__(self, group: ProcessGroup) -> None: ...

@final
class HorovodTransport(TorchTransport):
    """Carries slices over Horovod's engine, which the caller has initialized."""

    def __init__(self, library: str, gpu_on_host: bool) -> None: ...

@final
class C10dControl(ControlChannel):
    """Control messages over a Gloo process group that nobody else uses."""

    def __init__(self, group: ProcessGroup, rank: int, size: int) -> None: ...

@final
class C10dCopier:
    """Copies large gradients of the CPU beside the training."""

    def __init__(self) -> None: ...
    def release(self) -> None:
        """Frees the gradients that have been copied."""

class GradientSlot:
    """The part of a slot that hooks need."""

    wire: torch.Tensor
    gradient: torch.Tensor
    tensor: int
    passes_to_go: int
    sent: bool
    late: bool
    ready_s: float

    def __init__(self) -> None: ...

@final
class GradientSender:
    """Sends the gradients of one optimizer.

    Attributes:
        model: id in the engine.
        in_backward: whether a backward pass runs and its first gradient has come.
    """

    model: int
    in_backward: bool

    def __init__(
        self,
        engine: Engine,
        transport: TorchTransport,
        copier: C10dCopier,
        scale: float,
        in_flight_class: type[torch.Tensor],
        guard_attribute: str,
    ) -> None: ...
    def hook(
        self,
        slot: GradientSlot,
        guard: Callable[[], object],
        otherwise: Callable[[torch.Tensor], None],
    ) -> Callable[[torch.Tensor], None]:
        """A hook that sends the ordinary gradient and calls ``otherwise`` for any other."""

    def send(self, slot: GradientSlot, gradient: torch.Tensor) -> bool:
        """Does ``slot.wire = scale * gradient`` and marks the gradient ready, now or soon.

        Returns False when the two differ in kind; nothing was done then.
        """

def tensor_ready(
    engine: Engine, transport: TorchTransport, model: int, tensor: int, gradient: torch.Tensor
) -> None:
    """Marks a gradient ready once its device has computed it."""
