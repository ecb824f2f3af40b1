"""Profiles a script under a launcher: rank 0 records it, then all ranks measure the transport.

The script itself runs as a job of one process, as without a launcher, so that transfers do not
disturb the recording. Meanwhile the other ranks wait.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import quantiles

import torch

from hvd_order._native import _torch as native
from hvd_order.base.link.link_fit import SliceStream, fit_link
from hvd_order.base.link.link_model import LinkModel
from hvd_order.engine.engine_host import EngineHost, engine_host
from hvd_order.engine.job import process
from hvd_order.engine.process_sets import init
from hvd_order.launch.environment import rank_info
from hvd_order.planning.files.profile import MeasuredLink, Profile, read_profile
from hvd_order.torch.collectives.functions import broadcast_object

__all__ = ["measure_link", "profile_on_ranks", "record_alone"]

_STREAMS = ((32, 64 * 1024), (16, 256 * 1024), (8, 2**20), (4, 4 * 2**20))  # slices, bytes of each
_TINY_BYTES = 1024
_ROUNDS, _FEWEST_ROUNDS = 12, 4
_PATIENCE_S = 5.0  # for all rounds of the largest stream

_LAUNCHERS = ("OMPI_", "PMI", "SLURM_", "HOROVOD_RANK", "HOROVOD_SIZE", "TORCHELASTIC_")
_SERVERS = (
    "HVD_ORDER_SERVER_STORE", "HVD_ORDER_SERVERS", "HVD_ORDER_MIN_SERVERS",
    "HVD_ORDER_MAX_SERVERS", "HVD_ORDER_COMM",
)  # fmt: skip
# Also for scripts that create a torch.distributed process group themselves.
_ALONE = {
    "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
}  # fmt: skip


def profile_on_ranks(
    script: Path, arguments: Sequence[str], runs: int, output: Path
) -> Profile | None:
    """Writes the profile of a script with the link among this job's ranks. Collective.

    Args:
        script, arguments, runs: as for :func:`hvd_order.planning.profiling.script.profile_script`.
        output: file, on rank 0's host.

    Returns:
        The profile, on rank 0.

    Raises:
        SystemExit: the script could not be recorded; the reason has been printed.
        HvdOrderError: the ranks cannot connect to each other, or a transfer failed.
    """
    profile = None
    if rank_info(os.environ).rank == 0:
        record_alone(script, arguments, runs, output)
        profile = read_profile(output)
    init()
    try:
        on_device = broadcast_object(profile is not None and profile.clock != "wall", root_rank=0)
        link = measure_link(bool(on_device))
    finally:
        process.shutdown()
    if profile is not None:
        profile = replace(profile, link=link)
        profile.write(output)
    return profile


def record_alone(script: Path, arguments: Sequence[str], runs: int, output: Path) -> None:
    """Writes the profile of a script in a process without launcher and servers.

    Args:
        script, arguments, runs, output: as of `profile_on_ranks`.

    Raises:
        SystemExit: the script could not be recorded; the reason has been printed.
    """
    left_out = (*_LAUNCHERS, *_SERVERS)
    env = {name: v for name, v in os.environ.items() if not name.startswith(left_out)}
    command = [
        sys.executable, "-m", "hvd_order.tools.cli", "profile",
        "--steps", str(runs), "-o", str(output), str(script), *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, env={**env, **_ALONE}, stdout=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise SystemExit(done.returncode)


def measure_link(on_device: bool) -> MeasuredLink:
    """Measures the transport of gradients. Collective, after ``init()``.

    Args:
        on_device: measure with gradients on this rank's accelerator.

    Returns:
        This rank's measurements, on every rank; a profile contains rank 0's.

    Raises:
        HorovodInternalError: a transfer failed.
    """
    job = process.current()
    device = torch.device("cuda", job.local_rank) if on_device else torch.device("cpu")
    host = engine_host()
    link = _fitted(host, device)
    if isinstance(host.transport, native.HorovodTransport):
        return MeasuredLink(link, host.size, "horovod")
    return MeasuredLink(link, host.size, _back_end(job.backend, device))


def _fitted(host: EngineHost, device: torch.device) -> LinkModel:
    """Times all-reduces of several sizes, more and larger ones than training could afford."""
    buffer = torch.zeros(max(count * size for count, size in _STREAMS) // 4, device=device)

    def times(count: int, size_bytes: int, in_flight: int, rounds: int) -> list[float]:
        slices = list(buffer[: count * size_bytes // 4].split(size_bytes // 4))
        return [host.transport.time_stream(slices, in_flight) for _ in range(rounds)]

    latency_s = _undisturbed(times(1, _TINY_BYTES, 1, 8 * _ROUNDS))
    (largest_s,) = times(*_STREAMS[-1], host.choice.in_flight, 1)
    wanted = min(max(round(_PATIENCE_S / largest_s), _FEWEST_ROUNDS), _ROUNDS)
    rounds: int = broadcast_object(wanted, root_rank=0)  # the same everywhere
    return fit_link(
        latency_s,
        [
            SliceStream(
                size, _undisturbed(times(count, size, host.choice.in_flight, rounds)) / count
            )
            for count, size in _STREAMS
        ],
    )


def _undisturbed(seconds: list[float]) -> float:
    """The lower quartile, since other load on a machine only adds time."""
    return quantiles(seconds, n=4)[0]


def _back_end(names: str, device: torch.device) -> str:
    """The backend for a device, from torch.distributed's ``gloo`` or ``cpu:gloo,cuda:nccl``."""
    for name in names.split(","):
        kind, colon, back_end = name.partition(":")
        if not colon:
            return kind
        if kind == device.type:
            return back_end
    return names
