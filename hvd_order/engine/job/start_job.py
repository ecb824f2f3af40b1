"""Starts a job: alone, in the program's own process group, or from the launcher's variables."""

from __future__ import annotations

import logging
import os

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import _get_default_group, _get_default_store

from hvd_order.base.bounded import notice_times, within
from hvd_order.base.config import Config
from hvd_order.base.errors import InvalidUsage, TransferTimeout
from hvd_order.base.store_errors import first_line
from hvd_order.engine.job import group_collectives
from hvd_order.engine.job.formation import formation_name
from hvd_order.engine.job.job import Job
from hvd_order.engine.job.meeting import Card, check_cards, every_rank_has_a_device, meet
from hvd_order.engine.job.process_groups import JoinedGroups, OwnGroups
from hvd_order.launch.environment import RankInfo, RankPlacement, placement, rank_info
from hvd_order.launch.listening import is_loopback, listening_fd

__all__ = ["new_job"]

_log = logging.getLogger("hvd_order")
_GREETING_S = 2.0  # torch limits the connection attempt, but not the wait for a reply


class _Stores:
    """The connections to rank 0's store. They belong to the process and not to a job.

    Other ranks may still read the store when this rank has left the job, and the next job meets in
    the same store.

    Attributes:
        by_address: kept alive: rank 0's is the server.
        formations: by address, the name of this process's formation, where an agent serves.
        jobs_begun: separates the keys of successive jobs in one store.
    """

    def __init__(self) -> None:
        self.by_address: dict[tuple[str, int], TCPStore] = {}
        self.formations: dict[tuple[str, int], str] = {}
        self.jobs_begun = 0


_stores = _Stores()


def new_job(config: Config) -> Job:
    """Creates this process's job. Collective over the ranks of the job.

    Raises:
        InvalidUsage: the ranks do not fit together, or rank 0 cannot listen.
        TransferTimeout: not all ranks arrived within ``HVD_ORDER_TIMEOUT``.
    """
    if dist.is_initialized():
        job = _join_program(config)
    else:
        info = rank_info(os.environ)
        job = _alone(config) if _is_alone(info.size, config) else _start(info, config)
    _stores.jobs_begun += 1
    return job


def _is_alone(size: int, config: Config) -> bool:
    """Whether a job has nobody to exchange gradients with: neither ranks nor servers."""
    return size == 1 and config.servers is None


def _alone(config: Config) -> Job:
    """Creates a job of one process without servers."""
    return Job(0, 1, RankPlacement(0, 1, 0, 1), config, backend="", maker=None)


def _join_program(config: Config) -> Job:
    """Joins the job that the program has initialised with torch.distributed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if _is_alone(size, config):
        return _alone(config)
    # The group replaces the launcher's name of the job.
    card = Card.of_this_process(size, config, job="")
    everyone: list[tuple[Card, int]] = group_collectives.gather_objects(
        (card, _stores.jobs_begun), _get_default_group(), "what ranks know of themselves"
    )
    known = [card for card, _ in everyone]
    check_cards(dict(enumerate(known)))
    place = placement([card.host for card in known], rank)
    backend = _covering_backend(str(dist.get_backend_config()), every_rank_has_a_device(known))
    # Ranks may have begun different numbers of jobs: the keys have rank 0's.
    begun = everyone[0][1]
    store = PrefixStore(f"hvd_order/joined/{begun}", _get_default_store())
    return Job(rank, size, place, config, backend, JoinedGroups(OwnGroups(store, rank, size)))


def _covering_backend(backend: str, devices: bool) -> str:
    """Completes the backend of the program's own group so that CPU and CUDA tensors both work."""
    parts = backend.split(",")
    covered = {part.split(":")[0] for part in parts}
    if "cpu" not in covered and dist.is_gloo_available():
        parts.append("cpu:gloo")
    if "cuda" not in covered and devices and dist.is_nccl_available():
        parts.append("cuda:nccl")
    return ",".join(parts)


def _start(info: RankInfo, config: Config) -> Job:
    """Creates the job of all ranks that the launcher started."""
    store = _store(info, config, _stores.jobs_begun)
    cards = meet(store, info, config)
    place = placement([card.host for card in cards], info.rank)
    # The launcher is more reliable than host names, which containers may share or change.
    if info.local_rank is not None and info.local_size is not None:
        place = RankPlacement(info.local_rank, info.local_size, place.cross_rank, place.cross_size)
    if info.cross_rank is not None and info.cross_size is not None:
        place = RankPlacement(place.local_rank, place.local_size, info.cross_rank, info.cross_size)
    nccl = dist.is_nccl_available() and every_rank_has_a_device(cards)
    backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
    maker = OwnGroups(store, info.rank, info.size)
    return Job(info.rank, info.size, place, config, backend, maker)


def _store(info: RankInfo, config: Config, generation: int) -> Store:
    """Connects to the key-value store of the job, with separate keys for each init()."""
    address = (info.master_addr, info.master_port)
    agent_serves = (
        info.launcher == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    )
    store = _stores.by_address.get(address)
    if store is None:
        serves = info.rank == 0 and not agent_serves
        # Listen at the loopback address alone if the other ranks connect there.
        own = serves and is_loopback(info.master_addr)

        def connect() -> TCPStore:
            return TCPStore(
                info.master_addr,
                info.master_port,
                info.size,
                is_master=serves,
                timeout=config.timeout,
                wait_for_workers=False,
                multi_tenant=True,  # as in torch.distributed: the program may use it too
                master_listen_fd=listening_fd(*address) if own else None,
            )

        try:
            store = within(
                config.timeout.total_seconds() + _GREETING_S, connect,
                notice_times(config.stall_warning), lambda: _log.warning(
                    "rank %d waits for rank 0 to listen at %s:%d", info.rank, *address
                ),
            )  # fmt: skip
        except (TimeoutError, RuntimeError) as error:
            raise _unreachable(info, config, error) from error
        _stores.by_address[address] = store
    formation = ""  # a store that rank 0 serves begins with it
    if agent_serves:
        formation = _stores.formations.get(address, "")
        if not formation:
            names = PrefixStore("hvd_order/formations", store)
            formation = formation_name(names, info, config.timeout)
            _stores.formations[address] = formation
    return PrefixStore(f"hvd_order/{formation}/{generation}", store)


def _unreachable(info: RankInfo, config: Config, error: Exception) -> Exception:
    where = f"{info.master_addr}:{info.master_port}"
    if info.rank == 0:
        return InvalidUsage(
            f"rank 0 cannot listen at {where} ({first_line(error)}); is another job using the "
            "port? Set MASTER_PORT to a free one on every rank"
        )
    return TransferTimeout(
        f"rank {info.rank} could not reach rank 0 at {where} within "
        f"{config.timeout.total_seconds():g} s ({first_line(error)}); did rank 0 start, or is "
        "it stopped, and is MASTER_ADDR its address?"
    )
