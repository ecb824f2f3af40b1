"""Real processes for tests: a pool that stays for the session, and fresh ones that may die.

`RankPool.run` calls a function in every rank and gives back what each returned::

    def total(value: float) -> float:             # runs in every rank, after hvd.init()
        return float(hvd.allreduce(torch.tensor(value * hvd.rank()), op=hvd.Sum))

    def test_total(ranks: RankFactory) -> None:   # runs in pytest
        assert ranks(3).run(total, 2.0) == [6.0, 6.0, 6.0]

`run_script` and `start_script` start fresh processes for tests that kill ranks.
Every process started here is ended here, by its id.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from helpers.zygote import ForkedProcess, Zygote

__all__ = [
    "AnyProcess",
    "Completed",
    "RankError",
    "RankFactory",
    "RankPool",
    "RanksHung",
    "Script",
    "free_port",
    "run_script",
    "start_process",
    "start_script",
]

REPOSITORY = Path(__file__).resolve().parents[2]
_WORKER = Path(__file__).with_name("rank_worker.py")
_GRACE_S = 15.0  # after the first error in a rank, for the others to end as well
_POOL_TIMEOUT_S = 20.0  # HVD_ORDER_TIMEOUT in the pool: an error there, before the test's timeout


class RankError(AssertionError):
    """A function raised in a rank; the text has the rank and its traceback.

    Attributes:
        rank: the first rank that failed.
        kind: class name of the exception there.
        message: its text.
    """

    def __init__(self, rank: int, kind: str, message: str, report: str) -> None:
        super().__init__(report)
        self.rank = rank
        self.kind = kind
        self.message = message


class RanksHung(AssertionError):  # noqa: N818  (says what happened)
    """Ranks did not answer in time; the text has what each of them was doing."""


def free_port() -> int:
    """A port of this host that nobody listens on just now.

    It is below those that Linux gives to outgoing connections: one of these could take it before
    the program that it is for.
    """
    draw = random.SystemRandom()
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", draw.randrange(20_000, 32_768)))
            port: int = probe.getsockname()[1]
            return port


def rank_environment(
    rank: int, size: int, port: int, extra: Mapping[str, str] | None = None
) -> dict[str, str]:
    """What torchrun would set for `rank` of `size` on this host; one thread each.

    Variables of a launcher around pytest itself are left out.
    """
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OMPI_", "PMI", "SLURM_", "HOROVOD_", "HVD_ORDER_", "TORCHELASTIC"))
    }
    path = [str(REPOSITORY), str(REPOSITORY / "tests"), env.get("PYTHONPATH", "")]
    env.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
        GROUP_RANK="0",
        GROUP_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        PYTHONPATH=os.pathsep.join(part for part in path if part),
        PYTHONFAULTHANDLER="1",
        PYTHONUNBUFFERED="1",
    )
    env.update(extra or {})
    return env


class RankPool:
    """`size` processes that stay and call functions; started with the first `run`.

    After an error or a hang the processes are replaced at the next `run`, so that one failing
    test does not disturb the next.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[ForkedProcess] = []
        self._pipes: list[Connection] = []
        self._logs: list[Path] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any
    ) -> list[Any]:
        """Calls ``function(*args, **kwargs)`` in every rank, after ``hvd.init()``.

        Args:
            function: of a module, not nested; it may stand in the test file itself.
            *args: picklable, the same for every rank.
            timeout: seconds for all of it (the start of the processes comes on top).
            **kwargs: as `args`.

        Returns:
            What each rank returned, in rank order (picklable).

        Raises:
            RankError: it raised in a rank.
            RanksHung: a rank did not answer.
        """
        if "<" in function.__qualname__:
            raise TypeError(f"{function.__qualname__} is nested; move it to the module's top level")
        if not self._processes:
            self._start()
        path = inspect.getsourcefile(function)
        assert path is not None
        call = (str(Path(path).resolve()), function.__module__, function.__qualname__)
        for pipe in self._pipes:
            # Not send(): it would pass tensors as memory shared with a process that may end.
            pipe.send_bytes(pickle.dumps((*call, (args, kwargs))))
        answers = self._collect(timeout)
        failed = [rank for rank, (ok, _) in sorted(answers.items()) if not ok]
        silent = [rank for rank in range(self.size) if rank not in answers]
        if not failed and not silent:
            return [answers[rank][1] for rank in range(self.size)]
        doing = self._what_they_do(silent)
        self.close(kill=True)
        if not failed:
            raise RanksHung(
                f"{function.__qualname__}: ranks {silent} of {self.size} gave no answer in "
                f"{timeout:g} s\n{doing}"
            )
        reports = [f"rank {rank}:\n{answers[rank][1][2]}" for rank in failed]
        kind, message, _ = answers[failed[0]][1]
        raise RankError(failed[0], kind, message, "\n".join([*reports, doing]))

    def close(self, kill: bool = False) -> None:
        """Ends the processes, politely unless `kill`; a second call does nothing."""
        if not kill:
            for pipe in self._pipes:
                with contextlib.suppress(OSError):
                    pipe.send_bytes(pickle.dumps(None))
        _end(self._processes, grace_s=0.0 if kill else 5.0)
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._pipes, self._logs, self._folder = [], [], [], None

    def _start(self) -> None:
        port = free_port()
        self._folder = tempfile.TemporaryDirectory(prefix="hvd_order_ranks_")
        for rank in range(self.size):
            ours, theirs = Pipe()
            log = Path(self._folder.name) / f"rank{rank}.log"
            env = rank_environment(
                rank, self.size, port, {"HVD_ORDER_TIMEOUT": str(_POOL_TIMEOUT_S)}
            )
            log.touch()
            self._processes.append(_zygote().start(_WORKER, [], env, log, log, pipe=theirs))
            theirs.close()
            self._pipes.append(ours)
            self._logs.append(log)

    def _collect(self, timeout: float) -> dict[int, tuple[bool, Any]]:
        """Each rank's answer; those that died or stayed silent are missing or not ok."""
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        waiting = dict(zip(self._pipes, range(self.size), strict=True))
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), timeout=left):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    code = self._processes[rank].wait(timeout=10)
                    text = f"the process ended with code {code}\n{self._logs[rank].read_text()}"
                    answers[rank] = (False, ("ProcessDied", text, text))
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        return answers

    def _what_they_do(self, ranks: Sequence[int]) -> str:
        """Asks `ranks` for the stacks of all their threads."""
        sizes = {rank: self._logs[rank].stat().st_size for rank in ranks}
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                self._processes[rank].send_signal(signal.SIGUSR1)
        time.sleep(0.5 if ranks else 0.0)
        return "\n".join(
            f"rank {rank} gave no answer and was here:\n"
            + self._logs[rank].read_text(errors="replace")[sizes[rank] :]
            for rank in ranks
        )


