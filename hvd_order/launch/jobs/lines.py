"""Lines of many sources on the outputs of this process, each whole and with its label.

A source's text is held until its line ends. Text that stays without a line end, such as a prompt
or the dots of a slow loop, is written by `flush`; another source that writes then begins a new
line first. A carriage return ends a line too, so progress bars move.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import threading
import time

__all__ = ["PROMPT_S", "STDERR", "STDOUT", "Source"]

STDOUT, STDERR = 1, 2

PROMPT_S = 0.1
"""Seconds after which text without a line end is flushed."""

_MOST_HELD = 1 << 20  # a longer line may be broken by another source's
_LABEL = re.compile(rb"([\d-]+ [\d:.]+ )?\[[\w.-]+:\d+\] ")  # as a host's agent has written it
_LINE_BEGIN = re.compile(rb"(?<=\n)(?!\r|\Z)|(?<=\r)(?![\r\n]|\Z)")


def _complete(text: bytes) -> int:
    """Returns how much of `text` is whole lines."""
    # A carriage return at the end may be half of a \r\n.
    return max(text.rfind(b"\n"), text.rfind(b"\r", 0, -1)) + 1


class _Console:
    """The standard outputs, shared by all sources. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unfinished: dict[int, Source] = {}  # by place: whose line has no end yet

    def put(self, source: Source, text: bytes) -> None:
        with self._lock:
            place = self._place(source.target)
            last = self._unfinished.pop(place, None)
            begin = b""
            if last is not source:
                begin = b"" if last is None else b"\n"
                if text[:1] != b"\r":
                    begin += source.label() or source.carried
            whole = text[-1:] in (b"\n", b"\r")
            if whole:
                source.carried = b""
            else:
                self._unfinished[place] = source
                found = _LABEL.match(text, text.rfind(b"\n") + 1)
                source.carried = found[0] if found else source.carried
            _write(source.target, begin + _labelled(text, source.label()))

    def end(self, source: Source) -> None:
        """Ends the line of a source that has a label; without one its bytes stay as they are."""
        with self._lock:
            place = self._place(source.target)
            if self._unfinished.get(place) is source and source.label():
                del self._unfinished[place]
                _write(source.target, b"\n")

    def _place(self, target: int) -> int:
        """The same for both outputs if they are the same terminal or file."""
        with contextlib.suppress(OSError):
            if os.path.sameopenfile(STDOUT, STDERR):
                return STDOUT
        return target


_console = _Console()


class Source:
    """A source of text. Not thread-safe.

    Args:
        target: `STDOUT` or `STDERR`.
        name: label of each line; empty: none.
        timestamps: whether each line begins with the time.
    """

    def __init__(self, target: int, name: str = "", *, timestamps: bool = False) -> None:
        self.target = target
        self.name = name
        self.carried = b""  # label in the text itself of a line without an end
        self._timestamps = timestamps
        self._held = b""
        self._since = 0.0

    def label(self) -> bytes:
        """Returns what a line that is written now begins with."""
        label = f"{self.name} " if self.name else ""
        if self._timestamps:
            now = time.time()
            text = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
            label = f"{text}.{int(now % 1 * 1000):03d} {label}"
        return label.encode()

    def feed(self, text: bytes) -> None:
        """Writes the lines that `text` completes, and holds the rest."""
        if not self._held:
            self._since = time.monotonic()
        text = self._held + text
        whole = _complete(text)
        self._held = text[whole:]
        if whole:
            self._since = time.monotonic()
            _console.put(self, text[:whole])
        if len(self._held) > _MOST_HELD:
            self.flush()

    def holds_since(self) -> float | None:
        """Returns since when (`time.monotonic`) text without a line end is held; None: none is."""
        return self._since if self._held else None

    def flush(self) -> None:
        """Writes what is held."""
        text, self._held = self._held, b""
        if text:
            _console.put(self, text)

    def end(self) -> None:
        """Writes what is held, and ends its line."""
        self.flush()
        _console.end(self)


def _labelled(text: bytes, label: bytes) -> bytes:
    """Returns `text` with the label at the beginning of all lines but the first."""
    if not label:
        return text
    if b"\r" in text:
        return _LINE_BEGIN.sub(lambda _: label, text)
    return text[:-1].replace(b"\n", b"\n" + label) + text[-1:]


def _write(target: int, text: bytes) -> None:
    """Writes to an output of this process; if its reader is gone the job continues."""
    rest = memoryview(text)
    while rest:
        try:
            rest = rest[os.write(target, rest) :]
        except BlockingIOError:  # whoever started this process has made it so
            select.select([], [target], [])
        except OSError as error:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), target)
            name = {STDOUT: "standard output", STDERR: "standard error"}[target]
            with contextlib.suppress(OSError):
                os.write(
                    STDERR,
                    f"hvd-order: {name} cannot be written ({error.strerror}); the job goes on "
                    "without it\n".encode(),
                )
            return
