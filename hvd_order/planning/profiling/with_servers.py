"""Profiles a script whose workers train with parameter servers: ``hvd-order profile --servers S``.

The job runs first: every rank trains, and rank 0 and the servers record the times of transfers and
of the work on them. Then rank 0 records the script's operators alone, as without servers: servers
on the same machine would take processors from what is measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from hvd_order.base.errors import InvalidUsage
from hvd_order.engine.engine_host import running_host
from hvd_order.engine.job import process
from hvd_order.launch.environment import rank_info
from hvd_order.planning.files.profile import Profile, read_profile
from hvd_order.planning.profiling.ranks import record_alone
from hvd_order.planning.run_script import Enough, run_script, too_few
from hvd_order.servers.costs import ServerCosts, ServerTimes, server_costs
from hvd_order.servers.worker.client import ParameterServers, servers_of

__all__ = ["profile_with_servers"]

# In the first two steps servers only sum; the third is the first of those that are alike.
_WARM_UP = 4


def profile_with_servers(
    script: Path, arguments: Sequence[str], runs: int, output: Path
) -> Profile | None:
    """Writes the profile of a script, with what this job's servers cost. Collective.

    Args:
        script, arguments, runs: as for :func:`hvd_order.planning.profiling.script.profile_script`.
        output: file, on rank 0's host.

    Returns:
        The profile, on rank 0.

    Raises:
        InvalidUsage: the script ended too early, or it uses no servers.
        SystemExit: the script failed.
        HorovodInternalError: servers do not come, or are lost.
    """
    costs = _measure(script, arguments, runs)
    if costs is None:
        return None
    record_alone(script, arguments, runs, output)
    profile = replace(read_profile(output), servers=costs)
    profile.write(output)
    return profile


def _measure(script: Path, arguments: Sequence[str], runs: int) -> ServerCosts | None:
    """Trains, on every rank; returns the costs on rank 0."""
    counter = _Counter(script, runs, records=rank_info(os.environ).rank == 0)
    try:
        run_script(script, arguments)
    finally:
        counter.close()
        process.shutdown()
    if not counter.records:
        return None
    if counter.costs is None:
        raise too_few(script, counter.steps, f"{_WARM_UP} + {runs}")
    return counter.costs


class _Counter:
    """Counts the steps of the first optimizer that takes one; records those after a warm-up.

    Attributes:
        records: whether this rank records; the others only train.
        steps: so far.
        costs: None before the last recorded step.
    """

    def __init__(self, script: Path, runs: int, records: bool) -> None:
        self.records = records
        self.steps = 0
        self.costs: ServerCosts | None = None
        self._script = script
        self._runs = runs
        self._ends: list[float] = []  # of the steps that are recorded, and of the one before
        self._optimizer: torch.optim.Optimizer | None = None
        self._closed = False
        # The hook stays, because hooks cannot be removed while an optimizer runs them.
        register_optimizer_step_post_hook(self._after_step)

    def close(self) -> None:
        """Stops counting."""
        self._closed = True

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._closed:
            return
        if self._optimizer is None:
            self._optimizer = optimizer
        if optimizer is not self._optimizer:
            return
        self.steps += 1
        if self.steps >= _WARM_UP:
            self._ends.append(time.monotonic())
        if self.steps == _WARM_UP and self.records:
            self._servers().record()
        if self.steps == _WARM_UP + self._runs:
            if self.records:
                self.costs = self._sum_up(self._servers().take_times())
            raise Enough

    def _servers(self) -> ParameterServers:
        host = running_host()
        servers = None if host is None else servers_of(host)
        if servers is None:
            raise InvalidUsage(
                f"{self._script} does not train with parameter servers; it must use "
                "hvd_order.torch's DistributedOptimizer, without comm='allreduce'"
            )
        return servers

    def _sum_up(self, times: Sequence[ServerTimes]) -> ServerCosts:
        job = process.current()
        steps_s = [end - begin for begin, end in pairwise(self._ends)]
        return server_costs(times, job.size, job.config.ps_mode, job.config.ps_update, steps_s)
