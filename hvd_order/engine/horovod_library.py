"""Horovod's own engine inside this process, used as a transport for slices.

Only Horovod's compiled library is used, through the C interface that Horovod's Python code uses;
its Python code never is, because ``import horovod`` may be an alias of hvd_order.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from importlib.machinery import PathFinder
from pathlib import Path

import torch
import torch.distributed as dist

from hvd_order.base.errors import InvalidUsage
from hvd_order.engine.job import group_collectives, process
from hvd_order.engine.job.job import Job

__all__: list[str] = []

_SERVER_START_S = 60


class _Horovod:
    """Horovod in this process. It starts once and runs until the process ends, over all jobs.

    Attributes:
        started: never reset.
        servers: rendezvous servers, which end with this process.
    """

    def __init__(self) -> None:
        self.started = False
        self.servers: list[subprocess.Popen[str]] = []


_horovod = _Horovod()
_DTYPES = {
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.float32, torch.float64,
}  # fmt: skip
# Slices replace fusion, and slices in flight cannot be reordered. The cycle time limits how long
# Horovod may sleep while a slice waits; benchmarks/HISTORY.md has results with other values.
_ALWAYS = {"HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_STALL_CHECK_DISABLE": "1"}
_UNLESS_SET = {"HOROVOD_CYCLE_TIME": "1", "HOROVOD_CACHE_CAPACITY": "4096"}


def find() -> Path | None:
    """Returns the path of Horovod's extension for PyTorch; None if it is not installed."""
    spec = PathFinder.find_spec("horovod")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        for path in Path(folder, "torch").glob("mpi_lib_v2*.so"):
            return path
    return None


def chosen(job: Job, group: dist.ProcessGroup) -> bool:
    """Returns whether Horovod carries the slices: on request, or because horovodrun started the
    job.

    Collective.

    Args:
        job: the current job.
        group: carries objects, of all ranks.

    Raises:
        InvalidUsage: the user requests Horovod and some rank does not have it.
    """
    wanted = job.config.transport
    here = find() is not None
    everywhere: list[bool] = group_collectives.gather_objects(here, group)
    if wanted == "horovod" and not all(everywhere):
        missing = [rank for rank, there in enumerate(everywhere) if not there]
        raise InvalidUsage(
            f"HVD_ORDER_TRANSPORT is horovod, but ranks {missing} have no Horovod with PyTorch: "
            "install it there, or use HVD_ORDER_TRANSPORT=c10d"
        )
    return all(everywhere) and (
        wanted == "horovod" or (wanted is None and "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ)
    )


def start(job: Job, patience: timedelta, group: dist.ProcessGroup) -> Path:
    """Initializes Horovod, which then runs until the process ends. Collective.

    Horovod 0.28 corrupts its memory when it starts a second time with a fixed fusion threshold or
    cycle time, so a later ``init()`` of the same ranks reuses the running one.

    Args:
        job: the current job.
        patience: longest transfer.
        group: carries objects, of all ranks.

    Returns:
        The path of the library.

    Raises:
        InvalidUsage: Horovod cannot start, has ended, or numbers the ranks differently.
    """
    path = find()
    assert path is not None
    library = ctypes.CDLL(str(path))
    library.horovod_init.restype = library.horovod_is_initialized.restype = ctypes.c_bool
    mine = "new"
    if _horovod.started:
        mine = "running" if library.horovod_is_initialized() else "ended"
    states: list[str] = group_collectives.gather_objects(mine, group)
    if set(states) == {"new"}:
        _begin(library, job, patience, group)
    elif set(states) != {"running"}:
        raise InvalidUsage(
            f"Horovod is {', '.join(states)} in the processes of ranks 0, 1, ...; it "
            "cannot be started twice in a process: start new ones, or use HVD_ORDER_TRANSPORT=c10d"
        )
    numbers = (library.horovod_rank(), library.horovod_size())
    if numbers != (job.rank, job.size):
        raise InvalidUsage(
            f"Horovod counts rank {job.rank} of {job.size} as rank {numbers[0]} of "
            f"{numbers[1]}; use HVD_ORDER_TRANSPORT=c10d"
        )
    return path


def _begin(library: ctypes.CDLL, job: Job, patience: timedelta, group: dist.ProcessGroup) -> None:
    settings = {
        **{name: os.environ.get(name, value) for name, value in _UNLESS_SET.items()},
        **_ALWAYS,
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(1, int(patience.total_seconds()))),
    }
    if not _launched_for_horovod(library):
        settings |= _meet(job, group)
    _horovod.started = True
    with _environment(settings):
        if not library.horovod_init(None, 0, None, None, 0):
            raise InvalidUsage(
                f"Horovod did not start on rank {job.rank}; use HVD_ORDER_TRANSPORT=c10d"
            )
    # At exit the engine must end first, and the last registered function runs first.
    atexit.unregister(process.shutdown)
    atexit.register(library.horovod_shutdown)
    atexit.register(process.shutdown)


