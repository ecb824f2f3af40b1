"""Checks that what ``--json`` prints fits the schemas in ``docs/schemas``."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.ranks import REPOSITORY

from hvd_order.tools.cli.main import main

__all__ = ["checked", "printed"]

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float),
    "null": type(None), "boolean": bool,
}  # fmt: skip


def _check(value: Any, schema: dict[str, Any], place: str = "$") -> None:
    """The part of JSON Schema that our schemas use."""
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    assert any(isinstance(value, _TYPES[kind]) for kind in kinds), f"{place}: {value!r}"
    if isinstance(value, dict):
        assert set(value) >= set(schema.get("required", ())), place
        for name, part in value.items():
            others = schema["additionalProperties"]
            known = schema.get("properties", {}).get(name, others)
            assert known, f"{place} has {name}"
            _check(part, known, f"{place}.{name}")
    if isinstance(value, list):
        for i, part in enumerate(value):
            _check(part, schema["items"], f"{place}[{i}]")


def checked(text: str, schema: str) -> Any:
    """What a text says, checked against a schema."""
    said = json.loads(text)
    _check(said, json.loads((REPOSITORY / f"docs/schemas/{schema}.json").read_text("utf-8")))
    return said


def printed(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> dict[str, Any]:
    """What a command prints, checked against its schema."""
    assert main([*map(str, arguments), "--json"]) == code
    words = arguments[: 2 if arguments[0] == "cluster" else 1]
    said: dict[str, Any] = checked(capsys.readouterr().out, "_".join(map(str, words)))
    return said
