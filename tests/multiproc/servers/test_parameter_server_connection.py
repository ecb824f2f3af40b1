"""The connection belongs to the two that have proven to know the secret, and to nobody else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist
from helpers.flags import wait_until
from helpers.servers import Servers

from hvd_order._native import _torch as native
from hvd_order.base.errors import NotTrusted
from hvd_order.servers.access import secret
from hvd_order.servers.process import messages
from hvd_order.servers.process.signed_store import SignedStore
from hvd_order.servers.worker import connections

TIMEOUT = timedelta(seconds=30)
SHORT = timedelta(seconds=10)


def stores(count: int) -> list[dist.TCPStore]:
    """One store, as several see it; the first serves."""
    first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    return [first] + [
        dist.TCPStore("127.0.0.1", first.port, is_master=False, timeout=TIMEOUT)
        for _ in range(count - 1)
    ]


def both_ends() -> list[dist.ProcessGroupGloo]:
    """The two members of a connection's group."""
    with ThreadPoolExecutor() as threads:
        return list(
            threads.map(
                lambda side: dist.ProcessGroupGloo(side[1], side[0], 2, SHORT),
                enumerate(stores(2)),
            )
        )


def end_of_a_connection(
    heard: Callable[[str], object] = len, lost: Callable[[str], object] = len
) -> native.ServerTransport:
    """One that sends texts, and calls with those of the other end and with the cause of a loss."""
    return native.ServerTransport(
        rank=0,
        workers=1,
        ordered=True,
        asks_first=False,
        on_lost=lambda _server, why: lost(why),
        on_control=lambda _server, text: heard(text),
    )


def test_what_was_signed_comes_back_and_nothing_else() -> None:
    store = dist.PrefixStore("link", dist.HashStore())
    mine, theirs = SignedStore(store, b"k" * 32), SignedStore(store, b"k" * 32)
    mine.set("a", b"address")
    assert theirs.get("a") == b"address"
    forgeries: list[Callable[[], object]] = [
        lambda: store.set("b", store.get("a")),  # another name
        lambda: store.set("b", b"address"),
        lambda: store.set("b", b""),
        lambda: SignedStore(store, b"x" * 32).set("b", b"address"),
    ]
    for forge in forgeries:
        forge()
        with pytest.raises(NotTrusted, match="b is not signed by the other end"):
            theirs.get("b")


def test_an_address_that_a_stranger_has_written_is_refused() -> None:
    """The stranger has seen the handshake and listens itself, so both ends would come to it."""
    with Servers(1, 1, {}) as servers:
        meeting = connections.MeetingPoint(servers.env["HVD_ORDER_SERVER_STORE"], TIMEOUT)
        key = bytes.fromhex(servers.env["HVD_ORDER_SECRET"])
        place = meeting.count("server/0/places")
        store = meeting.own()
        keys = secret.join(
            store, f"server/0/place/{place}", key, peer="worker 0", server="server 0",
            timeout=TIMEOUT,
        )  # fmt: skip
        pair = dist.PrefixStore(f"server/0/pair/{place}", store)
        # As rank 0 the stranger overwrites what the server has left, as rank 1 what we would leave.
        pair.wait(["0/0"], TIMEOUT)
        honest = pair.get("0/0")
        with ThreadPoolExecutor() as threads:
            elsewhere = stores(2)
            strangers = [
                threads.submit(dist.ProcessGroupGloo, elsewhere[rank], rank, 2, SHORT)
                for rank in range(2)
            ]
            for stranger in strangers:
                stranger.result()
            pair.set("0/1", elsewhere[0].get("0/1"))
            servers.wait_for_log("0/1 is not signed by the other end of this link")
            assert pair.get("0/0") == honest
            pair.set("0/0", elsewhere[0].get("0/0"))
            with pytest.raises(NotTrusted, match="0/0 is not signed"):
                dist.ProcessGroupGloo(SignedStore(pair, keys.records), 1, 2, SHORT)


def test_who_took_a_connection_cannot_speak_with_what_it_hears() -> None:
    """The stranger has the connection, and the number in the frames of the honest end."""
    said: list[str] = []
    gone: list[str] = []
    groups = both_ends()
    honest = end_of_a_connection(said.append, gone.append)
    stranger = end_of_a_connection()
    honest.connect(0, native.PairConnection(groups[0], sends=1, receives=2, largest_payload=1024))
    stranger.connect(0, native.PairConnection(groups[1], sends=1, receives=1, largest_payload=1024))
    honest.send_control(0, messages.ask("audit"))
    stranger.send_control(0, messages.ask("audit"))
    wait_until(lambda: gone, "the honest end notices", 30)
    assert "a frame of another session" in gone[0]
    assert not said
    honest.close()
    stranger.close()


def test_what_was_sent_before_the_end_arrives_however_late_it_is_read() -> None:
    """A farewell, or the cause of a failure, is often the last frame, and its reader is busy."""

    def established() -> int:
        return sum(each.status == "ESTABLISHED" for each in psutil.Process().net_connections())

    heard: list[str] = []
    closed, gone = threading.Event(), threading.Event()

    def hear(text: str) -> None:
        heard.append(text)
        assert closed.wait(30)

    groups = both_ends()
    reader = end_of_a_connection(hear, lambda _why: gone.set())
    writer = end_of_a_connection()
    open_before = established()
    reader.connect(0, native.PairConnection(groups[0], sends=1, receives=2, largest_payload=1024))
    writer.connect(0, native.PairConnection(groups[1], sends=2, receives=1, largest_payload=1024))
    del groups
    texts = ["first", "second"]  # with the farewell as many as are posted ahead
    for text in texts:
        writer.send_control(0, text)
    writer.close()
    del writer
    wait_until(lambda: established() <= open_before - 2, "the reader sees the end", 30)
    closed.set()
    assert gone.wait(30)
    assert heard == texts
    reader.close()
