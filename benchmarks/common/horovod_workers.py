"""Starting Horovod's workers without horovodrun: a rendezvous server, and variables for each.

For hosts with one process each and no ssh between them. Needs Horovod (``make horovod``). Where the
server must run in another place than its user, say another network namespace, start it as a
command: ``python benchmarks/common/horovod_workers.py --hosts h0,h1`` prints its port and serves
until its standard input closes.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence

from hvd_order.launch import horovod_rendezvous


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


@contextlib.contextmanager
def rendezvous(host_names: Sequence[str]) -> Iterator[int]:
    """Serves the rendezvous of one job, on all addresses, while the context lasts.

    Args:
        host_names: of the hosts, in the order of ranks; each has one worker.

    Yields:
        The port.

    Raises:
        ValueError: no host, a name twice, or a name that cannot stand in Horovod's list.
    """
    if not host_names or len(set(host_names)) < len(host_names):
        raise ValueError(f"hosts are {list(host_names)}; expected one or more, each once")
    if any(not name or set(name) & set(":,/ ") for name in host_names):
        raise ValueError(f"hosts are {list(host_names)}; expected names without ':', ',', '/', ' '")
    with horovod_rendezvous.rendezvous([f"{name}:1" for name in host_names]) as port:
        yield port


def main() -> None:
    """Serves until standard input closes."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--hosts", required=True, help="names in the order of ranks: h0,h1")
    with rendezvous(parser.parse_args().hosts.split(",")) as port:
        print(port, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
