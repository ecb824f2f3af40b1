"""``horovod.run``: a function in N processes, called from a script or a notebook.

Over torch's elastic agent on this host. For several hosts there are ``hvd-order run`` and torchrun.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hvd_order.base.errors import HorovodInternalError, InvalidUsage

__all__ = ["run"]


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Calls ``func(*args, **kwargs)`` in `num_proc` processes of this host.

    Args:
        func: of a module or of the script itself; nested functions and lambdas need cloudpickle.
        args, kwargs: its arguments; picklable.
        num_proc: how many processes; `np` is its old name.
        hosts: must be this host, such as ``localhost:4``.
        network_interfaces: the first is the one that Gloo uses.
        executable: the Python to start them with.
        start_timeout, ssh_port, ssh_identity_file, disable_cache, verbose, use_gloo, mpi_args:
            accepted; they say nothing that matters for processes of one host.
        use_mpi: not supported.
        min_num_proc, max_num_proc, slots, reset_limit, cooldown_range, hostfile,
            host_discovery_script, output_filename: not supported; ``hvd-order run`` has them.

    Returns:
        What `func` returned, in rank order; picklable.

    Raises:
        InvalidUsage: an argument that is not supported, or `func` cannot be pickled.
        HorovodInternalError: `func` raised in a process, or a process died.
    """
    _warn_of_old_names(np=np, min_np=min_np, max_np=max_np)
    _refuse(
        min_num_proc=min_np or min_num_proc,
        max_num_proc=max_np or max_num_proc,
        slots=slots,
        reset_limit=reset_limit,
        cooldown_range=cooldown_range,
        hostfile=hostfile,
        host_discovery_script=host_discovery_script,
        output_filename=output_filename,
        use_mpi=use_mpi or None,
    )
    count = num_proc if np is None else np
    _check_hosts(hosts, count)
    if network_interface:
        network_interfaces = network_interface.split(",")
    interface = network_interfaces[0] if network_interfaces else None
    payload = _pickled(func, tuple(args), dict(kwargs or {}))
    return _launch(payload, count, interface, executable)


def _warn_of_old_names(**given: int | None) -> None:
    for old, value in given.items():
        if value is not None:
            new = old.replace("np", "num_proc")
            message = f"{old} is deprecated, use {new} instead"
            warnings.warn(message, DeprecationWarning, stacklevel=3)  # the line that calls run()


def _refuse(**given: object) -> None:
    """Raises InvalidUsage if any of these arguments, none of which is supported, is not None."""
    refused = [name for name, value in given.items() if value is not None]
    if refused:
        raise InvalidUsage(
            f"horovod.run(): {', '.join(refused)} is not supported, it starts processes on this "
            "host only; start the script with hvd-order run or torchrun instead"
        )


def _pickled(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        import cloudpickle as pickler  # as Horovod: also sends what a notebook has defined
    except ImportError:
        import pickle as pickler
    try:
        payload: bytes = pickler.dumps((func, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InvalidUsage(
            f"horovod.run(): {func!r} with its arguments cannot be sent to other processes "
            f"({error}); move it to the top level of a module, or pip install cloudpickle"
        ) from error
    return payload


def _call(payload: bytes) -> Any:
    """What each process runs."""
    func, args, kwargs = pickle.loads(payload)
    return func(*args, **kwargs)


def _check_hosts(hosts: str | None, count: int) -> None:
    if count < 1:
        raise InvalidUsage(f"horovod.run(): num_proc is {count}; at least one process is needed")
    if not hosts:
        return
    from hvd_order.launch.hosts import is_this_host, parse_hosts

    listed = parse_hosts(hosts)
    elsewhere = [host.name for host in listed if not is_this_host(host.name)]
    if elsewhere:
        raise InvalidUsage(
            f"horovod.run() starts processes on this host only, and {elsewhere[0]} is another one; "
            "start the script with hvd-order run or torchrun on all hosts"
        )
    if sum(host.slots for host in listed) < count:
        raise InvalidUsage(f"horovod.run(): num_proc is {count}, but hosts={hosts!r} has fewer")


def _launch(payload: bytes, count: int, interface: str | None, executable: str | None) -> list[Any]:
    import multiprocessing
    import multiprocessing.spawn
    import uuid

    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(),
    )
    python = multiprocessing.spawn.get_executable()
    with _variable("GLOO_SOCKET_IFNAME", interface):
        try:
            multiprocessing.set_executable(executable or python)
            results: dict[int, Any] = elastic_launch(config, _call)(payload)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            said: Any = failure.message  # a dict where the function raised, else a sentence
            if isinstance(said, dict):
                said = said.get("extraInfo", {}).get("py_callstack", said.get("message"))
            raise HorovodInternalError(f"horovod.run(): rank {rank} failed: {said}") from error
        finally:
            multiprocessing.set_executable(python)
    return [results[rank] for rank in range(count)]


@contextlib.contextmanager
def _variable(name: str, value: str | None) -> Iterator[None]:
    """An environment variable set for a while; None leaves it as it is."""
    before = os.environ.get(name)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before
