"""Fresh processes that have imported PyTorch already: forked from one that has, and nothing else.

Importing PyTorch takes longer than most tests. What a program finds is what ``python script.py``
would have given it: its own ``__main__``, arguments, variables, output, and Python's ordinary end,
``atexit`` included. Three things differ: its parent, the seed of hash(), and that the garbage
collector does not see what was imported here.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import runpy
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from types import ModuleType

__all__ = ["ForkedProcess", "Zygote"]

_PRELOADED = ("torch", "torch._dynamo", "torch.distributed")  # optimizers import the second
_READ_ONCE = ("PYTHON", "LD_", "OMP_", "MKL_", "TORCH")


@dataclass(frozen=True)
class _Start:
    """What the zygote is asked to fork."""

    program: str
    is_module: bool
    args: tuple[str, ...]
    env: Mapping[str, str]
    stdout: str
    stderr: str
    with_pipe: bool


class ForkedProcess:
    """As much of `subprocess.Popen` as tests need."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self._zygote = zygote
        self._ended = os.pidfd_open(pid)  # not reaped yet, so it is this process
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The return code, once the process has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end.

        Raises:
            subprocess.TimeoutExpired: it has not come after `timeout` seconds.
        """
        if self.returncode is None:
            # Not select(): pytest may have more than 1024 files open.
            waiting = select.poll()
            waiting.register(self._ended, select.POLLIN)
            if not waiting.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("script", timeout or 0.0)
            self.returncode = self._zygote.reap(self.pid)
            os.close(self._ended)
        return self.returncode

    def send_signal(self, how: signal.Signals) -> None:
        """Sends a signal, unless the process has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._ended, how)

    def kill(self) -> None:
        """Ends it at once."""
        self.send_signal(signal.SIGKILL)


class Zygote:
    """The process to fork from; it ends with this one."""

    def __init__(self, env: Mapping[str, str]) -> None:
        """``env``: for the imports."""
        self._env = self._read_once(env)
        self._lock = threading.Lock()
        self._pipe, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno())],
            env=env,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()

    def fits(self, env: Mapping[str, str]) -> bool:
        """Whether nothing in `env` that is read while Python starts or imports is another."""
        return self._read_once(env) == self._env

    @staticmethod
    def _read_once(env: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in env.items() if name.startswith(_READ_ONCE)}

    def start(
        self,
        program: Path | str,
        args: Sequence[str],
        env: Mapping[str, str],
        out: Path,
        err: Path,
        pipe: Connection | None = None,
    ) -> ForkedProcess:
        """As ``python program args``, with these variables and no other, and output in files.

        Args:
            program: a script, or the name of a module as for ``python -m``.
            pipe: the process gets it too; the number of its descriptor is a last argument.
        """
        is_module = isinstance(program, str)
        start = _Start(
            str(program), is_module, tuple(args), dict(env), str(out), str(err), pipe is not None
        )
        return ForkedProcess(self, self._ask(start, pipe))

    def reap(self, pid: int) -> int:
        """The return code of a process that has ended."""
        return self._ask(pid)

    def close(self) -> None:
        """Ends the zygote; what it has forked runs on."""
        self._pipe.close()
        self._process.wait()

    def _ask(self, request: _Start | int, pipe: Connection | None = None) -> int:
        with self._lock:
            self._pipe.send_bytes(pickle.dumps(request))
            if pipe is not None:
                send_handle(self._pipe, pipe.fileno(), self._process.pid)
            answer: int = pickle.loads(self._pipe.recv_bytes())
        return answer


def _serve(pipe: Connection) -> _Start | None:
    """Forks until nobody asks any more: None. In a child it returns what that is to run."""
    while True:
        try:
            request = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return None
        if isinstance(request, int):
            _, status = os.waitpid(request, 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            passed = [recv_handle(pipe)] if request.with_pipe else []
            answer = os.fork()
            if answer == 0:
                pipe.close()
                return replace(request, args=(*request.args, *map(str, passed)))
            for descriptor in passed:
                os.close(descriptor)
        pipe.send_bytes(pickle.dumps(answer))


def _become(start: _Start) -> None:
    """Makes this process what Python would have made of the program, and runs it."""
    for path, stream in ((start.stdout, 1), (start.stderr, 2)):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, stream)
        os.close(file)
    os.environ.clear()
    os.environ.update(start.env)
    # What hvd_order_alias.pth does while Python starts; the zygote started without this variable.
    if os.environ.get("HVD_ORDER_ALIAS"):
        importlib.import_module("hvd_order.compat.horovod.startup")
    sys.argv = [start.program, *start.args]
    if start.is_module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(start.program, run_name="__main__", alter_sys=True)
        return
    sys.path[0] = str(Path(start.program).parent)
    main = ModuleType("__main__")
    main.__dict__.update(__file__=start.program, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    exec(compile(Path(start.program).read_bytes(), start.program, "exec"), main.__dict__)


if __name__ == "__main__":
    # For the name that pickles of `Zygote` have.
    sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
    from helpers import zygote

    for _name in _PRELOADED:
        importlib.import_module(_name)
    gc.freeze()  # no collection in a child looks at what was imported here
    if (_start := zygote._serve(Connection(int(sys.argv[1])))) is not None:
        zygote._become(_start)
