"""The parameters that files name: of a plan, and of a profile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_order.base.document import Fields
from hvd_order.base.errors import InvalidUsage

__all__ = ["GraphParameter", "check_parameters", "check_unique", "parameter_from"]


@dataclass(frozen=True)
class GraphParameter:
    """A tensor that workers pull, or whose gradient they reduce."""

    name: str
    size_bytes: int


def parameter_from(content: Any, place: str) -> GraphParameter:
    """Parses a parameter; ``place`` is its place in the file, for messages."""
    fields = Fields(content, f"parameter {place}")
    parameter = GraphParameter(fields.take("name", str), fields.take("size_bytes", int))
    fields.end()
    return parameter


def check_parameters(parameters: Sequence[GraphParameter]) -> None:
    """Raises InvalidUsage if a name occurs twice, or a size is below 0."""
    check_unique("parameter", [parameter.name for parameter in parameters])
    for parameter in parameters:
        if parameter.size_bytes < 0:
            size = parameter.size_bytes
            raise InvalidUsage(f"the parameter {parameter.name!r} has a size of {size} bytes")


def check_unique(kind: str, names: Iterable[str]) -> None:
    """Raises InvalidUsage if a name of a ``kind`` occurs twice."""
    for name, times in Counter(names).items():
        if times > 1:
            raise InvalidUsage(f"the {kind} {name!r} is listed {times} times; names must differ")
