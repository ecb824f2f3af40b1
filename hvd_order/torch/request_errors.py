"""What torch.distributed raises, as errors of ours that say where and why."""

from __future__ import annotations

from hvd_order.errors import HorovodInternalError, PeerLost, TransferTimeout
from hvd_order.torch import process

__all__ = ["afresh", "translate_failure"]


def translate_failure(
    error: Exception, what: str, context: process.ProcessContext
) -> HorovodInternalError:
    """torch.distributed's error as one of ours, told apart by its text: there is nothing else."""
    if isinstance(error, HorovodInternalError):
        return error
    text = str(error)
    where = f"rank {context.rank}, {what}"
    first_line = text.strip().split("\n", maxsplit=1)[0]
    low = text.lower()
    if any(sign in low for sign in ("timed out", "timeout")):
        return TransferTimeout(
            f"{where}: not done within {context.config.timeout.total_seconds():g} s "
            f"(HVD_ORDER_TIMEOUT); another rank is late or does not call it ({first_line})"
        )
    signs = ("connection", "closed", "reset by peer", "broken pipe", "socket", "remote", "abort")
    if any(sign in low for sign in signs):
        return PeerLost(f"{where}: another rank died or left ({first_line})")
    return HorovodInternalError(f"{where}: {first_line}")


def afresh(error: HorovodInternalError) -> HorovodInternalError:
    """A fresh object for every raise, so that tracebacks of different callers do not pile up."""
    return type(error)(*error.args)
