"""Emulated hosts: apart from each other, at the rate that was set, and gone without a trace."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers.flags import wait_until
from helpers.processes import environment_of, is_running, processes
from helpers.ranks import REPOSITORY

sys.path.insert(0, str(REPOSITORY))
from benchmarks.hosts import EmulatedHosts, HostsUnavailable, emulated, namespaces, why_not
from benchmarks.hosts.link_rate import received_mbit

RATE = 200.0
COMMAND = [sys.executable, str(REPOSITORY / "benchmarks" / "hosts" / "main.py")]
NOBODY = 65534


@pytest.fixture(scope="module")
def working() -> None:
    """Skips where there can be no emulated hosts; the tests of messages run everywhere."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def hosts(working: None) -> Iterator[EmulatedHosts]:
    with EmulatedHosts(count=2, rate_mbit=RATE) as made:
        yield made


def program(
    hosts: EmulatedHosts, host: int, source: str, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Starts a Python program on a host."""
    source = "import json, os, socket\n" + textwrap.dedent(source)
    command = [sys.executable, "-c", source]
    return hosts.popen(host, command, env=env, stdout=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen[str]) -> Any:
    """What a program prints, decoded from JSON."""
    text = process.communicate(timeout=20)[0]
    assert process.returncode == 0
    return json.loads(text)


def output(hosts: EmulatedHosts, host: int, source: str) -> Any:
    """What a Python program on a host prints, decoded from JSON."""
    return answer(program(hosts, host, source))


def marked(owner: int) -> list[int]:
    """Processes of the hosts of `owner`, by the mark in their environment."""
    return [
        pid
        for pid in processes()
        if f"-{owner}-" in environment_of(pid).get("EMULATED_HOSTS_OWNER", "")
    ]


# ---- apart from each other


def test_each_host_has_its_own_name_address_and_devices(hosts: EmulatedHosts) -> None:
    program = """
        peers = {name: socket.gethostbyname(name) for name in ("host0", "host1", "localhost")}
        print(json.dumps([socket.gethostname(), peers, sorted(os.listdir("/sys/class/net"))]))
    """
    peers = {"host0": "10.77.0.1", "host1": "10.77.0.2", "localhost": "127.0.0.1"}
    assert hosts.names == ["host0", "host1"]
    assert hosts.addresses == ["10.77.0.1", "10.77.0.2"]
    assert output(hosts, 0, program)[:2] == ["host0", peers]
    assert output(hosts, 1, program)[:2] == ["host1", peers]
    if os.geteuid() == 0:  # a user may be refused a new /sys
        assert output(hosts, 1, program)[2] == ["eth0", "lo"]


def test_namespaces_are_shared_by_the_commands_of_a_host_and_by_nobody_else(
    hosts: EmulatedHosts,
) -> None:
    program = """
        kinds = ("net", "uts", "ipc", "mnt")
        print(json.dumps([os.readlink("/proc/self/ns/" + kind) for kind in kinds]))
    """
    first, again, second = (output(hosts, host, program) for host in (0, 0, 1))
    machine = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "uts", "ipc", "mnt")]
    assert first == again
    for one, other, own in zip(first, second, machine, strict=True):
        assert len({one, other, own}) == 3


def test_shared_memory_ends_at_the_host(hosts: EmulatedHosts) -> None:
    name = f"hvd_order_test_{os.getpid()}"
    look = f"print(json.dumps(os.path.exists('/dev/shm/{name}')))"
    output(hosts, 0, f"open('/dev/shm/{name}', 'w').close(); print(0)")
    assert output(hosts, 0, look) is True
    assert output(hosts, 1, look) is False
    assert not Path("/dev/shm", name).exists()


def test_a_command_keeps_its_folder_its_variables_and_its_process_id(
    hosts: EmulatedHosts, tmp_path: Path
) -> None:
    process = hosts.popen(
        0,
        ["sh", "-c", 'echo "$PWD $COLOUR $$"'],
        env={**os.environ, "COLOUR": "blue"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.communicate(timeout=10)[0] == f"{tmp_path} blue {process.pid}\n"


def test_the_congestion_control_in_use_is_told_and_the_machine_unchanged(
    hosts: EmulatedHosts,
) -> None:
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
    before = allowed.read_text()
    with EmulatedHosts(1, RATE, congestion_control="reno") as reno:
        assert reno.congestion_control == "reno"
    with EmulatedHosts(1, RATE, congestion_control="no_such_thing") as default:
        assert default.congestion_control not in ("", "no_such_thing")
    assert allowed.read_text() == before
    program = """
        with socket.socket() as s:
            name = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        print(json.dumps(name.rstrip(bytes(1)).decode()))
    """
    assert output(hosts, 1, program) == hosts.congestion_control


# ---- links


def test_a_link_carries_its_rate_each_way_at_once(hosts: EmulatedHosts) -> None:
    for rate in received_mbit(hosts, [(0, 1), (1, 0)], 8_000_000):
        assert 0.5 * RATE < rate < 1.05 * RATE


def test_a_host_that_receives_from_two_has_one_link(working: None) -> None:
    with EmulatedHosts(count=3, rate_mbit=50) as three:
        begin = time.perf_counter()
        received_mbit(three, [(0, 2), (1, 2)], 2_000_000)
        assert time.perf_counter() - begin > 0.95 * 8 * 2 * 2_000_000 / 50e6


def test_sent_bytes_counts_what_left(hosts: EmulatedHosts) -> None:
    before = [hosts.sent_bytes(0), hosts.sent_bytes(1)]
    received_mbit(hosts, [(0, 1)], 4_000_000)
    after = [hosts.sent_bytes(0), hosts.sent_bytes(1)]
    assert 4_000_000 < after[0] - before[0] < 4_400_000
    assert after[1] - before[1] < 400_000  # acknowledgements


def test_set_rate_works_both_ways_and_can_be_undone(hosts: EmulatedHosts) -> None:
    hosts.set_rate(1, 40)
    slow = [*received_mbit(hosts, [(0, 1)], 2_000_000), *received_mbit(hosts, [(1, 0)], 2_000_000)]
    hosts.set_rate(1, RATE)
    (fast,) = received_mbit(hosts, [(0, 1)], 4_000_000)
    for rate in slow:
        assert 0.5 * 40 < rate < 1.05 * 40
    assert 0.5 * RATE < fast < 1.05 * RATE


BUSY = """
import threading, time
server = socket.create_server(("", 29701))
def connect():
    while True:
        try:
            return socket.create_connection((os.environ["OTHER"], 29701))
        except ConnectionRefusedError:
            time.sleep(0.02)
"""
SENDS_DATA = """
stop, (few, _), data = threading.Event(), server.accept(), connect()
def read():
    while few.recv(1 << 16):
        pass
    stop.set()
threading.Thread(target=read).start()
while not stop.is_set():
    data.sendall(bytes(1 << 16))
print("0")
"""
MEASURES = """
few, (data, _) = connect(), server.accept()
def read():
    while data.recv(1 << 20):
        pass
threading.Thread(target=read).start()
rtts = []
for _ in range(150):
    few.sendall(bytes(2 * 1448))  # the second segment is acknowledged at once
    time.sleep(0.005)
    info = few.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 72)
    rtts.append(int.from_bytes(info[68:72], "little"))
