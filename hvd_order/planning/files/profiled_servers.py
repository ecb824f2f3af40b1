"""The part of a profile's file that says what parameter servers cost."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from hvd_order.base.document import Fields
from hvd_order.base.errors import InvalidUsage
from hvd_order.base.link.busy_union import LinkUse
from hvd_order.servers.costs import Cost, ServerCosts, StrategySteps

__all__ = ["costs_from", "document_of"]


def document_of(costs: ServerCosts) -> dict[str, Any]:
    """The content for the file, of plain types."""
    content = asdict(costs)
    if costs.strategy is None:
        del content["strategy"]
    return content


def costs_from(content: Any) -> ServerCosts:
    """Parses what `document_of` made.

    Raises:
        InvalidUsage: a field is missing, unknown or impossible; the message names it.
    """
    fields = Fields(content, '"servers"')
    servers, workers = fields.take("servers", int), fields.take("workers", int)
    if servers < 1 or workers < 1:
        raise InvalidUsage(
            f'"servers" has {servers} servers and {workers} workers; expected 1 or more'
        )
    costs = ServerCosts(
        servers,
        workers,
        fields.choice("mode", ("sync", "async")),
        fields.choice("updates", ("server", "worker")),
        _link_use(fields.take("push", dict), "push"),
        _link_use(fields.take("answer", dict), "answer"),
        _cost(fields.take("update", dict), "update"),
        _cost(fields.take("server_end", dict), "server_end"),
        _cost(fields.take("worker_end", dict), "worker_end"),
        _steps(fields.take("step_s", list)) if fields.has("step_s") else (),
        _strategy(fields.take("strategy", dict)) if fields.has("strategy") else None,
    )
    fields.end()
    return costs


def _link_use(content: Any, name: str) -> LinkUse:
    fields = Fields(content, f'"{name}" of "servers"')
    transfers, size = fields.take("transfers", int), fields.take("size_bytes", int)
    busy_s = fields.take("busy_s", float)
    rate = fields.take("bytes_per_s", float, type(None))
    at_least = fields.flag("at_least")
    fields.end()
    if min(transfers, size) < 0 or not _is_time(busy_s):
        raise InvalidUsage(
            f"{fields.where} has {transfers} transfers of {size} bytes in {busy_s} s; expected "
            "numbers that are not negative"
        )
    if rate is not None and not (math.isfinite(rate) and rate > 0 and busy_s > 0):
        raise InvalidUsage(
            f'{fields.where} has "bytes_per_s": {rate} in {busy_s} s; expected more than 0, or null'
        )
    return LinkUse(transfers, size, busy_s, rate, at_least)


def _steps(content: list[Any]) -> tuple[float, ...]:
    if not all(isinstance(x, (int, float)) and _is_time(x) for x in content):
        raise InvalidUsage(f'"step_s" of "servers" has {content!r}; expected times in seconds')
    return tuple(content)


def _cost(content: Any, name: str) -> Cost:
    fields = Fields(content, f'"{name}" of "servers"')
    seconds, per_byte = fields.take("seconds", float), fields.take("seconds_per_byte", float)
    apart = fields.flag("apart")
    fields.end()
    if not (_is_time(seconds) and _is_time(per_byte)):
        raise InvalidUsage(
            f"{fields.where} has {seconds} s and {per_byte} s per byte; expected times that are "
            "not negative"
        )
    return Cost(seconds, per_byte, apart)


def _strategy(content: Any) -> StrategySteps:
    fields = Fields(content, '"strategy" of "servers"')
    orders, between_s = fields.take("fetch_orders", list), fields.take("between_s", float)
    fields.end()
    if not _is_time(between_s):
        raise InvalidUsage(f"{fields.where} has {between_s} s; expected a time, not negative")
    if not all(isinstance(order, list) and _are_numbers(order) for order in orders):
        raise InvalidUsage(
            f"{fields.where} has orders of fetches that are not all numbers of parameters"
        )
    return StrategySteps(tuple(map(tuple, orders)), between_s)


def _are_numbers(order: list[Any]) -> bool:
    return all(type(number) is int for number in order)


def _is_time(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds >= 0
