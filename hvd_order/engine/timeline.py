"""Timeline of transfers, waits, passes and updates, as a Chrome trace that Perfetto opens.

Transfers come from the engine, waits, updates and passes from the frontend, and further spans from
the user through :func:`timeline_span`. Horovod's ``start_timeline`` and ``stop_timeline`` switch
it. Rank 0 writes what all ranks have recorded (tracing/gather.py).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hvd_order.base.same_model import name_ranks
from hvd_order.engine.engine_host import Engines
from hvd_order.engine.job import process
from hvd_order.engine.job.job import Job, held
from hvd_order.engine.job.message_forms import Message
from hvd_order.engine.requests.negotiation import Negotiation, listen
from hvd_order.engine.requests.queues import Queues
from hvd_order.engine.tracing.events import event
from hvd_order.engine.tracing.gather import Gathered, Gathering, pieces
from hvd_order.engine.tracing.merge import RankPart, merged
from hvd_order.engine.tracing.passes import Moment, MomentKind
from hvd_order.engine.tracing.recording import RankRecording

__all__ = ["start_timeline", "stop_timeline", "timeline_span"]

_log = logging.getLogger("hvd_order")
_OFF = contextlib.nullcontext()


class _JobTimeline:
    """The recording of one job, if there is one: a part of the `Job`.

    Attributes:
        gathering: rank 0's, while a file of all ranks is recorded.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.recording: RankRecording | None = None
        self.gathering: Gathering | None = None
        self._lock = threading.Lock()  # guards the end of a recording
        self._sending: threading.Thread | None = None
        self._is_sending = False  # this rank's part, after the end of its recording
        job.part(Engines).before_close(self.stop)
        job.part(Queues)  # so that its messages can be sent until this has ended
        job.on_shutdown(self._close)

    def start(self, path: str) -> None:
        """See `start_timeline`."""
        job = self._job
        if self.recording is not None:
            raise ValueError(
                f"a timeline is being recorded to {self.recording.path}; call stop_timeline() first"
            )
        recording = RankRecording(path, job.rank, time.monotonic_ns())
        negotiation = self._negotiation() if recording.is_of_all_ranks else None
        if negotiation is not None and job.rank == 0:
            self.gathering = Gathering(job.size, negotiation.tell)
            self.gathering.ask_clocks()  # answers may come at once
        self.recording = recording
        job.part(Engines).record(True)

    def _negotiation(self) -> Negotiation | None:
        return self._job.part(Queues).negotiation

    def _end(self, until_ns: int | None = None) -> tuple[RankRecording, RankPart] | None:
        """Ends the recording, if it began before a time of this rank's clock."""
        with self._lock:
            recording = self.recording
            if recording is None or (until_ns is not None and recording.begin_ns > until_ns):
                return None
            self._is_sending = recording.is_of_all_ranks and self._job.rank != 0
            self.recording = None
            engines = self._job.part(Engines)
            engines.record(False)
            transfers = [host.take_transfers() for host in list(engines.hosts.values())]
        return recording, RankPart(events=recording.events(transfers))

    def stop(self) -> None:
        """Writes the trace, or sends this rank's part. Does nothing if nothing is recorded."""
        ended = self._end()
        if ended is None:
            return
        recording, part = ended
        rank = self._job.rank
        if not recording.is_of_all_ranks:
            _write(recording.path.replace("{rank}", str(rank)), merged({rank: part}, {}))
        elif rank == 0:
            gathering = self.gathering
            others = Gathered() if gathering is None else gathering.collect()
            self.gathering = None
            _tell_missing(recording.path, others.missing)
            document = merged({0: part, **others.parts}, others.clocks, others.missing)
            _write(recording.path, document)
        else:
            self._send(part)

    def _send(self, part: RankPart) -> None:
        negotiation = self._negotiation()
        if negotiation is not None:
            for message in pieces(part):
                negotiation.send(message)
        self._is_sending = False

    def answer(self, until_ns: int) -> None:
        """Ends the recording, as rank 0 asks, and sends the part; does not wait."""

        def end() -> None:
            ended = self._end(until_ns)
            if ended is not None:
                self._send(ended[1])

        self._sending = threading.Thread(target=end, name="hvd_order timeline", daemon=True)
        self._sending.start()

    @property
    def records_for_all(self) -> bool:
        """Whether this rank records a part of a file of all ranks, or has yet to send it."""
        recording = self.recording
        return self._is_sending or (recording is not None and recording.is_of_all_ranks)

    def _close(self) -> None:
        """Ends what is in progress; the recording, too, in a process without an engine."""
        self.stop()
        if self._sending is not None:
            self._sending.join()


