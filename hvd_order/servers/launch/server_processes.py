"""Parameter server processes that the launcher has started on the job's hosts."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import hvd_order
from hvd_order.launch.hosts import Host, is_this_host
from hvd_order.launch.jobs.agent_process import ssh_command
from hvd_order.launch.jobs.kill_with_parent import kill_with_children, kill_with_parent

__all__ = ["ServerProcesses"]

_MODULE = "hvd_order.servers.process.process"
# Program that ssh runs: reads its variables, then becomes the server.
_BOOT = (
    "import json, os, sys; job = json.loads(sys.stdin.readline()); os.environ.update(job['env']); "
    "os.execvp(sys.executable, [sys.executable, *job['arguments']])"
)
_GRACE_S = 10.0


class ServerProcesses:
    """The servers of a job. Thread safety: all methods may be called from any thread."""

    def __init__(
        self,
        hosts: Sequence[Host],
        workers: int,
        ssh_options: Sequence[str],
        env: Mapping[str, str],
    ) -> None:
        """Starts no server yet.

        Args:
            hosts: hosts of the job; empty: this host.
            workers: number of workers of the job.
            ssh_options: options of ``ssh``, before the host.
            env: variables for the servers in addition to this process's current ones.
        """
        self._hosts = [host.name for host in hosts] or ["localhost"]
        self._arguments = ["-m", _MODULE, str(workers)]
        self._ssh_options = list(ssh_options)
        self._env = dict(env)
        self._own_env = dict(os.environ)  # the launcher changes it while workers run
        self._lock = threading.Lock()  # guards what follows
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []

    def running(self) -> int:
        """Number of running servers."""
        with self._lock:
            return len(self._running())

    def _running(self) -> list[str]:
        return [host for host, process in self._processes if process.poll() is None]

    def start(self) -> tuple[str, subprocess.Popen[bytes]]:
        """Starts a server on a host with the fewest servers, taking such hosts in turn.

        Returns:
            Host and process.

        Raises:
            OSError: ``ssh`` does not exist, or no process can be started.
        """
        with self._lock:
            running = self._running()
            next_ = self._hosts.index(self._processes[-1][0]) + 1 if self._processes else 0
            host = min(self._hosts[next_:] + self._hosts[:next_], key=running.count)
            process = self._start_on(host)
            self._processes.append((host, process))
            return host, process

    def _start_on(self, host: str) -> subprocess.Popen[bytes]:
        if is_this_host(host):
            env = {**self._own_env, **self._env}
            return subprocess.Popen(kill_with_parent([sys.executable, *self._arguments]), env=env)
        path = os.pathsep.join([str(Path(hvd_order.__file__).parents[1]), *filter(None, sys.path)])
        program = shlex.join([sys.executable, "-c", _BOOT])
        process = subprocess.Popen(
            [*ssh_command(self._ssh_options), host, program],
            stdin=subprocess.PIPE,
            env=self._own_env,
        )
        assert process.stdin is not None
        job = {"env": {"PYTHONPATH": path, **self._env}, "arguments": self._arguments}
        with contextlib.suppress(OSError), process.stdin as pipe:  # workers report the server's end
            pipe.write(json.dumps(job).encode() + b"\n")
        return process

    def end(self, grace_s: float = _GRACE_S) -> None:
        """Waits for the servers, and ends those that remain.

        A server ends by itself when all workers have left, but not if a worker never connected.
        Ctrl-C during the wait ends all servers at once.

        Args:
            grace_s: seconds for servers to end by themselves.
        """
        with self._lock:
            processes = [process for _, process in self._processes]
        try:
            _end(processes, grace_s)
        except KeyboardInterrupt:
            for process in processes:
                kill_with_children(process)
            for process in processes:
                process.wait()


def _end(processes: Sequence[subprocess.Popen[bytes]], grace_s: float) -> None:
    deadline = time.monotonic() + grace_s
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
