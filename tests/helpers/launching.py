"""`hvd-order run` and torchrun as a user starts them, with an ``ssh`` that stays on this host."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from helpers.flags import comes_true
from helpers.processes import arguments_of, is_running, processes
from helpers.ranks import REPOSITORY

__all__ = [
    "Job",
    "fake_ssh",
    "gone",
    "launcher",
    "launcher_environment",
    "no_interface_chosen",
    "no_process_with",
    "run_cli",
    "write_script",
]

# Runs its command here. A host called "unreachable" cannot be reached; one called "silent" says
# nothing and takes nothing.
_FAKE_SSH = """\
#!{python}
import os, sys, time
args = sys.argv[1:]
while args[0].startswith("-"):
    args = args[2:]
host, command = args[0], " ".join(args[1:])
with open({log!r}, "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
if host == "unreachable":
    sys.stderr.write("ssh: connect to host unreachable port 22: No route to host\\n")
    sys.exit(255)
if host == "silent":
    time.sleep(100)
keep = ("PATH", "LANG", "PYTHONPATH")  # as a login has: the job's variables come otherwise
env = {{name: os.environ[name] for name in keep if name in os.environ}}
env["HOME"] = os.path.dirname({log!r})
env["SSH_CONNECTION"] = "127.0.0.1 40000 127.0.0.1 22"
os.execvpe("sh", ["sh", "-c", "exec " + command], env)
"""


def launcher(*arguments: str) -> list[str]:
    """The command line of ``hvd-order run``."""
    return [sys.executable, "-m", "hvd_order.tools.cli", "run", *arguments]


def launcher_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's variables, with the repository on the path.

    Without PYTHONUNBUFFERED: ranks that share a stream would write a line and its end separately,
    and lines of two ranks run together. ``print(..., flush=True)`` writes a whole line then.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    path = os.pathsep.join(filter(None, [str(REPOSITORY), env.get("PYTHONPATH")]))
    return {**env, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(extra or {})}


def no_interface_chosen() -> dict[str, str]:
    """`launcher_environment` as a user has it who has named no network interface."""
    env = launcher_environment()
    return {name: value for name, value in env.items() if not name.endswith("_SOCKET_IFNAME")}


def run_cli(
    *arguments: object, env: Mapping[str, str] | None = None, timeout: float = 160.0
) -> subprocess.CompletedProcess[str]:
    """``hvd-order`` with these arguments, until its end.

    Args:
        env: all variables; those of `launcher_environment` by default.
        timeout: seconds.
    """
    return subprocess.run(
        [sys.executable, "-m", "hvd_order.tools.cli", *map(str, arguments)],
        env=launcher_environment() if env is None else env, cwd=REPOSITORY, capture_output=True,
        text=True, timeout=timeout, check=False,
    )  # fmt: skip


def fake_ssh(folder: Path) -> tuple[dict[str, str], Path]:
    """Puts an ``ssh`` of ours first on the path.

    Returns:
        Variables for `launcher_environment`, and the file that gets its command lines.
    """
    program, log = folder / "bin" / "ssh", folder / "ssh.log"
    program.parent.mkdir()
    program.write_text(_FAKE_SSH.format(python=sys.executable, log=str(log)), encoding="utf-8")
    program.chmod(0o755)
    return {"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}, log


def write_script(folder: Path, source: str) -> list[str]:
    """The command line of a script with this text."""
    script = folder / "train.py"
    script.write_text(textwrap.dedent(source), encoding="utf-8")
    return [sys.executable, str(script)]


class Job:
    """A command whose output is read while it runs. A context manager; it ends the command."""

    def __init__(self, command: list[str], env: Mapping[str, str]) -> None:
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            # What runs in the background ignores Ctrl-C, and so would its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._new: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(
        self, pattern: str, fits: Callable[[re.Match[str]], bool] = bool, timeout: float = 180.0
    ) -> re.Match[str]:
        """Reads on until a line has `pattern` in it and its match `fits`."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                line = self._new.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                line = None
            assert line is not None, f"no line like {pattern!r} came:\n{self.text()}"
            match = re.search(pattern, line)
            if match is not None and fits(match):
                return match

    def wait(self, timeout: float = 180.0) -> int:
        """Waits for the end; returns the exit code."""
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s:\n{self.text()}") from None
        self._reader.join(10)
        return code

    @property
    def pid(self) -> int:
        """Process id of the command itself."""
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the command itself."""
        self._process.send_signal(number)

    def text(self) -> str:
        """All output so far."""
        return "\n".join(self.lines)

    def matches(self, pattern: str) -> list[re.Match[str]]:
        """Where `pattern` is found in the output so far."""
        return [match for line in self.lines if (match := re.search(pattern, line))]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(45)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip("\n"))
            self._new.put(line.rstrip("\n"))
        self._new.put(None)


def no_process_with(word: str) -> bool:
    """Whether within five seconds no command line has this argument any more."""
    return comes_true(lambda: not any(word in arguments_of(pid) for pid in processes()))


def gone(pid: int) -> bool:
    """Whether a process ends within five seconds."""
    return comes_true(lambda: not is_running(pid))
