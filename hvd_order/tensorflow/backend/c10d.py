"""The backend over torch.distributed: a thin layer over `hvd_order.torch`.

The only module of this package that imports PyTorch.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

import hvd_order.torch as hvd
from hvd_order._native import _torch as native
from hvd_order.base.config import Config
from hvd_order.base.errors import InvalidUsage
from hvd_order.engine import registration, static_plan
from hvd_order.engine.advised_settings import advised_settings
from hvd_order.engine.engine_host import EngineHost, engine_host
from hvd_order.engine.half_forms import check_codes, why_no_halves
from hvd_order.engine.host_levels import use_host_levels
from hvd_order.engine.job import process
from hvd_order.engine.job.job import Job
from hvd_order.engine.model_channel import ModelChannel
from hvd_order.engine.requests.queues import negotiation
from hvd_order.engine.requests.step_log import StepLog, StepLogs
from hvd_order.tensorflow.backend.interface import Collective, Gradient, HostTensor
from hvd_order.tensorflow.backend.layout import Arrangement

__all__: list[str] = []

is_initialized = hvd.is_initialized
rank, size = hvd.rank, hvd.size
local_rank, local_size = hvd.local_rank, hvd.local_size
cross_rank, cross_size = hvd.cross_rank, hvd.cross_size
join = hvd.join
shutdown = hvd.shutdown


class _ProcessSets:
    """The process sets of one job by number: a part of the `Job`."""

    def __init__(self, job: Job) -> None:
        self.by_number: dict[int, hvd.ProcessSet] = {}


def _process_sets() -> dict[int, hvd.ProcessSet]:
    return process.current().part(_ProcessSets).by_number


def init(comm: object) -> None:
    """Joins the other processes."""
    hvd.init(comm)


def config() -> Config:
    """The settings that `init` has read."""
    return process.current().config


def on_shutdown(callback: Callable[[], None]) -> None:
    """Registers `callback` to run before the processes disconnect."""
    process.current().on_shutdown(callback)


def supports(what: str) -> int:
    """Answers `nccl_built` and the like, by name."""
    return int(getattr(hvd, what)())


def start_timeline(path: str, mark_cycles: bool) -> Any:
    """Starts to record the timeline."""
    return hvd.start_timeline(path, mark_cycles)


def stop_timeline() -> Any:
    """Writes the recorded timeline."""
    return hvd.stop_timeline()


def engine_api() -> int:
    """Address of the engine's function table for operators."""
    return native.engine_api()


# ---- process sets -----------------------------------------------------------------------------


def add_process_set(ranks: Sequence[int]) -> int:
    """Registers a process set on all ranks of the job and returns its number."""
    added = hvd.add_process_set(ranks)
    assert added.process_set_id is not None
    _process_sets()[added.process_set_id] = added
    return added.process_set_id


def remove_process_set(number: int) -> bool:
    """Removes a process set on all ranks of the job."""
    removed = _process_sets().pop(number, None)
    return removed is not None and hvd.remove_process_set(removed)


def _process_set(number: int) -> hvd.ProcessSet:
    if number == 0:
        return hvd.global_process_set
    found = _process_sets().get(number)
    if found is None or found.process_set_id != number:
        raise InvalidUsage(
            f"process set {number} is not registered (any more); pass it to hvd.init() or "
            "hvd.add_process_set()"
        )
    return found


# ---- collectives ------------------------------------------------------------------------------


def _tensor(host: HostTensor) -> torch.Tensor:
    """A tensor over the same memory; valid while the caller keeps the memory."""
    dtype: torch.dtype = getattr(torch, host.dtype)
    if 0 in host.shape:
        return torch.empty(host.shape, dtype=dtype)
    count = torch.Size(host.shape).numel()
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(host.address)
    return torch.frombuffer(memory, dtype=dtype).reshape(host.shape)


def _host(tensor: torch.Tensor) -> HostTensor:
    tensor = tensor.cpu().contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    return HostTensor(name, tuple(tensor.shape), tensor.data_ptr(), tensor)


