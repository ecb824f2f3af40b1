"""The engine, with transports for tensors."""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch._C._distributed_c10d import Backend, Work
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from hvd_order._native._core import Agreement as Agreement
from hvd_order._native._core import AgreementKind as AgreementKind
from hvd_order._native._core import Operation as Operation
from hvd_order._native._core import Policy as Policy
from hvd_order._native._core import Scheduler as Scheduler
from hvd_order._native._core import Slice as Slice
from hvd_order._native._core import SliceLayout as SliceLayout
from hvd_order._native._core import UpdateRule as UpdateRule
from hvd_order._native._core import sum_elements as sum_elements

class Transport:
    """Adapter to an engine that moves bytes."""

class ControlChannel:
    """Carries messages between ranks, separately from the data."""

@final
class SliceEvent:
    """Timeline of one transfer of one slice, in nanoseconds of ``time.monotonic_ns``."""

    @property
    def model(self) -> int: ...
    @property
    def slice(self) -> int: ...
    @property
    def ready_ns(self) -> int: ...
    @property
    def issued_ns(self) -> int: ...
    @property
    def done_ns(self) -> int: ...

@final
class Stage:
    """How far the exchange of a tensor has come."""

    ENDED: Stage
    UNDER_WAY: Stage
    ENQUEUED: Stage
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...
    def __int__(self) -> int: ...

def set_activity(text: str) -> None:
    """Sets what this process waits in, for other ranks that wait for it; empty: nothing."""

@final
class Engine:
    """Sends ready slices in the agreed order, within the credit, and wakes the waiting callers.

    After the engine's first failure, every method raises it.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        agreement: AgreementKind,
        policy: Policy,
        credit_bytes: int,
        timeout_s: float,
        stall_warning_s: float,
        transport: Transport,
        control: ControlChannel | None,
    ) -> None: ...
    def add_model(self, model: int, layout: SliceLayout, plan: list[int] = ...) -> None: ...
    def remove_model(self, model: int) -> None: ...
    def retune(
        self, agreement: AgreementKind, policy: Policy, credit_bytes: int, lead_s: float
    ) -> None:
        """Changes the agreement, the policy and the credit; every rank, between two steps.

        Large slices start no later than ``lead_s`` before the first gradient.
        """

    def hold_plan(self) -> int | None:
        """Stops issuing slices of a planned order.

        Returns:
            The number of slices issued since the order was taken; None if no order is planned.
        """

    def end_plan(self, issued: int, agreement: AgreementKind, policy: Policy) -> None:
        """Follows the plan until so many slices have been issued, the most of any rank, then
        ``agreement``.
        """

    def take_counts(self) -> tuple[int, int]:
        """The agreement's messages, and the slices that were late in a planned order, since the
        last call.
        """

    def tensor_ready(self, model: int, tensor: int) -> None: ...
    def wait(self, model: int, tensor: int, stage: Stage = ...) -> None:
        """Blocks, without the GIL, until the tensor is summed over all ranks, or only until a
        stream of its device can wait for the sum (``Stage.ENQUEUED``).
        """

    def stages(self, model: int) -> bytes:
        """One byte for each tensor: the value of its `Stage`."""

    def ready_times(self, model: int) -> list[float]:
        """When each gradient was in its buffer the last time, in seconds of time.monotonic()."""

    def slice_times(self, model: int) -> bytes:
        """When each slice was last ready, issued and done: three int64 of time.monotonic_ns() for
        each; 0: not yet. Empty if the model has sent nothing.
        """

    def check(self) -> None: ...
    def check_stalled(self) -> None:
        """Same as :meth:`check`, for a wait that has run out of time: if gradients have stood still
        for nearly as long, the engine fails now, and names those that are missing.
        """

    def fail(self, reason: str, lost: bool = False) -> None:
        """Ends every transfer with a `HorovodInternalError`, or a `PeerLost` if `lost`; informs
        the other ranks.
        """

    def shutdown_barrier(self, timeout_s: float) -> list[int]:
        """Blocks, without the GIL, until no other rank needs this rank to finish its transfers.

        Returns:
            The ranks that still need this rank after the timeout. The list is empty if
            ``shutdown()`` takes nothing from any rank, or if the engine has failed.
        """

    def shutdown(self) -> None: ...
    def start_recording(self) -> None: ...
    def stop_recording(self) -> None: ...
    def take_events(self) -> list[SliceEvent]: ...

@final
class OpGradientQueue:
    """Queue in which operators post gradients and receive sums; its creator must close it.

    Attributes:
        number: identifies the queue to operators; never reused.
        posts: number of gradients posted.
        passes: number of posts of the gradient that was posted most often.
    """

    number: int
    posts: int
    passes: int

    def __init__(
        self,
        engine: Engine,
        model: int,
        places: list[tuple[str, int, int, int]],
        squares: int | None = None,
    ) -> None:
        """Opens the queue for a registered model.

        Args:
            places: name, TensorId, address and size in bytes of each gradient's part of its
                buffer, which must outlive `close`.
            squares: the tensor of the squares, if the layout is split; the queue sends them.
        """

    def stand_in(self, passes: int) -> None:
        """Posts zeros until every gradient has been posted `passes` times in all; does not wait."""

    def wait_for_pass(self, known: int) -> int | None:
        """Waits until there are more passes than `known`; returns their number, None after
        `close`.
        """

    def wait_until_idle(self) -> None:
        """Waits until all sums are back, including those of zeros, or until `close`."""

    def close(self) -> None:
        """Ends all exchanges in flight with an error."""

def engine_api() -> int:
    """Address of the C function table for operator libraries."""

class TorchTransport(Transport):
    """Carries slices of tensors."""

    def set_buffers(self, model: int, buffers: list[torch.Tensor], layout: SliceLayout) -> None: ...
    def remove_buffers(self, model: int) -> None: ...
    def set_formats(
        self, model: int, formats: Sequence[WireFormat], residuals: Sequence[torch.Tensor]
    ) -> None:
        """Sets how the sums of a model's gradients travel, by TensorId.

        Args:
            residuals: float32, as long as the buffers, by BufferId; or none.
        """

    def set_issues_ahead(self, ahead: bool) -> None:
        """Whether slices are issued before their device has computed the gradients."""

    def order_transfers_behind(self, device: torch.device) -> None:
        """Makes transfers issued from now on wait for the current stream's work so far."""

    def order_behind_sums(self, model: int, tensor: int, device: torch.device) -> None:
        """Makes the current stream wait for the sums of a tensor that are enqueued."""

    def time_stream(
        self, pieces: list[torch.Tensor], in_flight: int, operation: Operation = ...
    ) -> float:
        """Sends the pieces, `in_flight` at a time; returns the seconds that this took."""

