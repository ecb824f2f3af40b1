"""Ignite's own tests of its Horovod back end, with `import horovod` meaning hvd_order.

They come with Ignite's source, which pip fetches in the version and with the hash of the lock file.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("ignite")

REPOSITORY = Path(__file__).parents[2]
LOCKS = REPOSITORY / "requirements/lock"

# Nothing else may be skipped: neither on this machine's account nor on ours.
SKIPPED = (
    "Skip if no GPU",
    "Skip if less than 2 GPUs",
    "Skip if has Horovod package",  # what Ignite does without Horovod
    "Skip as controller is not Gloo",  # under horovodrun; the same runs inside an executor
)


class Suite:
    """Ignite's source, and a Python that sees this environment and what Ignite's tests need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        binaries = folder / "venv/bin"
        self.python = binaries / "python"
        run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"])
        purelib = next((folder / "venv/lib").glob("python3*/site-packages"))
        here = sysconfig.get_path("purelib")
        (purelib / "this_environment.pth").write_text(f"import site; site.addsitedir({here!r})\n")
        pip = [self.python, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        run([*pip, "install", "--require-hashes", "-r", LOCKS / "ignite.txt"])
        # The launcher that one test calls. It is Horovod's name, so no package of ours installs it.
        launcher = binaries / "horovodrun"
        launcher.write_text(f'#!/bin/sh\nexec {self.python} -m hvd_order.tools.cli run "$@"\n')
        launcher.chmod(0o755)
        pin = folder / "source.txt"
        pin.write_text(locked("pytorch-ignite"))
        run([*pip, "download", "--no-deps", "--no-binary=:all:", "--no-build-isolation",
             "--require-hashes", "--dest", folder, "--requirement", pin])  # fmt: skip
        (archive,) = folder.glob("pytorch_ignite-*.tar.gz")
        with tarfile.open(archive) as source:
            source.extractall(folder, filter="data")
        self.source = folder / archive.name.removesuffix(".tar.gz")
        self.environment = {
            **os.environ,
            "HVD_ORDER_ALIAS": "1",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": "",
        }
        # What pytest sets here is not what Ignite's tests of jobs should find.
        for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            self.environment.pop(name, None)

    def passed(self, *choice: str) -> list[str]:
        """Runs some of Ignite's tests; returns the names of those that passed, file by file.

        Raises:
            AssertionError: a test failed, or was skipped for another reason than `SKIPPED`.
        """
        report = self.folder / "report.xml"
        command = [self.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no",
                   f"--junitxml={report}", *choice]  # fmt: skip
        said = run(command, self.source, self.environment)
        passed, skipped = list[str](), Counter[str]()
        for case in ElementTree.parse(report).iter("testcase"):
            reason = case.find("skipped")
            if reason is None:
                passed.append(case.attrib["name"])
            else:
                skipped[reason.attrib["message"]] += 1
        unexpected = {reason: n for reason, n in skipped.items() if not reason.startswith(SKIPPED)}
        assert not unexpected, f"{unexpected}\n{said}"
        return passed


def locked(name: str) -> str:
    """The line of a package in the lock file, with its hashes."""
    text = (LOCKS / "third_party.txt").read_text("utf-8")
    found = re.search(rf"^{name}==(?:.*\\\n)+.*\n", text, re.MULTILINE)
    assert found, name
    return found[0]


def run(
    command: Sequence[str | Path], folder: Path | None = None, env: Mapping[str, str] | None = None
) -> str:
    done = subprocess.run(
        command, cwd=folder, env=env, check=False, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-20000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    return Suite(tmp_path_factory.mktemp("ignite"))


BACK_END = (
    "tests/ignite/distributed/utils/test_horovod.py",
    "tests/ignite/distributed/test_launcher.py",
)
# Each of these starts four processes for every case; a start takes 24 s of processor time.
FEW = {
    "test_hvd_distrib_single_node_single_device",
    "test_sync_as_hvd_inside_gloo_executor",
    "test_idist_all_reduce_hvd",
    "test_idist_broadcast_hvd",
    "test_check_idist_parallel_hvdrun_launch_n_procs",
}


@pytest.mark.timeout(900)
def test_some_of_its_tests_of_the_horovod_back_end_pass(suite: Suite) -> None:
    assert set(suite.passed(*BACK_END, f"-k={' or '.join(FEW)}")) == FEW


# Not test_auto.py: it tells Horovod's optimizer by the private method `_allreduce_grad_async`,
# which ours has no use for. The rest of it is in test_ignite.py.
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_all_of_its_tests_of_the_horovod_back_end_pass(suite: Suite) -> None:
    passed = set(
        suite.passed(
            "tests/ignite/distributed/comp_models/test_horovod.py", *BACK_END, "-k=hvd or horovod"
        )
    )
    assert passed > FEW
    assert {
        "test__hvd_dist_model_create_dist_1",
        "test__hvd_dist_model_spawn",
        "test_idist_all_gather_hvd",
        "test_idist_one_rank_only",
        "test_check_idist_parallel_spawn_n_procs_hvd",
    } <= passed


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_its_tests_of_metrics_and_handlers_pass_over_horovod(suite: Suite) -> None:
    # The other metrics are summed in the same way; some need libraries that only Ignite's own
    # environment has.
    passed = suite.passed(
        "tests/ignite/metrics/test_accumulation.py",
        "tests/ignite/metrics/test_confusion_matrix.py",
        "tests/ignite/metrics/test_frequency.py",
        "tests/ignite/metrics/test_loss.py",
        "tests/ignite/metrics/test_metric.py",
        "tests/ignite/metrics/test_metrics_lambda.py",
        "tests/ignite/metrics/test_roc_auc.py",
        "tests/ignite/metrics/regression",
        "tests/ignite/handlers/test_checkpoint.py",
        "tests/ignite/handlers/test_early_stopping.py",
        "tests/ignite/handlers/test_ema_handler.py",
        "-k=hvd or horovod",
    )
    assert len(passed) == 39
