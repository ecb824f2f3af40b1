"""The engine of ``_core`` with the transports of tensors."""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch._C._distributed_c10d import Backend, Work
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from hvd_order._core import Agreement as Agreement
from hvd_order._core import AgreementKind as AgreementKind
from hvd_order._core import ControlChannel as ControlChannel
from hvd_order._core import Engine as Engine
from hvd_order._core import LoopbackWorld as LoopbackWorld
from hvd_order._core import OpGradientQueue as OpGradientQueue
from hvd_order._core import Policy as Policy
from hvd_order._core import Scheduler as Scheduler
from hvd_order._core import Slice as Slice
from hvd_order._core import SliceEvent as SliceEvent
from hvd_order._core import SliceLayout as SliceLayout
from hvd_order._core import Transport as Transport
from hvd_order._core import UpdateRule as UpdateRule
from hvd_order._core import engine_api as engine_api
from hvd_order._core import sum_elements as sum_elements

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

def watch_group(group: ProcessGroup) -> None:
    """Has :func:`keep_watched_groups` keep the group if it still exists then."""

def keep_watched_groups() -> None:
    """Has no group that is watched be destroyed any more, whoever holds it."""

def wait_for(work: Work, seconds: float) -> None:
    """Waits for a transfer; a daemon thread that still waits when Python ends stays there.

    Args:
        seconds: 0: as long as its process group allows.

    Raises:
        RuntimeError: the transfer failed, or is not done in time.
    """

@final
class GradientCopier:
    """Copies large gradients of the CPU beside the training."""

    def __init__(self) -> None: ...
    def release(self) -> None:
        """Frees the gradients that have been copied."""

class GradientEntry:
    """The part of an entry that hooks need."""

    wire: torch.Tensor
    gradient: torch.Tensor
    @property
    def in_place(self) -> bool: ...
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
        copier: GradientCopier,
        scale: float,
        in_flight_class: type[torch.Tensor],
        guard_attribute: str,
    ) -> None: ...
    def hook(
        self,
        entry: GradientEntry,
        guard: Callable[[], object],
        otherwise: Callable[[torch.Tensor], None],
    ) -> Callable[[torch.Tensor], None]:
        """A hook that sends the ordinary gradient and calls ``otherwise`` for any other."""

    def send(self, entry: GradientEntry, gradient: torch.Tensor) -> bool:
        """Does ``entry.wire = scale * gradient`` and marks the gradient ready, now or soon.

        Returns False when the two differ in kind; nothing was done then.
        """

def tensor_ready(
    engine: Engine, transport: TorchTransport, model: int, tensor: int, gradient: torch.Tensor
) -> None:
    """Marks a gradient ready once its device has computed it."""

@final
class Places:
    """Where gradients are.

    KEPT: where they were put. LEFT: some have been given other memory. UNFIT: parameters are of
    another type or device than their places.
    """

    KEPT: Places
    LEFT: Places
    UNFIT: Places
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

def place_in(
    buffer: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], offset: int
) -> torch.Tensor:
    """A tensor in a buffer, at an offset in elements, with a storage of its own.

    Whoever gives it other memory (``share_memory()``) leaves the buffer as it is.
    """

def places(entries: Sequence[GradientEntry], parameters: Sequence[torch.Tensor]) -> Places:
    """Where all gradients are."""

def hooked(parameters: Sequence[torch.Tensor]) -> list[bool]:
    """For each parameter, whether anything is called when its gradient has come."""

@final
class Reach:
    """Who reaches a tensor's memory.

    ALONE: the tensor. SHARED: another tensor, array or storage as well. HELD: C++ holds the tensor
    itself. FOREIGN: whoever has allocated the memory, which torch has not.
    """

    ALONE: Reach
    SHARED: Reach
    HELD: Reach
    FOREIGN: Reach
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

def reach(parameters: Sequence[torch.Tensor]) -> list[Reach]:
    """Who reaches the memory of each parameter."""

