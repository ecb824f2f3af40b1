"""What all pictures have in common: colours, the canvas, and matplotlib only where one draws."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "COMPUTE_COLOURS",
    "MOST_LABELS",
    "OTHER_COLOUR",
    "OUTLINE_COLOUR",
    "PRIORITY_COLOURS",
    "QUEUE_COLOUR",
    "UPDATE_COLOUR",
    "WAIT_COLOUR",
    "new_figure",
    "save",
    "strip_frame",
]

COMPUTE_COLOURS = {"forward": "#4c78a8", "backward": "#f2a154", "step": "#7f7f7f"}
OTHER_COLOUR = "#bab0ac"
UPDATE_COLOUR = "#59a14f"
WAIT_COLOUR = "#d62728"
QUEUE_COLOUR = "#c9c9c9"
OUTLINE_COLOUR = "#111111"
PRIORITY_COLOURS = "viridis"  # dark is urgent, light can wait
MOST_LABELS = 48


def new_figure(width_in: float, height_in: float) -> Figure:
    """An empty figure; no backend is chosen for the rest of the process, as pyplot would.

    Raises:
        ImportError: matplotlib is not installed; the message says how to install it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ImportError(
            f"pictures need matplotlib ({error}); install it with: "
            "pip install 'hvd_order[report]', or pip install matplotlib"
        ) from error
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: str | Path) -> None:
    """Writes a PNG file; the folder is made if it is missing."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110, format="png")


def strip_frame(axes: Axes) -> None:
    """Leaves the left and the lower edge."""
    axes.spines[["top", "right"]].set_visible(False)
