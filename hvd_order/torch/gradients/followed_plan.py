"""Whether the job's plan fits this model, its order, and the results that trials add to it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from hvd_order.base.plan.plan_file import Confirmed, Plan
from hvd_order.engine.engine_host import EngineHost
from hvd_order.torch.parameters.entry import ParameterEntry

__all__: list[str] = []

_log = logging.getLogger("hvd_order")


def fitting(host: EngineHost, entries: Sequence[ParameterEntry]) -> Plan | None:
    """The job's plan if it fits this model; the same on every rank. Rank 0 warns if it does not
    fit.
    """
    plan = host.plan
    if plan is None:
        return None
    differences = plan.differences({entry.name: entry.size_bytes for entry in entries})
    if not differences:
        return plan
    if host.rank == 0:
        _log.warning(
            "the plan %s (of %s) is not followed: it is for another model: %s. Make one with "
            "hvd-order profile and hvd-order tune, and give DistributedOptimizer the names: "
            "named_parameters=model.named_parameters()",
            host.job.config.plan, plan.model, "; ".join(differences),
        )  # fmt: skip
    return None


def in_order(
    plan: Plan | None, unseen: Sequence[ParameterEntry], seen: Sequence[ParameterEntry]
) -> list[ParameterEntry]:
    """The entries in the order of their places in the buffers.

    Args:
        plan: a plan that fits, or None.
        unseen: entries without an observed reader; ``step()`` updates them, so they are needed
            first.
        seen: entries in the order in which they were read.
    """
    if plan is None:
        return [*unseen, *seen]
    entries = {entry.name: entry for entry in (*unseen, *seen)}
    planned = [entries[name] for name in plan.in_order(list(entries))]
    at_once = set(unseen)
    return sorted(planned, key=lambda entry: entry not in at_once)


def note(host: EngineHost, confirmed: Confirmed) -> None:
    """Rank 0 writes the choice of the trials into the plan, so the next run begins with it."""
    if host.plan is None:
        return
    host.plan = replace(host.plan, confirmed=confirmed)
    path = host.job.config.plan
    if host.rank == 0 and path is not None:
        try:
            host.plan.write(path)
        except OSError as error:
            _log.warning("the plan stays as it was, so the next run tries again: %s", error)
