"""The output of this host's ranks: read from pipes, written line by line with the rank.

One thread reads all pipes, so a rank waits for the launcher's output as it would for its own. The
end of a pipe says nothing: a process that a rank has left behind may keep it open. So the pipes
are read until they are empty once the ranks have ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from dataclasses import dataclass

from hvd_order.launch.jobs.lines import PROMPT_S, STDERR, STDOUT, Source
from hvd_order.launch.request import OutputRules

__all__ = ["RankOutput"]

_CHUNK = 1 << 16  # what a pipe of Linux holds
_NAP_S = 0.002  # a rank that writes often is not interrupted as often
_STOPPED_S = 5.0  # for what is left in the pipes, if whoever reads our output does not


@dataclass
class _Pipe:
    reader: int
    writer: int | None  # until the rank has it
    source: Source
    copy: int | None  # file descriptor of the rank's own file


class RankOutput:
    """Pipes for the output of the ranks that start together, one start after the other.

    Args:
        rules: what to write, and where.
        host: this host's name in labels; empty: labels have only the rank.
    """

    def __init__(self, rules: OutputRules, host: str = "") -> None:
        self._rules = rules
        self._host = f"{host.rpartition('@')[2]}:" if host else ""
        self._pipes: list[_Pipe] = []
        self._thread: threading.Thread | None = None
        self._wake: int | None = None  # the thread reads to the end when it is closed
        self._starts = 0

    def open(self, rank: int, size: int, target: int) -> str:
        """Makes a pipe for one output of a rank that will start.

        Returns:
            The file name at which this process opens the end to write to.
        """
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        name = f"[{self._host}{rank}]" if self._rules.prefix else ""
        source = Source(target, name, timestamps=self._rules.timestamps)
        self._pipes.append(_Pipe(reader, writer, source, self._file(rank, size, target)))
        return f"/dev/fd/{writer}"

    def begin(self) -> None:
        """Begins to read; the ranks have their ends."""
        self._starts += 1
        for pipe in self._pipes:
            if pipe.writer is not None:
                os.close(pipe.writer)
                pipe.writer = None
        told, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._read, args=(told, self._pipes), daemon=True)
        self._thread.start()

    def finish(self, *, stopped: bool = False) -> None:
        """Writes what is left, once the ranks have ended.

        Args:
            stopped: wait for 5 s only, since the user wants an end.
        """
        thread, pipes = self._thread, self._pipes
        self._thread, self._pipes = None, []
        if self._wake is not None:
            os.close(self._wake)
            self._wake = None
        if thread is not None:
            thread.join(_STOPPED_S if stopped else None)
            if thread.is_alive():
                return  # it has the files
        for pipe in pipes:
            for fd in (pipe.reader, pipe.writer, pipe.copy):
                if fd is not None:
                    os.close(fd)

    def _file(self, rank: int, size: int, target: int) -> int | None:
        """Opens ``FOLDER/rank.N/stdout`` or ``stderr``; numbered if ranks start again."""
        if self._rules.folder is None:
            return None
        folder = self._rules.folder / f"rank.{rank:0{len(str(size - 1))}d}"
        folder.mkdir(parents=True, exist_ok=True)
        name = {STDOUT: "stdout", STDERR: "stderr"}[target]
        path = folder / (f"{name}.{self._starts}" if self._starts else name)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def _read(self, told: int, pipes: list[_Pipe]) -> None:
        poll = select.poll()
        poll.register(told, select.POLLIN)
        by_reader = {pipe.reader: pipe for pipe in pipes}
        for reader in by_reader:
            poll.register(reader, select.POLLIN)
        ended = False
        while not ended:
            holding = [p for p in by_reader.values() if p.source.holds_since() is not None]
            sizes = [0]
            for fd, _ in poll.poll(PROMPT_S * 1000 if holding else None):
                if fd == told:
                    ended = True
                    continue
                text = self._take(by_reader[fd])
                sizes.append(len(text or b""))
                if text == b"":
                    poll.unregister(fd)
            if not ended and max(sizes) < _CHUNK // 2:
                time.sleep(_NAP_S)
            now = time.monotonic()
            for pipe in holding:
                since = pipe.source.holds_since()
                if since is not None and now - since >= PROMPT_S:
                    pipe.source.flush()
        os.close(told)
        for pipe in pipes:
            # As much as a pipe can hold, or what was left behind may write for ever.
            for _ in range(1 + (1 << 20) // _CHUNK):
                if not self._take(pipe):
                    break
            pipe.source.end()

    def _take(self, pipe: _Pipe) -> bytes | None:
        """Writes what is in a pipe; None: it is empty, ``b""``: nobody can write to it."""
        try:
            text = os.read(pipe.reader, _CHUNK)
        except BlockingIOError:
            return None
        if pipe.copy is not None:
            self._copy(pipe, text)
        pipe.source.feed(text)
        return text

    def _copy(self, pipe: _Pipe, text: bytes) -> None:
        assert pipe.copy is not None
        rest = memoryview(text)
        try:
            while rest:
                rest = rest[os.write(pipe.copy, rest) :]
        except OSError as error:  # a full disk must not end training
            os.close(pipe.copy)
            pipe.copy = None
            with contextlib.suppress(OSError):
                sys.stderr.write(
                    f"hvd-order: a file in {self._rules.folder} cannot be written "
                    f"({error.strerror}); the job goes on without it\n"
                )
