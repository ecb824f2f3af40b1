"""What each launcher's variables mean."""

from __future__ import annotations

from typing import Any

import pytest

from hvd_order.base.errors import InvalidUsage
from hvd_order.launch.environment import (
    RankInfo,
    RankPlacement,
    first_host,
    placement,
    rank_info,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-17@1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}
HOROVODRUN = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "2",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "0",
    "HOROVOD_CROSS_SIZE": "1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "40123",
}


def without(environ: dict[str, str], *names: str, **changes: str) -> dict[str, str]:
    return {k: v for k, v in environ.items() if k not in names} | changes


def test_no_launcher_is_a_job_of_one() -> None:
    assert rank_info({"PATH": "/bin"}) == RankInfo("none", 0, 1, 0, 1, 0, 1, "127.0.0.1", 0)


def test_torchrun() -> None:
    assert rank_info(TORCHRUN) == RankInfo("torchrun", 5, 8, 1, 4, 1, 2, "node1", 29500)


def test_torchrun_with_uneven_hosts_leaves_cross_numbers_open() -> None:
    info = rank_info(without(TORCHRUN, LOCAL_WORLD_SIZE="3"))
    assert (info.local_rank, info.local_size) == (1, 3)
    assert (info.cross_rank, info.cross_size) == (None, None)


def test_four_variables_by_hand_are_enough() -> None:
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    info = rank_info(without(TORCHRUN, *names))
    assert info == RankInfo("torchrun", 5, 8, None, None, None, None, "node1", 29500)


def test_open_mpi_on_one_host_needs_no_address() -> None:
    info = rank_info(OPEN_MPI)
    assert (info.launcher, info.rank, info.size) == ("Open MPI", 1, 2)
    assert (info.local_rank, info.local_size) == (1, 2)
    assert info.master_addr == "127.0.0.1"
    assert info == rank_info(OPEN_MPI), "all ranks must make the same port"
    other_job = rank_info(without(OPEN_MPI, PMIX_NAMESPACE="prterun-host-18@1"))
    assert other_job.master_port != info.master_port


