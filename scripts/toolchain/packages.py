"""Where packages of the environment to build for are installed."""

from __future__ import annotations

import importlib.util
import site
import sys
import sysconfig
from pathlib import Path

__all__ = ["package_folders"]


def package_folders(name: str) -> list[Path]:
    """Folders of an installed package, first the one that Python would import.

    pip's isolated builds hide the packages of the environment that pip installs into, so its
    folders are looked through as well.
    """
    spec = importlib.util.find_spec(name)
    found = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    found += [folder / name for folder in _site_folders() if (folder / name).is_dir()]
    return list(dict.fromkeys(found))


def _site_folders() -> list[Path]:
    """The site-packages of this environment and, where it shows them, of the one below it."""
    places = [sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]
    settings = Path(sys.prefix) / "pyvenv.cfg"
    if settings.exists() and "include-system-site-packages = true" in settings.read_text("utf-8"):
        below = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
        places += [sysconfig.get_path(kind, vars=below) for kind in ("platlib", "purelib")]
        places += [*site.getsitepackages([sys.base_prefix]), site.getusersitepackages()]
    return [Path(place) for place in places]
