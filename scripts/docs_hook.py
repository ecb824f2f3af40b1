"""Hook of mkdocs: writes all sub-commands and their options into docs/commands.md."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MARK = "<!-- every command: scripts/docs_hook.py -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """See mkdocs: puts the commands in place of the mark."""
    return markdown.replace(MARK, "\n".join(_commands())) if MARK in markdown else markdown


def _commands() -> Iterator[str]:
    # hvd_order may not be installed or built here; its parsers need neither that nor PyTorch.
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from hvd_order.tools.cli.main import _parser
    from hvd_order.tools.demo.train import _parser as demo_parser

    for parser, about in _leaves(_parser()):
        own = demo_parser() if parser.prog.endswith(" demo") else parser
        own.prog = parser.prog
        yield from section(own, about)


def _leaves(
    parser: argparse.ArgumentParser, about: str = ""
) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """The sub-commands that have none of their own, each with its line in the list of all."""
    groups = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    if not groups:
        yield parser, parser.description or about
    for group in groups:
        lines = {each.dest: each.help or "" for each in group._choices_actions}
        for name, command in group.choices.items():
            yield from _leaves(command, lines.get(name, ""))


def section(parser: argparse.ArgumentParser, about: str) -> Iterator[str]:
    """Lines of Markdown on one command: what it does, how it is called, its options.

    Args:
        parser: of the command.
        about: what it does.
    """
    yield f"## {parser.prog}\n"
    yield f"{_text(about[:1].upper() + about[1:].rstrip('.'))}.\n"
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    if len(usage) <= 100:
        yield f"```text\n{usage}\n```\n"
    shown = [
        action
        for action in parser._actions
        if action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction)
    ]
    if shown:
        yield "| argument | meaning |\n| --- | --- |"
    for action in shown:
        yield f"| {_name(parser, action)} | {_meaning(parser, action)} |"
    yield ""


def _name(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    formatter = parser._get_formatter()
    if action.nargs == argparse.REMAINDER:
        return f"`{action.metavar or action.dest} ...`"
    if not action.option_strings:
        default = formatter._get_default_metavar_for_positional(action)
        return f"`{formatter._format_args(action, default)}`"
    value = ""
    if action.nargs != 0:
        default = formatter._get_default_metavar_for_optional(action)
        value = f" {formatter._format_args(action, default)}"
    return ", ".join(f"`{each}`" for each in action.option_strings[:-1]) + (
        f"{', ' if len(action.option_strings) > 1 else ''}`{action.option_strings[-1]}{value}`"
    )


def _meaning(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return _text(parser._get_formatter()._expand_help(action)) if action.help else ""


def _text(help_text: str) -> str:
    """A help text as Markdown; pages that it names become links."""
    text = " ".join(help_text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    return re.sub(r"\bdocs/([\w/.-]+\.md)", r"[\1](\1)", text)
