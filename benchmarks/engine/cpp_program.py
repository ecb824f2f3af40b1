"""Benchmarks in C++ of csrc/scheduler; they need only a C++20 compiler."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from benchmarks.runner.records.environment import ROOT

__all__ = ["run_cpp"]


def run_cpp(source: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Builds a program with the scheduler's sources and runs it; its output is this process's.

    Args:
        source: file below ``benchmarks``.

    Raises:
        CalledProcessError: the compiler fails.
    """
    program = ROOT / "build" / "benchmarks" / Path(source).stem
    program.parent.mkdir(parents=True, exist_ok=True)
    sources = [ROOT / "benchmarks" / source, *sorted((ROOT / "csrc/scheduler").glob("*.cc"))]
    subprocess.run(
        [os.environ.get("CXX", "g++"), "-std=c++20", "-O3", "-DNDEBUG", "-Wall", "-Wextra",
         "-Werror", f"-I{ROOT / 'csrc'}", *map(str, sources), "-o", str(program)],
        check=True,
    )  # fmt: skip
    return subprocess.run([str(program), *arguments], check=False)
