"""Options of ``hvd-order predict``, and what it prints."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hvd_order.base.errors import InvalidUsage
from hvd_order.planning.cli.network_options import as_option
from hvd_order.planning.files.profile import Profile, read_profile
from hvd_order.planning.predict.units import parse_duration, parse_rate, time_text
from hvd_order.planning.report.output import (
    Output,
    add_json_option,
    add_output_options,
    write_json,
)
from hvd_order.planning.report.server_costs import (
    NOT_APART,
    calibration_text,
    cost_text,
    job_text,
    link_text,
)

if TYPE_CHECKING:
    from hvd_order.planning.predict.workers.throughput import Cluster
    from hvd_order.servers.costs import Cost, ServerCosts

__all__ = ["add_options", "main"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options to the sub-command's parser."""
    add = parser.add_argument
    add("profile", type=Path, help="file that hvd-order profile wrote, of one worker")
    add("--workers", default="1-16", metavar="N", help="1,2,4 or 1-64 (default: %(default)s)")
    add("--servers", metavar="N", help="parameter servers, the same way (default: 1)")
    add("--mode", choices=["allreduce", "sync", "async"],
        help="no servers; servers that apply the gradients of a step together; or each at once "
        "(default: as options tell, or as the profile was recorded; else allreduce)")  # fmt: skip
    add("--bandwidth", type=as_option(parse_rate), metavar="RATE",
        help="of each worker's link, each way, as payload gets it: 10gbit, 1.2GB/s (default: as "
        "measured by hvd-order profile --servers)")  # fmt: skip
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
        help="tensors travel in slices of at most N bytes (default: as hvd_order chooses for the "
        "link; tensorflow: whole)")  # fmt: skip
    add("--staleness", type=int, metavar="N",
        help="async: a worker waits while the slowest is more than N steps behind")  # fmt: skip
    add("--delay-bound", type=int, metavar="N",
        help="async: no update is applied more than N updates after the one that its worker had "
        "read; what would come later is not sent (HVD_ORDER_PS_DELAY_BOUND)")  # fmt: skip
    add("--aggregate", action="store_true", default=None,
        help="with a delay bound: servers add up several workers' updates for one another where "
        "that is faster (HVD_ORDER_PS_AGGREGATE)")  # fmt: skip
    add("--update-rate", type=as_option(parse_rate), metavar="RATE",
        help="at which a server applies gradients: 2GB/s (default: as measured, or at once)"
        )  # fmt: skip
    add("--copy-rate", type=as_option(parse_rate), metavar="RATE",
        help="at which a connection's ends parse and copy: 1GB/s (default: as measured, or at "
        "once)")  # fmt: skip
    add("--batch", type=int, metavar="N", help="samples a step of one worker")
    add("--price", type=float, metavar="P", help="of a worker or server for an hour")
    add("--seeds", type=int, default=5, metavar="N", help="random draws (default: %(default)s)")
    add_json_option(parser)
    add_output_options(parser)


def main(parsed: argparse.Namespace) -> int:
    """Prints the table, and draws the picture and writes the page that were asked for.

    Raises:
        InvalidUsage: the profile is none, or the options make no sense.
        ImportError: there is no matplotlib for the picture.
        OSError: a file cannot be read or written.
    """
    from hvd_order.base.link.link_model import LinkModel
    from hvd_order.planning.orders.registry import order
    from hvd_order.planning.predict.workers.calibration import calibrate
    from hvd_order.planning.predict.workers.comparison import compare, parse_counts
    from hvd_order.planning.predict.workers.worker_step import WorkerStep, usual_slice_bytes
    from hvd_order.planning.report.throughput import draw_throughput, throughput_report

    workers = parse_counts(parsed.workers, "--workers")
    profile: Profile = read_profile(parsed.profile)
    parsed.mode = parsed.mode or _usual_mode(parsed, profile)
    _refuse_without_effect(parsed)
    servers = parse_counts(parsed.servers or "1", "--servers")
    for name in ("batch", "seeds", "slice_bytes"):
        value = getattr(parsed, name)
        if value is not None and value < 1:
            raise InvalidUsage(f"--{name.replace('_', '-')} is {value}; at least 1 is needed")
    graph = profile.graph("median")
    cluster, link, sources = _cluster(parsed, profile.servers)
    priorities = None
    if parsed.order is not None:
        priorities = order(parsed.order, graph, LinkModel(0.0, 0.0, 1 / cluster.worker_bytes_per_s))
    usual = functools.partial(
        usual_slice_bytes, profile.parameters, cluster.slower_bytes_per_s, parsed.latency
    )
    chooses = parsed.slice_bytes is None and parsed.system != "tensorflow"
    slice_bytes = usual() if chooses else parsed.slice_bytes
    costs = _of_system(profile.servers, parsed)
    strategy = None if costs is None else costs.strategy
    step = WorkerStep.from_profile(
        profile,
        priorities=priorities,
        slice_bytes=slice_bytes,
        fetch_orders=None if strategy is None else strategy.fetch_orders,
    )
    found = None if costs is None else calibrate(step, costs, parsed.latency)
    if found is not None:
        step = found.step
        sources.append(calibration_text(found))
    rows = compare(
        step, graph, cluster, workers, servers, parsed.mode, parsed.seeds,
        usual if chooses and parsed.mode == "sync" else None,
    )  # fmt: skip
    if parsed.json:
        write_json({"model": profile.model, "throughput": [
            {**asdict(row.found), "coded_steps_per_s": row.coded} for row in rows
        ]})  # fmt: skip
        return 0
    report = throughput_report(profile.model, rows, parsed.batch, parsed.price, link, sources)
    draw = functools.partial(draw_throughput, report.title, rows, parsed.batch)
    Output(parsed.png, parsed.html).write(report, draw, "throughput by workers")
    return 0


