"""Offers a rank's metrics: by an HTTP server of its own, or as a file; by prometheus_client."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

from hvd_order.base.config.metrics_place import MetricsPlace, metrics_place
from hvd_order.base.errors import InvalidUsage
from hvd_order.engine.account.reports import MOST_OPTIMIZERS, StepReport, on_report
from hvd_order.engine.account.watchers import WATCHERS
from hvd_order.engine.job.job import Job
from hvd_order.watch.metrics.names import METRICS, Metric

try:
    import prometheus_client
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.core import Metric as Family
    from prometheus_client.registry import Collector
except ImportError:
    raise InvalidUsage(
        "HVD_ORDER_METRICS needs prometheus_client: pip install 'hvd_order[metrics]', or "
        "pip install prometheus_client, on every host; or unset the variable"
    ) from None

__all__: list[str] = []

_log = logging.getLogger("hvd_order")


class _RankMetrics(Collector):
    """The metrics of one rank: those of the newest report of each of its optimizers."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._host = socket.gethostname()
        self._newest: dict[str, StepReport] = {}
        self._lock = threading.Lock()

    def take(self, report: StepReport) -> None:
        """Replaces the report of this optimizer."""
        with self._lock:
            self._newest.pop(report.key, None)
            self._newest[report.key] = report
            while len(self._newest) > MOST_OPTIMIZERS:  # the others have ended long ago
                self._newest.pop(next(iter(self._newest)))

    def collect(self) -> Iterator[Family]:
        """Yields the metrics; each has its samples of all optimizers."""
        with self._lock:
            newest = dict(self._newest)
        for metric in METRICS:
            told = {
                key: report
                for key, report in newest.items()
                if not metric.of_rank_0 or report.ranks[0] == self._rank
            }
            if told:
                yield self._family(metric, told, several=len(newest) > 1)

    def _family(self, metric: Metric, told: dict[str, StepReport], several: bool) -> Family:
        own = [metric.label] if metric.label else []
        kind: Any = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        labels = ["rank", "host", *(["optimizer"] if several else []), *own]
        family: Any = kind(metric.full_name, metric.help, labels=labels)
        for key, report in told.items():
            rank = [str(self._rank), self._host, *([key] if several else [])]
            for value_of_label, value in metric.samples(report.mine).items():
                family.add_metric([*rank, *([value_of_label] if own else [])], value)
        made: Family = family
        return made


def _begin(job: Job) -> None:
    assert job.config.metrics is not None
    place = metrics_place(job.config.metrics)
    metrics = _RankMetrics(job.rank)
    registry = prometheus_client.CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    if place.folder:
        _write_files(job, place.folder, metrics, registry)
        return
    end_server = _serve(job, place, registry)
    remove = on_report(metrics.take)

    def end() -> None:
        remove()
        end_server()

    job.on_shutdown(end)


def _serve(job: Job, place: MetricsPlace, registry: Any) -> Any:
    """Starts the server; returns what ends it."""
    try:
        port = place.port_of(job.local_rank)
        server, thread = prometheus_client.start_http_server(port, place.host, registry)
    except (OSError, ValueError) as error:
        raise InvalidUsage(
            f"HVD_ORDER_METRICS={job.config.metrics}: rank {job.rank} on {socket.gethostname()} "
            f"cannot offer its metrics ({error}): another program, or another job, has the port, "
            "or the host is none of this machine's addresses. Name others: the ranks of a host "
            "take one port each, from the named one on; 0 takes any free one"
        ) from None
    shown = f"[{place.host}]" if ":" in place.host else place.host
    _log.info("metrics of rank %d: http://%s:%d/metrics", job.rank, shown, server.server_port)

    def end() -> None:
        if job.is_forked:
            return  # the thread that would answer is the parent's
        server.shutdown()
        # Processes that were forked meanwhile (loaders) have the socket as well: nobody listens.
        with contextlib.suppress(OSError):
            server.socket.shutdown(socket.SHUT_RDWR)
        server.server_close()
        thread.join()

    return end


def _write_files(job: Job, folder: str, metrics: _RankMetrics, registry: Any) -> None:
    path = os.path.join(folder, f"hvd_order_rank{job.rank}.prom")
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise InvalidUsage(
            f"HVD_ORDER_METRICS={job.config.metrics}: rank {job.rank} on {socket.gethostname()} "
            f"cannot write into {folder}; make it, and name it to node_exporter, too: "
            "--collector.textfile.directory"
        )

    def take(report: StepReport) -> None:
        metrics.take(report)
        prometheus_client.write_to_textfile(path, registry)  # by a draft of another name

    remove = on_report(take)

    def end() -> None:
        remove()
        with contextlib.suppress(FileNotFoundError):  # a job of no reports
            os.unlink(path)  # else the collector shows the last values for ever

    job.on_shutdown(end)


WATCHERS.register("metrics", _begin)
