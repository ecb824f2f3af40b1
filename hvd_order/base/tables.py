"""Text tables, line by line, with errors that name the file and the line."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from hvd_order.base.errors import InvalidUsage

__all__ = ["Path", "TableRow", "open_text", "read_header", "read_lines"]

Path = str | os.PathLike[str]


@dataclass(frozen=True)
class TableRow:
    """One line of a table.

    Attributes:
        path, number: file, and number of the line in it, from 1.
        fields: by column.
    """

    path: str
    number: int
    fields: Mapping[str, str]

    def wrong(self, what: str) -> InvalidUsage:
        """The error that says what is wrong with the line."""
        return InvalidUsage(f"{self.path}, line {self.number}: {what}")

    def text(self, column: str) -> str:
        """A text that is not empty."""
        found = self.fields[column]
        if not found:
            raise self.wrong(f"{column} is empty")
        return found

    def number_of(self, column: str, *, above: float | None = None) -> float:
        """A number of at least 0, or one above ``above``."""
        text = self.text(column)
        try:
            found = float(text)
        except ValueError:
            raise self.wrong(f"{column} is {text!r}; expected a number") from None
        if not math.isfinite(found) or found < 0 or (above is not None and found <= above):
            wanted = "of at least 0" if above is None else f"above {above:g}"
            raise self.wrong(f"{column} is {text}; expected a number {wanted}")
        return found

    def whole(self, column: str, least: int = 0) -> int:
        """A whole number of at least ``least``."""
        found = self.number_of(column)
        if found != int(found) or found < least:
            raise self.wrong(f"{column} is {self.fields[column]}; expected a whole number of at "
                             f"least {least}")  # fmt: skip
        return int(found)


def open_text(path: Path) -> IO[str]:
    """Opens a text file; bytes that are no UTF-8 become U+FFFD.

    Raises:
        InvalidUsage: it cannot be opened.
    """
    try:
        return open(path, encoding="utf-8-sig", errors="replace", newline="")
    except OSError as error:
        raise InvalidUsage(f"{os.fspath(path)} cannot be read: {error.strerror}") from None


def read_header(path: Path, delimiter: str = ",") -> list[str]:
    """The fields of the first line that is not empty.

    Raises:
        InvalidUsage: there is none, or the file cannot be read as text.
    """
    for _, fields in _fields(path, delimiter):
        return fields
    raise InvalidUsage(f"{os.fspath(path)} is empty")


def read_lines(
    path: Path,
    needed: Sequence[str],
    *,
    delimiter: str = ",",
    columns: Sequence[str] | None = None,
) -> Iterator[TableRow]:
    """Reads a table; empty lines do not count. Holds one line at a time.

    Args:
        needed: columns that the table must have; others stay in the lines too.
        columns: names of the columns of a file without a header.

    Raises:
        InvalidUsage: the file cannot be read, has no line behind its header, lacks a column, or a
            line has another number of fields than the header.
    """
    name = os.fspath(path)
    header = None if columns is None else list(columns)
    empty = True
    for number, fields in _fields(path, delimiter):
        if header is None:
            header = [field.strip() for field in fields]
            if missing := [column for column in needed if column not in header]:
                raise InvalidUsage(f"{name}, line {number}: no column {', '.join(missing)}; it has "
                                   f"{', '.join(header)}")  # fmt: skip
            continue
        if len(fields) != len(header):
            raise InvalidUsage(f"{name}, line {number}: {len(fields)} fields; expected "
                               f"{len(header)}: {', '.join(header)}")  # fmt: skip
        empty = False
        yield TableRow(name, number, {c: f.strip() for c, f in zip(header, fields, strict=True)})
    if empty:
        raise InvalidUsage(f"{name} is empty" if header is None or columns is not None else
                           f"{name} has a header and nothing else")  # fmt: skip


def _fields(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    with open_text(path) as file:
        if delimiter == "\t":  # commands in such tables hold quotes that mean nothing
            reader = csv.reader(file, delimiter=delimiter, quoting=csv.QUOTE_NONE)
        else:
            reader = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            for fields in reader:
                if any("\ufffd" in field for field in fields):
                    raise csv.Error("it is not UTF-8")
                if any(field.strip() for field in fields):
                    yield reader.line_num, fields
        except csv.Error as error:
            raise InvalidUsage(
                f"{os.fspath(path)}, line {reader.line_num}: no text table: {error}"
            ) from None
