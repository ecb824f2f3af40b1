"""PyTorch, as the compiler must know it."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from toolchain.packages import package_folders

__all__ = ["OLDEST", "PyTorch", "installed", "pytorch_at"]

OLDEST = (2, 8)


@dataclass(frozen=True)
class PyTorch:
    """A PyTorch to build an engine for."""

    folder: Path
    """The package ``torch``; of it the build reads ``version.py``, ``include`` and ``lib``."""
    version: str
    """In full, such as 2.13.0+cpu."""

    @property
    def release(self) -> tuple[int, int]:
        """Major and minor number. PyTorch's C++ interface is the same within a minor release."""
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)

    @property
    def engine(self) -> str:
        """Name of the engine's folder; `hvd_order._native.torch_engines` looks for it."""
        return "torch_{}_{}".format(*self.release)

    @property
    def include_folders(self) -> list[Path]:
        """As `torch.utils.cpp_extension.include_paths`."""
        include = self.folder / "include"
        return [include, include / "torch/csrc/api/include"]

    def definitions(self) -> list[str]:
        """Macros with which types of PyTorch's bindings and of ours are the same to Python.

        pybind11 shares types between modules whose internals have the same name. Before version 3
        that name holds the ABI number of PyTorch's compiler, which may differ from ours.
        """
        library = (self.folder / "lib/libtorch_python.so").read_bytes()
        found = re.search(rb"__pybind11_internals_v\d+_gcc_libstdcpp(_cxxabi\d+)__", library)
        return [f'PYBIND11_BUILD_ABI="{found[1].decode()}"'] if found else []


def pytorch_at(folder: Path) -> PyTorch:
    """The PyTorch of a folder.

    Raises:
        SystemExit: there is none, or it is older than `OLDEST`.
    """
    text = folder / "version.py"
    found = (
        re.search(r"__version__ = '([^']+)'", text.read_text("utf-8")) if text.exists() else None
    )
    if found is None:
        raise SystemExit(f"hvd_order: {folder} is not the folder of an installed PyTorch")
    torch = PyTorch(folder, found[1])
    if torch.release < OLDEST:
        raise SystemExit(
            f"hvd_order: PyTorch {torch.version} in {folder} is older than "
            f"{OLDEST[0]}.{OLDEST[1]}, the oldest that engines are built for"
        )
    return torch


def installed() -> PyTorch:
    """This environment's PyTorch.

    Raises:
        SystemExit: there is none to build for; the message says what to do.
    """
    folders = [f for f in package_folders("torch") if (f / "version.py").exists()]
    if not folders:
        raise SystemExit(
            "hvd_order: its engine is built for the PyTorch of the environment that it is "
            f"installed into, and in {sys.prefix} there is none. Install PyTorch first "
            "(pip install torch; https://pytorch.org has the builds for GPUs), then hvd_order "
            "again. If PyTorch is there, this build does not see it: add --no-build-isolation. "
            "To build without an engine, so that nothing can train: HVD_ORDER_TORCH_FOLDERS="
        )
    return pytorch_at(folders[0])
