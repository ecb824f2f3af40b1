"""The plan file of a job: rank 0 reads it, all ranks follow it, rank 0 notes what was measured."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hvd_order.errors import InvalidUsage
from hvd_order.plan.plan_file import Confirmed, Plan, read_plan
from hvd_order.torch import group_collectives
from hvd_order.torch.slot import Slot

if TYPE_CHECKING:
    from hvd_order.torch.engine_host import EngineHost
    from hvd_order.torch.process import ProcessContext

__all__: list[str] = []

_log = logging.getLogger("hvd_order")


def read(context: ProcessContext, group: dist.ProcessGroup) -> Plan | None:
    """The plan that rank 0's ``HVD_ORDER_PLAN`` names; None if it names none. Collective.

    Only rank 0 needs the file, and only its variable counts.

    Args:
        group: for objects, of all ranks.

    Raises:
        InvalidUsage: on every rank, if the file is missing or is no plan.
    """
    told: Any = None
    path = context.config.plan
    if context.rank == 0 and path is not None:
        try:
            told = read_plan(path)
        except (InvalidUsage, OSError, UnicodeDecodeError) as error:
            told = f"HVD_ORDER_PLAN: {error}"
    told = group_collectives.share_object(told, 0, group)
    if isinstance(told, str):
        raise InvalidUsage(told)
    plan: Plan | None = told
    return plan


def fitting(host: EngineHost, slots: Sequence[Slot]) -> Plan | None:
    """The job's plan if it is for this model; the same on every rank. Rank 0 warns if it is not."""
    plan = host.plan
    if plan is None:
        return None
    differences = plan.differences({slot.name: slot.size_bytes for slot in slots})
    if not differences:
        return plan
    if host.rank == 0:
        _log.warning(
            "the plan %s (of %s) is not followed: it is for another model: %s. Make one with "
            "hvd-order profile and hvd-order tune, and give DistributedOptimizer the names: "
            "named_parameters=model.named_parameters()",
            host.context.config.plan, plan.model, "; ".join(differences),
        )  # fmt: skip
    return None


def in_order(plan: Plan | None, unseen: Sequence[Slot], seen: Sequence[Slot]) -> list[Slot]:
    """The slots as they are laid out.

    Args:
        plan: one that fits, or None.
        unseen: nobody was seen reading them, so ``step()`` updates them: they are needed first.
        seen: in the order in which they were read.
    """
    if plan is None:
        return [*unseen, *seen]
    slots = {slot.name: slot for slot in (*unseen, *seen)}
    planned = [slots[name] for name in plan.in_order(list(slots))]
    at_once = set(unseen)
    return sorted(planned, key=lambda slot: slot not in at_once)


def note(host: EngineHost, confirmed: Confirmed) -> None:
    """Rank 0 writes down what trials have chosen, so that the next run begins with it."""
    if host.plan is None:
        return
    host.plan = replace(host.plan, confirmed=confirmed)
    path = host.context.config.plan
    if host.rank == 0 and path is not None:
        try:
            host.plan.write(path)
        except OSError as error:
            _log.warning("the plan stays as it was, so the next run tries again: %s", error)
