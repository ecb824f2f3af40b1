"""Orders for a running job, such as ``hvd-order servers remove 2``: left in the store, signed.

The number of an order is part of what is signed, so that nobody can give one twice.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from hvd_order.errors import HvdOrderError, InvalidUsage
from hvd_order.server.notes import read_note, signed_note
from hvd_order.torch.parameter_server.coordinator import Coordinator
from hvd_order.torch.parameter_server.links import LOOK_S, MeetingPoint
from hvd_order.torch.parameter_server.wishes import Wishes

__all__ = ["Orders", "give"]

_log = logging.getLogger("hvd_order")


def give(meeting: MeetingPoint, key: bytes, order: dict[str, Any]) -> None:
    """Leaves an order for worker 0.

    Args:
        key: the job's secret.
    """
    number = meeting.count("orders")
    meeting.own().set(f"order/{number}", signed_note(key, f"order {number}", order))


class Orders:
    """Has the coordinator carry out what is left in the store, one order after the other.

    It gives the coordinator a voice there as well: for its own wishes.
    """

    def __init__(self, meeting: MeetingPoint, key: bytes, coordinator: Coordinator) -> None:
        """Looks from now on."""
        self._meeting = meeting
        self._key = key
        self._coordinator = coordinator
        coordinator.wish_by(Wishes(meeting, key))
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look, name="orders", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        store = self._meeting.own()
        arrivals = self._meeting.arrivals("orders", lambda number: f"order/{number}")
        while not self._closing.is_set():
            try:
                orders = {each: bytes(store.get(f"order/{each}")) for each in arrivals.look()}
            except RuntimeError:
                return  # the job is over
            for number, note in orders.items():
                self._carry_out(number, note)
            self._closing.wait(LOOK_S)

    def _carry_out(self, number: int, note: bytes) -> None:
        try:
            order = read_note(self._key, f"order {number}", note)
            if order["what"] != "remove":
                raise InvalidUsage(f"nobody knows how to {order['what']}")
            self._coordinator.remove(int(order["server"]))
        except (HvdOrderError, ValueError, KeyError, TypeError) as error:
            _log.warning("servers: order %d is not carried out: %s", number, error)

    def close(self) -> None:
        """Looks no more."""
        self._closing.set()
        self._coordinator.close()
        self._thread.join()
