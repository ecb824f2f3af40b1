"""The demo's command: trains on local workers, then prints tables and draws the pictures."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hvd_order.launch.request import LaunchRequest, OutputRules
from hvd_order.launch.run import run
from hvd_order.planning.report.timeline import draw_timeline
from hvd_order.tools.demo.curve import draw_curve, text_curve
from hvd_order.tools.demo.result import DemoResult, Options
from hvd_order.tools.demo.verdict import LOOPBACK, step_time_table, weight_check

_BLOCK_STEPS = 10
_RECORDED_STEPS = 5
_SEQUENCES_A_RANK = 4
# Fixed, so that both systems train alike from the first step on. The model has 12 MiB of gradients:
# with this credit some slices wait for their turn, and the picture shows an order.
_SHOWN = {"HVD_ORDER_SLICE_BYTES": "2MiB", "HVD_ORDER_CREDIT_BYTES": "4MiB"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo.

    Args:
        argv: command-line arguments without the program's name; ``sys.argv`` by default.

    Returns:
        Exit code: 0 when both systems reached the same weights, 1 when not; a worker's when it
        failed, 130 after Ctrl-C.
    """
    arguments = _parser().parse_args(argv)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    options = training(arguments.steps or (30 if arguments.quick else 200), out)
    begin_s = time.monotonic()
    code = run(
        LaunchRequest(
            command=[sys.executable, "-m", "hvd_order.tools.demo.worker", options.to_json()],
            process_count=arguments.np,
            env=shown(),
            output=OutputRules(prefix=False),
        )
    )
    if code != 0:
        return code
    same = report(options, out, LOOPBACK)
    print(f"\ntook {time.monotonic() - begin_s:.0f} s")
    return 0 if same else 1


def report(options: Options, out: Path, caveat: str) -> bool:
    """Prints tables and checks of a training that has ended, and draws its pictures.

    Args:
        options: of the workers.
        out: folder for the pictures.
        caveat: what the step times do not show.

    Returns:
        Whether both systems reached the same weights.
    """
    result, trace = DemoResult.read(Path(options.result_path)), Path(options.trace_path)
    curves = dict(zip(result.systems, result.train_loss, strict=True))
    checks, same = weight_check(result)
    for lines in (text_curve(curves), step_time_table(result, caveat), checks):
        print("", *lines, sep="\n")
    draw_curve(curves, out / "loss.png")
    print(f"\nloss curve  {out / 'loss.png'}")
    draw_timeline(trace, out / "timeline.png")
    print(f"timeline    {out / 'timeline.png'}")
    print(f"trace       {trace}  (open it at https://ui.perfetto.dev)")
    print(f"numbers     {out / 'result.json'}", flush=True)
    return same


def training(steps: int, out: Path) -> Options:
    """What the workers do, with results in the folder `out`."""
    return Options(
        steps=steps,
        block=_BLOCK_STEPS,
        recorded=_RECORDED_STEPS,
        sequences_a_rank=_SEQUENCES_A_RANK,
        trace_path=str(out / "trace.json"),
        result_path=str(out / "result.json"),
    )


def shown() -> dict[str, str]:
    """Environment variables of the workers; what the user has set stays."""
    return {name: os.environ.get(name, value) for name, value in _SHOWN.items()}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hvd-order demo",
        description="Trains a small GPT on local workers with plain DDP and with hvd_order, in "
        "turns, and compares step times and weights.",
    )
    parser.add_argument(
        "--steps", type=_at_least(2 * _RECORDED_STEPS), help="training steps of each system"
    )
    parser.add_argument("--np", type=_at_least(2), default=2, help="number of workers (default 2)")
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder for pictures (default out)"
    )
    parser.add_argument("--quick", action="store_true", help="30 steps, a first look")
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return number
