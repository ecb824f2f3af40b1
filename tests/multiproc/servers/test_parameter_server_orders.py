"""A tool that talks to a job's servers answers within seconds, in one line that says what to do."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import pytest
from helpers.launching import run_cli
from helpers.ranks import RankPool, rank_environment
from helpers.servers import Servers, Training, job, train_until
from torch.optim import SGD

import hvd_order.torch as hvd
from hvd_order.base.errors import InvalidUsage, NotTrusted, PeerLost, TransferTimeout
from hvd_order.launch.jobs.torch_agent import serve_store
from hvd_order.servers.access.secret import new_secret
from hvd_order.servers.access.signed_records import signed_record
from hvd_order.servers.launch.server_starter import ServerStarter
from hvd_order.servers.process.orders import Orders, answer_in, await_answer, give
from hvd_order.servers.worker.connections import MeetingPoint

SECRET = {"HVD_ORDER_SECRET": new_secret().hex()}
KEY = b"the secret of this job.........."
TIMEOUT = timedelta(seconds=20)
SHORT = timedelta(seconds=0.5)
REMOVE_1 = {"what": "remove", "server": 1}


def answer(arguments: list[str], env: Mapping[str, str]) -> tuple[int, str, str]:
    """Code, output and complaint of a tool, which has to end soon."""
    end = run_cli(*arguments, env=rank_environment(0, 1, 0, env), timeout=60)
    return end.returncode, end.stdout, end.stderr


@pytest.fixture
def mute() -> Iterator[str]:
    """Something that listens and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def closed() -> str:
    """Where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


# --------------------------------------------------------------------------------- no such job


def test_remove_where_nobody_listens(closed: str) -> None:
    code, _, said = answer(["servers", "remove", "0", "--store", closed], SECRET)
    assert code == 1
    assert len(said.splitlines()) == 1, said
    assert f"at {closed} cannot be reached: nobody listens there: Connection refused" in said
    assert "is the job running, and is this its HVD_ORDER_SERVER_STORE (--store)?" in said


def test_remove_where_something_else_listens(mute: str) -> None:
    env = {**SECRET, "HVD_ORDER_TIMEOUT": "2"}
    code, _, said = answer(["servers", "remove", "0", "--store", mute], env)
    assert code == 1
    assert len(said.splitlines()) == 1, said
    assert f"at {mute} cannot be reached: what listens there has not answered as a store" in said


def test_serve_says_that_it_waits_and_gives_up(closed: str) -> None:
    env = {**SECRET, "HVD_ORDER_TIMEOUT": "2"}
    code, _, said = answer(["serve", "--workers", "1", "--store", closed], env)
    assert code == 1
    waits, gives_up = said.splitlines()
    assert f"nobody listens at {closed} yet" in waits
    assert "waiting up to 2 s" in waits
    assert "nobody listens there within 2 s" in gives_up


def test_a_store_that_comes_later_is_found(closed: str) -> None:
    said: list[str] = []
    port = int(closed.rpartition(":")[2])
    stores: list[Any] = []

    def come(text: str) -> None:
        said.append(text)
        stores.append(MeetingPoint(f"127.0.0.1:{port}", TIMEOUT, listen=True))

    meeting = MeetingPoint(closed, TIMEOUT, patience=TIMEOUT, waiting=come)
    assert meeting.count("anything") == 0
    assert len(said) == 1


# ----------------------------------------------------------------------------- worker 0 answers


class World:
    """A store, and a coordinator that does as it is told here."""

    def __init__(self) -> None:
        self.store = serve_store("127.0.0.1")
        self.meeting = MeetingPoint(f"127.0.0.1:{self.store.port}", TIMEOUT)
        self.removed: list[int] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def remove(self, server: int) -> None:
        self.go_on.wait(20)
        if server == 7:
            raise InvalidUsage("there is no server 7; there are [0, 1]")
        self.removed.append(server)

    def scale_by(self, _requests: object) -> None:
        pass

    def close(self) -> None:
        self.go_on.set()

    def answer(self, number: int, key: bytes = KEY, heard: timedelta = TIMEOUT) -> str:
        return await_answer(self.meeting, key, number, TIMEOUT, lambda: None, heard)

    def worker(self) -> Orders:
        return Orders(self.meeting, KEY, self)  # type: ignore[arg-type]


def test_worker_0_answers() -> None:
    world = World()
    done = give(world.meeting, KEY, REMOVE_1)
    refused = give(world.meeting, KEY, {"what": "remove", "server": 7})
    odd = [
        give(world.meeting, KEY, order)
        for order in (
            {"what": "dance"}, {"what": "remove"}, {"what": "remove", "server": float("inf")},
            {"what": "remove", "server": []}, {},
        )
    ]  # fmt: skip
    stranger = give(world.meeting, b"not the secret of this job......", REMOVE_1)
    worker = world.worker()
    assert world.answer(done) == "server 1 has left"
    with pytest.raises(InvalidUsage, match="there is no server 7; there are"):
        world.answer(refused)
    for number in odd:
        with pytest.raises(InvalidUsage, match=r"nobody knows how to|is no number of a server"):
            world.answer(number)
    with pytest.raises(NotTrusted, match="another secret than this command"):
        world.answer(stranger, b"not the secret of this job......")
    assert world.removed == [1]
    worker.close()


def test_halves_of_characters_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    half = "\udcc6"
    note = signed_record(KEY, "answer to order 3", {"done": half}).encode()
    assert answer_in(note, KEY, 3).encode() == b"\\udcc6"
    world = World()
    launcher = ServerStarter(world.meeting._connect(), KEY, None, 1)  # type: ignore[arg-type]
    number = world.meeting.count("scale_requests")
    store = world.meeting.own()
    store.set(
        f"scale_request/{number}", signed_record(KEY, f"scale request {number}", {"what": half})
    )
    store.wait([f"scale_request/{number}/answer"], TIMEOUT)
    launcher.close()
    assert "cannot '\\udcc6'" in capsys.readouterr().err


def test_an_order_that_nobody_takes_is_withdrawn() -> None:
    world = World()
    number = give(world.meeting, KEY, REMOVE_1)
    begin = time.monotonic()
    with pytest.raises(TransferTimeout, match=r"nobody has looked at the order within 0\.5 s"):
        world.answer(number, heard=SHORT)
    assert time.monotonic() - begin < 5
    later = give(world.meeting, KEY, {"what": "remove", "server": 2})
    worker = world.worker()
    assert world.answer(later) == "server 2 has left"
    assert world.removed == [2], "who gave the first one has been told that it does not count"
    worker.close()


def test_an_order_is_taken_while_another_is_carried_out() -> None:
    world = World()
    world.go_on.clear()
    worker = world.worker()
    first = give(world.meeting, KEY, REMOVE_1)
    second = give(world.meeting, KEY, {"what": "remove", "server": 2})
    heard = threading.Event()

    def taken() -> None:
        heard.set()
        world.go_on.set()

    assert await_answer(world.meeting, KEY, second, TIMEOUT, taken) == "server 2 has left"
    assert heard.is_set()
    assert world.answer(first) == "server 1 has left"
    assert world.removed == [1, 2]
    worker.close()


def test_the_end_of_the_job_is_an_answer() -> None:
    world = World()
    world.go_on.clear()
    worker = world.worker()
    give(world.meeting, KEY, REMOVE_1)
    waiting = give(world.meeting, KEY, {"what": "remove", "server": 2})

    def close() -> None:
        threading.Thread(target=worker.close).start()

    with pytest.raises(InvalidUsage, match="the job is over"):
        await_answer(world.meeting, KEY, waiting, TIMEOUT, close)
    after = give(world.meeting, KEY, REMOVE_1)
    del world.store

    with pytest.raises((PeerLost, TransferTimeout)):
        world.answer(after, heard=SHORT)


# ------------------------------------------------------------------------------------- in a job


def body_command(env: Mapping[str, str], command: list[str], others: dict[str, str]) -> Any:
    """Trains until a command has ended. Returns its end on rank 0."""
    with job(env):
        training = Training(lambda groups: SGD(groups, lr=0.01), distributed=True).run(5)
        process = None
        if hvd.rank() == 0:
            process = subprocess.Popen(
                command, env=others, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        train_until(training, lambda: process is not None and process.poll() is not None)
        return None if process is None else (process.returncode, *process.communicate())


# What is carried out is tested in test_parameter_server_faults.py.
@pytest.mark.timeout(200)
def test_a_job_says_why_it_does_not_follow_an_order(two_ranks: RankPool) -> None:
    with Servers(2, 1, {"HVD_ORDER_PS_UPDATE": "server"}) as servers:
        command = servers.command("servers", "remove", "7")
        code, _, said = two_ranks.run(
            body_command, servers.env, command, servers.environment(), timeout=150
        )[0]
        assert servers.wait() == [0]
    assert code == 2
    assert "there is no server 7; there are [0]" in said
    assert len(said.splitlines()) == 1, said
