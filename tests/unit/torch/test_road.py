"""The drawing of a gradient's road in docs/architecture.md, compared with what its files import."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
# What sets a step up, or is asked beside the road.
BESIDE = {
    "hvd_order/torch/gradients/clipping.py",
    "hvd_order/torch/gradients/conflicts.py",
    "hvd_order/torch/gradients/followed_plan.py",
    "hvd_order/torch/gradients/gradient_norms.py",
    "hvd_order/torch/gradients/misuse.py",
    "hvd_order/torch/gradients/parts.py",
    "hvd_order/torch/gradients/sparse.py",
    "hvd_order/torch/gradients/step_recorder.py",
    "hvd_order/torch/gradients/tuning.py",
    "hvd_order/torch/gradients/warm_up.py",
    "hvd_order/torch/sums/gradient_buffers.py",
    "hvd_order/torch/sums/coding.py",
    "hvd_order/torch/sums/norms.py",
    "hvd_order/torch/sums/shard_sums.py",
}


def drawn() -> list[str]:
    """The files of the drawing, each once, from the hook on."""
    text = (ROOT / "docs/architecture.md").read_text("utf-8")
    _, _, section = text.partition("## The path of one gradient")
    drawing = section.split("```")[1]
    return list(dict.fromkeys(re.findall(r"(?:csrc|hvd_order)/[\w/]+\.(?:cc|h|py)", drawing)))


def named_by(path: str) -> str:
    """How other files name this one when they use it."""
    if path.endswith(".py"):
        return path.removesuffix(".py").replace("/", ".")
    return path.removeprefix("csrc/").rsplit(".", 1)[0] + ".h"


def uses(path: str) -> set[str]:
    """The names of the files that a file uses, by import or include."""
    if path.endswith(".py"):
        text = (ROOT / path).read_text("utf-8")
        found = set(re.findall(r"^from (hvd_order[\w.]*) import", text, re.M))
        for room, names in re.findall(r"^from (hvd_order[\w.]*) import ([\w, ]+)$", text, re.M):
            found |= {f"{room}.{name.strip()}" for name in names.split(",")}
        return found
    both = [(ROOT / path).with_suffix(suffix) for suffix in (".h", ".cc")]
    text = "".join(each.read_text("utf-8") for each in both if each.exists())
    return set(re.findall(r'#include "([^"]+)"', text))


def is_bound(path: str) -> bool:
    """Whether Python reaches a C++ file."""
    bindings = (ROOT / "csrc/bindings").glob("*.cc")
    return any(f'"{named_by(path)}"' in each.read_text("utf-8") for each in bindings)


def touch(one: str, other: str) -> bool:
    """Whether one of two files uses the other."""
    for user, used in ((one, other), (other, one)):
        if named_by(used) in uses(user):
            return True
        crosses = user.endswith(".py") and not used.endswith(".py")
        if crosses and is_bound(used) and any("._native" in name for name in uses(user)):
            return True
    return False


def test_the_road_has_no_gap() -> None:
    road = drawn()
    assert len(road) > 15
    assert [path for path in road if not (ROOT / path).is_file()] == []
    joined, left = {road[0]}, road[1:]
    while reached := [path for path in left if any(touch(path, each) for each in joined)]:
        joined.update(reached)
        left = [path for path in left if path not in reached]
    assert left == []


def test_every_file_of_the_rooms_is_drawn_or_beside_the_road() -> None:
    there = {
        str(path.relative_to(ROOT))
        for room in ("gradients", "sums")
        for path in (ROOT / "hvd_order/torch" / room).glob("*.py")
        if path.name != "__init__.py"
    }
    rooms = ("hvd_order/torch/gradients/", "hvd_order/torch/sums/")
    road = {path for path in drawn() if path.startswith(rooms)}
    assert there == road | BESIDE
    assert not road & BESIDE


def test_this_test_can_fail() -> None:
    assert not touch("hvd_order/torch/gradients/sparse.py", "csrc/engine/completion.cc")
    assert not touch("csrc/scheduler/leader.cc", "csrc/scheduler/follower.cc")
