"""Agent of one host in a job over several hosts, or in an elastic job: ``main`` runs there.

The launcher starts it, locally or by ssh, and writes to its standard input: first one line of JSON
with the job, including the environment with its secrets, then a line for each formation. When that
pipe breaks because the launcher or the connection died, the agent and its workers end. The agent
writes messages to standard output, in lines that begin with a secret marker of the launcher.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import IO, Any

from hvd_order.base.errors import InvalidUsage
from hvd_order.launch.elastic.agent import agent_folders
from hvd_order.launch.elastic.commits import CommitFolder
from hvd_order.launch.hosts import check_room, interface_address, interface_variables
from hvd_order.launch.jobs.formations import (
    Formation,
    FormationInbox,
    JobEnded,
    Stopped,
    WorkerFailure,
)
from hvd_order.launch.rank_function import FunctionFolder
from hvd_order.launch.request import OutputRules

__all__ = ["BOOT", "main"]

# hvd_order cannot be imported before the first line, which gives its path.
BOOT = (
    "import json, os, sys; pipe = os.fdopen(os.dup(0), 'rb'); "
    "job = json.loads(pipe.readline()); sys.path[:0] = job['path']; "
    "from hvd_order.launch.jobs.host_agent import main; sys.exit(main(job, pipe))"
)

# Not SIGTERM: elastic workers treat it as a change of hosts and would finish their step.
_STOP = signal.SIGHUP


def main(job: dict[str, Any], pipe: IO[bytes]) -> int:
    """Serves a job on this host until its end.

    Args:
        job: marker, remote, env, folder, command, processes, oversubscribe, restart, interfaces,
            prefix, timestamps, output, host (in labels), verbose, call (see rank_function.py).
        pipe: further lines from the launcher.

    Returns:
        The exit code; the launcher relies on the messages instead.
    """
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # workers must not read the launcher's lines
    # nohup would make this process and the workers ignore it; this session has no terminal.
    signal.signal(_STOP, _stop)  # until torch's agent has a handler of its own
    os.environ.update(job["env"])
    launcher = _Launcher(job["marker"], FunctionFolder(job["call"]))
    try:
        _check(job)
        address = _address(job["interfaces"], job["remote"])
        try:
            with _quiet_torch(job["verbose"]):
                from hvd_order.launch.jobs.torch_agent import run_workers
        except ImportError as error:
            raise InvalidUsage(
                f"PyTorch cannot be imported with {sys.executable}: {error}"
            ) from None
        inbox = FormationInbox(
            lambda what, number, failure: _report(launcher, what, number, failure)
        )
        threading.Thread(target=_listen, args=(pipe, inbox, launcher), daemon=True).start()
        launcher.send("ready", **address)
        failure = run_workers(
            job["command"],
            inbox,
            job["processes"],
            restart=job["restart"],
            output=OutputRules(job["prefix"], job["timestamps"], _path(job["output"])),
            host=job["host"],
            verbose=job["verbose"],
        )
    except JobEnded:
        return 0
    except Stopped as stop:
        return 128 + stop.signal
    except (InvalidUsage, OSError) as error:
        launcher.send("error", text=str(error))
        return 1
    finally:
        signal.signal(_STOP, signal.SIG_IGN)  # of _listen, too late to matter
        launcher.send_outcomes()
        launcher.folder.remove()
        for folder in agent_folders(os.getpid()):
            shutil.rmtree(folder, ignore_errors=True)
    if failure is not None:
        launcher.send("failed", formation=1, commit=0, **dataclasses.asdict(failure))
        return 1
    return 0


class _Launcher:
    """Sends messages to the launcher."""

    def __init__(self, marker: str, folder: FunctionFolder) -> None:
        self.folder = folder
        self._marker = marker
        self._output = os.dup(1)

    def send(self, what: str, **details: object) -> None:
        line = f"{self._marker}{json.dumps({'what': what, **details})}\n"
        # One call, so that no worker's output is mixed in.
        os.write(self._output, line.encode())

    def send_outcomes(self) -> None:
        """Sends what the job's function did on this host's ranks, before their end is known."""
        for message in self.folder.messages():
            self.send("outcome", **message)


def _report(launcher: _Launcher, what: str, number: int, failure: WorkerFailure | None) -> None:
    details = dataclasses.asdict(failure) if failure is not None else {}
    launcher.send_outcomes()
    launcher.send(what, formation=number, commit=_newest_commit(), **details)


def _newest_commit() -> int:
    """Number of the newest commit, which separates a job with progress from a failing one."""
    directory = os.environ.get("HVD_ORDER_ELASTIC_DIR")
    folders = [Path(directory)] if directory else agent_folders(os.getpid())
    commit = CommitFolder(folders, durable=bool(directory)).newest()
    return 0 if commit is None else commit.number


def _listen(pipe: IO[bytes], inbox: FormationInbox, launcher: _Launcher) -> None:
    """Reads the launcher's lines until it releases this host, or until the pipe ends."""
    from hvd_order.launch.jobs.torch_agent import serve_store

    stores: list[object] = []  # kept, for the workers of the latest formation and of the one before
    try:
        for line in pipe:
            message = json.loads(line)
            if message["what"] == "serve":
                store = serve_store(message["address"])
                stores = [*stores[-1:], store]
                launcher.send("serving", formation=message["formation"], port=store.port)
            elif message["what"] == "formation":
                inbox.announce(Formation(**message["formation"]))
            elif message["what"] == "leave":
                inbox.end()
                return
            elif message["what"] in ("stop", "kill"):  # a second signal means: at once
                inbox.end()
                os.kill(os.getpid(), _STOP)
    except (RuntimeError, OSError) as error:  # the store failed, or the launcher is gone
        with contextlib.suppress(OSError):
            launcher.send("error", text=f"nothing can be served here: {error}")
    inbox.end()
    os.kill(os.getpid(), _STOP)


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)


def _check(job: dict[str, Any]) -> None:
    """Raises InvalidUsage if the job cannot run here."""
    try:
        os.chdir(job["folder"])
    except OSError as error:
        raise InvalidUsage(
            f"there is no folder {job['folder']} ({error.strerror}); the program must be at the "
            "same place on every host"
        ) from None
    if not job["oversubscribe"]:
        check_room(job["processes"])
    command = job["command"]
    if shutil.which(command[0]) is None:
        raise InvalidUsage(f"there is no command {command[0]!r} to run {shlex.join(command)}")


@contextlib.contextmanager
def _quiet_torch(verbose: bool) -> Iterator[None]:
    """Stops torch's C++ code in this process, not in the workers, from logging peers' ends."""
    name = "TORCH_CPP_LOG_LEVEL"
    if verbose or name in os.environ:
        yield
        return
    os.environ[name] = "ERROR"  # read when torch is imported
    yield
    del os.environ[name]


def _address(interfaces: list[str], remote: bool) -> dict[str, str | None]:
    """Address of this host for others, and of the launcher's host, if known."""
    connection = os.environ.get("SSH_CONNECTION", "").split() if remote else []
    client, server = (connection[0], connection[2]) if len(connection) == 4 else (None, None)
    if interfaces:
        os.environ.update(interface_variables(interfaces))
        server = interface_address(interfaces[0])
    return {"address": server, "launcher": client}
