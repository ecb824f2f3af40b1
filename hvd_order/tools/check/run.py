"""Reads files and folders, runs the rules, and drops findings that the user ignores."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_order.base.errors import InvalidUsage
from hvd_order.tools.check.default_group import check_default_group
from hvd_order.tools.check.missing import check_missing
from hvd_order.tools.check.ranks import Ranks
from hvd_order.tools.check.rules import RULES, Finding
from hvd_order.tools.check.saved_files import check_saved_files
from hvd_order.tools.check.script import Script
from hvd_order.tools.check.stepping import check_stepping
from hvd_order.tools.check.updates_by_hand import check_updates_by_hand
from hvd_order.tools.check.wrapping import check_wrapping

__all__ = ["Checked", "check_paths", "counts"]

_SILENCE = re.compile(r"#\s*hvd-order:\s*ignore(?:\[([A-Z0-9,\s]*)\])?")
_SKIPPED = {"__pycache__", "node_modules", "site-packages", "build"}


@dataclass(frozen=True)
class Checked:
    """What was read, and what was found there.

    Attributes:
        findings: sorted by file and place.
        files: number of files that were asked for.
        strangers: how many of them belong to no program that imports hvd_order or Horovod.
    """

    findings: list[Finding]
    files: int
    strangers: int

    def summary(self) -> str:
        """One line: ``13 files, nothing found; 6 do not use hvd_order``."""
        notes = sum(RULES[one.code].note for one in self.findings)
        mistakes = len(self.findings) - notes
        parts = [_counted(mistakes, "mistake")] * (mistakes > 0)
        parts += [_counted(notes, "note")] * (notes > 0)
        text = f"{_counted(self.files, 'file')}, {' and '.join(parts) or 'nothing found'}"
        if not self.strangers:
            return text
        if self.strangers == self.files:
            return f"{text}; {'it does' if self.files == 1 else 'they do'} not use hvd_order"
        return (
            f"{text}; {self.strangers} {'does' if self.strangers == 1 else 'do'} not use hvd_order"
        )


def check_paths(
    paths: Iterable[Path], select: Sequence[str] = (), ignore: Sequence[str] = ()
) -> Checked:
    """Checks Python files, and all of those below folders.

    Args:
        paths: files and folders.
        select: codes or beginnings of codes to report; empty: all.
        ignore: codes or beginnings of codes not to report.

    Raises:
        InvalidUsage: no such file, or no such code.
        OSError, UnicodeDecodeError: a file cannot be read.
    """
    for beginning in (*select, *ignore):
        if not beginning or not any(code.startswith(beginning) for code in RULES):
            raise InvalidUsage(
                f"no rule has the code {beginning!r}; there are {', '.join(RULES)} "
                "(documentation: Check scripts)"
            )
    scripts: dict[Path, Script] = {}
    findings: set[Finding] = set()
    strangers = 0
    files = _files(paths)
    for path in files:
        try:
            scripts[path.resolve()] = Script(path)
        except SyntaxError as error:
            findings.add(_unreadable(path, error.msg, error.lineno or 1, error.offset or 1))
        except UnicodeDecodeError:
            raise
        except (ValueError, RecursionError) as error:  # null bytes; expressions without end
            findings.add(_unreadable(path, str(error)))
    for script in list(scripts.values()):
        try:
            program = _program_of(script, scripts)
            strangers += not any(one.imports_hvd for one in program)
            ranks = Ranks(script)
            found = check_stepping(script) | check_wrapping(script) | ranks.check()
            found |= check_missing(script, program) | check_saved_files(script, ranks)
            found |= check_default_group(script, program, ranks)
            found |= check_updates_by_hand(script, program, ranks)
        except RecursionError as error:
            found = {_unreadable(script.path, str(error))}
        findings |= {one for one in found if not _is_silenced(one, script.lines)}
    wanted = tuple(select) or ("",)
    chosen = sorted(
        one
        for one in findings
        if one.code.startswith(wanted) and not (ignore and one.code.startswith(tuple(ignore)))
    )
    return Checked(chosen, len(files), strangers)


def counts(findings: Iterable[Finding]) -> bool:
    """Whether there is a mistake among them; notes are none."""
    return any(not RULES[one.code].note for one in findings)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _files(paths: Iterable[Path]) -> list[Path]:
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            for file in sorted(path.rglob("*.py")):
                inside = file.relative_to(path).parts
                if not any(part in _SKIPPED or part.startswith(".") for part in inside):
                    found[file] = None
        elif path.is_file():
            found[path] = None
        else:
            raise InvalidUsage(f"there is no file or folder {path}")
    return list(found)


def _program_of(script: Script, given: dict[Path, Script]) -> list[Script]:
    """Files of the program of `script`: those that it imports, and given ones that import it.

    Their imports belong to the program as well.
    """
    program = {script.path.resolve(): script}
    waiting = [script]
    while waiting:
        current = waiting.pop()
        here = current.path.resolve()
        importers = [other for other in given.values() if here in other.local_modules]
        imported = []
        for file in current.local_modules:
            try:
                imported.append(given.get(file) or Script(file))
            except (SyntaxError, ValueError, RecursionError, OSError):
                continue  # reported if it was asked for
        for other in (*importers, *imported):
            if other.path.resolve() not in program:
                program[other.path.resolve()] = other
                waiting.append(other)
    return list(program.values())


def _is_silenced(one: Finding, lines: Sequence[str]) -> bool:
    for line in lines[one.line - 1 : one.last_line]:
        match = _SILENCE.search(line)
        if match and (match[1] is None or one.code in re.split(r"[,\s]+", match[1])):
            return True
    return False


def _unreadable(path: Path, why: str, line: int = 1, column: int = 1) -> Finding:
    rule = RULES["HVD001"]
    text = f"{rule.message.format(what=why)} ({rule.cure})"
    return Finding(str(path), line, column, rule.code, text, line)
