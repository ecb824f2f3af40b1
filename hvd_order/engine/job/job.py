"""The job: what ``init()`` makes and ``shutdown()`` ends, and the one place that holds it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from hvd_order._native import _torch as native
from hvd_order.base.config import Config
from hvd_order.base.errors import InvalidUsage, NotInitialized
from hvd_order.engine.job.gloo import Traffic
from hvd_order.engine.job.process_groups import GroupRequest, Groups
from hvd_order.engine.job.roll_call import RollCall
from hvd_order.launch.environment import RankPlacement

__all__ = ["Job", "current", "held", "is_initialized"]

P = TypeVar("P")


class Job:
    """One job of this process, from ``init()`` to ``shutdown()``; `current` returns it.

    Everything that lasts as long as the job is a part of it: process sets, queues of collectives,
    engines, the timeline. A part is an object that `part` makes when it is first needed. No module
    keeps such an object in a variable of its own, so an earlier job's state cannot reach a later
    job, and a forked child cannot mix the two.

    Attributes:
        rank, size: this process's number among all processes, and their count.
        local_rank, local_size: this process's number on its host, and the host's process count.
        cross_rank, cross_size: this host's number among the hosts that have a process of this
            local rank, and their count.
        config: the knobs, read from the environment once.
        backend: backend of new groups, in torch.distributed's spelling; empty if the job is alone.
        abandoned: the process ends by an error, so `close` applies no updates and waits for no
            rank.
        is_open: ``shutdown()`` has not begun.
        roll_call: asks which ranks are alive; None until the ranks exchange messages.

    Thread safety: any thread may read the attributes and call `part`; the other methods belong to
    the thread that called ``init()``.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        place: RankPlacement,
        config: Config,
        backend: str,
        maker: Groups | None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = place.local_rank
        self.local_size = place.local_size
        self.cross_rank = place.cross_rank
        self.cross_size = place.cross_size
        self.config = config
        self.backend = backend
        self.abandoned = False
        self.is_open = True
        self.roll_call: RollCall | None = None
        self._pid = os.getpid()
        self._thread = threading.current_thread()
        self._maker = maker
        self._groups: list[dist.ProcessGroup] = []
        self._parts: dict[Callable[[Job], Any], Any] = {}
        self._parts_lock = threading.RLock()  # a part may need another one when it is made
        self._callbacks: list[Callable[[], None]] = []
        self._functions_group: dist.ProcessGroup | None = None
        self._messages_group: dist.ProcessGroup | None = None
        if not self.is_alone:
            self._functions_group = self.new_group("functions")
            self._messages_group = self.new_group("messages", "gloo", traffic="messages")

    @property
    def is_alone(self) -> bool:
        """Whether there are neither other ranks nor servers; then there are no process groups."""
        return self._maker is None

    @property
    def store(self) -> Store | None:
        """Where the ranks have met; None: `is_alone`. A thread needs a connection of its own."""
        return None if self._maker is None else self._maker.store

    @property
    def patience(self) -> timedelta:
        """Longest transfer of an engine: longer than its timeout, at which it can name the cause of
        a stall.
        """
        return self.config.timeout * 1.25

    def new_group(
        self,
        purpose: str,
        backend: str | None = None,
        timeout: timedelta | None = None,
        ranks: list[int] | None = None,
        traffic: Traffic = "in turn",
    ) -> dist.ProcessGroup:
        """Makes a process group with connections of its own; destroyed at shutdown.

        Collective: every rank must call it, in the same order.

        Args:
            purpose: one word for logs.
            backend: in torch.distributed's spelling; None: `backend`.
            timeout: longest transfer; None: the timeout of the configuration.
            ranks: the members; None: all ranks.
            traffic: what the group carries.

        Returns:
            The group; on a rank that is not a member, an unusable object.

        Raises:
            InvalidUsage: in a job of one process without servers.
            HorovodInternalError: a rank did not arrive, or cannot be reached.
        """
        if self._maker is None:
            raise InvalidUsage("a job of one process has no process groups")
        timeout = self.config.timeout if timeout is None else timeout
        group = self._maker.make(
            GroupRequest(purpose, backend or self.backend, timeout, ranks, traffic)
        )
        if ranks is None or self.rank in ranks:
            self._groups.append(group)
            native.watch_group(group)
        return group

    def open_groups(self) -> list[dist.ProcessGroup]:
        """Returns the groups made here, and torch.distributed's default group."""
        everybody = [dist.group.WORLD] if dist.is_initialized() else []
        return [*self._groups, *(group for group in everybody if group is not None)]

    def drop_group(self, group: dist.ProcessGroup) -> None:
        """Destroys a group before the shutdown."""
        if group in self._groups and self._maker is not None:
            self._groups.remove(group)
            self._maker.end(group)

    @property
    def functions_group(self) -> dist.ProcessGroup:
        """The group for allreduce(), broadcast() and similar functions.

        Raises:
            InvalidUsage: in a job of one process without servers.
        """
        if self._functions_group is None:
            raise InvalidUsage("a job of one process has no process groups")
        return self._functions_group

    @property
    def messages_group(self) -> dist.ProcessGroup:
        """The group over which ranks agree on the next collective.

        Raises:
            InvalidUsage: in a job of one process without servers.
        """
        if self._messages_group is None:
            raise InvalidUsage("a job of one process has no process groups")
        return self._messages_group

    @property
    def is_on_own_thread(self) -> bool:
        """Whether the caller runs on the thread that called ``init()``."""
        return threading.current_thread() is self._thread

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the rank, without the rank's threads."""
        return self._pid != os.getpid()

    def check_not_forked(self, what: str) -> None:
        """Raises InvalidUsage in a forked child of the rank."""
        if self.is_forked:
            raise InvalidUsage(
                f"{what} in process {os.getpid()}, which was forked from rank {self.rank} "
                f"(process {self._pid}) and takes no part in the job; call it there"
            )

    def part(self, kind: Callable[[Job], P]) -> P:
        """Returns this job's object of a class; the first call makes it.

        An object that has work to do at the end registers it with `on_shutdown`.

        Args:
            kind: the class; its constructor takes the job.
        """
        found: P | None = self.existing_part(kind)
        if found is None:
            with self._parts_lock:
                found = self.existing_part(kind)
                if found is None:
                    found = self._parts[kind] = kind(self)
        return found

    def existing_part(self, kind: Callable[[Job], P]) -> P | None:
        """Returns this job's object of a class if there is one; makes none, takes no lock."""
        return self._parts.get(kind)

    def on_shutdown(self, callback: Callable[[], None]) -> None:
        """Runs `callback` at shutdown or at exit, the last registered first."""
        self._callbacks.append(callback)

    def close(self) -> None:
        """Runs the callbacks and destroys the groups made here; a second call does nothing.

        Raises:
            Exception: the first error of a callback, after all have run.
        """
        first_error: Exception | None = None
        while self._callbacks:
            try:
                self._callbacks.pop()()
            except Exception as error:
                first_error = first_error or error
        self._functions_group = self._messages_group = None
        while self._groups:
            self.drop_group(self._groups[-1])
        if first_error is not None:
            raise first_error


