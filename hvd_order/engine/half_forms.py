"""How the halves of split all-reduces travel: as collectives, or as all-to-alls.

Back ends differ: Gloo's reduce-scatter moves as much as an all-reduce, and reports its end to no
callback. So both forms are timed once, with a few MiB.
"""

from __future__ import annotations

import logging
import math

import torch

from hvd_order._native import _torch as native
from hvd_order.base.errors import HvdOrderError, InvalidUsage
from hvd_order.engine.engine_host import EngineHost
from hvd_order.engine.model_channel import ModelChannel

__all__: list[str] = []

_log = logging.getLogger("hvd_order")

_BYTES = 2 * 2**20
_LEAST_BYTES = 128 * 2**10
_AIM_S = 0.1  # of an all-reduce of as many bytes; each form of each half is timed three times
_PIECES = 4
_ROUNDS = 3  # the first one connects
_HALVES = {
    "reduce-scatter": native.Operation.REDUCE_SCATTER,
    "all-gather": native.Operation.ALL_GATHER,
}


def choose_half_forms(
    channel: ModelChannel, device: torch.device, seconds_per_byte: float | None = None
) -> bool:
    """Chooses the form of each half: the faster one on the slowest rank. Collective.

    Only the first call measures. Nothing may be in flight. The caller has the engine's turn.

    Args:
        channel: of the model.
        device: device of the gradients.
        seconds_per_byte: of an all-reduce, the same on all ranks: slow links carry fewer bytes;
            None: not measured.

    Returns:
        Whether the back end has a form of each half.

    Raises:
        HorovodInternalError: a rank is gone or does not take part.
    """
    host = channel.host
    transport = host.transport
    if (
        host.has_halves is not None
        or host.size == 1
        or not isinstance(transport, native.C10dTransport)
    ):
        return bool(host.has_halves)
    with channel.common_step("the measurement of reduce-scatters and all-gathers"):
        size_bytes = _probe_bytes(seconds_per_byte)
        mine = _times_s(transport, device, host.choice.in_flight, size_bytes)
    of_ranks = channel.gather("times of halves", mine)
    forms = {}
    host.has_halves = True
    for half, times in mine.items():
        slowest = {form: max(times_s[half][form] for times_s in of_ranks) for form in times}
        forms[half] = min(slowest, key=slowest.__getitem__)
        host.has_halves &= slowest[forms[half]] < math.inf
    transport.set_half_forms(*(native.HalfForm.__members__[form] for form in forms.values()))
    if host.rank == 0:
        _log.debug(
            "split all-reduces: %s",
            "; ".join(
                f"{half} as {forms[half].lower()}, {size_bytes >> 10} KiB: "
                + ", ".join(f"{form.lower()} {1e3 * s:.3g} ms" for form, s in times.items())
                for half, times in mine.items()
            ),
        )
    return host.has_halves


def why_no_halves(host: EngineHost) -> str | None:
    """Why sums cannot travel in halves, whatever is summed; None if, so far, they can."""
    if host.job.config.split == "never":
        return "HVD_ORDER_SPLIT=never"
    if host.size == 1:
        return "there is one rank"
    if not isinstance(host.transport, native.C10dTransport):
        return "Horovod's engine or parameter servers carry the gradients"
    if host.has_halves is False:
        return "the back end of torch.distributed has no reduce-scatter or no all-gather"
    return None


def check_codes(obstacle: str | None) -> None:
    """Raises InvalidUsage for gradients that are to be encoded and cannot be."""
    if obstacle is not None:
        raise InvalidUsage(
            f"sums of encoded gradients are not possible: {obstacle}. Use Compression.bf16 or none"
        )


def _probe_bytes(seconds_per_byte: float | None) -> int:
    if seconds_per_byte is None:
        return _BYTES
    aim = int(_AIM_S / seconds_per_byte) // _LEAST_BYTES * _LEAST_BYTES
    return min(max(aim, _LEAST_BYTES), _BYTES)


def _times_s(
    transport: native.C10dTransport, device: torch.device, in_flight: int, size_bytes: int
) -> dict[str, dict[str, float]]:
    """Seconds by half and form; infinite for a form that the back end does not have."""
    pieces = list(torch.zeros(size_bytes // 4, device=device).chunk(_PIECES))
    times: dict[str, dict[str, float]] = {}
    for half, operation in _HALVES.items():
        times[half] = {}
        for name, form in native.HalfForm.__members__.items():
            transport.set_half_forms(form, form)
            try:
                times[half][name] = min(
                    transport.time_stream(pieces, in_flight, operation) for _ in range(_ROUNDS)
                )
            # Not there, on any rank. If instead a rank is gone, what follows names it.
            except (HvdOrderError, RuntimeError):
                times[half][name] = math.inf
    return times
