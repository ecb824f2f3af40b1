"""Ranks that do not belong together say so in init(), on every rank, before anything travels."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest
from helpers.ranks import Completed, free_port, run_script, start_script

from hvd_order.engine.job.meeting import Card

INIT = """
import hvd_order.torch as hvd
hvd.init()
"""


def differing(rank: int, variables: Mapping[str, str], size: int = 2) -> list[Completed]:
    """Ranks of which one has other variables."""
    usual = {"HVD_ORDER_TIMEOUT": "20"}
    return run_script(
        size, INIT, env=lambda each: {**usual, **variables} if each == rank else usual
    )


@pytest.mark.parametrize(
    ("rank", "size", "variable", "value", "message"),
    [
        (1, 3, "HVD_ORDER_SLICE_BYTES", "4KiB", "HVD_ORDER_SLICE_BYTES: not set on ranks 0, 2, 40"),
        (1, 2, "GLOO_DEVICE_TRANSPORT", "TCP_TLS", "GLOO_DEVICE_TRANSPORT: not set on rank 0, TCP"),
        (1, 2, "WORLD_SIZE", "3", "the number of processes (WORLD_SIZE): 2 on rank 0, 3 on rank 1"),
        (0, 2, "WORLD_SIZE", "3", "the number of processes (WORLD_SIZE): 3 on rank 0, 2 on rank 1"),
        (1, 2, "TORCHELASTIC_RUN_ID", "b", "the launcher's job: not set on rank 0, b on rank 1"),
    ],
)
def test_a_setting_that_differs_is_named_on_every_rank(
    rank: int, size: int, variable: str, value: str, message: str
) -> None:
    for end in differing(rank, {variable: value}, size):
        assert end.returncode == 1
        assert f"InvalidUsage: the ranks differ in {message}" in end.stderr


def test_what_may_differ_does_not_stop_the_job() -> None:
    for end in differing(1, {"HVD_ORDER_STALL_WARNING": "7", "HVD_ORDER_ELASTIC_DIR": "/tmp"}):
        assert end.returncode == 0, end.stderr


JOINED = """
import torch.distributed as dist
import hvd_order.torch as hvd
dist.init_process_group("gloo")
hvd.init()
"""


def test_settings_are_compared_in_a_job_of_the_program_as_well() -> None:
    for end in run_script(2, JOINED, env=lambda rank: {"HVD_ORDER_TUNE": str(rank)}):
        assert "the ranks differ in HVD_ORDER_TUNE: 0 on rank 0, 1 on rank 1" in end.stderr


@pytest.mark.parametrize(
    ("late", "notice"),
    [(0, "rank 1 waits for rank 0 to listen at 127.0.0.1:"), (1, "rank 0 waits for ranks [1] of")],
)
def test_while_a_rank_is_awaited_the_others_say_so(late: int, notice: str, tmp_path: Path) -> None:
    program = f"""
import logging, os, sys, time
logging.basicConfig(stream=sys.stdout)
while int(os.environ["RANK"]) == {late} and not os.path.exists({str(tmp_path / "come")!r}):
    time.sleep(0.05)
{INIT}"""
    with start_script(2, program, env={"HVD_ORDER_STALL_WARNING": "1"}) as ranks:
        ranks.wait_for_output(1 - late, notice)
        (tmp_path / "come").touch()
        assert [one.returncode for one in ranks.wait(60)] == [0, 0]


def test_a_second_job_at_the_same_port_ends_at_once_and_leaves_the_first_alone() -> None:
    # The default timeout, half an hour: nobody waits for it.
    env = {"MASTER_PORT": str(free_port())}
    first = """
    import os, time
    import torch
    import hvd_order.torch as hvd
    hvd.init()
    print("there", flush=True)
    while hvd.allreduce(torch.ones(1), name="x", op=hvd.Sum).item() == 2:
        print("again", flush=True)
        time.sleep(0.01)
    """
    with start_script(2, first, env=env) as script:
        for rank in range(2):
            script.wait_for_output(rank, "there")
        zero, one = run_script(2, INIT, env=env, timeout=60)
        assert "rank 0 cannot listen at 127.0.0.1:" in zero.stderr
        assert f"process {script.pids[1]} on " in one.stderr
        assert "is rank 1 already: another job uses that address and port" in one.stderr
        before = script.stdout(1).count("again")
        script.wait_for_output(1, "again\n" * (before + 3))


# Rank 1 comes only when rank 0 has given up once.
AGAIN = """
import os, sys, time
import hvd_order.torch as hvd

