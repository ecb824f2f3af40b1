"""Faults of the network: connections reset, links slow or cut, and strangers who use it."""

from __future__ import annotations

import random
import re
import subprocess
import time

from chaos.faults import strangers
from chaos.faults.fault import EITHER, ENDS, GOES_ON, RUNNING, Fault, named
from chaos.jobs import HostsJob, Job, JobPlan
from chaos.moments import PHASES, Moment, draw_moment
from helpers.processes import environment_of

__all__ = ["Cut", "Flap", "Reset", "Slow", "Stranger"]


class Reset(Fault):
    """A TCP connection between two processes of the job is reset, as a firewall does it."""

    name = "reset"

    def __init__(self, moment: Moment, place: float, plan: JobPlan) -> None:
        super().__init__(moment)
        self.place = place
        if plan.kind == "elastic":
            self.must = GOES_ON
            self.restarts = True

    @staticmethod
    def fits(plan: JobPlan) -> bool:
        return plan.kind != "hosts"

    @classmethod
    def draw(cls, numbers: random.Random, plan: JobPlan, earliest_step: int) -> Fault:
        moment = draw_moment(numbers, plan.ranks, ("init", *RUNNING), earliest_step)
        return cls(moment, round(numbers.random(), 6), plan)

    def strike(self, job: Job) -> bool:
        connections = self._connections(job)
        if not connections:
            return False
        (port, peer_port), roles = connections[int(self.place * len(connections))]
        self.culprits = [named(role) for role in roles if role != "launcher"]
        ports = ["sport", "=", f":{port}", "and", "dport", "=", f":{peer_port}"]
        subprocess.run(["ss", "-K", "-tn", *ports], capture_output=True, check=True)
        return True

    @staticmethod
    def _connections(job: Job) -> list[tuple[tuple[int, int], tuple[str, str]]]:
        """Ports and roles of those that are open."""
        listing = subprocess.run(
            ["ss", "-tnpH", "state", "established"], capture_output=True, text=True, check=True
        )
        owners: dict[tuple[int, int], int] = {}
        for line in listing.stdout.splitlines():
            found = re.search(r":(\d+)\s+\S+:(\d+)\s.*pid=(\d+)", line)
            if found is not None:
                owners[int(found[1]), int(found[2])] = int(found[3])
        roles = job.living()
        servers = sorted(pid for pid, role in roles.items() if role == "server")
        names = {pid: f"server {servers.index(pid)}" for pid in servers}
        for role, process in job.starts.items():
            names[process.pid] = role
        pairs = []
        for ports, pid in sorted(owners.items()):
            other = owners.get(ports[::-1])
            both = [names.get(each or 0, roles.get(each or 0, "")) for each in (pid, other)]
            if other != pid and all(both):
                pairs.append((ports, (both[0], both[1])))
        # By roles, not by ports, which are others in each run.
        return sorted(pairs, key=lambda pair: pair[1])


class Slow(Fault):
    """The network is slow for a while: the loopback interface, or the link of a host."""

    name = "slow"
    lethal = False

    def __init__(self, moment: Moment, host: int, rate_mbit: float, length_s: float) -> None:
        super().__init__(moment)
        self.host, self.rate_mbit, self.length_s = host, rate_mbit, length_s
        self.must = GOES_ON

    @classmethod
    def draw(cls, numbers: random.Random, plan: JobPlan, earliest_step: int) -> Fault:
        moment = draw_moment(numbers, plan.ranks, ("init", *RUNNING), earliest_step)
        rate = numbers.choice([1.0, 5.0, 20.0])
        return cls(moment, numbers.randrange(plan.ranks), rate, round(numbers.uniform(0.1, 1.5), 2))

    def strike(self, job: Job) -> bool:
        if isinstance(job, HostsJob):
            job.hosts.set_rate(self.host, self.rate_mbit)
            time.sleep(self.length_s)
            job.hosts.set_rate(self.host, 1000)
            return True
        tc = ["tc", "qdisc"]
        shape = ["tbf", "rate", f"{self.rate_mbit:g}mbit", "burst", "128k", "latency", "200ms"]
        subprocess.run([*tc, "add", "dev", "lo", "root", *shape], check=True)
        time.sleep(self.length_s)
        subprocess.run([*tc, "del", "dev", "lo", "root"], check=True)
        return True

    def __str__(self) -> str:
        return f"{self.name}: {self.rate_mbit:g} Mbit/s for {self.length_s:g} s at {self.moment}"