def _tell_missing(path: str, missing: Mapping[str, Sequence[int]]) -> None:
    for cause, ranks in missing.items():
        chosen = cause == "does not record"  # the program's own choice
        _log.log(
            logging.INFO if chosen else logging.WARNING,
            "the timeline %s has no events of %s: each %s",
            path, name_ranks(list(ranks)), cause,
        )  # fmt: skip


def _write(path: str, document: Mapping[str, Any]) -> None:
    path = os.path.abspath(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(document, file)


class _Messages:
    """What ranks tell each other about timelines; see `Listener`."""

    kinds: tuple[str, ...] = ("clock", "trace")

    def heard(self, ranks: Negotiation, sender: int, message: Message) -> None:
        timeline = _of_held_job()
        if sender != 0:
            gathering = None if timeline is None else timeline.gathering
            if gathering is not None:
                gathering.heard(sender, message)
            return
        records = timeline is not None and timeline.records_for_all
        if message[0] == "clock" or not records:
            ranks.send(["clock", time.monotonic_ns(), records])
        else:
            assert timeline is not None
            timeline.answer(message[1])

    def lost(self, rank: int) -> None:
        timeline = _of_held_job()
        if timeline is not None and timeline.gathering is not None:
            timeline.gathering.lost(rank)


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Starts a recording on this rank.

    Args:
        file_path: file that rank 0 writes at :func:`stop_timeline` (or ``shutdown()``), with the
            events of all ranks that record; with ``{rank}`` in it, every rank writes its own.
        mark_cycles: accepted for compatibility with Horovod; this engine has no cycles.

    Raises:
        NotInitialized: before ``init()``.
        ValueError: a recording is in progress.
    """
    del mark_cycles
    process.current().part(_JobTimeline).start(file_path)


def stop_timeline() -> None:
    """Ends the recording, and writes the trace. Does nothing if no recording is in progress.

    Not collective. On rank 0 it ends the recording on all ranks, which it waits for: seconds at
    most, if one does not answer. A rank that cannot be heard is named in the log and in the file.
    """
    timeline = _of_held_job()
    if timeline is not None:
        timeline.stop()


def _of_held_job() -> _JobTimeline | None:
    job = held()  # updates and waits that end the job are recorded too
    return None if job is None else job.existing_part(_JobTimeline)


def start_if_asked() -> None:
    """Starts the recording that ``HVD_ORDER_TIMELINE`` asks for, at the end of ``init()``."""
    path = process.current().config.timeline
    if path:
        start_timeline(path)


listen(_Messages())


def span(
    category: str, name: str, more: Callable[[], Mapping[str, Any]] | None = None, **args: Any
) -> contextlib.AbstractContextManager[Any]:
    """Records the body as one event of this rank, if a recording is in progress.

    Waits and updates are also ranges for a profiler of PyTorch that runs on this thread.

    Args:
        category: the row (tracing/events.py).
        more: further arguments of the event, that cost something; called if it is recorded.
        args: arguments of the event.
    """
    timeline = _of_held_job()
    recording = None if timeline is None else timeline.recording
    profiled = category != "compute" and profiler_runs()
    if recording is None and not profiled:
        return _OFF
    return _span(recording, category, name, {**args, **(more() if more and recording else {})})


def profiler_runs() -> bool:
    """Whether a profiler of PyTorch sees what this thread does at this moment."""
    return bool(torch._C._autograd._profiler_enabled())


def profiler_range(name: str) -> contextlib.AbstractContextManager[Any]:
    """A range for it; under ``emit_nvtx()`` it is one of NVTX."""
    return torch.profiler.record_function(f"hvd_order::{name}")


def moment(
    kind: MomentKind, model: int, tensors: Callable[[], Sequence[int]] | None = None
) -> None:
    """Records something that bounds a forward or backward pass, if a recording is in progress."""
    timeline = _of_held_job()
    if timeline is not None and (recording := timeline.recording) is not None:
        of = () if tensors is None else tensors()
        recording.moments.append(Moment(time.monotonic_ns(), kind, model, of))


def timeline_span(name: str) -> contextlib.AbstractContextManager[None]:
    """Records the body, a part of the user's own step such as "forward", as one event."""
    return span("compute", name)


@contextlib.contextmanager
def _span(
    recording: RankRecording | None, category: str, name: str, args: dict[str, Any]
) -> Iterator[None]:
    start = time.monotonic_ns()
    try:
        if category != "compute" and profiler_runs():
            with profiler_range(f"wait {name}" if category == "wait" else name):
                yield
        else:
            yield
    finally:
        if recording is not None:
            recording.spans.append(event(category, name, start, time.monotonic_ns(), args))
