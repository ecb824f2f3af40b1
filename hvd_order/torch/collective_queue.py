"""One thread that carries out collectives in the order in which all ranks have asked for them.

The functions of `collectives` put requests here and get a number, the handle. Rank 0 is told of
every request, by name, with a hash of the lines that describe it; when all ranks have made it,
all hear that it is its turn (negotiation.py). Where the hashes differ, the lines themselves are
gathered and every rank raises the same `ModelMismatch`. The price is one message each way for a
collective (some 0.1 ms on one host), which is why gradients do not go this way.

Zeros, or no rows, stand in for a rank that waits in ``join()``.

The queue is used for occasional collectives; nothing polls, an idle queue costs nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import pickle
import queue
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from hvd_order import errors
from hvd_order.errors import (
    HorovodInternalError,
    InvalidUsage,
    ModelMismatch,
    PeerLost,
    TransferTimeout,
)
from hvd_order.torch import process
from hvd_order.torch.mismatch import explain_mismatch
from hvd_order.torch.name_order import key_of
from hvd_order.torch.negotiation import Negotiation

__all__ = [
    "CollectiveQueue",
    "Exchange",
    "Request",
    "all_queues",
    "close_queue",
    "collective_queue",
    "negotiation",
    "open_queue",
    "queue_of",
    "translate_failure",
]

Exchange = Callable[[dist.ProcessGroup | None], None]

_LATE_NEWS_S = 0.2  # rank 0 notices a late rank when this one does, and its word takes a moment


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
        stand_in: what a rank that has joined does in place of `exchange`; it is pickled. None: the
            collective makes no sense without all ranks.
        lacking: the ranks that have not made this request for long, once rank 0 has said so.
        decided: rank 0 has said that it is its turn.
    """

    name: str
    lines: Sequence[str]
    exchange: Exchange
    finish: Callable[[], Any]
    device: torch.device
    stand_in: Exchange | None = None
    lacking: Sequence[int] = ()
    decided: bool = False
    error: HorovodInternalError | None = None
    done: threading.Event = field(default_factory=threading.Event)
    ready_event: torch.cuda.Event | None = None  # inputs are there
    done_event: torch.cuda.Event | None = None  # outputs are there


@dataclass(frozen=True)
class _Decision:
    """It is the turn of a request; what rank 0 says about it (name_order.py)."""

    key: str
    verdict: str
    absent: list[int]  # ranks that have joined and have not made the request


