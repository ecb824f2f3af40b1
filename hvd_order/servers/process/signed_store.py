"""Gloo's records in a store that any process may write to, signed with the key of one connection.

Gloo finds its peer by addresses in the store. An attacker who replaced those addresses would be
connected to both ends, after their proofs, and could read and change their messages. So each
record carries an HMAC over its name and value, with a key that only the two ends have, derived
from their handshake.
"""

from __future__ import annotations

import hmac
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from hvd_order.base.errors import NotTrusted

__all__ = ["SignedStore"]

_SIGNATURE_BYTES = 32  # SHA-256


class SignedStore(Store):
    """A store for one connection: it signs values on `set` and checks them on `get`.

    It must live as long as the call that it is passed to.

    Raises:
        NotTrusted: from `get`, for a value that the other end has not signed.
    """

    def __init__(self, store: PrefixStore, key: bytes) -> None:
        """Wraps a store; ``key`` belongs to this connection (`secret.ConnectionKeys.records`)."""
        super().__init__()
        self._store = store
        self._key = key

    def set(self, key: str, value: Any) -> None:
        """Stores bytes under a name."""
        data = bytes(value)
        self._store.set(key, self._signature(key, data) + data)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Waits for a name and returns its bytes."""
        record = self._store.get(key)
        signature, data = record[:_SIGNATURE_BYTES], record[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._signature(key, data)):
            raise NotTrusted(
                f"the address under {key} is not signed by the other end of this link: somebody "
                "else has written to the store"
            )
        return data

    def check(self, keys: list[str]) -> bool:
        """Returns whether all names have a value."""
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until all names have a value."""
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)

    def _signature(self, key: str, value: bytes) -> bytes:
        name = key.encode()
        return hmac.digest(self._key, len(name).to_bytes(4, "little") + name + value, "sha256")
