"""The launcher over emulated hosts with real sshd: several hosts, one without power, elastic."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.flags import comes_true
from helpers.launching import Job, launcher, no_interface_chosen, write_script
from helpers.processes import arguments_of, processes
from helpers.ranks import REPOSITORY
from helpers.training import elastic_training, tutorial

sys.path.insert(0, str(REPOSITORY))
from benchmarks.hosts import EmulatedHosts, why_not
from benchmarks.hosts.namespaces import SYSTEM_FOLDERS

COUNT = 3
# Of the default, 15 s and 4 times, the test changes only how long it takes.
QUICK = ["--ssh-option", "ServerAliveInterval=1", "--ssh-option", "ServerAliveCountMax=3"]
GIVEN_UP_S = 30.0
STEP = r"step (\d+) loss (\S+) at (\S+)$"

SSHD_CONFIG = """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
StrictModes no
"""
SSH_CONFIG = """\
Host *
  IdentityFile {folder}/user_key
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
"""
# In the host's own namespace of mounts, so that the machine's files stay as they are.
START = """
mount --bind "$0/ssh_config" /etc/ssh/ssh_config
: > "$0/resolv.conf"  # no name server: nobody answers there, and to wait for that takes seconds
mount --bind "$0/resolv.conf" "$(realpath /etc/resolv.conf)"
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/sshd
exec "$1" -D -e -f "$0/sshd_config"
"""


def program_at(name: str) -> str | None:
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *SYSTEM_FOLDERS])
    return shutil.which(name, path=path)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedHosts]:
    """Hosts whose root can log in to each other, by keys that were made for them."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    if os.geteuid() != 0:
        pytest.skip("a server that lets others log in needs root")
    sshd = program_at("sshd")
    if sshd is None or program_at("ssh") is None:
        pytest.skip("there is no sshd here: apt-get install openssh-server")
    folder = tmp_path_factory.mktemp("ssh")
    for key in ("host_key", "user_key"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(make, check=True)
    public = (folder / "host_key.pub").read_text()
    (folder / "known_hosts").write_text(f"host* {public}")
    (folder / "sshd_config").write_text(SSHD_CONFIG.format(folder=folder))
    (folder / "ssh_config").write_text(SSH_CONFIG.format(folder=folder))
    with EmulatedHosts(count=COUNT, rate_mbit=200) as made:
        for host in range(COUNT):
            command = ["sh", "-euc", START, str(folder), sshd]
            log = made.popen(host, command, stderr=subprocess.PIPE, text=True).stderr
            assert log is not None
            said = log.readline()
            assert "listening" in said, said + log.read()
        yield made


def on_host(hosts: EmulatedHosts, host: int, command: list[str]) -> Job:
    """Starts a command on a host, where the processes of the tests' session are not seen."""
    there = [*hosts.inside(host), "env", f"--chdir={os.getcwd()}", "--", *command]
    return Job(there, no_interface_chosen())


def running_on(hosts: EmulatedHosts, host: int, word: str) -> list[int]:
    """Processes on a host with this argument."""
    theirs = os.readlink(f"/proc/{hosts._hosts[host].pid}/ns/net")
    found = [pid for pid in processes() if word in arguments_of(pid)]
    return [pid for pid in found if network_of(pid) == theirs]


def network_of(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""  # it has ended


def nothing_left(hosts: EmulatedHosts, word: str) -> bool:
    """Whether within ten seconds no host has such a process."""
    return comes_true(lambda: not any(running_on(hosts, h, word) for h in range(COUNT)), 10)


SUMS = """
    import os, socket, sys, time, torch, hvd_order.torch as hvd
    hvd.init()
    total = int(hvd.allreduce(torch.tensor(hvd.rank() + 1), op=hvd.Sum))
    os.write(1, f"{socket.gethostname()} {hvd.rank()} of {hvd.size()}: {total}\\n".encode())
    if sys.argv[1:] == ["stay"]:
        time.sleep(0.5)
        while True:
            hvd.allreduce(torch.ones(1))
            time.sleep(0.05)
"""


def test_ranks_on_hosts_behind_ssh_find_each_other(hosts: EmulatedHosts, tmp_path: Path) -> None:
    # Rank 0 is neither on the launcher's host nor on the first of the addresses.
    run = launcher("-H", "host2:1,host0:1,host1:2")
    with on_host(hosts, 0, [*run, *write_script(tmp_path, SUMS)]) as job:
        assert job.wait(90) == 0, job.text()
    assert sorted(line for line in job.lines if "[c10d] The hostname of" not in line) == [
        "[host0:1] host0 1 of 4: 10",
        "[host1:2] host1 2 of 4: 10",
        "[host1:3] host1 3 of 4: 10",
        "[host2:0] host2 0 of 4: 10",
    ]


def test_the_tutorials_command_for_two_machines(
    hosts: EmulatedHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tutorial.save_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    [command] = tutorial.commands("hosts")
    there = [word.replace("node1:1,node2:1", "host0:1,host1:1") for word in command]
    assert there != command
    with on_host(hosts, 0, there) as job:
        assert job.wait(90) == 0, job.text()
    assert tutorial.has_learnt(job.text()), job.text()


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_the_end_of_the_launcher_is_the_end_on_all_hosts(
    hosts: EmulatedHosts, tmp_path: Path, how: signal.Signals
) -> None:
    program = [*write_script(tmp_path, SUMS), "stay"]
    with on_host(hosts, 0, [*launcher("-H", "host1:1,host2:1"), *program]) as job:
        for _ in range(2):
            job.wait_for("of 2: 3")
        job.signal(how)
        job.wait(60)
    assert nothing_left(hosts, program[1])


def test_a_host_that_loses_its_power_ends_the_job_and_is_named(
    hosts: EmulatedHosts, tmp_path: Path
) -> None:
    program = [*write_script(tmp_path, SUMS), "stay"]
    with on_host(hosts, 0, [*launcher("-H", "host0:1,host1:1", *QUICK), *program]) as job:
        for _ in range(2):
            job.wait_for("of 2: 3")
        hosts.cut(1)
        begin = time.monotonic()
        try:
            assert job.wait(90) == 1, job.text()
            assert time.monotonic() - begin < GIVEN_UP_S
        finally:
            power_off(hosts, 1, program[1])
            hosts.heal(1)
    assert job.matches("the connection to host1 broke"), job.text()
    assert not running_on(hosts, 0, program[1])


def power_off(hosts: EmulatedHosts, host: int, word: str) -> None:
    """A host that is really without power runs nothing; sshd stays for the next test."""
    for pid in running_on(hosts, host, word):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_an_elastic_job_gains_a_host_and_goes_on_when_one_loses_its_power(
    hosts: EmulatedHosts, tmp_path: Path
) -> None:
    steps = 100
    found = tmp_path / "hosts"
    found.write_text("host0:1\nhost1:1\n")
    run = launcher("-np", "2", "--min-np", "1", "--host-discovery-script", f"cat {found}", *QUICK)
    script = str(elastic_training.__file__)
    train = [sys.executable, script, str(steps), "0.0", "20:3", "60:2"]
    with on_host(hosts, 0, [*run, *train]) as job:
        job.wait_for("waits at 20")
        found.write_text("host0:1\nhost1:1\nhost2:1\n")
        job.wait_for(r"rank \d+ of 3 pid \d+ begins at 20")
        job.wait_for("waits at 60")
        begin = time.monotonic()
        hosts.cut(1)
        try:
            job.wait_for("the connection to host1 broke")
            job.wait_for("going on without host1")
            job.wait_for(r"rank \d+ of 2 pid \d+ begins at 60", timeout=90)
            assert time.monotonic() - begin < 2 * GIVEN_UP_S
            assert job.wait(90) == 0, job.text()
        finally:
            power_off(hosts, 1, script)
            hosts.heal(1)
    losses, _ = elastic_training.reference(steps)
    seen = [(int(match[1]), float(match[2])) for match in job.matches(STEP)]
    assert {step for step, _ in seen} == set(range(steps)), job.text()
    for step, loss in seen:
        assert loss == pytest.approx(losses[step], rel=1e-9), f"step {step}\n{job.text()}"


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_scheduler_runs_jobs_on_hosts_behind_ssh(hosts: EmulatedHosts, tmp_path: Path) -> None:
    steps = 40
    train = shlex.join([sys.executable, str(elastic_training.__file__), str(steps), "0.1"])
    (tmp_path / "jobs.csv").write_text(
        f"name,command,workers,duration_s\nwide,{train},2,60\nnarrow,{train},1,60\n"
    )
    serve = [sys.executable, "-m", "hvd_order.tools.cli", "cluster", "serve", "--once", "--policy",
             "fifo", "-H", "host0:1,host1:1,host2:1", "--state", str(tmp_path / "state"),
             str(tmp_path / "jobs.csv")]  # fmt: skip
    with on_host(hosts, 0, serve) as job:
        assert job.wait(200) == 0, job.text()
    begun = dict(re.findall(r"(wide|narrow): is started on (.*)$", job.text(), re.MULTILINE))
    used = {name: set(re.findall(r"host\d", places)) for name, places in begun.items()}
    assert len(used["wide"]) == 2, job.text()
    assert used["wide"] | used["narrow"] == {"host0", "host1", "host2"}, job.text()
    losses, _ = elastic_training.reference(steps)
    for name in used:
        log = (tmp_path / "state" / "jobs" / name / "log").read_text()
        seen = re.findall(STEP, log, re.MULTILINE)
        assert [int(step) for step, _, _ in seen] == list(range(steps)), log
        assert [float(loss) for _, loss, _ in seen] == pytest.approx(losses, rel=1e-9)
