"""What a knob is: how one setting is read from the environment, checked and documented."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, get_args

from hvd_order.base.config.metrics_place import metrics_place

__all__ = [
    "BYTES",
    "COUNT",
    "DIRECTORY",
    "FILE",
    "HOST_PORT",
    "METRICS",
    "NORM",
    "SECONDS",
    "SWITCH",
    "TRACE_FILE",
    "Knob",
    "KnobKind",
    "choice",
    "knob",
    "knobs_of",
    "names",
    "one_of",
    "parse_bytes",
]

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


def parse_bytes(text: str) -> int:
    """Reads a size such as ``"2MiB"``, ``"500KB"``, ``"1.5 GiB"`` or ``"4194304"``, in bytes.

    Raises:
        ValueError: not a whole, positive number of bytes.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match.group(2).upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"expected a size such as 2MiB, 500KB or 4194304, got {text!r}")
    size_bytes = float(match.group(1)) * unit
    if size_bytes < 1 or size_bytes != int(size_bytes):
        raise ValueError(f"expected a whole, positive number of bytes, got {text!r}")
    return int(size_bytes)


def _parse_seconds(text: str) -> timedelta:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    try:
        return timedelta(seconds=seconds)
    except (ValueError, OverflowError):
        raise ValueError(f"expected a number of seconds such as 300 or 0.5, got {text!r}") from None


def _parse_bool(text: str) -> bool:
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"expected 1 or 0, got {text!r}")


def _parse_size(text: str) -> int | None:
    return parse_bytes(text) if text.strip() else None


def _parse_count(text: str) -> int | None:
    if not text.strip():
        return None
    if not text.strip().isdecimal():
        raise ValueError(f"expected a whole number, got {text!r}")
    return int(text)


def _parse_norm(text: str) -> float:
    try:
        norm = float(text)
    except ValueError:
        norm = math.nan
    if not 0 <= norm < math.inf:
        raise ValueError(f"expected a number from 0 on, got {text!r}")
    return norm


def _parse_path(text: str) -> str | None:
    # Horovod's DYNAMIC means: not yet, the program calls start_timeline() itself.
    return None if text in ("", "DYNAMIC") else text


def _parse_metrics(text: str) -> str | None:
    if text:
        metrics_place(text)  # raises where it is none
    return text or None


@dataclass(frozen=True)
class KnobKind:
    """What a knob accepts.

    Attributes:
        name: for the reference page.
        parse: text to value; raises ValueError with what was expected.
        choices: the words of a choice; empty for other kinds.
    """

    name: str
    parse: Callable[[str], Any]
    choices: tuple[str, ...] = ()


BYTES = KnobKind("bytes", _parse_size)
COUNT = KnobKind("number", _parse_count)
NORM = KnobKind("norm", _parse_norm)
SECONDS = KnobKind("seconds", _parse_seconds)
SWITCH = KnobKind("`1` or `0`", _parse_bool)
# Absolute: it is written again later, when the program may be elsewhere.
FILE = KnobKind("file name", lambda text: os.path.abspath(text) if text else None)
TRACE_FILE = KnobKind("file name", _parse_path)
DIRECTORY = KnobKind("directory", lambda text: text or None)
HOST_PORT = KnobKind("host:port", lambda text: text or None)
METRICS = KnobKind("port, host:port or file:/directory", _parse_metrics)


def one_of(words: Sequence[str]) -> str:
    """Joins words for a sentence: "a, b or c"."""
    return " or ".join([", ".join(words[:-1]), words[-1]])


def choice(literal: Any, also: Mapping[str, str] | None = None) -> KnobKind:
    """Returns the kind of a ``Literal`` type of words, which is the one place that lists them.

    Args:
        literal: the type.
        also: other words, and those that they stand for.
    """
    choices: tuple[str, ...] = get_args(literal)

    def parse(text: str) -> str:
        word = text.strip().lower()
        word = (also or {}).get(word, word)
        if word not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}; got {text!r}")
        return word

    return KnobKind(one_of([f"`{word}`" for word in choices]), parse, choices)


def names(literal: Any) -> KnobKind:
    """Returns the kind of several words of a ``Literal`` type, separated by commas."""
    known: tuple[str, ...] = get_args(literal)

    def parse(text: str) -> frozenset[str]:
        words = frozenset(word.strip().lower() for word in text.split(",") if word.strip())
        if not words.issubset(known):
            raise ValueError(f"expected some of {', '.join(known)}, with commas; got {text!r}")
        return words

    return KnobKind("some of " + ", ".join(f"`{word}`" for word in known), parse)


@dataclass(frozen=True)
class Knob:
    """How one field of `Config` is read from the environment and documented.

    Attributes:
        field: name of the field in `Config`.
        env: environment variable that sets it.
        default: the default as one would write it in the environment.
        kind: what is accepted, for the reference page.
        help: one line.
        parse: text to value; raises ValueError with what was expected.
        choices: the words of a choice; empty for other kinds.
        also: Horovod's name of the variable, read when `env` is not set.
        may_differ: ranks may have different values, since each uses its own, or rank 0 alone one.
    """

    field: str
    env: str
    default: str
    kind: str
    help: str
    parse: Callable[[str], Any]
    choices: tuple[str, ...] = ()
    also: str | None = None
    may_differ: bool = False


def knob(
    default: str,
    kind: KnobKind,
    help_: str,
    *,
    also: str | None = None,
    may_differ: bool = False,
) -> Any:
    """Declares a dataclass field that is a knob; see `Knob` for the arguments."""

    def parse(text: str) -> Any:
        if kind.choices and not default and not text.strip():
            return None  # a choice that need not be made
        return kind.parse(text)

    described = {
        "default": default,
        "kind": kind.name,
        "help": help_,
        "parse": parse,
        "choices": kind.choices,
        "also": also,
        "may_differ": may_differ,
    }
    return dataclasses.field(default=parse(default), metadata=described)


def knobs_of(settings: Any) -> tuple[Knob, ...]:
    """Returns the knobs that a dataclass declares, in the order of its fields."""
    return tuple(
        Knob(field.name, f"HVD_ORDER_{field.name.upper()}", **field.metadata)
        for field in dataclasses.fields(settings)
    )
