"""The launcher's handle of an agent: a local or ssh process that exchanges lines."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import re
import secrets
import select
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import hvd_order
from hvd_order.base.errors import InvalidUsage
from hvd_order.launch.hosts import is_this_host
from hvd_order.launch.jobs.host_agent import BOOT
from hvd_order.launch.jobs.lines import PROMPT_S, STDERR, STDOUT, Source
from hvd_order.launch.request import LaunchRequest

__all__ = ["AgentProcess", "Event", "ssh_command"]

Event = tuple["AgentProcess | None", dict[str, Any]]
"""Sender (None: the launcher's own threads) and message: ``{"what": ..., ...}``."""

# Variables of this host or login, which would be wrong on other hosts.
_STAYS_HERE = re.compile(
    r"HOSTNAME|HOST|HOME|USER|LOGNAME|MAIL|SHELL|PWD|OLDPWD|SHLVL|_|TERM_SESSION_ID|DISPLAY"
    r"|XAUTHORITY|TMPDIR|SSH_.*|XDG_.*|DBUS_.*|BASH_FUNC_.*"
)
_CHUNK = 1 << 16
_SAID = 2000
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
        name: label of output that is no rank's, ssh's for example; empty: there are no others.
    """

    def __init__(
        self,
        host: str,
        process_count: int,
        request: LaunchRequest,
        events: queue.Queue[Event],
        name: str,
    ) -> None:
        self.host = host
        self.remote = not is_this_host(host)
        self._said = b""  # last, on standard error
        self._events = events
        self._answered = False
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._name = name
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
        streams = [(self._process.stdout, STDOUT), (self._process.stderr, STDERR)]
        self._threads = [
            threading.Thread(target=self._forward, args=(pipe, Source(to, name)), daemon=True)
            for pipe, to in streams
        ]
        for thread in self._threads:
            thread.start()
        for function in (self._wait, self._write):
            threading.Thread(target=function, daemon=True).start()
        self.send(self._job(process_count, request))

    @property
    def last_errors(self) -> list[str]:
        """The last lines of standard error, for a message."""
        lines = self._said.decode(errors="replace").splitlines()[-5:]
        return [line.strip() for line in lines]

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
            "prefix": request.output.prefix,
            "timestamps": request.output.timestamps,
            "output": str(request.output.folder.absolute()) if request.output.folder else None,
            "host": self.host if self._name else "",
            "verbose": request.verbose,
            "call": base64.b64encode(request.call.payload).decode() if request.call else "",
        }

    def _write(self) -> None:
        """Sends queued lines; errors are ignored, since the agent's end is reported separately."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as pipe:
            while (line := self._outgoing.get()) is not None:
                pipe.write(line)
                pipe.flush()

    def _forward(self, pipe: IO[bytes], source: Source) -> None:
        """Forwards output, and puts the messages in it into the queue."""
        ready = select.poll()
        ready.register(pipe, select.POLLIN)
        rest = b""
        while True:
            if source.holds_since() is not None and not ready.poll(PROMPT_S * 1000):
                source.flush()
            chunk = os.read(pipe.fileno(), _CHUNK)
            rest = self._take(rest + chunk, source)
            if not chunk:
                source.feed(rest)
                source.end()
                return

    def _take(self, text: bytes, source: Source) -> bytes:
        """Takes text and messages; returns what may be the begin of a message."""
        if self._answered:
            source.name = ""  # the agent says what is whose
        if source.target == STDERR:
            self._said = (self._said + text)[-_SAID:]
            source.feed(text)
            return b""
        marker = self._marker.encode()
        while (at := text.find(marker)) >= 0:
            source.feed(text[:at])
            message, end, after = text[at + len(marker) :].partition(b"\n")
            if not end:
                return text[at:]
            self._answered = True
            self._events.put((self, json.loads(message)))
            text = after
        begin = text.find(marker[:1], max(0, len(text) - len(marker) + 1))
        begin = len(text) if begin < 0 else begin
        source.feed(text[:begin])
        return text[begin:]

    def _wait(self) -> None:
        code = self._process.wait()
        for thread in self._threads:  # its messages come before its end
            thread.join(5)
        self._events.put((self, {"what": "ended", "code": code}))
