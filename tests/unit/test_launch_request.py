"""Host lists and process counts of ``hvd-order run``, and what the command line answers."""

from __future__ import annotations

import socket

import pytest

from hvd_order import __version__
from hvd_order.cli.main import main
from hvd_order.errors import InvalidUsage
from hvd_order.launch.run import Host, local_process_count, parse_hosts


def test_host_lists() -> None:
    assert parse_hosts("localhost:4") == [Host("localhost", 4)]
    assert parse_hosts("a:2, b ,c:10") == [Host("a", 2), Host("b", 1), Host("c", 10)]


@pytest.mark.parametrize("text", ["", "a:", ":2", "a:0", "a:x", "a:2,,b:1", "a:-1"])
def test_what_is_no_host_list_is_refused(text: str) -> None:
    with pytest.raises(InvalidUsage, match="expected host:slots"):
        parse_hosts(text)


def test_process_counts() -> None:
    here = [Host("localhost", 2), Host(socket.gethostname(), 2)]
    assert local_process_count(3, [], []) == 3
    assert local_process_count(3, here, []) == 3
    assert local_process_count(None, here, []) == 4


@pytest.mark.parametrize(
    ("count", "hosts", "message"),
    [
        (None, [], "for example: -np 2"),
        (0, [], "at least one process"),
        (3, [Host("localhost", 2)], "more processes than -H has slots, 2"),
    ],
)
def test_counts_that_cannot_be(count: int | None, hosts: list[Host], message: str) -> None:
    with pytest.raises(InvalidUsage, match=message):
        local_process_count(count, hosts, [])


def test_other_hosts_get_the_lines_to_type_instead() -> None:
    hosts = [Host("node1", 2), Host("node2", 2)]
    with pytest.raises(InvalidUsage) as caught:
        local_process_count(None, hosts, ["python", "train.py", "--lr", "1"])
    text = str(caught.value)
    assert "node1 is another one" in text
    mpirun = "mpirun -np 4 -H node1:2,node2:2 -x MASTER_ADDR=node1 python train.py --lr 1"
    assert mpirun in text
    assert "torchrun --nnodes 2 --nproc-per-node 2" in text
    assert "--rdzv-endpoint node1:29400 train.py --lr 1" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "-np", "2"], "no command to run"),
        (["run", "python", "train.py"], "say how many processes"),
        (["run", "-np", "2", "no-such-program"], "there is no command 'no-such-program'"),
        (["run", "-np", "2", __file__], "write: python /"),
        (["run", "-np", "2", "-x", "A", "true"], "-x A: expected NAME=VALUE"),
        (["timeline", "/nowhere.json"], "/nowhere.json"),
    ],
)
def test_mistakes_on_the_command_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("hvd-order: ")
    assert message in error


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"hvd-order {__version__}\n"
    assert main([]) == 2
    assert "run | demo | bench | timeline" in capsys.readouterr().out
