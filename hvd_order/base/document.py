"""JSON files with a format and a version: validated when read, written atomically."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from hvd_order.base.errors import InvalidUsage

__all__ = ["Fields", "read_document", "write_document"]

T = TypeVar("T")


class Fields:
    """Takes the fields of a JSON object one by one; errors name the place in the file."""

    def __init__(self, content: Any, where: str) -> None:
        """Takes ``where``, the place of the object in the file, for messages."""
        if not isinstance(content, dict):
            raise InvalidUsage(f"{where} is {content!r}; expected an object")
        self._left = dict(content)
        self.where = f"{where} ({content['name']!r})" if "name" in content else where

    def take(self, key: str, *kinds: type) -> Any:
        """Returns the value of a required field, which has one of the types ``kinds``."""
        if key not in self._left:
            raise InvalidUsage(f'{self.where} lacks "{key}"')
        value = self._left.pop(key)
        # JSON's true would pass as Python's int 1; an int is valid where a float is expected.
        fits = isinstance(value, kinds) or (float in kinds and isinstance(value, int))
        if not fits or isinstance(value, bool):
            wanted = " or ".join(_JSON_NAMES[kind] for kind in kinds)
            raise InvalidUsage(f'{self.where} has "{key}": {value!r}; expected {wanted}')
        return value

    def has(self, key: str) -> bool:
        """Whether an optional field is there and has not been taken."""
        return key in self._left

    @overload
    def names(self, key: str) -> tuple[str, ...]: ...
    @overload
    def names(self, key: str, *, optional: Literal[True]) -> tuple[str, ...] | None: ...
    def names(self, key: str, *, optional: bool = False) -> tuple[str, ...] | None:
        """Returns a list of strings, or None for null if ``optional``."""
        values = self.take(key, list, *[type(None)] * optional)
        if values is None:
            return None
        if not all(isinstance(value, str) for value in values):
            raise InvalidUsage(f'{self.where} has "{key}": {values!r}; expected names')
        return tuple(values)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Returns a truth value; the field is required unless there is a default."""
        value = self._left.pop(key, default)
        if not isinstance(value, bool):
            raise InvalidUsage(f'{self.where} has "{key}": {value!r}; expected true or false')
        return value

    def choice(self, key: str, choices: Sequence[str]) -> Any:
        """Returns a string that is one of ``choices``."""
        value = self.take(key, str)
        if value not in choices:
            raise InvalidUsage(
                f'{self.where} has "{key}": {value!r}; expected one of {", ".join(choices)}'
            )
        return value

    def end(self) -> None:
        """Rejects fields that have not been taken."""
        if self._left:
            unknown = ", ".join(f'"{key}"' for key in self._left)
            raise InvalidUsage(f"{self.where} has unknown fields: {unknown}")


_JSON_NAMES: dict[type, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


def read_document(
    path: str | os.PathLike[str],
    kind: str,
    version: int,
    parse: Callable[[Fields], T],
    oldest: int | None = None,
) -> T:
    """Reads a file that :func:`write_document` wrote.

    Args:
        kind: expected format: "profile", "plan".
        version: of the format, the newest one.
        oldest: the oldest version that ``parse`` understands; None: ``version``.
        parse: takes all fields except format and version.

    Raises:
        InvalidUsage: the file has another format or version, or an impossible content;
            the message names the file and the place in it.
        OSError: the file does not exist.
    """
    text = Path(path).read_text(encoding="utf-8")
    try:
        return _parse(text, kind, range(oldest or version, version + 1), parse)
    except InvalidUsage as error:
        raise InvalidUsage(f"{os.fspath(path)}: {error}") from None


def _parse(text: str, kind: str, versions: range, parse: Callable[[Fields], T]) -> T:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise InvalidUsage(f"not JSON ({error})") from None
    if not isinstance(content, dict) or content.get("format") != _format(kind):
        raise InvalidUsage(f'no {kind}: it does not say "format": "{_format(kind)}"')
    if content.get("version") not in versions:
        known = " to ".join(str(version) for version in sorted({versions[0], versions[-1]}))
        raise InvalidUsage(
            f"version {content.get('version')!r} of the format, this hvd_order reads {known}; "
            f"make the {kind} again"
        )
    top = Fields(content, f"the {kind}")
    top.take("format", str)
    top.take("version", int)
    result = parse(top)
    top.end()
    return result


def write_document(
    path: str | os.PathLike[str], kind: str, version: int, content: dict[str, Any]
) -> None:
    """Writes a file; an existing file is replaced atomically."""
    target = Path(path)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    whole = {"format": _format(kind), "version": version, **content}
    try:
        draft.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def _format(kind: str) -> str:
    return f"hvd_order {kind}"
