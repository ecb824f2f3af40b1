"""Creation of the process groups of a job.

A library for which ``torch.distributed.is_initialized()`` is true assumes that it must average
gradients itself: Ignite and Accelerate wrap models in DDP, torchmetrics and torch's own
SyncBatchNorm exchange tensors of their own. Under Horovod it is false. So `init()` makes no
default process group: `OwnGroups` are built from torch's backends directly, and
torch.distributed's table of groups does not list them. (A script that wants a default group calls
``init_process_group()``, before or after ``hvd.init()``.) In a job that the script has initialised
itself, `JoinedGroups` makes groups of Gloo alone in the same way. Others it makes with
``torch.distributed.new_group``, which supports backends that only the script has.

Unlisted groups cannot be passed to functions such as ``torch.distributed.broadcast``:
group_collectives.py has the replacements.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from hvd_order.base.bounded import answer_s, within
from hvd_order.base.errors import HvdOrderError, InvalidUsage, PeerLost, TransferTimeout
from hvd_order.base.same_model import name_ranks
from hvd_order.base.store_errors import first_line
from hvd_order.engine.job.gloo import GlooDevices, Traffic, gloo_group

__all__ = ["GroupRequest", "Groups", "JoinedGroups", "OwnGroups"]


@dataclass(frozen=True)
class GroupRequest:
    """A process group to be made; the same on all ranks.

    Attributes:
        purpose: one word for logs.
        backend: in torch.distributed's spelling, such as ``gloo`` or ``cpu:gloo,cuda:nccl``.
        timeout: longest transfer.
        ranks: the members; None: all ranks.
        traffic: what the group carries.
    """

    purpose: str
    backend: str
    timeout: timedelta
    ranks: list[int] | None
    traffic: Traffic


class Groups(Protocol):
    """Makes process groups and ends them."""

    @property
    def store(self) -> Store:
        """Where the ranks have met."""

    def make(self, request: GroupRequest) -> dist.ProcessGroup:
        """Makes a group with connections of its own. Collective: all ranks call it in the same
        order.

        Returns:
            The group; on a rank that is not a member, an unusable object.
        """

    def end(self, group: dist.ProcessGroup) -> None:
        """Ends a group made by `make`."""


class OwnGroups:
    """Groups that connect through hvd_order's store and that torch.distributed does not list."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        """Prepares groups; ``store`` has keys with no other user, and all ranks reach it."""
        self.store = store
        self._rank = rank
        self._size = size
        self._made = 0
        self._devices = GlooDevices()

    def make(self, request: GroupRequest) -> dist.ProcessGroup:
        """Makes a group of Gloo or NCCL; see `Groups.make`.

        Raises:
            HorovodInternalError: a connection could not be made; names the ranks that did not
                arrive.
            InvalidUsage: this PyTorch's Gloo lacks the device that GLOO_DEVICE_TRANSPORT requests.
        """
        number = self._made
        self._made += 1  # on all ranks, members or not: the store's keys contain the number
        every = range(self._size) if request.ranks is None else request.ranks
        members = sorted(every)
        if self._rank not in members:
            nobody: Any = dist.GroupMember.NON_GROUP_MEMBER  # same as new_group()
            return nobody  # type: ignore[no-any-return]
        try:
            self._come(number, request)
        except TimeoutError as error:  # the store does not answer, so it is not asked again
            raise self._silent(error, request) from error
        except RuntimeError as error:
            raise self._failure(error, number, request, members) from error
        try:
            return self._connected(f"hvd_order/{number}", request, members)
        except (TimeoutError, RuntimeError) as error:
            raise self._failure(error, number, request, members) from error

    def _come(self, number: int, request: GroupRequest) -> None:
        """Tells the others that this rank is at the group."""
        place = f"at/{self._rank}"
        within(answer_s(request.timeout), lambda: self.store.set(place, str(number)))

    def _connected(self, name: str, request: GroupRequest, members: list[int]) -> dist.ProcessGroup:
        rank, size = members.index(self._rank), len(members)
        timeout = request.timeout
        store = PrefixStore(f"{name}/", self.store)
        group = dist.ProcessGroup(store, rank, size)
        kinds = dist.ProcessGroup.BackendType
        nccl = "nccl" in request.backend
        group._set_default_backend(kinds.NCCL if nccl else kinds.GLOO)
        # Gloo meets the other ranks in the store, so it needs a thread with a limit. NCCL meets
        # them later, and must be created on the thread where the program has chosen its device.
        gloo = within(
            timeout.total_seconds() + answer_s(timeout),
            lambda: gloo_group(
                PrefixStore("cpu/", store), rank, size, timeout, request.traffic,
                self._devices.of(request.traffic),
            ),
        )  # fmt: skip
        gloo._set_sequence_number_for_group()
        group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
        if nccl:
            group._register_backend(
                torch.device("cuda"), kinds.NCCL, _nccl(store, rank, size, request, name, members)
            )
        else:
            group._register_backend(torch.device("cuda"), kinds.GLOO, gloo)
        labelled: Any = group  # torch types a name as more than a string
        labelled._set_group_name(name)
        labelled._set_group_desc(f"hvd_order:{request.purpose}")
        return group

    def _failure(
        self, error: Exception, number: int, request: GroupRequest, members: list[int]
    ) -> HvdOrderError:
        """Returns the error of a group that could not be made, naming the rank to blame."""
        if "unsupported gloo device" in str(error):
            return InvalidUsage(
                f"GLOO_DEVICE_TRANSPORT is {os.environ.get('GLOO_DEVICE_TRANSPORT')!r}, which this "
                "PyTorch's Gloo was built without; install a build that has it, such as PyTorch's "
                "own CUDA wheels for Linux, or unset it on all ranks (documentation: Security)"
            )
        what = f"rank {self._rank} could not connect to the others (group '{request.purpose}')"
        why = f"({first_line(error)})"
        try:
            late = within(
                answer_s(request.timeout),
                lambda: [rank for rank in members if not self._has_come(rank, number)],
            )
        except TimeoutError:
            return self._silent(error, request)
        except RuntimeError:
            return PeerLost(f"{what}: rank 0, which has the store of the job, died or left {why}")
        if not late:
            return PeerLost(
                f"{what}: all ranks have come, but one of them died meanwhile or cannot be reached "
                f"from here; hosts must reach each other on all ports {why}"
            )
        return TransferTimeout(
            f"{what} within {request.timeout.total_seconds():g} s: {name_ranks(late)} did not "
            f"come; its process died or is stopped, or its host cannot be reached {why}"
        )

    def _silent(self, error: Exception, request: GroupRequest) -> TransferTimeout:
        """The error of a store that does not answer."""
        return TransferTimeout(
            f"rank {self._rank} could not connect to the others (group '{request.purpose}'): no "
            "answer from rank 0, which has the store of the job; its process is stopped, or its "
            f"host cannot be reached ({first_line(error)})"
        )

    def _has_come(self, rank: int, number: int) -> bool:
        key = f"at/{rank}"
        return self.store.check([key]) and int(self.store.get(key)) >= number

    def end(self, group: dist.ProcessGroup) -> None:
        """Ends a group; see `Groups.end`."""
        group.shutdown()