def state_private(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> list[bool]:
    """For each parameter, whether nobody but the optimizer has what it keeps about it."""

@final
class StorageLock:
    """Has every access to a tensor's memory raise the message, until it is opened or dropped."""

    def __init__(self, tensor: torch.Tensor, message: str) -> None: ...
    def open(self) -> None:
        """Allows access again. Harmless on one that is open."""

def torch_function(before: Callable[[Any, Any, Any], None]) -> Callable[..., Any]:
    """A ``__torch_function__`` that calls ``before(func, args, kwargs)``, then the function.

    It has no Python frame while the function runs: ``torch.jit.trace`` notes the innermost one.
    """

@final
class CleanRoom:
    """A context in which torch finds this thread as new: no trace, no modes, no hooks."""

    def __init__(self) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...

class Connection:
    """Carries frames between a parameter server and another."""

@final
class PairConnection(Connection):
    """A connection over a Gloo group of two members."""

    def __init__(self, group: Backend, sends: int, receives: int, largest_payload: int) -> None:
        """Takes the group for itself.

        Args:
            sends: number in the frames of this end; the two ends know it and nobody else.
            receives: the same in those of the other end.
            largest_payload: bytes; both ends say the same.
        """

@final
class ServerCore:
    """A parameter server: frames come in through connections, answers go out.

    A peer is "worker", "server" or "observer", and its number.
    """

    def __init__(
        self,
        *,
        server: int,
        workers: int,
        synchronous: bool,
        staleness: int | None,
        delay_bound: int | None,
        aggregates: bool,
        ordered: bool,
        divergence_bound: float,
        log: Callable[[str], None],
        on_control: Callable[[tuple[str, int], str], None],
        on_gone: Callable[[tuple[str, int], str], None],
        was_away: Callable[[], bool],
    ) -> None:
        """Has no connections yet. The callbacks come on threads of connections.

        Args:
            staleness: rounds that a worker may be ahead of the slowest; None: any.
            delay_bound: updates that may be made between what a worker has read and its own; what
                would come later is not wanted. None: any.
            aggregates: with such a bound, and where it is faster, other servers add several
                workers' updates up.
            ordered: answers go most urgent first; else as they became ready.
            divergence_bound: sum of norms that a replica may lag by; 0: answers wait for it.
            log: takes a line about a frame that was refused.
            on_control: a peer has sent a text.
            on_gone: a peer is gone; why is empty if it said so before.
            was_away: asked when a worker or server is lost: whether this process did not run for
                long until lately. Then the others have given it up, and it does nothing more.
        """

    def connect(self, kind: str, number: int, connection: Connection) -> None:
        """Takes up a connection and starts it."""

    def send_control(self, kind: str, number: int, text: str) -> None:
        """Sends a text; dropped if the peer is gone."""

    def peers(self) -> list[tuple[str, int]]: ...
    def audit(self) -> list[tuple[int, int, int, bool, int, int]]:
        """Slices held: model, layout, slice, whether it owns it, version, CRC-32C of the value."""

    def late_workers(self) -> set[int]:
        """The workers that slices wait for."""

    def has_failed(self) -> bool:
        """Whether a worker is lost or has given up, so that none can go on."""

    def stop(self) -> None:
        """Ends all connections."""

@final
class ServerTransport(TorchTransport):
    """Carries slices to parameter servers, and the sums or parameters that they answer back.

    Places are the owner and the replica of each slice; -1: no replica.
    """

    def __init__(
        self,
        *,
        rank: int,
        workers: int,
        ordered: bool,
        asks_first: bool,
        on_lost: Callable[[int, str], None],
        on_control: Callable[[int, str], None],
    ) -> None:
        """Has no connections yet. The callbacks come on threads of connections.

        Args:
            ordered: the most urgent slice goes first; else the first that is ready.
            asks_first: servers bound the delay of updates.
            on_lost: a server is gone, and why.
            on_control: a server has sent a text.
        """

    def connect(self, server: int, connection: Connection) -> None:
        """Takes up a connection and tells the server of all models."""

    def servers(self) -> list[int]: ...
    def give_up(self, servers: list[int], why: str) -> None:
        """Counts these as lost, all at once, and closes their connections.

        Worker 0 tells the others.
        """

    def frames_from(self) -> dict[int, int]:
        """How many frames have come, by server."""

    def waits(self) -> bool:
        """Whether something is under way to some server."""

    def send_control(self, server: int, text: str) -> None:
        """Sends a text; dropped if the server is gone."""

    def prepare(
        self, model: int, places: list[tuple[int, int]], parameters: list[tuple[int, int]]
    ) -> None:
        """Says what the next ``set_buffers`` of the model is for.

        Args:
            parameters: by tensor, elements and group of its rule; empty: servers only sum.
        """

    def begin_with_buffers(self, model: int, part: int, parts: int, steps_before: int) -> None:
        """Worker 0: the buffers hold a part of the state to begin with.

        Args:
            part: 1 for parameters, 2 and up for the optimizer's moments.
            parts: their number and one.
            steps_before: that the optimizer has taken.
        """

    def set_rules(self, model: int, rules: list[UpdateRule]) -> None:
        """Worker 0: the rules for all pushes that come, one for each group."""

    def set_map(self, model: int, places: list[tuple[int, int]]) -> None:
        """Worker 0: who holds what from now on."""

    def places(self, model: int) -> list[tuple[int, int]]: ...
    def pull(self, model: int, part: int, timeout_s: float) -> list[int]:
        """Fills the idle buffers with what the servers have.

        Args:
            part: as in ``begin_with_buffers``.

        Returns:
            The slices in the order in which they came.

        Raises:
            TransferTimeout, PeerLost: not all came.
        """

    def steps(self, model: int) -> int:
        """Updates that the last answer had seen, with those before the registration."""

    def take_figures(self) -> list[tuple[int, int, float]]:
        """Since the last call: server, bytes of answers, seconds with something under way."""

    def dropped(self) -> tuple[int, int]:
        """Updates of slices that came too late and were not sent, and their bytes."""

    def aggregated(self) -> tuple[int, int]:
        """Updates of slices sent to be added up with others', and their bytes."""

    def close(self) -> None:
        """Takes leave of all servers; what is under way fails."""
