"""What Horovod's workers find in their environment when horovodrun has not started them.

For hosts with one process each and no ssh between them; they meet at the server of
`hvd_order.launch.horovod_rendezvous`. Needs Horovod (``make horovod``).
"""

from __future__ import annotations


def horovod_env(
    server_address: str, server_port: int, rank: int, size: int, host_name: str, interface: str
) -> dict[str, str]:
    """What horovodrun would set for the one worker of a host; to be added to its environment.

    Args:
        server_address: where the worker reaches the rendezvous server.
        server_port: as `rendezvous` gives it.
        rank: of the worker, from 0: the place of its host among the server's.
        size: number of workers, and of hosts.
        host_name: of its host, the one that the server was told.
        interface: network interface that its Gloo binds to, say ``eth0``.

    Raises:
        ValueError: no such rank.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank is {rank}; expected 0 to {size - 1}, as size is {size}")
    return {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "1",
        "HOROVOD_CROSS_RANK": str(rank),
        "HOROVOD_CROSS_SIZE": str(size),
        "HOROVOD_HOSTNAME": host_name,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": server_address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server_port),
        "HOROVOD_GLOO_IFACE": interface,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }
