"""Which processes a collective runs over: the global process set, that is all of them."""

from __future__ import annotations

from hvd_order.errors import InvalidUsage
from hvd_order.torch import process

__all__ = ["ProcessSet", "global_process_set", "require_global"]


class ProcessSet:
    """Horovod's description of a set of processes; `global_process_set` is the only one."""

    process_set_id: int = 0

    @property
    def ranks(self) -> list[int]:
        """All ranks; needs ``init()``."""
        return list(range(process.size()))

    def rank(self) -> int:
        """This process's rank in the set."""
        return process.rank()

    def size(self) -> int:
        """How many processes the set has."""
        return process.size()

    def included(self) -> bool:
        """Whether this process belongs to the set."""
        return True

    def __str__(self) -> str:
        ranks = self.ranks if process.is_initialized() else "all"
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={ranks})"


global_process_set = ProcessSet()


def require_global(process_set: object) -> None:
    """Raises InvalidUsage unless `process_set` is `global_process_set`."""
    if process_set is not global_process_set:
        raise InvalidUsage(
            f"process_set is {process_set!r}; only hvd.global_process_set is supported"
        )