class CollectiveQueue:
    """The thread of one process set, and its requests.

    Thread safety: all methods may be called from any thread. Ranks may submit requests with names
    in any order, those without in the same order.
    """

    def __init__(
        self,
        context: process.ProcessContext,
        number: int,
        group: dist.ProcessGroup | None,
        ranks: Sequence[int],
        negotiation: Negotiation | None,
    ) -> None:
        """Starts nothing yet.

        Args:
            context: of the current ``init()``.
            number: of the process set.
            group: None where this process is alone.
            ranks: of the job, by place in the group.
            negotiation: None where ``group`` is.
        """
        self._context = context
        self._number = number
        self._group = group
        self._ranks = ranks
        self._negotiation = negotiation
        self._lock = threading.Lock()  # guards those below; never held while waiting
        self._unnamed = 0
        self._requests: dict[int, Request] = {}
        self._in_flight: dict[str, Request] = {}  # by key
        self._failure: HorovodInternalError | None = None
        self._broken = False  # nothing runs any more, not even what is decided
        self._thread: threading.Thread | None = None
        self._moved_at = time.monotonic()  # when a request last began or ended
        self._decisions: queue.SimpleQueue[_Decision | None] = queue.SimpleQueue()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._stand_in_device: int | None = None
        if negotiation is not None:
            negotiation.add_set(number, ranks, self)

    @property
    def number(self) -> int:
        """Of the process set."""
        return self._number

    @property
    def unnamed(self) -> int:
        """How many requests without a name this rank has made."""
        return self._unnamed

    def next_name(self, kind: str) -> str:
        """A name for a request without one; the same on all ranks."""
        with self._lock:
            self._unnamed += 1
            return f"{kind}.noname.{self._unnamed - 1}"

    def end_join(self, unnamed: int) -> None:
        """All ranks have joined; goes on counting where the one that is furthest has come to."""
        with self._lock:
            self._unnamed = max(self._unnamed, unnamed)

    def begin_join(self, device: int | None) -> None:
        """This rank joins; stand-ins in CUDA memory go to this device."""
        self._stand_in_device = device

    def submit(self, request: Request) -> int:
        """Starts `request` as soon as all ranks have made it; returns its handle at once.

        Raises:
            InvalidUsage: a request of this name is in flight (Horovod: ValueError, too).
            HorovodInternalError: an earlier one failed in a way that leaves the ranks out of step.
        """
        if request.device.type == "cuda":
            request.ready_event = torch.cuda.Event()
            request.ready_event.record(torch.cuda.current_stream(request.device))
        key = key_of(request.name)
        with self._lock:
            if self._failure is not None:
                raise _again(self._failure)
            if key in self._in_flight:
                raise InvalidUsage(
                    f"{request.name} is already in flight: wait for it with synchronize(), or "
                    "give the second tensor another name"
                )
            handle = next(_handles)
            self._requests[handle] = request
            if self._negotiation is not None:
                if not self._in_flight:
                    self._moved_at = time.monotonic()
                self._in_flight[key] = request
                self._start_thread()
        if self._negotiation is None:
            with torch.no_grad():
                request.exchange(None)
            request.done.set()
        else:
            text = "\n".join(request.lines).encode()
            digest = hashlib.blake2b(text, digest_size=8).hexdigest()
            self._negotiation.tell(
                ["request", self._number, request.name, digest, request.stand_in is not None]
            )
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
        self._await(request)
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

    def _await(self, request: Request) -> None:
        config = self._context.config
        stall_warning_s = config.stall_warning.total_seconds()
        if request.done.wait(stall_warning_s) or request.done.wait(_LATE_NEWS_S):
            return
        who = f"{_ranks(request.lacking)} not called it" if request.lacking else "a rank is late"
        warnings.warn(
            f"rank {self._context.rank} has waited {stall_warning_s:g} s for {request.name}: {who}",
            RuntimeWarning,
            stacklevel=5,
        )
        # Rank 0 ends what is not called everywhere, the group's timeout what does not get on;
        # this is for a rank 0 that says nothing at all.
        patience_s = 1.25 * config.timeout.total_seconds() + 1
        while not request.done.wait(max(0.0, self._moved_at + patience_s - time.monotonic())):
            if time.monotonic() >= self._moved_at + patience_s:
                self.failed(
                    "TransferTimeout",
                    f"rank {self._context.rank}, {request.name}: no word for {patience_s:g} s from "
                    "rank 0, which decides when it is its turn",
                )

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
            self._broken = True
            thread, self._thread = self._thread, None
        if thread is None:
            return
        self._decisions.put(None)
        thread.join(timeout=0.5)
        with self._lock:
            for request in self._requests.values():
                self._end(request, shut_down)

    # ---- what rank 0 says; none of these waits ----

    def decided(self, key: str, verdict: str, absent: list[int]) -> None:
        """It is the turn of the request."""
        with self._lock:
            self._start_thread()  # a rank that has joined may have made no request itself
            if (request := self._in_flight.get(key)) is not None:
                request.decided = True
        self._decisions.put(_Decision(key, verdict, absent))

    def late(self, key: str, lacking: list[int]) -> None:
        """Some ranks have not made the request for long."""
        with self._lock:
            request = self._in_flight.get(key)
        if request is not None:
            request.lacking = lacking

    def failed(self, kind: str, text: str) -> None:
        """Ends the requests that wait for other ranks; there will be no others.

        Those whose turn it was have what they need of the others, or fail by themselves.
        """
        with self._lock:
            if self._failure is None:
                self._failure = getattr(errors, kind)(text)
            for request in list(self._in_flight.values()):
                if not request.decided:
                    self._end(request, self._failure)

    # ---- the thread ----

    def _end(self, request: Request, error: HorovodInternalError | None) -> None:
        """Marks a request as done or failed, once; the lock is held."""
        if not request.done.is_set():
            request.error = error
            self._in_flight.pop(key_of(request.name), None)
            self._moved_at = time.monotonic()
            request.done.set()

    def _start_thread(self) -> None:
        if self._thread is None and self._failure is None:
            self._thread = threading.Thread(
                target=self._serve, name="hvd_order collectives", daemon=True
            )
            self._thread.start()

    def _serve(self) -> None:
        with torch.no_grad():
            while (decision := self._decisions.get()) is not None:
                with self._lock:
                    request = self._in_flight.get(decision.key)
                    self._moved_at = time.monotonic()
                    if self._broken and request is not None:
                        self._end(request, self._failure)
                    if self._broken or (
                        request is None and self._context.rank not in decision.absent
                    ):
                        continue  # it has ended with an error
                failure: HorovodInternalError | None = None
                try:
                    self._carry_out(decision, request)
                except _StillInStep as told:
                    failure = told.error
                except Exception as error:
                    failure = self._fail(error, request.name if request else decision.key)
                if request is not None:
                    with self._lock:
                        self._end(request, failure)

    def _carry_out(self, decision: _Decision, request: Request | None) -> None:
        """Runs the exchange of a request, or that of a stand-in where this rank has none."""
        assert self._group is not None
        if decision.verdict == "differ":
            lines = [] if request is None else request.lines
            raise _StillInStep(_difference(lines, self._group, self._ranks))
        if decision.verdict == "refused":
            what = decision.key if request is None else request.name
            raise _StillInStep(HorovodInternalError(
                f"{what} needs every rank, and {_ranks(decision.absent)} joined; only allreduce, "
                "allgather, reducescatter and barrier go on without ranks that have joined"
            ))  # fmt: skip
        exchange = None if request is None else request.exchange
        if decision.absent:
            stand_in = self._tell_stand_in(request, decision.absent)
            exchange = exchange or stand_in
        assert exchange is not None
        if request is None or request.ready_event is None:
            with _device_context(None if request else self._stand_in_device):
                exchange(self._group)
            return
        stream = self._streams.get(request.device)
        if stream is None:
            stream = torch.cuda.Stream(request.device)
            self._streams[request.device] = stream
        with torch.cuda.device(request.device), torch.cuda.stream(stream):
            stream.wait_event(request.ready_event)
            exchange(self._group)
            request.done_event = torch.cuda.Event()
            request.done_event.record(stream)

    def _tell_stand_in(self, request: Request | None, absent: list[int]) -> Exchange:
        """What the absent ranks do; the first of the others tells them."""
        root = next(rank for rank in self._ranks if rank not in absent)
        mine = root == self._context.rank
        message = pickle.dumps(request.stand_in) if mine and request else b""
        length = torch.tensor([len(message)])
        dist.broadcast(length, src=root, group=self._group)
        data = torch.empty(int(length), dtype=torch.uint8)
        if mine:
            data = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        dist.broadcast(data, src=root, group=self._group)
        stand_in: Exchange = pickle.loads(data.numpy().tobytes())
        return stand_in

    def _fail(self, error: Exception, what: str) -> HorovodInternalError:
        with self._lock:
            if self._failure is None:
                self._failure = translate_failure(error, what, self._context)
            self._broken = True
            return self._failure


