"""cmake and ninja."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sys
from pathlib import Path

__all__ = ["program"]


def program(name: str) -> str:
    """Path of cmake or ninja: the one installed by pip, else the system's.

    Raises:
        SystemExit: there is none.
    """
    for folder in (Path(sys.executable).parent, None):
        found = shutil.which(name, path=folder and str(folder))
        if found:
            return found
    spec = importlib.util.find_spec(name)  # pip's isolated builds have the module, not the script
    if spec is not None and spec.submodule_search_locations:
        package = importlib.import_module(name)
        binaries = getattr(package, "CMAKE_BIN_DIR", None) or getattr(package, "BIN_DIR", "")
        found = shutil.which(name, path=binaries)
        if found:
            return found
    raise SystemExit(f"hvd_order: {name} is needed to build; install it with: pip install {name}")