few.close()
print(sorted(rtts[50:])[50])
"""


def rtt_beside_data_us(slow: int = 0, **options: Any) -> int:
    """Of a few bytes whose acknowledgments go the same way as a stream of data at 50 Mbit/s.

    Args:
        slow: the host whose link has that rate; host 0 sends the data to host 1.
    """
    with EmulatedHosts(count=2, rate_mbit=200, **options) as two:
        two.set_rate(slow, 50)
        ends = [
            program(two, host, BUSY + source, {**os.environ, "OTHER": two.addresses[1 - host]})
            for host, source in enumerate((SENDS_DATA, MEASURES))
        ]
        rtt_us = answer(ends[1])
        answer(ends[0])
        (rate,) = received_mbit(two, [(0, 1)], 2_000_000)
        assert 0.5 * 50 < rate < 1.05 * 50
    return rtt_us


def test_acknowledgments_pass_waiting_data_if_asked_for(working: None) -> None:
    waits, passes = rtt_beside_data_us(), rtt_beside_data_us(acks_first=True)
    assert passes < 0.5 * waits


def test_a_longer_queue_holds_data_for_longer(working: None) -> None:
    # In the switch: on its own host a connection lets only little of its data wait. Reno sends more
    # until the queue is full; CUBIC, the default, sometimes stops earlier.
    short, long = (
        rtt_beside_data_us(slow=1, queue_ms=ms, congestion_control="reno") for ms in (5, 100)
    )
    assert long > short + 30_000


ECHO = """
import socket
peer = socket.create_server(("", 29700)).accept()[0]
while data := peer.recv(100):
    peer.sendall(data)
