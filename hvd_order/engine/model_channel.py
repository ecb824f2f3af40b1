"""What the ranks tell each other about one model, matched by the model and not by the time.

Several threads may train a model each, and no two ranks run them in the same order. So each
message is a request of the collective queue, whose name is the key of the model and the number of
the message: rank 0 lets it run when every rank has come to it (name_order.py), and a model that
waits for a late rank holds up no other one.

Requests run in one order on all ranks. Turns are handed out in that order: whoever changes what
all models of an engine share (the ids, the settings, the agreement, the transport while it is
measured) holds the engine's turn, so all ranks make the same changes in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hvd_order.base.errors import HorovodInternalError, PeerLost
from hvd_order.engine.engine_host import EngineHost
from hvd_order.engine.job import activity, group_collectives, request_errors
from hvd_order.engine.requests.queues import Queues
from hvd_order.engine.requests.request import Request

__all__: list[str] = []

T = TypeVar("T")


class ModelChannel:
    """One rank's end.

    Attributes:
        host: the engine.
        key: the model's key; the same on all ranks (step_log.py).

    Thread safety: one thread at a time uses a channel, the holder of the exchange's lock.
    """

    def __init__(self, host: EngineHost, key: str) -> None:
        """Sends nothing yet."""
        self.host = host
        self.key = key
        self._queue = host.job.part(Queues).of_set(host.process_set)
        self._sent = 0
        self._turns_held = 0

    def gather(self, what: str, value: Any) -> list[Any]:
        """Returns every rank's ``value``, by place in the set. Collective.

        Args:
            what: what it is about, for errors; the same on all ranks.
            value: anything that can be pickled.

        Raises:
            ModelMismatch: the ranks tell each other different things.
            HorovodInternalError: a rank is gone, does not take part, or sent a malformed message.
        """
        # Pickled and unpickled here: only this thread may look into the value.
        mine = group_collectives.pickled(value)
        everyone = self.together(
            what, lambda group: group_collectives.gather_bytes(mine, group, self._name(what))
        )
        return [
            group_collectives.unpickled(data, rank, self._name(what))
            for rank, data in zip(self.host.ranks, everyone, strict=True)
        ]

    def together(self, what: str, transfer: Callable[[dist.ProcessGroup], T]) -> T:
        """Runs a transfer when all ranks have come to it, on the queue's thread. Collective.

        No other transfer of the set's queue runs meanwhile, and all ranks run them in one order.

        Args:
            what: see `gather`.
            transfer: gets the group that carries objects.

        Raises:
            HorovodInternalError: as in `gather`; the engine has failed then as well.
        """
        results: list[T] = []
        request = self._request(
            what,
            lambda: results.append(transfer(self.host.registration_group)),
            activity.now() or what,
        )
        with self._told_to_engine(), activity.waiting(f"waits for the other ranks: {what}"):
            self._queue.run(request)
        return results[0]

    def begin(self, what: str, transfer: Callable[[dist.ProcessGroup], None]) -> int:
        """Same as `together`, but does not wait; returns a handle for `end`."""
        request = self._request(what, lambda: transfer(self.host.registration_group), what)
        return self._queue.submit(request)

    def end(self, handle: int) -> None:
        """Waits for what `begin` has begun. Raises its error; the engine goes on."""
        with activity.waiting("waits for the other ranks: their accounts"):
            self._queue.synchronize(handle)

    def forget(self, handle: int) -> None:
        """Lets go of what `begin` has begun; it goes on, and nobody asks for its end."""
        self._queue.forget(handle)

    def _request(self, what: str, transfer: Callable[[], None], reason: str) -> Request:
        self._sent += 1
        return Request(
            # What follows the first ": " is for whoever reads an error (name_order.key_of).
            f"message {self._sent} about optimizer {self.key.replace(': ', ':')}: {reason}",
            [what],
            lambda _: transfer(),
            lambda: None,
            torch.device("cpu"),
            joined_take_part=True,
        )

    def _name(self, what: str) -> str:
        return f"{what} (optimizer {self.key})"

    @contextlib.contextmanager
    def _told_to_engine(self) -> Iterator[None]:
        try:
            yield
        except HorovodInternalError as error:
            # The engine may have noticed which rank is to blame, and for which gradient.
            self.host.engine.check_stalled()
            # Otherwise the other ranks would take this rank's end for the cause.
            self.host.engine.fail(str(error), lost=isinstance(error, PeerLost))
            raise

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Holds the engine's turn: nobody else changes what all models share. Collective.

        All gradients of this model that have begun are sent on this rank, so whoever has the turn
        can wait for its own gradients, which may be ordered behind them.

        Raises:
            HorovodInternalError: the engine has failed, or a rank does not take part.
        """
        if self._turns_held == 0:
            lock = self.host.ticket_lock
            ticket = self.together("its turn at what all models share", lambda _: lock.draw())
            try:
                lock.wait_for(ticket, self.host.engine.check)
                self._turns_held = 1
                yield
            finally:
                self._turns_held = 0
                lock.end(ticket)
            return
        self._turns_held += 1
        try:
            yield
        finally:
            self._turns_held -= 1

    @contextlib.contextmanager
    def common_step(self, what: str) -> Iterator[None]:
        """Wraps a transfer that all ranks take part in within a turn, after the same steps.

        Args:
            what: description of the transfer, for errors.

        Raises:
            HorovodInternalError: the transfer failed; names the rank that is gone, stopped or late.
        """
        host = self.host
        kind = f"engine {host.process_set}"
        with (
            self._told_to_engine(),
            activity.waiting(f"waits for the other ranks: {what}"),
            request_errors.common_step(host.job, what, kind=kind, ranks=host.ranks),
        ):
            try:
                yield
            except RuntimeError:
                host.engine.check()
                raise