class JobHolder:
    """Holds the job of this process.

    Attributes:
        job: the job, also while it ends: what runs then still finds the job's parts.
        lock: guards `job`; ``init()`` holds it while it waits for ranks.
    """

    def __init__(self) -> None:
        self.job: Job | None = None
        self.lock = threading.Lock()
        self._of_parents: list[Job] = []

    def begin(self, job: Job) -> None:
        """Makes a job the current one."""
        self.job = job

    def end(self, job: Job) -> None:
        """Lets go of a job that has ended."""
        if self.job is job:
            self.job = None

    def leave_to_parent(self, job: Job) -> None:
        """Lets go of a job that belongs to the process that this one was forked from.

        Its objects stay in memory: native ones would wait for threads that do not exist here.
        """
        self._of_parents.append(job)
        self.end(job)


holder = JobHolder()


def held() -> Job | None:
    """Returns the job, also while ``shutdown()`` ends it; None before and after."""
    return holder.job


def is_initialized() -> bool:
    """Returns whether ``init()`` was called without a later ``shutdown()``."""
    job = holder.job
    return job is not None and job.is_open


def current() -> Job:
    """Returns the job that ``init()`` made.

    Raises:
        NotInitialized: ``init()`` was not called.
    """
    job = holder.job
    if job is None or not job.is_open:
        raise NotInitialized("Horovod has not been initialized; use hvd.init().")
    return job
