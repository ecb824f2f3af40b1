"""``horovod.common.util``: checks that libraries make before they use Horovod."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable
from typing import Any, TypeVar

__all__ = [
    "ccl_built",
    "check_extension",
    "ddl_built",
    "extension_available",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "split_list",
]

Item = TypeVar("Item")


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Checks that the extension for a framework, such as ``"horovod.torch"``, can be used.

    Args:
        ext_name: the framework's module.
        ext_env_var, pkg_path, args: of Horovod's own build; they do not matter here.

    Raises:
        ImportError: the extension cannot be used; the message gives the reason.
    """
    importlib.import_module(ext_name.replace("horovod", "hvd_order.compat.horovod", 1))


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether hvd_order can be used with a framework: ``"torch"``, ``"tensorflow"``, ..."""
    try:
        check_extension(f"horovod.{ext_base_name}", "", "")
    except ImportError as error:
        if verbose:
            print(error)
        return False
    return True


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether a framework sees a GPU."""
    if not extension_available(ext_base_name, verbose):
        return False
    import torch

    return torch.cuda.is_available()


def mpi_built(verbose: bool = False) -> bool:
    """Whether torch.distributed has MPI."""
    return bool(_ask("mpi_built", verbose))


def gloo_built(verbose: bool = False) -> bool:
    """Whether torch.distributed has Gloo."""
    return bool(_ask("gloo_built", verbose))


def nccl_built(verbose: bool = False) -> int:
    """NCCL's version as one number, 0 where torch.distributed does not have it."""
    return int(_ask("nccl_built", verbose))


def ddl_built(verbose: bool = False) -> bool:
    """False: IBM's DDL is not used."""
    return bool(_ask("ddl_built", verbose))


def ccl_built(verbose: bool = False) -> bool:
    """False: oneCCL is not used."""
    return bool(_ask("ccl_built", verbose))


def _ask(name: str, verbose: bool) -> Any:
    """Result of hvd_order.torch; False if it cannot be used."""
    if not extension_available("torch", verbose):
        return False
    return getattr(importlib.import_module("hvd_order.torch"), name)()


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether `num_rank` is a power of two, as Adasum requires."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(l: list[Item], n: int) -> list[list[Item]]:  # noqa: E741  (Horovod's name)
    """Cuts a list into `n` parts whose lengths differ by one at most, the longer ones first."""
    short, longer = divmod(len(l), n)
    starts = [part * short + min(part, longer) for part in range(n + 1)]
    return [l[start:end] for start, end in itertools.pairwise(starts)]


def is_iterable(x: Any) -> bool:
    """Whether ``iter(x)`` works."""
    return isinstance(x, Iterable) or hasattr(x, "__getitem__")
