"""Starts a command N times on this host, with torch's elastic agent.

The agent gives every process the variables that torchrun gives, ends all when one fails, and is
told apart from a server of another job by a rendezvous on a free port of the loopback interface.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvd_order.errors import InvalidUsage

__all__ = ["Host", "LaunchRequest", "local_process_count", "parse_hosts", "run"]


@dataclass(frozen=True)
class Host:
    """A host and how many processes it may get."""

    name: str
    slots: int


@dataclass(frozen=True)
class LaunchRequest:
    """What to start.

    Attributes:
        command: program and arguments; each process runs it.
        process_count: how many.
        env: variables for the processes, on top of this process's own.
        verbose: show the agent's own log as well.
    """

    command: Sequence[str]
    process_count: int
    env: Mapping[str, str] = field(default_factory=dict)
    verbose: bool = False


def parse_hosts(text: str) -> list[Host]:
    """Reads horovodrun's ``host1:2,host2:4``; no number means one process.

    Raises:
        InvalidUsage: not of that form.
    """
    hosts = []
    for part in text.split(","):
        name, colon, slots = part.strip().rpartition(":")
        if not colon:
            name, slots = slots, "1"
        if not name or not slots.isdecimal() or int(slots) < 1:
            raise InvalidUsage(f"-H {text}: expected host:slots,host:slots, got {part!r}")
        hosts.append(Host(name, int(slots)))
    return hosts


def local_process_count(
    process_count: int | None, hosts: Sequence[Host], command: Sequence[str]
) -> int:
    """How many processes to start here.

    Args:
        process_count: what the user asked for, or None.
        hosts: what the user listed; may be empty.
        command: for the advice in the message.

    Raises:
        InvalidUsage: neither is given, they contradict each other, or a host is not this one.
    """
    elsewhere = [host for host in hosts if not _is_this_host(host.name)]
    if elsewhere:
        count = process_count or sum(host.slots for host in hosts)
        text = shlex.join(command)
        listed = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        script = shlex.join(command[1:]) if command[:1] in (["python"], ["python3"]) else text
        raise InvalidUsage(
            f"hvd-order run starts processes on this host only, and {elsewhere[0].name} is another "
            "one. Over several hosts use one of these; the program stays the same:\n"
            f"  mpirun -np {count} -H {listed} -x MASTER_ADDR={hosts[0].name} {text}\n"
            f"  torchrun --nnodes {len(hosts)} --nproc-per-node {hosts[0].slots} "
            f"--rdzv-backend c10d --rdzv-endpoint {hosts[0].name}:29400 {script}   (on every host)"
        )
    slots = sum(host.slots for host in hosts)
    if process_count is None:
        if not hosts:
            raise InvalidUsage("say how many processes to start, for example: -np 2")
        return slots
    if process_count < 1:
        raise InvalidUsage(f"-np {process_count}: at least one process is needed")
    if hosts and process_count > slots:
        raise InvalidUsage(
            f"-np {process_count} asks for more processes than -H has slots, {slots}"
        )
    return process_count


def run(request: LaunchRequest) -> int:
    """Starts the processes and waits for them; their output goes to this process's.

    Returns:
        0 when all succeeded, else the exit code of the first that failed; 128 + n when it was
        ended by signal n, as a shell has it. 130 after Ctrl-C.

    Raises:
        InvalidUsage: there is no such command.
        ImportError: PyTorch is not installed.
    """
    _check_command(request.command)
    try:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch
    except ModuleNotFoundError as error:
        raise ImportError(
            "hvd-order run needs PyTorch, which is not installed; install it with: "
            "pip install torch (see https://pytorch.org for GPU builds)"
        ) from error

    if not request.verbose:
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
    threads = max(1, (os.cpu_count() or 1) // request.process_count)
    env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)), **request.env}
    with tempfile.TemporaryDirectory(prefix="hvd_order_run_") as folder, _environment(env):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=request.process_count,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, request.command[0])(*request.command[1:])
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            return _explain(rank, failure.exitcode)
        except SignalException as error:
            return 128 + int(error.sigval)
        except KeyboardInterrupt:
            return 128 + int(signal.SIGINT)
    return 0


def _explain(rank: int, code: int) -> int:
    if code < 0:
        name = signal.Signals(-code).name
        sys.stderr.write(f"hvd-order: rank {rank} was ended by {name}; all others were stopped\n")
        return 128 - code
    sys.stderr.write(
        f"hvd-order: rank {rank} failed with exit code {code}; all others were stopped\n"
    )
    return code


def _check_command(command: Sequence[str]) -> None:
    if not command:
        raise InvalidUsage("no command to run, for example: hvd-order run -np 2 python train.py")
    if shutil.which(command[0]) is None:
        hint = ""
        if command[0].endswith(".py") and Path(command[0]).exists():
            hint = f"; to run a Python script write: python {shlex.join(command)}"
        raise InvalidUsage(f"there is no command {command[0]!r}{hint}")


def _is_this_host(name: str) -> bool:
    own = socket.gethostname()
    return name in ("localhost", "127.0.0.1", "::1", own, own.split(".")[0])


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """This process's variables changed for a while; the agent copies them for its children."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
