"""Runs a command, and ends all processes that it has started. For `kill_with_parent`.

    python -I -S supervisor.py PARENT COMMAND...

The supervisor forwards signals to the command and ends with its exit code or signal. It is the
*subreaper* of all its descendants: a process whose parent has ended becomes its child, so no
process escapes by a session of its own. When the command has ended, the supervisor ends all
remaining processes, first with SIGTERM. When the process PARENT dies or sends `AT_ONCE`, it kills
them at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["AT_ONCE"]

AT_ONCE = signal.SIGRTMIN + 1
"""Signal that makes a supervisor end everything at once."""

_PARENT_DIED = signal.SIGRTMIN + 2
_STOPS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
# Signals that stop a process or report a fault of its own.
_NOT_PASSED_ON = {
    signal.SIGKILL, signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGCONT,
    signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS,
    signal.SIGABRT, signal.SIGPIPE, signal.SIGXFSZ,
}  # fmt: skip
_WAITED_FOR = set(signal.valid_signals()) - _NOT_PASSED_ON

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

_GRACE_S = 28.0  # after a stop signal; torch's agent would kill only us after 30
_BY_THEMSELVES_S = 0.3  # time for helpers of the command to end by themselves
_TERMINATED_S = 3.0
_KILLED_S = 5.0  # a process in the kernel, or of another user, does not end
_LOOK_S = 0.01
_PARENT_LOOK_S = 1.0


class _Supervisor:
    def __init__(self, parent: int, command: Sequence[str]) -> None:
        self._parent = parent
        self._at_once = False
        self._notified = True  # by the kernel of the parent's death
        self._status: int | None = None  # of the ended command
        self._stop_by: float | None = None
        inherited = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        libc.prctl(_PR_SET_PDEATHSIG, _PARENT_DIED)
        if os.getppid() != parent:  # the parent has already ended
            os._exit(1)
        me = os.getpid()
        self._command = os.fork()
        if self._command == 0:
            os.setsid()
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != me:
                os._exit(1)
            _become(command, inherited)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1):  # only the command uses them
            os.dup2(nowhere, stream)

    def run(self) -> NoReturn:
        """Waits for the command, then ends this process as the command ended."""
        while self._status is None and not self._at_once:
            self._heed(self._next_look())
            if self._stop_by is not None and time.monotonic() > self._stop_by:
                self._at_once = True
        if self._status is None:
            os.kill(self._command, signal.SIGKILL)
        self._end_the_rest()
        _end_as(self._status)

    def _next_look(self) -> float | None:
        """Seconds to wait for a signal; None: no limit."""
        if self._stop_by is not None:
            return max(0.0, self._stop_by - time.monotonic())
        return None if self._notified else _PARENT_LOOK_S

    def _heed(self, seconds: float | None) -> None:
        """Waits for a signal and handles it."""
        if seconds is None:
            number = signal.sigwaitinfo(_WAITED_FOR).si_signo
        else:
            came = signal.sigtimedwait(_WAITED_FOR, seconds)
            number = 0 if came is None else came.si_signo
        if number == _PARENT_DIED:  # or only the parent's thread that started us
            self._notified = False
        if not self._notified and os.getppid() != self._parent:
            self._at_once = True
        if number == AT_ONCE:
            self._at_once = True
        elif number == signal.SIGCHLD:
            self._reap()
        elif number and number != _PARENT_DIED and self._status is None:
            if number in _STOPS and self._stop_by is None:
                self._stop_by = time.monotonic() + _GRACE_S
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        with contextlib.suppress(PermissionError):  # it now runs as another user
            try:
                os.killpg(self._command, number)
            except ProcessLookupError:  # it has just started, without a group of its own
                os.kill(self._command, number)  # not reaped, so it is still the same

    def _reap(self) -> bool:
        """Reaps ended children; returns whether any are left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._command:
                self._status = status

    def _end_the_rest(self) -> None:
        begin = time.monotonic()
        asked = False
        while self._reap():
            passed = time.monotonic() - begin
            patience = _BY_THEMSELVES_S if self._at_once else _BY_THEMSELVES_S + _TERMINATED_S
            if passed > patience + _KILLED_S:
                break
            if passed > patience:
                _send(_descendants(), signal.SIGKILL)
            elif passed > _BY_THEMSELVES_S and not asked:
                _send(_descendants(), signal.SIGTERM)
                asked = True
            self._heed(_LOOK_S)
        else:
            return
        left = ", ".join(str(pid) for pid in _descendants())
        os.write(2, f"hvd-order: processes {left} could not be ended\n".encode())


def _become(command: Sequence[str], mask: set[int | signal.Signals]) -> NoReturn:
    # Python ignores two signals, which the command would inherit, and handles one.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        os.write(2, f"hvd-order: {command[0]} cannot be run: {error.strerror}\n".encode())
    os._exit(1)


def _end_as(status: int | None) -> NoReturn:
    if status is None:  # the command could not be killed
        os._exit(1)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # only the command's core dump is useful
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def _descendants() -> list[int]:
    """All descendants of this process, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue  # it has ended
        children.setdefault(int(fields[1]), []).append(int(entry))
    found: list[int] = []
    following = [os.getpid()]
    while following:
        below = children.get(following.pop(), [])
        found += below
        following += below
    return found


def _send(processes: Sequence[int], number: int) -> None:
    for pid in processes:
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            os.kill(pid, number)


if __name__ == "__main__":
    _Supervisor(int(sys.argv[1]), sys.argv[2:]).run()
