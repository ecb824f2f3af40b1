"""Slices over an installed Horovod: the same results, the same failures, whoever starts the job."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from helpers.jobs import new_job, refused
from helpers.on_ranks import on_ranks
from helpers.ranks import RankPool, run_script, start_script

import hvd_order.torch as hvd
from hvd_order.engine import engine_host, horovod_library

needs_horovod = pytest.mark.skipif(
    find_spec("horovod") is None, reason="Horovod is not installed: make horovod"
)
STEPS = 12


def train(rank: int, size: int, wrap: bool) -> list[list[float]]:
    """Weights after some steps; a single process gets all ranks' samples as one batch."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(96, 96) for _ in range(5)])
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if wrap:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(4 * size, 96, generator=generator)
        mine = batch[4 * rank : 4 * rank + 4] if wrap else batch
        optimizer.zero_grad()
        model(mine).square().mean().backward()
        optimizer.step()
    return [p.detach().flatten().tolist() for p in model.parameters()]


def body_train() -> tuple[str, list[list[float]]]:
    with new_job({"HVD_ORDER_TRANSPORT": "horovod", "HVD_ORDER_SLICE_BYTES": "16KiB"}):
        weights = train(hvd.rank(), hvd.size(), wrap=True)
        left = [name for name in os.environ if name.startswith("HOROVOD_GLOO")]
        assert not left, "children must not take themselves for Horovod's ranks"
        return type(engine_host.engine_host().transport).__name__, weights


@needs_horovod
def test_training_over_horovod_equals_one_process() -> None:
    size = 3
    alone = train(0, size, wrap=False)
    # Of their own: Horovod, once started, keeps a process busy until it ends.
    with contextlib.closing(RankPool(size)) as own_ranks:
        results = own_ranks.run(body_train)
        again = own_ranks.run(body_train)
        refused = own_ranks.run(body_bfloat16)
    assert again == results, "a second init() finds Horovod running"
    for message in refused:
        assert "bfloat16" in message
        assert "HVD_ORDER_TRANSPORT=c10d" in message
    for transport, weights in results:
        assert transport == "HorovodTransport"
        assert weights == results[0][1], "ranks differ"
        for mine, expected in zip(weights, alone, strict=True):
            assert mine == pytest.approx(expected, rel=1e-5, abs=1e-6)


@on_ranks(2)
def test_a_rank_without_horovod_is_named_on_every_rank() -> None:
    found = None if hvd.rank() == 1 else Path("somewhere")
    with pytest.MonkeyPatch.context() as patch, new_job({"HVD_ORDER_TRANSPORT": "horovod"}):
        patch.setattr(horovod_library, "find", lambda: found)
        message = refused(engine_host.engine_host)
    assert "ranks [1] have no Horovod" in message


def body_bfloat16() -> str:
    with new_job({"HVD_ORDER_TRANSPORT": "horovod"}):
        model = torch.nn.Linear(4, 4).to(torch.bfloat16)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        return refused(lambda: hvd.DistributedOptimizer(inner, model.named_parameters()))


TRAIN = """
import sys
import torch
import hvd_order.torch as hvd
from hvd_order.engine import engine_host

hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=1e-3), named_parameters=model.named_parameters()
)
x = torch.randn(4, 64)
try:
    for step in range(STEPS):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            print("over", type(engine_host.running_host().transport).__name__, flush=True)
    optimizer.flush()
except hvd.HorovodInternalError as error:
    print(f"raised {type(error).__name__}: {error}", flush=True)
    sys.exit(3)
"""


@needs_horovod
def test_the_others_raise_when_a_rank_is_killed() -> None:
    env = {"HVD_ORDER_TRANSPORT": "horovod", "HVD_ORDER_TIMEOUT": "15"}
    program = TRAIN.replace("STEPS", "10**9")
    with start_script(3, program, env=env) as script:
        script.wait_for_output(1, "over HorovodTransport")
        script.kill(1)
        ended = script.wait(timeout=40)
    assert ended[1].returncode == -signal.SIGKILL
    for rank in (0, 2):
        assert ended[rank].returncode == 3, ended[rank].stderr
        assert "rank 1 is gone" in ended[rank].stdout


@needs_horovod
def test_horovodrun_chooses_horovod(tmp_path: Path) -> None:
    horovodrun = Path(sys.executable).with_name("horovodrun")
    assert horovodrun.exists() or shutil.which("horovodrun"), "installed with Horovod"
    program = tmp_path / "train.py"
    program.write_text(TRAIN.replace("STEPS", "6"))
    ended = subprocess.run(
        [str(horovodrun), "--gloo", "-np", "2", sys.executable, str(program)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HOROVOD_GLOO_IFACE": "lo"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("over HorovodTransport") == 2


@needs_horovod
def test_c10d_stays_the_default_elsewhere() -> None:
    ended = run_script(2, TRAIN.replace("STEPS", "6"))
    assert all("over C10dTransport" in end.stdout for end in ended)
