"""The type stubs list what the native modules offer, no more and no less."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "hvd_order/_native"


def public(names: set[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def stub_of(module: str) -> dict[str, set[str]]:
    """Each name of the stub, with its members if it is a class."""
    tree = ast.parse((PACKAGE / f"{module}.pyi").read_text("utf-8"))
    found: dict[str, set[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = {
                item.name for item in node.body if isinstance(item, ast.FunctionDef)
            } | {
                item.target.id
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            }
            for base in node.bases:
                # A private base exists in the stub alone, so that its members are written once.
                if isinstance(base, ast.Name) and base.id.startswith("_"):
                    found[node.name] |= found[base.id]
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = set()
        elif isinstance(node, ast.ImportFrom) and node.module == "hvd_order._native._core":
            core = stub_of("_core")
            found |= {alias.name: core[alias.name] for alias in node.names}
    return found


@pytest.mark.parametrize("module", ["_core", "_torch"])
def test_stub_lists_what_the_module_has(module: str) -> None:
    importlib.import_module("torch")  # loads the libraries that _torch needs
    native = importlib.import_module(f"hvd_order._native.{module}")
    stub = stub_of(module)
    assert public(set(stub)) == public(set(vars(native)))
    for name in public(set(stub)):
        value = getattr(native, name)
        if isinstance(value, type):
            assert public(stub[name]) == public(set(vars(value))), name