class _StillInStep(Exception):  # noqa: N818  (says what it tells)
    """A request fails on all ranks, which know it; later ones are not affected."""

    def __init__(self, error: HorovodInternalError) -> None:
        super().__init__(str(error))
        self.error = error


def _device_context(device: int | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if device is None else torch.cuda.device(device)


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown} has" if len(ranks) == 1 else f"ranks {shown} have"


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


def _difference(
    lines: Sequence[str], group: dist.ProcessGroup, ranks: Sequence[int]
) -> ModelMismatch:
    """The error that all ranks raise, who have different lines. None counts as having joined."""
    text = "\n".join(lines).encode()
    length = torch.tensor([len(text)])
    dist.all_reduce(length, op=dist.ReduceOp.MAX, group=group)
    padded = torch.zeros(int(length), dtype=torch.uint8)
    if text:
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    gathered = [torch.empty_like(padded) for _ in range(group.size())]
    dist.all_gather(gathered, padded, group=group)
    texts = [bytes(one.tolist()).rstrip(b"\0").decode() for one in gathered]
    there = [(rank, text.split("\n")) for rank, text in zip(ranks, texts, strict=True) if text]
    return ModelMismatch(
        explain_mismatch([lines for _, lines in there], [rank for rank, _ in there])
    )


_handles = itertools.count()  # of all queues, so that a handle says which
_lock = threading.Lock()  # guards those below
_queues: dict[int, CollectiveQueue] = {}  # by process set
_queues_context: process.ProcessContext | None = None
_negotiation: Negotiation | None = None


def collective_queue(process_set_id: int = 0) -> CollectiveQueue:
    """The queue of a process set, 0 being all ranks, in the current ``init()``.

    Raises:
        NotInitialized: there is none.
    """
    global _queues_context, _negotiation
    context = process.current()
    with _lock:
        if _queues_context is not context:
            _queues.clear()
            _queues_context = context
            context.on_shutdown(_close_all)
            alone = context.size == 1
            _negotiation = None if alone else Negotiation(context)
            group = None if alone else context.functions_group
            ranks = range(context.size)
            _queues[0] = CollectiveQueue(context, 0, group, ranks, _negotiation)
        return _queues[process_set_id]


def negotiation() -> Negotiation | None:
    """What the ranks tell each other in the current ``init()``; None in a job of one process."""
    collective_queue()
    return _negotiation


def all_queues() -> list[CollectiveQueue]:
    """Those of the process sets of which this process is a member."""
    collective_queue()
    with _lock:
        return list(_queues.values())


def open_queue(process_set_id: int, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
    """Makes the queue of another process set; every rank of the job calls it, member or not."""
    collective_queue()
    context = process.current()
    with _lock:
        if context.rank not in ranks:
            if _negotiation is not None:
                _negotiation.add_set(process_set_id, ranks, None)
            return
        alone = len(ranks) == 1
        _queues[process_set_id] = CollectiveQueue(
            context,
            process_set_id,
            None if alone else group,
            ranks,
            None if alone else _negotiation,
        )


def close_queue(process_set_id: int) -> None:
    """Ends the queue of a process set that is given up; every rank of the job calls it."""
    with _lock:
        closing = _queues.pop(process_set_id, None)
    if _negotiation is not None:
        _negotiation.remove_set(process_set_id)
    if closing is not None:
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
    if _negotiation is not None:
        _negotiation.close()
