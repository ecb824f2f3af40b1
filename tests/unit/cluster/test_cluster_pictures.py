"""hvd-order cluster run: picture, page, and what docs/guides/cluster.md shows."""

from __future__ import annotations

import base64
import io
import textwrap
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cluster_runs import (
    MACHINES,
    Called,
    Chosen,
)

from hvd_order.cluster.policies.registry import POLICIES
from hvd_order.cluster.report import gantt, occupancy

pytestmark = pytest.mark.usefixtures("policies")


# --- picture and page --------------------------------------------------------------------------


class Texts(HTMLParser):
    """Cells of a page, and whether all that was opened is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.open: list[str] = []
        self.images: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            self.images.append(dict(attrs)["src"] or "")
        elif tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.cells.append(data)


def colours_of(png: bytes) -> set[str]:
    """Colours that fill more than a few pixels."""
    from matplotlib.image import imread

    pixels = np.round(255 * imread(io.BytesIO(png))[:, :, :3]).astype(int)
    counts = np.bincount((pixels @ [1 << 16, 1 << 8, 1]).ravel())
    return {f"#{colour:06x}" for colour in np.flatnonzero(counts > 500)}


def test_picture_and_page(trace: Path, tmp_path: Path, call: Callable[..., Called]) -> None:
    png, html = tmp_path / "out" / "a.png", tmp_path / "out" / "a.html"
    options = (trace, "--machines", MACHINES, "--policy", "fifo", "choosy")
    done = call(*options, "--png", png, "--html", html)
    assert done.code == 0
    assert done.out.endswith(f"\n{png}\n{html}\n")
    # Each of the five jobs has a colour of its own.
    assert set(gantt._FEW_COLOURS[:5]) <= colours_of(png.read_bytes())
    page = Texts(html.read_text())
    assert page.open == []
    assert {"fifo", "choosy", "mean completion, hours"} <= set(page.cells)
    assert page.cells[0] == "policy"
    (image,) = page.images
    assert base64.b64decode(image.removeprefix("data:image/png;base64,")) == png.read_bytes()
    # Nothing else is left: what the picture needed lay elsewhere.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["jobs.csv", "out"]


def test_a_crowded_picture_shows_how_full_machines_are(
    trace: Path, tmp_path: Path, call: Callable[..., Called], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(occupancy, "_MOST_BARS", 3)
    call(trace, "--machines", MACHINES, "--png", tmp_path / "a.png")
    found = colours_of((tmp_path / "a.png").read_bytes())
    assert "#08306b" in found  # the darkest blue: bert has all GPUs of both machines
    assert gantt._FEW_COLOURS[4] not in found


def test_a_picture_of_nothing(trace: Path, tmp_path: Path, call: Callable[..., Called]) -> None:
    options = (trace, "--machines", MACHINES, "--policy", "nobody", "--png", tmp_path / "a.png")
    POLICIES["nobody"] = lambda _: Chosen(iter, ["resnet", "bert", "gpt", "vgg", "dlrm"])
    try:
        done = call(*options)
    finally:
        del POLICIES["nobody"]
    assert done.table["nobody"]["rejected"] == "5"
    assert done.table["nobody"]["mean completion, s"] == "-"
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_a_picture_is_drawn_from_an_old_folder(
    trace: Path, tmp_path: Path, call: Callable[..., Called]
) -> None:
    options = (trace, "--machines", MACHINES, "--png")
    call(*options, tmp_path / "a.png")
    call(*options[:-1], "--out", tmp_path / "runs")
    call(*options, tmp_path / "b.png", "--out", tmp_path / "runs")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


# --- documentation -----------------------------------------------------------------------------


def blocks() -> Iterator[str]:
    page = (Path(__file__).parents[3] / "docs/guides/cluster.md").read_text("utf-8")
    for part in page.split("\n\n"):
        if part.startswith("    "):
            yield textwrap.dedent(part)


def test_the_tutorial_shows_what_the_command_prints(
    trace: Path, call: Callable[..., Called], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trace.parent)
    trace.write_text(next(b for b in blocks() if b.startswith("name,arrival_s")) + "\n")
    command = next(b for b in blocks() if b.startswith("hvd-order cluster run")).split()
    shown = next(b for b in blocks() if b.startswith("policy "))
    known = [name for name in ("fifo", "srtf") if name in POLICIES]
    assert command[2:6] == ["run", "jobs.csv", "--machines", MACHINES]
    done = call("jobs.csv", "--machines", MACHINES, "--policy", *known)
    for name in known:
        assert next(line for line in shown.splitlines() if line.startswith(name)) in done.out


def test_the_policy_of_the_documentation_works(
    trace: Path, call: Callable[..., Called], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[3] / "docs/guides/cluster.md").read_text("utf-8")
    names: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], names)
    monkeypatch.setitem(POLICIES, "smallest", lambda _: names["SmallestFirst"]())
    done = call(trace, "--machines", MACHINES, "--policy", "smallest")
    # bert, the only one for all GPUs, runs when gpt, the last of the others, has ended at 6100 s.
    assert done.table["smallest"]["makespan, hours"] == f"{(6100 + 7200) / 3600:.3g}"
