"""A file of JSON lines with what happened in a cluster, so that a restart finds it again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hvd_order.base.errors import InvalidUsage
from hvd_order.cluster.model.placement import JobPlacement, MachinePart
from hvd_order.cluster.policies.interface import PolicyDecision

__all__ = ["Journal", "decision_of", "noted"]


class Journal:
    """Appends lines; each is on disk before its consequences."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Iterator[dict[str, Any]]:
        """All lines. One that was cut off by a crash, the last, is removed.

        Raises:
            InvalidUsage: another line is damaged.
        """
        if not self._path.exists():
            return
        content = self._path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(self._path, len(whole))
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                entry: dict[str, Any] = json.loads(line)
            except ValueError:
                raise InvalidUsage(f"{self._path}, line {number} is damaged; remove the line, or "
                                   "choose another --state") from None  # fmt: skip
            yield entry

    def add(self, what: str, at_s: float, **details: object) -> None:
        """Appends a line.

        Args:
            at_s: when, in seconds since the first start.
        """
        line = json.dumps({"what": what, "at_s": round(at_s, 3), **details})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())


def noted(decision: PolicyDecision) -> Mapping[str, object]:
    """A decision for a line."""
    place = {
        name: None if placement is None else [[*part] for part in placement.parts]
        for name, placement in decision.place.items()
    }
    batches = {
        name: placement.batch
        for name, placement in decision.place.items()
        if placement is not None and placement.batch is not None
    }
    return {"place": place, "batches": batches, "reject": decision.reject,
            "wake_s": decision.wake_s}  # fmt: skip


def decision_of(line: Mapping[str, Any]) -> PolicyDecision:
    """The decision of a line."""
    place = {
        name: None if parts is None
        else JobPlacement(tuple(MachinePart(*part) for part in parts), line["batches"].get(name))
        for name, parts in line["place"].items()
    }  # fmt: skip
    return PolicyDecision(place, line["reject"], line["wake_s"])
