"""`hvd_order.run`: functions of a script without a guard for `__main__`, on several hosts."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers.launching import fake_ssh, launcher_environment, write_script

import hvd_order
from hvd_order.base.errors import InvalidUsage

SCRIPT = """
import os, signal, sys
import torch, hvd_order, helper
from hvd_order import HorovodInternalError

class Refused(Exception):
    pass

def train(start, step):
    import hvd_order.torch as hvd
    hvd.init()
    total = int(hvd.allreduce(torch.tensor(start + step * hvd.rank()), op=hvd.Sum))
    print("printed by", hvd.rank(), flush=True)
    return hvd.rank(), total, os.environ["COLOUR"], helper.DOUBLE(2), torch.full((70_000,), total)

def refuse(rank):
    import hvd_order.torch as hvd
    hvd.init()
    if hvd.rank() == rank:
        raise Refused("not here")
    hvd.allreduce(torch.ones(1))

def leave():
    rank = int(os.environ["RANK"])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

hosts = {"hosts": "a:1,b:2"}
results = hvd_order.run(train, (1,), {"step": 10}, env={"COLOUR": "blue"}, **hosts)
print([result[:4] for result in results])
assert all(torch.equal(each, torch.full((70_000,), 33)) for *_, each in results)
for function, args, where in ((refuse, (2,), hosts), (leave, (), hosts),
                              (sys.exit, (), {"np": 1}), (leave, (), {"hosts": "unreachable:1"})):
    try:
        hvd_order.run(function, args, **where)
    except HorovodInternalError as error:
        print(f"<{error}>", repr(error.__cause__))
"""


def test_a_function_of_a_script_runs_on_two_hosts(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("DOUBLE = lambda x: 2 * x\n")  # found beside the script
    path, log = fake_ssh(tmp_path)
    (tmp_path / "tmp").mkdir()
    done = subprocess.run(
        write_script(tmp_path, SCRIPT),
        env=launcher_environment({**path, "TMPDIR": str(tmp_path / "tmp")}),
        cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    printed = [line for line in done.stdout.splitlines() if "printed by" in line]
    assert sorted(printed) == [f"[{'abb'[r]}:{r}] printed by {r}" for r in range(3)]
    assert "[(0, 33, 'blue', 4), (1, 33, 'blue', 4), (2, 33, 'blue', 4)]\n" in done.stdout
    refused, killed, left, unreachable = done.stdout.partition("<")[2].split("\n<")
    # Of three ranks that failed it is the one that did so by itself, on the other host.
    assert refused.startswith("rank 2 on b raised Refused: not here\n\nTraceback")
    assert "in refuse\n" in refused
    assert refused.endswith("Refused('not here')")
    assert killed.startswith("run(): rank 1 on b was ended by SIGKILL; all others were stopped>")
    assert left.startswith("run(): a rank left without a result (exit code 0)>")
    assert "nothing could be started on unreachable" in unreachable
    assert "No route to host" in unreachable
    assert "DOUBLE" not in log.read_text()  # nothing of it on a command line
    assert list((tmp_path / "tmp").glob("hvd_order_function*")) == []


def test_a_function_that_cannot_be_sent_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(InvalidUsage, match=r"np=2"):
        hvd_order.run(print)
    with pytest.raises(InvalidUsage, match=r"cannot be sent to other processes: .*lock"):
        hvd_order.run(print, (threading.Lock(),), np=2)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)  # as where it is not installed
    with pytest.raises(InvalidUsage, match=r"<lambda>.*; pip install cloudpickle"):
        hvd_order.run(lambda: 1, np=2)


def test_without_cloudpickle_a_function_of_a_module_runs_from_any_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    results: list[object] = []
    call = threading.Thread(
        target=lambda: results.extend(hvd_order.run(importlib.util.find_spec, ("json",), np=1))
    )
    call.start()
    call.join()
    assert [getattr(result, "name", None) for result in results] == ["json"]
