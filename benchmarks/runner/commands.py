"""How a rank is commanded: one JSON object a line in, one out; and what all ranks measure."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

_SAMPLE_S = 0.01
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


@contextlib.contextmanager
def link_samples() -> Iterator[list[tuple[float, int]]]:
    """Samples of the machine's clock and of `sent_bytes`, a hundred a second, until the end."""
    samples: list[tuple[float, int]] = []
    done = threading.Event()

    def sample() -> None:
        while not done.wait(_SAMPLE_S):
            samples.append((time.monotonic(), sent_bytes()))

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield samples
    finally:
        done.set()
        sampler.join()


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
