"""Proving that both ends of a link know the secret: what goes well, and what strangers may try."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hvd_order.base.errors import InvalidUsage, NotTrusted, PeerLost, TransferTimeout
from hvd_order.servers.access.secret import (
    AcceptedPeer,
    ConnectionKeys,
    Store,
    accept,
    join,
    load_secret,
    new_secret,
)

LONG = timedelta(seconds=30)  # nothing here waits for it
SHORT = timedelta(seconds=0.3)
SECRET = bytes(range(32))
OTHER_SECRET = bytes(range(1, 33))
PEER, SERVER = "worker 3", "server 0"


@pytest.fixture
def in_thread() -> Iterator[Callable[..., Future[Any]]]:
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


@pytest.fixture(params=["hash", "tcp"])
def stores(request: pytest.FixtureRequest) -> tuple[Store, Store]:
    """The same store, as the peer and as the server see it."""
    if request.param == "hash":
        store = dist.HashStore()
        return store, store
    first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LONG)
    return first, dist.TCPStore("127.0.0.1", first.port, is_master=False, timeout=LONG)


@pytest.fixture
def store() -> dist.HashStore:
    return dist.HashStore()


def peer_joins(
    store: Store, secret: bytes = SECRET, link: str = "link/1", timeout: timedelta = LONG
) -> ConnectionKeys:
    return join(store, link, secret, peer=PEER, server=SERVER, timeout=timeout)


def server_accepts(
    store: Store,
    secret: bytes = SECRET,
    link: str = "link/1",
    timeout: timedelta = LONG,
    peer: str | None = None,
) -> AcceptedPeer | None:
    return accept(store, link, secret, server=SERVER, timeout=timeout, peer=peer)


def at_server(keys: ConnectionKeys) -> AcceptedPeer:
    """What the server has when the peer has these keys."""
    return AcceptedPeer(PEER, ConnectionKeys(keys.receives, keys.sends, keys.records))


class Between:
    """A store whose keeper changes what others read."""

    def __init__(self, store: Store, key: str, change: Callable[[bytes], bytes]) -> None:
        self._store = store
        self._key = key
        self._change = change

    def set(self, key: str, value: Any, /) -> None:
        self._store.set(key, value)

    def get(self, key: str, /) -> bytes:
        value = self._store.get(key)
        return self._change(value) if key == self._key else value

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        self._store.wait(keys, timeout)


def flip(at: int) -> Callable[[bytes], bytes]:
    return lambda value: value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]


# ---- both know it ----


def test_both_ends_let_each_other_in(
    stores: tuple[Store, Store], in_thread: Callable[..., Future[Any]]
) -> None:
    of_peer, of_server = stores
    numbers: list[int] = []
    records = []
    for attempt in range(3):
        accepted = in_thread(server_accepts, of_server, link=f"link/{attempt}", peer=PEER)
        keys = peer_joins(of_peer, link=f"link/{attempt}")
        assert accepted.result() == at_server(keys)
        for secret in (keys.sends, keys.receives, keys.records):
            assert str(secret) not in repr(accepted.result()), "keys stay out of logs"
        numbers += [keys.sends, keys.receives]
        records.append(keys.records)
    assert len(set(numbers)) == 6, "each direction of each link has a number of its own"
    assert len(set(records)) == 3
    assert all(0 <= number < 2**64 for number in numbers)


def test_several_peers_at_once(
    store: dist.HashStore, in_thread: Callable[..., Future[Any]]
) -> None:
    links = ["link/1", "link/2"]
    accepted = [in_thread(server_accepts, store, link=link) for link in links]
    joined = [in_thread(peer_joins, store, link=link) for link in links]
    assert [a.result() for a in accepted] == [at_server(j.result()) for j in joined]


def test_neither_secret_nor_keys_are_in_the_store(
    store: dist.HashStore, in_thread: Callable[..., Future[Any]]
) -> None:
    in_thread(server_accepts, store)
    keys = peer_joins(store)
    everything = b"".join(store.get(f"link/1/{key}") for key in ("hello", "answer", "proof"))
    assert SECRET not in everything
    assert keys.records not in everything
    for number in (keys.sends, keys.receives):
        assert number.to_bytes(8, "little") not in everything


# ---- one does not ----


def test_a_peer_without_the_secret_is_refused_and_others_are_served(
    stores: tuple[Store, Store],
    in_thread: Callable[..., Future[Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    of_peer, of_server = stores
    accepted = in_thread(server_accepts, of_server)
    with pytest.raises(NotTrusted, match=r"server 0 has not proven to worker 3 .*HVD_ORDER_SECRET"):
        peer_joins(of_peer, OTHER_SECRET)
    assert accepted.result() is None
    [record] = caplog.records
    assert (record.name, record.levelno) == ("hvd_order", logging.WARNING)
    assert record.getMessage() == (
        "link link/1: worker 3 does not trust server 0: the two have different secrets"
    )
    accepted = in_thread(server_accepts, of_server, link="link/2")
    keys = peer_joins(of_peer, link="link/2")
    assert accepted.result() == at_server(keys)


def test_a_server_without_the_secret_learns_nothing(
    store: dist.HashStore, in_thread: Callable[..., Future[Any]]
) -> None:
    accepted = in_thread(server_accepts, store, OTHER_SECRET)
    with pytest.raises(NotTrusted):
        peer_joins(store)
    assert accepted.result() is None
    assert store.get("link/1/proof") == b"refused"


def test_not_trusted_is_a_mistake_of_use_and_no_lost_collective() -> None:
    assert issubclass(NotTrusted, InvalidUsage)


@pytest.mark.parametrize("what", ["nothing known", "the server's proof", "the answer's tail"])
def test_a_stranger_who_plays_along_is_refused(
    what: str,
    store: dist.HashStore,
    in_thread: Callable[..., Future[Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    accepted = in_thread(server_accepts, store)
    store.set("link/1/hello", bytes(32) + PEER.encode())
    answer = store.get("link/1/answer")
    proof = {
        "nothing known": bytes(32),
        "the server's proof": answer[32:],
        "the answer's tail": answer[-32:][::-1],
    }[what]
    store.set("link/1/proof", proof)
    assert accepted.result() is None
    assert "worker 3 has not proven to server 0" in caplog.text


@pytest.mark.parametrize("link", ["link/1", "link/2"])
def test_what_was_recorded_is_of_no_use_again(
    link: str,
    store: dist.HashStore,
    in_thread: Callable[..., Future[Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    in_thread(server_accepts, store)
    peer_joins(store)
    for key in ("hello", "proof"):
        store.set(f"{link}/{key}", store.get(f"link/1/{key}"))
    assert server_accepts(store, link=link) is None
    assert f"link {link}: worker 3 has not proven" in caplog.text


def test_an_old_answer_does_not_pass_for_a_server(
    store: dist.HashStore, in_thread: Callable[..., Future[Any]]
) -> None:
    in_thread(server_accepts, store)
    peer_joins(store)
    with pytest.raises(NotTrusted):  # its answer is still there
        peer_joins(store)


@pytest.mark.parametrize(
    ("link", "other", "identity"),
    # In the second case what the proofs are of is the same text: link/11worker 3.
    [("link/1", "link/2", PEER), ("link/11", "link/1", f"1{PEER}")],
)
def test_a_handshake_cannot_be_led_to_another_link(
    link: str,
    other: str,
    identity: str,
    store: dist.HashStore,
    in_thread: Callable[..., Future[Any]],
) -> None:
    joined = in_thread(peer_joins, store, link=link)
    store.wait([f"{link}/hello"], LONG)
    nonce = store.get(f"{link}/hello").removesuffix(PEER.encode())
    store.set(f"{other}/hello", nonce + identity.encode())
    accepted = in_thread(server_accepts, store, link=other)
    store.wait([f"{other}/answer"], LONG)
    store.set(f"{link}/answer", store.get(f"{other}/answer"))
    with pytest.raises(NotTrusted):
        joined.result()
    store.set(f"{other}/proof", store.get(f"{link}/proof"))
    assert accepted.result() is None


# ---- somebody changes what is in the store ----


@pytest.mark.parametrize(
    ("key", "at"),
    [("hello", 0), ("hello", 31), ("hello", 33), ("answer", 0), ("answer", 32), ("answer", 63)],
)
def test_a_changed_nonce_name_or_answer_is_found_by_the_peer(
    key: str, at: int, store: dist.HashStore, in_thread: Callable[..., Future[Any]]
) -> None:
    changed = Between(store, f"link/1/{key}", flip(at))
    accepted = in_thread(server_accepts, changed)
    with pytest.raises(NotTrusted):
        peer_joins(changed)
    assert accepted.result() is None


@pytest.mark.parametrize("at", [0, 31])
def test_a_changed_proof_is_found_by_the_server(
    at: int,
    store: dist.HashStore,
    in_thread: Callable[..., Future[Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    accepted = in_thread(server_accepts, Between(store, "link/1/proof", flip(at)))
    peer_joins(store)
    assert accepted.result() is None
    assert "worker 3 has not proven to server 0" in caplog.text


@pytest.mark.parametrize(
    ("hello", "complaint"),
    [
        (b"x", "a hello of 1 bytes"),
        (bytes(32), "a hello of 32 bytes"),
        (bytes(32) + b"a" * 129, "a hello of 161 bytes"),
        (bytes(10_000_000), "a hello of 10000000 bytes"),
        (bytes(32) + b"\xff\xfe", "no plain text"),
        (bytes(32) + b"worker 3\nserver 0: all is well", "no plain text"),
        (bytes(32) + b"worker 4", "'worker 4' came to server 0 in place of 'worker 3'"),
    ],
)
def test_a_hello_that_is_none_is_refused_at_once(
    hello: bytes, complaint: str, store: dist.HashStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.set("link/1/hello", hello)
    assert server_accepts(store, peer=PEER) is None
    assert complaint in caplog.text
    assert store.get("link/1/answer") == b"refused"


def test_a_peer_with_an_unexpected_name_is_told(
    store: dist.HashStore, in_thread: Callable[..., Future[Any]]
) -> None:
    accepted = in_thread(server_accepts, store, peer="worker 4")
    with pytest.raises(NotTrusted, match="server 0 refused worker 3; its log says why"):
        peer_joins(store)
    assert accepted.result() is None


@pytest.mark.parametrize("size", [1, 63, 65, 10_000_000])
def test_an_answer_of_another_size_is_refused(size: int, store: dist.HashStore) -> None:
    store.set("link/1/answer", bytes(size))
    with pytest.raises(NotTrusted, match=f"answered worker 3 with {size} bytes"):
        peer_joins(store)
    assert store.get("link/1/proof") == b"refused"


@pytest.mark.parametrize("size", [1, 31, 33, 10_000_000])
def test_a_proof_of_another_size_is_refused(
    size: int, store: dist.HashStore, in_thread: Callable[..., Future[Any]]
) -> None:
    resized = Between(store, "link/1/proof", lambda proof: (proof + bytes(size))[:size])
    accepted = in_thread(server_accepts, resized)
    peer_joins(store)
    assert accepted.result() is None


def test_a_server_lives_through_arbitrary_bytes(store: dist.HashStore) -> None:
    rng = random.Random(4)
    for attempt in range(500):
        for key in ("hello", "proof"):
            store.set(f"link/{attempt}/{key}", rng.randbytes(rng.choice([1, 7, 32, 33, 40, 200])))
        assert server_accepts(store, link=f"link/{attempt}") is None


# ---- who does not answer is named ----


def test_a_peer_does_not_wait_for_ever(stores: tuple[Store, Store]) -> None:
    with pytest.raises(TransferTimeout, match=r"server 0 did not answer worker 3 within 0.3 s"):
        peer_joins(stores[0], timeout=SHORT)


def test_a_server_does_not_wait_for_ever(
    stores: tuple[Store, Store], caplog: pytest.LogCaptureFixture
) -> None:
    begin = time.monotonic()
    assert server_accepts(stores[1], timeout=SHORT) is None
    assert server_accepts(stores[1], timeout=SHORT, peer=PEER) is None
    stores[0].set("link/1/hello", bytes(32) + b"worker 7")
    assert server_accepts(stores[1], timeout=SHORT) is None
    assert time.monotonic() - begin < 20
    assert [record.getMessage() for record in caplog.records] == [
        "link link/1: a peer did not come to server 0 within 0.3 s (link/1/hello)",
        "link link/1: worker 3 did not come to server 0 within 0.3 s (link/1/hello)",
        "link link/1: worker 7 did not answer server 0 within 0.3 s (link/1/proof)",
    ]


def test_a_lost_store_is_no_silent_peer() -> None:
    class Gone:
        def set(self, key: str, value: Any, /) -> None:
            raise RuntimeError("connection reset")

        def get(self, key: str, /) -> bytes:
            raise RuntimeError("connection reset")

        def wait(self, keys: list[str], timeout: timedelta, /) -> None:
            raise RuntimeError("connection reset")

    with pytest.raises(PeerLost, match="store does not take link/1/hello: connection reset"):
        peer_joins(Gone())
    with pytest.raises(PeerLost, match="store does not give link/1/hello: connection reset"):
        server_accepts(Gone())


@pytest.mark.parametrize("identity", ["", "a" * 129, "worker\n3"])
def test_identities_are_short_and_plain(identity: str, store: dist.HashStore) -> None:
    with pytest.raises(InvalidUsage, match="cannot be an identity"):
        join(store, "link", SECRET, peer=identity, server=SERVER, timeout=SHORT)
    with pytest.raises(InvalidUsage, match="cannot be an identity"):
        accept(store, "link", SECRET, server=identity, timeout=SHORT)


def test_a_short_secret_opens_nothing(store: dist.HashStore) -> None:
    with pytest.raises(InvalidUsage, match="the secret has 0 bytes; at least 16"):
        peer_joins(store, b"")
    with pytest.raises(InvalidUsage, match="the secret has 15 bytes; at least 16"):
        server_accepts(store, bytes(15))


# ---- where the secret comes from ----


def secret_file(folder: Path, text: str, mode: int = 0o600) -> dict[str, str]:
    path = folder / "secret"
    path.write_text(text)
    path.chmod(mode)
    return {"HVD_ORDER_SECRET_FILE": str(path)}


def test_a_new_secret_is_new_and_can_be_loaded(tmp_path: Path) -> None:
    secret = new_secret()
    assert len(secret) == 32
    assert secret != new_secret()
    assert load_secret({"HVD_ORDER_SECRET": secret.hex()}) == secret
    assert load_secret(secret_file(tmp_path, f"{secret.hex()}\n", 0o400)) == secret


def test_the_file_is_asked_first(tmp_path: Path) -> None:
    environ = {**secret_file(tmp_path, SECRET.hex()), "HVD_ORDER_SECRET": OTHER_SECRET.hex()}
    assert load_secret(environ) == SECRET


@pytest.mark.parametrize("environ", [{}, {"HVD_ORDER_SECRET": "", "HVD_ORDER_SECRET_FILE": ""}])
def test_no_secret_is_said_with_what_to_do(environ: dict[str, str]) -> None:
    with pytest.raises(InvalidUsage, match=r"set HVD_ORDER_SECRET_FILE .*openssl rand -hex 32"):
        load_secret(environ)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602, 0o644])
def test_a_file_that_others_may_touch_is_refused(mode: int, tmp_path: Path) -> None:
    with pytest.raises(InvalidUsage, match=rf"mode {mode:o}\); chmod 600 .*secret"):
        load_secret(secret_file(tmp_path, SECRET.hex(), mode))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("5ec2e7", "a secret of 3 bytes; 16 to 1024"),
        ("5ec2e7" * 1000, "16 to 1024"),
        ("5ec2e7-no-hex", "no hexadecimal number"),
        ("5ec2e7é", "no hexadecimal number"),
    ],
)
def test_a_bad_secret_is_not_repeated(text: str, complaint: str, tmp_path: Path) -> None:
    for environ in ({"HVD_ORDER_SECRET": text}, secret_file(tmp_path, text)):
        with pytest.raises(InvalidUsage, match=complaint) as raised:
            load_secret(environ)
        assert "5ec2e7" not in str(raised.value)
        assert str(*environ) in str(raised.value)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(InvalidUsage, match=r"missing .*cannot be read: No such file"):
        load_secret({"HVD_ORDER_SECRET_FILE": str(missing)})
    with pytest.raises(InvalidUsage, match="cannot be read: Is a directory"):
        load_secret({"HVD_ORDER_SECRET_FILE": str(tmp_path)})
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(InvalidUsage, match="is no ordinary file"):
        load_secret({"HVD_ORDER_SECRET_FILE": str(tmp_path / "pipe")})
