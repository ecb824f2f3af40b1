"""``hvd-order completion SHELL``: a script that completes the command line, made by shtab."""

from __future__ import annotations

import argparse
import importlib
import sys

from hvd_order.base.errors import InvalidUsage

__all__ = ["SHELLS", "write_completion"]

SHELLS = ("bash", "zsh", "tcsh")


def write_completion(parser: argparse.ArgumentParser, shell: str) -> int:
    """Prints the script for a shell.

    Raises:
        InvalidUsage: shtab is not installed.
    """
    try:
        shtab = importlib.import_module("shtab")
    except ImportError:
        raise InvalidUsage(
            "completion scripts are made by shtab, which is not installed; install it with: "
            "pip install shtab"
        ) from None
    sys.stdout.write(f"{shtab.complete(parser, shell=shell)}\n")
    return 0
