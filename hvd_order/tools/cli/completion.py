"""``hvd-order completion``: scripts that complete the command line, by shtab, and the manual page,
by argparse-manpage.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

from hvd_order.base.errors import InvalidUsage

__all__ = ["KINDS", "write_completion"]

KINDS = ("bash", "zsh", "tcsh", "man")


def write_completion(parser: argparse.ArgumentParser, kind: str) -> int:
    """Prints the script for a shell, or the manual page.

    Raises:
        InvalidUsage: what makes it is not installed.
    """
    if kind == "man":
        text = str(_module("argparse_manpage.manpage", "argparse-manpage").Manpage(parser))
    else:
        text = _module("shtab", "shtab").complete(parser, shell=kind)
    sys.stdout.write(f"{text}\n")
    return 0


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise InvalidUsage(
            f"this is made by {package}, which is not installed; install it with: "
            f"pip install {package}"
        ) from None
