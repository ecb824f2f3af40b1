"""The metrics, the place that offers them, and the dashboard that shows them."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from helpers.step_reports import stats_of

import hvd_order.watch.metrics
from hvd_order.base.account.step_stats import StepStats
from hvd_order.base.config import Config
from hvd_order.base.config.metrics_place import MetricsPlace, metrics_place
from hvd_order.base.errors import InvalidUsage
from hvd_order.watch.metrics.names import METRICS

DASHBOARD = Path(hvd_order.watch.metrics.__file__).with_name("grafana.json")
GUIDE = Path(__file__).parents[3] / "docs/guides/monitoring.md"

# Text, or computable from others: no metric.
NO_METRIC = {"way", "slow_detail", "without_s"}


def test_every_number_of_the_account_is_a_metric_or_left_out_on_purpose() -> None:
    read: set[str] = set()

    class Read(StepStats):
        def __getattribute__(self, name: str) -> object:
            read.add(name)
            return super().__getattribute__(name)

    recording = Read(**dataclasses.asdict(stats_of(0)))
    for metric in METRICS:
        metric.samples(recording)
    fields = {field.name for field in dataclasses.fields(StepStats)}
    assert read & fields == fields - NO_METRIC


def test_names_end_with_base_units() -> None:
    for metric in METRICS:
        unit = metric.name.rpartition("_")[2]
        assert unit in {"seconds", "bytes", "ratio", "total", "rank"}
        assert (unit == "total") == (metric.kind == "counter")
        assert metric.help.endswith(".")


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    shown = set(re.findall(r"hvd_order_\w+", DASHBOARD.read_text()))
    dashboard = json.loads(DASHBOARD.read_text())
    shown -= {*dashboard["tags"]}
    assert shown == {metric.full_name for metric in METRICS}
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("9400", MetricsPlace(port=9400)),
        ("0", MetricsPlace(port=0)),
        ("0.0.0.0:9400", MetricsPlace(host="0.0.0.0", port=9400)),
        ("[::]:9400", MetricsPlace(host="::", port=9400)),
        ("file:/var/metrics", MetricsPlace("/var/metrics")),
        ("file:///var/metrics", MetricsPlace("/var/metrics")),
    ],
)
def test_places(text: str, place: MetricsPlace) -> None:
    assert metrics_place(text) == place
    assert Config.from_environment({"HVD_ORDER_METRICS": text}).metrics == text


@pytest.mark.parametrize("text", ["host", "70000", "file:here", ":9400", "a b:1", "::1:9400"])
def test_what_is_no_place_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidUsage, match="HVD_ORDER_METRICS: expected a port"):
        Config.from_environment({"HVD_ORDER_METRICS": text})


def test_each_rank_of_a_host_has_the_next_port() -> None:
    assert [metrics_place("9400").port_of(rank) for rank in range(3)] == [9400, 9401, 9402]
    assert metrics_place("0").port_of(3) == 0
    with pytest.raises(ValueError, match="above 65535"):
        metrics_place("65535").port_of(1)
