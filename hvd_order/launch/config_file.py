"""Files of options for ``hvd-order run --config-file``, as horovodrun reads them.

A file has horovodrun's sections (``timeline: {filename: t.json}``), or long options without their
dashes (``num-proc: 4``). It is JSON, TOML (Python 3.11 and newer), or YAML if PyYAML is installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvd_order.base.errors import InvalidUsage

__all__ = ["arguments_of"]

# Section -> what its names begin with as options.
_SECTIONS = {
    "params": "", "autotune": "autotune_", "timeline": "timeline_", "stall_check": "stall_check_",
    "library_options": "", "logging": "log_",
}  # fmt: skip


def arguments_of(path: Path) -> list[str]:
    """Returns the options that a file names, as on a command line.

    Raises:
        InvalidUsage: the file is not of its format, or there is no reader for that.
        OSError: the file cannot be read.
    """
    content = _read(path)
    if not isinstance(content, Mapping):
        raise InvalidUsage(f"{path}: expected names and values, such as num_proc: 4")
    found: list[str] = []
    for name, value in content.items():
        if name in _SECTIONS and isinstance(value, Mapping):
            for inner, one in value.items():
                found += _section(name, str(inner), one)
        elif name == "controller":
            found += [f"--{str(value).lower()}"]
        elif name == "env" and isinstance(value, Mapping):
            found += [f"--env={variable}={text}" for variable, text in value.items()]
        else:
            found += _option(str(name), value)
    return found


def _section(section: str, name: str, value: object) -> list[str]:
    if name == "enabled":
        if section == "stall_check":
            return [] if value else ["--no-stall-check"]
        return [f"--{section}"] if value else []
    return _option(_SECTIONS[section] + name, value)


def _option(name: str, value: object) -> list[str]:
    option = "--" + name.replace("_", "-")
    if value is None or value is False:
        return []
    if value is True:
        return [option]
    if isinstance(value, list):
        return [option, *map(str, value)]
    return [f"{option}={value}"]


def _read(path: Path) -> Any:
    text = path.read_text("utf-8")
    form = path.suffix.lower()
    modules = {".json": "json", ".toml": "tomllib"}
    try:
        reader = importlib.import_module(modules.get(form, "yaml"))
    except ImportError:
        raise InvalidUsage(
            f"{path}: this Python cannot read {form or 'a file without suffix'}; install PyYAML "
            "(pip install pyyaml), or write the file as JSON and call it NAME.json"
        ) from None
    wrong = reader.YAMLError if form not in modules else ValueError
    try:
        return (reader.loads if form in modules else reader.safe_load)(text)
    except wrong as error:
        raise InvalidUsage(f"{path} cannot be read: {error}") from None
