"""Whatever the other end of a handshake says, nobody is let in, or believed, without the secret.

The fuzzer is the network: it may show each message to the other end as it is, change it, hold it
back, put in any bytes, what was said before in another handshake, or the same end's own words. Only
if all messages came as they were sent do both ends agree.
"""

from __future__ import annotations

import logging
import sys
from datetime import timedelta

import atheris

with atheris.instrument_imports(include=["hvd_order.servers.access.secret"]):
    from hvd_order.base.errors import HvdOrderError, InvalidUsage
    from hvd_order.servers.access import secret

KEY = b"the secret of this job.........."
OTHER_KEY = b"not the secret of this job......"
LINKS = ["server/0/place/7", "server/0/place/8", "server/1/place/7"]
PEERS = ["worker 0", "worker 1", "server 1", "observer 5"]


class Paused(BaseException):
    """An end waits for what the other has not said yet."""


class Network:
    """The store of one end: what it says is kept, what it hears is drawn."""

    def __init__(self, hears: dict[str, bytes | None]) -> None:
        self.said: dict[str, bytes] = {}
        self._hears = hears

    def set(self, key: str, value: bytes) -> None:
        self.said[key.rpartition("/")[2]] = value

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        what = keys[0].rpartition("/")[2]
        if what not in self._hears:
            raise Paused
        if self._hears[what] is None:
            raise RuntimeError("time is up")

    def get(self, key: str) -> bytes:
        heard = self._hears[key.rpartition("/")[2]]
        assert heard is not None
        return heard


class Nonces:
    """Random numbers of one end, the same again while it is replayed up to its next message."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def token_bytes(self, count: int) -> bytes:
        return bytes([self._seed]) * count


class End:
    """One end, run again from its beginning with each message that it hears."""

    def __init__(
        self, role: str, connection: str, peer: str, server: str, key: bytes, seed: int
    ) -> None:
        self.role, self.connection, self.peer, self.server, self.key = (
            role,
            connection,
            peer,
            server,
            key,
        )
        self._nonces = Nonces(seed)
        self._hears: dict[str, bytes | None] = {}
        self.said: dict[str, bytes] = {}
        self.result: object = None
        self.over = False
        self._run()

    def hear(self, what: str, message: bytes | None) -> None:
        self._hears[what] = message
        self._run()

    def _run(self) -> None:
        network = Network(self._hears)
        secret.secrets = self._nonces  # type: ignore[assignment]
        secret.within = lambda _, call: call()  # on this thread: `Paused` must get through
        nothing = timedelta(0)
        try:
            if self.role == "peer":
                self.result = secret.join(
                    network,
                    self.connection,
                    self.key,
                    peer=self.peer,
                    server=self.server,
                    timeout=nothing,
                )
            else:
                self.result = secret.accept(
                    network, self.connection, self.key, server=self.server, timeout=nothing
                )
            self.over = True
        except Paused:
            pass
        except HvdOrderError as error:
            if self.role == "server" and isinstance(error, InvalidUsage):
                raise  # a peer that nobody can trust is no error of the server
            self.over = True
        self.said = network.said


def changed(data: atheris.FuzzedDataProvider, message: bytes) -> bytes:
    how = data.ConsumeIntInRange(0, 3)
    place = data.ConsumeIntInRange(0, max(0, len(message) - 1))
    if how == 0 and message:
        other = message[place] ^ data.ConsumeIntInRange(1, 255)
        return message[:place] + bytes([other]) + message[place + 1 :]
    if how == 1:
        return message[:place]
    if how == 2:
        return message + data.ConsumeBytes(data.ConsumeIntInRange(1, 9))
    return message[:32] + data.ConsumeBytes(150)


def test_one_input(raw: bytes) -> None:
    data = atheris.FuzzedDataProvider(raw)
    connection, peer = data.PickValueInList(LINKS), data.PickValueInList(PEERS)
    strangers = data.ConsumeIntInRange(0, 2)  # neither, the peer, the server
    key = OTHER_KEY if strangers == 1 else KEY
    joining = End("peer", connection, peer, "server 0", key, 1)
    accepting = End(
        "server",
        connection if data.ConsumeIntInRange(0, 7) else data.PickValueInList(LINKS),
        peer,
        "server 0" if data.ConsumeIntInRange(0, 7) else "server 1",
        OTHER_KEY if strangers == 2 else KEY,
        2,
    )
    # Overheard before: an honest handshake of others, with other nonces.
    old_peer = End(
        "peer", data.PickValueInList(LINKS), data.PickValueInList(PEERS), "server 0", KEY, 3
    )
    old_server = End("server", old_peer.connection, old_peer.peer, "server 0", KEY, 4)
    old_server.hear("hello", old_peer.said["hello"])
    old_peer.hear("answer", old_server.said["answer"])
    overheard = [*old_peer.said.values(), *old_server.said.values()]

    honest = True
    for what, sender, receiver in (
        ("hello", joining, accepting),
        ("answer", accepting, joining),
        ("proof", joining, accepting),
    ):
        sent = sender.said.get(what)
        how = data.ConsumeIntInRange(0, 9)
        if how <= 5 and sent is not None:
            message: bytes | None = sent
        elif how == 6:
            message = changed(data, sent or b"")
        elif how == 7:
            message = data.PickValueInList(
                [*overheard, *joining.said.values(), *accepting.said.values()]
            )
        elif how == 8:
            message = data.ConsumeBytes(data.ConsumeIntInRange(0, 200))
        else:
            message = None
        honest = honest and message is not None and message == sent
        if not receiver.over:
            receiver.hear(what, message)

    same = (
        joining.connection == accepting.connection
        and joining.server == accepting.server
        and strangers == 0
    )
    accepted = isinstance(accepting.result, secret.AcceptedPeer)
    if accepted:
        assert same, "who does not know the secret was let in, or came to another place"
        assert honest, "what somebody has changed was believed"
        assert isinstance(accepting.result, secret.AcceptedPeer)
        assert accepting.result.identity == peer
        if joining.result is not None:
            ours, theirs = joining.result, accepting.result.keys
            assert isinstance(ours, secret.ConnectionKeys)
            assert (ours.sends, ours.receives) == (theirs.receives, theirs.sends)
            assert ours.records == theirs.records, "both ends have the same keys"
    if joining.result is not None:
        assert same, "the server was believed that does not know the secret, or is another one"
    if same and honest:
        assert accepted, "an honest peer was refused"


if __name__ == "__main__":
    logging.disable()
    atheris.Setup(sys.argv, test_one_input)
    atheris.Fuzz()