def check(buffers: Sequence[torch.Tensor]) -> None:
    """Raises InvalidUsage if Horovod cannot carry one of the buffers."""
    for buffer in buffers:
        if buffer.dtype not in _DTYPES:
            raise InvalidUsage(
                f"Horovod does not carry gradients of {buffer.dtype}; use HVD_ORDER_TRANSPORT=c10d "
                "or compression=hvd.Compression.fp16"
            )


def has_gpu(path: Path) -> bool:
    """Returns whether Horovod was built to carry GPU tensors without a copy to the host."""
    library = ctypes.CDLL(str(path))
    return bool(library.horovod_cuda_built() or library.horovod_rocm_built())


def _launched_for_horovod(library: ctypes.CDLL) -> bool:
    """Returns whether Horovod finds the other ranks by itself, as under horovodrun or mpirun."""
    mpirun = {"OMPI_COMM_WORLD_RANK", "PMI_RANK"} & os.environ.keys()
    return "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ or bool(
        mpirun and library.horovod_mpi_built()
    )


def _meet(job: Job, group: dist.ProcessGroup) -> dict[str, str]:
    """Starts a rendezvous server on rank 0 and returns the variables that horovodrun would have
    set.

    The server runs until the process of rank 0 ends.
    """
    name = socket.gethostname()
    everybody: list[str] = group_collectives.gather_objects(name, group)
    hosts = list(dict.fromkeys(everybody))
    slots = ",".join(f"{host}:{everybody.count(host)}" for host in hosts)
    port: int | str = group_collectives.share_object(
        _serve(slots) if job.rank == 0 else 0, 0, group
    )
    if isinstance(port, str):
        raise InvalidUsage(port)
    one_host = len(hosts) == 1
    settings = {
        "HOROVOD_RANK": str(job.rank),
        "HOROVOD_SIZE": str(job.size),
        "HOROVOD_LOCAL_RANK": str(job.local_rank),
        "HOROVOD_LOCAL_SIZE": str(job.local_size),
        "HOROVOD_CROSS_RANK": str(job.cross_rank),
        "HOROVOD_CROSS_SIZE": str(job.cross_size),
        "HOROVOD_HOSTNAME": name,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": os.environ.get(
            "MASTER_ADDR", "127.0.0.1" if one_host else hosts[0]
        ),
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or ("lo" if one_host else "")
    if interface:
        settings["HOROVOD_GLOO_IFACE"] = interface
    return settings


def _serve(hosts: str) -> int | str:
    """Serves until this process ends; returns the port, or the text of an error."""
    env = {name: value for name, value in os.environ.items() if name != "HVD_ORDER_ALIAS"}
    server = subprocess.Popen(
        [sys.executable, "-m", "hvd_order.launch.horovod_rendezvous", "--hosts", hosts],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
    )  # fmt: skip
    assert server.stdout is not None
    spoke, _, _ = select.select([server.stdout], [], [], _SERVER_START_S)
    line = server.stdout.readline() if spoke else ""
    if not line.strip().isdigit():
        server.kill()
        _, said = server.communicate()
        return f"Horovod's rendezvous server did not start: {said.strip()[-500:]}"
    _horovod.servers.append(
        server
    )  # its standard input closes when this process ends, which ends it
    return int(line)


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Sets variables for Horovod alone; children of this process do not inherit them."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
