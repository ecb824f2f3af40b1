"""A process forked by a rank (a DataLoader worker, os.fork) has the rank's memory, but no engine.

The threads that move gradients do not exist in the child, so a wait for them would never end.
Deferred updates are therefore applied before the fork, and the child finds ordinary parameters.
The child may read and change its copy, and run backward passes, whose gradients are not exchanged.
A gradient between ``backward()`` and ``step()`` cannot be finished; reading it in the child raises
an error. So do ``step()`` and collectives, because the child is not a rank. When the child ends,
the job continues.

Other threads are kept out of the exchanges during the fork, so that their locks are free in the
child. Native objects are never destroyed in the child: their destructors would wait for their
threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any, NoReturn, cast

import torch

from hvd_order._native import _torch as native
from hvd_order.base.account.step_stats import StepStats
from hvd_order.base.errors import InvalidUsage
from hvd_order.engine import engine_host, live_exchanges
from hvd_order.engine.job import process
from hvd_order.engine.job.job import Job
from hvd_order.torch.gradients.exchange import GradientExchange
from hvd_order.torch.parameters.in_flight import CompletingGuard
from hvd_order.torch.sums.coding import CodedGradient
from hvd_order.torch.updates import optimizer_class
from hvd_order.torch.updates.overlap import OverlapReport

__all__: list[str] = []

_held: list[GradientExchange] = []  # from before the fork until after it


class _ChildGuard(CompletingGuard):
    """The `Guard` of tensors that were not finished before the fork."""

    def __init__(self, exchange: GradientExchange, rank: int) -> None:
        self._exchange = exchange
        self._rank = rank

    def _refuse(self, what: str, tensor: torch.Tensor) -> NoReturn:
        raise InvalidUsage(
            f"{what} '{self._exchange.entry_name(tensor)}' was not complete when this process "
            f"({os.getpid()}) was forked from rank {self._rank}, and the rank's engine, which "
            "completes it, is not here: fork after step(), or read it before the fork"
        )

    def before_parameter_read(self, parameters: list[torch.Tensor]) -> None:
        """Handles a read of a parameter whose update failed before the fork."""
        self._refuse("parameter", parameters[0])

    def before_grad_attribute(self, parameter: torch.Tensor) -> None:
        """Handles a use of ``.grad`` of such a parameter."""
        self._refuse("the gradient of", parameter)

    def before_gradient_read(self, gradients: list[torch.Tensor]) -> None:
        """Handles a read of a gradient between ``backward()`` and ``step()``."""
        self._refuse("the gradient of", gradients[0])


class _NoExchange:
    """Replaces the optimizer's `GradientExchange` in the child."""

    has_deferred_updates = False

    def __init__(self, job: Job, exchange: GradientExchange) -> None:
        self._job = job
        self._exchange = exchange
        self.use = exchange.use

    def step(self, closure: Any = None) -> NoReturn:
        """Raises: the child is not a rank and has no other ranks to average with."""
        self._refuse("optimizer.step()")

    def synchronize(self) -> NoReturn:
        """Raises, like `step`."""
        self._refuse("optimizer.synchronize()")

    def clip_grad_norm_(self, max_norm: float) -> NoReturn:
        """Raises, like `step`: the norm is that of gradients averaged with other ranks."""
        self._refuse("optimizer.clip_grad_norm_()")

    def check_usable(self, parameters: Any) -> NoReturn:
        """Raises, like `step`."""
        self._refuse("optimizer.add_param_group()")

    def _refuse(self, what: str) -> NoReturn:
        self._job.check_not_forked(what)
        raise AssertionError("this stands in forked processes only")

    def flush(self) -> None:
        """Does nothing: the fork has applied all updates."""

    def stats(self) -> StepStats:
        """Zeros: the child takes no steps."""
        return StepStats()

    def before_zero_grad(self, set_to_none: bool) -> None:
        """Does nothing, like `flush`."""

    def fetch_state(self) -> None:
        """Raises if others have the state."""
        if self.use.state_owner is not None:
            self._refuse(f"optimizer.state_dict(), whose state {self.use.state_owner} have,")

    @property
    def shards(self) -> None:
        """None: this process has the whole state. Raises if other ranks have parts of it."""
        if self.use.shards is not None:
            self._refuse("the state of an optimizer with sharded=True")

    @property
    def overlap_report(self) -> OverlapReport:
        """Of the rank's last step before the fork."""
        return self._exchange.overlap_report

    def compression_report(self) -> list[CodedGradient]:
        """Nothing: the child's gradients do not travel."""
        return []

    def set_passes(self, passes: int) -> None:
        """Does nothing: the child counts no passes."""

    def entry_of(self, parameter: torch.Tensor) -> None:
        """Returns None: no parameter is watched."""


def _before() -> None:
    for exchange in live_exchanges.live():
        assert isinstance(exchange, GradientExchange)
        _held.append(exchange)
        exchange.hold()
    for exchange in _held:
        # Readers of unfinished tensors get the error, in the child as well.
        with contextlib.suppress(Exception):
            exchange.flush()


def _after_in_parent() -> None:
    while _held:
        _held.pop().release()


def _after_in_child() -> None:
    # Includes groups of ended jobs, because the child may drop the last reference to one.
    native.keep_watched_groups()
    for host in engine_host.hosts_in_memory():
        _never_destroy(host)  # nor the native objects that it holds
    if not process.is_initialized():
        _after_in_parent()
        return
    job = process.current()
    live_exchanges.forget_all()
    for group in job.open_groups():
        _never_destroy(group)
    while _held:
        exchange = _held.pop()
        _never_destroy(exchange)  # nor the native objects that it holds
        optimizer = exchange.release_in_child(_ChildGuard(exchange, job.rank))
        if optimizer is not None:
            optimizer_class.unguard(optimizer)  # still there if an update failed before the fork
            cast("Any", optimizer)._hvd_exchange = _NoExchange(job, exchange)
        exchange.release()


def _never_destroy(thing: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


os.register_at_fork(
    before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child
)