@pytest.mark.parametrize(
    "environ",
    [
        without(OPEN_MPI, OMPI_COMM_WORLD_LOCAL_SIZE="1", OMPI_COMM_WORLD_LOCAL_RANK="0"),
        without(HYDRA, MPI_LOCALNRANKS="1", MPI_LOCALRANKID="0"),
        without(HYDRA, "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
        without(HOROVODRUN, HOROVOD_LOCAL_SIZE="1", HOROVOD_LOCAL_RANK="0"),
        without(SLURM, "SLURM_STEP_NODELIST", "SLURM_LAUNCH_NODE_IPADDR"),
    ],
)
def test_several_hosts_without_an_address(environ: dict[str, str]) -> None:
    with pytest.raises(InvalidUsage, match="set MASTER_ADDR"):
        rank_info(environ)
    told = rank_info(environ | {"MASTER_ADDR": "node1", "MASTER_PORT": "7000"})
    assert (told.master_addr, told.master_port) == ("node1", 7000)


def test_mpich_and_intel() -> None:
    info = rank_info(HYDRA)
    assert (info.launcher, info.rank, info.size) == ("PMI", 1, 2)
    assert (info.local_rank, info.local_size, info.master_addr) == (1, 2, "127.0.0.1")


def test_slurm_step_over_two_nodes() -> None:
    info = rank_info(SLURM)
    assert (info.launcher, info.rank, info.size) == ("Slurm", 3, 4)
    assert (info.local_rank, info.local_size) == (1, None)  # uneven nodes are possible
    assert info.master_addr == "gpu07", "rank 0 runs on the first node of the step"
    assert 20000 <= info.master_port < 32768


def test_slurm_without_a_node_list_uses_the_launch_node() -> None:
    assert rank_info(without(SLURM, "SLURM_STEP_NODELIST")).master_addr == "10.0.0.1"


def test_slurm_step_on_one_node() -> None:
    info = rank_info(without(SLURM, SLURM_STEP_NUM_NODES="1", SLURM_LOCALID="3"))
    assert (info.local_rank, info.local_size, info.master_addr) == (3, 4, "127.0.0.1")


def test_srun_with_pmi2_is_read_as_slurm() -> None:
    assert rank_info(SLURM | {"PMI_RANK": "3", "PMI_SIZE": "4"}) == rank_info(SLURM)


@pytest.mark.parametrize("step", [None, "4294967291", "4294967290"])
def test_the_shell_of_a_batch_job_is_a_job_of_one(step: str | None) -> None:
    # It has SLURM_PROCID=0 and SLURM_NTASKS=4, but nobody starts three others.
    environ = without(SLURM, "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS")
    environ |= {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    if step is not None:
        environ["SLURM_STEP_ID"] = step
    assert rank_info(environ).size == 1


def test_horovodrun() -> None:
    info = rank_info(HOROVODRUN)
    assert (info.launcher, info.rank, info.size) == ("horovodrun", 1, 2)
    assert (info.local_rank, info.local_size, info.cross_rank, info.cross_size) == (1, 2, 0, 1)
    assert info.master_addr == "127.0.0.1"
    assert info.master_port != 40123, "that port is horovodrun's own"


def test_torchrun_inside_an_mpi_job_counts() -> None:
    assert rank_info(OPEN_MPI | TORCHRUN).launcher == "torchrun"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR is not"),
        (without(TORCHRUN, "MASTER_PORT"), "MASTER_PORT is not"),
        (without(TORCHRUN, "WORLD_SIZE"), "RANK is set but WORLD_SIZE is not"),
        (without(TORCHRUN, "RANK"), "WORLD_SIZE is set but RANK is not"),
        (without(TORCHRUN, RANK="8"), "rank 8 of 8, which cannot be"),
        (without(TORCHRUN, RANK="-1"), "rank -1 of 8"),
        (without(TORCHRUN, WORLD_SIZE="0"), "rank 5 of 0"),
        (without(TORCHRUN, LOCAL_RANK="4"), "local rank 4 of 4"),
        (without(TORCHRUN, RANK="five"), "RANK is 'five'; expected a whole number"),
        (without(TORCHRUN, MASTER_PORT="0"), "MASTER_PORT is 0"),
        (without(TORCHRUN, MASTER_PORT="65536"), "MASTER_PORT is 65536"),
        (without(SLURM, SLURM_STEP_NODELIST="gpu[", SLURM_JOB_ID="1"), "set MASTER_ADDR"),
    ],
)
def test_contradictions_are_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidUsage, match=message):
        rank_info(environ)


@pytest.mark.parametrize(
    "environ", [without(TORCHRUN, "MASTER_ADDR"), OPEN_MPI, HYDRA, SLURM, HOROVODRUN]
)
def test_a_job_of_one_under_any_launcher_needs_no_address(environ: dict[str, str]) -> None:
    one = {
        name: "0" if name.endswith(("RANK", "RANKID", "PROCID", "LOCALID")) else "1"
        for name in environ
        if name != "MASTER_PORT" and "IPADDR" not in name and "NODELIST" not in name
    }
    info = rank_info(one)
    assert (info.rank, info.size, info.master_addr) == (0, 1, "127.0.0.1")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("gpu[07-09,12],cpu1", "gpu07"),
        ("gpu[3]", "gpu3"),
        ("rack[1-2]node[05,07]", "rack1node05"),
        ("rack[1-2]n,x", "rack1n"),
    ],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_placement_counts_as_horovod_does() -> None:
    # Two hosts, three processes on a, one on b, and the ranks are dealt round.
    hosts = ["a", "b", "a", "a"]
    found: list[Any] = [placement(hosts, rank) for rank in range(4)]
    assert found == [
        RankPlacement(local_rank=0, local_size=3, cross_rank=0, cross_size=2),
        RankPlacement(local_rank=0, local_size=1, cross_rank=1, cross_size=2),
        RankPlacement(local_rank=1, local_size=3, cross_rank=0, cross_size=1),
        RankPlacement(local_rank=2, local_size=3, cross_rank=0, cross_size=1),
    ]
