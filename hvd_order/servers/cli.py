"""``hvd-order serve`` is a parameter server; ``hvd-order servers`` gives orders to a job."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from datetime import timedelta
from typing import Any

from hvd_order.base.config import Config
from hvd_order.base.errors import InvalidUsage

__all__ = ["add_serve_options", "add_servers_options", "serve_main", "servers_main"]


_TOOL_TIMEOUT = timedelta(seconds=10)  # for the store itself


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``hvd-order serve``."""
    parser.add_argument("--workers", type=int, required=True, metavar="N", help="of the job")
    parser.add_argument("--store", metavar="HOST:PORT",
        help="where all meet (default: HVD_ORDER_SERVER_STORE)")  # fmt: skip
    parser.add_argument("--listen", action="store_true",
        help="be the store of the job; for the first server of another launcher's job")  # fmt: skip


def add_servers_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``hvd-order servers``."""
    parser.add_argument("action", choices=["remove"], help="let a server go once it holds nothing")
    parser.add_argument("server", type=int, help="its number")
    parser.add_argument("--store", metavar="HOST:PORT",
        help="where all meet (default: HVD_ORDER_SERVER_STORE)")  # fmt: skip


def _environment(parsed: argparse.Namespace) -> dict[str, str]:
    environ = dict(os.environ)
    if parsed.store is not None:
        environ["HVD_ORDER_SERVER_STORE"] = parsed.store
    return environ


def serve_main(parsed: argparse.Namespace) -> int:
    """Serves until the job ends."""
    from hvd_order.servers.process.process import serve

    if parsed.workers < 1:
        raise InvalidUsage(f"--workers {parsed.workers}: at least one is needed")
    logging.basicConfig(format="%(message)s")
    return serve(parsed.workers, _environment(parsed), parsed.listen)


def servers_main(parsed: argparse.Namespace) -> int:
    """Leaves an order for worker 0, and prints its answer."""
    from hvd_order.servers.access.secret import load_secret
    from hvd_order.servers.process.orders import await_answer, give
    from hvd_order.servers.worker.connections import MeetingPoint

    environ = _environment(parsed)
    config = Config.from_environment(environ)
    if config.server_store is None:
        raise InvalidUsage("say where the job's servers meet: --store HOST:PORT")
    order: dict[str, Any] = {"what": parsed.action, "server": parsed.server}
    key = load_secret(environ)
    meeting = MeetingPoint(config.server_store, min(config.timeout, _TOOL_TIMEOUT))

    def taken() -> None:
        sys.stdout.write(
            f"worker 0 has the order; server {parsed.server} leaves when it holds nothing\n"
        )
        sys.stdout.flush()

    number = give(meeting, key, order)
    sys.stdout.write(await_answer(meeting, key, number, config.timeout, taken) + "\n")
    return 0
