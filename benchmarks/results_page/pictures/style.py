"""What the pictures share: names, colours, and how a file is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

NAMES = {
    "no_waiting": "bytes that nothing waits for",
    "no_waiting_halves": "bytes that nothing waits for, in halves",
    "ddp": "DDP, 25 MiB buckets",
    "ddp_tuned": "DDP, best bucket size",
    "fsdp2": "FSDP2",
    "horovod": "Horovod",
    "hvd_order": "hvd_order",
    "hvd_order_planned": "hvd_order with a plan",
}
COLOURS = {
    "no_waiting": "0.8", "no_waiting_halves": "0.6",
    "ddp": "C3", "ddp_tuned": "C1", "fsdp2": "C4", "horovod": "C2",
    "hvd_order": "C0", "hvd_order_planned": "C9",
}  # fmt: skip


def save(figure: Any, path: Path, tight: bool = True) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if tight:
        figure.tight_layout()
    # No version or date in the file, so that the same data gives the same picture.
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