told = sys.argv[1]
while os.environ["RANK"] == "1" and not os.path.exists(told):
    time.sleep(0.01)
try:
    hvd.init()
except hvd.HorovodInternalError:
    open(told, "w").close()
    hvd.init()
assert hvd.size() == 2
hvd.barrier()
"""


def test_an_init_that_has_failed_can_be_tried_again(tmp_path: Path) -> None:
    env = {"HVD_ORDER_TIMEOUT": "5"}
    for end in run_script(2, AGAIN, str(tmp_path / "told"), env=env):
        assert end.returncode == 0, end.stderr


# Dies where `victim` says, before the ranks are connected.
DIES = """
import os, signal, sys
import hvd_order.torch as hvd
from hvd_order.engine.job import process_groups

if os.environ["RANK"] == sys.argv[1]:
    process_groups.OwnGroups.make = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
hvd.init()
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_while_they_connect_is_named(victim: int) -> None:
    ends = run_script(3, DIES, str(victim), env={"HVD_ORDER_TIMEOUT": "6"})
    for end in ends[:victim] + ends[victim + 1 :]:
        assert end.returncode == 1
        last = end.stderr.strip().rsplit("\n", maxsplit=1)[-1]
        assert last.startswith("hvd_order.base.errors."), end.stderr
        assert f" rank {victim}" in last.split(f": rank {end.rank} ")[1], end.stderr


# Rank 0, which has the store, stops with its port open: before its card is there, while rank 2
# waits for that of rank 1, or when all cards are there.
STOPS = """
import os, signal, sys, time
import hvd_order.torch as hvd
from hvd_order.engine.job import meeting, process_groups

where, told = sys.argv[1:]

def stop(*_):
    open(told, "w").close()
    os.kill(os.getpid(), signal.SIGSTOP)

def stop_after_card_2(self, rank):
    if rank == 1:
        card_of(self, 2)
        stop()
    return card_of(self, rank)

if os.environ["RANK"] == "0":
    if where == "before its card":
        meeting.Card.of_this_process = stop
    elif where == "before card 1":
        card_of, meeting._Meeting.card_of = meeting._Meeting.card_of, stop_after_card_2
    else:
        process_groups.OwnGroups.make = stop
while os.environ["RANK"] == "1" and where == "before card 1" and not os.path.exists(told):
    time.sleep(0.01)
try:
    hvd.init()
except hvd.HorovodInternalError as error:
    print(f"raised {type(error).__name__}: {error}", flush=True)
    os._exit(3)
"""


@pytest.mark.parametrize(
    "where",
    [
        "before its card",
        pytest.param("before card 1", marks=pytest.mark.long),
        "after all cards",
    ],
)
def test_a_rank_0_that_is_stopped_keeps_nobody_waiting(where: str, tmp_path: Path) -> None:
    told = str(tmp_path / "told")
    with start_script(3, STOPS, where, told, env={"HVD_ORDER_TIMEOUT": "6"}) as script:
        for rank in (1, 2):
            script.wait_for_output(rank, "raised TransferTimeout", 60)
            assert re.search("(no answer from|could not reach) rank 0", script.stdout(rank))


def test_a_port_that_takes_connections_and_is_silent_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        env = {"HVD_ORDER_TIMEOUT": "2", "WORLD_SIZE": "2", "RANK": "1", "MASTER_PORT": str(port)}
        [end] = run_script(1, INIT, env=env)
    assert f"rank 1 could not reach rank 0 at 127.0.0.1:{port} within 2 s" in end.stderr


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b"[]", b"null", b"3", b'"x"', b"\xff", b"[" * 100_000, b"host\n0\n",
     json.dumps({**json.loads(Card("h", 1, 0, "", {}, {}).to_text()), "job": [1]}).encode(),
     json.dumps({**json.loads(Card("h", 1, 0, "", {}, {}).to_text()), "host": 1}).encode(),
     json.dumps({**json.loads(Card("h", 1, 0, "", {}, {}).to_text()), "more": 1}).encode()],
)  # fmt: skip
def test_what_is_no_card_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (of Python's own, of many kinds)
        Card.from_text(text)


def test_a_card_comes_back_as_it_was() -> None:
    card = Card("host", 12, 3, "0,1", {"size": "2"}, {"A": "", "B": "1"})
    assert Card.from_text(card.to_text().encode()) == card
