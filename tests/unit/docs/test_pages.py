"""The pages of docs/ beside the package: commands, names of the API, and texts of errors."""

import argparse
import ast
import functools
import importlib.util
import re
from pathlib import Path

import pytest

from hvd_order.tools.cli.main import _parser

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"


def _page_of_commands() -> str:
    spec = importlib.util.spec_from_file_location("docs_hook", ROOT / "scripts/docs_hook.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    return str(hook.on_page_markdown((DOCS / "commands.md").read_text("utf-8")))


def _parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    below = [
        command
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for command in action.choices.values()
    ]
    return [each for command in below for each in _parsers(command)] or [parser]


def test_every_command_has_a_section_with_every_option() -> None:
    sections = dict(
        re.findall(r"^## (hvd-order.*?)\n(.*?)(?=^## |\Z)", _page_of_commands(), re.M | re.S)
    )
    commands = _parsers(_parser())
    assert len(commands) > 10
    for parser in commands:
        for action in parser._actions:
            if action.help != argparse.SUPPRESS and action.dest != "help":
                for name in action.option_strings:
                    assert name in sections[parser.prog], (parser.prog, name)


@pytest.mark.parametrize(
    ("page", "files"),
    [
        ("torch", ["torch/__init__.py"]),
        (
            "tensorflow",
            ["tensorflow/__init__.py", "tensorflow/ops/process.py", "tensorflow/ops/rank_ops.py"],
        ),
        ("keras", ["tensorflow/keras/__init__.py", "tensorflow/keras/callbacks.py"]),
        (
            "elastic",
            ["torch/elastic/__init__.py", "tensorflow/elastic.py", "tensorflow/keras/elastic.py"],
        ),
        ("array", ["array/__init__.py"]),
        ("lightning", ["lightning.py"]),
        ("ray", ["ray.py"]),
        ("run", ["launch/function.py"]),
        ("errors", ["base/errors.py"]),
    ],
)
def test_the_page_of_a_module_has_its_public_names(page: str, files: list[str]) -> None:
    text = (DOCS / f"api/{page}.md").read_text("utf-8")
    names = [name for file in files for name in _public_names(ROOT / "hvd_order" / file)]
    assert names
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []


def test_texts_name_pages_by_the_titles_that_the_site_has() -> None:
    """Not by files, which a wheel does not have."""
    titles = set(re.findall(r"^ +- ([^:\n]+): \S+\.md$", (ROOT / "mkdocs.yml").read_text(), re.M))
    named = set()
    for file in (ROOT / "hvd_order").rglob("*.py"):
        tree = ast.parse(file.read_text("utf-8"))
        comments = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if id(node) not in comments and file.name not in ("rules.py", "reference.py"):
                    assert not re.search(r"docs/\S*\.md", node.value), (file, node.value)
                named |= set(re.findall(r"[Dd]ocumentation: ([\w ]+\w)", node.value))
    assert "Tune slices and order" in named
    assert named <= titles


def _public_names(file: Path) -> list[str]:
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise LookupError(f"no __all__ in {file}")


@functools.cache
def _texts_of_the_source() -> str:
    """All string literals, those of one expression joined."""
    found = []
    for file in [*(ROOT / "hvd_order").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    for file in (ROOT / "csrc").rglob("*.cc"):
        found.append(re.sub(r'"\s*"', "", file.read_text("utf-8")))
    return "\n".join(found)


@pytest.mark.parametrize("page", ["troubleshooting.md", "install.md"])
def test_the_messages_of_a_page_are_those_of_the_source(page: str) -> None:
    source, quoted = _texts_of_the_source(), []
    text = (DOCS / page).read_text("utf-8")
    for table in re.findall(r"^\| message .*?(?=\n\n|\Z)", text, re.M | re.S):
        for row in table.splitlines()[2:]:
            quoted += re.findall(r"`([^`]+)`", row.split("|")[1])
    assert len(quoted) > 5
    parts = [part.strip() for text in quoted for part in text.split("...")]
    assert [part for part in parts if len(part) > 8 and part not in source] == []
