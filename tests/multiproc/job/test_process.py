"""init and shutdown. Variables of every launcher: tests/unit/launch/test_environment.py."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.on_ranks import on_ranks
from helpers.ranks import (
    REPOSITORY,
    RankFactory,
    free_port,
    rank_environment,
    run_script,
)

import hvd_order.torch as hvd
from hvd_order.base.config import Config
from hvd_order.base.errors import InvalidUsage, NotInitialized
from hvd_order.engine import engine_host
from hvd_order.engine.job import process
from hvd_order.engine.job.job import Job, held

SIZES = [1, 3]


@pytest.mark.parametrize("size", SIZES)
@on_ranks()
def test_ranks_of_one_host(size: int) -> None:
    job = process.current()
    assert job.config.timeout == Config.from_environment().timeout
    places = (
        hvd.rank(),
        hvd.size(),
        hvd.local_rank(),
        hvd.local_size(),
        hvd.cross_rank(),
        hvd.cross_size(),
    )
    assert places == (
        job.rank,
        job.size,
        job.local_rank,
        job.local_size,
        job.cross_rank,
        job.cross_size,
    )
    assert places == (job.rank, size, job.rank, size, 0, 1)


@on_ranks(2)
def test_what_was_built() -> None:
    for answer in (
        hvd.mpi_enabled(),
        hvd.mpi_built(),
        hvd.gloo_enabled(),
        hvd.gloo_built(),
        hvd.ddl_built(),
        hvd.ccl_built(),
        hvd.cuda_built(),
        hvd.rocm_built(),
    ):
        assert isinstance(answer, bool)
    assert type(hvd.nccl_built()) is int
    assert hvd.gloo_built()
    assert hvd.gloo_enabled()
    assert hvd.cuda_built() == (torch.version.cuda is not None)
    with pytest.raises(ValueError, match="MPI is not enabled"):
        hvd.mpi_threads_supported()
    everyone = hvd.global_process_set
    assert (everyone.process_set_id, everyone.included()) == (0, True)
    assert everyone.ranks == list(range(hvd.size()))
    assert (everyone.rank(), everyone.size()) == (hvd.rank(), hvd.size())


def test_use_before_init_is_refused() -> None:
    assert not hvd.is_initialized()
    for call in (hvd.rank, hvd.size, hvd.local_rank, hvd.cross_size, process.current, hvd.barrier):
        with pytest.raises(NotInitialized, match=r"use hvd\.init\(\)"):
            call()
    for call in (
        lambda: hvd.allreduce(torch.ones(1)),
        lambda: hvd.broadcast_(torch.ones(1), 0),
        lambda: hvd.allgather(torch.ones(1)),
        lambda: hvd.broadcast_object(1),
        lambda: hvd.broadcast_parameters({}, 0),
        lambda: hvd.synchronize(0),
    ):
        with pytest.raises(ValueError, match="has not been initialized"):
            call()
    hvd.shutdown()  # harmless


@pytest.mark.parametrize("size", SIZES)
@on_ranks()
def test_init_shutdown_init(size: int) -> None:
    totals = []
    for _ in range(3):
        hvd.init()
        first = process.current()
        hvd.init()  # nothing happens
        assert process.current() is first
        totals.append(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
        hvd.shutdown()
        hvd.shutdown()
        assert not hvd.is_initialized()
        assert not dist.is_initialized()
        with pytest.raises(NotInitialized):
            hvd.size()
    assert totals == [float(size)] * 3


class Part:
    def __init__(self, job: Job) -> None:
        self.job = job


def body_parts(folder: str) -> None:
    first = process.current()
    part = first.part(Part)
    assert (part.job, first.part(Part), first.existing_part(Part)) == (first, part, part)
    hvd.start_timeline(f"{folder}/{{rank}}.json")
    if hvd.size() > 1:
        added = hvd.add_process_set([0])
        assert added.process_set_id == 1
        assert engine_host.engine_host() is engine_host.running_host()
    hvd.shutdown()
    assert held() is None
    assert engine_host.running_host() is None
    hvd.init()
    second = process.current()
    assert second.existing_part(Part) is None
    assert second.part(Part) is not part
    assert engine_host.running_host() is None
    hvd.start_timeline(f"{folder}/{{rank}} again.json")  # the first ended with its job
    if hvd.size() > 1:
        with pytest.raises(InvalidUsage, match="is not registered"):
            hvd.allreduce(torch.ones(1), process_set=added)
        assert hvd.add_process_set([0]).process_set_id == 1


@pytest.mark.parametrize("size", SIZES)
def test_nothing_of_a_job_is_left_in_the_next(
    ranks: RankFactory, size: int, tmp_path: Path
) -> None:
    ranks(size).run(body_parts, str(tmp_path))
    for rank in range(size):
        assert (tmp_path / f"{rank}.json").exists()


@on_ranks(2)
def test_a_job_ends_well_after_one_that_failed() -> None:
    def trained() -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            named_parameters=model.named_parameters(),
        )
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        assert optimizer.overlap_report().deferred_parameters == 6
        return optimizer

    failed = trained()  # kept, as by an exception's traceback
    process._shutdown(abandoned=True)  # with all its updates deferred
    hvd.init()
    trained()
    hvd.shutdown()
    hvd.init()
    del failed


@on_ranks(2)
def test_arguments_that_are_not_supported() -> None:
    hvd.shutdown()
    with pytest.raises(InvalidUsage, match="call init\\(\\) without comm"):
        hvd.init(comm=[0])
    with pytest.raises(InvalidUsage, match="expected a list or 'dynamic'"):
        hvd.init(process_sets="static")
    assert not hvd.is_initialized()
    hvd.init(comm=[], process_sets=[])


@pytest.mark.parametrize("size", SIZES)
@on_ranks()
def test_groups_and_shutdown_callbacks() -> None:
    job = process.current()
    log: list[str] = []
    job.on_shutdown(lambda: log.append("first"))
    job.on_shutdown(lambda: log.append("second"))
    if hvd.size() == 1:
        with pytest.raises(InvalidUsage, match="no process groups"):
            job.new_group("extra")
        with pytest.raises(InvalidUsage, match="no process groups"):
            _ = job.functions_group
    else:
        group = job.new_group("extra", backend="gloo")
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == hvd.size()
        assert group is not job.functions_group
    hvd.shutdown()
    assert log == ["second", "first"]


@on_ranks(3)
def test_a_process_group_of_the_program_is_joined() -> None:
    hvd.shutdown()
    dist.init_process_group("gloo")  # the program's own, from the same environment
    for _ in range(2):
        hvd.init()
        assert (hvd.rank(), hvd.size()) == (dist.get_rank(), dist.get_world_size())
        assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
        hvd.shutdown()
        assert dist.is_initialized(), "what the program made is left alone"
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == dist.get_world_size()
    hvd.init()
    dist.destroy_process_group()  # before ours: shutdown copes
    hvd.shutdown()


# A library that asks torch.distributed gets the answer that it gets under Horovod.
NO_DEFAULT_GROUP = """
import torch
import torch.distributed as dist
import hvd_order.torch as hvd
from hvd_order.base.errors import ModelMismatch

