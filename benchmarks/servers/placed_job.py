"""Workers and parameter servers, each on an emulated host of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.hosts import EmulatedHosts
from hvd_order.servers.access.secret import new_secret

_JOB = "benchmarks.servers.job"
_STORE_PORT = 29700
_LIMIT_S = 600


class PlacedJob:
    """Hosts 0 to workers - 1 have a worker each, those behind them a server each, if any."""

    def __init__(self, hosts: EmulatedHosts, workers: int, servers: int) -> None:
        self._hosts = hosts
        self._workers = workers
        self._servers = servers

    def server_host(self, server: int) -> int:
        return self._workers + server

    def run(
        self,
        job: Mapping[str, Any],
        knobs: Mapping[str, str],
        busy: int | None = None,
    ) -> dict[str, Any]:
        """One job from its start to its end.

        Args:
            job: what each worker is told (job.py).
            knobs: settings of hvd_order.
            busy: a server whose host has its processor taken by something else.

        Returns:
            What worker 0 printed.
        """
        env = {
            **{name: v for name, v in os.environ.items() if not name.startswith("HVD_ORDER_")},
            **(self._server_environment() if self._servers else {}),
            "HVD_ORDER_TIMEOUT": "120",
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            **knobs,
        }
        serve = [sys.executable, "-m", "hvd_order.tools.cli", "serve"]
        serve += ["--workers", str(self._workers)]
        servers = [
            self._hosts.popen(
                self.server_host(server), [*serve, *["--listen"] * (server == 0)], env=env
            )
            for server in range(self._servers)
        ]
        hog = None if busy is None else self._hog(servers[busy])
        ranks = [
            self._hosts.popen(
                rank,
                [sys.executable, "-m", _JOB, json.dumps(job)],
                env={
                    **env,
                    **self._hosts.rank_environment(rank),
                    "WORLD_SIZE": str(self._workers),
                    "GROUP_WORLD_SIZE": str(self._workers),
                },
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(self._workers)
        ]
        try:
            outputs = [rank.communicate(timeout=_LIMIT_S)[0] for rank in ranks]
            codes = [rank.returncode for rank in ranks]
            codes += [server.wait(60) for server in servers]
        finally:
            for process in (*ranks, *servers, *([] if hog is None else [hog])):
                if process.poll() is None:
                    process.kill()
        if any(codes):
            raise SystemExit(f"workers and servers ended with {codes}")
        (line,) = [line for line in outputs[0].splitlines() if line.startswith("{")]
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _server_environment(self) -> dict[str, str]:
        return {
            "HVD_ORDER_COMM": "ps",
            "HVD_ORDER_SERVERS": str(self._servers),
            "HVD_ORDER_SERVER_STORE": (
                f"{self._hosts.addresses[self.server_host(0)]}:{_STORE_PORT}"
            ),
            "HVD_ORDER_SECRET": new_secret().hex(),
        }

    @staticmethod
    def _hog(server: subprocess.Popen[Any]) -> subprocess.Popen[Any]:
        """Takes the server's core: it may run on that one alone, and something else runs there."""
        os.sched_setaffinity(server.pid, {0})
        hog = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        os.sched_setaffinity(hog.pid, {0})
        return hog
