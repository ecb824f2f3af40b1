"""Metadata of Horovod for ``importlib.metadata`` while the alias is active."""

from __future__ import annotations

import os
from importlib.metadata import Distribution
from pathlib import Path

from hvd_order.compat import horovod

__all__ = ["AliasDistribution"]


class AliasDistribution(Distribution):
    """Horovod, of the version whose interface hvd_order has."""

    def read_text(self, filename: str) -> str | None:
        """The metadata; there are no other files."""
        if filename != "METADATA":
            return None
        return (
            "Metadata-Version: 2.1\nName: horovod\n"
            f"Version: {horovod.__version__}\nSummary: hvd_order under Horovod's name\n"
        )

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        """Where `path` would lie."""
        return Path(__file__).parent / path
