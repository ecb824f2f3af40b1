"""Metrics as Prometheus and node_exporter get them from the ranks of a job."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.flags import raise_flag, wait_until
from helpers.ranks import Script, free_port, run_script, start_script
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain_text

import hvd_order.watch.metrics
from hvd_order.watch.metrics.names import METRICS

DASHBOARD = Path(hvd_order.watch.metrics.__file__).with_name("grafana.json")

# Publishes as the account does, until the test has seen enough.
PUBLISHES = """
import logging, sys
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
import hvd_order.torch as hvd
from helpers.flags import await_flag
from helpers.step_reports import report_of
from hvd_order.engine.account.reports import publish
hvd.init()
publish(report_of(hvd.rank(), hvd.size()))
print("published", flush=True)
await_flag(sys.argv[1], 100)
if sys.argv[2:]:
    publish(report_of(hvd.rank(), hvd.size(), steps=30, key=sys.argv[2]))
    print("published twice", flush=True)
    await_flag(sys.argv[1] + "2", 100)
hvd.shutdown()
print("left", flush=True)
await_flag(sys.argv[1] + "3", 100)
"""


def get(url: str, accept: str = "") -> str:
    request = urllib.request.Request(url, headers={"Accept": accept} if accept else {})
    with urllib.request.urlopen(request, timeout=20) as answer:
        text: str = answer.read().decode()
        return text


def two_free_ports() -> int:
    """The first of two neighbours."""
    while True:
        port = free_port()
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port + 1)) != 0:
                return port


@pytest.mark.timeout(200)
def test_a_server_at_any_port_and_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "textfile"
    folder.mkdir()
    go = tmp_path / "go"

    def env(rank: int) -> dict[str, str]:
        return {"HVD_ORDER_METRICS": "0" if rank == 0 else f"file:{folder}"}

    file = folder / "hvd_order_rank1.prom"
    with start_script(2, PUBLISHES, str(go), "another", env=env) as script:
        for rank in range(2):
            script.wait_for_output(rank, "published\n")
        address = script.stdout(0).split("metrics of rank 0: ")[1].split()[0]
        assert address.startswith("http://127.0.0.1:")

        served = get(address, "application/openmetrics-text; version=1.0.0")
        families = {family.name: family for family in openmetrics(served)}
        names = {name.removesuffix("_total") for name in (m.full_name for m in METRICS)}
        assert set(families) == names
        host = socket.gethostname()
        exposed = families["hvd_order_exposed_seconds"].samples
        assert {sample.labels["cause"]: sample.value for sample in exposed} == {
            "late": 0.125, "queue": 0.0625, "transfer": 0.03125,
        }  # fmt: skip
        (slow,) = families["hvd_order_slow_rank"].samples
        assert slow.labels == {"rank": "0", "host": host, "cause": "loader"}
        assert slow.value == 1
        (steps,) = families["hvd_order_steps"].samples
        assert (steps.name, steps.labels) == (
            "hvd_order_steps_total", {"rank": "0", "host": host},
        )  # fmt: skip
        assert "/data" not in served  # details may be paths or names of other hosts

        written = {family.name: family for family in plain_text(file.read_text())}
        of_all = {metric.full_name for metric in METRICS if not metric.of_rank_0}
        assert set(written) == {name.removesuffix("_total") for name in of_all}
        (step,) = written["hvd_order_step_seconds"].samples
        assert (step.labels, step.value) == ({"rank": "1", "host": host}, 0.6)

        raise_flag(go)  # a second optimizer: the label that tells them apart appears
        for rank in range(2):
            script.wait_for_output(rank, "published twice\n")
        families = {f.name: f for f in openmetrics(get(address, "application/openmetrics-text"))}
        steps_by_key = {s.labels["optimizer"]: s.value for s in families["hvd_order_steps"].samples}
        assert steps_by_key == {"SGD 0": 20, "another": 30}

        raise_flag(f"{go}2")
        for rank in range(2):
            script.wait_for_output(rank, "left\n")
        assert not list(folder.iterdir())  # else the last values would stay
        with pytest.raises(OSError, match="refused"):
            get(address)
        raise_flag(f"{go}3")
        assert [end.returncode for end in script.wait()] == [0, 0]


INIT = """
import hvd_order.torch as hvd
from hvd_order.base.errors import InvalidUsage
try:
    hvd.init()
except InvalidUsage as error:
    print(error)
"""


def test_what_cannot_be_offered_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (end,) = run_script(1, INIT, env={"HVD_ORDER_METRICS": str(port)})
        assert f"HVD_ORDER_METRICS={port}: rank 0" in end.stdout
        assert "0 takes any free one" in end.stdout
    (end,) = run_script(1, INIT, env={"HVD_ORDER_METRICS": f"file:{tmp_path}/none"})
    assert f"cannot write into {tmp_path}/none; make it" in end.stdout
    without = "import sys; sys.modules['prometheus_client'] = None\n" + INIT
    (end,) = run_script(1, without, env={"HVD_ORDER_METRICS": "0"})
    assert "pip install 'hvd_order[metrics]'" in end.stdout


class Prometheus:
    """A server that scrapes two ranks."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[dict[str, Any]]:
        """What an instant query answers."""
        query = urllib.parse.urlencode({"query": expression})
        answer = json.loads(get(f"{self.url}/api/v1/query?{query}"))
        assert answer["status"] == "success", answer
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result


@pytest.fixture
def scraped(tmp_path: Path) -> Iterator[Prometheus]:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("Prometheus is not installed: apt install prometheus")
    port, own = two_free_ports(), free_port()
    config = tmp_path / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s}\nscrape_configs:\n- job_name: training\n  static_configs:\n"
        f"  - targets: ['127.0.0.1:{port}', '127.0.0.1:{port + 1}']\n"
    )
    go, log = tmp_path / "go", tmp_path / "log"
    command = [
        program, f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{own}",
    ]  # fmt: skip
    script: Script
    with (
        start_script(2, PUBLISHES, str(go), env={"HVD_ORDER_METRICS": str(port)}) as script,
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=output, cwd=tmp_path) as server,
    ):
        try:
            for rank in range(2):
                script.wait_for_output(rank, "published\n")
            prometheus = Prometheus(f"http://127.0.0.1:{own}")

            def sees_both() -> bool:
                try:
                    # rate() needs two samples.
                    counted = prometheus.query("count_over_time(hvd_order_steps_total[1m]) > 1")
                except OSError:
                    return False
                return len(counted) == 2

            wait_until(sees_both, lambda: f"both are scraped\n{log.read_text()}", 60)
            yield prometheus
            raise_flag(go)
            raise_flag(f"{go}3")
            assert [end.returncode for end in script.wait()] == [0, 0]
        finally:
            server.terminate()


@pytest.mark.timeout(200)
def test_prometheus_has_all_ranks_and_all_that_the_dashboard_shows(scraped: Prometheus) -> None:
    steps = {
        answer["metric"]["rank"]: float(answer["value"][1])
        for answer in scraped.query('hvd_order_step_seconds{job="training"}')
    }
    assert steps == {"0": 0.5, "1": 0.6}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    for expression in (target["expr"] for panel in panels for target in panel["targets"]):
        assert scraped.query(expression.replace("$job", ".*")), expression
