"""docs/tutorial.md as its reader has it: files to save and commands to run."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from helpers.ranks import REPOSITORY

__all__ = ["commands", "has_learnt", "save_files"]

_TEXT = (REPOSITORY / "docs" / "tutorial.md").read_text("utf-8")


def save_files(folder: Path) -> None:
    """Saves each block that has a title under that name."""
    for name, content in re.findall(r'^```python title="(\S+)"\n(.*?)^```$', _TEXT, re.M | re.S):
        (folder / name).write_text(content)


def commands(kind: str = "") -> list[list[str]]:
    """Command lines of the blocks of a kind, with the programs of this environment."""
    blocks = re.findall(rf"^```bash{f' {kind}' if kind else ''}\n(.*?)^```$", _TEXT, re.M | re.S)
    found = [shlex.split(line) for block in blocks for line in block.splitlines()]
    assert found, f"docs/tutorial.md has no command of kind {kind!r}"
    return [[_ours(word) for word in command] for command in found]


def has_learnt(text: str) -> bool:
    """Whether one process has printed a small loss after the last epoch."""
    losses = [float(loss) for loss in re.findall(r"epoch 2: loss (\d+\.\d+)", text)]
    return len(losses) == 1 and losses[0] < 0.3


def _ours(word: str) -> str:
    if word == "python":
        return sys.executable
    if word in ("hvd-order", "torchrun"):
        return str(Path(sys.executable).with_name(word))
    return word
