"""A rank's side of the channel: shows the job's reports, and answers where this rank is.

One thread of each rank speaks with the store, over a connection of its own, so training waits for
nothing here. It looks for questions once a second; in a job of many ranks less often, so that rank
0's store has at most a hundred looks a second to answer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import sys
import sysconfig
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import Store, TCPStore

import hvd_order
from hvd_order.base.bounded import answer_s, within
from hvd_order.base.errors import NotTrusted
from hvd_order.base.store_errors import first_line
from hvd_order.engine.account.reports import MOST_OPTIMIZERS, StepReport, on_report
from hvd_order.engine.account.watchers import WATCHERS
from hvd_order.engine.job import activity, group_collectives
from hvd_order.engine.job.job import Job
from hvd_order.servers.access.secret import load_secret, new_secret
from hvd_order.watch.channel.job_files import JobFile, announce, began_at, withdraw
from hvd_order.watch.channel.notes import (
    NEWEST,
    JobNote,
    Names,
    PlaceNote,
    ReportNote,
    opened,
    signed,
)

__all__: list[str] = []

_log = logging.getLogger("hvd_order")

_LOOK_S = 1.0
_LOOKS_A_SECOND = 100  # of all ranks together
_PARTING_S = 5.0  # for a thread that may wait for a stopped store
_MOST_QUESTIONS = 8  # at a time
_FRAMES = 40  # of a stack, the innermost


def begin(job: Job) -> None:
    """Begins to show a job. Collective.

    Raises:
        InvalidUsage: the variables name a secret that cannot be read.
        HorovodInternalError: a rank did not take part.
    """
    store = job.store
    while store is not None and not isinstance(store, TCPStore):
        store = getattr(store, "underlying_store", None)
    if store is None:  # alone, or the program's own group has met in a file
        return
    key = name = None
    if job.rank == 0:
        told = any(os.environ.get(f"HVD_ORDER_SECRET{end}") for end in ("", "_FILE"))
        key = load_secret(os.environ) if told else new_secret()
        name = secrets.token_hex(8)
    everyone = group_collectives.gather_objects(
        (key, name, socket.gethostname(), os.getpid()), job.functions_group, "who can be looked at"
    )
    key, name, _, _ = everyone[0]
    channel = _Channel(job, store, key, name)
    if job.rank == 0:
        note = JobNote(time.time(), [each[2] for each in everyone], [each[3] for each in everyone])
        channel.show_job(note)
    channel.start()
    job.on_shutdown(channel.end)


class _Channel:
    """One rank's side of the channel of one job."""

    def __init__(self, job: Job, store: TCPStore, key: bytes, name: str) -> None:
        self._job = job
        self._host, self._port = store.host, store.port
        self._key = key
        self._name = name
        self._names = Names(name)
        self._note: JobNote | None = None  # of rank 0
        self._lock = threading.Lock()
        self._newest: dict[str, StepReport] = {}  # guarded by _lock
        self._is_new = False  # guarded by _lock: whether the store lacks a report
        self._answered = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvd_order watch", daemon=True)
        self._remove = on_report(self._take) if job.rank == 0 else lambda: None

    def show_job(self, note: JobNote) -> None:
        """Takes what rank 0 says about the job; the thread leaves it in the store."""
        self._note = note
        command = Path(sys.argv[0]).name  # arguments may hold what nobody else should read
        process = os.getpid()
        here = JobFile(
            process,
            began_at(process),
            f"{self._host}:{self._port}",
            self._key.hex(),
            self._job.size,
            command,
        )
        if not announce(here):
            _log.info("hvd-order top does not find this job: its file cannot be written")

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def end(self) -> None:
        """Ends the thread; it stays behind if the store does not answer."""
        if self._job.is_forked:
            return
        self._remove()
        self._over.set()
        self._thread.join(_PARTING_S)
        if self._job.rank == 0:
            withdraw(os.getpid())

    def _take(self, report: StepReport) -> None:
        with self._lock:
            self._newest.pop(report.key, None)
            self._newest[report.key] = report
            while len(self._newest) > MOST_OPTIMIZERS:
                self._newest.pop(next(iter(self._newest)))
            self._is_new = True

    def _run(self) -> None:
        try:
            store = self._connect()
            if self._note is not None:
                self._leave(store, self._names.job, self._note)
                store.set(NEWEST, self._name)
            every_s = max(_LOOK_S, self._job.size / _LOOKS_A_SECOND if self._job.rank else 0)
            while not self._over.wait(every_s):
                self._show_reports(store)
                self._answer(store)
        except Exception as error:  # of the store: the job goes on without being seen
            if not self._over.is_set():
                _log.debug("rank %d is not seen any more: %s", self._job.rank, first_line(error))

    def _connect(self) -> Store:
        patience = timedelta(seconds=answer_s(self._job.config.timeout))
        return within(
            patience.total_seconds() + _LOOK_S,
            lambda: TCPStore(
                self._host, self._port, is_master=False, timeout=patience, wait_for_workers=False
            ),
        )

    def _leave(self, store: Store, key: str, note: JobNote | ReportNote | PlaceNote) -> None:
        store.set(key, signed(self._key, key, note.content()))

    def _show_reports(self, store: Store) -> None:
        with self._lock:
            is_new, self._is_new = self._is_new, False
            newest = dict(self._newest)
        if is_new:
            note = ReportNote.from_reports(time.time(), newest)
            self._leave(store, self._names.report, note)

    def _answer(self, store: Store) -> None:
        newest = store.add(self._names.questions, 0)
        first, self._answered = max(self._answered + 1, newest - _MOST_QUESTIONS + 1), newest
        for number in range(first, newest + 1):
            question = self._names.question(number)
            if not store.check([question]):
                continue  # its tool does not wait any more
            with contextlib.suppress(NotTrusted):  # a stranger's; he learns nothing
                opened(self._key, question, store.get(question))
                place = PlaceNote(_own_frame(), activity.now() or _own_wait(), _stacks())
                self._leave(store, self._names.answer(number, self._job.rank), place)


_NOT_THE_PROGRAMS = (
    str(Path(hvd_order.__file__).parent),
    *(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<",  # made by a library, as dataclasses are
)


def _own_frame() -> str:
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = [] if main is None else traceback.extract_stack(main)
    own = [frame for frame in stack if not frame.filename.startswith(_NOT_THE_PROGRAMS)]
    found = (own or stack)[-1:]
    return f"{found[0].filename}:{found[0].lineno} {found[0].name}" if found else "nowhere"


def _own_wait() -> str:
    """That the main thread waits for a gradient, if it does."""
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    is_wait = main is not None and main.f_code.co_name in ("wait", "wait_on_host")
    is_ours = main is not None and main.f_code.co_filename.startswith(_NOT_THE_PROGRAMS[0])
    return "waits for the sum of a gradient" if is_wait and is_ours else ""


def _stacks() -> dict[str, list[str]]:
    """Where the Python threads of this process are, without this one."""
    frames = sys._current_frames()
    main = threading.main_thread()
    threads = sorted(threading.enumerate(), key=lambda thread: thread is not main)
    return {
        thread.name: [
            f"{frame.filename}:{frame.lineno} {frame.name}"
            for frame in traceback.extract_stack(frames[thread.ident], limit=_FRAMES)
        ]
        for thread in threads
        if thread.ident in frames and thread is not threading.current_thread()
    }


WATCHERS.register("channel", begin)
