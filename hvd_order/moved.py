"""Import paths that README or docs have named, and where their modules are now.

An old path works as before and warns once. Asked only for what Python has not found elsewhere.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["MOVED", "install"]

MOVED = {
    "hvd_order.planning.bound": "hvd_order.planning.bounds.bound",
    "hvd_order.planning.profile": "hvd_order.planning.files.profile",
    "hvd_order.planning.program": "hvd_order.planning.steps.program",
    "hvd_order.planning.registry": "hvd_order.planning.orders.registry",
    "hvd_order.tensorflow.compression": "hvd_order.tensorflow.ops.compression",
    "hvd_order.tensorflow.functions": "hvd_order.tensorflow.ops.functions",
    "hvd_order.torch.compression": "hvd_order.torch.collectives.compression",
    "hvd_order.torch.functions": "hvd_order.torch.collectives.functions",
    "hvd_order.torch.profiler": "hvd_order.planning.profiling.profiler",
    "hvd_order.torch.sync_batch_norm": "hvd_order.torch.collectives.sync_batch_norm",
}


class _Moved(Loader):
    def __init__(self, target: str) -> None:
        self._target = target

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """None: Python makes an empty module, which `exec_module` replaces."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Imports the module where it is now and puts it under the old name as well."""
        warnings.warn(
            f"{module.__name__} is {self._target} now; the old path goes with the next release",
            FutureWarning,
            stacklevel=2,
        )
        sys.modules[module.__name__] = importlib.import_module(self._target)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A module by its old path; None for every other."""
        new = MOVED.get(fullname)
        return None if new is None else ModuleSpec(fullname, _Moved(new), origin="hvd_order")


def install() -> None:
    """Has old paths found; a second call does nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
