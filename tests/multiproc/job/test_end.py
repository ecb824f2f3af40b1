"""The end of a rank, by itself or by an error: what the others lose, and how long they wait."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from helpers.ranks import RankFactory, free_port, run_script, start_script
from helpers.servers import Servers, Training, job, tell_apart

import hvd_order.torch as hvd

# Argument of every script: a folder in which ranks tell each other, by empty files, where they are.
PROGRAM = """
import hashlib, os, pathlib, sys, time
import torch
import hvd_order.torch as hvd

folder = pathlib.Path(sys.argv[1])

def tell(name):
    (folder / name).touch()

def wait_for(name):
    end = time.monotonic() + 40
    while not (folder / name).exists():
        assert time.monotonic() < end, f"{name} was never told"
        time.sleep(0.01)

def weights(model):
    with torch.no_grad():
        data = b"".join(p.numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(data).hexdigest()

def make(wrap):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if wrap:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    return model, optimizer

def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        x = torch.full((2, 64), 0.1 * (step + 1))  # the same on all ranks: as one process
        model(x).square().mean().backward()
        optimizer.step()

hvd.init()
model, optimizer = make(wrap=True)
"""

ALONE = (
    PROGRAM
    + """
alone = make(wrap=False)
train(*alone, 6)
expected = weights(alone[0])
"""
)

LEAVE_FIRST = (
    ALONE
    + """
train(model, optimizer, 5)
leaver = int(sys.argv[2])
if hvd.rank() != leaver:
    wait_for("stepped")  # the other has only the end of its program before it
train(model, optimizer, 1, first=5)
if hvd.rank() == leaver:
    tell("stepped")
    {end}
else:
    tell("stepped too")
    wait_for("gone")
    assert weights(model) == expected
"""
)
CTRL_C = "import signal; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"


@pytest.mark.parametrize(
    ("leaver", "end", "code"),
    [
        (0, "pass", 0),
        (1, "pass", 0),
        (1, "hvd.shutdown()", 0),
        (0, "sys.exit(3)", 3),
        (1, CTRL_C, -signal.SIGINT),
    ],
    ids=["program of rank 0", "program of rank 1", "shutdown", "sys.exit", "Ctrl-C"],
)
def test_who_leaves_first_takes_no_update_from_the_others(
    tmp_path: Path, leaver: int, end: str, code: int
) -> None:
    source = LEAVE_FIRST.replace("{end}", end)
    with start_script(2, source, str(tmp_path), str(leaver)) as script:
        left = script.wait_for_end(leaver)
        assert left.returncode == code, left.stderr
        assert (tmp_path / "stepped too").exists()  # it has waited for the other's gradients
        (tmp_path / "gone").touch()
        stayed = script.wait_for_end(1 - leaver)
        assert stayed.returncode == 0, stayed.stderr


UNREAD = (
    PROGRAM
    + """
train(model, optimizer, 6)
if hvd.rank() == 0:
    wait_for("gone")
"""
)


def test_a_rank_may_leave_while_another_does_something_else(tmp_path: Path) -> None:
    # No thread of the other's program is asked: its engine has what it needs and says so.
    with start_script(3, UNREAD, str(tmp_path)) as script:
        for rank in (1, 2):
            left = script.wait_for_end(rank)
            assert left.returncode == 0, left.stderr
        (tmp_path / "gone").touch()
        assert script.wait_for_end(0).returncode == 0


ERROR = (
    PROGRAM
    + """
train(model, optimizer, 5)
if hvd.rank() == 0:
    wait_for("gone")  # and never takes the step that rank 1 has taken
else:
    train(model, optimizer, 1, first=5)
    raise RuntimeError("of the user")
"""
)


def test_a_rank_that_ends_by_an_error_waits_for_nobody(tmp_path: Path) -> None:
    with start_script(2, ERROR, str(tmp_path), env={"HVD_ORDER_TIMEOUT": "300"}) as script:
        end = script.wait_for_end(1, timeout=40)
        assert end.returncode == 1
        assert "of the user" in end.stderr
        (tmp_path / "gone").touch()
        script.wait_for_end(0)


GRADIENTS_LEFT = (
    PROGRAM
    + """
train(model, optimizer, 5)
if {who}:
    model(torch.ones(2, 64)).square().mean().backward()
"""
)


@pytest.mark.parametrize("who", ["hvd.rank() == 0", "hvd.rank() == 1"])
def test_gradients_without_a_step_do_not_hold_up_the_end(tmp_path: Path, who: str) -> None:
    source = GRADIENTS_LEFT.replace("{who}", who)
    for end in run_script(2, source, str(tmp_path), env={"HVD_ORDER_TIMEOUT": "300"}, timeout=50):
        assert end.returncode == 0, end.stderr


MORE_STEPS = (
    PROGRAM
    + """
train(model, optimizer, 5)
if hvd.rank() == int(sys.argv[2]):
    wait_for("gone")
    try:
        train(model, optimizer, 1, first=5)
        optimizer.flush()
    except hvd.HorovodInternalError as error:
        print(type(error).__name__, error, flush=True)
        sys.exit(3)
"""
)


@pytest.mark.parametrize("longer", [0, 1])
def test_a_rank_with_more_steps_is_told_at_once(tmp_path: Path, longer: int) -> None:
    env = {"HVD_ORDER_TIMEOUT": "300"}
    with start_script(2, MORE_STEPS, str(tmp_path), str(longer), env=env) as script:
        assert script.wait_for_end(1 - longer).returncode == 0
        (tmp_path / "gone").touch()
        end = script.wait_for_end(longer, timeout=30)
    assert end.returncode == 3, end.stderr
    assert f"PeerLost rank {1 - longer} has ended its training" in end.stdout
    assert "hvd.join()" in end.stdout


LOST = (
    PROGRAM
    + """
train(model, optimizer, 5)
tell(f"trained{hvd.rank()}")
if hvd.rank() == 1:
    time.sleep(600)  # until it is killed
wait_for("killed")
try:
    train(model, optimizer, 2, first=5)
    optimizer.flush()
except hvd.HorovodInternalError:
    hvd.shutdown()  # finishes nothing, waits for nobody, and raises nothing
    print("shut down", flush=True)
else:
    raise AssertionError("the loss of rank 1 went unnoticed")
"""
)


def test_a_shutdown_after_a_lost_rank_waits_for_nobody(tmp_path: Path) -> None:
    with start_script(3, LOST, str(tmp_path), env={"HVD_ORDER_TIMEOUT": "300"}) as script:
        for rank in range(3):
            while not (tmp_path / f"trained{rank}").exists():
                script.wait_for_output(rank, "")
        script.kill(1)
        script.wait_for_end(1)
        (tmp_path / "killed").touch()
        for rank in (0, 2):
            end = script.wait_for_end(rank, timeout=40)
            assert end.returncode == 0, end.stderr
            assert "shut down" in end.stdout


FORKED_RANKS = """
import multiprocessing, os, sys

def rank(number, program, arguments):
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE="2",
                      LOCAL_WORLD_SIZE="2", MASTER_PORT=os.environ["PORT_OF_RANKS"])
    sys.argv = arguments
    exec(compile(program, "program", "exec"), {"__name__": "program"})

