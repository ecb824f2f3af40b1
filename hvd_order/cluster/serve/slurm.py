"""Runs jobs by ``sbatch``: one batch job a start, on the nodes that the policy chose.

Slurm cannot move a running job, so every change is a stop at a commit and another batch job.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hvd_order.base.errors import BrokenInvariant, InvalidUsage
from hvd_order.cluster.serve.jobs_file import ServedJob
from hvd_order.cluster.serve.local import job_environment
from hvd_order.cluster.serve.runner import JobStatus, Slots, counts

__all__ = ["SlurmRunner"]

_LONGEST_CALL_S = 60.0
_LOOK_S = 2.0  # between two questions about a job; each costs the controller work
_WAITS = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STAGE_OUT")
# Slurm signals the script alone; srun passes SIGTERM on to torchrun, and that to the ranks.
_SCRIPT = """\
#!/bin/bash
export workers={workers} nodes={nodes} python={python}
export head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export port=$((20000 + SLURM_JOB_ID % 10000))
srun --nodes=$nodes --ntasks=$nodes --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c '
  for each in $workers; do
    [ "${{each%:*}}" = "$SLURMD_NODENAME" ] && count=${{each##*:}}
  done
  exec "$python" -m torch.distributed.run --nnodes="$nodes" --nproc-per-node="$count" \\
    --rdzv-backend=c10d --rdzv-endpoint="$head:$port" --rdzv-id="$SLURM_JOB_ID" --no-python "$@"
' torchrun {command} &
step=$!
trap 'stopped=1; kill -TERM $step' TERM
wait $step
code=$?
[ -n "$stopped" ] && {{ wait $step; code=$?; }}
exit $code
"""


class SlurmRunner:
    """Submits batch jobs. Machines have the names of Slurm's nodes.

    A job's folder holds ``batch`` (the script), ``slurm`` (the job's number), ``slots``, ``log``
    and ``commits``; all nodes must see it at the same place.

    Args:
        folder: folder of all jobs.
        options: further options of ``sbatch``; ``{slots}`` in them becomes the largest number of
            workers on a node.

    Raises:
        InvalidUsage: Slurm is not installed here.
    """

    resizes = False

    def __init__(self, folder: Path, options: Sequence[str] = ()) -> None:
        if shutil.which("sbatch") is None:
            raise InvalidUsage(
                "there is no sbatch here; --slurm needs a machine of Slurm's cluster"
            )
        self._folder = folder.absolute()
        self._options = list(options)
        self._seen: dict[str, tuple[float, JobStatus]] = {}

    def start(self, served: ServedJob, slots: Slots) -> None:
        """See `Runner`."""
        name = served.job.name
        folder = self._folder / name
        (folder / "commits").mkdir(parents=True, exist_ok=True)
        workers = counts(slots)
        script = _SCRIPT.format(
            nodes=len(workers),
            workers=shlex.quote(" ".join(f"{node}:{n}" for node, n in workers.items())),
            python=shlex.quote(sys.executable),
            command=shlex.join(served.command),
        )
        (folder / "batch").write_text(script, encoding="utf-8")
        (folder / "slots").write_text(json.dumps(slots), encoding="utf-8")
        options = [each.replace("{slots}", str(max(workers.values()))) for each in self._options]
        number = _call(
            ["sbatch", "--parsable", f"--job-name={name}", f"--nodes={len(workers)}",
             f"--nodelist={','.join(workers)}", f"--output={self.log(name)}", "--open-mode=append",
             "--no-requeue", "--export=ALL", *options, str(folder / "batch")],
            folder,
        )  # fmt: skip
        (folder / "slurm").write_text(number.strip().split(";")[0], encoding="utf-8")
        self._seen.pop(name, None)

    def give(self, name: str, slots: Slots) -> None:
        """See `Runner`.

        Raises:
            BrokenInvariant: always; `resizes` says so.
        """
        raise BrokenInvariant(f"job {name!r} shall change while it runs, which Slurm cannot do")

    def stop(self, name: str) -> None:
        """See `Runner`. A job that has not begun is taken out of Slurm's queue."""
        number = self._number(name)
        with contextlib.suppress(InvalidUsage):  # it has just ended, or is ended later
            if "PENDING" in _call(["squeue", "-h", "-o", "%T", f"--jobs={number}"]):
                _call(["scancel", number])
            else:
                _call(["scancel", "--batch", "--signal=TERM", number])

    def kill(self, name: str) -> None:
        """See `Runner`."""
        with contextlib.suppress(InvalidUsage):
            _call(["scancel", self._number(name)])

    def look(self, name: str) -> JobStatus:
        """See `Runner`. Answers from the last two seconds are given again."""
        now = time.monotonic()
        asked, seen = self._seen.get(name, (-_LOOK_S, JobStatus(running=True)))
        if now - asked >= _LOOK_S:
            seen = self._ask(name)
            self._seen[name] = (now, seen)
        return seen

    def find(self, name: str) -> Slots | None:
        """See `Runner`."""
        if not (self._folder / name / "slurm").exists():
            return None
        text = (self._folder / name / "slots").read_text(encoding="utf-8")
        return {node: tuple(numbers) for node, numbers in json.loads(text).items()}

    def log(self, name: str) -> Path:
        """See `Runner`."""
        return self._folder / name / "log"

    def _number(self, name: str) -> str:
        return (self._folder / name / "slurm").read_text(encoding="utf-8")

    def _ask(self, name: str) -> JobStatus:
        try:
            told = _call(["scontrol", "-o", "show", "job", self._number(name)])
        except InvalidUsage as error:
            if "Invalid job id" in str(error):  # Slurm has forgotten it
                return JobStatus(running=False)
            sys.stderr.write(f"hvd-order: {error}; asked again later\n")
            return JobStatus(running=True)
        state = re.search(r"JobState=(\w+)", told)
        code = re.search(r"\bExitCode=(\d+):(\d+)", told)
        if state is None or code is None or state[1] in _WAITS:
            return JobStatus(running=True)
        if state[1] == "COMPLETED":
            return JobStatus(running=False, code=0)
        return JobStatus(running=False, code=int(code[1]) or 128 + int(code[2]))


def _call(command: Sequence[str], folder: Path | None = None) -> str:
    """Output of a command of Slurm.

    Raises:
        InvalidUsage: it failed, or did not answer within a minute.
    """
    env = dict(os.environ) if folder is None else job_environment(folder)
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False,
                              timeout=_LONGEST_CALL_S)  # fmt: skip
    except subprocess.TimeoutExpired:
        raise InvalidUsage(f"{command[0]} gave no answer within {_LONGEST_CALL_S:g} s") from None
    if done.returncode != 0:
        raise InvalidUsage(f"{shlex.join(command)} failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout
