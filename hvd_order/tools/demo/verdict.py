"""Tables and checks of the demo's numbers, as lines of text."""

from __future__ import annotations

from math import comb
from statistics import median

from hvd_order.tools.demo.result import DemoResult

TOLERANCE = 1e-4
"""Accepted difference of the two systems' final weights, relative to each tensor's largest weight.

Both compute the same sums in float32; only the order of additions may differ (with two ranks not
even that), and AdamW's division by small second moments enlarges such differences step by step.
"""


LOOPBACK = (
    "No gain is to be expected here: on one machine the network is not the bottleneck. This run\n"
    "shows that the result is equal, and the order of the transfers in the timeline. Gains need a\n"
    "network that takes about as long as the computation."
)
SHARED_CORES = (
    "The model computes on the same cores that move the bytes, so this ratio says little about\n"
    "training on accelerators. What counts here: the result is equal."
)


def step_time_table(result: DemoResult, caveat: str) -> list[str]:
    """Step times of both systems and the ratio within pairs of neighbouring blocks.

    Args:
        caveat: closes the table: what the numbers do not show.
    """
    plain, ordered = result.step_ms
    first, second = result.systems
    ratios = [theirs / mine for mine, theirs in zip(plain, ordered, strict=True)]
    if not ratios:
        return ["step time: too few steps for a measurement"]
    lines = [
        f"step time, ms: mean of a block of {result.block_steps} steps, "
        f"{len(ratios)} blocks each, in turns",
        f"{'':<22}{'median':>9}{'min':>9}{'max':>9}",
        _row(first, plain, 1),
        _row(second, ordered, 1),
        _row(f"{second} / {first}", ratios, 3),
    ]
    return lines + _reading(ratios) + [caveat]


def weight_check(result: DemoResult) -> tuple[list[str], bool]:
    """Whether both systems reached the same weights; lines to print and the verdict."""
    close = result.largest_difference <= TOLERANCE
    verdict = "same" if close else "DIFFERENT"
    lines = [
        f"final weights: {verdict}; largest relative difference "
        f"{result.largest_difference:.1e}, tolerance {TOLERANCE:.0e}"
        + (" (bitwise equal)" if result.largest_difference == 0 else "")
    ]
    for name, equal in zip(result.systems, result.ranks_equal, strict=True):
        say = "bitwise equal" if equal else "NOT EQUAL"
        lines.append(f"  {name}: {say} on all {result.size} ranks")
    losses = zip(result.systems, result.validation_loss, strict=True)
    values = ", ".join(f"{name} {loss:.4f}" for name, loss in losses)
    lines.append(f"validation loss: {values} nats a byte")
    return lines, close and all(result.ranks_equal)


def _row(name: str, values: list[float], digits: int) -> str:
    cells = (median(values), min(values), max(values))
    return f"{name:<22}" + "".join(f"{value:>9.{digits}f}" for value in cells)


def _reading(ratios: list[float]) -> list[str]:
    interval = median_interval(ratios)
    if interval is None:
        return [f"{len(ratios)} pair(s) of blocks are too few to tell the two apart."]
    low, high = interval
    middle = f"median ratio {median(ratios):.3f}, 95 % interval {low:.3f} to {high:.3f}"
    if low <= 1 <= high:
        return [f"No difference shown ({middle})."]
    which = "longer" if low > 1 else "shorter"
    return [f"hvd_order's steps were {which} here ({middle})."]


def median_interval(values: list[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Interval that holds the true median, whatever the distribution of the values.

    Args:
        values: independent measurements.
        confidence: chance that the interval holds the median, at least.

    Returns:
        Lowest and highest, or None when there are too few values (fewer than 6 at 95 %).

    Source:
        Order statistics: the number of values below the median is binomial with p = 1/2, so the
        k-th smallest and k-th largest enclose it unless fewer than k values lie on one side.
    """
    ordered = sorted(values)
    best: tuple[float, float] | None = None
    missed = 0.0
    for k in range((len(ordered) + 1) // 2):
        missed += 2 * comb(len(ordered), k) / 2 ** len(ordered)
        if missed > 1 - confidence:
            break
        best = ordered[k], ordered[-1 - k]
    return best