context = multiprocessing.get_context("fork")
program = open(sys.argv[1]).read()
ranks = [context.Process(target=rank, args=(i, program, sys.argv[1:])) for i in range(2)]
for each in ranks:
    each.start()
for each in ranks:
    each.join(50)
assert [each.exitcode for each in ranks] == [0, 0]
"""


def test_ranks_that_multiprocessing_has_forked_end_as_safely(tmp_path: Path) -> None:
    # They end without atexit.
    program = LEAVE_FIRST.replace("{end}", "pass").replace('wait_for("gone")', "pass")
    (tmp_path / "program.py").write_text(
        program.replace("int(sys.argv[2])", "1").replace("sys.argv[1]", repr(str(tmp_path)))
    )
    env = {"PORT_OF_RANKS": str(free_port())}
    (end,) = run_script(1, FORKED_RANKS, str(tmp_path / "program.py"), env=env)
    assert end.returncode == 0, end.stderr


def body_servers(env: Mapping[str, str]) -> float:
    """How far the last weights are from those of one process."""

    def training(distributed: bool) -> Training:
        return Training(lambda groups: torch.optim.SGD(groups, lr=0.05), distributed)

    with job(env):
        mine = training(distributed=True)
        for _ in range(6):
            mine._take_step()
        hvd.shutdown()
        assert {type(p) for p in mine.model.parameters()} == {torch.nn.Parameter}
    alone = training(distributed=False).run(6)
    return max(tell_apart(mine.weights(), alone.weights()).values())


@pytest.mark.parametrize("update", ["worker", "server"])
def test_the_last_answer_of_parameter_servers_is_taken(ranks: RankFactory, update: str) -> None:
    with Servers(2, 1, {"HVD_ORDER_PS_UPDATE": update}) as servers:
        assert max(ranks(2).run(body_servers, servers.env)) <= 1e-6
        assert servers.wait() == [0]


# Rank 1 is stopped, so threads of rank 0 still wait for it when Python ends there, which takes as
# long as the test needs to kill rank 1.
ENDS_SLOWLY = """
import builtins, os, signal, sys, time
import torch
import hvd_order.torch as hvd

class Last:
    def __del__(self, print=print, sleep=time.sleep, there=os.path.exists, told=sys.argv[1]):
        print("ending", flush=True)
        for _ in range(3000):
            if there(told):
                break
            sleep(0.01)
        sleep(0.5)  # for a thread that wakes up

hvd.init()
hvd.allreduce(torch.ones(3), name="x")
if hvd.rank() == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
builtins.last = Last()
"""


def test_a_connection_that_closes_while_python_ends_does_no_harm(tmp_path: Path) -> None:
    told = tmp_path / "told"
    with start_script(2, ENDS_SLOWLY, str(told), env={"HVD_ORDER_TIMEOUT": "5"}) as script:
        script.wait_for_output(0, "ending")
        script.kill(1)
        script.wait_for_end(1)
        told.touch()
        end = script.wait_for_end(0)
    assert end.returncode == 0, end.stderr