_OF_SERVERS = ("servers", "server_bandwidth", "system", "transmission", "order", "slice_bytes",
               "staleness", "delay_bound", "aggregate", "update_rate", "copy_rate")  # fmt: skip
_OF_ASYNC = ("staleness", "delay_bound", "aggregate")


def _usual_mode(parsed: argparse.Namespace, profile: Profile) -> str:
    """The mode for a command that names none."""
    given = {name for name in _OF_SERVERS if getattr(parsed, name) is not None}
    if given.intersection(_OF_ASYNC) or parsed.system == "tensorflow":
        return "async"
    if profile.servers is not None:
        return profile.servers.mode
    return "sync" if given else "allreduce"


def _refuse_without_effect(parsed: argparse.Namespace) -> None:
    """Refuses options that another one leaves without effect."""
    given = [f"--{n.replace('_', '-')}" for n in _OF_SERVERS if getattr(parsed, n) is not None]
    if parsed.mode == "allreduce" and given:
        raise InvalidUsage(f"{given[0]} is for parameter servers: --mode async or sync")
    if parsed.aggregate and parsed.delay_bound is None:
        raise InvalidUsage("--aggregate needs --delay-bound: without one, workers do not ask where "
                           "to push")  # fmt: skip
    if parsed.delay_bound is not None and parsed.system == "tensorflow":
        raise InvalidUsage("--delay-bound is for hvd_order's servers, not for --system tensorflow")
    way = parsed.transmission or ("round_robin" if parsed.system == "tensorflow" else "ordered")
    if parsed.order is not None and way != "ordered":
        raise InvalidUsage(f"--order has no effect with --transmission {way}")


def _cluster(
    parsed: argparse.Namespace, measured: ServerCosts | None
) -> tuple[Cluster, str, list[str]]:
    """The cluster that the options and the profile describe; options win.

    Returns:
        The cluster, its links in words, and sentences on where the numbers come from.

    Raises:
        InvalidUsage: the bandwidth is neither given nor measured.
    """
    from hvd_order.planning.predict.workers.throughput import Cluster
    from hvd_order.planning.predict.workers.transmission import policy

    tensorflow = parsed.system == "tensorflow"
    bandwidth, at_least = _bandwidth(parsed, measured)
    costs = _of_system(measured, parsed)
    update, worker_end, server_end = _costs(parsed, costs)
    strategy = None if costs is None else costs.strategy
    asks_s = parsed.latency + (0.0 if strategy is None else strategy.between_s)
    way = replace(
        policy(parsed.transmission or ("round_robin" if tensorflow else "ordered")),
        latency_s=parsed.latency,
    )
    cluster = Cluster(
        bandwidth,
        parsed.server_bandwidth,
        replace(way, latency_s=asks_s, receive_s_per_byte=worker_end[1], receive_s=worker_end[0]),
        replace(way, receive_s_per_byte=server_end[1], receive_s=server_end[0]),
        "request" if tensorflow else "answer",
        "updated" if tensorflow else "computed",
        parsed.staleness,
        parsed.delay_bound,
        bool(parsed.aggregate),
        update_s_per_byte=update[1],
        update_s=update[0],
        placement="in_turn" if tensorflow else "by_size",
    )
    link = f"links of {link_text(bandwidth, at_least)}"
    return cluster, link, list(_sources(parsed, measured, costs))


