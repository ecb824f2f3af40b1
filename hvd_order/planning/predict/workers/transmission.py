"""How tensors get from one process to another: named policies, and the costs of both ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hvd_order._native import _core
from hvd_order.base.errors import InvalidUsage

__all__ = ["POLICIES", "PolicyName", "TransmissionPolicy", "policy"]

PolicyName = Literal["ordered", "fifo", "round_robin", "round_robin_cold"]

COLD_WINDOW_BYTES = 65_535
WARM_WINDOW_BYTES = 4 << 20

_TURNS = {
    "whole": _core.Turns.WHOLE,
    "window": _core.Turns.WINDOW,
    "priority": _core.Turns.PRIORITY,
}
_SHARING = {"fair": _core.Sharing.FAIR, "fifo": _core.Sharing.FIFO}


@dataclass(frozen=True)
class TransmissionPolicy:
    """One direction of all connections between workers and servers.

    Attributes:
        turns: "whole": one transfer after the other, as they come; "window": in turns of
            ``window_bytes`` each, as HTTP/2 does with its streams; "priority": the most urgent
            transfer as a whole, then the next (an enforced order).
        window_bytes: of a turn. gRPC begins with 65,535 bytes (``cold_window_bytes``) and allows
            4 MiB once its first probe is back (grpc, chttp2 ``flow_control.cc``).
        cold_s: time from a connection's first byte in which ``cold_window_bytes`` holds.
        sharing: "fair": connections share a link max-min fairly; "fifo": the transfer that came
            first takes all that it can.
        latency_s: of the request of a pull, or of a push.
        send_s_per_byte, send_s: work of a connection's sending end for a transfer, one after the
            other, before its bytes.
        receive_s_per_byte, receive_s: the same at the receiving end, behind its bytes: parsing and
            copying.
    """

    turns: Literal["whole", "window", "priority"] = "whole"
    window_bytes: float = WARM_WINDOW_BYTES
    cold_window_bytes: float = COLD_WINDOW_BYTES
    cold_s: float = 0.0
    sharing: Literal["fair", "fifo"] = "fair"
    latency_s: float = 0.0
    send_s_per_byte: float = 0.0
    send_s: float = 0.0
    receive_s_per_byte: float = 0.0
    receive_s: float = 0.0

    def native(self) -> _core.Transmission:
        """Converts to the extension's type."""
        return _core.Transmission(
            turns=_TURNS[self.turns],
            window_bytes=self.window_bytes,
            cold_window_bytes=self.cold_window_bytes,
            cold_s=self.cold_s,
            sharing=_SHARING[self.sharing],
            latency_s=self.latency_s,
            send_seconds_per_byte=self.send_s_per_byte,
            send_seconds=self.send_s,
            receive_seconds_per_byte=self.receive_s_per_byte,
            receive_seconds=self.receive_s,
        )


POLICIES: dict[str, TransmissionPolicy] = {
    "ordered": TransmissionPolicy("priority"),
    "fifo": TransmissionPolicy("whole"),
    "round_robin": TransmissionPolicy("window"),
    "round_robin_cold": TransmissionPolicy("window", window_bytes=COLD_WINDOW_BYTES),
}
"""By name: an enforced order; as they come; warm HTTP/2; HTTP/2 whose window never grows."""


def policy(name: str) -> TransmissionPolicy:
    """The named policy, without costs.

    Raises:
        InvalidUsage: there is none.
    """
    if name not in POLICIES:
        raise InvalidUsage(f"no transmission is called {name!r}; there are: {', '.join(POLICIES)}")
    return POLICIES[name]
