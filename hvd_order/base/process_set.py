"""Base class of process sets for every framework; the frontends register them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["RankSet"]


class RankSet:
    """A set of ranks of the job. A frontend's subclass provides this process's own rank.

    Attributes:
        process_set_id: number of the set, the same on all ranks; None while it is not registered.
        mpi_comm: None; for compatibility with Horovod.
    """

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        """Describes the set; registers nothing.

        Args:
            ranks_or_comm: ranks of the job. MPI communicators are not supported.

        Raises:
            ValueError: the argument is not a list of ranks.
        """
        if not isinstance(ranks_or_comm, Iterable):
            raise ValueError(
                f"ProcessSet takes a list of ranks, not {type(ranks_or_comm).__name__}"
            )
        ranks = sorted(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError(f"ProcessSet takes a list of ranks; got {ranks}")
        self._ranks = ranks
        self.process_set_id: int | None = None
        self.mpi_comm: Any = None

    @staticmethod
    def _own_rank() -> int:
        """Returns this process's rank in the job. Raises NotInitialized before ``init()``."""
        raise AssertionError("a shim's class says this")

    @property
    def ranks(self) -> list[int]:
        """The members' ranks in the job, ascending."""
        return self._ranks

    def rank(self) -> int | None:
        """Returns this process's place in the set; None while the set is not registered.

        Raises:
            ValueError: this process does not belong to the set.
        """
        if self.process_set_id is None:
            return None
        if not self.included():
            raise ValueError("Process is not part of provided process set.")
        return self.ranks.index(self._own_rank())

    def size(self) -> int | None:
        """Returns the number of processes in the set; None while it is not registered."""
        return None if self.process_set_id is None else len(self.ranks)

    def included(self) -> bool:
        """Returns whether this process belongs to the set."""
        return self._own_rank() in self.ranks
