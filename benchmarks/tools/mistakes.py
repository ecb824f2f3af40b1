"""Typical mistakes of users: how long until the job ends, and does the message name cause and cure?

See README.md.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.runner.question import Answer, ask, option

ROOT = Path(__file__).resolve().parents[2]
_LIMIT_S = 10.0  # of what does not wait for a timeout
_GIVE_UP_S = 90.0
_TIMEOUT = {"HVD_ORDER_TIMEOUT": "5"}

_SCRIPT = """
import os, signal, sys
import torch
import hvd_order.torch as hvd
{before}
hvd.init()
rank = hvd.rank()
torch.manual_seed(1)
{model}
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
{wrap}
{broadcast}
for batch in range({batches}):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    {at_step}
    optimizer.step()
print("trained")
"""
_PARTS = {
    "before": "",
    "model": "model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))",
    "wrap": "optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())",
    "broadcast": "hvd.broadcast_parameters(model.state_dict(), root_rank=0)",
    "batches": "4",
    "at_step": "pass",
}
_AT_STEP_2 = "if batch == 2 and rank == 1: "


@dataclass(frozen=True)
class Mistake:
    """A mistake, and what the user must be told.

    Attributes:
        name: what the user did.
        says: parts of the output, cause before cure; as regular expressions.
        parts: of `_SCRIPT` that differ.
        command: arguments of ``hvd-order``; {script} stands for the script.
        env: variables of the job.
        waits: the job can only wait for a timeout, which is 5 s here.
        ends_well: no mistake for hvd_order: the job trains.
    """

    name: str
    says: tuple[str, ...]
    parts: dict[str, str] = field(default_factory=dict)
    command: str = "run -np 2 {python} {script}"
    env: dict[str, str] = field(default_factory=dict)
    waits: bool = False
    ends_well: bool = False


def _in_script(name: str, *says: str, waits: bool = False, **parts: str) -> Mistake:
    return Mistake(name, says, parts, waits=waits)


MISTAKES = [
    Mistake("unknown option", ("nproc", "usage"), command="run --nproc 2 {python} {script}"),
    Mistake("unknown sub-command", ("rnu", "run"), command="rnu -np 2 {python} {script}"),
    Mistake("no number of ranks", ("-np",), command="run {python} {script}"),
    Mistake("no ranks at all", ("-np", "0"), command="run -np 0 {python} {script}"),
    Mistake("script that does not exist", ("nosuch.py",), command="run -np 2 {python} nosuch.py"),
    Mistake("program that does not exist", ("pyhton",), command="run -np 2 pyhton {script}"),
    Mistake("script without its interpreter", ("python",), command="run -np 2 {script}"),
    Mistake("host that does not exist", ("nosuch.invalid",),
            command="run -np 2 -H nosuch.invalid:2 {python} {script}"),
    Mistake("more ranks than slots", ("4", "2"),
            command="run -np 4 -H localhost:2 {python} {script}"),
    _in_script("syntax error", "SyntaxError", before="def f(:"),
    _in_script("module that is not installed", "No module named 'nosuch'", before="import nosuch"),
    _in_script("a rank raises", "rank 1", "ValueError: bad batch",
               at_step=_AT_STEP_2 + "raise ValueError('bad batch')"),
    _in_script("a rank exits with 3", "rank 1", "3", at_step=_AT_STEP_2 + "sys.exit(3)"),
    _in_script("a rank calls os._exit(0)", "rank 1", at_step=_AT_STEP_2 + "os._exit(0)"),
    _in_script("a rank is killed, as for want of memory", "rank 1", "SIGKILL",
               at_step=_AT_STEP_2 + "os.kill(os.getpid(), signal.SIGKILL)"),
    _in_script("no hvd.init()", r"hvd\.init\(\)", before="hvd.rank()"),
    _in_script("wrapped twice", "distributed",
               broadcast="optimizer = hvd.DistributedOptimizer(optimizer)"),
    _in_script("the model wrapped", "Optimizer",
               wrap="optimizer = hvd.DistributedOptimizer(model)"),
    _in_script("DDP as well", "DistributedDataParallel|DDP",
               before="torch.distributed.init_process_group('gloo')",
               broadcast="model = torch.nn.parallel.DistributedDataParallel(model)"),
    _in_script("no broadcast", "broadcast_parameters",
               model="torch.manual_seed(rank)\n" + _PARTS["model"], broadcast=""),
    _in_script("a model of another shape on one rank", "rank 1|ranks", "shape",
               model="model = torch.nn.Linear(8, 2 + rank)"),
    _in_script("another number of parameters on one rank", "rank 1|ranks", "parameter",
               model="model = torch.nn.Sequential(*[torch.nn.Linear(8, 8)] * 1, "
               "*[torch.nn.Linear(8, 8) for _ in range(rank)])"),
    _in_script("an all-reduce of another shape on one rank", r"disagree.*\[2\].*\[3\]",
               at_step="hvd.allreduce(torch.ones(2 + rank), name='loss')"),
    _in_script("a collective on rank 0 alone", "rank 1|ranks 1", waits=True,
               at_step="if batch == 3 and rank == 0: hvd.allreduce(torch.ones(1), name='loss')"),
    _in_script("more batches on one rank", r"hvd\.join\(\)|join", batches="4 + rank"),
    _in_script("zero_grad() after backward()", "zero_grad", at_step="optimizer.zero_grad()"),
    _in_script("backward() twice", "backward_passes_per_step",
               at_step="model(torch.ones(4, 8)).sum().backward()"),
    _in_script("lazy parameters", "lazy|shape", model="model = torch.nn.LazyLinear(2)"),
    _in_script("a GPU for each rank, without GPUs", "CUDA|NVIDIA",
               model="torch.cuda.set_device(hvd.local_rank())\n" + _PARTS["model"]),
    Mistake("misspelt variable", ("HVD_ORDER_TIMEOT", "HVD_ORDER_TIMEOUT"),
            env={"HVD_ORDER_TIMEOT": "5"}, ends_well=True),
    Mistake("variable out of range", ("HVD_ORDER_TIMEOUT", "soon"),
            env={"HVD_ORDER_TIMEOUT": "soon"}),
    Mistake("plan file that does not exist", ("nosuch.json",),
            env={"HVD_ORDER_PLAN": "nosuch.json"}),
    Mistake("a parameter that no rank uses", ("trained",), ends_well=True, parts={
        "model": _PARTS["model"] + "; model.register_parameter('unused', "
        "torch.nn.Parameter(torch.ones(3)))"}),
    Mistake("port in use", ("port", "{port}"), command="", env={
        "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{port}"}),
    Mistake("one of two ranks was never started", (r"ranks \[1\]",), command="", waits=True, env={
        "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{free}",
        **_TIMEOUT}),
    _in_script("a rank that hangs", "rank 1", waits=True,
               at_step=_AT_STEP_2 + "__import__('time').sleep(60)"),
    Mistake("import without an engine", ("build|install",), command="", env={
        "PYTHONPATH": "{bare}"}),
]  # fmt: skip


def measure(options: argparse.Namespace) -> Answer:
    """Makes every mistake, one after the other."""
    chosen = [one for one in MISTAKES if not options.only or one.name in options.only]
    if options.first:
        chosen = chosen[: options.first]
    rows: dict[str, dict[str, Any]] = {}
    for mistake in chosen:
        rows[mistake.name] = row = _make(mistake)
        print(f"{row['seconds']:6.1f} s  {mistake.name}: {row['message']}", flush=True)
    wrong = [f"{name}: {row['wrong']}" for name, row in rows.items() if row["wrong"]]
    longest = max((r["seconds"] for r in rows.values() if not r["waits"]), default=0.0)
    print(f"{len(rows)} mistakes; the longest that waits for no timeout: {longest:.1f} s")
    return Answer(
        {"mistakes": rows}, {"mistakes": len(rows), "longest_s": longest},
        failed="; ".join(wrong),
    )  # fmt: skip


def _make(mistake: Mistake) -> dict[str, Any]:
    """Makes one mistake: seconds to the end, exit status, message, and what is wrong with these."""
    with tempfile.TemporaryDirectory(prefix="hvd_order_mistake_") as name, _port_in_use() as port:
        folder = Path(name)
        script = folder / "train.py"
        script.write_text(_SCRIPT.format(**{**_PARTS, **mistake.parts}))
        names = {"port": str(port), "free": str(_free_port()), "script": str(script),
                 "python": sys.executable, "bare": str(folder)}  # fmt: skip
        if any("{bare}" in value for value in mistake.env.values()):
            shutil.copytree(ROOT / "hvd_order", folder / "hvd_order",
                            ignore=shutil.ignore_patterns("*.so", "__pycache__"))  # fmt: skip
        timeout = _TIMEOUT if mistake.waits else {}
        env = {**_environment(), "PYTHONPATH": str(ROOT), **timeout,
               **{key: value.format(**names) for key, value in mistake.env.items()}}  # fmt: skip
        arguments = mistake.command.format(**names).split()
        command = (
            [sys.executable, "-m", "hvd_order.tools.cli", *arguments]
            if arguments
            else [sys.executable, str(script)]
        )
        started = time.monotonic()
        code, output = _run(command, env, folder)
        seconds = time.monotonic() - started
    says = [part.format(**names) for part in mistake.says]
    wrong = ""
    if (code == 0) != mistake.ends_well:
        wrong = f"exit status {code}"
    elif missing := [part for part in says if not re.search(part, output, re.IGNORECASE)]:
        wrong = f"the output lacks {missing}"
    elif seconds > _LIMIT_S and not mistake.waits:
        wrong = f"{seconds:.1f} s"
    return {
        "seconds": seconds, "exit_status": code, "message": _message(_without_folders(output)),
        "waits": mistake.waits, "wrong": wrong, "output": _without_folders(output)[-4000:],
    }  # fmt: skip


def _run(command: Sequence[str], env: dict[str, str], folder: Path) -> tuple[int, str]:
    with (folder / "output").open("w+") as output:
        process = subprocess.Popen(
            command, env=env, cwd=folder, stdout=output, stderr=subprocess.STDOUT, text=True
        )
        try:
            code = process.wait(_GIVE_UP_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            code = process.wait()
        output.seek(0)
        return code, output.read()


def _environment() -> dict[str, str]:
    """This process's, without settings of jobs."""
    return {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("HVD_ORDER_", "HOROVOD_", "MASTER_")) and "RANK" not in key
    }


def _without_folders(output: str) -> str:
    """The output, with files by their names: where they lie differs on each machine."""
    return re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", ".../", output)


def _message(output: str) -> str:
    """What tells the user: the first error of a rank, and the lines of the launcher."""
    lines = [line.strip() for line in output.splitlines()]
    errors = [line for line in lines if re.match(r"[\w.]*\b[A-Z]\w+: |.*\berror: ", line)]
    ours = [line for line in lines if line.startswith("hvd-order")]
    told = dict.fromkeys([*errors[:1], *ours]) or dict.fromkeys(lines[-1:])
    return " | ".join(told)


@contextmanager
def _port_in_use() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    sys.exit(ask(
        "mistakes", __doc__, measure,
        option("--only", [], "these alone, by name"),
        option("--first", 0, "so many of the list; 0: all"),
        quick={"first": 3},
    ))  # fmt: skip
