"""Who does not know the secret gets nowhere, and who talks nonsense disturbs nobody."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from helpers.flags import wait_until
from helpers.ranks import RankPool
from helpers.servers import Servers, Training, from_undisturbed, job, train_until
from torch.optim import SGD

import hvd_order.torch as hvd
from hvd_order._native import _torch as native
from hvd_order.base.errors import NotTrusted
from hvd_order.servers.process import messages, orders
from hvd_order.servers.worker import connections

TIMEOUT = timedelta(seconds=30)


def make_sgd(groups: Any) -> SGD:
    return SGD(groups, lr=0.01, momentum=0.9)


def body_train_on(env: Mapping[str, str], folder: str) -> dict[str, Any]:
    """Trains until the file "enough" is there."""
    with job(env):
        training = Training(make_sgd, distributed=True).run(5)
        Path(folder, f"pid{hvd.rank()}").write_text(str(os.getpid()), encoding="utf-8")
        train_until(training, Path(folder, "enough").exists)
        return from_undisturbed(training, make_sgd)


def wrong_secret(servers: Servers, meeting: connections.MeetingPoint) -> None:
    for counter in ("server/0/places", "servers", "orders"):
        meeting.count(counter)  # takes a number and never comes: whoever has the next is let in
    stranger = b"not the secret of this job......"
    with pytest.raises(NotTrusted, match="different secrets"):
        connections.take_part(meeting, stranger, "worker 0", 0, TIMEOUT)
    servers.wait_for_log("does not trust server 0")
    orders.give(meeting, stranger, {"what": "remove", "server": 0})

    store = meeting.own()
    for hello in (b"", b"x" * 10, b"n" * 32 + b"\xff\xfe", b"n" * 5000):
        place = meeting.count("server/0/places")
        store.set(f"server/0/place/{place}/hello", hello)
        store.wait([f"server/0/place/{place}/answer"], TIMEOUT)
        assert store.get(f"server/0/place/{place}/answer") == b"refused"
    servers.wait_for_log("which no peer of ours sends")
    servers.wait_for_log("no plain text")
    place = meeting.count("server/0/places")
    store.set(f"server/0/place/{place}/hello", b"n" * 32 + b"worker 1")
    store.wait([f"server/0/place/{place}/answer"], TIMEOUT)
    store.set(f"server/0/place/{place}/proof", b"p" * 32)
    servers.wait_for_log("worker 1 has not proven to server 0")
    # An order that is nobody's, and texts that are no orders.
    for text in (b"", b"[" * 100_000, b"{}", b'["{}", 3]', b"\xff"):
        store.set(f"order/{meeting.count('orders')}", text)


def garbage_to_ports(pids: list[int]) -> int:
    """Sends bytes of no meaning to whatever these processes listen on. Returns on how many."""
    addresses = {
        tuple(each.laddr)
        for pid in pids
        for each in psutil.Process(pid).net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    }
    numbers = torch.Generator().manual_seed(0)
    for host, port in sorted(addresses):
        for size in (1, 8, 64, 4096):
            data = torch.randint(256, (size,), generator=numbers, dtype=torch.uint8)
            with (
                contextlib.suppress(ConnectionError),  # Gloo may close the door on strangers
                socket.create_connection((host, port), timeout=10) as stranger,
            ):
                stranger.sendall(data.numpy().tobytes())
        with contextlib.suppress(ConnectionError):
            socket.create_connection((host, port), timeout=10).close()  # says nothing and goes
    return len(addresses)


def nonsense_of_an_observer(
    servers: Servers, meeting: connections.MeetingPoint, key: bytes
) -> None:
    said: list[str] = []
    link = connections.take_part(meeting, key, "observer 1", 0, TIMEOUT)
    observer = native.ServerTransport(
        rank=0,
        workers=2,
        ordered=True,
        asks_first=False,
        on_lost=lambda _server, why: said.append(f"lost: {why}"),
        on_control=lambda _server, text: said.append(text),
    )
    observer.connect(0, link)
    for text in (
        "", "nonsense", "[]", "3", "null", "{}", '{"what": 3}', '{"what": "ready", "servers": 7}',
        '{"what": "late", ' + "x" * 100_000, "[" * 100_000, "\0\0",
    ):  # fmt: skip
        observer.send_control(0, text)
    servers.wait_for_log("refused a message of observer 1")
    observer.send_control(0, messages.ask("audit"))
    wait_until(lambda: said, servers.log, 30)
    assert json.loads(said[0])["held"]
    observer.close()


@pytest.mark.timeout(300)
def test_strangers_and_nonsense_disturb_nobody(two_ranks: RankPool, tmp_path: Path) -> None:
    with (
        Servers(2, 1, {"HVD_ORDER_PS_UPDATE": "server"}) as servers,
        ThreadPoolExecutor() as threads,
    ):
        training = threads.submit(
            two_ranks.run, body_train_on, servers.env, str(tmp_path), timeout=200
        )
        try:
            pids = [tmp_path / f"pid{rank}" for rank in range(2)]
            wait_until(
                lambda: training.done() or all(pid.exists() for pid in pids), "both train", 120
            )
            meeting = connections.MeetingPoint(servers.env["HVD_ORDER_SERVER_STORE"], TIMEOUT)
            wrong_secret(servers, meeting)
            workers = [int(pid.read_text(encoding="utf-8")) for pid in pids]
            assert garbage_to_ports([*servers.pids, *workers, os.getpid()]) >= 4
            key = bytes.fromhex(servers.env["HVD_ORDER_SECRET"])
            nonsense_of_an_observer(servers, meeting, key)
        finally:
            (tmp_path / "enough").touch()
        for apart in training.result():
            assert apart == {}, "it differs from an undisturbed run"
        assert servers.wait() == [0]
