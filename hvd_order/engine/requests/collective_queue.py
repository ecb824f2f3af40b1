"""One thread that runs collectives in the order in which all ranks have requested them.

The functions of `collectives` submit requests and get a number, the handle. Rank 0 receives every
request: its name, and a hash of the lines that describe it. When all ranks have made the request,
rank 0 tells all of them to run it (negotiation.py). Where the hashes differ, the lines themselves
are gathered and every rank raises the same `ModelMismatch`. Each collective costs one message each
way (some 0.1 ms on one host), which is why gradients do not use the queue. Zeros, or no rows,
stand in for a rank that waits in ``join()``.

The queue is for occasional collectives; nothing polls, and an idle queue costs nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import queue
import threading
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hvd_order.base import errors
from hvd_order.base.errors import HorovodInternalError, InvalidUsage
from hvd_order.engine.job import activity
from hvd_order.engine.job.job import Job
from hvd_order.engine.job.request_errors import afresh, translate_failure
from hvd_order.engine.requests.mismatch import ranks_have
from hvd_order.engine.requests.name_order import key_of
from hvd_order.engine.requests.negotiation import Negotiation
from hvd_order.engine.requests.request import Request, RequestDecision
from hvd_order.engine.requests.request_runner import RequestRunner, StillInStep

__all__ = ["CollectiveQueue"]

_SOON_S = 1.0  # a wait that is longer is told to ranks that ask
_LATE_NEWS_S = 0.2  # rank 0 notices a late rank at the same time; its message takes a moment
_handles = itertools.count()  # shared by all queues, so that a handle identifies its queue


class CollectiveQueue:
    """The thread of one process set, and its requests.

    Thread safety: all methods may be called from any thread. Ranks may submit named requests in
    any order, and unnamed ones in the same order.
    """

    def __init__(
        self,
        job: Job,
        number: int,
        group: dist.ProcessGroup | None,
        ranks: Sequence[int],
        negotiation: Negotiation | None,
    ) -> None:
        """Creates the queue; starts no thread yet.

        Args:
            job: the current job.
            number: number of the process set.
            group: None where this process is alone.
            ranks: ranks in the job, by place in the group.
            negotiation: None where ``group`` is None.
        """
        self._job = job
        self._number = number
        self._runner = None if group is None else RequestRunner(group, ranks, job.rank)
        self._negotiation = negotiation
        self._lock = threading.Lock()  # guards the fields below; never held while waiting
        self._unnamed = 0
        self._requests: dict[int, Request] = {}
        self._in_flight: dict[str, Request] = {}  # by key
        self._failure: HorovodInternalError | None = None
        self._broken = False  # nothing runs any more, not even decided requests
        self._thread: threading.Thread | None = None
        self._decisions: queue.SimpleQueue[RequestDecision | None] = queue.SimpleQueue()
        if negotiation is not None:
            negotiation.add_set(number, ranks, self)

    @property
    def number(self) -> int:
        """Number of the process set."""
        return self._number

    @property
    def unnamed(self) -> int:
        """Number of unnamed requests that this rank has made."""
        return self._unnamed

    def next_name(self, kind: str) -> str:
        """Returns a name for an unnamed request; the same on all ranks."""
        with self._lock:
            self._unnamed += 1
            return f"{kind}.noname.{self._unnamed - 1}"

    def end_join(self, unnamed: int) -> None:
        """Continues, after all ranks have joined, with the highest count of unnamed requests."""
        with self._lock:
            self._unnamed = max(self._unnamed, unnamed)

    def begin_join(self, device: int | None) -> None:
        """Prepares to join; zeros in CUDA memory are created on this device."""
        if self._runner is not None:
            self._runner.stand_in_device = device

    def submit(self, request: Request) -> int:
        """Submits `request`, which starts when all ranks have made it; returns its handle at once.

        Raises:
            InvalidUsage: a request of this name is in flight (Horovod: ValueError, too).
            HorovodInternalError: an earlier request failed in a way that leaves the ranks out of
                step.
        """
        if request.device.type != "cpu":
            accelerator = torch.get_device_module(request.device)
            request.ready_event = accelerator.Event()
            request.ready_event.record(accelerator.current_stream(request.device))
        key = key_of(request.name)
        with self._lock:
            if self._failure is not None:
                raise afresh(self._failure)
            if key in self._in_flight:
                raise InvalidUsage(
                    f"{request.name} is already in flight: wait for it with synchronize(), or "
                    "give the second tensor another name"
                )
            handle = next(_handles)
            self._requests[handle] = request
            if self._negotiation is not None:
                self._in_flight[key] = request
                self._start_thread()
        if self._negotiation is None:
            with torch.no_grad():
                request.transfer(None)
            request.done.set()
        else:
            text = "\n".join(request.lines).encode()
            digest = hashlib.blake2b(text, digest_size=8).hexdigest()
            replaceable = None if request.joined_take_part else request.stand_in is not None
            self._negotiation.send(["request", self._number, request.name, digest, replaceable])
        return handle

    def knows(self, handle: int) -> bool:
        """Returns whether the handle belongs to a request that is not yet synchronized."""
        with self._lock:
            return handle in self._requests

    def forget(self, handle: int) -> None:
        """Forgets a request whose end nobody waits for; it still runs."""
        with self._lock:
            self._requests.pop(handle, None)

    def poll(self, handle: int) -> bool:
        """Returns whether `synchronize` would return at once.

        Raises:
            ValueError: the handle does not exist, or no longer.
        """
        with self._lock:
            request = self._requests.get(handle)
        if request is None:
            raise ValueError(f"Handle {handle} was not created or has been cleared.")
        if not request.done.is_set():
            return False
        return request.done_event is None or bool(request.done_event.query())

    def synchronize(self, handle: int) -> Any:
        """Waits for a request and returns its result; None for an unknown handle, as in Horovod.

        Raises:
            HorovodInternalError: the request failed: `PeerLost`, `TransferTimeout`,
                `ModelMismatch` or the base class.

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
            raise afresh(request.error)
        if request.done_event is None:
            return request.finish()
        stream = torch.get_device_module(request.device).current_stream(request.device)
        stream.wait_event(request.done_event)
        result = request.finish()
        if isinstance(result, torch.Tensor) and result.device.type != "cpu":
            result.record_stream(stream)
        return result

    def _await(self, request: Request) -> None:
        config = self._job.config
        began = time.monotonic()
        stall_warning_s = config.stall_warning.total_seconds()
        patience_s = 1.25 * config.timeout.total_seconds() + 1
        soon_s = min(_SOON_S, stall_warning_s, patience_s)
        if request.done.wait(soon_s):
            return
        with activity.waiting(f"waits in the collective {request.name}"):
            self._await_long(request, began, stall_warning_s, patience_s, soon_s)

    def _await_long(
        self,
        request: Request,
        began: float,
        stall_warning_s: float,
        patience_s: float,
        waited_s: float,
    ) -> None:
        if request.done.wait(min(stall_warning_s, patience_s) - waited_s) or request.done.wait(
            _LATE_NEWS_S
        ):
            return
        cause = "a rank is late"
        if request.decided:
            cause = "all ranks have called it, and its transfer takes long"
        elif request.lacking:
            cause = f"{ranks_have(request.lacking)} not called it"
        if stall_warning_s < patience_s:
            warnings.warn(
                f"rank {self._job.rank} has waited {stall_warning_s:g} s for {request.name}: "
                f"{cause}",
                RuntimeWarning,
                stacklevel=6,
            )
        # Rank 0 fails requests that not all ranks make; this limit is for a rank 0 that sends
        # nothing.
        left_s = began + patience_s - time.monotonic()
        if not (request.done.wait(max(0.0, left_s)) or request.decided):
            self.failed(
                "TransferTimeout",
                f"rank {self._job.rank}, {request.name}: no word for {patience_s:g} s from "
                "rank 0, which decides when it is its turn",
            )
        # A request that runs may take many transfers, each bounded by the group's timeout.
        request.done.wait()

    def run(self, request: Request) -> Any:
        """Calls `submit` and `synchronize`."""
        return self.synchronize(self.submit(request))

    def close(self) -> None:
        """Ends the thread; unfinished requests fail at once. A second call does nothing.

        A thread that waits for an absent rank cannot be woken (Gloo cannot abort); it ends by the
        group's timeout, and nothing waits for it, not even exit.
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

    # ---- messages of rank 0; none of these methods waits ----

    def decided(self, key: str, verdict: str, absent: list[int]) -> None:
        """Schedules the request to run."""
        with self._lock:
            self._start_thread()  # a joined rank may have made no request itself
            if (request := self._in_flight.get(key)) is not None:
                request.decided = True
        self._decisions.put(RequestDecision(key, verdict, absent))

    def late(self, key: str, lacking: list[int]) -> None:
        """Records the ranks that have not made the request for long."""
        with self._lock:
            request = self._in_flight.get(key)
        if request is not None:
            request.lacking = lacking

    def failed(self, kind: str, text: str) -> None:
        """Fails the requests that wait for other ranks; later ones fail too.

        Requests that were scheduled have all they need of the other ranks, or fail by themselves.
        """
        with self._lock:
            if self._failure is None:
                self._failure = getattr(errors, kind)(text)
            for request in list(self._in_flight.values()):
                if not request.decided:
                    self._end(request, self._failure)

    # ---- the thread ----

    def _end(self, request: Request, error: HorovodInternalError | None) -> None:
        """Marks a request as done or failed, once; the caller holds the lock."""
        if not request.done.is_set():
            request.error = error
            self._in_flight.pop(key_of(request.name), None)
            request.done.set()

    def _start_thread(self) -> None:
        if self._thread is None and self._failure is None:
            self._thread = threading.Thread(
                target=self._serve, name="hvd_order collectives", daemon=True
            )
            self._thread.start()

    def _serve(self) -> None:
        assert self._runner is not None
        with torch.no_grad():
            while (decision := self._decisions.get()) is not None:
                with self._lock:
                    request = self._in_flight.get(decision.key)
                    if self._broken and request is not None:
                        self._end(request, self._failure)
                    if self._broken or (request is None and self._job.rank not in decision.absent):
                        continue  # it has failed already
                failure: HorovodInternalError | None = None
                try:
                    self._runner.run(decision, request)
                except StillInStep as told:
                    failure = told.error
                except Exception as error:
                    failure = self._fail(error, request.name if request else decision.key)
                if request is not None:
                    with self._lock:
                        self._end(request, failure)

    def _fail(self, error: Exception, what: str) -> HorovodInternalError:
        with self._lock:
            if self._failure is None:
                self._failure = translate_failure(error, what, self._job)
            self._broken = True
            return self._failure
