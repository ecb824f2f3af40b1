"""Measurements of others: how far a fit to few nodes carries."""

from __future__ import annotations

import csv
import math
import os
import statistics
from dataclasses import asdict, replace
from operator import itemgetter

import pytest

from hvd_order.base.errors import InvalidUsage
from hvd_order.cluster.workloads.applications import APPLICATIONS, MeasuredSpeed
from hvd_order.cluster.workloads.load import DATA
from hvd_order.planning.predict.measurements.ring import Ring
from hvd_order.planning.predict.workers.closed_forms import Pollux
from hvd_order.planning.predict.workers.fit import fit_pollux, fit_step_time

SHIPPED = os.path.join(DATA, "pollux-measurements.csv")


def measured(application: str) -> list[tuple[float, int, int, float]]:
    """(batch a worker, workers, nodes, seconds a step), as shipped."""
    columns = ("local_bsz", "num_replicas", "num_nodes", "step_time")
    with open(SHIPPED, encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["application"] == application]
    return [(float(b), int(w), int(n), float(s)) for b, w, n, s in map(itemgetter(*columns), rows)]


def test_step_time_by_hand() -> None:
    # Gradients 0.02 + 0.002 x 32 = 0.084 s; exchange 0.05 + 0.004 x 3 / 2 = 0.056 s.
    formula = Ring(0.02, 0.002, 0.05, 0.004, 2.0, al=0.01, bl=0.003)
    assert formula.step_s(32, 4, 2) == pytest.approx((0.084**2 + 0.056**2) ** 0.5)
    assert formula.step_s(32, 4, 1) == pytest.approx((0.084**2 + 0.019**2) ** 0.5)
    assert formula.step_s(32, 1, 1) == pytest.approx(0.084)


def test_fit_needs_a_worker_alone() -> None:
    with pytest.raises(InvalidUsage, match="one worker"):
        fit_step_time(Ring, [(8.0, 2, 2, 0.5)])


@pytest.mark.parametrize("nodes", [(3, 4), (6, 16)])
@pytest.mark.parametrize("application", APPLICATIONS)
def test_two_nodes_tell_of_more_and_better_than_a_linear_term(
    application: str, nodes: tuple[int, int]
) -> None:
    rows = measured(application)
    few = [row for row in rows if row[2] <= 2]
    rest = [row for row in rows if nodes[0] <= row[2] <= nodes[1]]
    ring, linear = (
        statistics.median(
            abs(formula.step_s(batch, workers, nodes) / step_s - 1)
            for batch, workers, nodes, step_s in rest
        )
        for formula in (fit_step_time(Ring, few), fit_pollux(few))
    )
    assert ring < 0.6 * linear
    assert ring < (0.36 if nodes[1] == 4 else 0.17)


@pytest.mark.parametrize("form", [Pollux, Ring])
@pytest.mark.parametrize("application", APPLICATIONS)
def test_no_term_of_a_fit_can_be_changed_for_the_better(
    application: str, form: type[Pollux]
) -> None:
    rows = measured(application)
    fitted = fit_step_time(form, rows)

    def squares(formula: Pollux) -> float:
        return sum(
            math.log(formula.step_s(batch, workers, nodes) / step_s) ** 2
            for batch, workers, nodes, step_s in rows
        )

    least = squares(fitted)
    for name, value in asdict(fitted).items():
        for factor in (0.99, 1.01):
            if name != "gamma" or 1 <= factor * value <= 10:
                assert squares(replace(fitted, **{name: factor * value})) >= least * (1 - 1e-6)


@pytest.mark.parametrize("application", APPLICATIONS)
def test_constants_are_those_of_the_shipped_measurements(application: str) -> None:
    rows = measured(application)
    fitted, kept = fit_step_time(Ring, rows), APPLICATIONS[application].formula
    for batch, workers, nodes, _ in rows:
        assert kept.step_s(batch, workers, nodes) == pytest.approx(
            fitted.step_s(batch, workers, nodes), rel=1e-3
        )


def test_a_share_above_a_worker_s_memory_takes_passes() -> None:
    # 0.1 s a pass and 0.4 s an exchange; 64 samples for each of two workers, 32 a pass.
    speed = MeasuredSpeed(Ring(0.1, 0.0, 0.4, 0.0, 1.0), most_local=32)
    assert speed.samples_per_s(2, 0, 2, 64) == pytest.approx(64 / 0.5)
    assert speed.samples_per_s(2, 0, 2, 128) == pytest.approx(128 / 0.6)