def shard_of(elements: int, rank: int, size: int) -> tuple[int, int]:
    """First element and length of a rank's shard of a slice."""

@final
class WireFormat:
    """How elements of a gradient travel."""

    EXACT: WireFormat
    BFLOAT16: WireFormat
    FLOAT16: WireFormat
    INT8: WireFormat
    __members__: dict[str, WireFormat]
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

@final
class HalfForm:
    """How the halves of a split all-reduce travel."""

    COLLECTIVE: HalfForm
    EXCHANGE: HalfForm
    __members__: dict[str, HalfForm]
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

@final
class C10dTransport(TorchTransport):
    """Carries slices over a process group of any backend."""

    def __init__(self, group: ProcessGroup) -> None: ...
    def set_half_forms(self, reduce_scatter: HalfForm, all_gather: HalfForm) -> None: ...
    def set_hosts(
        self,
        hosts: Sequence[int],
        between: ProcessGroup,
        scatter: ProcessGroup | None,
        gather: ProcessGroup | None,
    ) -> None: ...

@final
class HorovodTransport(TorchTransport):
    """Carries slices over Horovod's engine, which the caller has initialized."""

    def __init__(self, library: str, gpu_on_host: bool) -> None: ...

@final
class C10dControl(ControlChannel):
    """Carries control messages over a Gloo process group that has no other user."""

    def __init__(self, group: ProcessGroup, rank: int, size: int) -> None: ...

@final
class TextStar:
    """Texts between rank 0 and every other rank over a Gloo process group that has no other user.

    Thread safety: all methods may be called from any thread, ``next`` from one.
    """

    def __init__(self, group: ProcessGroup, rank: int, size: int) -> None: ...
    def start(self) -> None: ...
    def send(self, to: int, text: bytes) -> None:
        """Posts a text. Raises PeerLost if the peer is known to be gone."""

    def next(self) -> tuple[int, str, bytes] | None:
        """Waits for (sender, kind, text); None once closed.

        The kind is "text", or with a reason in place of the text "lost" or "malformed", after which
        nothing follows from this rank.
        """

    def close(self) -> None:
        """Sends what is posted, for a short time, then ends."""

