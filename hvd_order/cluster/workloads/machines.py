"""Machines of a cluster, from a table or a short text.

A table has a column ``name``, optionally ``bandwidth_gbit`` (of a machine's link, each way, Gbit/s;
without it links are infinitely fast), and one for each resource:

    name,gpu,cpu,memory_gb,bandwidth_gbit
    left,8,64,256,25
    right,4,32,128,10

The short text names groups of equal machines, joined by ``+``: ``4x8gpu`` is four machines with
8 GPUs each, ``4xgpu:8,cpu:64,bandwidth_gbit:25+2x4gpu`` is six machines.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping

from hvd_order.base.errors import InvalidUsage
from hvd_order.base.tables import Path, read_header, read_lines
from hvd_order.cluster.model.machines import Machine, Machines
from hvd_order.cluster.workloads.own import amounts_of
from hvd_order.cluster.workloads.pai import NODE_COLUMNS, read_pai_nodes

__all__ = ["load_machines", "machines_from", "parse_machines"]

_LINK = "bandwidth_gbit"
_BYTES_PER_GBIT = 1e9 / 8
_GROUP = re.compile(r"(\d+)x(.+)")
_SHORT = re.compile(r"(\d+)([A-Za-z]\w*)")


def machines_from(text: str) -> Machines:
    """Machines of a file, or else of the short text.

    Raises:
        InvalidUsage: it is neither.
    """
    return load_machines(text) if os.path.exists(text) else parse_machines(text)


def parse_machines(text: str) -> Machines:
    """Machines of the short text, called m0, m1, ...

    Raises:
        InvalidUsage: the text is none.
    """
    found: list[Machine] = []
    for group in text.split("+"):
        match = _GROUP.fullmatch(group.strip())
        if match is None or int(match[1]) < 1:
            raise InvalidUsage(f"machines {group.strip()!r}; expected such as 4x8gpu or "
                               "4xgpu:8,cpu:64, or a file")  # fmt: skip
        short = _SHORT.fullmatch(match[2])
        amounts = {short[2]: float(short[1])} if short else amounts_of(match[2], ",")
        for _ in range(int(match[1])):
            found.append(_machine(f"m{len(found)}", amounts))
    return Machines(found)


def load_machines(path: Path) -> Machines:
    """Machines of a table as above, or of a list of nodes of Alibaba's trace of 2023.

    Raises:
        InvalidUsage: a line is no machine; names file and line.
    """
    header = [field.strip() for field in read_header(path)]
    if set(NODE_COLUMNS) <= set(header):
        return Machines(read_pai_nodes(path))
    found = []
    for line in read_lines(path, ["name"]):
        amounts = {c: line.number_of(c) for c in line.fields if c != "name"}
        try:
            found.append(_machine(line.text("name"), amounts))
        except InvalidUsage as error:
            raise line.wrong(str(error)) from None
    return Machines(found)


def _machine(name: str, amounts: Mapping[str, float]) -> Machine:
    if "bandwidth" in amounts:
        raise InvalidUsage(f"a bandwidth without a unit; expected {_LINK}")
    gbit = amounts.get(_LINK, math.inf)
    if gbit <= 0:
        raise InvalidUsage(f"{_LINK} is {gbit:g}; expected more than 0")
    capacity = {resource: amount for resource, amount in amounts.items() if resource != _LINK}
    if not capacity:
        raise InvalidUsage(f"machine {name!r} has no resources; expected such as gpu")
    return Machine(name, capacity, gbit * _BYTES_PER_GBIT)
