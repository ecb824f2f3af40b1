"""What a process set is, for every framework; registering one is the shims' affair."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["RankSet"]


class RankSet:
    """A set of ranks of the job. A shim's class says which of them this process is.

    Attributes:
        process_set_id: number of the set, the same on all ranks; None while it is not registered.
        mpi_comm: None; for Horovod's sake.
    """

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        """Describes the set; registers nothing.

        Args:
            ranks_or_comm: ranks of the job. MPI communicators are not supported.

        Raises:
            ValueError: these are not ranks.
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
        """Of this process in the job. Raises NotInitialized before ``init()``."""
        raise AssertionError("a shim's class says this")

    @property
    def ranks(self) -> list[int]:
        """The ranks in the job of the set's members, ascending."""
        return self._ranks

    def rank(self) -> int | None:
        """This process's place in the set; None while the set is not registered.

        Raises:
            ValueError: this process does not belong to it.
        """
        if self.process_set_id is None:
            return None
        if not self.included():
            raise ValueError("Process is not part of provided process set.")
        return self.ranks.index(self._own_rank())

    def size(self) -> int | None:
        """How many processes the set has; None while it is not registered."""
        return None if self.process_set_id is None else len(self.ranks)

    def included(self) -> bool:
        """Whether this process belongs to the set."""
        return self._own_rank() in self.ranks
