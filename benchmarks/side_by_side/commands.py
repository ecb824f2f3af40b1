"""How a rank is commanded: one JSON object a line in, one out; and what all ranks can measure."""

from __future__ import annotations

import json
import os
import resource
import sys
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
