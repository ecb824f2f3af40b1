"""What a result file contains, and whether a document is one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

VERSION = 1

_TOP: Mapping[str, type | tuple[type, ...]] = {
    "schema": int,
    "benchmark": str,  # folder of benchmarks/
    "date": str,  # ISO 8601, UTC
    "command": str,
    "commit": str,
    "dirty": bool,  # sources differed from the commit
    "machine": dict,
    "variables": dict,  # HVD_ORDER_* of the environment
    "settings": dict,  # options of the benchmark
    "raw": dict,  # what was measured, seconds unless the benchmark's README says otherwise
    "summary": dict,  # what the benchmark computed and printed
}
_MACHINE: Mapping[str, type | tuple[type, ...]] = {
    "cpu": str,
    "cores": int,
    "usable_cores": int,
    "memory_gib": int,
    "kernel": str,
    "python": str,
    "torch": str,
    "load_average": list,
}
_ABSOLUTE_PATH = re.compile(r"(?<![\w.:/])/(?:[\w.+-]+/)*[\w.+-]+")
_DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00")


def problems(document: Any) -> list[str]:
    """Why a document is no result file; empty if it is one."""
    if not isinstance(document, dict):
        return ["the document is no object"]
    found = [*_mistyped(document, _TOP, "")]
    if found:
        return found
    if document["schema"] != VERSION:
        found.append(f"schema is {document['schema']}; expected {VERSION}")
    if not _DATE.fullmatch(document["date"]):
        found.append(f"date is {document['date']!r}; expected UTC to the second")
    found += _mistyped(document["machine"], _MACHINE, "machine.")
    if not document["raw"]:
        found.append("raw is empty")
    for text in _strings(document):
        if path := _ABSOLUTE_PATH.search(text):
            found.append(f"absolute path {path[0]!r}")
    return found


def _mistyped(
    part: Mapping[str, Any], expected: Mapping[str, type | tuple[type, ...]], prefix: str
) -> Iterator[str]:
    for name, kind in expected.items():
        if name not in part:
            yield f"{prefix}{name} is missing"
        elif not isinstance(part[name], kind):
            yield f"{prefix}{name} is {type(part[name]).__name__}"
    if prefix == "":
        for name in part.keys() - expected.keys():
            yield f"{name} is unknown"


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield str(name)
            yield from _strings(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each)