def start(collective: Collective, tensors: Sequence[HostTensor]) -> Callable[[], list[HostTensor]]:
    """Starts a collective; the returned function waits for it."""
    handle = _start(collective, [_tensor(tensor) for tensor in tensors])

    def finish() -> list[HostTensor]:
        result = hvd.synchronize(handle)
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        if collective.kind == "alltoall":
            results[1] = results[1].to(torch.int32)
        return [_host(tensor) for tensor in results]

    return finish


def _start(collective: Collective, tensors: list[torch.Tensor]) -> int:
    c = collective
    members = _process_set(c.process_set)
    scales = (c.prescale_factor, c.postscale_factor)
    one = tensors[0]
    if c.kind == "allreduce":
        if c.grouped:
            return hvd.grouped_allreduce_async(tensors, None, c.name, c.op, *scales, members)
        return hvd.allreduce_async(one, None, c.name, c.op, *scales, members)
    if c.kind == "allgather":
        if c.grouped:
            return hvd.grouped_allgather_async(tensors, c.name, members)
        return hvd.allgather_async(one, c.name, members)
    if c.kind == "broadcast":
        return hvd.broadcast_async(one, c.root_rank, c.name, members)
    if c.kind == "alltoall":
        splits = tensors[1] if len(tensors) > 1 else None
        return hvd.alltoall_async(one, splits, c.name, members)
    if c.kind == "reducescatter":
        if c.grouped:
            return hvd.grouped_reducescatter_async(tensors, c.name, c.op, members, *scales)
        return hvd.reducescatter_async(one, c.name, c.op, members, *scales)
    raise InvalidUsage(f"there is no collective {c.kind!r}")


def broadcast_object(obj: Any, root_rank: int, name: str | None, number: int) -> Any:
    """Broadcasts the object of a rank to every rank of a process set."""
    return hvd.broadcast_object(obj, root_rank, name, _process_set(number))


def allgather_object(obj: Any, name: str | None, number: int) -> list[Any]:
    """Gathers the objects of all ranks."""
    return hvd.allgather_object(obj, name, _process_set(number))


# ---- gradients --------------------------------------------------------------------------------


class _OperatorPasses:
    """Records the operators' passes in the log, so that joined ranks can follow.

    A pass, one post of every gradient, is one event. Operators run without Python; a thread
    records the passes that they have begun.
    """

    def __init__(self, queue: native.OpGradientQueue, log: StepLog) -> None:
        self._queue = queue
        self._log = log
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="hvd_order passes", daemon=True)
        self._thread.start()

    @property
    def noted(self) -> int:
        """Number of passes in the log."""
        return self._log.count

    def catch_up(self) -> None:
        """Records all passes begun so far."""
        with self._lock:
            while self._log.count < self._queue.passes:
                self._log.note("pass")

    def end(self) -> None:
        """Joins the thread after the queue is closed; it must not outlive the interpreter."""
        # Wait briefly: garbage collection may run on that thread, or under the log's lock.
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        known = 0
        while (passes := self._queue.wait_for_pass(known)) is not None:
            known = passes
            self.catch_up()


