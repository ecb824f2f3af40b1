"""TensorFlow, as the compiler must know it."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path

from toolchain.packages import package_folders

__all__ = ["TensorFlow", "installed"]


@dataclass(frozen=True)
class TensorFlow:
    """A TensorFlow whose headers operators are compiled with."""

    folder: Path
    version: str


def installed() -> TensorFlow | None:
    """The TensorFlow of this environment, if it has one with headers."""
    for folder in package_folders("tensorflow"):
        if (folder / "include/tensorflow/core/framework/op_kernel.h").exists():
            return TensorFlow(folder, _version(folder))
    return None


def _version(folder: Path) -> str:
    """Of the distribution that installed it; there are several with different names."""
    for distribution in importlib.metadata.distributions(path=[str(folder.parent)]):
        name = distribution.metadata["Name"] or ""
        if re.fullmatch(r"tensorflow|tensorflow[-_](cpu|intel|macos|rocm)|tf[-_]nightly.*", name):
            return distribution.version
    return "unknown"