def watch_group(group: ProcessGroup) -> None:
    """Makes :func:`keep_watched_groups` keep the group if it still exists by then."""

def keep_watched_groups() -> None:
    """Prevents the destruction of every watched group, whichever object owns it."""

def wait_for(work: Work, seconds: float) -> None:
    """Waits for a transfer; a daemon thread that still waits when Python ends stays blocked.

    Args:
        seconds: 0: the timeout of the process group applies.

    Raises:
        RuntimeError: the transfer failed, or did not end in time.
    """

@final
class GradientCopier:
    """Copies large CPU gradients in parallel with the training."""

    def __init__(self) -> None: ...
    def release(self) -> None:
        """Frees the gradients that have been copied."""

class GradientEvent:
    """What moves a gradient to its next phase; gradient_phase.h has the table."""

    SEND: GradientEvent
    SUM: GradientEvent
    DEFER: GradientEvent
    UPDATE: GradientEvent
    BEGIN: GradientEvent
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class GradientEntry:
    """The part of a parameter entry that hooks need."""

    wire: torch.Tensor
    gradient: torch.Tensor
    @property
    def in_place(self) -> bool: ...
    @property
    def gradient_is_held(self) -> bool:
        """Whether anything beside the entry refers to `gradient` or shares its storage."""
    use_flag: torch.Tensor
    on_wire: bool
    casts: bool
    tensor: int
    passes_to_go: int
    late: bool
    @property
    def sent(self) -> bool:
        """Whether the gradient was passed to the engine in this step, or left out of its sums."""

    @property
    def summed(self) -> bool:
        """Whether the sum is there."""

    @property
    def update_pending(self) -> bool:
        """Whether step() has been called, and the parameter has not been updated."""

    def advance(self, event: GradientEvent) -> None:
        """Raises BrokenInvariant if the event cannot happen in the gradient's phase."""

    def begin_step(self, passes: int) -> None:
        """Prepares for the gradient of the next step."""
    @property
    def fresh(self) -> bool: ...
    def __init__(self) -> None: ...
    def name_locks(self, of_gradient: str, of_parameter: str) -> None:
        """Sets the messages of the errors that the locks raise."""

    def lock_gradient(self) -> None:
        """Makes every access to the memory of `gradient` raise, until it is unlocked."""

    def unlock_gradient(self) -> None:
        """Makes the memory of `gradient` accessible again."""

    def lock_parameter(self, parameter: torch.Tensor, state: Sequence[torch.Tensor]) -> None:
        """Makes every access to the memory of a parameter, and of some of its state, raise."""

    def unlock_parameter(self) -> None:
        """Makes what `lock_parameter` has locked accessible again."""

@final
class GradientSender:
    """Sends the gradients of one optimizer.

    Attributes:
        model: id in the engine.
        in_backward: whether a backward pass runs and has produced its first gradient.
        copies_beside: whether a thread of its own copies large CPU gradients.
    """

    model: int
    in_backward: bool
    copies_beside: bool

    def __init__(
        self,
        engine: Engine,
        transport: TorchTransport,
        copier: GradientCopier,
        scale: float,
        in_flight_class: type[torch.Tensor],
        guard_attribute: str,
    ) -> None: ...
    def begin_pass(
        self, entries: Sequence[GradientEntry], parameters: Sequence[torch.Tensor]
    ) -> None:
        """Begins a backward pass, which has produced its first gradient."""

    def hand_over(self, entry: GradientEntry) -> None:
        """Marks a gradient ready that is in its buffer; the last one of a step is held back."""

    def release(self) -> None:
        """Marks the gradient ready that is held back until its backward pass has ended."""

    def take_back(self) -> int | None:
        """Forgets the gradient that is held back, and returns its tensor."""

    def hook(
        self,
        entry: GradientEntry,
        guard: Callable[[], object],
        otherwise: Callable[[torch.Tensor], None],
    ) -> Callable[[torch.Tensor], None]:
        """A hook that sends an ordinary gradient and calls ``otherwise`` for any other."""

    def send(self, entry: GradientEntry, gradient: torch.Tensor) -> bool:
        """Does ``entry.wire = scale * gradient`` and marks the gradient ready, now or soon.

        Returns False, without any effect, when the two tensors differ in kind.
        """

@final
class StreamPoint:
    """A point in the work of the home streams."""

    def passed(self) -> bool:
        """Makes the current streams wait for the point; returns whether it had passed already."""

