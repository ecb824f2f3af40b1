"""Horovod's own engine inside this process, as what carries the slices.

Only its compiled library is used, by the C interface that Horovod's Python uses, never its Python:
``import horovod`` may be an alias of ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from importlib.machinery import PathFinder
from pathlib import Path

import torch
import torch.distributed as dist

from hvd_order.errors import InvalidUsage
from hvd_order.torch.process import ProcessContext

__all__: list[str] = []

_START_TIMEOUT_S = 60
_DTYPES = {
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.float32, torch.float64,
}  # fmt: skip
# Slices are the fusion, and what is in flight cannot be reordered. A cycle is how long Horovod may
# sleep while a slice waits; benchmarks/RESULTS.md has what other values gave.
_FUSION, _CYCLE = "HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME"
_ALWAYS = {_FUSION: "0", "HOROVOD_STALL_CHECK_DISABLE": "1"}
_UNLESS_SET = {_CYCLE: "1", "HOROVOD_CACHE_CAPACITY": "4096"}
_started_before = False  # in this process


def find() -> Path | None:
    """Horovod's extension for PyTorch; None where it is not installed."""
    spec = PathFinder.find_spec("horovod")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        for path in Path(folder, "torch").glob("mpi_lib_v2*.so"):
            return path
    return None


def chosen(context: ProcessContext, group: dist.ProcessGroup) -> bool:
    """Whether Horovod carries the slices: the user says so, or horovodrun started the job.

    Collective.

    Args:
        group: for objects, of all ranks.

    Raises:
        InvalidUsage: the user wants it and some rank does not have it.
    """
    wish = context.config.transport
    here = find() is not None
    everywhere: list[bool | None] = [None] * context.size
    dist.all_gather_object(everywhere, here, group=group)
    if wish == "horovod" and not all(everywhere):
        missing = [rank for rank, there in enumerate(everywhere) if not there]
        raise InvalidUsage(
            f"HVD_ORDER_TRANSPORT is horovod, but ranks {missing} have no Horovod with PyTorch: "
            "install it there, or use HVD_ORDER_TRANSPORT=c10d"
        )
    return all(everywhere) and (
        wish == "horovod" or (wish is None and "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ)
    )


def start(context: ProcessContext, patience: timedelta, group: dist.ProcessGroup) -> Path:
    """Initializes Horovod until the shutdown of ``context``. Collective.

    Args:
        patience: longest transfer.
        group: for objects, of all ranks.

    Returns:
        The library.

    Raises:
        InvalidUsage: Horovod cannot start, or numbers the ranks otherwise.
    """
    path = find()
    assert path is not None
    library = ctypes.CDLL(str(path))
    global _started_before
    settings: dict[str, str | None] = {
        **{name: os.environ.get(name, value) for name, value in _UNLESS_SET.items()},
        **_ALWAYS,
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(1, int(patience.total_seconds()))),
    }
    if _started_before:
        # Horovod 0.28 keeps both for good, and crashes when it reads both a second time.
        settings |= {_FUSION: None, _CYCLE: None}
    _started_before = True
    if not _launched_for_horovod(library):
        settings |= _meet(context, group)
    library.horovod_init.restype = ctypes.c_bool
    with _environment(settings):
        ready = library.horovod_init(None, 0, None, None, 0)
    numbers = (library.horovod_rank(), library.horovod_size())
    if not ready or numbers != (context.rank, context.size):
        raise InvalidUsage(
            f"rank {context.rank} of {context.size}: Horovod "
            + (f"counts it as rank {numbers[0]} of {numbers[1]}" if ready else "did not start")
            + "; use HVD_ORDER_TRANSPORT=c10d"
        )
    context.on_shutdown(library.horovod_shutdown)
    return path


def check(buffers: Sequence[torch.Tensor]) -> None:
    """Raises InvalidUsage if Horovod cannot carry one of the buffers."""
    for buffer in buffers:
        if buffer.dtype not in _DTYPES:
            raise InvalidUsage(
                f"Horovod does not carry gradients of {buffer.dtype}; use HVD_ORDER_TRANSPORT=c10d "
                "or compression=hvd.Compression.fp16"
            )


def has_gpu(path: Path) -> bool:
    """Whether Horovod was built to carry tensors of GPUs without a copy to the host."""
    library = ctypes.CDLL(str(path))
    return bool(library.horovod_cuda_built() or library.horovod_rocm_built())


def _launched_for_horovod(library: ctypes.CDLL) -> bool:
    """Whether Horovod finds the others by itself: horovodrun started the job, or mpirun did."""
    mpirun = {"OMPI_COMM_WORLD_RANK", "PMI_RANK"} & os.environ.keys()
    return "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ or bool(
        mpirun and library.horovod_mpi_built()
    )


def _meet(context: ProcessContext, group: dist.ProcessGroup) -> dict[str, str]:
    """Starts a meeting point on rank 0; what horovodrun would have set."""
    name = socket.gethostname()
    everybody: list[str | None] = [None] * context.size
    dist.all_gather_object(everybody, name, group=group)
    hosts = list(dict.fromkeys(everybody))
    slots = ",".join(f"{host}:{everybody.count(host)}" for host in hosts)
    port = [_serve(context, slots) if context.rank == 0 else None]
    dist.broadcast_object_list(port, src=0, group=group)
    if isinstance(port[0], str):
        raise InvalidUsage(port[0])
    one_host = len(hosts) == 1
    settings = {
        "HOROVOD_RANK": str(context.rank),
        "HOROVOD_SIZE": str(context.size),
        "HOROVOD_LOCAL_RANK": str(context.local_rank),
        "HOROVOD_LOCAL_SIZE": str(context.local_size),
        "HOROVOD_CROSS_RANK": str(context.cross_rank),
        "HOROVOD_CROSS_SIZE": str(context.cross_size),
        "HOROVOD_HOSTNAME": name,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": os.environ.get(
            "MASTER_ADDR", "127.0.0.1" if one_host else str(hosts[0])
        ),
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port[0]),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or ("lo" if one_host else "")
    if interface:
        settings["HOROVOD_GLOO_IFACE"] = interface
    return settings


def _serve(context: ProcessContext, hosts: str) -> int | str:
    """Serves until the shutdown; the port, or what went wrong."""
    env = {name: value for name, value in os.environ.items() if name != "HVD_ORDER_ALIAS"}
    server = subprocess.Popen(
        [sys.executable, "-m", "hvd_order.launch.horovod_rendezvous", "--hosts", hosts],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
    )  # fmt: skip
    assert server.stdout is not None

    def end() -> None:
        try:
            server.communicate(timeout=_START_TIMEOUT_S)  # closes its standard input
        except subprocess.TimeoutExpired:
            server.kill()

    line = server.stdout.readline()
    if not line.strip().isdigit():
        _, said = server.communicate()
        return f"Horovod's rendezvous server did not start: {said.strip()[-500:]}"
    context.on_shutdown(end)
    return int(line)


@contextlib.contextmanager
def _environment(settings: Mapping[str, str | None]) -> Iterator[None]:
    """Variables for Horovod alone: this process's children shall not inherit them.

    Args:
        settings: None: the variable is not set.
    """
    before = {name: os.environ.get(name) for name in settings}
    _set(settings)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
