"""How a rank is commanded: one JSON object a line in, one out; and what all ranks measure."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

_INTERFACE = os.environ.get("GLOO_SOCKET_IFNAME", "lo")


def sent_bytes() -> int:
    """Bytes that have left this host since it exists."""
    return int(Path(f"/sys/class/net/{_INTERFACE}/statistics/tx_bytes").read_text())


def cpu_s() -> float:
    """Processor time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def switches() -> int:
    """Context switches of this process, all threads, of their own accord or not."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_nvcsw + usage.ru_nivcsw


def threads() -> int:
    """Threads of this process."""
    return len(list(Path("/proc/self/task").iterdir()))


def step_s(answers: Sequence[dict[str, Any]]) -> list[float]:
    """Steps of the whole job, from all ranks' answers. They add up to the time that passed.

    The longest of each step over all ranks would not: where no step ends with a wait for the
    others, now one rank is behind and now another, and no step is as long as that for the job.
    """
    last = [max(ends) for ends in zip(*(one["ends"] for one in answers), strict=True)]
    return [b - a for a, b in pairwise(last)]


def serve(make_worker: Any) -> None:
    """Obeys until "quit"; a command names a method of the worker and its arguments."""
    # What libraries print must not look like an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    worker = make_worker()
    answer("ready")
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("do")
        answer(getattr(worker, name)(**command))
        if name == "quit":
            return
