"""Whatever the star carries from another rank (requests, decisions, joins, step logs, roll calls)
is taken or refused with Malformed, and never ends the thread that takes the messages of all ranks.
What ranks gather in bytes is refused with an error that names the sender, or is what was sent.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import atheris

with atheris.instrument_imports(
    include=["hvd_order.engine.job.message_forms", "hvd_order.engine.job.roll_call"]
):
    from hvd_order.engine.job import message_forms
    from hvd_order.engine.job.message_forms import FROM_RANK_0, TO_RANK_0, Malformed
    from hvd_order.engine.job.roll_call import RollCall
with atheris.instrument_imports(include=["hvd_order.engine.requests"]):
    from hvd_order.engine.requests.name_order import NameOrder
    from hvd_order.engine.requests.negotiation import Negotiation
    from hvd_order.engine.requests.step_log import StepLogs
with atheris.instrument_imports(include=["hvd_order.engine.job.group_collectives"]):
    from hvd_order.base.errors import HorovodInternalError
    from hvd_order.engine.job import group_collectives

SIZE = 3


class Exchange:
    """What a step log belongs to."""

    def prepare_to_join(self) -> None: ...

    def stand_in(self, event: str) -> None: ...

    def end_join(self) -> None: ...


class Queue:
    """A queue of collectives, which has what the messages say in places of these types."""

    def decided(self, key: str, verdict: str, absent: list[int]) -> None:
        assert verdict in ("go", "differ", "refused")
        assert all(0 <= rank < SIZE for rank in absent), absent
        key.encode()

    def late(self, key: str, lacking: list[int]) -> None:
        assert all(0 <= rank < SIZE for rank in lacking), lacking

    def failed(self, kind: str, text: str) -> None:
        assert kind in ("PeerLost", "TransferTimeout")
        assert type(text) is str


exchange = Exchange()


def negotiation(rank: int) -> Negotiation:
    """The end of a rank, without connections and threads."""
    made = Negotiation.__new__(Negotiation)
    made.steps = StepLogs()
    made.steps.open("0/0", exchange).note("begin")
    made.events = queue.SimpleQueue()
    made.heard_at = time.monotonic()
    made._job = SimpleNamespace(rank=rank, size=SIZE)  # type: ignore[assignment]
    made._forms = FROM_RANK_0 if rank else TO_RANK_0
    made._queues = {0: Queue(), 1: Queue()}

    def send(to: int, message: Any) -> None:
        assert 0 <= to < SIZE
        assert to != rank
        json.dumps(message)

    made._star = SimpleNamespace(send=send)  # type: ignore[assignment]
    made._roll_call = RollCall(rank, SIZE, send)
    made._closed = False
    made._lock = threading.Lock()
    made._order = NameOrder(SIZE, 1000.0, 500.0)
    made._order.add_set(0, range(SIZE))
    made._order.add_set(1, [0, 2])
    made._errands = queue.SimpleQueue()
    made._watched_until = 0.0
    return made


KINDS = sorted({*TO_RANK_0, *FROM_RANK_0, "x"})
SIMPLE = [
    None, True, False, 0, 1, 2, 3, -1, 10**400, 0.5, float("inf"), "", "0", "0/0", "1/a.0", "a",
    "noname.0", "go", "differ", "refused", "begin", "end", "loss", "PeerLost", "TransferTimeout",
    "HorovodInternalError", "step",
]  # fmt: skip


def value_of(data: atheris.FuzzedDataProvider, depth: int) -> Any:
    kind = data.ConsumeIntInRange(0, 11)
    if kind == 0 and depth < 4:
        return [value_of(data, depth + 1) for _ in range(data.ConsumeIntInRange(0, 4))]
    if kind == 1 and depth < 4:
        return {
            data.PickValueInList(["0", "1", "0/0", "1/b.0", "engine 0", "x"]): value_of(
                data, depth + 1
            )
            for _ in range(data.ConsumeIntInRange(0, 3))
        }
    if kind == 2 and depth < 4:
        return ["step", "0/0", data.ConsumeIntInRange(0, 3), data.PickValueInList(SIMPLE)]
    if kind == 3:
        return data.ConsumeUnicode(10)
    return data.PickValueInList(SIMPLE)


PARTS = {
    message_forms._rank: [0, 1, 2],
    message_forms._number: [0, 1, 7],
    message_forms._text: ["allreduce.a", "allreduce.noname.0", "", "b"],
    message_forms._error: ["PeerLost", "TransferTimeout"],
    message_forms._verdict: ["go", "differ", "refused"],
    message_forms._whether: [None, True, False],
    message_forms._key: ["0/0", "1/a.0"],
    message_forms._event: ["begin", "end", "loss"],
}


def message_of(data: atheris.FuzzedDataProvider) -> Any:
    kind = data.PickValueInList(KINDS)
    form = {**TO_RANK_0, **FROM_RANK_0}.get(kind, ())
    values = []
    for test in form:
        if data.ConsumeIntInRange(0, 9) == 0 or test not in PARTS:
            values.append(value_of(data, 0))
        else:
            values.append(data.PickValueInList(PARTS[test]))
    if data.ConsumeIntInRange(0, 9) == 0:
        values.append(value_of(data, 0))
    return [kind, *values]


def try_messages(data: atheris.FuzzedDataProvider) -> None:
    rank = data.ConsumeIntInRange(0, SIZE - 1)
    end = negotiation(rank)
    for _ in range(data.ConsumeIntInRange(1, 6)):
        sender = data.ConsumeIntInRange(1, SIZE - 1) if rank == 0 else 0
        if data.ConsumeIntInRange(0, 7) == 0:
            text = data.ConsumeBytes(60)
        else:
            text = json.dumps(message_of(data)).encode()
        try:
            end._on_message(sender, message_forms.parsed(sender, text))
        except Malformed as error:
            assert f"rank {sender} sent a malformed message" in str(error)  # noqa: PT017
            end._on_lost(sender, str(error))
        if data.ConsumeIntInRange(0, 7) == 0:
            end._order.overdue(time.monotonic() + 2000)
        while not end._errands.empty():
            errand = end._errands.get()
            if errand is not None and errand[0] != "look":
                end._take(errand)


def try_gathered(data: atheris.FuzzedDataProvider) -> None:
    head = [
        data.PickValueInList([group_collectives._HEAD, 0, -1, 2**62])
        if data.ConsumeBool()
        else data.ConsumeInt(8)
        for _ in range(3)
    ]
    if data.ConsumeBool():
        head = group_collectives.head_of(data.ConsumeBytes(10), "objects").tolist()
    try:
        count = group_collectives.count_in(head, 1, "objects")
    except HorovodInternalError:
        return
    assert 0 <= count <= group_collectives._MOST_BYTES


def test_one_input(raw: bytes) -> None:
    data = atheris.FuzzedDataProvider(raw)
    if data.ConsumeIntInRange(0, 4) == 0:
        try_gathered(data)
    else:
        try_messages(data)


if __name__ == "__main__":
    atheris.Setup(sys.argv, test_one_input)
    atheris.Fuzz()
