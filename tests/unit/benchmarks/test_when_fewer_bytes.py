"""The picture of docs/theory.md shows the simulator of today, which follows the fluid model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.planning.when_fewer_bytes import MODEL, PICTURE, RATIOS, simulated


def test_the_picture_is_of_today_and_its_points_lie_on_its_lines() -> None:
    points = simulated()
    with Image.open(PICTURE) as picture:
        assert json.loads(picture.info["Description"]) == points, (
            "draw it again: python -m benchmarks.planning.when_fewer_bytes"
        )
    for name, steps in points.items():
        for ratio, step in zip(RATIOS, steps, strict=True):
            # The gradients of the layers at both ends, of sixty, do not travel beside computation.
            assert step == pytest.approx(MODEL[name](ratio), abs=2 / 60 * max(1, ratio)), name