@final
class HomeStreams:
    """The streams on which sums are unpacked and parameters updated, one for each device."""

    def __init__(self, devices: Sequence[torch.device]) -> None: ...
    def follow(self) -> None:
        """Takes the current streams, behind what the streams before were given to do."""

    def wait_for_current(self, values: Sequence[torch.Tensor]) -> None:
        """Makes the home streams wait for what the current streams were given to do.

        Args:
            values: what the home streams will read; its memory is not used again before that.
        """

@final
class OnHomeStreams:
    """A context in which work runs on the home streams; outside, current streams wait for it."""

    def __init__(self, home: HomeStreams) -> None: ...
    def __enter__(self) -> OnHomeStreams: ...
    def __exit__(self, *error: object) -> None: ...
    def point(self) -> StreamPoint | None:
        """The point that the work has come to; None without devices."""

def register_kernels(device_type: str, kernels: object) -> None:
    """Sets the kernels of a type of device, for the rest of the process.

    Args:
        kernels: a capsule with a KernelTable (csrc/torch/cuda/kernel_table.h), such as
            ``hvd_order._native._cuda.kernels()``.

    Raises:
        InvalidUsage: they are of another version, or PyTorch does not tell the handles of streams.
    """

def has_kernels(device_type: str) -> bool:
    """Whether a type of device has kernels."""

def pack(from_: Sequence[torch.Tensor], to: Sequence[torch.Tensor], scale: float) -> None:
    """``to = cast(scale * from)``.

    Enqueued on the current streams, in one launch where the device has kernels.
    """

def unpack(
    from_: Sequence[torch.Tensor], to: Sequence[torch.Tensor], scale: float, squares: bool
) -> list[torch.Tensor | None]:
    """``to = scale * from``, for ``from`` of 16 bits. Enqueued on the current streams.

    Returns:
        For each a float64 tensor whose sum is the sum of squares of ``to``; None without
        ``squares``, or where the device has no kernels.
    """

def encode(
    values: torch.Tensor,
    format: WireFormat,
    residual: torch.Tensor | None = ...,
    writes_back: bool = ...,
) -> torch.Tensor:
    """A message, uint8, of contiguous values, on their device and its current stream.

    Args:
        residual: float32: added to the values, and then what the message lacks of both.
        writes_back: the values become those that receivers decode.
    """

def decode(
    messages: torch.Tensor, values: torch.Tensor, format: WireFormat, own: int = ...
) -> None:
    """``values`` = the sum of messages, decoded, in their order.

    Args:
        messages: uint8, a row each.
        own: the place of ``values`` themselves in the sum; -1: they have none.
    """

def read_use_flags(flags: Sequence[torch.Tensor]) -> list[float]:
    """The values of use flags whose sums have arrived; waits for no other work of the device."""

def mark_ready_when_computed(
    engine: Engine, transport: TorchTransport, model: int, tensor: int, gradient: torch.Tensor
) -> None:
    """Marks a gradient ready once its device has computed it."""

@final
class Places:
    """Where gradients are.

    KEPT: in their places. LEFT: some have other memory now. UNFIT: gradients have another shape,
    dtype or device than their places.
    """

    KEPT: Places
    LEFT: Places
    UNFIT: Places
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

def has_value_of(tensor: object, copy: object) -> bool:
    """Whether ``tensor`` is an ordinary 0-d tensor on the CPU, with dtype and bits of ``copy``."""

def own_copies(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """0-d tensors with the values of others, each with a storage of its own."""

def place_in(
    buffer: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], offset: int
) -> torch.Tensor:
    """A tensor in a buffer, at an offset in elements, with its own storage.

    Giving the tensor other memory (``share_memory()``) leaves the buffer unchanged.
    """

@final
class GradientReach:
    """Who reaches a gradient beside its parameter and the parameter's entry.

    ALONE: nobody. SHARED: something shares its memory; autograd itself does while it hands over a
    fresh gradient. HELD: the program has the tensor, or has allocated its memory.
    """

    ALONE: GradientReach
    SHARED: GradientReach
    HELD: GradientReach
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

def gradient_reach(entry: GradientEntry, parameter: torch.Tensor) -> GradientReach:
    """Who reaches the gradient of a parameter beside the parameter and its entry."""

def move_out(gradient: torch.Tensor) -> None:
    """Gives a tensor of :func:`place_in`, and all that share its storage, memory of their own."""

