"""Hosts and their slots, from a list, a file or a script."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hvd_order.base.errors import InvalidUsage

__all__ = [
    "Host",
    "check_room",
    "discover_hosts",
    "interface_address",
    "interface_variables",
    "is_this_host",
    "parse_hosts",
    "read_hostfile",
    "share",
]

_DISCOVERY_LIMIT_S = 60.0
_MOST_A_CORE = 64
# A name is an argument of ssh, which would parse a leading dash as an option.
_NAME = r"[\w@][\w.@\-]*"
_SIOCGIFADDR = 0x8915  # netdevice(7): the IPv4 address of an interface


@dataclass(frozen=True)
class Host:
    """A host and its number of slots.

    Attributes:
        devices: that the processes there may use, one a slot; empty: all that the host has.
    """

    name: str
    slots: int
    devices: tuple[int, ...] = ()


def parse_hosts(text: str) -> list[Host]:
    """Reads horovodrun's ``host1:2,host2:4``; no number means one process.

    Raises:
        InvalidUsage: the text has another form.
    """
    return _checked([_parse_host(part, 1, f"-H {text}") for part in text.split(",")], "-H")


def read_hostfile(path: Path) -> list[Host]:
    """Reads lines ``host slots=2``, as mpirun and horovodrun do; ``#`` begins a comment.

    Raises:
        InvalidUsage: a line has another form, there is no host, or the file is not UTF-8.
        OSError: the file cannot be read.
    """
    hosts = []
    for number, line in enumerate(_read_text(path).splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(rf"({_NAME})(?:\s+slots\s*=\s*(\d+))?", text)
        if match is None or (match[2] and int(match[2]) < 1):
            raise InvalidUsage(f"{path}, line {number}: expected 'host slots=N', got {text!r}")
        hosts.append(Host(match[1], int(match[2] or 1)))
    if not hosts:
        raise InvalidUsage(f"{path} names no host")
    return _checked(hosts, str(path))


def _read_text(path: Path) -> str:
    content = path.read_bytes()
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise InvalidUsage(
            f"{path}, line {number}: byte 0x{content[error.start]:02x} is not UTF-8; save the file "
            "as UTF-8 text"
        ) from None


def discover_hosts(script: str, default_slots: int) -> list[Host]:
    """Runs a host discovery script, which prints ``host`` or ``host:slots`` lines.

    ``host:2 devices=0,3`` also says which of the host's devices the processes may use.

    Args:
        script: path of an executable, or a command line, as in horovodrun.
        default_slots: slots of a host without a number.

    Raises:
        InvalidUsage: the script fails, takes longer than a minute, or prints other text.
    """
    # Files, not pipes: background processes of the script may keep its output open.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            asked = subprocess.Popen(
                script,
                shell=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
        except OSError as error:
            raise InvalidUsage(f"{script} cannot be run: {error.strerror}") from None
        try:
            asked.wait(_DISCOVERY_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise InvalidUsage(f"{script} took longer than {_DISCOVERY_LIMIT_S:g} s") from None
        finally:
            if asked.poll() is None:  # Ctrl-C as well
                os.killpg(asked.pid, signal.SIGKILL)  # with its child processes
                asked.wait()
        said, complaint = _text_of(output), _text_of(errors)
    if asked.returncode != 0:
        raise InvalidUsage(
            f"{script} failed with exit code {asked.returncode}: {complaint or 'no output'}"
        )
    lines = [line for line in said.splitlines() if line.strip()]
    return _checked([_parse_line(line, default_slots, script) for line in lines], script)


def _text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace").strip()


def check_room(count: int) -> None:
    """Checks that `count` processes on this host are plausible.

    Raises:
        InvalidUsage: there are too many.
    """
    cores = os.cpu_count() or 1
    if count > _MOST_A_CORE * cores:
        raise InvalidUsage(
            f"{count} processes are too many for {socket.gethostname()}, which has {cores} "
            f"processor cores: at most {_MOST_A_CORE} for each, {_MOST_A_CORE * cores} in all. "
            "If that is what you want, add --oversubscribe"
        )


def share(hosts: Sequence[Host], limit: int | None) -> list[Host]:
    """Assigns `limit` processes to the hosts in order; None: all slots."""
    left = sum(host.slots for host in hosts) if limit is None else limit
    dealt = []
    for host in hosts:
        count = min(host.slots, left)
        if count:
            dealt.append(Host(host.name, count, host.devices[:count]))
        left -= count
    return dealt


def is_this_host(name: str) -> bool:
    """Whether `name` certainly names this host."""
    own = socket.gethostname()
    return name in ("localhost", "127.0.0.1", "::1", own, own.split(".")[0])


def interface_address(name: str) -> str:
    """The IPv4 address of a network interface of this host.

    Raises:
        InvalidUsage: the interface does not exist, or has no IPv4 address.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError as error:
            known = ", ".join(sorted(known for _, known in socket.if_nameindex()))
            raise InvalidUsage(
                f"--network-interface {name}: {error.strerror} on {socket.gethostname()}, which "
                f"has {known}"
            ) from None
    return socket.inet_ntoa(answer[20:24])


def interface_variables(names: Sequence[str]) -> dict[str, str]:
    """Variables that make the communication libraries use these interfaces."""
    libraries = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
    return dict.fromkeys(libraries, ",".join(names)) if names else {}


def _parse_host(text: str, default_slots: int, where: str) -> Host:
    name, colon, slots = text.strip().rpartition(":")
    if not colon:
        name, slots = slots, str(default_slots)
    if not re.fullmatch(_NAME, name) or not slots.isdecimal() or int(slots) < 1:
        raise InvalidUsage(f"{where}: expected host:slots,host:slots, got {text.strip()!r}")
    return Host(name, int(slots))


def _parse_line(text: str, default_slots: int, where: str) -> Host:
    """Reads a line of a discovery script."""
    place, given, devices = text.strip().partition(" devices=")
    host = _parse_host(place, default_slots, where)
    if not given:
        return host
    if not re.fullmatch(r"\d+(,\d+)*", devices) or devices.count(",") + 1 != host.slots:
        raise InvalidUsage(
            f"{where}: expected as many devices as slots, host:2 devices=0,1, got {text.strip()!r}"
        )
    return Host(host.name, host.slots, tuple(int(number) for number in devices.split(",")))


def _checked(hosts: list[Host], where: str) -> list[Host]:
    """Merges hosts of the same name."""
    found: dict[str, Host] = {}
    for host in hosts:
        before = found.get(host.name, Host(host.name, 0))
        found[host.name] = Host(host.name, before.slots + host.slots, before.devices + host.devices)
    return list(found.values())
