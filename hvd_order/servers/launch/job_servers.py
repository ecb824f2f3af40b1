"""Parameter servers of a job, beside its workers: ``hvd-order run -np 4 --servers 2 ...``.

The launcher serves the job's store. It generates the job's secret and passes it to servers and
workers in the environment; to other hosts the secret travels through ssh, on standard input.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping, Sequence

from hvd_order.base.errors import InvalidUsage
from hvd_order.launch.hosts import interface_address, is_this_host
from hvd_order.launch.jobs.formations import Stopped
from hvd_order.launch.request import LaunchRequest
from hvd_order.launch.services import SERVICES
from hvd_order.servers.access.secret import new_secret
from hvd_order.servers.launch.server_processes import ServerProcesses
from hvd_order.servers.launch.server_starter import ServerStarter

__all__ = ["servers_running"]

_GRACE_IF_STOPPED_S = 1.0  # some workers may never have connected


@contextlib.contextmanager
def servers_running(request: LaunchRequest) -> Iterator[Mapping[str, str]]:
    """Runs the servers of a job, including those requested later; ends them on exit.

    Yields:
        Variables for the workers.

    Raises:
        InvalidUsage: an elastic job asks for servers.
    """
    if request.elastic is not None:
        raise InvalidUsage("--servers does not go with elastic jobs: the workers' number is fixed")
    from hvd_order.launch.jobs.torch_agent import serve_store

    hosts = {host.name for host in request.hosts}
    address = _own_address(hosts, request.interfaces)
    store = serve_store(address)
    secret = new_secret()
    env = {
        "HVD_ORDER_SERVER_STORE": f"{address}:{store.port}",
        "HVD_ORDER_SERVERS": str(request.servers),
        "HVD_ORDER_SECRET": secret.hex(),
        "HVD_ORDER_COMM": request.env.get("HVD_ORDER_COMM", os.environ.get("HVD_ORDER_COMM", "ps")),
    }
    for variable, limit in (
        ("HVD_ORDER_MIN_SERVERS", request.min_servers),
        ("HVD_ORDER_MAX_SERVERS", request.max_servers),
    ):
        if limit is not None:
            env[variable] = str(limit)
    servers = ServerProcesses(
        request.hosts, request.process_count, request.ssh_options, {**request.env, **env}
    )
    with contextlib.ExitStack() as after:
        after.callback(servers.end)
        for _ in range(request.servers):
            servers.start()
        most = request.servers if request.max_servers is None else request.max_servers
        if request.min_servers is not None or request.max_servers is not None:
            after.callback(ServerStarter(store, secret, servers, most).close)
        try:
            yield env
        except Stopped:
            servers.end(_GRACE_IF_STOPPED_S)
            raise


def _own_address(hosts: set[str], interfaces: Sequence[str]) -> str:
    if all(is_this_host(host) for host in hosts):
        return "127.0.0.1"
    return interface_address(interfaces[0]) if interfaces else socket.getfqdn()


SERVICES.register("servers", servers_running)
