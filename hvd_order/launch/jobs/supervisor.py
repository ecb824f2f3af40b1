"""Runs a command, and ends whatever the command has started. `kill_with_parent` uses it.

    python -I -S supervisor.py PARENT COMMAND...

It passes signals on to the command and ends as the command does, with its exit code or signal. It
is the *subreaper* of all below it: a process whose parent has ended becomes its child, and nobody
escapes by a session of his own. So when the command has ended, all that is left is ended, politely
first; and at once when the process PARENT dies, or asks for it by `AT_ONCE`.
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
"""Asks a supervisor to end everything without any patience."""

_PARENT_DIED = signal.SIGRTMIN + 2
_STOPS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
# Those that stop a process or say that it has a fault of its own.
_NOT_PASSED_ON = {
    signal.SIGKILL, signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGCONT,
    signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS,
    signal.SIGABRT, signal.SIGPIPE, signal.SIGXFSZ,
}  # fmt: skip
_WAITED_FOR = set(signal.valid_signals()) - _NOT_PASSED_ON

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

_GRACE_S = 28.0  # after a signal to stop; torch's agent would kill us, and nobody else, after 30
_BY_THEMSELVES_S = 0.3  # helpers of the command, which see it end and clean up
_TERMINATED_S = 3.0
_KILLED_S = 5.0  # one that the kernel holds, or another user's, does not end
_LOOK_S = 0.01
_PARENT_LOOK_S = 1.0


class _Supervisor:
    def __init__(self, parent: int, command: Sequence[str]) -> None:
        self._parent = parent
        self._at_once = False
        self._notified = True  # of the parent's death, by the kernel
        self._status: int | None = None  # of the command, when it has ended
        self._stop_by: float | None = None
        inherited = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        libc.prctl(_PR_SET_PDEATHSIG, _PARENT_DIED)
        if os.getppid() != parent:  # it has ended before that
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
        for stream in (0, 1):  # theirs alone
            os.dup2(nowhere, stream)

    def run(self) -> NoReturn:
        """Returns with the command; ends this process as the command ended."""
        while self._status is None and not self._at_once:
            self._heed(self._next_look())
            if self._stop_by is not None and time.monotonic() > self._stop_by:
                self._at_once = True
        if self._status is None:
            os.kill(self._command, signal.SIGKILL)
        self._end_the_rest()
        _end_as(self._status)

    def _next_look(self) -> float | None:
        """Seconds to wait for a signal; None: as long as it takes."""
        if self._stop_by is not None:
            return max(0.0, self._stop_by - time.monotonic())
        return None if self._notified else _PARENT_LOOK_S

    def _heed(self, seconds: float | None) -> None:
        """Waits for a signal and does what it asks for."""
        if seconds is None:
            number = signal.sigwaitinfo(_WAITED_FOR).si_signo
        else:
            came = signal.sigtimedwait(_WAITED_FOR, seconds)
            number = 0 if came is None else came.si_signo
        if number == _PARENT_DIED:  # or a thread of it, the one that started us
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
        with contextlib.suppress(PermissionError):  # it has become another user
            try:
                os.killpg(self._command, number)
            except ProcessLookupError:  # it has just begun, and is no group of its own yet
                os.kill(self._command, number)  # not reaped, so it is still the same

    def _reap(self) -> bool:
        """Takes the ends of children; whether there are any left."""
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
    # Python ignores two signals, which a command of another kind would inherit, and handles one.
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
    if status is None:  # it could not even be killed
        os._exit(1)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command's own is the one to look at
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def _descendants() -> list[int]:
    """All below this process, by the kernel's table."""
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
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            os.kill(pid, number)


if __name__ == "__main__":
    _Supervisor(int(sys.argv[1]), sys.argv[2:]).run()
