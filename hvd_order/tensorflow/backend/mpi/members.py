"""The ranks of a process set and their messages. Every wait has a timeout."""

from __future__ import annotations

import pickle
import time
from typing import Any

import numpy as np
from mpi4py import MPI

from hvd_order.base.errors import HorovodInternalError, TransferTimeout

__all__ = ["Members"]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5e-5, 2e-3


class Members:
    """A communicator with a timeout.

    MPI's own waits occupy a core; here a request is polled with pauses.

    Thread safety: one thread at a time, since MPI matches collectives by their order.

    Attributes:
        comm: the communicator.
        ranks: ranks in the job, by place in the set.
        rank, size: this process's place, and the number of members.
    """

    def __init__(self, comm: MPI.Intracomm, ranks: list[int], timeout_s: float) -> None:
        self.comm = comm
        self.ranks = ranks
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self._timeout_s = timeout_s
        self._abandoned: list[MPI.Request] = []

    def another(self, what: str) -> Members:
        """Duplicates the communicator. Collective.

        Args:
            what: for messages.
        """
        comm, request = self.comm.Idup()
        self.finish(request, what)
        return Members(comm, self.ranks, self._timeout_s)

    def finish(
        self, request: MPI.Request, what: str, longest_pause_s: float = _LONGEST_PAUSE_S
    ) -> None:
        """Waits for a request.

        Args:
            what: for messages.
            longest_pause_s: longest pause between two polls.

        Raises:
            TransferTimeout: the request is not done in time.
            HorovodInternalError: MPI failed.
        """
        deadline = time.monotonic() + self._timeout_s
        pause_s = _FIRST_PAUSE_S
        try:
            while not request.Test():
                if time.monotonic() > deadline:
                    self._abandoned.append(request)  # MPI may still write into its memory
                    raise TransferTimeout(
                        f"rank {self.ranks[self.rank]}, {what}: not done within "
                        f"{self._timeout_s:g} s (HVD_ORDER_TIMEOUT); another rank is late or does "
                        "not call it"
                    )
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_pause_s)
        except MPI.Exception as error:
            raise HorovodInternalError(
                f"rank {self.ranks[self.rank]}, {what}: {error.Get_error_string()}"
            ) from error

    def gather(self, value: Any, what: str) -> list[Any]:
        """Gathers every member's value, by place."""
        mine = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = np.zeros(self.size, np.int64)
        self.finish(self.comm.Iallgather(np.array([mine.size], np.int64), sizes), what)
        everyone = np.zeros(int(sizes.sum()), np.uint8)
        self.finish(self.comm.Iallgatherv(mine, [everyone, sizes.tolist()]), what)
        ends = np.cumsum(sizes)
        return [
            pickle.loads(everyone[end - size : end].tobytes())
            for end, size in zip(ends, sizes, strict=True)
        ]

    def broadcast(self, value: Any, root: int, what: str) -> Any:
        """Broadcasts the value of the member at place `root`.

        Raises:
            HorovodInternalError: the value cannot be pickled (raised on every rank).
        """
        packed, error = b"", ""
        if self.rank == root:
            try:
                packed = pickle.dumps(value)
            except Exception as why:
                error = f"rank {self.ranks[root]}, {what}: cannot be pickled: {why}"
        size = np.array([-1 if error else len(packed)], np.int64)
        self.finish(self.comm.Ibcast(size, root), what)
        if size[0] < 0:
            raise HorovodInternalError(error or f"rank {self.ranks[root]} cannot pickle: {what}")
        content = np.frombuffer(packed, np.uint8).copy() if packed else np.zeros(size[0], np.uint8)
        self.finish(self.comm.Ibcast(content, root), what)
        return pickle.loads(content.tobytes())
