"""One thread that carries out collectives in the order in which they were asked for.

The functions of `collectives` put requests here and get a number, the handle. Before any data of
a request travels, all ranks compare what they are about to do: each hashes the lines that
describe its request and one all-reduce of 16 bytes tells every rank whether all hashes are equal.
Where they are not, the lines themselves are gathered and every rank raises the same
`ModelMismatch`. The price is one small all-reduce a collective (some 0.1 ms on one host), which is
why gradients do not go this way.

The queue is used for occasional collectives; nothing polls, an idle queue costs nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import queue
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from hvd_order.errors import (
    HorovodInternalError,
    InvalidUsage,
    ModelMismatch,
    PeerLost,
    TransferTimeout,
)
from hvd_order.torch import process
from hvd_order.torch.mismatch import explain_mismatch

__all__ = [
    "CollectiveQueue",
    "Request",
    "close_queue",
    "collective_queue",
    "open_queue",
    "queue_of",
    "translate_failure",
]


@dataclass
class Request:
    """One collective on its way.

    Attributes:
        name: unique among those in flight, for example "allreduce.loss".
        lines: what all ranks must agree on, one line an item; the first says which operation.
        exchange: moves the data; gets the group (None in a job of one process). Runs on the
            queue's thread, on a stream of its own for CUDA.
        finish: makes the result; runs in `synchronize`, on the caller's thread.
        device: where the data are.
    """

    name: str
    lines: Sequence[str]
    exchange: Callable[[dist.ProcessGroup | None], None]
    finish: Callable[[], Any]
    device: torch.device
    error: HorovodInternalError | None = None
    done: threading.Event = field(default_factory=threading.Event)
    ready_event: torch.cuda.Event | None = None  # inputs are there
    done_event: torch.cuda.Event | None = None  # outputs are there


class CollectiveQueue:
    """The thread of one process set, and its requests.

    Thread safety: all methods may be called from any thread. All ranks must submit the same
    requests in the same order.
    """

    def __init__(
        self, context: process.ProcessContext, group: dist.ProcessGroup | None, ranks: Sequence[int]
    ) -> None:
        """``group``: None where this process is alone; ``ranks``: of the job, by place in it."""
        self._context = context
        self._group = group
        self._ranks = ranks
        self._names = itertools.count()
        self._lock = threading.Lock()  # guards the four below; never held while waiting
        self._requests: dict[int, Request] = {}
        self._in_flight: set[str] = set()
        self._failure: HorovodInternalError | None = None
        self._thread: threading.Thread | None = None
        self._waiting: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def next_name(self, kind: str) -> str:
        """A name for a request without one; the same on all ranks."""
        return f"{kind}.noname.{next(self._names)}"

    def submit(self, request: Request) -> int:
        """Starts `request` as soon as those before it are done; returns its handle at once.

        Raises:
            InvalidUsage: a request of this name is in flight (Horovod: ValueError, too).
            HorovodInternalError: an earlier one failed in a way that leaves the ranks out of step.
        """
        if request.device.type == "cuda":
            request.ready_event = torch.cuda.Event()
            request.ready_event.record(torch.cuda.current_stream(request.device))
        with self._lock:
            if self._failure is not None:
                raise _again(self._failure)
            if request.name in self._in_flight:
                raise InvalidUsage(
                    f"{request.name} is already in flight: wait for it with synchronize(), or "
                    "give the second tensor another name"
                )
            handle = next(_handles)
            self._requests[handle] = request
            if self._group is not None:
                self._in_flight.add(request.name)
                self._start_thread()
                self._waiting.put(request)
        if self._group is None:
            with torch.no_grad():
                request.exchange(None)
            request.done.set()
        return handle

    def knows(self, handle: int) -> bool:
        """Whether the handle is of a request that was put here and not yet synchronized."""
        with self._lock:
            return handle in self._requests

    def poll(self, handle: int) -> bool:
        """Whether `synchronize` would return at once.

        Raises:
            ValueError: there is no such handle (any more).
        """
        with self._lock:
            request = self._requests.get(handle)
        if request is None:
            raise ValueError(f"Handle {handle} was not created or has been cleared.")
        if not request.done.is_set():
            return False
        return request.done_event is None or bool(request.done_event.query())

    def synchronize(self, handle: int) -> Any:
        """Waits for a request and returns its result; None for an unknown handle, as Horovod.

        Raises:
            HorovodInternalError: the request failed: `PeerLost`, `TransferTimeout`,
                `ModelMismatch` or the root.

        Warns:
            RuntimeWarning: it takes longer than ``HVD_ORDER_STALL_WARNING``.
        """
        with self._lock:
            request = self._requests.get(handle)
        if request is None:
            return None
        stall_warning = self._context.config.stall_warning.total_seconds()
        if not request.done.wait(stall_warning):
            warnings.warn(
                f"rank {self._context.rank} has waited {stall_warning:g} s for {request.name}: "
                "another rank is late, or does not call it",
                RuntimeWarning,
                stacklevel=4,
            )
            request.done.wait()  # ends: the group's timeout bounds every exchange
        with self._lock:
            self._requests.pop(handle, None)
        if request.error is not None:
            raise _again(request.error)
        if request.done_event is None:
            return request.finish()
        stream = torch.cuda.current_stream(request.device)
        stream.wait_event(request.done_event)
        result = request.finish()
        if isinstance(result, torch.Tensor) and result.is_cuda:
            result.record_stream(stream)
        return result

    def run(self, request: Request) -> Any:
        """`submit` and `synchronize`."""
        return self.synchronize(self.submit(request))

    def close(self) -> None:
        """Ends the thread; what is not done fails at once. A second call does nothing.

        A thread that waits for a rank which does not come cannot be woken (Gloo has no means to
        abort); it is left to the group's timeout, and nobody waits for it, not even at exit.
        """
        with self._lock:
            shut_down = HorovodInternalError(
                "Horovod has been shut down; use hvd.init() before the next collective"
            )
            self._failure = self._failure or shut_down
            thread, self._thread = self._thread, None
        if thread is None:
            return
        self._waiting.put(None)
        thread.join(timeout=0.5)
        with self._lock:
            for request in self._requests.values():
                self._end(request, shut_down)

    def _end(self, request: Request, error: HorovodInternalError | None) -> None:
        """Marks a request as done or failed, once; the lock is held."""
        if not request.done.is_set():
            request.error = error
            self._in_flight.discard(request.name)
            request.done.set()

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, name="hvd_order collectives", daemon=True
            )
            self._thread.start()

    def _serve(self) -> None:
        with torch.no_grad():
            while (request := self._waiting.get()) is not None:
                failure: HorovodInternalError | None = None
                try:
                    self._carry_out(request)
                except ModelMismatch as error:
                    failure = error  # all ranks know; they are still in step
                except Exception as error:
                    failure = self._fail(error, request)
                with self._lock:
                    self._end(request, failure)

    def _carry_out(self, request: Request) -> None:
        with self._lock:
            if self._failure is not None:
                raise _again(self._failure)
        assert self._group is not None
        _compare(request.lines, self._group, self._ranks)
        if request.ready_event is None:
            request.exchange(self._group)
            return
        stream = self._streams.get(request.device)
        if stream is None:
            stream = torch.cuda.Stream(request.device)
            self._streams[request.device] = stream
        with torch.cuda.device(request.device), torch.cuda.stream(stream):
            stream.wait_event(request.ready_event)
            request.exchange(self._group)
            request.done_event = torch.cuda.Event()
            request.done_event.record(stream)

    def _fail(self, error: Exception, request: Request) -> HorovodInternalError:
        with self._lock:
            if self._failure is None:
                self._failure = translate_failure(error, request.name, self._context)
            return self._failure


def translate_failure(
    error: Exception, what: str, context: process.ProcessContext
) -> HorovodInternalError:
    """torch.distributed's error as one of ours, told apart by its text: there is nothing else."""
    if isinstance(error, HorovodInternalError):
        return error
    text = str(error)
    where = f"rank {context.rank}, {what}"
    first_line = text.strip().split("\n", maxsplit=1)[0]
    low = text.lower()
    if any(sign in low for sign in ("timed out", "timeout")):
        return TransferTimeout(
            f"{where}: not done within {context.config.timeout.total_seconds():g} s "
            f"(HVD_ORDER_TIMEOUT); another rank is late or does not call it ({first_line})"
        )
    signs = ("connection", "closed", "reset by peer", "broken pipe", "socket", "remote", "abort")
    if any(sign in low for sign in signs):
        return PeerLost(f"{where}: another rank died or left ({first_line})")
    return HorovodInternalError(f"{where}: {first_line}")


