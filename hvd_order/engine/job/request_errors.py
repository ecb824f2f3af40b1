"""Translation of torch.distributed's errors into errors of hvd_order that name place and cause."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from hvd_order.base.errors import HorovodInternalError, HvdOrderError, PeerLost, TransferTimeout
from hvd_order.base.store_errors import first_line
from hvd_order.engine.job.job import Job

__all__ = ["afresh", "common_step", "translate_failure"]


@contextlib.contextmanager
def common_step(job: Job, what: str, *, kind: str, ranks: Sequence[int]) -> Iterator[None]:
    """Wraps a transfer that some ranks take part in, all after the same steps of its kind.

    Args:
        job: the current job.
        what: description of the transfer, for errors.
        kind: kind of common step; a rank that has started fewer of them is late.
        ranks: ranks that take part.

    Raises:
        HorovodInternalError: the transfer failed; names the rank that is gone, stopped or late.
    """
    if job.roll_call is not None:
        job.roll_call.come_to(kind)
    try:
        yield
    except HvdOrderError:
        raise
    except RuntimeError as error:
        raise translate_failure(error, what, job, kind, ranks) from error


def translate_failure(
    error: Exception,
    what: str,
    job: Job,
    kind: str | None = None,
    ranks: Sequence[int] | None = None,
) -> HorovodInternalError:
    """Translates torch.distributed's error, which can be classified only by its text.

    Runs a roll call, which takes some seconds if a rank does not answer.

    Args:
        error: the error.
        what: description of the failed transfer, for the message.
        job: the current job.
        kind: as in `common_step`; None: all ranks had started it.
        ranks: as in `common_step`; None: all.
    """
    if isinstance(error, HorovodInternalError):
        return error
    where = f"rank {job.rank}, {what}"
    text = first_line(error)
    low = str(error).lower()
    if any(sign in low for sign in ("timed out", "timeout")):
        return TransferTimeout(
            f"{where}: not done within {job.config.timeout.total_seconds():g} s "
            f"(HVD_ORDER_TIMEOUT); {_who(job, kind, ranks)} ({text})"
        )
    signs = ("connection", "closed", "reset by peer", "broken pipe", "socket", "remote", "abort")
    if any(sign in low for sign in signs):
        return PeerLost(f"{where}: {_who(job, None, ranks)} ({text})")
    return HorovodInternalError(f"{where}: {text}")


def _who(job: Job, kind: str | None, ranks: Sequence[int] | None) -> str:
    if job.roll_call is None:
        return "another rank died, is late or does not call it"
    members = range(job.size) if ranks is None else ranks
    return job.roll_call.call(kind or "", members).text()


def afresh(error: HorovodInternalError) -> HorovodInternalError:
    """Returns a fresh copy for every raise, so that tracebacks of different callers do not pile
    up.
    """
    return type(error)(*error.args)