def find_given_up(entries: Sequence[GradientEntry]) -> int:
    """The first of the entries whose sum lacks a rank that has given up the step, or -1.

    Looks at gradients of the CPU only.
    """

def advance(entries: Sequence[GradientEntry], event: GradientEvent) -> None:
    """Advances the phases of gradients."""

def unlock_gradients(entries: Sequence[GradientEntry]) -> None:
    """Same as ``unlock_gradient`` of each."""

def places(entries: Sequence[GradientEntry], parameters: Sequence[torch.Tensor]) -> Places:
    """Where all gradients are."""

def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The dtype of a parameter's gradients: its own, or what ``grad_dtype`` says."""

def hooked(parameters: Sequence[torch.Tensor]) -> list[bool]:
    """For each parameter, whether a hook runs when its gradient has arrived."""

@final
class Reach:
    """What else reaches a tensor's memory.

    SHARED: another tensor, array or storage. HELD: C++ code holds the tensor itself. FOREIGN: the
    memory was allocated outside of torch, so its allocator may reach it.
    """

    SHARED: Reach
    HELD: Reach
    FOREIGN: Reach
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

def reached(parameters: Sequence[torch.Tensor]) -> dict[int, Reach]:
    """The places of parameters whose memory something else reaches, and what that is."""

def find_kept(
    objects: list[Any], parameters: Sequence[torch.Tensor], guarded: type
) -> list[tuple[int, Any, str | int]]:
    """Where dicts, lists and tuples among ``objects`` have plain tensors of the parameters' memory.

    Args:
        guarded: the class that a plain tensor has while its readers are guarded.

    Returns:
        The place of a parameter, the container and the tensor's key or place there.
    """

def kept_tensors(
    parameter: torch.Tensor,
    containers: list[Any],
    positions: list[tuple[int, str | int]],
    guarded: type,
) -> list[torch.Tensor] | None:
    """The tensors at these positions, (place of the container, key), of the parameter's memory.

    Returns:
        None if something else reaches the memory as well.
    """

def held_alone(objects: list[Any]) -> list[bool]:
    """Of each object of a list, whether only the list holds it."""

def held_states(
    optimizer: Optimizer, parameters: Sequence[torch.Tensor], guarded: type
) -> dict[int, dict[str, torch.Tensor] | None]:
    """The state of parameters, by their places, that the program can read without the optimizer.

    Returns:
        A dict of plain tensors that nobody else has; None: the program may read what cannot be
        guarded.
    """

def torch_function(
    before: Callable[[Any, Any, Any, Any], tuple[Any] | bool | None],
) -> Callable[..., Any]:
    """A ``__torch_function__`` that calls ``before(func, types, args, kwargs)``, then the function.

    No Python frame of it exists while the function runs, because ``torch.jit.trace`` records the
    innermost one.

    Args:
        before: None: the function is called with the ``__torch_function__`` of all classes among
            its arguments; False: with none. A tuple has the result instead.
    """

@final
class CleanRoom:
    """A context in which torch treats this thread as a new one: no trace, no modes, no hooks."""

    def __init__(self) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...

class Connection:
    """Carries frames between a parameter server and another process."""

@final
class PairConnection(Connection):
    """A connection over a Gloo group of two members."""

    def __init__(self, group: Backend, sends: int, receives: int, largest_payload: int) -> None:
        """Takes exclusive use of the group.

        Args:
            sends: number in the frames that this end sends; secret between the two ends.
            receives: number in the frames that the other end sends.
            largest_payload: bytes; the same at both ends.
        """

    def record(self, on: bool) -> None:
        """Records the times of received pushes and answers, or stops."""

    def take_received(self) -> list[tuple[int, int, int, int, int, int, int]]:
        """Times recorded since the last call, of each push or answer.

        Returns:
            Its bytes; when the frame before it was complete, when the receiving thread was free for
            this one, had its header, had its payload and had handled it (nanoseconds of
            ``time.monotonic_ns``); the thread's number.
        """

