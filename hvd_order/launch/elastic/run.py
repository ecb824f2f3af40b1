"""The loop around elastic training: handles a broken job, and one that is about to change.

Under an elastic agent a worker never joins a new job itself: the agent restarts all workers, and
they find the last commit. So a worker whose job broke waits a moment for its agent's SIGTERM,
which it gets when a neighbour died. Otherwise it ends with the error, to which the agent responds
in the same way. An agent that only wants to change the job sends SIGTERM to workers in the middle
of a step; they finish the step, agree at the next commit and end there, so that nothing is lost.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

from hvd_order.base.errors import HorovodInternalError, HostsUpdatedInterrupt
from hvd_order.launch.elastic.agent import restarts_workers
from hvd_order.launch.elastic.state import State

__all__ = ["rejoin", "run_fn"]

_BROKEN_WAIT_S = 5.0  # for the agent's signal; torch's agents check each other every second
_CHANGE_WAIT_S = 60.0
_BOTH = 3  # Horovod's HostUpdateResult; the agent does not send which


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """Wraps `func` so that it is called again each time the job has formed anew.

    Args:
        func: takes a `State` first; trains from the position that the state records.
        reset: leaves the job and joins it again, where no agent restarts this process.

    Returns:
        A function with the arguments of `func`. It raises what `func` raises, except for
        HorovodInternalError and HostsUpdatedInterrupt where the job can continue.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        with _AgentSignal(state) as agent:
            start: Callable[[], None] = functools.partial(_start, state)
            while True:
                try:
                    start()
                    return func(state, *args, **kwargs)
                except HorovodInternalError as error:
                    if agent.present:
                        _say(f"{error}; waiting to be started again")
                        agent.end_when_told(_BROKEN_WAIT_S)
                        raise
                    state.restore()
                    start = state.sync
                except HostsUpdatedInterrupt as interrupt:
                    if agent.present:
                        state.save()
                        state.keep()
                        agent.end_when_told(_CHANGE_WAIT_S)
                        raise
                    start = _nothing if interrupt.skip_sync else state.sync
                reset()
                state.on_reset()

    return wrapper


def rejoin(size: int, shutdown: Callable[[], None], init: Callable[[], None]) -> None:
    """Joins the job again, in this process; for jobs without an elastic agent.

    Raises:
        HorovodInternalError: the job has other ranks, which nothing restarts.
    """
    if size > 1:
        raise HorovodInternalError(
            f"the {size} ranks of this job cannot form anew, since nothing starts them again; "
            "start it with: hvd-order run -np N --min-np M ..., or torchrun --max-restarts"
        )
    shutdown()
    init()


def _start(state: State) -> None:
    """Gives all ranks the same state: the last commit's, or rank 0's if there is none."""
    number = state.recover()
    if number:
        if state._rank() == 0:
            _say(f"going on from commit {number}")
        state.on_reset()
    state.sync()


def _nothing() -> None:
    """Replaces `sync` when ranks only left: no rank needs a state."""


def _say(text: str) -> None:
    sys.stderr.write(f"hvd_order: {text}\n")
    sys.stderr.flush()


class _AgentSignal:
    """Passes the agent's SIGTERM to the state as a message, while training runs.

    Does nothing where there is no agent, or where the program has a handler of its own.

    Attributes:
        present: whether an elastic agent started this process.
    """

    def __init__(self, state: State) -> None:
        self.present = restarts_workers(os.environ)
        self._state = state
        self._told = False
        self._waiting = False  # for the signal, with no other work left
        self._installed = False

    def __enter__(self) -> _AgentSignal:
        self._installed = (
            self.present
            and threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        )
        if self._installed:
            signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._installed:
            return
        if self._told:  # too late for an agreement: the agent is waiting
            self._end()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def end_when_told(self, seconds: float) -> None:
        """Ends this process after the agent's signal; returns if it does not arrive in time."""
        self._waiting = True
        if self._told:
            self._end()
        time.sleep(seconds)  # the signal ends the process meanwhile
        self._waiting = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._told or self._waiting:  # a repeated signal must end the process
            self._end()
        self._told = True
        self._state.on_hosts_updated(time.time(), _BOTH)

    def _end(self) -> NoReturn:
        """Ends the process as the signal would have, after flushing its output."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(128 + signal.SIGTERM)  # not reached, unless the signal is blocked
