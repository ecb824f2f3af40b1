"""Speeds of jobs in a table that name the profile of one of their workers."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Literal

from hvd_order.base.errors import InvalidUsage
from hvd_order.cluster.model.predicted import predicted_speed
from hvd_order.cluster.model.speed import TableSpeed
from hvd_order.planning.files.profile import Profile, read_profile
from hvd_order.planning.graph.graph import Graph

__all__ = ["INSIDE_RATIO", "MODES", "profiled_graph", "profiled_speed"]

INSIDE_RATIO = 10.0
"""Rate of a link within a machine over that of the network, where a table does not say."""
MODES = ("allreduce", "sync", "async")

_BYTES_PER_GBIT = 1e9 / 8


# Jobs of one kind are many; a prediction takes seconds.
@functools.lru_cache(maxsize=64)
def profiled_graph(path: Path) -> Graph:
    """The profiled step of one worker, the same object each time.

    Raises:
        InvalidUsage: the file is no profile.
    """
    return _read(path).graph("median")


@functools.lru_cache(maxsize=64)
def profiled_speed(
    path: Path,
    worker_batch: int,
    most: int,
    mode: Literal["allreduce", "sync", "async"],
    workers_per_server: int | None,
    network_gbit: float,
    inside_gbit: float | None = None,
) -> TableSpeed:
    """Samples/s of 1 to ``most`` workers.

    Args:
        path: file that ``hvd-order profile`` wrote.
        worker_batch: samples of the profiled step.
        network_gbit, inside_gbit: links of a worker, Gbit/s each way, over the network and within a
            machine; None: ``INSIDE_RATIO`` times the network's.

    Raises:
        InvalidUsage: the file is no such profile, or the numbers are impossible.
    """
    if inside_gbit is None:
        inside_gbit = INSIDE_RATIO * network_gbit
    if not 0 < network_gbit < math.inf or not 0 < inside_gbit < math.inf:
        raise InvalidUsage(f"links of {network_gbit} and {inside_gbit} Gbit/s; expected more")
    return predicted_speed(
        _read(path),
        worker_batch,
        most,
        mode,
        inside_bytes_per_s=inside_gbit * _BYTES_PER_GBIT,
        network_bytes_per_s=network_gbit * _BYTES_PER_GBIT,
        workers_per_server=workers_per_server,
    )


def _read(path: Path) -> Profile:
    try:
        return read_profile(path)
    except OSError as error:
        raise InvalidUsage(f"the profile {path} cannot be read: {error.strerror}") from None