@final
class ServerCore:
    """A parameter server: receives frames and sends answers over connections.

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
        """Starts without connections. The callbacks run on connection threads.

        Args:
            staleness: rounds that a worker may be ahead of the slowest; None: any.
            delay_bound: updates that may be applied between a worker's read and its own update; a
                later update is dropped. None: any.
            aggregates: with such a bound, other servers add up the updates of several workers
                where this is faster.
            ordered: the most urgent answer is sent first; else answers are sent in the order in
                which they became ready.
            divergence_bound: sum of norms by which a replica may lag; 0: answers wait for the
                replica.
            log: receives a line about each refused frame.
            on_control: a peer has sent a text.
            on_gone: a peer is gone; the reason is empty if the peer announced its end.
            was_away: called when a worker or server is lost: whether this process was suspended
                for long until recently. If so, the other processes have given it up, and it stops
                all work.
        """

    def connect(self, kind: str, number: int, connection: Connection) -> None:
        """Adds a connection and starts it."""

    def send_control(self, kind: str, number: int, text: str) -> None:
        """Sends a text; dropped if the peer is gone."""

    def peers(self) -> list[tuple[str, int]]: ...
    def audit(self) -> list[tuple[int, int, int, bool, int, int]]:
        """Slices held: model, layout, slice, whether it owns it, version, CRC-32C of the value."""

    def late_workers(self) -> set[int]:
        """The workers that slices wait for."""

    def record_updates(self, on: bool) -> None:
        """Records the times of updates, or stops."""

    def take_updates(self) -> list[tuple[int, int, int, int]]:
        """Times recorded since the last call: bytes of the slice, begin, end, the thread's number.

        Nanoseconds of ``time.monotonic_ns``, and threads as in `PairConnection.take_received`.
        """

    def has_failed(self) -> bool:
        """Whether a worker is lost or has given up, so that no worker can continue."""

    def stop(self) -> None:
        """Ends all connections."""

@final
class ServerTransport(TorchTransport):
    """Carries slices to parameter servers, and carries sums or parameters back.

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
        """Starts without connections. The callbacks run on connection threads.

        Args:
            ordered: the most urgent slice is sent first; else the first ready one.
            asks_first: servers bound the delay of updates.
            on_lost: a server is gone, with the reason.
            on_control: a server has sent a text.
        """

    def connect(self, server: int, connection: Connection) -> None:
        """Adds a connection and sends all models to the server."""

    def servers(self) -> list[int]: ...
    def give_up(self, servers: list[int], why: str) -> None:
        """Marks these servers as lost, all at once, and closes their connections.

        Worker 0 informs the other workers.
        """

    def frames_from(self) -> dict[int, int]:
        """Number of frames received, by server."""

    def waits(self) -> bool:
        """Whether any transfer is in flight to a server."""

    def send_control(self, server: int, text: str) -> None:
        """Sends a text; dropped if the server is gone."""

    def prepare(
        self, model: int, places: list[tuple[int, int]], parameters: list[tuple[int, int]]
    ) -> None:
        """Sets the purpose of the model's next ``set_buffers``.

        Args:
            parameters: elements and group of the rule, by tensor; empty: servers only sum.
        """

    def begin_with_buffers(self, model: int, part: int, parts: int, steps_before: int) -> None:
        """Worker 0: the buffers hold one part of the initial state.

        Args:
            part: 1 for parameters, 2 and up for the optimizer's moments.
            parts: number of parts plus one.
            steps_before: steps that the optimizer has taken.
        """

    def set_rules(self, model: int, rules: list[UpdateRule]) -> None:
        """Worker 0: sets the rules for all following pushes, one for each group."""

    def set_map(self, model: int, places: list[tuple[int, int]]) -> None:
        """Worker 0: sets the assignment of slices from now on."""

    def places(self, model: int) -> list[tuple[int, int]]: ...
    def pull(self, model: int, part: int, timeout_s: float) -> list[int]:
        """Fills the idle buffers with the servers' values.

        Args:
            part: same as in ``begin_with_buffers``.

        Returns:
            The slices in order of arrival.

        Raises:
            TransferTimeout, PeerLost: some slices did not arrive; the model cannot be pulled again.
            InvalidUsage: an earlier pull has failed, or another thread pulls this model.
        """

    def steps(self, model: int) -> int:
        """Number of updates that the last answer includes, with those before the registration."""

    def take_figures(self) -> list[tuple[int, int, float]]:
        """By server, since the last call: bytes of answers, seconds with a transfer in flight."""

    def dropped(self) -> tuple[int, int]:
        """Number of slice updates that were too late and were not sent, and their bytes."""

    def aggregated(self) -> tuple[int, int]:
        """Number of slice updates sent to a helper, and their bytes."""

    def close(self) -> None:
        """Tells all servers that this worker leaves; transfers in flight fail."""