def _nccl_options(request: GroupRequest) -> Any:
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = request.timeout
    # NCCL's kernels run on the group's own stream. Those of gradients get free multiprocessors
    # before the kernels of the training do: the next layers wait for them.
    options.is_high_priority_stream = request.traffic == "at once"
    return options


def _nccl(
    store: Store, rank: int, size: int, request: GroupRequest, name: str, members: list[int]
) -> Any:
    options = _nccl_options(request)
    options.group_name = name  # these two are for NCCL's flight recorder
    options.global_ranks_in_group = members
    nccl = dist.ProcessGroupNCCL(PrefixStore("cuda/", store), rank, size, options)
    nccl._set_sequence_number_for_group()
    return nccl


class JoinedGroups:
    """Groups beside the script's default one; those that torch.distributed lists end with it if it
    ends first.
    """

    def __init__(self, own: OwnGroups) -> None:
        """Prepares groups; ``own`` makes those of Gloo alone, over the script's store."""
        self._own = own
        self._listed: list[dist.ProcessGroup] = []

    @property
    def store(self) -> Store:
        """The script's store."""
        return self._own.store

    def make(self, request: GroupRequest) -> dist.ProcessGroup:
        """Makes a group; see `Groups.make`."""
        if _is_gloo_alone(request.backend):
            return self._own.make(request)
        group: dist.ProcessGroup = dist.new_group(
            request.ranks,
            timeout=request.timeout,
            backend=request.backend,
            pg_options=_nccl_options(request) if "nccl" in request.backend else None,
            group_desc=f"hvd_order:{request.purpose}",
        )
        self._listed.append(group)
        return group

    def end(self, group: dist.ProcessGroup) -> None:
        """Ends a group; see `Groups.end`."""
        if group not in self._listed:
            self._own.end(group)
            return
        self._listed.remove(group)
        if dist.is_initialized():  # the script may have destroyed all groups already
            dist.destroy_process_group(group)


def _is_gloo_alone(backend: str) -> bool:
    """Returns whether Gloo carries the tensors of the CPU and of CUDA, and no others are named."""
    parts = dict(part.split(":") for part in backend.split(",") if ":" in part)
    return backend == "gloo" or parts in ({"cpu": "gloo"}, {"cpu": "gloo", "cuda": "gloo"})
