"""How long do steps pause when servers come, go and die? Local processes."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from benchmarks.runner.places import this_host
from hvd_order.launch.jobs.torch_agent import serve_store
from hvd_order.servers.access.secret import new_secret
from hvd_order.servers.worker.connections import MeetingPoint

_WORKERS, _SERVERS = 2, 3
_LIMIT_S = 180.0
_AROUND_S = 1.0  # behind the event, of steps that count to it
_HVD_ORDER = [sys.executable, "-m", "hvd_order.tools.cli"]


class _ElasticJob:
    """Workers that train, and servers by their numbers.

    Attributes:
        seen: every state that worker 0 has told: which servers it knows, and what they own.
    """

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._store = serve_store("127.0.0.1")
        address = f"127.0.0.1:{self._store.port}"
        self._env = {
            **{name: v for name, v in os.environ.items() if not name.startswith("HVD_ORDER_")},
            "HVD_ORDER_COMM": "ps",
            "HVD_ORDER_SERVERS": str(_SERVERS),
            "HVD_ORDER_SERVER_STORE": address,
            "HVD_ORDER_SECRET": new_secret().hex(),
            "HVD_ORDER_PS_UPDATE": "server",
            "HVD_ORDER_PS_REPLICAS": "1",
            "HVD_ORDER_TIMEOUT": "120",
            "HVD_ORDER_SLICE_BYTES": "32KiB",
            "OMP_NUM_THREADS": "1",
        }
        self._limit = timedelta(seconds=_LIMIT_S)
        self._meeting = MeetingPoint(address, self._limit)
        self._said: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.seen: list[dict[str, Any]] = [{"servers": [], "owners": []}]
        self.servers: dict[int, subprocess.Popen[Any]] = {}
        for _ in range(_SERVERS):
            self.start_server()
        command = [sys.executable, "-m", "benchmarks.servers.job", json.dumps({"what": "train"})]
        place = stack.enter_context(this_host(_WORKERS))
        self._ranks = [
            self._start(command, {**self._env, **env}, stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE if rank == 0 else None, text=True)
            for rank, env in enumerate(place.environment())
        ]  # fmt: skip
        threading.Thread(target=self._listen, daemon=True).start()
        self.wait_for(set(range(_SERVERS)))

    def start_server(self) -> int:
        """Returns its number, as soon as it has announced itself."""
        number = len(self.servers)
        serve = [*_HVD_ORDER, "serve", "--workers", str(_WORKERS)]
        self.servers[number] = self._start(serve, self._env)
        self._meeting.own().wait([f"server/{number}"], self._limit)
        return number

    def remove_server(self, number: int) -> None:
        """Gives the order; returns when it is given."""
        command = [*_HVD_ORDER, "servers", "remove", str(number)]
        subprocess.run(command, env=self._env, check=True, timeout=_LIMIT_S)

    def wait_for(self, owners: set[int]) -> None:
        """Waits until worker 0 is connected to these servers, and all of them have slices."""
        deadline = time.monotonic() + _LIMIT_S
        while any(set(self.seen[-1][name]) != owners for name in ("servers", "owners")):
            self.seen.append(self._next(deadline - time.monotonic()))

    def finish(self) -> list[dict[str, Any]]:
        """Stops the training. Returns what each worker found."""
        stdin = self._ranks[0].stdin
        assert stdin is not None
        stdin.close()
        while "results" not in (said := self._next(_LIMIT_S)):
            self.seen.append(said)
        codes = [process.wait(_LIMIT_S) for process in self._ranks]
        if any(codes):
            raise SystemExit(f"workers ended with {codes}")
        results: list[dict[str, Any]] = said["results"]
        return results

    def _next(self, limit_s: float) -> dict[str, Any]:
        said = self._said.get(timeout=max(0.0, limit_s))
        if said is None:
            raise SystemExit("worker 0 has ended; its error is above")
        return said

    def _start(
        self, command: list[str], env: dict[str, str], **options: Any
    ) -> subprocess.Popen[Any]:
        process = subprocess.Popen(command, env=env, **options)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)  # callbacks run in reverse
        return process

    def _listen(self) -> None:
        assert self._ranks[0].stdout is not None
        for line in self._ranks[0].stdout:
            if line.startswith("{"):
                self._said.put(json.loads(line))
        self._said.put(None)


def _changes(job: _ElasticJob, count: int) -> Iterator[tuple[str, float, float]]:
    """Lets servers come, go and die; yields what happened, from when, until when."""
    here = set(range(_SERVERS))

    def settled(what: str, begin: float) -> tuple[str, float, float]:
        job.wait_for(here)
        until = time.monotonic() + _AROUND_S
        time.sleep(_AROUND_S)  # these steps count
        return what, begin, until

    for turn in range(2 * count):
        here.add(job.start_server())
        yield settled("add", time.monotonic())  # its own start is another host's business
        first = min(here)
        begin = time.monotonic()
        here.remove(first)
        if turn % 2 == 0:
            job.remove_server(first)
            yield settled("remove", begin)
            job.servers[first].wait(_LIMIT_S)
        else:
            os.kill(job.servers[first].pid, signal.SIGKILL)
            yield settled("kill", begin)


def elastic(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """A job that trains on while each thing happens so many times."""
    with contextlib.ExitStack() as stack:
        job = _ElasticJob(stack)
        events = list(_changes(job, options.events))
        results = job.finish()
        codes = {number: server.wait(_LIMIT_S) for number, server in job.servers.items()}
    steps = [tuple(step) for result in results for step in result["steps"]]
    median = statistics.median(seconds for _, seconds in steps)
    pauses: dict[str, list[float]] = {}
    for what, first, last in events:
        longest = max(s for begin, s in steps if begin + s >= first and begin <= last)
        pauses.setdefault(what, []).append(longest - median)
    for what, each in pauses.items():
        print(f"elastic, {what}: {len(each)} times, pause {statistics.median(each):.3f} s in the "
              f"median, {max(each):.3f} s at most; a step takes {median * 1e3:.1f} ms")  # fmt: skip
    raw = {"events": events, "results": results, "codes": codes, "states": job.seen[1:]}
    return raw, {"pauses_s": pauses, "step_s": median}
