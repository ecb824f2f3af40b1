"""Carries out the scaling policy's decisions: servers join and leave while training runs."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Collection

from hvd_order.base.errors import HvdOrderError
from hvd_order.servers.balance.balancer import Balancer
from hvd_order.servers.process.scale_requests import ScaleRequests
from hvd_order.servers.scaling.policy import ScalingDecision, ScalingPolicy
from hvd_order.servers.worker.connections import PARTING_S

__all__ = ["Scaling"]

_log = logging.getLogger("hvd_order")


class Scaling:
    """Carries out decisions of the policy, on a thread for each action.

    Thread safety: all methods may be called from any thread.
    """

    def __init__(
        self, policy: ScalingPolicy, requests: ScaleRequests, remove: Callable[[int], None]
    ) -> None:
        """Creates the object; decisions start with the first step.

        Args:
            policy: decides.
            requests: requests new servers.
            remove: removes a server and waits until it has left; raises if it cannot.
        """
        self._policy = policy
        self._requests = requests
        self._remove = remove
        self._lock = threading.Lock()  # guards policy and thread
        self._come: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def step_taken(
        self, step_s: float, busy_s: float, balancer: Balancer, servers: Collection[int]
    ) -> None:
        """Passes a finished step to the policy; for the arguments see `ScalingPolicy.step`."""
        with self._lock:
            decision = self._policy.step(step_s, busy_s, balancer, servers)
            if decision is None or self._closing.is_set():
                return
            _log.info("servers: %s", decision)
            while not self._come.empty():
                self._come.get()  # servers that joined without a request
            self._thread = threading.Thread(
                target=self._act, args=(decision,), name="scaling", daemon=True
            )
            self._thread.start()

    def server_joined(self, server: int) -> None:
        """Records a new server, requested or not."""
        self._come.put(server)

    def _act(self, decision: ScalingDecision) -> None:
        newcomer = None
        try:
            if decision.hint.action != "scale_in":
                newcomer = self._requests.request_server(self._come, self._closing)
            if decision.hint.server is not None:
                self._remove(decision.hint.server)
        except HvdOrderError as error:
            if not self._closing.is_set():
                _log.warning("servers: %s was not possible: %s", decision.hint.action, error)
            with self._lock:
                self._policy.failed()
        else:
            with self._lock:
                self._policy.done(newcomer)

    def close(self) -> None:
        """Stops deciding and waits for the current action; `remove` must not block then."""
        self._closing.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(PARTING_S)