RankFactory = Callable[[int], RankPool]
AnyProcess = subprocess.Popen[bytes] | ForkedProcess


@dataclass(frozen=True)
class Completed:
    """How one process of a script ended; a negative return code is the signal."""

    rank: int
    returncode: int
    stdout: str
    stderr: str


class Script:
    """Fresh processes that run one script; `start_script` makes it. A context manager."""

    def __init__(
        self, processes: Sequence[AnyProcess], folder: tempfile.TemporaryDirectory[str]
    ) -> None:
        self._processes = processes
        self._folder = folder

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return [process.pid for process in self._processes]

    def kill(self, rank: int, how: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to one rank."""
        self._processes[rank].send_signal(how)

    def stdout(self, rank: int) -> str:
        """What `rank` has printed so far."""
        return self._text(rank, "out")

    def wait_for_output(self, rank: int, text: str, timeout: float = 60.0) -> None:
        """Waits until `rank` has printed `text`, for example before it is killed.

        Raises:
            RanksHung: it has not, or has ended without it.
        """
        deadline = time.monotonic() + timeout
        while text not in self.stdout(rank):
            ended = self._processes[rank].poll() is not None and text not in self.stdout(rank)
            if ended or time.monotonic() > deadline:
                raise RanksHung(f"rank {rank} did not print {text!r}:\n{self._report()}")
            time.sleep(0.01)

    def wait(self, timeout: float = 60.0) -> list[Completed]:
        """Waits for all processes.

        Raises:
            RanksHung: some run on after `timeout` seconds; they are ended and their stacks shown.
        """
        deadline = time.monotonic() + timeout
        hung = []
        for rank, process in enumerate(self._processes):
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                hung.append(rank)
        if hung:
            report = self._end_with_stacks(hung)
            self.close()
            raise RanksHung(f"ranks {hung} still run after {timeout:g} s\n{report}")
        return [
            Completed(rank, process.returncode, self._text(rank, "out"), self._text(rank, "err"))
            for rank, process in enumerate(self._processes)
        ]

    def wait_for_end(self, rank: int, timeout: float = 60.0) -> Completed:
        """Waits for one rank, whatever the others do.

        Raises:
            RanksHung: it runs on.
        """
        try:
            self._processes[rank].wait(timeout)
        except subprocess.TimeoutExpired:
            report = self._end_with_stacks([rank])
            raise RanksHung(f"rank {rank} runs after {timeout:g} s\n{report}") from None
        code = self._processes[rank].returncode
        return Completed(rank, code, self._text(rank, "out"), self._text(rank, "err"))

    def _end_with_stacks(self, ranks: list[int]) -> str:
        """Ends processes and returns what all have printed, the stacks of these at the end."""
        for rank in ranks:
            self.kill(rank, signal.SIGABRT)  # faulthandler prints the stacks of all threads
        for rank in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._processes[rank].wait(timeout=10.0)
        return self._report()

    def close(self) -> None:
        """Ends what still runs and removes the output; a second call does nothing."""
        _end(self._processes, grace_s=0.0)
        self._folder.cleanup()

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _text(self, rank: int, stream: str) -> str:
        return (Path(self._folder.name) / f"rank{rank}.{stream}").read_text(errors="replace")

    def _report(self) -> str:
        ranks = range(len(self._processes))
        return "\n".join(
            f"---- rank {rank}, output\n{self._text(rank, 'out')[-2000:]}\n"
            f"---- rank {rank}, errors\n{self._text(rank, 'err')[-6000:]}"
            for rank in ranks
        )


def start_script(
    size: int,
    source: str | Path,
    *args: str,
    env: Mapping[str, str] | Callable[[int], Mapping[str, str]] | None = None,
) -> Script:
    """Starts `size` fresh processes as torchrun would on this host.

    Args:
        size: how many.
        source: a file, or the program's text (indented as one likes).
        args: its arguments.
        env: further variables, or a function from the rank to them.

    Returns:
        The running processes; use it in a ``with`` statement.
    """
    folder = tempfile.TemporaryDirectory(prefix="hvd_order_script_")
    if isinstance(source, Path):
        path = source
    else:
        path = Path(folder.name) / "script.py"
        path.write_text(textwrap.dedent(source), encoding="utf-8")
    port = free_port()
    processes = []
    for rank in range(size):
        extra = env(rank) if callable(env) else env
        out, err = (Path(folder.name) / f"rank{rank}.{stream}" for stream in ("out", "err"))
        processes.append(
            start_process(path, args, rank_environment(rank, size, port, extra), out, err)
        )
    return Script(processes, folder)


def start_process(
    program: Path | str, args: Sequence[str], env: Mapping[str, str], out: Path, err: Path
) -> AnyProcess:
    """As ``python program args``, or ``python -m program args`` where `program` is a name.

    Args:
        program: a script, or the name of a module.
        env: all variables.
        out: file for its output, made anew.
        err: file for its errors; it may be the same.
    """
    with out.open("wb") as stdout, err.open("ab") as stderr:
        if _zygote().fits(env):
            return _zygote().start(program, args, env, out, err)
        module = ["-m"] if isinstance(program, str) else []
        return subprocess.Popen(
            [sys.executable, *module, str(program), *args],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
        )


@functools.cache
def _zygote() -> Zygote:
    zygote = Zygote(rank_environment(0, 1, 0))
    atexit.register(zygote.close)
    return zygote


def run_script(
    size: int,
    source: str | Path,
    *args: str,
    env: Mapping[str, str] | Callable[[int], Mapping[str, str]] | None = None,
    timeout: float = 60.0,
) -> list[Completed]:
    """`start_script`, then waits `timeout` seconds at most for all to end."""
    with start_script(size, source, *args, env=env) as script:
        return script.wait(timeout)


def _end(processes: Sequence[AnyProcess], grace_s: float) -> None:
    """Waits `grace_s` seconds for all, then kills those that are left."""
    deadline = time.monotonic() + grace_s
    for process in processes:
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
