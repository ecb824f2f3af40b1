"""Which build of the engine ``hvd_order._native._torch`` fits the installed PyTorch.

PyTorch's C++ interface changes with each minor release, so an installation may hold an engine for
several: ``torch_2_13/_torch.*.so`` is the one for 2.13. A wheel has all of them, a
build from source the one for the PyTorch that it found.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from pathlib import Path
from types import ModuleType

__all__ = ["ENGINE", "engine_file", "engine_releases", "install", "torch_release"]

ENGINE = "hvd_order._native._torch"
_FOLDERS = Path(__file__).parent


def torch_release() -> str | None:
    """Major and minor number of the installed PyTorch, such as ``2.13``. Does not import it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text("utf-8")
    except OSError:
        return None
    found = re.search(r"__version__ = '(\d+\.\d+)", text)
    return found[1] if found else None


def engine_releases() -> list[str]:
    """Releases of PyTorch that this installation has engines for, oldest first."""
    folders = _FOLDERS.glob("torch_*_*")
    releases = [tuple(map(int, f.name.split("_")[1:])) for f in folders if _file_in(f)]
    return [".".join(map(str, release)) for release in sorted(releases)]


def engine_file() -> Path | None:
    """The engine for the installed PyTorch."""
    release = torch_release()
    return (release and _file_in(_FOLDERS / f"torch_{release.replace('.', '_')}")) or None


def _file_in(folder: Path) -> Path | None:
    """The engine of a folder that this Python can load."""
    files = (folder / f"_torch{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next((file for file in files if file.exists()), None)


class _EngineFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The engine by its name; None for every other."""
        file = engine_file() if fullname == ENGINE else None
        return None if file is None else importlib.util.spec_from_file_location(fullname, file)


def install() -> None:
    """Has an import of the engine take the one that fits; a second call does nothing."""
    if not any(isinstance(finder, _EngineFinder) for finder in sys.meta_path):
        sys.meta_path.append(_EngineFinder())
