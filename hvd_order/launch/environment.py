"""From a launcher's environment variables to this process's place in the job.

Known launchers, in order of precedence:

| launcher                | variables of rank and size                   |
| ----------------------- | -------------------------------------------- |
| torchrun, `hvd-order run` | RANK, WORLD_SIZE                           |
| horovodrun              | HOROVOD_RANK, HOROVOD_SIZE                   |
| Open MPI                | OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE   |
| MPICH, Intel MPI        | PMI_RANK, PMI_SIZE                           |
| Slurm (a step of srun)  | SLURM_PROCID, SLURM_STEP_NUM_TASKS           |

A number that the launcher does not set is None in the result; the ranks determine it together
(`placement`). All functions depend on their arguments only.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvd_order.base.errors import InvalidUsage

__all__ = ["RankInfo", "RankPlacement", "first_host", "placement", "rank_info"]

_LOOPBACK = "127.0.0.1"
# Below Linux's ephemeral ports (32768 and up).
_FIRST_PORT, _PORT_COUNT = 20000, 12000
# Slurm numbers real steps from 0; the batch script and other special steps sit at the top.
_FIRST_SPECIAL_SLURM_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class RankInfo:
    """One process's place in a job, as far as its launcher set it.

    Attributes:
        launcher: the launcher: "torchrun", "horovodrun", "Open MPI", "PMI", "Slurm" or "none".
        rank, size: number of this process and of all processes.
        local_rank, local_size: same among the processes of its host; None: not set.
        cross_rank, cross_size: this host among those with this local rank; None: not set.
        master_addr, master_port: address of rank 0; port 0 when size is 1.
        job: the launcher's identifier of the job, the same on all ranks; empty: none.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    cross_rank: int | None
    cross_size: int | None
    master_addr: str
    master_port: int
    job: str = ""


@dataclass(frozen=True)
class RankPlacement:
    """Place of a rank among the processes of its host, and of its host among the hosts."""

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def placement(hosts: Sequence[str], rank: int) -> RankPlacement:
    """Computes the local and cross numbers of `rank` from the host name of every rank.

    Horovod's meaning: the local rank counts the ranks of one host in rank order; the cross rank
    counts, in order of appearance, the hosts that have a process with the same local rank.
    """
    members: dict[str, list[int]] = {}
    for other, host in enumerate(hosts):
        members.setdefault(host, []).append(other)
    mine = members[hosts[rank]]
    local_rank = mine.index(rank)
    peers = [host for host, ranks in members.items() if len(ranks) > local_rank]
    return RankPlacement(local_rank, len(mine), peers.index(hosts[rank]), len(peers))


def rank_info(environ: Mapping[str, str]) -> RankInfo:
    """Reads this process's place from the variables that launchers set.

    Args:
        environ: environment variables, usually ``os.environ``.

    Returns:
        The place; a job of one process if no launcher's variables are set.

    Raises:
        InvalidUsage: variables contradict each other, or a job over several hosts has no
            address of rank 0; the message names the variable to set.
    """
    env = _Variables(environ)
    for ask in (_torchrun, _horovodrun, _open_mpi, _pmi, _slurm):
        info = ask(env)
        if info is not None:
            return _checked(info)
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if env.text(name) is not None and env.text("WORLD_SIZE") != "1":
            raise InvalidUsage(
                f"{name} is set but {other} is not; set both, with MASTER_ADDR and MASTER_PORT, "
                "or start the program with: hvd-order run -np N ..."
            )
    return RankInfo("none", 0, 1, 0, 1, 0, 1, _LOOPBACK, 0)


