"""Measurements of DL2: parameter-server jobs by numbers of workers and servers.

Origin: pengyanghua/DL2, ``config_speed.txt``: MXNet, synchronous and asynchronous. It has no
licence, so nothing of it is in this project; who wants it fetches it. Each line is a tuple:

    (model, 'dist_sync' or 'dist_async', batch of all workers, servers, workers, [speeds],
     [processors of each server], [processors of each worker])

The speeds are samples/s of each worker: those of one line differ as the shares of the batch do,
which is how the unit was inferred. Nine lines of the file have speeds of 0 for all workers: nothing
was measured there.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass

from hvd_order.base.errors import InvalidUsage
from hvd_order.base.tables import Path, open_text

__all__ = ["Served", "read_dl2"]


@dataclass(frozen=True)
class Served:
    """One measurement.

    Attributes:
        synchronous: whether the workers wait for each other.
        batch: samples of a step of all workers.
        samples_per_s: of all workers.
    """

    model: str
    synchronous: bool
    batch: int
    servers: int
    workers: int
    samples_per_s: float


def read_dl2(path: Path) -> Iterator[Served]:
    """Reads the file line by line. Leaves out lines all of whose speeds are 0.

    Raises:
        InvalidUsage: it is empty, or a line is no measurement.
    """
    name = os.fspath(path)
    empty = True
    with open_text(path) as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            empty = False
            try:
                model, mode, batch, servers, workers, speeds, *_ = ast.literal_eval(text.strip())
                modes = {"dist_sync": True, "dist_async": False}
                found = Served(str(model), modes[mode], int(batch), int(servers), int(workers),
                               float(sum(speeds)))  # fmt: skip
                right = (
                    len(speeds) == found.workers
                    and min(found.servers, found.workers, found.batch) >= 1
                    and min(speeds) >= 0
                )
            except (ValueError, TypeError, SyntaxError, KeyError):
                right = False
            if not right:
                raise InvalidUsage(
                    f"{name}, line {number}: {text.strip()[:80]!r}; expected (model, 'dist_sync', "
                    "batch, servers, workers, [a speed for each worker], ...)"
                )
            if found.samples_per_s > 0:
                yield found
    if empty:
        raise InvalidUsage(f"{name} is empty")
