"""Import finder that resolves ``horovod`` and everything below it to hvd_order.

A module is the same object under both names, so nothing exists twice. Names that hvd_order does not
have raise: falling through to an installed Horovod would put two communication libraries into one
job, each with half of the calls.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import Distribution, DistributionFinder

__all__ = ["MODULES", "install", "is_installed", "uninstall"]

_HERE = "hvd_order.compat.horovod"

MODULES = {
    "horovod": _HERE,
    "horovod.common": f"{_HERE}.common",
    "horovod.common.elastic": "hvd_order.launch.elastic",
    "horovod.common.exceptions": f"{_HERE}.common.exceptions",
    "horovod.common.process_sets": f"{_HERE}.common.process_sets",
    "horovod.common.util": f"{_HERE}.common.util",
    "horovod.keras": "hvd_order.keras",
    "horovod.keras.callbacks": "hvd_order.keras.callbacks",
    "horovod.keras.elastic": "hvd_order.keras.elastic",
    "horovod.ray": "hvd_order.ray",
    "horovod.runner": f"{_HERE}.runner",
    "horovod.tensorflow": "hvd_order.tensorflow",
    "horovod.tensorflow.compression": "hvd_order.tensorflow.ops.compression",
    "horovod.tensorflow.elastic": "hvd_order.tensorflow.elastic",
    "horovod.tensorflow.functions": "hvd_order.tensorflow.ops.functions",
    "horovod.tensorflow.keras": "hvd_order.tensorflow.keras",
    "horovod.tensorflow.keras.callbacks": "hvd_order.tensorflow.keras.callbacks",
    "horovod.tensorflow.keras.elastic": "hvd_order.tensorflow.keras.elastic",
    "horovod.tensorflow.mpi_ops": "hvd_order.tensorflow.mpi_ops",
    "horovod.torch": f"{_HERE}.torch",
    "horovod.torch.compression": "hvd_order.torch.collectives.compression",
    "horovod.torch.elastic": "hvd_order.torch.elastic",
    "horovod.torch.elastic.sampler": "hvd_order.torch.elastic.sampler",
    "horovod.torch.elastic.state": "hvd_order.torch.elastic.state",
    "horovod.torch.functions": "hvd_order.torch.collectives.functions",
    "horovod.torch.mpi_ops": f"{_HERE}.torch.mpi_ops",
    "horovod.torch.optimizer": "hvd_order.torch.optimizer",
    "horovod.torch.sync_batch_norm": "hvd_order.torch.collectives.sync_batch_norm",
}
"""Horovod's modules that programs import, and their replacements."""

_ADVICE = {
    "mxnet": "hvd_order has no MXNet interface",
    "spark": (
        "start ranks in Spark's tasks with pyspark.ml.torch.distributor.TorchDistributor, whose "
        "variables hvd.init() reads, or the job with hvd-order run or torchrun"
    ),
}


class _Alias(Loader):
    """Loads a module that exists under another name."""

    def __init__(self, target: str) -> None:
        self._target = target

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """None: Python makes an empty module, which `exec_module` replaces."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Imports the target and puts it into ``sys.modules`` under the alias.

        Python takes from there what ``import`` returns. The target keeps its own ``__spec__``.
        """
        sys.modules[module.__name__] = importlib.import_module(self._target)


class _HorovodFinder(MetaPathFinder):
    """Finds all modules below ``horovod``, and no other."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module that stands for `fullname`; None for names that are not Horovod's.

        Raises:
            ModuleNotFoundError: hvd_order has no such module of Horovod.
        """
        # ``from horovod import x`` asks below the module's own name, hence both.
        name = "horovod" + fullname.removeprefix(_HERE) if _below(fullname, _HERE) else fullname
        if not _below(name, "horovod"):
            return None
        ours = MODULES.get(name)
        if ours is None and name != fullname and PathFinder.find_spec(fullname, path):
            return None  # this file's neighbours, which no program asks for
        if ours is None or not _exists(ours):
            raise _missing(name)
        if ours == fullname:
            return None  # the ordinary finders load it
        is_package = any(_below(other, name) for other in MODULES if other != name)
        return ModuleSpec(fullname, _Alias(ours), origin="hvd_order", is_package=is_package)

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        """Tells ``importlib.metadata.version("horovod")`` the version of the interface.

        Only a request for Horovod by name gets it; lists of installed packages stay correct.
        """
        if context is None or (context.name or "").lower() != "horovod":
            return ()
        from hvd_order.compat.horovod.distribution import AliasDistribution

        return (AliasDistribution(),)


_finder = _HorovodFinder()


def install() -> None:
    """Makes ``import horovod...`` import hvd_order from now on; a second call does nothing.

    Raises:
        ImportError: Horovod itself has been imported already.
    """
    if is_installed():
        return
    horovod = sys.modules.get("horovod")
    if horovod is not None:
        raise ImportError(
            f"Horovod itself has been imported already, from {getattr(horovod, '__file__', None)}, "
            "so hvd_order can no longer stand in for it. Import hvd_order.alias before anything "
            "that imports horovod, or set HVD_ORDER_ALIAS=1 in the environment"
        )
    sys.meta_path.insert(0, _finder)


def uninstall() -> None:
    """Undoes `install`: from now on ``import horovod`` imports the installed package.

    Modules that have imported hvd_order's modules keep them.
    """
    if not is_installed():
        return
    sys.meta_path.remove(_finder)
    for name in [name for name in sys.modules if _below(name, "horovod")]:
        del sys.modules[name]


def is_installed() -> bool:
    """Whether the alias is in force in this process."""
    return _finder in sys.meta_path


def _below(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def _exists(ours: str) -> bool:
    if ours in sys.modules:
        return True
    parent = sys.modules.get(ours.rpartition(".")[0])
    if parent is None:  # of another package than the alias: its parent is not imported yet
        parent = importlib.import_module(ours.rpartition(".")[0])
    return PathFinder.find_spec(ours, getattr(parent, "__path__", [])) is not None


def _missing(name: str) -> ModuleNotFoundError:
    advice = _ADVICE.get(
        name.split(".")[1], "its documentation lists what there is (Horovod's API, name by name)"
    )
    return ModuleNotFoundError(
        f"no module named {name!r}: hvd_order stands in for Horovod in this process "
        f"(hvd_order.alias or HVD_ORDER_ALIAS), and it has none; {advice}",
        name=name,
    )