"""
ASK = """
import socket, sys, time
while True:
    try:
        peer = socket.create_connection((sys.argv[1], 29700))
        break
    except ConnectionRefusedError:
        time.sleep(0.02)
for line in sys.stdin:
    peer.sendall(b"x")
    peer.settimeout(float(line))
    try:
        print(len(peer.recv(100)), flush=True)
    except TimeoutError:
        print("nothing", flush=True)
"""


def test_a_cut_link_is_silent_and_the_connection_goes_on_when_healed(hosts: EmulatedHosts) -> None:
    hosts.popen(1, [sys.executable, "-c", ECHO])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    client = hosts.popen(0, [sys.executable, "-c", ASK, hosts.addresses[1]], **pipes)

    def ask(patience_s: float) -> str:
        client.stdin.write(f"{patience_s}\n")
        client.stdin.flush()
        return client.stdout.readline().strip()

    assert ask(10) == "1"
    hosts.cut(1)
    assert ask(0.5) == "nothing"
    hosts.heal(1)
    assert ask(10) in ("1", "2")  # what was sent meanwhile arrives as well
    client.communicate(timeout=10)


# ---- messages


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="count is 0; expected 1 to"):
        EmulatedHosts(count=0, rate_mbit=RATE)
    with pytest.raises(ValueError, match="rate_mbit is -1; expected more than 0"):
        EmulatedHosts(count=2, rate_mbit=-1)


def test_a_missing_tool_is_named_with_its_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for tool in ("unshare", "nsenter", "mount", "hostname", "env", "tc"):
        (tmp_path / tool).symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(namespaces, "SYSTEM_FOLDERS", ())
    assert why_not() == (
        "emulated hosts need the commands ip, which are not on PATH; install the packages: iproute2"
    )
    with pytest.raises(HostsUnavailable, match="install the packages: iproute2"):
        EmulatedHosts(count=2, rate_mbit=RATE)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="root drops rights")
def test_refused_permission_is_explained() -> None:
    # Root without any capability may neither make a namespace nor map itself into a new user's.
    drop = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all"]
    done = subprocess.run([*drop, *COMMAND, "--", "true"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "error: emulated hosts need permission to make network namespaces" in done.stderr
    assert "Operation not permitted" in done.stderr
    assert "user.max_user_namespaces" in done.stderr


def test_a_start_that_fails_says_where_and_leaves_nothing(
    working: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(marked(os.getpid()))
    monkeypatch.setattr(emulated, "_tbf", lambda rate, queue: ["rate", "nonsense"])
    with pytest.raises(HostsUnavailable, match=r"could not make host0: (?s:.*)nonsense"):
        EmulatedHosts(count=2, rate_mbit=RATE)
    assert set(marked(os.getpid())) == before


def test_an_unknown_command_ends_with_127(hosts: EmulatedHosts) -> None:
    process = hosts.popen(0, ["no_such_command"], stderr=subprocess.PIPE, text=True)
    assert "no_such_command" in process.communicate(timeout=10)[1]
    assert process.returncode == 127


# ---- gone without a trace


def machine_network() -> str:
    """What the machine's own network looks like, and the named namespaces."""
    looks = (["-o", "link"], ["-o", "address"], ["route"], ["netns"])
    text = [
        subprocess.run(
            ["ip", *look], env=namespaces.tool_environment(), capture_output=True, text=True
        ).stdout
        for look in looks
    ]
    return "\n".join(line for line in "\n".join(text).splitlines() if "valid_lft" not in line)


def test_the_machines_own_network_is_never_touched(working: None) -> None:
    before = machine_network()
    with EmulatedHosts(count=2, rate_mbit=RATE):
        assert machine_network() == before
    assert machine_network() == before


STUBBORN = """
import os, signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["env", "-i", "sleep", "600"], start_new_session=True)
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


def test_close_ends_even_what_ignores_signals_and_has_dropped_the_mark(working: None) -> None:
    with EmulatedHosts(count=1, rate_mbit=RATE) as one:
        command = [sys.executable, "-c", STUBBORN]
        stubborn = one.popen(0, command, stdout=subprocess.PIPE, text=True)
        with stubborn.stdout:
            pids = [int(pid) for pid in stubborn.stdout.readline().split()]
        assert all(is_running(pid) for pid in pids)
    assert not any(is_running(pid) for pid in pids)
    assert stubborn.returncode == -signal.SIGKILL
    one.close()  # a second time


OWNER = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from benchmarks.hosts import EmulatedHosts
hosts = EmulatedHosts(count=2, rate_mbit=100)
stay = ["sh", "-c", "echo here; exec sleep 600"]
unmarked = ["env", "-u", "EMULATED_HOSTS_OWNER", *stay]
commands = [hosts.popen(0, stay, stdout=-1), hosts.popen(1, unmarked, stdout=-1)]
for command in commands:
    command.stdout.readline()
print(hosts._guardian.pid, *(command.pid for command in commands), flush=True)
time.sleep(600)
"""


