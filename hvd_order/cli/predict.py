"""Options of ``hvd-order predict``, and what it prints."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hvd_order.cli.network_options import as_option
from hvd_order.errors import InvalidUsage
from hvd_order.plan.files.profile import Profile, read_profile
from hvd_order.predict.units import parse_duration, parse_rate, rate_text
from hvd_order.report.drawing import save

if TYPE_CHECKING:
    from hvd_order.predict.workers.throughput import Cluster

__all__ = ["add_options", "main"]

_SLICE_BYTES = 4 << 20


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options to the sub-command's parser."""
    add = parser.add_argument
    add("profile", type=Path, help="file that hvd-order profile wrote, of one worker")
    add("--workers", default="1-16", metavar="N", help="1,2,4 or 1-64 (default: %(default)s)")
    add("--servers", metavar="N", help="parameter servers, the same way (default: 1)")
    add("--mode", choices=["async", "sync", "allreduce"], default="async",
        help="servers apply each gradient at once, or those of a step together; or no servers "
        "(default: %(default)s)")  # fmt: skip
    add("--bandwidth", type=as_option(parse_rate), metavar="RATE", required=True,
        help="of each worker's link, each way, as payload gets it: 10gbit, 1.2GB/s")  # fmt: skip
    add("--server-bandwidth", type=as_option(parse_rate), metavar="RATE",
        help="of each server's link (default: the same)")  # fmt: skip
    add("--latency", type=as_option(parse_duration), default=50e-6, metavar="TIME",
        help="of one message: 50us, 0.2ms (default: 50us)")  # fmt: skip
    add("--system", choices=["hvd_order", "tensorflow"],
        help="who asks for parameters: nobody, servers send them when they have applied a gradient "
        "(hvd_order); the worker when its step begins, which waits for its updates (TensorFlow's "
        "ParameterServerStrategy) (default: %(default)s)")  # fmt: skip
    add("--transmission", metavar="POLICY",
        help="ordered, fifo, round_robin (HTTP/2, 4 MiB a turn), round_robin_cold (65,535 bytes) "
        "(default: ordered, tensorflow: round_robin)")  # fmt: skip
    add("--order", metavar="NAME",
        help="order of an ordered transmission: tic, tac, search, ... (default: consumption)"
        )  # fmt: skip
    add("--slice-bytes", type=int, metavar="N",
        help="tensors travel in pieces of at most N bytes (default: 4 MiB; tensorflow: whole)"
        )  # fmt: skip
    add("--staleness", type=int, metavar="N",
        help="async: a worker waits while the slowest is more than N steps behind")  # fmt: skip
    add("--update-rate", type=as_option(parse_rate), metavar="RATE",
        help="at which a server applies gradients: 2GB/s (default: at once)")  # fmt: skip
    add("--copy-rate", type=as_option(parse_rate), metavar="RATE",
        help="at which a connection's ends parse and copy: 1GB/s (default: at once)")  # fmt: skip
    add("--batch", type=int, metavar="N", help="samples a step of one worker")
    add("--price", type=float, metavar="P", help="of a worker or server for an hour")
    add("--seeds", type=int, default=5, metavar="N", help="random draws (default: %(default)s)")
    add("--png", type=Path, metavar="FILE", help="a picture; needs matplotlib")
    add("--html", type=Path, metavar="FILE", help="a page with text and picture")


def main(parsed: argparse.Namespace) -> int:
    """Prints the table, and draws the picture and writes the page that were asked for.

    Raises:
        InvalidUsage: the profile is none, or the options make no sense.
        ImportError: there is no matplotlib for the picture.
        OSError: a file cannot be read or written.
    """
    from hvd_order.plan.link.link_model import LinkModel
    from hvd_order.plan.orders.registry import order
    from hvd_order.predict.workers.comparison import compare, parse_counts
    from hvd_order.predict.workers.worker_step import WorkerStep
    from hvd_order.report.throughput import draw_throughput, throughput_report
    from hvd_order.report.what_if import page_of, text_of

    workers = parse_counts(parsed.workers, "--workers")
    _refuse_without_effect(parsed)
    servers = parse_counts(parsed.servers or "1", "--servers")
    for name in ("batch", "seeds", "slice_bytes"):
        value = getattr(parsed, name)
        if value is not None and value < 1:
            raise InvalidUsage(f"--{name.replace('_', '-')} is {value}; at least 1 is needed")
    profile: Profile = read_profile(parsed.profile)
    graph = profile.graph("median")
    priorities = None
    if parsed.order is not None:
        priorities = order(parsed.order, graph, LinkModel(0.0, 0.0, 1 / parsed.bandwidth))
    whole = parsed.system == "tensorflow"
    slice_bytes = parsed.slice_bytes or (None if whole else _SLICE_BYTES)
    step = WorkerStep.from_profile(profile, priorities=priorities, slice_bytes=slice_bytes)
    rows = compare(step, graph, _cluster(parsed), workers, servers, parsed.mode, parsed.seeds)
    link = f"links of {rate_text(parsed.bandwidth)}"
    report = throughput_report(profile.model, rows, parsed.batch, parsed.price, link)
    sys.stdout.write(text_of(report))
    if parsed.png is None and parsed.html is None:
        return 0
    figure = draw_throughput(report.title, rows, parsed.batch)
    if parsed.png is not None:
        save(figure, parsed.png)
        sys.stdout.write(f"\n{parsed.png}\n")
    if parsed.html is not None:
        parsed.html.parent.mkdir(parents=True, exist_ok=True)
        parsed.html.write_text(page_of(report, figure, "throughput by workers"), encoding="utf-8")
        sys.stdout.write(f"{parsed.html}\n")
    return 0


def _refuse_without_effect(parsed: argparse.Namespace) -> None:
    """Refuses options that another one leaves without effect."""
    of_servers = ("servers", "server_bandwidth", "system", "transmission", "order", "slice_bytes",
                  "staleness", "update_rate", "copy_rate")  # fmt: skip
    given = [f"--{n.replace('_', '-')}" for n in of_servers if getattr(parsed, n) is not None]
    if parsed.mode == "allreduce" and given:
        raise InvalidUsage(f"{given[0]} is for parameter servers: --mode async or sync")
    way = parsed.transmission or ("round_robin" if parsed.system == "tensorflow" else "ordered")
    if parsed.order is not None and way != "ordered":
        raise InvalidUsage(f"--order has no effect with --transmission {way}")


def _cluster(parsed: argparse.Namespace) -> Cluster:
    from hvd_order.predict.workers.throughput import Cluster
    from hvd_order.predict.workers.transmission import policy

    tensorflow = parsed.system == "tensorflow"
    way = replace(
        policy(parsed.transmission or ("round_robin" if tensorflow else "ordered")),
        latency_s=parsed.latency,
        receive_s_per_byte=0.0 if parsed.copy_rate is None else 1 / parsed.copy_rate,
    )
    return Cluster(
        parsed.bandwidth,
        parsed.server_bandwidth,
        way,
        way,
        "request" if tensorflow else "answer",
        "updated" if tensorflow else "computed",
        parsed.staleness,
        0.0 if parsed.update_rate is None else 1 / parsed.update_rate,
    )