class _Variables:
    """Environment variables, parsed as numbers; errors name the variable."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def text(self, *names: str) -> str | None:
        """Value of the first of `names` that is set and not empty."""
        return next((self._environ[name] for name in names if self._environ.get(name)), None)

    def number(self, *names: str) -> int | None:
        """Value of the first of `names` that is set, as an integer."""
        for name in names:
            text = self.text(name)
            if text is None:
                continue
            try:
                return int(text)
            except ValueError:
                raise InvalidUsage(f"{name} is {text!r}; expected a whole number") from None
        return None


def _torchrun(env: _Variables) -> RankInfo | None:
    rank, size = env.number("RANK"), env.number("WORLD_SIZE")
    if rank is None or size is None:
        return None
    local_rank, local_size = env.number("LOCAL_RANK"), env.number("LOCAL_WORLD_SIZE")
    cross_rank, cross_size = env.number("GROUP_RANK"), env.number("GROUP_WORLD_SIZE")
    if local_size is None or cross_size is None or local_size * cross_size != size:
        cross_rank = cross_size = None  # hosts with different numbers of processes
    address, port = env.text("MASTER_ADDR"), env.number("MASTER_PORT")
    if size > 1 and (address is None or port is None):
        missing = "MASTER_ADDR" if address is None else "MASTER_PORT"
        raise InvalidUsage(
            f"RANK and WORLD_SIZE are set but {missing} is not; set it to where rank 0 can be "
            "reached (the same value on every rank), or start the program with torchrun or "
            "hvd-order run, which do it for you"
        )
    return RankInfo(
        "torchrun",
        rank,
        size,
        local_rank,
        local_size,
        cross_rank,
        cross_size,
        address or _LOOPBACK,
        port or 0,
        env.text("TORCHELASTIC_RUN_ID") or "",
    )


def _horovodrun(env: _Variables) -> RankInfo | None:
    rank, size = env.number("HOROVOD_RANK"), env.number("HOROVOD_SIZE")
    if rank is None or size is None:
        return None
    local_size = env.number("HOROVOD_LOCAL_SIZE")
    rendezvous = env.text("HOROVOD_GLOO_RENDEZVOUS_PORT")
    address, port = _rendezvous(env, "horovodrun", size, local_size, rendezvous)
    return RankInfo(
        "horovodrun",
        rank,
        size,
        env.number("HOROVOD_LOCAL_RANK"),
        local_size,
        env.number("HOROVOD_CROSS_RANK"),
        env.number("HOROVOD_CROSS_SIZE"),
        address,
        port,
        rendezvous or "",
    )


def _open_mpi(env: _Variables) -> RankInfo | None:
    rank, size = env.number("OMPI_COMM_WORLD_RANK"), env.number("OMPI_COMM_WORLD_SIZE")
    if rank is None or size is None:
        return None
    local_size = env.number("OMPI_COMM_WORLD_LOCAL_SIZE")
    job = env.text("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid")
    address, port = _rendezvous(env, "Open MPI", size, local_size, job)
    local_rank = env.number("OMPI_COMM_WORLD_LOCAL_RANK")
    return RankInfo(
        "Open MPI", rank, size, local_rank, local_size, None, None, address, port, job or ""
    )


def _pmi(env: _Variables) -> RankInfo | None:
    rank, size = env.number("PMI_RANK"), env.number("PMI_SIZE")
    if rank is None or size is None:
        return None
    local_rank = env.number("MPI_LOCALRANKID", "PMI_LOCAL_RANK")
    local_size = env.number("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
    if local_rank is None:
        slurm = _slurm(env)  # srun --mpi=pmi2 sets PMI_RANK too, and Slurm sets more
        if slurm is not None and (slurm.rank, slurm.size) == (rank, size):
            return slurm
    batch = env.text("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
    job = env.text("PMI_JOBID", "PMI_PORT") or batch
    address, port = _rendezvous(env, "MPI", size, local_size, job)
    # PMI_PORT may name a proxy on each host.
    job = env.text("PMI_JOBID") or batch or ""
    return RankInfo("PMI", rank, size, local_rank, local_size, None, None, address, port, job)


def _slurm(env: _Variables) -> RankInfo | None:
    # Only inside a step: the shell of a batch script has SLURM_PROCID=0 and SLURM_NTASKS=N as
    # well, but the other ranks are not started.
    step = env.number("SLURM_STEP_ID", "SLURM_STEPID")
    rank = env.number("SLURM_PROCID")
    if step is None or step >= _FIRST_SPECIAL_SLURM_STEP or rank is None:
        return None
    size = env.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    if size is None:
        return None
    host_count = env.number("SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    local_size = size if host_count == 1 else None
    nodes = env.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    # The first node of the step runs rank 0. The launch node is a login node under salloc, so it
    # is only the second choice.
    known = first_host(nodes) if nodes else env.text("SLURM_LAUNCH_NODE_IPADDR")
    job = f"{env.text('SLURM_JOB_ID', 'SLURM_JOBID') or ''}.{step}"
    address, port = _rendezvous(env, "Slurm", size, local_size, job, known)
    local_rank = env.number("SLURM_LOCALID")
    return RankInfo("Slurm", rank, size, local_rank, local_size, None, None, address, port, job)


def first_host(node_list: str) -> str:
    """The first name of a Slurm node list: ``"gpu[07-09,12],cpu1"`` gives ``"gpu07"``."""
    name = ""
    rest = node_list.strip()
    while rest and rest[0] != ",":
        match = re.match(r"\[([^\],-]+)[^\]]*\]|[^\[,]+", rest)
        if match is None:
            raise InvalidUsage(f"cannot read the node list {node_list!r}; set MASTER_ADDR")
        name += match.group(1) or match.group(0)
        rest = rest[match.end() :]
    return name


def _rendezvous(
    env: _Variables,
    launcher: str,
    size: int,
    local_size: int | None,
    job: str | None,
    known_address: str | None = None,
) -> tuple[str, int]:
    """Address of rank 0: the user's setting, else this host and a port derived from the job."""
    if size == 1:
        return _LOOPBACK, 0
    address = env.text("MASTER_ADDR") or (_LOOPBACK if local_size == size else known_address)
    if address is None:
        raise InvalidUsage(
            f"{launcher} started {size} processes on several hosts but does not say how to reach "
            "rank 0; set MASTER_ADDR to the address of its host on every rank (mpirun: "
            "-x MASTER_ADDR=...; MPICH: -genv MASTER_ADDR ...)"
        )
    port = env.number("MASTER_PORT")
    if port is None:
        port = _FIRST_PORT + zlib.crc32((job or "").encode()) % _PORT_COUNT
    return address, port


def _checked(info: RankInfo) -> RankInfo:
    """Returns `info`, or raises if its numbers are impossible."""
    pairs = (
        ("rank", info.rank, info.size),
        ("local rank", info.local_rank, info.local_size),
        ("cross rank", info.cross_rank, info.cross_size),
    )
    for name, rank, size in pairs:
        if (size is not None and size < 1) or (
            rank is not None and (rank < 0 or (size is not None and rank >= size))
        ):
            raise InvalidUsage(f"{info.launcher} says {name} {rank} of {size}, which cannot be")
    if not (0 if info.size == 1 else 1) <= info.master_port <= 65535:
        raise InvalidUsage(f"MASTER_PORT is {info.master_port}; expected 1 to 65535")
    return info
