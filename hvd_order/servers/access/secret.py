"""Handshake: both ends prove that they have the job's secret before any connection is made.

They meet in a rendezvous store that any process on the network may read and write::

    peer                                    server
      hello   nonce, identity          -->
                                       <--  answer  nonce, HMAC(secret, "server" | ids | nonces)
      proof   HMAC(secret, "peer" | ids | nonces)
                                       -->  connects, if that is right

Both nonces are new for each connection, so recorded messages are useless later. Each HMAC includes
the role, so a message cannot be sent back to its sender.

The connection is made after the handshake, so it needs a proof of its own. Both ends derive keys
that never travel through the store (`ConnectionKeys`). One key signs the addresses by which the
ends find each other, so no other process can replace them. Two numbers mark the frames
(csrc/servers/wire/frame.h), one for each direction: an attacker that takes a connection in the
place of one end receives at most the number of the other end, and that number is refused when the
attacker sends it.

The handshake keeps strangers out. It hides nothing: gradients travel unencrypted, and an attacker
who can write to the store or the network can still stop the job. An attacker on the path of the
packets can change them; Gloo's TLS helps against that (docs/security.md).
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

from hvd_order.base.bounded import answer_s, within
from hvd_order.base.errors import InvalidUsage, NotTrusted, PeerLost, TransferTimeout
from hvd_order.base.store_errors import first_line

__all__ = ["AcceptedPeer", "ConnectionKeys", "Store", "accept", "join", "load_secret", "new_secret"]

_VARIABLE = "HVD_ORDER_SECRET"
_FILE_VARIABLE = "HVD_ORDER_SECRET_FILE"
_LEAST_SECRET_BYTES = 16
_MOST_SECRET_BYTES = 1024
_NONCE_BYTES = 32
_PROOF_BYTES = 32  # SHA-256
_MOST_IDENTITY_BYTES = 128
_REFUSAL = b"refused"  # no other message has this length, so the other end need not wait in vain
_PROTOCOL = b"hvd_order link 1"  # separates these HMACs from any other use of the secret

_log = logging.getLogger("hvd_order")


class Store(Protocol):
    """The required methods of torch.distributed's Store.

    A TCPStore serves one call at a time, waits included: each thread needs a clone.
    """

    # Any: the methods take bytes, but torch's stubs say str.
    def set(self, key: str, value: Any, /) -> None:
        """Stores bytes."""

    def get(self, key: str, /) -> bytes:
        """Waits for a key and returns its bytes."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Waits until the keys are set; raises after the timeout."""


@dataclass(frozen=True)
class ConnectionKeys:
    """Keys that only the two ends of one connection have.

    Attributes:
        sends: 64-bit number in every frame that this end sends.
        receives: 64-bit number in every frame of the other end.
        records: signs the records that the two ends leave in the store for each other.
    """

    sends: int = field(repr=False)
    receives: int = field(repr=False)
    records: bytes = field(repr=False)


@dataclass(frozen=True)
class AcceptedPeer:
    """A peer that has proven that it has the secret.

    Attributes:
        identity: the peer's own name; accepted from any peer with the secret.
        keys: keys of this connection.
    """

    identity: str
    keys: ConnectionKeys


# ---------------------------------------------------------------------------------- the secret


def new_secret() -> bytes:
    """Returns a secret for a new job; `load_secret` reads its ``.hex()``."""
    return secrets.token_bytes(32)


def load_secret(environ: Mapping[str, str]) -> bytes:
    """Returns the job's secret from the file ``HVD_ORDER_SECRET_FILE``, else ``HVD_ORDER_SECRET``.

    Raises:
        InvalidUsage: neither is set, the value is not hex text of 16 to 1024 bytes, or users other
            than its owner may read or write the file. The message contains no part of the secret.
    """
    path = environ.get(_FILE_VARIABLE)
    if path:
        return _parse_secret(_read_private(path), f"the file {path} of {_FILE_VARIABLE}")
    if environ.get(_VARIABLE):
        return _parse_secret(environ[_VARIABLE], _VARIABLE)
    raise InvalidUsage(
        f"parameter servers need a secret that all processes of the job know: set {_FILE_VARIABLE} "
        f"to a file that its owner alone may read, or {_VARIABLE}; it holds what "
        "`openssl rand -hex 32` prints"
    )


