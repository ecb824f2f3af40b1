"""``import horovod`` in unmodified programs, with ``hvd_order.alias`` or ``HVD_ORDER_ALIAS=1``."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import REPOSITORY

from hvd_order.compat.horovod.finder import MODULES

# What published programs import: PyTorch Lightning, Ignite, Ray, ElasticDL, fine-tuning helpers for
# BERT, K-FAC, and Horovod's own examples.
PROGRAM = """
import json
import horovod
import horovod.torch
import horovod.torch as hvd
import horovod.torch.mpi_ops
from horovod import run, torch as again
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.util import check_extension, gloo_built, mpi_built, nccl_built
from horovod.torch import DistributedOptimizer, mpi_ops
from horovod.torch.compression import Compression
from horovod.torch.functions import (
    allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
)
from horovod.torch.mpi_ops import (
    Average, Sum, allgather_async, allreduce, allreduce_async_, broadcast_async_, poll, rank,
    reducescatter_async, size, synchronize,
)
from horovod.torch.optimizer import DistributedOptimizer as from_optimizer
import importlib.metadata
import importlib.util
import torch
import hvd_order
import hvd_order.torch as ours

check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
hvd.init()
facts = {
    "version": horovod.__version__,
    "metadata": importlib.metadata.version("horovod"),
    "found": importlib.util.find_spec("horovod.torch") is not None,
    "listed": "horovod" in {d.metadata["Name"] for d in importlib.metadata.distributions(path=[])},
    "same": hvd is again and mpi_ops is hvd.mpi_ops and horovod.torch is hvd,
    "ours": (allreduce is ours.allreduce and Compression is ours.Compression
             and DistributedOptimizer is from_optimizer is ours.DistributedOptimizer
             and HorovodInternalError is hvd_order.HorovodInternalError is hvd.HorovodInternalError
             and global_process_set is ours.global_process_set and Average is hvd.mpi_ops.Average),
    "works": hvd.allreduce(torch.ones(2)).tolist(),
    "built": [gloo_built(), bool(mpi_built()), bool(nccl_built())]
             == [ours.gloo_built(), ours.mpi_built(), bool(ours.nccl_built())],
}
print(json.dumps(facts))
"""
FACTS = {
    "version": "0.28.1",
    "metadata": "0.28.1",
    "found": True,
    "listed": False,
    "same": True,
    "ours": True,
    "works": [1.0, 1.0],
    "built": True,
}


DISTRIBUTION = """
import sys, setuptools
from distutils.core import run_setup
distribution = run_setup("setup.py", [], stop_after="init")
command = distribution.get_command_obj("build_startup")
command.build_lib = sys.argv[1]
command.ensure_finalized()
command.run()
assert "build_startup" in distribution.get_command_obj("build").get_sub_commands()
"""


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A folder with a package ``horovod`` that must not be imported."""
    package = tmp_path / "installed" / "horovod"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('the installed Horovod was imported')")
    return package.parent


def python(
    source: str, *options: str, path: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("HVD_ORDER_")}
    paths = [str(path)] if path else []
    env["PYTHONPATH"] = os.pathsep.join([*paths, str(REPOSITORY)])
    return subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(source)],
        env=env | variables,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_an_unmodified_program_runs_with_the_variable_alone(trap: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    done = python(
        f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')",
        path=trap,
        HVD_ORDER_ALIAS="1",
    )
    assert done.returncode == 0, (
        f"{done.stderr}\nIs hvd_order_alias.pth in site-packages? Install again: make build"
    )
    assert json.loads(done.stdout) == FACTS


def test_every_module_of_the_table_exists_and_others_say_why_not() -> None:
    program = """
        import hvd_order.alias, hvd_order.alias, importlib, json, sys
        missing = {}
        for name in sys.argv[1:]:
            try:
                importlib.import_module(name)
            except ImportError as error:
                missing[name] = [type(error).__name__, error.name, str(error)]
        for line in ("from horovod import spark", "from horovod.torch import no_such_name"):
            try:
                exec(line)
            except ImportError as error:
                missing[line] = [type(error).__name__, error.name, str(error)]
        import horovod
        assert not hasattr(horovod, "mxnet")
        print(json.dumps(missing))
    """
    absent = [
        "horovod.spark",
        "horovod.tensorflow.util",
        "horovod.torch.mpi_lib_v2",
        "horovod.run",
    ]
    if importlib.util.find_spec("hvd_order.torch.collectives.sync_batch_norm") is None:
        absent.append("horovod.torch.sync_batch_norm")  # not written yet
    modules = list(MODULES)
    if importlib.util.find_spec("ray") is None:
        modules.remove("horovod.ray")
    if importlib.util.find_spec("tensorflow") is None:
        absent.remove("horovod.tensorflow.util")  # whose package needs TensorFlow
        modules = [name for name in modules if not {"tensorflow", "keras"} & set(name.split("."))]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *modules, *absent],
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    missing: dict[str, Any] = json.loads(done.stdout)
    lines = ["from horovod import spark", "from horovod.torch import no_such_name"]
    assert sorted(missing) == sorted([*absent, *lines])
    for name, (kind, module, message) in missing.items():
        assert kind == "ModuleNotFoundError"
        assert message.startswith(f"no module named {module!r}: hvd_order stands in for Horovod")
        assert module == name or name in lines or name.startswith(module)
    assert "TorchDistributor, whose variables hvd.init() reads" in missing["horovod.spark"][2]
    for name in {"horovod.tensorflow.util", "horovod.torch.mpi_lib_v2"} & set(absent):
        assert "its documentation lists what there is" in missing[name][2]


def test_it_comes_too_late_after_horovod_itself(tmp_path: Path) -> None:
    (tmp_path / "horovod.py").write_text("")
    done = python("import horovod\nimport hvd_order.alias", path=tmp_path)
    assert done.returncode == 1
    assert "ImportError: Horovod itself has been imported already, from" in done.stderr
    assert str(tmp_path / "horovod.py") in done.stderr
    assert "or set HVD_ORDER_ALIAS=1" in done.stderr


def test_it_can_be_taken_back(tmp_path: Path) -> None:
    (tmp_path / "horovod.py").write_text("real = True")
    done = python(
        """
        import hvd_order.alias
        from hvd_order.compat.horovod import finder
        import horovod
        assert horovod.__version__ == "0.28.1" and finder.is_installed()
        finder.uninstall(), finder.uninstall()
        import horovod
        assert horovod.real and not finder.is_installed()
        """,
        path=tmp_path,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("value", ["", "0", "off"])
def test_without_the_variable_horovod_is_horovod(tmp_path: Path, value: str) -> None:
    (tmp_path / "horovod.py").write_text("real = True")
    done = python("import horovod; assert horovod.real", path=tmp_path, HVD_ORDER_ALIAS=value)
    assert done.returncode == 0, done.stderr


def test_without_the_variable_nothing_is_imported_at_start() -> None:
    done = python("import sys; print([m for m in sys.modules if 'hvd_order.' in m])")
    assert done.stdout.strip() == "[]", done.stderr


def test_pip_would_install_the_line_that_python_reads_at_its_start(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DISTRIBUTION, str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    written = (tmp_path / "hvd_order_alias.pth").read_text()
    assert written == (REPOSITORY / "hvd_order/compat/horovod/hvd_order_alias.pth").read_text()
    assert len(written.splitlines()) == 1
