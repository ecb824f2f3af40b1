"""The examples, written for Horovod, on two ranks: by the alias and by Horovod."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.ranks import REPOSITORY, Completed, rank_environment, run_script

EXAMPLES = REPOSITORY / "examples"
OURS, HOROVODS = "import hvd_order.torch as hvd", "import horovod.torch as hvd"


def for_horovod(name: str, folder: Path) -> Path:
    """The example as a Horovod user has it: one line differs."""
    source = (EXAMPLES / name).read_text()
    assert source.count(f"\n{OURS}\n") == 1
    script = folder / name
    script.write_text(source.replace(f"\n{OURS}\n", f"\n{HOROVODS}\n"))
    return script


def by_alias(name: str, folder: Path, *arguments: str) -> str:
    script = for_horovod(name, folder)
    return output(run_script(2, script, *arguments, env={"HVD_ORDER_ALIAS": "1"}))


def by_horovod(name: str, folder: Path, *arguments: str) -> str:
    if importlib.util.find_spec("horovod") is None:
        pytest.skip("Horovod is not installed: make horovod")
    script = for_horovod(name, folder)
    program = "from horovod.runner.launch import run_commandline as run; run()"
    command = [sys.executable, "-c", program, "--gloo", "-np", "2", sys.executable, str(script)]
    done = subprocess.run(
        [*command, *arguments],
        env={n: v for n, v in rank_environment(0, 1, 1).items() if not LAUNCHERS.match(n)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # All ranks write to one stream, with "[1,rank]<stdout>:" before each line.
    return re.sub(r"^\[1,\d+\]<stdout>:", "", done.stdout, flags=re.MULTILINE)


LAUNCHERS = re.compile(r"(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)$|MASTER_")


def output(ranks: list[Completed]) -> str:
    for rank in ranks:
        assert rank.returncode == 0, rank.stderr
    return ranks[0].stdout


Run = Callable[..., str]
# The alias leads to the same module, so our own import shows nothing more.
WAYS = pytest.mark.parametrize("run", [by_alias, by_horovod])


@WAYS
def test_mnist_learns_and_ranks_agree(tmp_path: Path, run: Run) -> None:
    arguments = ["--epochs", "3", "--train-images", "2048", "--test-images", "128"]
    text = run("mnist_torch.py", tmp_path, *arguments, "--batch-size", "8", "--lr", "0.01")
    losses = [float(loss) for loss in re.findall(r"Epoch \d: average loss ([\d.]+)", text)]
    accuracy = [float(percent) for percent in re.findall(r"Accuracy: ([\d.]+)%", text)]
    assert len(losses) == len(accuracy) == 3, text
    assert losses[0] > losses[1] > losses[2]
    assert losses[2] < 0.5 * losses[0]
    assert accuracy[2] > 80
    assert "Parameters of 2 ranks are equal: True" in text


@WAYS
def test_the_benchmark_measures(tmp_path: Path, run: Run) -> None:
    model = ["--blocks", "1", "--width", "8", "--batch-size", "4", "--image-size", "32"]
    steps = ["--num-warmup-batches", "6", "--num-iters", "3", "--num-batches-per-iter", "4"]
    text = run("synthetic_benchmark_torch.py", tmp_path, *model, *steps)
    assert "Number of CPUs: 2" in text or "Number of GPUs: 2" in text
    assert len(re.findall(r"Iter #\d: [\d.]+ img/sec per [CG]PU", text)) == 3
    match = re.search(r"Total img/sec on 2 [CG]PU\(s\): ([\d.]+) \+-[\d.]+", text)
    assert match is not None, text
    assert float(match[1]) > 0
    first, last = map(float, re.findall(r"Loss: ([\d.]+) to ([\d.]+)", text)[0])
    assert last < 0.8 * first


def test_a_function_runs_in_two_processes_by_horovods_run(tmp_path: Path) -> None:
    script = tmp_path / "notebook.py"
    script.write_text("""
import torch

def train(start, step):
    import horovod.torch as hvd
    hvd.init()
    if start < 0:
        raise ValueError("the start is negative")
    return int(hvd.allreduce(torch.tensor(start + step * hvd.rank()), op=hvd.Sum)), hvd.rank()

if __name__ == "__main__":
    import horovod
    from horovod.common.exceptions import HorovodInternalError
    print(horovod.run(train, args=(1,), kwargs={"step": 10}, num_proc=2, hosts="localhost:2"))
    for options in ({"hosts": "localhost:1", "num_proc": 2}, {"num_proc": 0}, {"use_mpi": True}):
        try:
            horovod.run(train, **options)
        except ValueError as error:
            print(error)
    try:
        horovod.run(train, (-1, 0), num_proc=1)
    except HorovodInternalError as error:
        print(str(error).split("\\n")[0], str(error).strip().split("\\n")[-1])
""")
    env = {**os.environ, "HVD_ORDER_ALIAS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "[(12, 0), (12, 1)]"
    assert "more processes than the hosts have slots, 1" in lines[1]
    assert "at least one process is needed" in lines[2]
    assert "use_mpi is not supported" in lines[3]
    assert lines[4].startswith("rank 0 on localhost raised ValueError: the start is negative")
    assert lines[4].endswith("ValueError: the start is negative")
