"""Hosts and options of ``hvd-order run``, and what the command line answers."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from helpers.launching import gone

from hvd_order import __version__
from hvd_order.base.errors import InvalidUsage
from hvd_order.launch import hosts, options
from hvd_order.launch import run as module
from hvd_order.launch.hosts import Host, discover_hosts, parse_hosts, read_hostfile, share
from hvd_order.launch.jobs.agent_process import ssh_command
from hvd_order.launch.request import LaunchRequest
from hvd_order.servers.launch.server_processes import ServerProcesses
from hvd_order.tools.cli.main import main


def request(*arguments: str) -> LaunchRequest:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    options.add_options(parser)
    return options.request_from(parser.parse_args([*arguments, "python", "train.py", "--lr", "1"]))


def test_host_lists() -> None:
    assert parse_hosts("localhost:4") == [Host("localhost", 4)]
    assert parse_hosts("a:2, b ,me@c:10") == [Host("a", 2), Host("b", 1), Host("me@c", 10)]
    assert parse_hosts("a:2,b:1,a:3") == [Host("a", 5), Host("b", 1)]


@pytest.mark.parametrize("text", ["", "a:", ":2", "a:0", "a:x", "a:2,,b:1", "a:-1", "-oProxy:1"])
def test_what_is_no_host_list_is_refused(text: str) -> None:
    with pytest.raises(InvalidUsage, match="expected host:slots"):
        parse_hosts(text)


def test_a_hostfile_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes("node1\nnodé\n".encode("latin-1"))
    with pytest.raises(InvalidUsage, match=r"hosts, line 2: byte 0xe9 is not UTF-8"):
        read_hostfile(path)


def test_absurdly_many_processes_are_refused_before_any_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InvalidUsage, match="100000 processes are too many"):
        hosts.check_room(100_000)
    cores = os.cpu_count() or 1
    hosts.check_room(64 * cores)
    assert main(["run", "-np", str(64 * cores + 1), "touch", str(tmp_path / "started")]) == 2
    said = capsys.readouterr().err
    assert f"{64 * cores + 1} processes are too many for" in said
    assert f"has {cores} processor cores: at most 64 for each, {64 * cores} in all" in said
    assert "add --oversubscribe" in said
    assert not (tmp_path / "started").exists()
    assert request("-np", "100000", "--oversubscribe").oversubscribe


def test_hostfiles(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# ours\na slots=2\nb\n\n c slots = 3 # big\n")
    assert read_hostfile(path) == [Host("a", 2), Host("b", 1), Host("c", 3)]
    path.write_text("a 2\n")
    with pytest.raises(InvalidUsage, match="line 1: expected 'host slots=N', got 'a 2'"):
        read_hostfile(path)
    path.write_text("-oProxyCommand=x slots=1\n")  # would be an option of ssh
    with pytest.raises(InvalidUsage, match="line 1: expected 'host slots=N'"):
        read_hostfile(path)
    path.write_text("\n")
    with pytest.raises(InvalidUsage, match="names no host"):
        read_hostfile(path)


def test_discovery_scripts() -> None:
    assert discover_hosts("printf 'a:2\\nb\\n'", 4) == [Host("a", 2), Host("b", 4)]
    assert discover_hosts("echo 'a:2 devices=0,3'", 1) == [Host("a", 2, (0, 3))]
    assert share([Host("a", 2, (0, 3))], 1) == [Host("a", 1, (0,))]
    assert discover_hosts("true", 4) == []
    with pytest.raises(InvalidUsage, match="failed with exit code 3: oh"):
        discover_hosts("echo oh >&2; exit 3", 1)


def test_a_discovery_script_may_leave_something_in_the_background(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    begin = time.monotonic()
    assert discover_hosts(f"sleep 50 & echo $! > {pid}; echo a:2", 1) == [Host("a", 2)]
    assert time.monotonic() - begin < 20.0
    os.kill(int(pid.read_text()), signal.SIGTERM)


def test_a_discovery_script_that_hangs_is_ended_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "_DISCOVERY_LIMIT_S", 1.0)
    pid = tmp_path / "pid"
    with pytest.raises(InvalidUsage, match="took longer than 1 s"):
        discover_hosts(f"sleep 60 & echo $! > {pid}; wait", 1)
    assert gone(int(pid.read_text()))


def test_processes_are_dealt_out_in_order() -> None:
    listed = [Host("a", 2), Host("b", 4), Host("c", 1)]
    assert share(listed, 3) == [Host("a", 2), Host("b", 1)]
    assert share(listed, None) == listed


def test_counts() -> None:
    assert request("-np", "3").process_count == 3
    assert request("-H", "a:2,b:2").process_count == 4
    assert request("-np", "3", "-H", "a:2,b:2").process_count == 3
    assert request("-np", "2").command == ["python", "train.py", "--lr", "1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "for example: -np 2"),
        (["-np", "0"], "at least one process"),
        (["-np", "3", "-H", "a:2"], "have slots, 2; name more hosts, or more slots on"),
        (["-np", "2", "--min-np", "3"], "--min-np 3 must be between 1 and -np 2"),
        (["-np", "2", "--max-np", "1"], "--max-np 1 is less than -np 2"),
        (["-np", "3", "--min-np", "2", "-H", "a:2"], "no host is ever added"),
        (["-np", "2", "--start-timeout", "-1"], "--start-timeout -1: expected a positive"),
        (["-np", "2", "--min-np", "1", "--elastic-timeout", "nan"], "--elastic-timeout nan: exp"),
        (["-np", "2", "--min-np", "1", "--blacklist-cooldown-range", "0", "9"], "-range 0: expec"),
        (["-np", "2", "--host-discovery-script", "s", "--slots", "0"], "--slots-per-host 0: at"),
        (
            ["-np", "2", "--servers", "2", "--max-servers", "1"],
            "--max-servers 1 is less than --ser",
        ),
        (["-np", "2", "--servers", "2", "--min-servers", "3"], "between 1 and --servers 2"),
        (["-np", "2", "--servers", "2", "--min-servers", "0"], "between 1 and --servers 2"),
        (["-np", "2", "--max-servers", "2"], "--max-servers 2 needs servers to begin with"),
        (["-np", "2", "--mpi"], "start it with mpirun"),
        (["-np", "2", "--mpi-args=--map-by node"], "start it with mpirun and these"),
        (["-np", "2", "-x", "A"], "-x A: expected NAME=VALUE"),
        (["-np", "2", "--ssh-option=-oX"], "--ssh-option -oX: expected NAME=VALUE"),
    ],
)
def test_requests_that_cannot_be(arguments: list[str], message: str) -> None:
    with pytest.raises(InvalidUsage, match=re.escape(message)):
        request(*arguments)


def test_the_users_options_of_ssh_come_first() -> None:
    given = ["-p", "22", "--ssh-option", "ServerAliveInterval=1", "--ssh-option", "ProxyJump gate"]
    command = ssh_command(request("-np", "2", *given).ssh_options)
    wanted = ["ssh", "-p", "22", "-o", "ServerAliveInterval=1", "-o", "ProxyJump gate"]
    assert command[: len(wanted)] == wanted
    assert "ServerAliveInterval=15" in command[len(wanted) :]


def test_elastic_rules() -> None:
    assert request("-np", "3").elastic is None
    limits = ["--min-np", "2", "--max-num-proc", "5", "--reset-limit", "7"]
    times = ["--elastic-timeout", "9", "--blacklist-cooldown-range", "1", "2"]
    rules = request("-np", "3", *limits, *times).elastic
    assert rules is not None
    assert (rules.min_count, rules.max_count, rules.reset_limit) == (2, 5, 7)
    assert (rules.timeout_s, rules.cooldown_s) == (9.0, 1.0)
    rules = request("-np", "3", "--host-discovery-script", "s", "--slots", "4").elastic
    assert rules is not None
    assert (rules.min_count, rules.discovery_script, rules.default_slots) == (3, "s", 4)


def test_servers_may_come_and_go() -> None:
    made = request("-np", "2", "--servers", "2", "--max-servers", "4", "--min-servers", "1")
    assert (made.servers, made.min_servers, made.max_servers) == (2, 1, 4)
    made = request("-np", "2", "--servers", "2")
    assert (made.min_servers, made.max_servers) == (None, None)


class FakeProcess:
    """Runs until it is given a code."""

    def __init__(self) -> None:
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code


def test_servers_are_started_where_the_fewest_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerProcesses, "_start_on", lambda *_: FakeProcess())
    servers = ServerProcesses(parse_hosts("a:2,b:2,c:2"), 4, [], {})
    started: list[tuple[str, Any]] = [servers.start() for _ in range(4)]
    assert [host for host, _ in started] == ["a", "b", "c", "a"]
    assert servers.start()[0] == "b"
    assert servers.running() == 5
    started[2][1].code = 0
    assert servers.running() == 4
    assert [servers.start()[0] for _ in range(2)] == ["c", "c"]


def test_settings_become_variables() -> None:
    stall = ["--stall-check-warning-time-seconds", "5", "--gloo-timeout-seconds", "9"]
    made = request(
        "-np",
        "1",
        "--timeline-filename",
        "/t.json",
        "--autotune",
        "-x",
        "A=b=c",
        *stall,
        "--log-level",
        "INFO",
    )
    assert made.env == {
        "A": "b=c",
        "HVD_ORDER_LOG": "INFO",
        "HVD_ORDER_TIMELINE": "/t.json",
        "HVD_ORDER_TUNE": "1",
        "HVD_ORDER_STALL_WARNING": "5.0",
        "HVD_ORDER_TIMEOUT": "9.0",
    }
    # Horovod's word for never.
    assert request("-np", "1", "--stall-check-shutdown-time-seconds", "0").env == {}


SETTINGS = {
    "num_proc": 3,
    "stall_check": {"enabled": True, "warning_time_seconds": 7},
    "timeline": {"filename": "/t.json"},
    "autotune": {"enabled": False},
    "logging": {"level": "INFO", "with_timestamp": False},
    "blacklist-cooldown-range": [1, 2],
    "env": {"A": "b c"},
}


def test_a_file_of_options_is_read_and_the_command_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(SETTINGS))
    made = request("--config-file", str(path), "--timeline-filename", "/mine.json")
    assert made.process_count == 3
    assert made.command == ["python", "train.py", "--lr", "1"]
    assert made.env == {
        "A": "b c",
        "HVD_ORDER_LOG": "INFO",
        "HVD_ORDER_TIMELINE": "/mine.json",
        "HVD_ORDER_STALL_WARNING": "7.0",
    }
    assert request("--config-file", str(path), "-np", "2").process_count == 2
    toml = tmp_path / "job.toml"
    toml.write_text("num_proc = 3\n[autotune]\nenabled = true\n")
    if sys.version_info >= (3, 11):
        assert request("--config-file", str(toml)).env == {"HVD_ORDER_TUNE": "1"}
    yaml = tmp_path / "job.yaml"
    yaml.write_text("num_proc: 3\nautotune:\n  enabled: true\n")
    if find_spec("yaml"):
        assert request("--config-file", str(yaml)).env == {"HVD_ORDER_TUNE": "1"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"num_proc": 2, "colour": 1}', "f.json: unrecognized arguments: --colour=1"),
        ('{"num_proc": "two"}', "f.json: argument -np/--num-proc: invalid int value: 'two'"),
        ("[1]", "f.json: expected names and values"),
        ("{", "f.json cannot be read"),
        ('{"num_proc": 2, "controller": "mpi"}', "start it with mpirun"),
    ],
)
def test_mistakes_in_a_file_of_options(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    path.write_text(text)
    with pytest.raises(InvalidUsage, match=re.escape(message)):
        request("--config-file", str(path))


def test_a_file_that_this_python_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f.yaml"
    path.write_text("num_proc: 2\n")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(InvalidUsage, match="install PyYAML"):
        request("--config-file", str(path))


def test_options_without_effect_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    request("-np", "1", "--cycle-time-ms", "3", "--torus-allreduce")
    assert capsys.readouterr().err == (
        "hvd-order: --cycle-time-ms has no effect: there are no cycles: what is ready is sent at "
        "once\n"
        "hvd-order: --torus-allreduce has no effect: NCCL chooses its algorithms itself; NCCL_ALGO "
        "overrides it\n"
    )


HOROVODRUN = Path(sys.executable).with_name("horovodrun")


@pytest.mark.skipif(not HOROVODRUN.exists(), reason="Horovod is not installed: make horovod")
def test_every_option_of_horovodrun_is_known() -> None:
    done = subprocess.run(
        [str(HOROVODRUN), "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    theirs = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", done.stdout.split("Horovod Runner")[0]))
    parser = argparse.ArgumentParser()
    options.add_options(parser)
    ours = {name for action in parser._actions for name in action.option_strings}
    assert len(theirs) > 30
    assert theirs <= ours


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "-np", "2"], "no command to run"),
        (["run", "python", "train.py"], "say how many processes"),
        (["run", "-np", "2", "no-such-program"], "no command 'no-such-program'; correct it"),
        (["run", "-np", "2", __file__], "write: python /"),
        (["run", "-np", "1", "--network-interface", "no0", "true"], "--network-interface no0"),
        (["run", "-np", "1", "--hostfile", "/nowhere", "true"], "/nowhere"),
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


def test_wrong_variables_are_found_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    touch = ["touch", str(tmp_path / "started")]
    assert main(["run", "-np", "2", "-x", "HVD_ORDER_SLICE_BYTES=2mob", *touch]) == 2
    assert capsys.readouterr().err == (
        "hvd-order: HVD_ORDER_SLICE_BYTES: expected a size such as 2MiB, 500KB or 4194304, got "
        "'2mob'\n"
    )
    assert main(["run", "-np", "2", "--log-level", "loud", *touch]) == 2
    assert "HVD_ORDER_LOG: expected one of debug, info, warning" in capsys.readouterr().err
    monkeypatch.setenv("HVD_ORDER_POLCY", "arrival")
    assert main(["run", "-np", "2", "-x", "HVD_ORDER_TUNE=maybe", *touch]) == 2
    monkeypatch.setattr(module, "_run_workers", lambda request: 0)
    assert main(["run", "-np", "2", *touch]) == 0
    assert capsys.readouterr().err.endswith(
        "hvd-order: environment variable HVD_ORDER_POLCY is not known to hvd_order and has no "
        "effect; did you mean HVD_ORDER_POLICY?\n"
    )
    assert not (tmp_path / "started").exists()


def test_check_build(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--check-build"]) == 0
    assert "[X] Gloo" in capsys.readouterr().out


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"hvd-order {__version__}\n"
    assert main([]) == 2
    assert re.search(r"run \|.* timeline", capsys.readouterr().out)
