"""The emulated hosts: made, changed while they run, and gone with the process that made them.

Each host is a process that does nothing (host.sh) but be in namespaces of its own: network, host
name, IPC and mounts. One more (switch.sh) has the bridge. A command joins a host by entering the
namespaces of its process. Nothing has a name on the machine, so there is nothing to clash and
nothing to remove: when the processes end (guardian.py), the kernel takes the rest.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import guardian
from .congestion import permitted
from .namespaces import HostsUnavailable, creation_flags, entry, tool_environment

__all__ = ["EmulatedHosts"]

_FOLDER = Path(__file__).resolve().parent
_NETWORK = "10.77.0"  # only inside: the machine has no route to it and may use the same one
_MOST_HOSTS = 250
_MASTER_PORT = 29500  # any port is free on a new host
QUEUE_MS = 5.0  # of waiting data: what a switch with small buffers has at 1 to 10 Gbit/s
_SMALLEST_BURST = 128 * 1024  # bytes; TCP hands over up to 64 KiB and headers at once
_CHOICE = "/proc/sys/net/ipv4/tcp_congestion_control"
_GRACE_S = 2.0  # between SIGTERM and SIGKILL at the end


class EmulatedHosts:
    """`count` hosts on one switch, as a context manager; all ends with it or with this process.

    Args:
        count: how many.
        rate_mbit: of each host's link, in 10^6 bits a second, each way. TCP's payload is at most
            95.6 % of it.
        congestion_control: wanted on the hosts. Where the machine does not let us choose, its
            default stays.
        acks_first: bare acknowledgments do not wait behind data. So it is on hosts whose network
            queue is fq_codel, the default of systemd; this kernel may lack it, so it is emulated.
        queue_ms: length of the queue at either end of a link, as the time that it takes to leave.
            Data that finds it full is lost.

    Attributes:
        addresses: the IPv4 address of each host, on its interface ``eth0``.
        names: the host name of each.
        congestion_control: what the hosts use.

    Raises:
        HostsUnavailable: the machine lacks something; see `why_not`.
        ValueError: an impossible count, rate or queue.
    """

    def __init__(
        self,
        count: int,
        rate_mbit: float,
        congestion_control: str = "cubic",
        acks_first: bool = False,
        queue_ms: float = QUEUE_MS,
    ) -> None:
        if not 1 <= count <= _MOST_HOSTS:
            raise ValueError(f"count is {count}; expected 1 to {_MOST_HOSTS} hosts")
        self.names = [f"host{host}" for host in range(count)]
        self.addresses = [f"{_NETWORK}.{host + 1}" for host in range(count)]
        self._queue_ms = queue_ms
        self._shape = _tbf(rate_mbit, queue_ms)
        self._acks_first = acks_first
        self._flags = creation_flags()
        guardian.end_orphans()
        self._mark = guardian.new_mark()
        self._keepers: list[subprocess.Popen[str]] = []  # the switch and the hosts
        self._hosts: list[subprocess.Popen[str]] = []
        self._commands: list[subprocess.Popen[Any]] = []
        self._guardian = guardian.start(self._mark)
        try:
            self._start()
            if acks_first:
                for host in range(count):
                    self._put_acks_first(host, rate_mbit)
            self.congestion_control = self._choose_congestion_control(congestion_control)
        except BaseException:
            self.close()
            raise

    def popen(
        self,
        host: int,
        command: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        own_memory: bool = True,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Starts a command on a host. It is ended, if need be, when the hosts are closed.

        Args:
            host: which, from 0.
            command: program and arguments.
            env: all its variables; this process's own if None.
            cwd: its folder; this process's own if None.
            own_memory: whether shared memory and mounts are the host's own. If not, they are this
                process's: NVIDIA's multi-process service needs that. The names of the hosts are
                then unknown, their addresses are not.
            **options: as those of ``subprocess.Popen``.

        Returns:
            The process; its id and its signals are the command's own. Exit code 127: there is no
            such command.
        """
        # Entering a mount namespace leads to its root folder, so the way back is told.
        folder = os.path.abspath(cwd or os.getcwd())
        process = subprocess.Popen(
            [*self.inside(host, own_memory), "env", f"--chdir={folder}", "--", *command],
            env={**(os.environ if env is None else env), guardian.MARK_VARIABLE: self._mark},
            **options,
        )
        self._commands.append(process)
        return process

    def rank_environment(self, host: int) -> dict[str, str]:
        """What torchrun would set for a job of one rank on each host; to be added to `env`."""
        size = str(len(self.names))
        return {
            "RANK": str(host),
            "WORLD_SIZE": size,
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": str(host),
            "GROUP_WORLD_SIZE": size,
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": str(_MASTER_PORT),
            "GLOO_SOCKET_IFNAME": "eth0",
        }

    def set_rate(self, host: int, rate_mbit: float) -> None:
        """Changes the rate of a host's link, both ways, while traffic runs."""
        for tc, device in self._ends(host):
            _run([*tc, "qdisc", "change", "root", "handle", "1:", "dev", device, "tbf",
                  *_tbf(rate_mbit, self._queue_ms)])  # fmt: skip
            if self._acks_first:
                _run(
                    [*tc, "qdisc", "change", "dev", device, *_data_queue(rate_mbit, self._queue_ms)]
                )

    def cut(self, host: int) -> None:
        """Pulls the host's cable: nothing arrives and nobody is told; connections stay."""
        self._set_link(host, "down")

    def heal(self, host: int) -> None:
        """Plugs the cable in again. TCP notices when it next tries, up to seconds later."""
        self._set_link(host, "up")

    def sent_bytes(self, host: int) -> int:
        """Bytes that have left the host so far, by its interface's counter.

        Data that TCP handed over in one piece (up to 64 KiB) counts with one set of headers,
        though it is cut into frames of 1514 bytes, and shaped as such.
        """
        for line in Path(f"/proc/{self._hosts[host].pid}/net/dev").read_text().splitlines():
            device, _, counters = line.partition(":")
            if device.strip() == "eth0":
                return int(counters.split()[8])
        raise RuntimeError(f"{self.names[host]} has no eth0")

    def close(self) -> None:
        """Ends all commands, politely first, and the hosts; a second call does nothing."""
        running = [command for command in self._commands if command.poll() is None]
        for command in running:
            command.terminate()
        deadline = time.monotonic() + _GRACE_S
        for command in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                command.wait(timeout=max(0.0, deadline - time.monotonic()))
        left = guardian.end_marked(self._mark)
        for process in [*self._commands, *self._keepers]:
            if process.pid not in left:
                process.wait()
        guardian.dismiss(self._guardian)
        self._commands, self._keepers, self._hosts = [], [], []
        if left:
            raise RuntimeError(f"processes {left} of the emulated hosts could not be killed")

    def __enter__(self) -> EmulatedHosts:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self) -> None:
        user = [flag for flag in self._flags if "user" in flag]
        self._switch = self._keep(["unshare", *user, "--net", "sh", str(_FOLDER / "switch.sh")])
        _wait_until_ready("switch", self._switch)
        pairs = list(zip(self.addresses, self.names, strict=True))
        etc_hosts = "\n".join(["127.0.0.1 localhost", *(" ".join(pair) for pair in pairs)])
        # Without root all hosts share the switch's user namespace: it owns both ends of a link.
        into_user = entry(self._switch.pid, ["--user"]) if user else []
        create = [flag for flag in self._flags if "user" not in flag]
        script = ["sh", str(_FOLDER / "host.sh")]
        for host, (address, name) in enumerate(pairs):
            link = [str(self._switch.pid), _port(host), *self._shape]
            self._hosts.append(
                self._keep(
                    [*into_user, "unshare", *create, *script, name, address, etc_hosts, *link]
                )
            )
        for name, keeper in zip(self.names, self._hosts, strict=True):
            _wait_until_ready(name, keeper)

    def _choose_congestion_control(self, wanted: str) -> str:
        """Sets it on every host if that is allowed; returns what is in use."""
        choose = f"echo {shlex.quote(wanted)} 2>/dev/null > {_CHOICE} || true; cat {_CHOICE}"
        with permitted(wanted):
            chosen = [
                _run([*self.inside(host), "sh", "-c", choose]) for host in range(len(self.names))
            ]
        return chosen[0].strip()

    def _keep(self, command: Sequence[str]) -> subprocess.Popen[str]:
        """Starts the process of the switch or of a host; it is deaf to Ctrl-C."""
        keeper = subprocess.Popen(
            command,
            env=tool_environment({guardian.MARK_VARIABLE: self._mark}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._keepers.append(keeper)
        return keeper

    def inside(self, host: int, own_memory: bool = True) -> list[str]:
        """The start of a command line that runs on a host; `own_memory` as in `popen`."""
        shared = () if own_memory else ("--ipc", "--mount")
        flags = [flag for flag in self._flags if flag not in shared]
        return entry(self._hosts[host].pid, flags)

    def _inside_switch(self) -> list[str]:
        user = ["--user"] if "--user" in self._flags else []
        return entry(self._switch.pid, [*user, "--net"])

    def _ends(self, host: int) -> list[tuple[list[str], str]]:
        """The command ``tc`` and the device, at both ends of a host's link."""
        return [
            ([*self.inside(host), "tc"], "eth0"),
            ([*self._inside_switch(), "tc"], _port(host)),
        ]

    def _put_acks_first(self, host: int, rate_mbit: float) -> None:
        """Two classes below the token bucket, which alone limits the rate."""
        every = ["htb", "rate", "100gbit", "quantum", "60000", "prio"]
        for tc, device in self._ends(host):
            _run([*tc, "qdisc", "add", "dev", device, "parent", "1:", "handle", "2:", "htb",
                  "default", "2"])  # fmt: skip
            for number in ("1", "2"):
                _run([*tc, "class", "add", "dev", device, "parent", "2:", "classid",
                      f"2:{number}", *every, number])  # fmt: skip
            _run([*tc, "qdisc", "add", "dev", device, *_data_queue(rate_mbit, self._queue_ms)])
            # Below 128 bytes, and of TCP's flags ACK alone: data of one connection keeps its order.
            _run([*tc, "filter", "add", "dev", device, "parent", "2:", "protocol", "ip", "u32",
                  "match", "u16", "0x0000", "0xff80", "at", "2",
                  "match", "u8", "0x10", "0x3f", "at", "33", "flowid", "2:1"])  # fmt: skip

    def _set_link(self, host: int, state: str) -> None:
        _run([*self._inside_switch(), "ip", "link", "set", _port(host), state])


def _port(host: int) -> str:
    """The name of a host's end of the link in the switch."""
    return f"port{host}"


def _tbf(rate_mbit: float, queue_ms: float) -> list[str]:
    """A token bucket's arguments: a burst of 1 ms of the rate, and a queue."""
    if not rate_mbit > 0:
        raise ValueError(f"rate_mbit is {rate_mbit}; expected more than 0")
    if not queue_ms > 0:
        raise ValueError(f"queue_ms is {queue_ms}; expected more than 0")
    bits = round(rate_mbit * 1e6)
    return ["rate", f"{bits}bit", "burst", str(_burst(bits)), "latency", f"{queue_ms:g}ms"]


def _data_queue(rate_mbit: float, queue_ms: float) -> list[str]:
    """The queue of data where acknowledgments go first: as long as the token bucket's own."""
    bits = round(rate_mbit * 1e6)
    limit = round(bits * queue_ms / 8000) + _burst(bits)
    return ["parent", "2:2", "handle", "20:", "bfifo", "limit", str(limit)]


def _burst(bits: int) -> int:
    return max(_SMALLEST_BURST, bits // 8000)


def _wait_until_ready(name: str, keeper: subprocess.Popen[str]) -> None:
    assert keeper.stdout is not None
    said = []
    with keeper.stdout:
        for line in keeper.stdout:
            if line == "ready\n":
                return
            said.append(line)
    raise HostsUnavailable(f"could not make {name}: {''.join(said).strip() or 'it ended'}")


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, env=tool_environment(), capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout
