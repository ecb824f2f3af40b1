"""Bytes that a job puts on the links of its machines."""

from __future__ import annotations

from hvd_order.cluster.model.placement import JobPlacement

__all__ = ["load_of"]


def load_of(placement: JobPlacement) -> dict[int, float]:
    """Bytes on each machine's link, in each direction, for a byte of gradient; empty: none.

    Without servers, a ring goes once through each of k machines: each sends and receives
    2 (k - 1) / k bytes. With servers, each holds an equal share of the parameters; each worker
    pushes to and pulls from all of them, and what stays on a machine loads no link. Either way a
    link carries as many bytes up as down, so one number stands for both directions.

    Source of the ring: Patarasuk and Yuan, JPDC 69, 2009.
    """
    machines = placement.machines
    if machines < 2:
        return {}
    if placement.servers == 0:
        return {part.machine: 2 * (machines - 1) / machines for part in placement.parts}
    workers, servers = placement.workers, placement.servers
    found = {}
    for part in placement.parts:
        pushed = part.workers * (servers - part.servers) / servers
        served = part.servers * (workers - part.workers) / servers
        if pushed + served > 0:
            found[part.machine] = pushed + served
    return found
