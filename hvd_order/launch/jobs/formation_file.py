"""The file in which a launcher says what its job uses just now, for whoever hands out hosts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_order.launch.hosts import Host

__all__ = ["Formed", "note_formation", "read_formation"]


@dataclass(frozen=True)
class Formed:
    """What a job uses.

    Attributes:
        slots: of each host of the formation.
        devices: of each host, where the discovery script named them.
        leaving: hosts that the job has left, whose processes have not ended.
        began: whether no worker of the formation before it runs on these hosts any more.
    """

    slots: Mapping[str, int]
    devices: Mapping[str, Sequence[int]]
    leaving: Sequence[str]
    began: bool


def note_formation(
    path: Path, hosts: Sequence[Host], leaving: Sequence[str], *, began: bool
) -> None:
    """Replaces the file.

    Raises:
        OSError: it cannot be written.
    """
    document = {
        "slots": {host.name: host.slots for host in hosts},
        "devices": {host.name: host.devices for host in hosts if host.devices},
        "leaving": list(leaving),
        "began": began,
    }
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps(document), encoding="utf-8")
    os.replace(draft, path)


def read_formation(path: Path) -> Formed | None:
    """The file's content; None: the job has not formed so far."""
    try:
        return Formed(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
