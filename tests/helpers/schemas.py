"""Checks that what ``--json`` prints fits the schemas in ``docs/schemas``."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.ranks import REPOSITORY

from hvd_order.tools.cli.main import main

__all__ = ["printed"]

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float),
    "null": type(None),
}  # fmt: skip


def _check(value: Any, schema: dict[str, Any], place: str = "$") -> None:
    """The part of JSON Schema that our schemas use."""
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    assert any(isinstance(value, _TYPES[kind]) for kind in kinds), f"{place}: {value!r}"
    if isinstance(value, dict):
        assert set(value) == set(schema["required"]), place
        for name, part in value.items():
            _check(part, schema["properties"][name], f"{place}.{name}")
    if isinstance(value, list):
        for i, part in enumerate(value):
            _check(part, schema["items"], f"{place}[{i}]")


def printed(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> dict[str, Any]:
    """What a command prints, checked against its schema."""
    assert main([*map(str, arguments), "--json"]) == code
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    path = REPOSITORY / "docs/schemas" / f"{arguments[0]}.json"
    _check(said, json.loads(path.read_text("utf-8")))
    return said
