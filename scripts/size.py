"""Prints lines and files by room; fails where a room is larger than its README allows.

A room's README has a line ``Limit: 12,400 lines``. The column of changes compares the working tree
with the last commit. Tests and benchmarks are listed, without a limit.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {".py", ".pyi", ".cc", ".h", ".cu", ".cuh"}
_BINDINGS = "csrc/bindings/"

# A room's folders, the more special room first; with the README that names its limit.
ROOMS: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "servers": (
        "hvd_order/servers/README.md",
        (
            "hvd_order/servers/", "csrc/servers/", f"{_BINDINGS}torch_server",
            f"{_BINDINGS}delay_order", f"{_BINDINGS}update_rule",
        ),
    ),
    "planning": (
        "hvd_order/planning/README.md",
        (
            "hvd_order/planning/", "csrc/planning/", f"{_BINDINGS}simulate_py",
            f"{_BINDINGS}sampled_py",
        ),
    ),
    "cluster": ("hvd_order/cluster/README.md", ("hvd_order/cluster/",)),
    "tensorflow": (
        "hvd_order/tensorflow/README.md",
        (
            "hvd_order/tensorflow/", "hvd_order/keras/", "csrc/tensorflow/",
            f"{_BINDINGS}op_gradient_queue",
        ),
    ),
    "compat": (
        "hvd_order/compat/README.md",
        (
            "hvd_order/compat/", "hvd_order/array/", "hvd_order/alias.py", "hvd_order/lightning.py",
            "hvd_order/ray.py",
        ),
    ),
    "watch": ("hvd_order/watch/README.md", ("hvd_order/watch/",)),
    "tools": ("hvd_order/tools/README.md", ("hvd_order/tools/",)),
    "core": ("csrc/README.md", ("hvd_order/", "csrc/")),
    "benchmarks": (None, ("benchmarks/", "docker/", "examples/", "scripts/", "setup.py")),
    "tests": (None, ("tests/",)),
}  # fmt: skip


def room_of(path: str) -> str | None:
    """The room of a tracked file; None if its lines are not counted."""
    if Path(path).suffix not in SOURCES:
        return None
    return next((room for room, (_, folders) in ROOMS.items() if path.startswith(folders)), None)


def git(*arguments: str) -> str:
    """What a command of git prints."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def lines_changed() -> Counter[str]:
    """Lines that the working tree has more than the last commit, by room."""
    changed: Counter[str] = Counter()
    for row in git("diff", "--numstat", "--no-renames", "HEAD").splitlines():
        added, removed, path = row.split("\t")
        room = room_of(path)
        if room is not None and added != "-":
            changed[room] += int(added) - int(removed)
    return changed


def limit_of(room: str) -> int | None:
    """The most lines that a room may have; None if it has no limit.

    Raises:
        SystemExit: its README names none.
    """
    readme = ROOMS[room][0]
    if readme is None:
        return None
    found = re.search(r"^Limit: ([\d,]+) lines", (ROOT / readme).read_text("utf-8"), re.MULTILINE)
    if found is None:
        raise SystemExit(f"{readme} has no line 'Limit: 12,400 lines'")
    return int(found[1].replace(",", ""))


def main() -> int:
    """Prints the table; 1 if a room is too large."""
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for path in git("ls-files").splitlines():
        room = room_of(path)
        if room is not None and (ROOT / path).exists():
            files[room] += 1
            lines[room] += len((ROOT / path).read_bytes().splitlines())
    changed = lines_changed()
    print(f"{'room':<12}{'files':>7}{'lines':>9}{'change':>9}{'limit':>9}")
    too_large = []
    for room in sorted(ROOMS, key=lambda room: -lines[room]):
        limit = limit_of(room)
        of_limit = f"{limit:>9,}" if limit is not None else ""
        print(f"{room:<12}{files[room]:>7,}{lines[room]:>9,}{changed[room]:>+9,}{of_limit}")
        if limit is not None and lines[room] > limit:
            too_large.append(room)
    product = sum(lines[room] for room in ROOMS if room != "tests")
    print(f"{'all but tests':<19}{product:>9,}")
    for room in too_large:
        print(f"{room} is larger than {ROOMS[room][0]} allows: make it smaller, or say there why "
              "it may grow", file=sys.stderr)  # fmt: skip
    return 1 if too_large else 0


if __name__ == "__main__":
    sys.exit(main())