def _again(error: HorovodInternalError) -> HorovodInternalError:
    """A fresh object for every raise, so that tracebacks of different callers do not pile up."""
    return type(error)(*error.args)


def _compare(lines: Sequence[str], group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
    """Raises ModelMismatch on every rank unless all ranks have the same lines."""
    text = "\n".join(lines).encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
    extremes = torch.tensor([digest, -digest])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = int(extremes[0]), -int(extremes[1])
    if largest == smallest:
        return
    length = torch.tensor([len(text)])
    dist.all_reduce(length, op=dist.ReduceOp.MAX, group=group)
    padded = torch.zeros(int(length), dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    gathered = [torch.empty_like(padded) for _ in range(group.size())]
    dist.all_gather(gathered, padded, group=group)
    texts = [bytes(one.tolist()).rstrip(b"\0").decode() for one in gathered]
    raise ModelMismatch(explain_mismatch([one.split("\n") for one in texts], ranks))


_handles = itertools.count()  # of all queues, so that a handle says which
_lock = threading.Lock()  # guards the two below
_queues: dict[int, CollectiveQueue] = {}  # by process set
_queues_context: process.ProcessContext | None = None


def collective_queue(process_set_id: int = 0) -> CollectiveQueue:
    """The queue of a process set, 0 being all ranks, in the current ``init()``.

    Raises:
        NotInitialized: there is none.
    """
    global _queues_context
    context = process.current()
    with _lock:
        if _queues_context is not context:
            _queues.clear()
            _queues_context = context
            context.on_shutdown(_close_all)
            group = context.functions_group if context.size > 1 else None
            _queues[0] = CollectiveQueue(context, group, range(context.size))
        return _queues[process_set_id]


def open_queue(process_set_id: int, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
    """Makes the queue of another process set, of which this process is a member."""
    collective_queue()
    with _lock:
        alone = len(ranks) == 1
        _queues[process_set_id] = CollectiveQueue(
            process.current(), None if alone else group, ranks
        )


def close_queue(process_set_id: int) -> None:
    """Ends the queue of a process set that is given up."""
    with _lock:
        closing = _queues.pop(process_set_id)
    closing.close()


def queue_of(handle: int) -> CollectiveQueue:
    """Where a handle is from; the queue of all ranks if nobody knows it."""
    everybody = collective_queue()
    with _lock:
        return next((one for one in _queues.values() if one.knows(handle)), everybody)


def _close_all() -> None:
    with _lock:
        everyone = list(_queues.values())
    for one in everyone:
        one.close()
