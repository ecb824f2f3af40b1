"""Whatever lies in the job's store, where anybody may write, is refused or does what it says.

Notes are orders, scale requests and the answers to both: one that is not signed with the job's
secret, about what it stands under, has no effect. Numbers that strangers count up keep nobody from
coming.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from datetime import timedelta
from typing import Any

import atheris

with atheris.instrument_imports(
    include=["hvd_order.servers", "hvd_order.servers.launch.server_starter"]
):
    from hvd_order.base.errors import InvalidUsage, NotTrusted
    from hvd_order.servers.access import ticket_queue as arrivals_room
    from hvd_order.servers.access.signed_records import read_record, signed_record
    from hvd_order.servers.access.ticket_queue import TicketQueue
    from hvd_order.servers.launch.server_starter import ServerStarter
with atheris.instrument_imports(include=["hvd_order.engine.job.meeting"]):
    from hvd_order.engine.job.meeting import Card, check_cards
with atheris.instrument_imports(include=["hvd_order.servers.process.orders"]):
    from hvd_order.servers.process.orders import answer_in, server_to_remove

KEY = b"the secret of this job.........."
MOST_OPEN = 8


arrivals_room._MOST_OPEN = MOST_OPEN  # instead of 256, which would take most of the time


class Store:
    """What is needed of torch.distributed's, with what strangers have put there."""

    def __init__(self) -> None:
        self.counter = 0
        self.filled: set[str] = set()
        self.values: dict[str, bytes] = {}

    def add(self, _key: str, _value: int) -> int:
        return self.counter

    def check(self, keys: list[str]) -> bool:
        return all(key in self.filled or key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key]

    def set(self, key: str, value: Any) -> None:
        self.values[key] = value if isinstance(value, bytes) else value.encode()


class Servers:
    """A launcher that starts nothing."""

    started = 0

    def running(self) -> int:
        return self.started % 3

    def start(self) -> tuple[str, subprocess.Popen[bytes]]:
        self.started += 1
        raise OSError("not here")


store = Store()
servers = Servers()
launcher = ServerStarter(store, KEY, servers, 2)  # type: ignore[arg-type]
launcher.close()  # it looks at nothing by itself


def text_of(data: atheris.FuzzedDataProvider) -> str:
    """JSON that may have been signed, or any text."""
    words = ["what", "server", "start", "remove", "done", "refused", "failed", "started", "x"]

    def value(depth: int) -> Any:
        kind = data.ConsumeIntInRange(0, 9)
        if kind == 0 and depth < 4:
            return [value(depth + 1) for _ in range(data.ConsumeIntInRange(0, 3))]
        if kind <= 3 and depth < 4:
            return {
                data.PickValueInList(words): value(depth + 1)
                for _ in range(data.ConsumeIntInRange(0, 3))
            }
        simple = [None, True, False, 0, -1, 2, 10**400, float("inf"), float("nan"), 0.5, "", *words]
        return data.PickValueInList(simple) if kind < 8 else data.ConsumeUnicode(20)

    return json.dumps(value(0)) if data.ConsumeBool() else data.ConsumeUnicodeNoSurrogates(100)


def note_in(data: atheris.FuzzedDataProvider, subject: str) -> tuple[bytes, str | None]:
    """A note, and what it says if it is signed for that subject."""
    how = data.ConsumeIntInRange(0, 5)
    if how == 0:
        return data.ConsumeBytes(200), None
    text = text_of(data)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if how == 1 or not isinstance(content, dict):
        return json.dumps([text, data.ConsumeUnicode(70)]).encode(), None
    if how == 2:
        return signed_record(KEY, f"{subject}1", content).encode(), None
    if how == 3:
        return signed_record(b"not the secret of this job......", subject, content).encode(), None
    note = signed_record(KEY, subject, content).encode()
    if how == 4 and note:
        place = data.ConsumeIntInRange(0, len(note) - 1)
        other = (
            note[:place] + bytes([note[place] ^ data.ConsumeIntInRange(1, 255)]) + note[place + 1 :]
        )
        return other, None
    return note, json.dumps(content)


