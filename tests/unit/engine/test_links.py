"""Which connections tell the rate of a link."""

from __future__ import annotations

import socket
import threading

from hvd_order.engine.account import links


def test_small_messages_tell_nothing() -> None:
    gradients = 10**9
    assert links.slowest({}, gradients) == (-1, 0.0)
    assert links.slowest({1: (50_000, 2.0)}, gradients) == (-1, 0.0)
    assert links.slowest({1: (0, 2.0)}, 0) == (-1, 0.0)
    assert links.slowest({1: (10**9, 0.01)}, gradients) == (-1, 0.0)  # of how many ticks?
    sent = {1: (10**9, 2.0), 2: (5 * 10**8, 2.0), 3: (100, 1.0), -1: (10**9, 100.0)}
    assert links.slowest(sent, gradients) == (2, 2.5e8)


def test_bytes_of_a_real_connection_are_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        with near, far:
            rates = links.LinkRates({"127.0.0.1": 1}, own=0)
            size = 8 * 2**20
            reader = threading.Thread(target=far.recv, args=(size, socket.MSG_WAITALL))
            reader.start()
            near.sendall(b"x" * size)
            reader.join()
            sent, _ = rates.sent()[1]  # how long that took, the kernel counts in ticks
            assert sent >= size - 2**20  # the last bytes may not be acknowledged yet
            assert rates.sent().get(1, (0, 0.0))[0] < size
    assert "127.0.0.1" not in links.own_addresses()