def _parse_secret(text: str, source: str) -> bytes:
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        raise InvalidUsage(f"{source} holds no hexadecimal number") from None
    if not _LEAST_SECRET_BYTES <= len(secret) <= _MOST_SECRET_BYTES:
        raise InvalidUsage(
            f"{source} holds a secret of {len(secret)} bytes; {_LEAST_SECRET_BYTES} to "
            f"{_MOST_SECRET_BYTES} are needed"
        )
    return secret


def _read_private(path: str) -> str:
    source = f"the file {path} of {_FILE_VARIABLE}"
    try:
        # Without O_NONBLOCK, opening a named pipe would wait.
        with open(path, "rb", opener=lambda name, how: os.open(name, how | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InvalidUsage(f"{source} is no ordinary file")
            if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise InvalidUsage(
                    f"{source} is open to others than its owner (mode {status.st_mode & 0o777:o}); "
                    f"chmod 600 {path}"
                )
            content = file.read(3 * _MOST_SECRET_BYTES)
    except OSError as error:
        raise InvalidUsage(f"{source} cannot be read: {error.strerror}") from None
    return content.decode("ascii", "replace")  # text that is not ASCII is not hex either


# ---------------------------------------------------------------------------------- both roles


def join(
    store: Store, link: str, secret: bytes, *, peer: str, server: str, timeout: timedelta
) -> ConnectionKeys:
    """The peer's half: proves that it has the secret, after the server has done so.

    Args:
        store: store where both ends meet.
        link: prefix of the keys; the same at both ends, and new for each attempt.
        secret: the job's secret.
        peer: identity of this process.
        server: identity of the server that must answer.
        timeout: longest wait for the server.

    Returns:
        The keys of the connection.

    Raises:
        NotTrusted: the answering process does not have the secret, or refuses this peer.
        TransferTimeout: the server did not answer.
        PeerLost: the store cannot be reached.
        InvalidUsage: an identity is too long, or the secret too short.
    """
    _check(secret, peer, server)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    _post(store, f"{link}/hello", nonce + peer.encode())
    answer = _take(store, f"{link}/answer", timeout, f"{server} did not answer {peer}")
    if answer == _REFUSAL:
        raise NotTrusted(f"{server} refused {peer}; its log says why")
    if len(answer) != _NONCE_BYTES + _PROOF_BYTES:
        _post(store, f"{link}/proof", _REFUSAL)
        raise NotTrusted(f"{server} answered {peer} with {len(answer)} bytes that are no proof")
    proofs = _Proofs(secret, link, peer, server, nonce, answer[:_NONCE_BYTES])
    if not hmac.compare_digest(answer[_NONCE_BYTES:], proofs.of("server")):
        _post(store, f"{link}/proof", _REFUSAL)
        raise NotTrusted(
            f"{server} has not proven to {peer} that it knows the secret of this job: the two have "
            f"different secrets ({_VARIABLE}, {_FILE_VARIABLE}), or something else answered"
        )
    _post(store, f"{link}/proof", proofs.of("peer"))
    return proofs.keys(sender="peer", receiver="server")


def accept(
    store: Store,
    link: str,
    secret: bytes,
    *,
    server: str,
    timeout: timedelta,
    peer: str | None = None,
) -> AcceptedPeer | None:
    """The server's half: waits for a peer, answers, and accepts the peer if its proof is right.

    Args:
        store: store where both ends meet.
        link: prefix of the keys; the same at both ends, and new for each attempt.
        secret: the job's secret.
        server: identity of this process.
        timeout: longest wait for each of the peer's two messages.
        peer: the only identity to accept; None: any.

    Returns:
        None if no peer arrived, or an untrusted one: a log line has its name and the reason, and
            the caller continues with other peers.

    Raises:
        PeerLost: the store cannot be reached.
        InvalidUsage: an identity is too long, or the secret too short.
    """
    _check(secret, server, *([] if peer is None else [peer]))
    try:
        identity, nonce = _take_hello(store, link, server, timeout, peer)
        own_nonce = secrets.token_bytes(_NONCE_BYTES)
        proofs = _Proofs(secret, link, identity, server, nonce, own_nonce)
        _post(store, f"{link}/answer", own_nonce + proofs.of("server"))
        proof = _take(store, f"{link}/proof", timeout, f"{identity} did not answer {server}")
        if proof == _REFUSAL:
            raise NotTrusted(f"{identity} does not trust {server}: the two have different secrets")
        if len(proof) != _PROOF_BYTES or not hmac.compare_digest(proof, proofs.of("peer")):
            raise NotTrusted(
                f"{identity} has not proven to {server} that it knows the secret of this job; "
                "refused"
            )
    except (NotTrusted, TransferTimeout) as error:
        _log.warning("link %s: %s", link, error)
        return None
    return AcceptedPeer(identity, proofs.keys(sender="server", receiver="peer"))


def _take_hello(
    store: Store, link: str, server: str, timeout: timedelta, peer: str | None
) -> tuple[str, bytes]:
    """Waits for a hello and returns its identity and nonce; answers an untrusted one by refusal.

    Raises:
        NotTrusted: the hello has no valid identity, or another one than `peer`.
        TransferTimeout: no hello came.
        PeerLost: the store cannot be reached.
    """
    who = peer or "a peer"
    hello = _take(store, f"{link}/hello", timeout, f"{who} did not come to {server}")
    try:
        identity, nonce = _parse_hello(hello)
        if peer is not None and identity != peer:
            raise NotTrusted(f"{identity!r} came to {server} in place of {peer!r}")
    except NotTrusted:
        _post(store, f"{link}/answer", _REFUSAL)
        raise
    return identity, nonce


class _Proofs:
    """Values that only the two ends of one connection can compute."""

    def __init__(
        self,
        secret: bytes,
        link: str,
        peer: str,
        server: str,
        peer_nonce: bytes,
        server_nonce: bytes,
    ) -> None:
        self._secret = secret
        self._parts = [link.encode(), peer.encode(), server.encode(), peer_nonce, server_nonce]

    def of(self, role: str) -> bytes:
        # A length before each part ensures that no two lists give the same bytes.
        parts = [_PROTOCOL, role.encode(), *self._parts]
        message = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        return hmac.digest(self._secret, message, "sha256")

    def keys(self, sender: str, receiver: str) -> ConnectionKeys:
        sends, receives = (
            int.from_bytes(self.of(f"frames of the {role}")[:8], "little")
            for role in (sender, receiver)
        )
        return ConnectionKeys(sends, receives, self.of("records"))


def _parse_hello(hello: bytes) -> tuple[str, bytes]:
    size = len(hello) - _NONCE_BYTES
    if not 1 <= size <= _MOST_IDENTITY_BYTES:
        raise NotTrusted(f"a hello of {len(hello)} bytes came, which no peer of ours sends")
    try:
        identity = hello[_NONCE_BYTES:].decode()
    except UnicodeDecodeError:
        identity = ""
    if not identity.isprintable() or not identity:  # it goes into logs
        raise NotTrusted("a hello came whose identity is no plain text")
    return identity, hello[:_NONCE_BYTES]


def _check(secret: bytes, *identities: str) -> None:
    if len(secret) < _LEAST_SECRET_BYTES:
        raise InvalidUsage(
            f"the secret has {len(secret)} bytes; at least {_LEAST_SECRET_BYTES} are needed"
        )
    for identity in identities:
        if not 1 <= len(identity.encode()) <= _MOST_IDENTITY_BYTES or not identity.isprintable():
            raise InvalidUsage(
                f"{identity!r} cannot be an identity: it needs 1 to {_MOST_IDENTITY_BYTES} bytes "
                "of plain text"
            )


# ---------------------------------------------------------------------------------- the store


def _post(store: Store, key: str, value: bytes) -> None:
    try:
        store.set(key, value)
    except Exception as error:
        raise PeerLost(f"the rendezvous store does not take {key}: {first_line(error)}") from error


def _take(store: Store, key: str, timeout: timedelta, complaint: str) -> bytes:
    begin = time.monotonic()
    try:
        within(timeout.total_seconds() + answer_s(timeout), lambda: store.wait([key], timeout))
        return store.get(key)
    except Exception as error:
        # Stores have no common type for a timeout, and they measure it themselves.
        if time.monotonic() - begin < 0.9 * timeout.total_seconds():
            raise PeerLost(
                f"the rendezvous store does not give {key}: {first_line(error)}"
            ) from error
        raise TransferTimeout(
            f"{complaint} within {timeout.total_seconds():g} s ({key})"
        ) from error