class RegisteredGradients:
    """Gradients in buffers of the engine, for operators to post and take.

    The creator also closes it, when no gradient is in flight.
    """

    def __init__(
        self, host: EngineHost, gradients: Sequence[Gradient], order: Sequence[int]
    ) -> None:
        """Lays out the gradients in rank 0's order. Collective.

        Raises:
            ModelMismatch: the ranks have different gradients.
            InvalidUsage: a rank has joined, or gradients are to be encoded and cannot be.
        """
        self._encodes = any(each.format for each in gradients)
        if self._encodes:
            check_codes(why_no_halves(host))
        steps = _step_logs()
        steps.check_nobody_joined(
            "gradients are to be exchanged for the first time (a function that has them is traced)"
        )
        kinds = [" in ".join(filter(None, (each.dtype, each.format))) for each in gradients]
        mine = [(str(i), gradients[i].shape, kinds[i]) for i in order]
        channel = ModelChannel(host, steps.next_key(host.process_set))
        with channel.turn():
            if self._encodes:
                use_host_levels(channel)
            self._register(channel, gradients, order, mine)
        self._passes = _OperatorPasses(self._queue, steps.open(channel.key, self))
        self._host: Callable[[], EngineHost | None] = weakref.ref(host)
        self._is_closed = False

    def _register(
        self,
        channel: ModelChannel,
        gradients: Sequence[Gradient],
        order: Sequence[int],
        mine: Sequence[tuple[str, tuple[int, ...], str]],
    ) -> None:
        """Lays the gradients out and adds them to the engine. Collective, in its turn."""
        host = channel.host
        agreed = registration.agree(channel, mine)
        laid_out = Arrangement.of(
            gradients,
            [order[i] for i in agreed.order],
            lambda name: int(getattr(torch, name).itemsize),
        )
        if agreed.only_model and not host.tuning_begun:  # one engine has one credit
            host.tuning_begun = True
            settings = advised_settings(channel, torch.device("cpu"), laid_out.size_bytes)
            host.retune(settings, agreed.model)
        cut = host.slice_settings
        # Codes travel in halves, and squares with them, though nobody reads norms here.
        layout = native.SliceLayout(
            laid_out.tensors, cut.slice_bytes, cut.small_front, self._encodes, by_need=self._encodes
        )
        squares = layout.squares_tensor if self._encodes else None
        names = [*laid_out.dtypes, "float64"][: len(layout.buffer_bytes)]
        dtypes: list[torch.dtype] = [getattr(torch, name) for name in names]
        self._flat = [
            torch.zeros(size_bytes // dtype.itemsize, dtype=dtype)
            for dtype, size_bytes in zip(dtypes, layout.buffer_bytes, strict=True)
        ]
        plan = static_plan.arrival_plan(layout) if host.agreement == "planned" else []
        host.add_model(agreed.model, layout, self._flat, plan)
        if self._encodes:
            formats = native.WireFormat.__members__
            host.transport.set_formats(
                agreed.model,
                [formats[gradients[i].format.upper() or "EXACT"] for i in laid_out.positions],
                [torch.zeros_like(flat, dtype=torch.float32) for flat in self._flat[:-1]],
            )
        places = laid_out.places(lambda i: self._flat[i].data_ptr(), layout.tensor_offset)
        self._queue = native.OpGradientQueue(host.engine, agreed.model, places, squares)
        self._model = agreed.model

    @property
    def number(self) -> int:
        """Number that identifies the gradients to operators."""
        return self._queue.number

    @property
    def posts(self) -> int:
        """Number of gradients that this process has posted."""
        return self._queue.posts

    def prepare_to_join(self) -> None:
        """Finishes a pass that a failed operator has left unfinished."""
        if self._is_closed:
            return
        self._queue.stand_in(self._queue.passes)
        self._passes.catch_up()

    def stand_in(self, event: str) -> None:
        """Takes part with zeros in a pass of the other ranks."""
        if self._is_closed:
            raise InvalidUsage(
                "another rank exchanges gradients that this rank has given up after an error; "
                "join() cannot stand in for them"
            )
        self._queue.stand_in(self._passes.noted + 1)
        self._passes.catch_up()

    def end_join(self) -> None:
        """Waits for the sums of the last zeros, so that the next gradients can be posted."""
        self._queue.wait_until_idle()

    def close(self) -> None:
        """Ends everything in flight with an error; a second call does nothing."""
        self._is_closed = True
        self._queue.close()
        self._passes.end()
        host = self._host()
        self._host = lambda: None
        if host is not None and host.job is _current_job():
            host.remove_model(self._model)
            host.free_id(self._model)


def _step_logs() -> StepLogs:
    ranks = negotiation()
    assert ranks is not None  # the job has several ranks
    return ranks.steps


def _current_job() -> object:
    return process.current() if process.is_initialized() else None


def register(
    gradients: Sequence[Gradient], order: Sequence[int], number: int
) -> RegisteredGradients:
    """Registers gradients on all ranks of a process set of several."""
    members = _process_set(number)
    return RegisteredGradients(engine_host(number, members.ranks), gradients, order)
