"""A tool's side of the channel: finds a job, reads what its ranks show, asks where they are."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

from hvd_order.base.bounded import within
from hvd_order.base.errors import InvalidUsage, PeerLost
from hvd_order.base.store_errors import first_line
from hvd_order.servers.access.secret import load_secret
from hvd_order.watch.channel.job_files import jobs_here
from hvd_order.watch.channel.notes import (
    NEWEST,
    JobNote,
    Names,
    PlaceNote,
    ReportNote,
    opened,
    signed,
)

__all__ = ["JobView", "find_job"]

Answer = TypeVar("Answer")

_STORE_S = 10.0  # for an answer of the store: milliseconds unless rank 0 is stopped
_LOOK_S = 0.1
_HOW = (
    "Name a job by the process id of its rank 0, on that rank's host, or by HOST:PORT, where its "
    "ranks meet (MASTER_ADDR and MASTER_PORT)"
)


def find_job(named: str) -> JobView:
    """Connects to a job.

    Args:
        named: process id of rank 0 on this host, or HOST:PORT; empty: the only job of this user
            whose rank 0 runs here.

    Raises:
        InvalidUsage: there is no such job here, or its key is not known.
        PeerLost: its store cannot be reached.
    """
    here = jobs_here()
    if re.fullmatch(r"\S+:\d+", named):
        known = [job for job in here if job.store == named]
        if known:
            return JobView(named, bytes.fromhex(known[-1].key))
        return JobView(named, _secret_of(named))
    found = [job for job in here if not named or str(job.process) == named]
    if len(found) == 1:
        return JobView(found[0].store, bytes.fromhex(found[0].key))
    listed = "".join(f"\n  {job}" for job in here)
    if not here:
        raise InvalidUsage(
            f"no job of this user has its rank 0 on {socket.gethostname()}, or has passed init(). "
            f"{_HOW}. Jobs with HVD_ORDER_WATCH=0, and those of one rank, cannot be looked at"
        )
    what = "several jobs run here" if not named else f"no job {named} runs here"
    raise InvalidUsage(f"{what}. {_HOW}. Here are:{listed}")


def _secret_of(store: str) -> bytes:
    if not any(os.environ.get(f"HVD_ORDER_SECRET{end}") for end in ("", "_FILE")):
        raise InvalidUsage(
            f"the key of the job at {store} is not known here. Run this command on the host of its "
            "rank 0, as its user; or start the job with a secret (HVD_ORDER_SECRET_FILE, Security) "
            "and name the same one here"
        )
    return load_secret(os.environ)


class JobView:
    """A running job, from outside.

    All methods raise PeerLost where its store does not answer, which usually means that the job has
    ended, and NotTrusted where somebody else has written into it.
    """

    def __init__(self, store: str, key: bytes) -> None:
        """Connects to the store at "host:port"."""
        from torch._C._distributed_c10d import TCPStore

        self.address = store
        self._key = key
        host, _, port = store.rpartition(":")
        host = host.strip("[]")
        try:
            # PyTorch tries again and again where nobody listens.
            socket.create_connection((host, int(port)), _STORE_S).close()
        except OSError as error:
            raise PeerLost(
                f"nobody listens at {store} ({error.strerror or error}): has the job ended? {_HOW}"
            ) from error
        patience = timedelta(seconds=_STORE_S)
        self._store = self._asked(
            lambda: TCPStore(
                host, int(port), is_master=False, timeout=patience, wait_for_workers=False
            )
        )
        if not self._has(NEWEST):
            raise InvalidUsage(
                f"the ranks that meet at {store} show nothing: the job is still in init(), it has "
                "HVD_ORDER_WATCH=0, or it is none of hvd_order"
            )
        self._find()

    def _find(self) -> None:
        """Finds the present job: an elastic one begins anew in its store."""
        name = self._asked(lambda: self._store.get(NEWEST))
        self._names = Names(name.decode(errors="replace"))

    def job(self) -> JobNote:
        """Returns the job's ranks."""
        self._find()
        return JobNote.of(self._opened(self._names.job))

    def report(self) -> ReportNote | None:
        """Returns the newest reports; None: there is none so far."""
        self._find()
        name = self._names.report
        return ReportNote.of(self._opened(name)) if self._has(name) else None

    def places(self, size: int, timeout_s: float) -> Mapping[int, PlaceNote]:
        """Asks all ranks where they are, and returns what came in time, by rank."""
        number = self._asked(lambda: self._store.add(self._names.questions, 1))
        question = self._names.question(number)
        record = signed(self._key, question, {"what": "where"})
        self._asked(lambda: self._store.set(question, record))
        answers: dict[int, PlaceNote] = {}
        # Many ranks look for questions less often (rank_side.py).
        deadline = time.monotonic() + max(timeout_s, size / 100 + 1)
        while len(answers) < size and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            for rank in [rank for rank in range(size) if rank not in answers]:
                name = self._names.answer(number, rank)
                if self._has(name):
                    answers[rank] = PlaceNote.of(self._opened(name))
        for name in (question, *(self._names.answer(number, rank) for rank in answers)):
            self._delete(name)
        return answers

    def _has(self, name: str) -> bool:
        return self._asked(lambda: self._store.check([name]))

    def _opened(self, name: str) -> dict[str, Any]:
        return opened(self._key, name, self._asked(lambda: self._store.get(name)))

    def _delete(self, name: str) -> None:
        self._asked(lambda: self._store.delete_key(name))

    def _asked(self, call: Callable[[], Answer]) -> Answer:
        try:
            return within(_STORE_S + 2, call)
        except (RuntimeError, TimeoutError) as error:
            raise PeerLost(
                f"the job at {self.address} does not answer ({first_line(error)}): it has ended, "
                "or its rank 0 is stopped"
            ) from error