def try_order(data: atheris.FuzzedDataProvider) -> None:
    note, said = note_in(data, "order 3")
    try:
        order = read_record(KEY, "order 3", note)
    except NotTrusted:
        assert said is None, "an honest order was refused"
        return
    assert said is None or json.dumps(order) == said
    try:
        server = server_to_remove(order)
    except InvalidUsage:
        return
    assert type(server) is int
    assert order["what"] == "remove"


def try_answer(data: atheris.FuzzedDataProvider) -> None:
    note, said = note_in(data, "answer to order 3")
    try:
        answer_in(note, KEY, 3).encode()  # it goes to a terminal
    except NotTrusted:
        assert said is None, "an honest answer was refused"
    except InvalidUsage:
        pass


def try_scale_request(data: atheris.FuzzedDataProvider) -> None:
    store.values.clear()
    before = servers.started
    note, said = note_in(data, "scale request 3")
    store.values["hvd_order/scale_request/3"] = note
    if data.ConsumeBool():
        store.values["hvd_order/scale_request/3/over"] = data.ConsumeBytes(3)
    launcher._fulfil(3)
    if servers.started > before:
        assert read_record(KEY, "scale request 3", note)["what"] == "start"
    answer = store.values.get("hvd_order/scale_request/3/answer")
    if answer is not None:
        assert "failed" in read_record(KEY, "answer to scale request 3", answer)
        assert said is not None or read_record(KEY, "scale request 3", note)


def try_arrivals(data: atheris.FuzzedDataProvider) -> None:
    store.filled.clear()
    store.values.clear()
    store.counter = 0
    now_s = 0.0
    said: list[str] = []
    first = data.ConsumeIntInRange(0, 3)
    arrivals = TicketQueue(
        store, "servers", lambda number: f"server/{number}", timedelta(seconds=10), said.append,
        first, lambda: now_s,
    )  # fmt: skip
    seen: set[int] = set()
    most = 0
    for _ in range(data.ConsumeIntInRange(1, 6)):
        store.counter += data.ConsumeIntInRange(0, 3)
        if data.ConsumeIntInRange(0, 15) == 0:  # rarely, as it costs the most
            store.counter = data.PickValueInList([20, 2**63 - 1, -(2**63), data.ConsumeInt(8)])
        now_s += data.ConsumeIntInRange(0, 12)
        mine = store.counter - data.ConsumeIntInRange(0, 4)
        store.filled.add(f"server/{mine}")
        most = max(most, store.counter)
        come = arrivals.look()
        assert all(first <= number < most for number in come)
        assert not seen & set(come), "somebody comes once"
        seen |= set(come)
        assert len(arrivals._open) <= 2 * MOST_OPEN


CARD = Card("host", 1, 0, "", {"size": "2"}, {"HVD_ORDER_TUNE": "1"})


def try_card(data: atheris.FuzzedDataProvider) -> None:
    text = CARD.to_text().encode()
    if data.ConsumeIntInRange(0, 3):
        text = text_of(data).encode()
    elif data.ConsumeBool():
        told = json.loads(text)
        value: Any = text_of(data)
        with contextlib.suppress(ValueError):
            value = json.loads(value)
        told[data.PickValueInList([*told, "more"])] = value
        text = json.dumps(told).encode()
    else:
        place = data.ConsumeIntInRange(0, len(text))
        text = text[:place] + data.ConsumeBytes(data.ConsumeIntInRange(0, 9)) + text[place:]
    try:
        card = Card.from_text(text)
    except ValueError:
        return
    assert Card.from_text(card.to_text().encode()) == card
    try:
        check_cards({0: CARD, 1: card})
    except InvalidUsage:
        assert (card.job, card.settings) != (CARD.job, CARD.settings)


TRIES = [try_order, try_answer, try_scale_request, try_arrivals, try_card]


def test_one_input(data: bytes) -> None:
    provider = atheris.FuzzedDataProvider(data)
    TRIES[provider.ConsumeIntInRange(0, len(TRIES) - 1)](provider)


if __name__ == "__main__":
    logging.disable()
    atheris.Setup(sys.argv, test_one_input)
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stderr(nowhere):
        atheris.Fuzz()  # the launcher says what it refuses
