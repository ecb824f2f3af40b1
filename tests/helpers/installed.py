"""A training script for an hvd_order that is installed elsewhere, and what it prints."""

from __future__ import annotations

from pathlib import Path

__all__ = ["TRAIN", "weights_in"]

TRAIN = Path(__file__).parents[1] / "wheel/train.py"


def weights_in(output: str) -> list[float]:
    """The weights that rank 0 of `TRAIN` has printed."""
    (line,) = [line for line in output.splitlines() if "weights " in line]
    return [float(number) for number in line.partition("weights ")[2].split()]
