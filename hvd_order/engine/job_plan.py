"""The plan file of a job: rank 0 reads it and sends it to the other ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from hvd_order.base.errors import InvalidUsage
from hvd_order.base.plan.plan_file import Plan, read_plan
from hvd_order.engine.job import group_collectives
from hvd_order.engine.job.job import Job

__all__: list[str] = []


def read(job: Job, group: dist.ProcessGroup) -> Plan | None:
    """Reads the plan that rank 0's ``HVD_ORDER_PLAN`` names; None if it names none. Collective.

    Only rank 0 needs the file, and only its variable counts.

    Args:
        job: the current job.
        group: carries objects, of all ranks.

    Raises:
        InvalidUsage: on every rank, if the file is missing or is not a plan.
    """
    told: Any = None
    path = job.config.plan
    if job.rank == 0 and path is not None:
        try:
            told = read_plan(path)
        except FileNotFoundError:
            told = (
                f"HVD_ORDER_PLAN names {path}, and there is no such file on rank 0's host; "
                "hvd-order tune writes one"
            )
        except (InvalidUsage, OSError, UnicodeDecodeError) as error:
            told = f"HVD_ORDER_PLAN: {error}"
    told = group_collectives.share_object(told, 0, group)
    if isinstance(told, str):
        raise InvalidUsage(told)
    plan: Plan | None = told
    return plan
