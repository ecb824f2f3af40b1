"""The launcher's handle of an agent: a local or ssh process that exchanges lines."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import secrets
import shlex
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import hvd_order
from hvd_order.base.errors import InvalidUsage
from hvd_order.launch.hosts import is_this_host
from hvd_order.launch.jobs.host_agent import BOOT
from hvd_order.launch.request import LaunchRequest

__all__ = ["AgentProcess", "Event", "ssh_command"]

Event = tuple["AgentProcess | None", dict[str, Any]]
"""Sender (None: the launcher's own threads) and message: ``{"what": ..., ...}``."""

# Variables of this host or login, which would be wrong on other hosts.
_STAYS_HERE = re.compile(
    r"HOSTNAME|HOST|HOME|USER|LOGNAME|MAIL|SHELL|PWD|OLDPWD|SHLVL|_|TERM_SESSION_ID|DISPLAY"
    r"|XAUTHORITY|TMPDIR|SSH_.*|XDG_.*|DBUS_.*|BASH_FUNC_.*"
)
# A line ends with \n, or with \r where progress bars overwrite theirs.
_LINE_END = re.compile(rb"(?<=\n)|(?<=\r)(?!\n|\Z)")
# BatchMode: a password prompt would wait forever. Alive: a host that loses power closes no
# connection, so ssh probes it and drops it after a minute without an answer.
_SSH_DEFAULTS = [
    "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4",
]  # fmt: skip


def ssh_command(options: Sequence[str]) -> list[str]:
    """The start of an ssh command line; a host and a command follow.

    Args:
        options: the user's options. Of two contradicting options, ssh takes the first.
    """
    return ["ssh", *options, *_SSH_DEFAULTS]


class AgentProcess:
    """Starts an agent, forwards its output, and puts its messages into a queue.

    The last message is ``ended`` with the exit code.

    Args:
        host: name of the host as given by the user.
        process_count: number of workers to expect.
        request: the launch request.
        events: queue of messages.
        prefix: text before each line of output.
    """

    def __init__(
        self,
        host: str,
        process_count: int,
        request: LaunchRequest,
        events: queue.Queue[Event],
        prefix: str,
    ) -> None:
        self.host = host
        self.remote = not is_this_host(host)
        self.last_errors: deque[str] = deque(maxlen=5)  # of standard error, for a message
        self._events = events
        self._answered = False
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._prefix = prefix.encode()
        self._marker = f"\x1e{secrets.token_hex(8)}\x1e"
        program = [sys.executable, "-c", BOOT]
        if self.remote:
            program = [*ssh_command(request.ssh_options), host, shlex.join(program)]
        try:
            self._process = subprocess.Popen(
                program,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the launcher, which then ends us
            )
        except FileNotFoundError:
            raise InvalidUsage(
                f"there is no ssh here, which is needed to start processes on {host}"
            ) from None
        streams = [(self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr)]
        self._threads = [
            threading.Thread(target=self._forward, args=pair, daemon=True) for pair in streams
        ]
        for thread in self._threads:
            thread.start()
        for function in (self._wait, self._write):
            threading.Thread(target=function, daemon=True).start()
        self.send(self._job(process_count, request))

    def send(self, message: Mapping[str, object]) -> None:
        """Sends a line without blocking on a host that does not read."""
        self._outgoing.put(json.dumps(message).encode() + b"\n")

    def stop(self) -> None:
        """Ends the agent and its workers gracefully; `wait` waits for the end."""
        self.send({"what": "stop"})
        if not self._answered:  # it has no workers, and may never read
            self._process.terminate()

    def leave(self) -> None:
        """Ends the agent when its workers have reached their next commit, or after 30 s."""
        self.send({"what": "leave"})
        if not self._answered:
            self._process.terminate()

    def kill(self) -> None:
        """After `stop`: makes the agent end the workers at once."""
        self.send({"what": "kill"})

    def wait(self, seconds: float) -> None:
        """Waits for the end, and kills the agent after the timeout."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._outgoing.put(None)
        for thread in self._threads:
            thread.join(5)

    def _job(self, process_count: int, request: LaunchRequest) -> dict[str, object]:
        env = dict(request.env)
        if self.remote:
            here = {name: v for name, v in os.environ.items() if not _STAYS_HERE.fullmatch(name)}
            env = {**here, **env}
        return {
            "marker": self._marker,
            "remote": self.remote,
            "path": [str(Path(hvd_order.__file__).parents[1]), *filter(None, sys.path)],
            "env": env,
            "folder": os.getcwd(),
            "command": list(request.command),
            "processes": process_count,
            "oversubscribe": request.oversubscribe,
            "restart": request.elastic is not None,
            "interfaces": list(request.interfaces),
            "output": str(request.output_folder.absolute()) if request.output_folder else None,
            "verbose": request.verbose,
        }

    def _write(self) -> None:
        """Sends queued lines; errors are ignored, since the agent's end is reported separately."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as pipe:
            while (line := self._outgoing.get()) is not None:
                pipe.write(line)
                pipe.flush()

    def _forward(self, source: IO[bytes], target: IO[str]) -> None:
        """Forwards lines of output, and puts messages among them into the queue."""
        marker = self._marker.encode()
        for line in _lines(source):
            text, found, message = line.partition(marker)
            if text:
                if target is sys.stderr:
                    self.last_errors.append(text.decode(errors="replace").strip())
                _pass_on(self._prefix + text, target)
            if found:
                self._answered = True
                self._events.put((self, json.loads(message)))

    def _wait(self) -> None:
        code = self._process.wait()
        for thread in self._threads:  # its messages come before its end
            thread.join(5)
        self._events.put((self, {"what": "ended", "code": code}))


def _lines(source: IO[bytes]) -> Iterator[bytes]:
    """Yields lines with their line ends as soon as they arrive."""
    held: list[bytes] = []  # parts of an incomplete line
    while chunk := source.read1():  # type: ignore[attr-defined]
        held.append(chunk)
        if b"\n" in chunk or b"\r" in chunk:
            *whole, rest = _LINE_END.split(b"".join(held))
            yield from whole
            held = [rest]
    if any(held):
        yield b"".join(held)


def _pass_on(text: bytes, target: IO[str]) -> None:
    """Writes to an output of this process; if its reader is gone the job continues."""
    try:
        target.buffer.write(text)  # type: ignore[attr-defined]
        target.flush()
    except OSError as error:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), target.fileno())
        with contextlib.suppress(OSError):
            sys.stderr.write(
                f"hvd-order: {target.name} cannot be written ({error.strerror}); the job goes on "
                "without it\n"
            )
            sys.stderr.flush()
