"""Findings without a framework: versions, network and environment."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import warnings
from typing import Any

import hvd_order
from hvd_order.base.config import Config
from hvd_order.base.errors import InvalidUsage
from hvd_order.compat.horovod import finder
from hvd_order.launch.hosts import interface_address

__all__ = ["alias_facts", "environment", "environment_problems", "network", "versions"]

_PACKAGES = re.compile(r"^(torch|horovod|numpy|cupy(-cuda\w+)?|tensorflow(-cpu)?|cloudpickle)$")
_VARIABLES = re.compile(
    r"^(HVD_ORDER_|HOROVOD_|MASTER_|TORCHELASTIC|GLOO_|NCCL_|UCC_|OMPI_COMM_|PMI_|SLURM_(PROC|STEP))"
    r"|^(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS)$"
)
_START_S = 60.0  # for Python to start
_SECRET = re.compile(r"SECRET|TOKEN|PASSW|KEY|CREDENTIAL", re.IGNORECASE)


def versions() -> dict[str, str]:
    """Versions of relevant packages; they are looked up, not imported."""
    found = {
        "hvd_order": hvd_order.__version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "compiler": _compiler(),
        "mpirun": shutil.which("mpirun") or "not found",
    }
    packages = {}
    for distribution in importlib.metadata.distributions():
        name = str(distribution.metadata["Name"] or "").lower().replace("_", "-")
        if _PACKAGES.match(name):
            packages[name] = distribution.version
    for name in ("torch", "horovod", "numpy", "cupy", "tensorflow"):
        if not any(installed.startswith(name) for installed in packages):
            packages[name] = "not installed"
    return found | dict(sorted(packages.items()))


def _compiler() -> str:
    for name in filter(None, (os.environ.get("CXX"), "g++", "c++", "clang++")):
        path = shutil.which(name)
        if path:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                done = subprocess.run(
                    [path, "--version"], capture_output=True, text=True, timeout=10
                )
                return done.stdout.strip().split("\n")[0]
    return "not found"


def network() -> tuple[dict[str, Any], list[str]]:
    """Host name, its addresses and the interfaces; and problems with them."""
    host = socket.gethostname()
    problems = []
    try:
        addresses = sorted({str(info[4][0]) for info in socket.getaddrinfo(host, None)})
    except OSError as error:
        addresses = []
        problems.append(
            f"the name of this host, {host}, does not resolve ({error}); other hosts and Gloo need "
            f"it: add a line such as '10.0.0.5 {host}' to /etc/hosts, or set GLOO_SOCKET_IFNAME"
        )
    if addresses and all(address.startswith("127.") or address == "::1" for address in addresses):
        problems.append(
            f"the name of this host, {host}, resolves to {addresses[0]} alone; that is enough on "
            "one host, but others cannot reach it: correct /etc/hosts, or set GLOO_SOCKET_IFNAME"
        )
    interfaces = {name: _address(name) for _, name in socket.if_nameindex()}
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE"):
        wanted = [n.lstrip("^=") for n in os.environ.get(variable, "").split(",") if n]
        if wanted and not any(name.startswith(w) for w in wanted for name in interfaces):
            problems.append(
                f"{variable} is {os.environ[variable]}, which no interface of this host is called; "
                f"there are {', '.join(interfaces)}"
            )
    return {"host": host, "resolves_to": addresses, "interfaces": interfaces}, problems


def _address(interface: str) -> str | None:
    try:
        return interface_address(interface)
    except InvalidUsage:  # it has none
        return None


def environment() -> dict[str, str]:
    """Variables that the project and its launchers read; values of secrets are hidden."""
    return {
        name: "(hidden)" if _SECRET.search(name) else value
        for name, value in sorted(os.environ.items())
        if _VARIABLES.match(name)
    }


def environment_problems() -> list[str]:
    """Problems that ``init()`` would report about the variables."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            Config.from_environment()
        except InvalidUsage as error:
            return [str(error)]
    return [str(warning.message) for warning in caught]


def alias_facts() -> dict[str, bool | None]:
    """Whether ``import horovod`` gives hvd_order here, and whether HVD_ORDER_ALIAS=1 would.

    None: Python did not start in time to tell.
    """
    program = "import sys; print('hvd_order.compat.horovod.startup' in sys.modules)"
    works = None
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"HVD_ORDER_ALIAS": "1"},
            capture_output=True,
            text=True,
            timeout=_START_S,
            check=False,
        )
        works = "True" in done.stdout
    return {"in force": finder.is_installed(), "variable works": works}
