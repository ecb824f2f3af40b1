"""`hvd_order.run`: calls a function in N processes, on this host or several."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hvd_order
from hvd_order.base.errors import HorovodInternalError, InvalidUsage
from hvd_order.launch.hosts import parse_hosts, read_hostfile
from hvd_order.launch.rank_function import FunctionCall
from hvd_order.launch.request import LaunchRequest, OutputRules
from hvd_order.launch.run import run as launch

__all__ = ["run"]


def run(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int | None = None,
    hosts: str | None = None,
    hostfile: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    network_interfaces: Sequence[str] = (),
    ssh_options: Sequence[str] = (),
    start_timeout: float = 30.0,
    output_filename: str | os.PathLike[str] | None = None,
    executable: str | None = None,
    verbose: bool = False,
) -> list[Any]:
    """Calls ``function(*args, **kwargs)`` in N processes, ranks 0 to N - 1 of a job.

    With cloudpickle the function may be defined in a notebook or in the script that calls `run`.
    Processes start as under ``hvd-order run``, remote ones by ssh, and print here.

    Args:
        function: calls ``hvd.init()`` itself.
        args, kwargs: its arguments; they are pickled.
        np: number of processes; by default as many as the hosts have slots.
        hosts: for example ``"a:2,b:4"``; by default this host.
        hostfile: path of a file with lines ``a slots=2``, in place of `hosts`.
        env: variables for the processes in addition to this process's own.
        network_interfaces: to use on every host.
        ssh_options: of ``ssh``, before the host; for example ``["-p", "2222"]``.
        start_timeout: seconds for all hosts to answer.
        output_filename: folder for each rank's output, on its host.
        executable: Python for the processes; by default the one that runs this.
        verbose: show the launcher's log as well.

    Returns:
        What the function returned, in rank order.

    Raises:
        HorovodInternalError: the function raised on a rank, which the text names with its host and
            traceback (the exception itself is the cause, if it can be pickled), or a rank died.
        InvalidUsage: a wrong argument, or one that cannot be pickled.
        KeyboardInterrupt: Ctrl-C; the processes have ended.
    """
    places = read_hostfile(Path(hostfile)) if hostfile else parse_hosts(hosts) if hosts else []
    if np is None and not places:
        raise InvalidUsage("say how many processes to start, for example: np=2")
    root = str(Path(hvd_order.__file__).parents[1])
    boot = (
        f"import sys; sys.path.append({root!r}); "
        "from hvd_order.launch.rank_function import main; main()"
    )
    call = FunctionCall(FunctionCall.pickled(function, args, kwargs or {}))
    request = LaunchRequest(
        [executable or sys.executable, "-c", boot],
        sum(host.slots for host in places) if np is None else np,
        env=env or {},
        verbose=verbose,
        hosts=places,
        interfaces=network_interfaces,
        ssh_options=ssh_options,
        start_timeout_s=start_timeout,
        output=OutputRules(folder=Path(output_filename) if output_filename else None),
        call=call,
    )
    code = launch(request)
    values = [outcome.value for _, (_, outcome) in sorted(call.outcomes.items())]
    if code == 0 and len(values) == request.process_count:
        return [pickle.loads(value) for value in values if value is not None]
    if code == 130:
        raise KeyboardInterrupt
    raise _failure(call, code)


def _failure(call: FunctionCall, code: int) -> HorovodInternalError:
    """The error of a failed call: of the rank that failed by itself, if there is one."""
    failed = [
        (outcome.follows, rank) for rank, (_, outcome) in call.outcomes.items() if outcome.said
    ]
    if not failed:
        why = "; ".join(call.messages) or f"a rank left without a result (exit code {code})"
        return HorovodInternalError(f"run(): {why}")
    _, rank = min(failed)
    host, outcome = call.outcomes[rank]
    error = HorovodInternalError(f"rank {rank} on {host} raised {outcome.said}\n\n{outcome.trace}")
    with contextlib.suppress(Exception):  # its class may not be importable here
        error.__cause__ = pickle.loads(outcome.error or b"")
    return error
