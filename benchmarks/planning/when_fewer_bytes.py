"""Draws docs/images/when_fewer_bytes.png: the step over the time of all sums, for four ways.

    python -m benchmarks.planning.when_fewer_bytes

Lines are the fluid model of docs/theory.md, points are simulated steps of a chain of sixty layers.
The picture holds the points as text, so that a test can compare them with those of today.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from hvd_order.planning.predict.simulate import (
    AllReduceScenario,
    StepWorkload,
    TransferSchedule,
    ddp,
    simulate,
)
from hvd_order.planning.report.drawing import new_figure, strip_frame

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "images" / "when_fewer_bytes.png"
RATIOS = [2.0 ** (place / 2) for place in range(-4, 9)]  # C / (F + B)
_LAYERS, _SLICES = 60, 4
_SIZE = 64 * _SLICES
_FORWARD, _BACKWARD = 1 / 3, 2 / 3  # of F + B
_CODES = 8.125 / 32
_EVERY = 8  # steps from one sum to the next

_Step = Callable[[float], float]
MODEL: dict[str, _Step] = {
    "DDP": lambda ratio: _FORWARD + max(_BACKWARD, ratio),
    "order": lambda ratio: max(1.0, ratio),
    "order, 8 bits": lambda ratio: max(1.0, _CODES * ratio),
    f"fewer sums: one in {_EVERY} steps": lambda ratio: max(1.0, ratio / _EVERY),
}
"""Step by C / (F + B), both in units of F + B."""
_COLOURS = ("C3", "C0", "C2", "0.45")


def simulated() -> dict[str, list[float]]:
    """Steps at each of `RATIOS`; none of the last way, which is another training."""
    work = StepWorkload.chain(
        [f"l{i}" for i in range(_LAYERS)],
        [_FORWARD / _LAYERS] * _LAYERS,
        [_BACKWARD / _LAYERS] * _LAYERS,
        [[_SIZE]] * _LAYERS,
    )
    in_slices = work, TransferSchedule(_SIZE // _SLICES, _SIZE // _SLICES)
    in_buckets = ddp(work, _SIZE, _SIZE)

    def step_s(how: tuple[StepWorkload, TransferSchedule], ratio: float) -> float:
        link = AllReduceScenario(0.0, ratio / (_LAYERS * _SIZE))
        return round(simulate(how[0], link, how[1], steps=6).steady_s, 4)

    return {
        "DDP": [step_s(in_buckets, ratio) for ratio in RATIOS],
        "order": [step_s(in_slices, ratio) for ratio in RATIOS],
        "order, 8 bits": [step_s(in_slices, _CODES * ratio) for ratio in RATIOS],
    }


def main() -> None:
    points = simulated()
    figure = new_figure(8, 5)
    axes = figure.add_subplot()
    fine = [2.0 ** (place / 20) for place in range(-40, 81)]
    for (name, step), colour in zip(MODEL.items(), _COLOURS, strict=True):
        dashes = "-" if name in points else "--"
        axes.plot(fine, [step(ratio) for ratio in fine], dashes, color=colour, label=name, lw=1.8)
        if name in points:
            axes.plot(RATIOS, points[name], "o", color=colour, ms=4)
    for at in (2 / 3, 4 / 3, 1 / _CODES):
        axes.axvline(at, color="0.85", lw=1, zorder=0)
    for at, words in (
        (0.41, "nothing is needed"),
        (0.94, "order"),
        (2.3, "fewer bytes"),
        (7.9, "fewer sums, too"),
    ):
        axes.text(at, 17.5, words, ha="center", va="top", color="0.3", fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlim(0.25, 16)
    axes.set_ylim(0.9, 18.5)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("C / (F + B): time of all sums over that of the computation")
    axes.set_ylabel("step / (F + B)")
    axes.set_title("What helps: order, fewer bytes or fewer sums", fontsize=11)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0.0, 0.94))
    strip_frame(axes)
    # No version in the file, so that the same points give the same picture.
    figure.savefig(PICTURE, dpi=110, metadata={"Software": None, "Description": json.dumps(points)})
    print(PICTURE)


if __name__ == "__main__":
    main()