class Cut(Fault):
    """The cable of a host is pulled."""

    name = "cut"

    def __init__(self, moment: Moment, host: int) -> None:
        super().__init__(moment)
        self.host = host
        self.must = ENDS if moment.phase != "shutdown" else EITHER
        self.culprits = [rf"\branks? \[?(?:\d+, )*{host}\b", rf"\bhost{host}\b"]
        self.victims = {f"rank {host}"}

    @staticmethod
    def fits(plan: JobPlan) -> bool:
        return plan.kind == "hosts"

    @classmethod
    def draw(cls, numbers: random.Random, plan: JobPlan, earliest_step: int) -> Fault:
        moment = draw_moment(numbers, plan.ranks, ("init", *RUNNING), earliest_step)
        return cls(moment, numbers.randrange(plan.ranks))

    def strike(self, job: Job) -> bool:
        assert isinstance(job, HostsJob)
        if all("trained" in job.diary(rank) for rank in range(job.plan.ranks)):
            return False
        job.hosts.cut(self.host)
        return True

    def __str__(self) -> str:
        return f"{self.name} off host {self.host} at {self.moment}"


class Flap(Cut):
    """The cable is pulled, and plugged in again within the timeout."""

    name = "flap"
    lethal = False

    def __init__(self, moment: Moment, host: int, length_s: float) -> None:
        super().__init__(moment, host)
        self.length_s = length_s
        self.must = GOES_ON
        self.culprits, self.victims = [], set()

    @classmethod
    def draw(cls, numbers: random.Random, plan: JobPlan, earliest_step: int) -> Fault:
        moment = draw_moment(numbers, plan.ranks, RUNNING, earliest_step)
        return cls(moment, numbers.randrange(plan.ranks), round(numbers.uniform(0.05, 2), 2))

    def strike(self, job: Job) -> bool:
        if not super().strike(job):
            return False
        time.sleep(self.length_s)
        assert isinstance(job, HostsJob)
        job.hosts.heal(self.host)
        return True

    def __str__(self) -> str:
        return f"{self.name} of host {self.host} for {self.length_s:g} s at {self.moment}"


class Stranger(Fault):
    """Somebody talks nonsense to all ports, keeps connections open, and has a wrong secret."""

    name = "stranger"
    lethal = False

    def __init__(self, moment: Moment, seed: int, plan: JobPlan) -> None:
        super().__init__(moment)
        self.seed = seed
        self.with_secret = plan.servers > 0 and seed % 2 == 0
        if moment.phase in PHASES[2:]:
            self.must = GOES_ON
        else:
            self.must = EITHER  # who comes to a door before the peer does, may have its place
        self._visit: strangers.Visit | None = None
        self._impostor: strangers.Impostor | None = None

    @staticmethod
    def fits(plan: JobPlan) -> bool:
        return plan.kind != "hosts"

    @classmethod
    def draw(cls, numbers: random.Random, plan: JobPlan, earliest_step: int) -> Fault:
        moment = draw_moment(numbers, plan.ranks, ("init", *RUNNING), earliest_step)
        return cls(moment, numbers.randrange(2**31), plan)

    def prepare(self, job: Job) -> None:
        self._impostor = strangers.Impostor() if self.with_secret else None

    def strike(self, job: Job) -> bool:
        if self._impostor is not None:
            store = self._store_of(job)
            if store is not None:
                self._impostor.begin(store)
        self._visit = strangers.Visit(self.seed)
        return self._visit.ports > 0

    @staticmethod
    def _store_of(job: Job) -> str | None:
        for pid, role in job.living().items():
            if role.startswith(("rank", "server")):
                return environment_of(pid).get("HVD_ORDER_SERVER_STORE")
        return None

    def relieve(self, job: Job) -> None:
        if self._visit is not None:
            self._visit.end()
        if self._impostor is not None and self._impostor.end() == "admitted":
            self.notes.append("stranger admitted: a handshake with a wrong secret succeeded")
