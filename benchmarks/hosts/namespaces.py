"""What emulated hosts need of the machine, and the commands that make and enter namespaces."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

__all__ = ["HostsUnavailable", "creation_flags", "entry", "tool_environment", "why_not"]

SYSTEM_FOLDERS = ("/usr/sbin", "/sbin")
"""Where `ip` and `tc` are on systems that do not put them on everybody's PATH."""

_PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
    "hostname": "hostname",
    "env": "coreutils",
}
_AS_ROOT = ("--net", "--uts", "--ipc", "--mount")
_AS_USER = ("--user", "--map-root-user", *_AS_ROOT)
# Everything that the real thing does, in namespaces that end with it.
_TRIAL = """
hostname trial
mount -t tmpfs tmpfs /dev/shm
ip link add br0 type bridge
ip link add link0 type veth peer name link1
tc qdisc add dev link0 root tbf rate 1mbit burst 128k latency 5ms
"""


class HostsUnavailable(RuntimeError):  # noqa: N818  (says what happened)
    """Emulated hosts do not work here; the text says what is missing and the cure."""


def why_not() -> str | None:
    """What is missing on this machine for emulated hosts; None: they work."""
    try:
        creation_flags()
    except HostsUnavailable as error:
        return str(error)
    return None


def creation_flags() -> Sequence[str]:
    """The arguments of `unshare` for a new host, found by trying: as root, else as a user.

    Raises:
        HostsUnavailable: neither works.
    """
    if sys.platform != "linux":
        raise HostsUnavailable(f"emulated hosts need Linux; this is {sys.platform}")
    path = tool_environment()["PATH"]
    missing = [tool for tool in _PACKAGES if shutil.which(tool, path=path) is None]
    if missing:
        packages = ", ".join(sorted({_PACKAGES[tool] for tool in missing}))
        raise HostsUnavailable(
            f"emulated hosts need the commands {', '.join(missing)}, which are not on PATH; "
            f"install the packages: {packages}"
        )
    refusals = []
    for flags in (_AS_ROOT, _AS_USER):
        trial = subprocess.run(
            ["unshare", *flags, "sh", "-euc", _TRIAL],
            env=tool_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if trial.returncode == 0:
            return flags
        reason = trial.stderr.strip().splitlines() or [f"exit code {trial.returncode}"]
        refusals.append(reason[-1])
    raise HostsUnavailable(
        f"emulated hosts need permission to make network namespaces. With the rights of user "
        f"{os.geteuid()}: {refusals[0]!r}; in a user namespace: {refusals[1]!r}. Run as root with "
        "CAP_SYS_ADMIN and CAP_NET_ADMIN (in a container: --privileged), or have user namespaces "
        "allowed: sysctl user.max_user_namespaces above 0 and, where it exists, "
        "kernel.unprivileged_userns_clone=1 or kernel.apparmor_restrict_unprivileged_userns=0"
    )


def tool_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's variables, with a PATH on which the tools are; messages in English."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *SYSTEM_FOLDERS])
    return {**os.environ, "PATH": path, "LC_ALL": "C", **(extra or {})}


def entry(pid: int, flags: Sequence[str]) -> list[str]:
    """The start of a command that runs in the namespaces of `pid`.

    `nsenter` and what follows replace each other by `exec`, so the id of the process started is
    that of the command itself, and signals reach it.

    Args:
        pid: a process that stays inside.
        flags: those of `creation_flags`, or some of them.
    """
    kinds = [flag for flag in flags if flag != "--map-root-user"]
    # In a user namespace we are root already; to ask for it again is refused.
    keep = ["--preserve-credentials"] if "--user" in kinds else []
    return ["nsenter", "--target", str(pid), *kinds, *keep]