hvd.init()
assert not dist.is_initialized()
model = torch.nn.Linear(2, 1, bias=False)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
start = model.weight.detach().clone()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))

def step():
    optimizer.zero_grad()
    model(torch.full((1, 2), float(hvd.rank()))).sum().backward()
    optimizer.step()

step()
dist.init_process_group("gloo")  # the script's own, beside ours
step()
ranks = torch.ones(1)
dist.all_reduce(ranks)
assert ranks.item() == dist.get_world_size() == hvd.size()
try:
    hvd.allreduce(torch.ones(1 + hvd.rank()), name="x")
    raise AssertionError("the shapes differ")
except ModelMismatch:
    pass
dist.destroy_process_group()  # ours is no part of it
step()
step()
assert torch.allclose(model.weight, start - 4 * (hvd.size() - 1) / 2)
hvd.shutdown()
hvd.init()
assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
"""


def test_init_makes_no_default_process_group() -> None:
    for end in run_script(3, NO_DEFAULT_GROUP):
        assert end.returncode == 0, end.stderr


def run_python(source: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", source],
        env=env,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


INIT = "import hvd_order.torch as hvd; hvd.init()"


def test_rank_zero_that_cannot_be_reached_is_named() -> None:
    done = run_python(INIT, rank_environment(1, 2, free_port(), {"HVD_ORDER_TIMEOUT": "1"}))
    assert done.returncode == 1
    assert "could not reach rank 0 at 127.0.0.1:" in done.stderr
    assert "is MASTER_ADDR its address?" in done.stderr


def test_a_program_may_end_with_a_collective_in_flight(tmp_path: Path) -> None:
    done = run_script(
        2,
        f"""
        import os, sys, torch, hvd_order.torch as hvd
        sys.path.insert(0, {str(REPOSITORY / "tests")!r})
        from helpers.flags import await_end, await_flag, raise_flag
        hvd.init()
        if hvd.rank() == 0:
            hvd.allreduce_async(torch.ones(1), name="never")
            raise_flag({str(tmp_path / "asked")!r}, str(os.getpid()))
        else:
            await_end(int(await_flag({str(tmp_path / "asked")!r})))
        """,
        timeout=60,
    )
    assert [one.returncode for one in done] == [0, 0], done[0].stderr + done[1].stderr


def test_without_torch_the_import_says_what_to_install() -> None:
    done = run_python(
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'torch' else find(name, *a)\n"
        "import hvd_order\n"
        "import hvd_order.torch"
    )
    assert "ImportError: hvd_order.torch needs PyTorch, which is not installed" in done.stderr
    assert "pip install torch" in done.stderr


def without_engines(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Runs code with an installation whose engines lie in another folder."""
    return run_python(
        "from pathlib import Path\n"
        "from hvd_order._native import torch_engines\n"
        f"torch_engines._FOLDERS = Path({str(folder)!r})\n" + code
    )


def test_without_an_engine_the_import_says_how_to_build_it(tmp_path: Path) -> None:
    done = without_engines(tmp_path, "import hvd_order.torch")
    assert "ImportError: the engine was not built" in done.stderr
    assert re.search(r"make -C \S+ build", done.stderr)


def test_with_engines_for_other_releases_the_import_names_them(tmp_path: Path) -> None:
    for release in ("2_8", "2_10", "2_9"):
        engine = tmp_path / f"torch_{release}" / f"_torch{EXTENSION_SUFFIXES[0]}"
        engine.parent.mkdir()
        engine.touch()
    done = without_engines(tmp_path, "import hvd_order.torch")
    assert "ImportError: this installation has engines for PyTorch 2.8, 2.9, 2.10" in done.stderr
    release = ".".join(torch.__version__.split(".")[:2])
    assert f"none for the installed {release}" in done.stderr


def test_an_engine_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    release = "_".join(torch.__version__.split(".")[:2])
    engine = tmp_path / f"torch_{release}" / f"_torch{EXTENSION_SUFFIXES[0]}"
    engine.parent.mkdir()
    engine.write_text("no library")
    done = without_engines(tmp_path, "import hvd_order.torch")
    assert "ImportError: the engine for PyTorch" in done.stderr
    assert str(engine) in done.stderr
