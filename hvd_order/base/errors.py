"""All exceptions that hvd_order raises, as one small tree.

A mistake in the user's program is also a ``ValueError`` (as in Horovod). A failed collective is a
``HorovodInternalError`` (the name that elastic training code catches). A defect of hvd_order is a
``BrokenInvariant``, which should be reported.
"""

# ruff: noqa: N818  (the names are Horovod's and plain words, without the suffix Error)

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = [
    "BrokenInvariant",
    "CommitLost",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "HvdOrderError",
    "InvalidUsage",
    "ModelMismatch",
    "NotInitialized",
    "NotTrusted",
    "PeerLost",
    "RanksDiffer",
    "StaleRead",
    "TransferTimeout",
]


class HvdOrderError(RuntimeError):
    """Base class of all exceptions that hvd_order raises on purpose."""

    # AutoGraph adds the user's line to the text of an error. It keeps the class of errors with
    # this constructor, and converts all other errors to its own StagingError.
    if not TYPE_CHECKING:
        __init__ = Exception.__init__


class NotInitialized(HvdOrderError, ValueError):
    """A function that needs the other ranks was called before ``init()``."""


class InvalidUsage(HvdOrderError, ValueError):
    """A mistake in the calling program; the message names it and the correction."""


class NotTrusted(InvalidUsage):
    """Another process did not prove that it has the job's secret, or refused this process."""


class HorovodInternalError(HvdOrderError):
    """A collective failed; the ranks may no longer agree on the next operation."""


class PeerLost(HorovodInternalError):
    """Another rank died, left or closed its connection while it was needed; all ranks raise it."""


class TransferTimeout(HorovodInternalError):
    """A transfer, or a rank that takes part in it, was not ready within ``HVD_ORDER_TIMEOUT``."""


class ModelMismatch(HorovodInternalError):
    """Ranks disagree about a tensor: its presence, shape, dtype or the operation on it."""


class RanksDiffer(ModelMismatch):
    """Ranks that train one model have different parameters or different optimizers."""


class HostsUpdatedInterrupt(HvdOrderError):  # as in Horovod not a HorovodInternalError
    """The processes of an elastic job are about to change; raised where the state is complete.

    Attributes:
        skip_sync: whether the remaining ranks need no new state, because ranks only left.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the processes of the job are about to change")
        self.skip_sync = skip_sync


class CommitLost(HvdOrderError):
    """The committed state of an elastic job cannot be stored or restored."""


class StaleRead(HvdOrderError):
    """A parameter was read before its deferred update, through an address taken earlier.

    Other readers outside Python meet a lock on the parameter's memory; torch raises a plain
    ``RuntimeError`` for it, whose text begins with ``StaleRead``.
    """


class BrokenInvariant(HvdOrderError):
    """A defect of hvd_order itself; please report it with the message."""
