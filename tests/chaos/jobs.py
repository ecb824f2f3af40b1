"""The jobs of the campaign: what is drawn of one, how it is started, and what can be seen of it.

A job is real: a short training on 2 or 3 ranks, through ``hvd-order run`` or as bare ranks with
the variables that torchrun sets.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.pace import TIMEOUT_S
from helpers.processes import arguments_of, environment_of, processes
from helpers.ranks import REPOSITORY

__all__ = [
    "KINDS",
    "OTHER_PORT",
    "HostsJob",
    "Job",
    "JobPlan",
    "draw_job",
]

KINDS = ("allreduce", "servers", "elastic", "tensorflow", "hosts", "pair")
PACE_S = 0.02  # a step takes so long at least
PORT = 29500
OTHER_PORT = 29700  # of the second job of a pair
_PROGRAMS = Path(__file__).resolve().parent / "programs"


@dataclass(frozen=True)
class JobPlan:
    """What is drawn of a job.

    Attributes:
        kind: one of `KINDS`; a pair is two all-reduce jobs.
        ranks: how many.
        launcher: started by ``hvd-order run``; else bare ranks.
        servers: how many; 0: none.
        steps: of the training.
        variables: HVD_ORDER_... of all processes.
    """

    kind: str
    ranks: int
    launcher: bool
    servers: int
    steps: int
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def replicas(self) -> bool:
        return self.variables.get("HVD_ORDER_PS_REPLICAS") == "1"

    @property
    def float32(self) -> bool:
        """Updates on servers are in single precision."""
        return self.variables.get("HVD_ORDER_PS_UPDATE") == "server"

    def __str__(self) -> str:
        how = "launcher" if self.launcher else "bare"
        also = f", {self.servers} servers" if self.servers else ""
        names = " ".join(
            f"{name.removeprefix('HVD_ORDER_')}={value}" for name, value in self.variables.items()
        )
        return f"{self.kind} ({how}, {self.ranks} ranks{also}, {self.steps} steps) {names}".strip()


def draw_job(numbers: random.Random, kind: str) -> JobPlan:
    """One of this kind; its steps are for one fault."""
    ranks = numbers.choice([2, 2, 2, 3])
    launcher, servers = numbers.random() < 0.5, 0
    variables: dict[str, str] = {}
    if kind != "tensorflow":
        if numbers.random() < 0.5:
            variables["HVD_ORDER_SLICE_BYTES"] = numbers.choice(["512", "4KiB"])
        if numbers.random() < 0.25:
            variables["HVD_ORDER_AGREEMENT"] = numbers.choice(["leader", "negotiated"])
        if numbers.random() < 0.2:
            variables["HVD_ORDER_CROSS_ITERATION"] = "0"
    if kind == "elastic":
        launcher = True
    elif kind == "servers":
        servers = numbers.choice([1, 2, 2])
        if numbers.random() < 0.5:
            variables["HVD_ORDER_PS_UPDATE"] = "server"
            if servers > 1 and numbers.random() < 0.7:
                variables["HVD_ORDER_PS_REPLICAS"] = "1"
    elif kind == "tensorflow":
        ranks = 2
    elif kind in ("hosts", "pair"):
        launcher = False
        ranks = 2 if kind == "pair" else ranks
    return JobPlan(kind, ranks, launcher, servers, 50, variables)


class Job:
    """A running job.

    Attributes:
        folder: its diaries and outputs.
        temporary: folder for temporary files, of all jobs of the run.
        extra: variables that faults add before the start.
        starts: the processes that the campaign has started, by role.
    """

    def __init__(self, plan: JobPlan, folder: Path, port: int = PORT) -> None:
        """Starts nothing yet."""
        self.plan = plan
        self.folder = folder
        self.port = port
        self.temporary = folder.with_name("tmp")
        self.extra: dict[str, str] = {"TMPDIR": str(self.temporary)}
        self.starts: dict[str, subprocess.Popen[bytes]] = {}

    # ---- start ----

    def start(self) -> None:
        self.folder.mkdir()
        if self.plan.launcher:
            self._start_launcher()
        else:
            self._start_bare()

    def _program(self) -> list[str]:
        steps = [str(self.plan.steps), str(PACE_S)]
        if self.plan.kind == "tensorflow":
            return [sys.executable, str(_PROGRAMS / "train_tensorflow.py"), *steps]
        how = "float32" if self.plan.float32 else "float64"
        if self.plan.kind == "elastic":
            how = "elastic"
        return [sys.executable, str(_PROGRAMS / "train.py"), *steps, how]

    def _environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        outer = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(
                ("OMPI_", "PMI", "SLURM_", "HOROVOD_", "HVD_ORDER_", "TORCHELASTIC", "PYTEST_")
            )
            and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        }
        return {
            **outer,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")]),
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "CUDA_VISIBLE_DEVICES": "",
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "cache"),  # torch keeps it for ever
            "HVD_ORDER_TIMEOUT": str(TIMEOUT_S),
            "CHAOS_FOLDER": str(self.folder),
            **self.plan.variables,
            **self.extra,
            **extra,
        }

    def _popen(self, role: str, command: list[str], extra: Mapping[str, str]) -> None:
        with (self.folder / f"{role.replace(' ', '-')}.out").open("wb") as output:
            self.starts[role] = self._open(
                role,
                command,
                env=self._environment(extra),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=_heed_interrupts,
            )

    def _open(self, role: str, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, **options)

    def _start_launcher(self) -> None:
        options = ["-np", str(self.plan.ranks)]
        if self.plan.servers:
            options += ["--servers", str(self.plan.servers)]
        if self.plan.kind == "elastic":
            options += ["--min-np", "1"]
        run = [sys.executable, "-m", "hvd_order.tools.cli", "run", *options]
        self._popen("launcher", [*run, *self._program()], {})

    def _start_bare(self) -> None:
        size, common = self.plan.ranks, {}
        if self.plan.servers:
            common = self._start_servers()
        for rank in range(size):
            place = {
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(size),
                "GROUP_RANK": "0",
                "GROUP_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.port),
            }
            self._popen(f"rank {rank}", self._program(), {**place, **common})

    def _start_servers(self) -> dict[str, str]:
        from hvd_order.servers.access.secret import new_secret

        # As the documentation has it: the first server is the store of all.
        common = {
            "HVD_ORDER_SERVER_STORE": f"127.0.0.1:{self.port + 1}",
            "HVD_ORDER_SERVERS": str(self.plan.servers),
            "HVD_ORDER_SECRET": new_secret().hex(),
            "HVD_ORDER_COMM": "ps",
        }
        serve = [
            sys.executable,
            "-m",
            "hvd_order.tools.cli",
            "serve",
            "--workers",
            str(self.plan.ranks),
        ]
        for number in range(self.plan.servers):
            listen = ["--listen"] if number == 0 else []
            self._popen(f"server {number}", [*serve, *listen], common)
        return common

    # ---- what can be seen ----

    def living(self) -> dict[int, str]:
        """The processes of the job: id to role; "" where it has none."""
        found = {}
        for pid in processes():
            values = environment_of(pid)
            if values.get("CHAOS_FOLDER") == str(self.folder):
                found[pid] = _role(pid, values)
        return found

    def pid_of(self, role: str) -> int | None:
        """The process with this role now; None where there is none."""
        started = self.starts.get(role)
        if started is not None:
            return started.pid if started.poll() is None else None
        kind, _, number = role.partition(" ")
        living = sorted(self.living().items())
        if kind == "server":  # which of them has this number is known to them alone
            servers = [pid for pid, found in living if found == "server"]
            return servers[int(number)] if int(number) < len(servers) else None
        return next((pid for pid, found in living if found == role), None)

    def diary(self, rank: int) -> list[str]:
        """What a rank has written down so far."""
        path = self.folder / f"progress-{rank}"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def step(self, rank: int) -> int:
        """The newest step of a rank; 0 before the first."""
        steps = [int(line.split()[1]) for line in self.diary(rank)[-3:] if line.startswith("step")]
        return steps[-1] if steps else 0

    def has_new_commit(self, restarts: int) -> bool:
        """Whether an elastic job has committed, and gone on, since it started again so often."""
        entries = self.diary(0)
        starts = [place for place, entry in enumerate(entries) if entry.startswith("begins")]
        if restarts == 0 or len(starts) <= restarts:
            return restarts == 0
        since = entries[starts[-1] :]
        after = since[since.index("commit") :] if "commit" in since else []
        return any(entry.startswith("step") for entry in after)

    def is_over(self) -> bool:
        """Whether all that the campaign has started has ended."""
        return all(process.poll() is not None for process in self.starts.values())

    def codes(self) -> dict[str, int | None]:
        """Exit code of each process that the campaign has started; None: it runs."""
        return {role: process.poll() for role, process in self.starts.items()}

    def output(self) -> str:
        """All that the job has said."""
        parts = []
        for path in sorted(self.folder.glob("*.out")):
            parts.append(f"---- {path.stem}\n{path.read_text(errors='replace')}")
        return "\n".join(parts)

    def output_sizes(self) -> dict[Path, int]:
        """Of each file of it: a mark for `output_since`."""
        return {path: path.stat().st_size for path in self.folder.glob("*.out")}

    def output_since(self, sizes: Mapping[Path, int]) -> str:
        """What has been said since then."""
        parts = []
        for path in sorted(self.folder.glob("*.out")):
            parts.append(path.read_bytes()[sizes.get(path, 0) :].decode(errors="replace"))
        return "\n".join(parts)

    # ---- end ----

    def end(self) -> None:
        """Ends what is left; with stacks where that is possible."""
        for how, patience_s in ((signal.SIGABRT, 2.0), (signal.SIGKILL, 5.0)):
            for pid in self.living():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, how)
                    os.kill(pid, signal.SIGCONT)
            for process in self.starts.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(patience_s)


class HostsJob(Job):
    """A rank on each of some emulated hosts."""

    def __init__(self, plan: JobPlan, folder: Path) -> None:
        super().__init__(plan, folder)
        sys.path.insert(0, str(REPOSITORY))
        from benchmarks.hosts import EmulatedHosts

        self.hosts = EmulatedHosts(plan.ranks, rate_mbit=1000)

    def _open(self, role: str, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        host = int(role.split()[1])
        options["env"].update(self.hosts.rank_environment(host))
        return self.hosts.popen(host, command, cwd=REPOSITORY, **options)


def _heed_interrupts() -> None:
    # What runs in the background ignores Ctrl-C, and so would its children.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _role(pid: int, values: Mapping[str, str]) -> str:
    words = arguments_of(pid)
    if "hvd_order.servers.process.process" in words:
        return "server"
    if any(Path(word).name.startswith("train") for word in words[1:3]) and "RANK" in values:
        return f"rank {values['RANK']}"
    if "run" in words and "hvd_order.tools.cli" in words:
        return "launcher"
    return ""
