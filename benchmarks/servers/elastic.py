"""What do servers that come, go and die cost, and is every update applied once? Local processes."""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.runner.places import free_port
from hvd_order.launch.jobs.torch_agent import serve_store
from hvd_order.servers.access.secret import new_secret
from hvd_order.servers.worker.connections import MeetingPoint

_JOB = "benchmarks.servers.elastic_job"
_WORKERS, _SERVERS = 2, 3
_LIMIT_S = 180.0
_AROUND_S = 1.0  # behind the event, of steps that count to it
_TARGET_S = 2.0


class _ElasticJob:
    """Workers that train, and servers with their numbers. A context manager; it ends them all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
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
        self._port = free_port()
        self._limit = timedelta(seconds=_LIMIT_S)
        self._meeting = MeetingPoint(address, self._limit)
        self._states: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.state: dict[str, Any] = {"servers": [], "owners": []}
        self.seen: list[dict[str, Any]] = []
        self.servers: dict[int, subprocess.Popen[bytes]] = {}
        self._ranks: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> _ElasticJob:
        for _ in range(_SERVERS):
            self.start_server()
        self._ranks = [self._start_rank(rank) for rank in range(_WORKERS)]
        threading.Thread(target=self._listen, daemon=True).start()
        self.wait_for(set(range(_SERVERS)))
        return self

    def __exit__(self, *exception: object) -> None:
        for process in (*self._ranks, *self.servers.values()):
            if process.poll() is None:
                process.kill()
            process.wait()

    def start_server(self) -> int:
        """Returns its number, as soon as it has announced itself."""
        number = len(self.servers)
        command = [sys.executable, "-m", "hvd_order.tools.cli", "serve", "--workers", str(_WORKERS)]
        self.servers[number] = subprocess.Popen(command, env=self._env)
        self._meeting.own().wait([f"server/{number}"], self._limit)
        return number

    def remove_server(self, number: int) -> None:
        """Gives the order; returns when it is given."""
        command = [sys.executable, "-m", "hvd_order.tools.cli", "servers", "remove", str(number)]
        subprocess.run(command, env=self._env, check=True, timeout=_LIMIT_S)

    def wait_for(self, owners: set[int]) -> float:
        """Waits until these servers have links and slices. Returns when that was seen, seconds."""
        deadline = time.monotonic() + _LIMIT_S
        while set(self.state["servers"]) != owners or set(self.state["owners"]) != owners:
            state = self._states.get(timeout=max(0.0, deadline - time.monotonic()))
            if state is None:
                raise SystemExit("worker 0 has ended; its error is above")
            self.state = state
            self.seen.append(state)
        return float(self.state.get("at", time.monotonic()))

    def finish(self) -> list[dict[str, Any]]:
        """Stops the training. Returns what each worker found."""
        (self._folder / "stop").touch()
        codes = [rank.wait(_LIMIT_S) for rank in self._ranks]
        if any(codes):
            raise SystemExit(f"workers ended with {codes}")
        return [
            json.loads((self._folder / f"result.{rank}").read_text()) for rank in range(_WORKERS)
        ]

    def _start_rank(self, rank: int) -> subprocess.Popen[Any]:
        job = {"stop": str(self._folder / "stop"), "result": str(self._folder / "result")}
        env = {
            **self._env,
            "RANK": str(rank), "WORLD_SIZE": str(_WORKERS),
            "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(_WORKERS),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port),
        }  # fmt: skip
        return subprocess.Popen(
            [sys.executable, "-m", _JOB, json.dumps(job)],
            env=env, text=True, stdout=subprocess.PIPE if rank == 0 else None,
        )  # fmt: skip

    def _listen(self) -> None:
        assert self._ranks[0].stdout is not None
        for line in self._ranks[0].stdout:
            if line.startswith("{"):
                self._states.put(json.loads(line))
        self._states.put(None)


def elastic(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """A job that trains on while each thing happens so many times."""
    events: list[tuple[str, float, float]] = []  # what, from, until
    with tempfile.TemporaryDirectory() as folder, _ElasticJob(Path(folder)) as job:
        here = set(range(_SERVERS))

        def settled(what: str, begin: float) -> None:
            job.wait_for(here)
            events.append((what, begin, time.monotonic() + _AROUND_S))
            time.sleep(_AROUND_S)  # these steps count

        for turn in range(2 * options.events):
            here.add(job.start_server())
            settled("add", time.monotonic())  # its own start is another host's business
            first = min(here)
            begin = time.monotonic()
            here.remove(first)
            if turn % 2 == 0:
                job.remove_server(first)
                settled("remove", begin)
                job.servers[first].wait(_LIMIT_S)
            else:
                os.kill(job.servers[first].pid, signal.SIGKILL)
                settled("kill", begin)
        results = job.finish()
        codes = {server: job.servers[server].wait(_LIMIT_S) for server in job.servers}
    summary = _report(events, results)
    raw = {"events": events, "results": results, "codes": codes, "states": job.seen}
    return raw, summary


def _report(
    events: list[tuple[str, float, float]], results: list[dict[str, Any]]
) -> dict[str, Any]:
    """Prints the pauses and what was counted; returns both."""
    steps = [tuple(step) for result in results for step in result["steps"]]
    median = statistics.median(seconds for _, seconds in steps)
    summary: dict[str, Any] = {}
    for what in dict.fromkeys(name for name, _, _ in events):
        pauses = summary[what] = [
            max(s for begin, s in steps if begin + s >= first and begin <= last) - median
            for name, first, last in events
            if name == what
        ]
        print(
            f"elastic, {what}: {len(pauses)} times, pause {statistics.median(pauses):.3f} s in the "
            f"median, {max(pauses):.3f} s at most; a step takes {median * 1e3:.1f} ms; target "
            f"{_TARGET_S:g} s"
        )
    found = results[0]
    held = found["held"]
    print(
        f"elastic: {found['pushes']} pushes; versions held {sorted({e[3] for e in held})}, "
        f"{len(held)} slices held, {len({(e[1], e[4]) for e in held})} different, "
        f"{sum(bool(e[2]) for e in held)} owned; weights at most {found['worst']:.1e} from one "
        f"process's, first over 1e-6: {found['first_apart']}"
    )
    return {
        "pauses_s": summary, "step_s": median, "pushes": found["pushes"],
        "versions": sorted({e[3] for e in held}), "worst": found["worst"],
        "first_apart": found["first_apart"],
    }  # fmt: skip
