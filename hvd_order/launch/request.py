"""Launch requests: plain data between command line and launcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvd_order.base.errors import InvalidUsage
from hvd_order.launch.hosts import Host
from hvd_order.launch.rank_function import FunctionCall

__all__ = ["ElasticRules", "LaunchRequest", "OutputRules"]


@dataclass(frozen=True)
class ElasticRules:
    """Rules of an elastic job.

    Attributes:
        min_count: least number of processes; with fewer the job waits for hosts.
        max_count: largest number of processes; None: as many as slots.
        discovery_script: script that prints the hosts, run every second; None: fixed hosts.
        default_slots: slots of a discovered host without a number.
        reset_limit: how often the job may form anew; None: no limit while it progresses.
        timeout_s: longest wait for enough hosts.
        cooldown_s: seconds for which a failed host is excluded; None: forever.
        formation_file: file for the hosts that the job uses; None: none is written.
    """

    min_count: int
    max_count: int | None = None
    discovery_script: str | None = None
    default_slots: int = 1
    reset_limit: int | None = None
    timeout_s: float = 600.0
    cooldown_s: float | None = None
    formation_file: Path | None = None


@dataclass(frozen=True)
class OutputRules:
    """How the ranks' output is written.

    Attributes:
        prefix: whether each line begins with its rank.
        timestamps: whether each line begins with the time.
        folder: where each rank's output is written as well; None: nowhere.
    """

    prefix: bool = True
    timestamps: bool = False
    folder: Path | None = None


@dataclass(frozen=True)
class LaunchRequest:
    """A command to start, and its settings.

    Attributes:
        command: program and arguments; each process runs it.
        process_count: number of processes; for an elastic job, the number needed to begin.
        env: variables for the processes in addition to this process's own.
        verbose: show the agents' own log as well.
        hosts: hosts in rank order; empty: this host.
        elastic: rules of an elastic job; None: the job ends with its first failure.
        interfaces: network interfaces to use; empty: those that the host names resolve to.
        ssh_options: options of ``ssh``, before the host.
        start_timeout_s: longest wait for the hosts to answer.
        output: how the ranks' output is written.
        servers: number of parameter servers, on the same hosts.
        min_servers: least number of servers that the job may keep; None: see `max_servers`.
        max_servers: largest number of servers. If both are None, the number is fixed.
        oversubscribe: skip the check of the number of processes of a host.
        call: for the ranks, when `command` runs a function; see `hvd_order.launch.function`.
    """

    command: Sequence[str]
    process_count: int
    env: Mapping[str, str] = field(default_factory=dict)
    verbose: bool = False
    hosts: Sequence[Host] = ()
    elastic: ElasticRules | None = None
    interfaces: Sequence[str] = ()
    ssh_options: Sequence[str] = ()
    start_timeout_s: float = 30.0
    output: OutputRules = OutputRules()
    servers: int = 0
    min_servers: int | None = None
    max_servers: int | None = None
    oversubscribe: bool = False
    call: FunctionCall | None = None

    def __post_init__(self) -> None:
        rules = self.elastic
        slots = sum(host.slots for host in self.hosts)
        if self.process_count < 1:
            raise InvalidUsage(f"-np {self.process_count}: at least one process is needed")
        if self.servers < 0:
            raise InvalidUsage(f"--servers {self.servers}: expected a number from 0 on")
        self._check_limits_of_servers()
        _check_seconds("--start-timeout", self.start_timeout_s)
        if rules is None:
            if self.hosts and self.process_count > slots:
                raise InvalidUsage(
                    f"-np {self.process_count} asks for more processes than the hosts have slots, "
                    f"{slots}; name more hosts, or more slots on them (-H host:slots)"
                )
            return
        _check_seconds("--elastic-timeout", rules.timeout_s)
        if rules.cooldown_s is not None:
            _check_seconds("--blacklist-cooldown-range", rules.cooldown_s)
        if rules.default_slots < 1:
            raise InvalidUsage(f"--slots-per-host {rules.default_slots}: at least one is needed")
        if not 1 <= rules.min_count <= self.process_count:
            raise InvalidUsage(
                f"--min-np {rules.min_count} must be between 1 and -np {self.process_count}"
            )
        if rules.max_count is not None and rules.max_count < self.process_count:
            raise InvalidUsage(f"--max-np {rules.max_count} is less than -np {self.process_count}")
        if rules.discovery_script is None and self.hosts and self.process_count > slots:
            raise InvalidUsage(
                f"-np {self.process_count} asks for more processes than the hosts have slots, "
                f"{slots}, and without --host-discovery-script no host is ever added"
            )

    def _check_limits_of_servers(self) -> None:
        for option, limit in (
            ("--min-servers", self.min_servers),
            ("--max-servers", self.max_servers),
        ):
            if limit is not None and self.servers == 0:
                raise InvalidUsage(f"{option} {limit} needs servers to begin with: --servers N")
        if self.min_servers is not None and not 1 <= self.min_servers <= self.servers:
            raise InvalidUsage(
                f"--min-servers {self.min_servers} must be between 1 and --servers {self.servers}"
            )
        if self.max_servers is not None and self.max_servers < self.servers:
            raise InvalidUsage(
                f"--max-servers {self.max_servers} is less than --servers {self.servers}"
            )


def _check_seconds(option: str, seconds: float) -> None:
    if not seconds > 0:  # nor NaN
        raise InvalidUsage(f"{option} {seconds:g}: expected a positive number of seconds")
