"""``horovod.run``: `hvd_order.run` with Horovod's arguments."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import hvd_order
from hvd_order.base.errors import InvalidUsage

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
    """Calls ``func(*args, **kwargs)`` in `num_proc` processes of this host or of `hosts`.

    Args:
        func: of a module; with cloudpickle also of the script or notebook itself.
        args, kwargs: its arguments; picklable.
        num_proc: how many processes; `np` is its old name.
        hosts, hostfile, start_timeout, ssh_port, ssh_identity_file, output_filename,
            network_interfaces, executable, verbose: see `hvd_order.run`.
        network_interface: the old name, with commas.
        disable_cache, use_gloo, mpi_args: accepted, without an effect.
        use_mpi: not supported.
        min_num_proc, max_num_proc, slots, reset_limit, cooldown_range, host_discovery_script: not
            supported; ``hvd-order run`` has them.

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
        host_discovery_script=host_discovery_script,
        use_mpi=use_mpi or None,
    )
    if network_interface:
        network_interfaces = network_interface.split(",")
    ssh_options = ["-p", str(ssh_port)] if ssh_port is not None else []
    ssh_options += ["-i", ssh_identity_file] if ssh_identity_file is not None else []
    return hvd_order.run(
        func,
        args,
        kwargs,
        np=num_proc if np is None else np,
        hosts=hosts,
        hostfile=hostfile,
        network_interfaces=network_interfaces or (),
        ssh_options=ssh_options,
        start_timeout=30.0 if start_timeout is None else start_timeout,
        output_filename=output_filename,
        executable=executable,
        verbose=bool(verbose),
    )


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
            f"horovod.run(): {', '.join(refused)} is not supported; start the script "
            "with hvd-order run instead"
        )
