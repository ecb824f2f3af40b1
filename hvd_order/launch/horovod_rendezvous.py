"""Horovod's rendezvous server for a job that horovodrun did not start.

``python -m hvd_order.launch.horovod_rendezvous --hosts h0:2,h1:2`` prints the port of the server
and serves until its standard input closes. It needs Horovod.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence

__all__ = ["rendezvous"]


@contextlib.contextmanager
def rendezvous(hosts: Sequence[str]) -> Iterator[int]:
    """Serves the rendezvous of one job on all addresses within the context.

    Args:
        hosts: ``name:slots`` of each host, in the order of ranks.

    Yields:
        The port.

    Raises:
        ValueError: there is no host, or a duplicate one.
    """
    names = [host.rpartition(":")[0] for host in hosts]
    if not names or not all(names) or len(set(names)) < len(names):
        raise ValueError(f"hosts are {list(hosts)}; expected name:slots, one or more, each once")
    # Imported here so that this file can be imported without Horovod.
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    processes = sum(int(host.rpartition(":")[2]) for host in hosts)
    plan = get_host_assignments(parse_hosts(",".join(hosts)), processes)
    # Horovod's RendezvousServer does the same on a random port, and never closes it.
    with RendezvousHTTPServer(("", 0), RendezvousHandler, 0) as server:
        server.init(plan)
        thread = threading.Thread(target=server.serve_forever, name="horovod rendezvous")
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def main() -> None:
    """Serves until standard input closes."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--hosts", required=True, help="in the order of ranks: h0:2,h1:2")
    with rendezvous(parser.parse_args().hosts.split(",")) as port:
        print(port, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
