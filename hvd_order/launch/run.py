"""Starts a command in N processes on this host, several hosts, or a changing set of hosts.

Every host has one elastic agent of torch. The agent sets torchrun's variables for each process, and
ends all processes when one fails. For one host and a fixed number of processes the agent is this
process; otherwise each host has a separate agent process (driver.py).
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hvd_order.base.config import Config
from hvd_order.base.errors import InvalidUsage
from hvd_order.launch.hosts import (
    check_room,
    interface_address,
    interface_variables,
    is_this_host,
    share,
)
from hvd_order.launch.jobs.driver import Driver, explain
from hvd_order.launch.jobs.formations import Formation, OnlyFormation, Stopped
from hvd_order.launch.request import LaunchRequest
from hvd_order.launch.services import services_of

__all__ = ["LaunchRequest", "run"]

_HERE = "127.0.0.1"


def run(request: LaunchRequest) -> int:
    """Starts the processes and waits for them; this process writes their output, line by line.

    Returns:
        0 if all succeeded, else the exit code of the first failed process; 128 + n, as in a shell,
        if signal n ended it. 130 after Ctrl-C.

    Raises:
        InvalidUsage: the command does not exist, a variable has a wrong value, or a host list or
            script is wrong.
        ImportError: PyTorch is not installed.
    """
    _check_command(request.command)
    _check_variables(request)
    if not request.oversubscribe:
        check_room(_count_here(request))  # other hosts check themselves
    if _is_only_here(request):
        request = replace(request, env={**_loopback_variables(request), **request.env})
    try:
        with services_of(request) as variables:
            return _run_workers(replace(request, env={**request.env, **variables}))
    except Stopped as stop:
        return 128 + stop.signal
    except KeyboardInterrupt:
        return 128 + int(signal.SIGINT)


def _count_here(request: LaunchRequest) -> int:
    if not request.hosts:
        scripted = request.elastic is not None and request.elastic.discovery_script is not None
        return 0 if scripted else request.process_count
    dealt = share(request.hosts, request.process_count)
    return sum(host.slots for host in dealt if is_this_host(host.name))


def _is_only_here(request: LaunchRequest) -> bool:
    """Whether the job has only this host and cannot get others."""
    may_grow = request.elastic is not None and request.elastic.discovery_script is not None
    return not may_grow and all(is_this_host(host.name) for host in request.hosts)


def _loopback_variables(request: LaunchRequest) -> dict[str, str]:
    """Variables that keep the communication libraries from listening to other hosts."""
    if request.interfaces or sys.platform != "linux":
        return {}
    return {
        name: value for name, value in interface_variables(["lo"]).items() if name not in os.environ
    }


def _run_workers(request: LaunchRequest) -> int:
    hosts = share(request.hosts, request.process_count)
    here = len(hosts) <= 1 and all(is_this_host(host.name) for host in hosts)
    if here and request.elastic is None and request.call is None:
        return _run_here(request)
    driver = Driver(request)
    code = driver.run()
    if driver.stopped_by is not None:
        raise Stopped(driver.stopped_by)
    return code


def _run_here(request: LaunchRequest) -> int:
    try:
        from hvd_order.launch.jobs.torch_agent import run_workers, serve_store
    except ModuleNotFoundError as error:
        raise ImportError(
            "hvd-order run needs PyTorch, which is not installed; install it with: "
            "pip install torch (see https://pytorch.org for GPU builds)"
        ) from error

    for name in request.interfaces:
        interface_address(name)  # raises with an explanation
    changes = {**request.env, **interface_variables(request.interfaces), **_heeded_signals()}
    with _environment(changes):
        store, count = serve_store(_HERE), request.process_count
        source = OnlyFormation(Formation(1, 0, 1, 0, count, count, _HERE, store.port))
        failure = run_workers(
            request.command,
            source,
            count,
            restart=False,
            output=request.output,
            verbose=request.verbose,
        )
    if failure is None:
        return 0
    sys.stderr.write(f"hvd-order: {explain(failure)}; all others were stopped\n")
    return failure.code if failure.code > 0 else 128 - failure.code


def _heeded_signals() -> dict[str, str]:
    """Makes torch's agent ignore the signals that this process ignores, for example by nohup."""
    variable = "TORCHELASTIC_SIGNALS_TO_HANDLE"
    usual = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    heeded = [number.name for number in usual if signal.getsignal(number) != signal.SIG_IGN]
    if variable in os.environ or len(heeded) == len(usual):
        return {}
    return {variable: ",".join(heeded)}


def _check_command(command: Sequence[str]) -> None:
    if not command:
        raise InvalidUsage("no command to run, for example: hvd-order run -np 2 python train.py")
    if shutil.which(command[0]) is None:
        hint = "; correct it, install it, or write its whole path"
        if command[0].endswith(".py") and Path(command[0]).exists():
            hint = f"; to run a Python script write: python {shlex.join(command)}"
        raise InvalidUsage(f"there is no command {command[0]!r}{hint}")


def _check_variables(request: LaunchRequest) -> None:
    """Finds wrong variables before anything is started; each rank would find them much later."""
    environ = {**os.environ, **request.env}
    if request.servers:
        environ = {"HVD_ORDER_COMM": "ps", **environ, "HVD_ORDER_SERVERS": str(request.servers)}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        Config.from_environment(environ)
    for each in found:
        sys.stderr.write(f"hvd-order: {each.message}\n")


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Changes this process's variables in a context; the agent copies them for its children."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
