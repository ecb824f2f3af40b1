"""Where systems are compared: emulated hosts with a rank each, or many ranks of this machine."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from benchmarks.hosts import EmulatedHosts
from benchmarks.runner.fleet import Fleet, Hosts, RankFailed
from benchmarks.runner.horovod_workers import horovod_env
from benchmarks.runner.records.environment import ROOT


@dataclass
class Place:
    """A place with some ranks, on which process groups are started.

    Attributes:
        environment: of the ranks of another process group, by rank.
    """

    hosts: Hosts
    environment: Callable[[], list[dict[str, str]]]
    log: TextIO
    _ends: contextlib.ExitStack

    def fleet(
        self,
        peer: str = "torch",
        *,
        restless: bool = True,
        tree: Path = ROOT,
        extra: Sequence[Mapping[str, str]] = (),
    ) -> Fleet:
        """Starts ranks of a process group of their own; restless ones sleep.

        Args:
            peer, restless, tree: see `Fleet`.
            extra: further variables, by rank.
        """
        env = self.environment()
        for mine, more in zip(env, extra, strict=bool(extra)):
            mine.update(more)
        fleet = Fleet(self.hosts, peer, self.log, env, restless, tree)
        self._ends.callback(fleet.close)
        fleet.sleep()
        return fleet

    def horovod_fleet(self, peer: str, extra: Mapping[str, str]) -> Fleet:
        """Ranks of Horovod on emulated hosts."""
        assert isinstance(self.hosts, EmulatedHosts)
        names, addresses = self.hosts.names, self.hosts.addresses
        port = self._ends.enter_context(self._rendezvous(names))
        return self.fleet(peer, extra=[
            {
                **horovod_env(addresses[0], port, rank, len(names), name, "eth0"),
                "HOROVOD_GLOO_TIMEOUT_SECONDS": "3600",  # it is stopped for long
                **extra,
            }
            for rank, name in enumerate(names)
        ])  # fmt: skip

    @contextlib.contextmanager
    def _rendezvous(self, names: Sequence[str]) -> Iterator[int]:
        """Horovod's meeting point, on the first host; its port."""
        server = self.hosts.popen(
            0, [sys.executable, "-m", "hvd_order.launch.horovod_rendezvous",
                "--hosts", ",".join(f"{name}:1" for name in names)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
        )  # fmt: skip
        assert server.stdin is not None
        assert server.stdout is not None
        port = server.stdout.readline()
        if not port:
            raise RankFailed(f"Horovod's rendezvous did not start; see {self.log.name}")
        try:
            yield int(port)
        finally:
            server.stdin.close()
            server.wait(30)


@contextlib.contextmanager
def emulated_hosts(
    count: int, rate_mbit: float, log: TextIO | None = None, each: int = 1
) -> Iterator[Place]:
    """Emulated hosts with so many ranks each, and links of the rate."""
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(EmulatedHosts(count=count, rate_mbit=rate_mbit))
        groups = iter(range(10**6))

        def environment() -> list[dict[str, str]]:
            found = [hosts.rank_environment(rank // each) for rank in range(count * each)]
            port = int(found[0]["MASTER_PORT"]) + 100 * next(groups)
            return [
                {
                    **of_host, "MASTER_PORT": str(port), "RANK": str(rank),
                    "WORLD_SIZE": str(count * each), "LOCAL_RANK": str(rank % each),
                    "LOCAL_WORLD_SIZE": str(each),
                }
                for rank, of_host in enumerate(found)
            ]  # fmt: skip

        where = hosts if each == 1 else _SharedHosts(hosts, each)
        yield Place(where, environment, log or stack.enter_context(_log()), stack)


@contextlib.contextmanager
def this_host(size: int) -> Iterator[Place]:
    """Ranks of this machine, over loopback."""

    def environment() -> list[dict[str, str]]:
        port = str(free_port())
        return [
            {
                "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo",
            }
            for rank in range(size)
        ]  # fmt: skip

    with contextlib.ExitStack() as stack:
        yield Place(_ThisHost(), environment, stack.enter_context(_log()), stack)


def free_port() -> int:
    """A port of loopback that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class _SharedHosts:
    """Hosts with several ranks each."""

    def __init__(self, hosts: Hosts, each: int) -> None:
        self._hosts = hosts
        self._each = each

    def popen(self, rank: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        return self._hosts.popen(rank // self._each, command, **options)


class _ThisHost:
    def popen(self, rank: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        return subprocess.Popen(command, **options)


def _log() -> Any:
    """What ranks write to standard error; it stays, for whoever looks for an error."""
    return tempfile.NamedTemporaryFile("w+", prefix="hvd_order_bench_", suffix=".log", delete=False)