def _of_system(measured: ServerCosts | None, parsed: argparse.Namespace) -> ServerCosts | None:
    """What was measured of servers such as those that are predicted, or None.

    What the servers of one system do with a tensor says nothing of those of the other one.
    """
    if measured is None or parsed.mode == "allreduce":
        return None
    is_tensorflow = measured.strategy is not None
    return measured if is_tensorflow == (parsed.system == "tensorflow") else None


def _bandwidth(parsed: argparse.Namespace, measured: ServerCosts | None) -> tuple[float, bool]:
    """Bytes/s of a worker's link, and whether it is only known to be at least that."""
    if parsed.bandwidth is not None:
        return parsed.bandwidth, False
    if measured is None:
        raise InvalidUsage(
            "the profile has no link to servers, so --bandwidth must be given, for example "
            "--bandwidth 10gbit; or record it with hvd-order profile --servers 1"
        )
    link = measured.link()
    if link is None:
        raise InvalidUsage(
            "the profile cannot tell the bandwidth, because the recorded slices are too small to "
            "time; give --bandwidth, for example --bandwidth 10gbit"
        )
    return link


_Seconds = tuple[float, float]  # of a slice, and of a byte of it


def _costs(
    parsed: argparse.Namespace, costs: ServerCosts | None
) -> tuple[_Seconds, _Seconds, _Seconds]:
    """Times of a server's update, a worker's end and a server's end."""

    def given_or(rate: float | None, cost: Cost | None) -> _Seconds:
        if rate is not None:
            return 0.0, 1 / rate
        return (0.0, 0.0) if cost is None else (cost.seconds, cost.seconds_per_byte)

    return (
        given_or(parsed.update_rate, None if costs is None else costs.update),
        given_or(parsed.copy_rate, None if costs is None else costs.worker_end),
        given_or(parsed.copy_rate, None if costs is None else costs.server_end),
    )


def _sources(
    parsed: argparse.Namespace, measured: ServerCosts | None, costs: ServerCosts | None
) -> Iterator[str]:
    """Sentences that say which numbers were measured, given, or neither."""
    names = ("bandwidth", "update_rate", "copy_rate")
    given = [f"--{n.replace('_', '-')}" for n in names if getattr(parsed, n) is not None]
    used = [] if measured is None or parsed.bandwidth is not None else ["the links"]
    taken: list[Cost] = []
    if costs is not None and parsed.update_rate is None:
        used.append(f"updates ({cost_text(costs.update)})")
        taken.append(costs.update)
    has_ends = costs is not None and costs.strategy is None
    if costs is not None and has_ends and parsed.copy_rate is None:
        used.append(f"a server's end of a push ({cost_text(costs.server_end)})")
        used.append(f"a worker's end of an answer ({cost_text(costs.worker_end)})")
        taken += [costs.server_end, costs.worker_end]
    if costs is not None and costs.strategy is not None:
        used.append("the orders in which parameters come")
        used.append(f"{time_text(costs.strategy.between_s)} between two steps")
    if measured is not None and used:
        yield f"From the profile, measured with {job_text(measured)}: {', '.join(used)}."
    if any(not cost.apart for cost in taken):
        yield f"The recorded {NOT_APART}; all of it counts for bytes."
    if measured is not None and given:
        yield f"As given: {', '.join(given)}."
    if parsed.mode == "allreduce":
        return
    free = {"update_rate": "updates"} if costs is None else {}
    if not has_ends:
        free["copy_rate"] = "both ends of a connection"
    left = [what for name, what in free.items() if getattr(parsed, name) is None]
    if left:
        why = "neither measured nor given"
        if measured is not None and costs is None:
            which = [
                "hvd_order's servers, not of TensorFlow's",
                "TensorFlow's servers, not of hvd_order's",
            ]
            why = f"the profile is of {which[measured.strategy is not None]}"
        yield f"No time is counted for {' and '.join(left)}: {why}."
    if costs is not None and costs.updates == "worker" and parsed.update_rate is None:
        yield (
            "The measured servers only summed, so servers that update may take longer; "
            "HVD_ORDER_PS_UPDATE=server hvd-order profile --servers measures those."
        )
