"""Runs jobs by ``hvd-order run``, as elastic jobs whose hosts come from a file."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hvd_order.cluster.serve.jobs_file import ServedJob
from hvd_order.cluster.serve.runner import JobStatus, Slots, counts
from hvd_order.launch.jobs.formation_file import read_formation

__all__ = ["LocalRunner", "job_environment"]

# Between scheduler and launcher stands a shell that keeps the exit code: the job outlives a
# scheduler that is killed, and the next one, not its parent, cannot wait for it.
_KEEPER = """\
trap : TERM INT HUP
echo $$ > "$0/pid"
"$@"
echo $? > "$0/code.part"
mv "$0/code.part" "$0/code"
"""


def job_environment(folder: Path) -> dict[str, str]:
    """Variables of a job: where it keeps its commits."""
    return {**os.environ, "HVD_ORDER_ELASTIC_DIR": str(folder / "commits")}


class LocalRunner:
    """Starts launchers on this machine; they start the workers here and by ssh.

    A job's folder holds its files: ``hosts`` (for the launcher), ``slots`` (the same with the
    numbers of slots), ``formation`` (from the launcher), ``pid``, ``code``, ``log``, ``commits``.

    Args:
        folder: folder of all jobs; other machines must see it at the same place.
        host_timeout_s: longest wait of a job for its hosts.
        options: further options of ``hvd-order run``.
    """

    resizes = True

    def __init__(self, folder: Path, host_timeout_s: float, options: Sequence[str] = ()) -> None:
        self._folder = folder.absolute()
        self._host_timeout_s = host_timeout_s
        self._options = list(options)
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, served: ServedJob, slots: Slots) -> None:
        """See `Runner`."""
        name = served.job.name
        folder = self._folder / name
        (folder / "commits").mkdir(parents=True, exist_ok=True)
        for old in ("code", "formation", "pid"):
            (folder / old).unlink(missing_ok=True)
        self._write(name, slots)
        least = min(served.job.least, sum(counts(slots).values()))
        command = [
            sys.executable, "-m", "hvd_order.tools.cli", "run", "-np", str(least),
            "--min-np", str(least),
            "--host-discovery-script", f"cat {shlex.quote(str(folder / 'hosts'))}",
            "--formation-file", str(folder / "formation"),
            "--elastic-timeout", f"{self._host_timeout_s:g}", *self._options, *served.command,
        ]  # fmt: skip
        with self.log(name).open("ab") as log:
            self._children[name] = subprocess.Popen(
                ["sh", "-c", _KEEPER, str(folder), *command],
                env=job_environment(folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def give(self, name: str, slots: Slots) -> None:
        """See `Runner`."""
        self._write(name, slots)

    def stop(self, name: str) -> None:
        """See `Runner`."""
        self._signal(name, signal.SIGTERM)

    def kill(self, name: str) -> None:
        """See `Runner`. Workers end when they lose their launcher."""
        self._signal(name, signal.SIGKILL)

    def look(self, name: str) -> JobStatus:
        """See `Runner`."""
        if self._group(name) is not None:
            return JobStatus(running=True, within_slots=self._within_slots(name))
        code = _number_in(self._folder / name / "code")  # it is there before the process has gone
        return JobStatus(running=False, code=code)

    def find(self, name: str) -> Slots | None:
        """See `Runner`."""
        if not (self._folder / name / "pid").exists():
            return None
        return self._given(name)

    def log(self, name: str) -> Path:
        """See `Runner`."""
        return self._folder / name / "log"

    def _write(self, name: str, slots: Slots) -> None:
        folder = self._folder / name
        lines = [
            f"{host}:{len(numbers)} devices={','.join(str(k) for k in numbers)}\n"
            for host, numbers in slots.items()
            if numbers
        ]
        for file, text in (("slots", json.dumps(slots)), ("hosts", "".join(lines))):
            draft = folder / f"{file}.part"
            draft.write_text(text, encoding="utf-8")
            os.replace(draft, folder / file)

    def _given(self, name: str) -> Slots:
        text = (self._folder / name / "slots").read_text(encoding="utf-8")
        return {host: tuple(numbers) for host, numbers in json.loads(text).items()}

    def _within_slots(self, name: str) -> bool:
        formed = read_formation(self._folder / name / "formation")
        if formed is None:
            return False  # the launcher may still begin with what it was given first
        given = self._given(name)
        inside = all(set(numbers) <= set(given.get(host, ()))
                     for host, numbers in formed.devices.items())  # fmt: skip
        return formed.began and inside and not set(formed.leaving) - set(given)

    def _signal(self, name: str, number: signal.Signals) -> None:
        group = self._group(name)
        if group is not None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(group, number)

    def _group(self, name: str) -> int | None:
        """Process group of a job that runs. The keeper leads it."""
        child = self._children.get(name)
        if child is not None:
            return child.pid if child.poll() is None else None
        pid = _number_in(self._folder / name / "pid")
        if pid is None:
            return None
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return None
        # Process ids are used again; only the keeper of this job has the folder in its command.
        return pid if str(self._folder / name).encode() in command else None


def _number_in(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (FileNotFoundError, ValueError):  # none, or just being written
        return None