def start_owner() -> tuple[subprocess.Popen[str], list[int]]:
    """A process with hosts; the ids of its guardian and of two commands on the hosts."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(REPOSITORY)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    with owner.stdout:
        return owner, [int(pid) for pid in owner.stdout.readline().split()]


def test_a_killed_owner_takes_its_hosts_along(working: None) -> None:
    owner, pids = start_owner()
    assert all(is_running(pid) for pid in pids)
    owner.kill()
    owner.wait()
    wait_until(lambda: not any(is_running(pid) for pid in pids), "guardian and commands ended")
    wait_until(lambda: not marked(owner.pid), "switch and hosts ended")


def test_the_next_start_ends_what_is_left_when_the_guardian_was_killed_too(working: None) -> None:
    owner, (watching, *left) = start_owner()
    os.kill(watching, signal.SIGKILL)
    owner.kill()
    owner.wait()
    assert all(is_running(pid) for pid in left)
    with EmulatedHosts(count=1, rate_mbit=RATE):
        assert not any(is_running(pid) for pid in left)
        assert marked(owner.pid) == []


def test_a_start_leaves_the_hosts_of_living_owners_alone(working: None) -> None:
    owner, pids = start_owner()
    with EmulatedHosts(count=2, rate_mbit=RATE) as hosts:  # same names, same addresses
        (rate,) = received_mbit(hosts, [(0, 1)], 2_000_000)
        assert rate > 0.5 * RATE
    assert all(is_running(pid) for pid in pids)
    owner.terminate()
    owner.wait()
    wait_until(lambda: not any(is_running(pid) for pid in pids), "the other's hosts ended")


# ---- the command


def run_command(*arguments: str, timeout: float = 30.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "--rate-mbit", f"{RATE:g}", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def test_the_first_failure_ends_all_and_is_the_exit_code(working: None) -> None:
    program = 'echo "rank $RANK of $WORLD_SIZE"; [ $RANK = 0 ] && exec sleep 600; exit 3'
    done = run_command("--hosts", "3", "--", "sh", "-c", program)
    assert done.returncode == 3
    assert {"[host1] rank 1 of 3", "[host2] rank 2 of 3"} & set(done.stdout.splitlines())
    assert "failed with exit code 3; the others are ended" in done.stderr


def test_ctrl_c_ends_all(working: None) -> None:
    command = [*COMMAND, "--", "sh", "-c", "echo here; sleep 600"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert {process.stdout.readline(), process.stdout.readline()} == {
        "[host0] here\n",
        "[host1] here\n",
    }
    assert marked(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (130, "")
    assert marked(process.pid) == []


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="root becomes nobody")
def test_it_works_without_root(working: None) -> None:
    become = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    python = "/usr/bin/python3"  # one that anybody may read
    script = [python, *COMMAND[1:]]
    probe = [
        *become,
        python,
        "-c",
        "import sys; open(sys.argv[1]); open('/dev/null', 'r+'); assert sys.version_info > (3, 10)",
    ]
    if subprocess.run([*probe, COMMAND[1]], capture_output=True, check=False).returncode != 0:
        pytest.skip("user nobody cannot use this repository or /dev/null, or has no Python 3.10")
    if subprocess.run([*become, "unshare", "--user", "--map-root-user", "true"]).returncode != 0:
        pytest.skip("user namespaces are refused here")
    done = subprocess.run(
        [*become, *script, "--rate-mbit", "200", "--", "sh", "-c", "hostname; ls /dev/shm"],
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["[host0] host0", "[host1] host1"]


ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((1000,), float(dist.get_rank() + 1))
dist.all_reduce(x)
print(x.min().item(), x.max().item())
dist.destroy_process_group()
"""


def test_two_hosts_all_reduce_with_gloo(working: None) -> None:
    done = run_command("--hosts", "2", "--", sys.executable, "-c", ALL_REDUCE)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[host0] 3.0 3.0", "[host1] 3.0 3.0"]
