"""The ranks of one process group, one on each emulated host, and how to command them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from benchmarks.runner.records.environment import ROOT


class RankFailed(RuntimeError):  # noqa: N818  (says what happened)
    """A rank ended or did not answer; its standard error says why."""


class Hosts(Protocol):
    """Where ranks run."""

    def popen(self, rank: int, command: Sequence[str], /, **options: Any) -> subprocess.Popen[Any]:
        """Starts a rank's program; the options are those of ``subprocess.Popen``."""


class Fleet:
    """Ranks that obey together."""

    def __init__(
        self,
        hosts: Hosts,
        peer: str,
        log: TextIO,
        env: list[dict[str, str]],
        restless: bool = False,
        tree: Path = ROOT,
    ) -> None:
        """Starts one rank on each host and waits until they have met.

        Args:
            peer: as in worker.py or, where it begins with "tensorflow", tensorflow_worker.py.
            log: takes what the ranks write to standard error.
            env: variables by rank, on top of those of the host.
            restless: even idle, its ranks would disturb others: Horovod talks a thousand times a
                second, and each process group has threads that wake a hundred times a second.
            tree: the checkout whose worker and package the ranks run.
        """
        self.size = len(env)
        self.peer = peer
        self._restless = restless
        self._log = log
        own = "tensorflow_worker.py" if peer.startswith("tensorflow") else "worker.py"
        worker = tree / "benchmarks" / "runner" / own
        path = {"PYTHONPATH": str(tree)}
        self._ranks = [
            hosts.popen(
                rank, [sys.executable, str(worker), peer],
                env={**os.environ, "OMP_NUM_THREADS": "1", **path, **env[rank]},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )
            for rank in range(self.size)
        ]  # fmt: skip
        self._answers(timeout_s=120)

    def __call__(self, do: str, timeout_s: float = 1800, **arguments: Any) -> list[Any]:
        """Gives all ranks one command; returns their answers, by rank.

        Raises:
            RankFailed: a rank ended or did not answer in time.
        """
        line = json.dumps({"do": do, **arguments}) + "\n"
        for rank, process in enumerate(self._ranks):
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except BrokenPipeError:
                raise self._failure(rank, f"{self._end(rank)} before {do!r}") from None
        return self._answers(timeout_s, do)

    def wire_s(self, size_bytes: int, rounds: int) -> list[float]:
        """Seconds of all-reduces of so many bytes on the slowest rank when nothing else runs."""
        with self.awake():
            answers = self("wire", size_bytes=size_bytes, rounds=rounds)
        return [max(seconds) for seconds in zip(*answers, strict=True)]

    def _answers(self, timeout_s: float, do: str = "start") -> list[Any]:
        answers = []
        for rank, process in enumerate(self._ranks):
            assert process.stdout is not None
            if not select.select([process.stdout], [], [], timeout_s)[0]:
                raise self._failure(rank, f"has not answered {do!r} for {timeout_s:g} s")
            line = process.stdout.readline()
            if not line:
                raise self._failure(rank, f"{self._end(rank)} during {do!r}")
            answers.append(json.loads(line))
        return answers

    def _end(self, rank: int) -> str:
        """How a rank ended whose pipe is closed."""
        try:
            status = self._ranks[rank].wait(10)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        if status == -signal.SIGKILL:
            return "was killed (by the kernel, if memory was short: see dmesg)"
        return f"ended by signal {-status}" if status < 0 else f"ended with status {status}"

    def _failure(self, rank: int, what: str) -> RankFailed:
        self._log.flush()
        return RankFailed(f"{self.peer} rank {rank} {what}; see {self._log.name}")

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Restless ranks run for this long only, and are stopped while others have their turn."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.sleep()

    def sleep(self) -> None:
        """Stops the ranks where they are."""
        if self._restless:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        if self._restless:
            for process in self._ranks:
                process.send_signal(number)

    def close(self) -> None:
        """Ends the ranks, in peace where they still obey."""
        with contextlib.suppress(RankFailed):
            self._signal(signal.SIGCONT)
            self("quit", timeout_s=30)
        for process in self._ranks:
            process.kill()
            process.wait()
