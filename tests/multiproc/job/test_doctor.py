"""``hvd-order doctor`` as a user runs it, on a host where all is well and where it is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.launching import run_cli
from helpers.ranks import REPOSITORY

import hvd_order
from hvd_order.tools.doctor import surroundings
from hvd_order.tools.doctor.self_test import run_self_test


def doctor(
    *options: str, path: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    paths = [str(path)] if path else []
    env = {name: value for name, value in os.environ.items() if not name.startswith("HVD_ORDER_")}
    env |= {"PYTHONPATH": os.pathsep.join([*paths, str(REPOSITORY)])}
    return run_cli("doctor", *options, env=env | variables, timeout=280)


@pytest.mark.timeout(300)  # two self-tests; seconds each, unless the machine is busy
def test_a_healthy_host() -> None:
    wrong = {"HVD_ORDER_SLICE_BYTE": "1", "MASTER_ADDR": "10.1.2.3"}
    done = doctor("--json", "--timeout", "100", HOROVOD_SECRET_KEY="geheim", **wrong)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["healthy"] is True
    assert report["versions"]["hvd_order"] == hvd_order.__version__
    assert report["versions"]["python"].startswith(sys.version.split()[0])
    assert report["modules"]["torch"]["works"]
    assert report["modules"]["torch"]["cxx11_abi"] in (True, False)
    for native in ("core", "extension"):
        assert Path(report["modules"][native]["file"]).exists()
    assert set(report["transports"]) == {"gloo", "nccl", "mpi", "ucc", "horovod"}
    assert report["devices"]["CUDA"]
    assert report["devices"]["kernels"]
    assert report["transports"]["gloo"] == "yes"
    assert "127.0.0.1" in report["network"]["interfaces"].values()
    assert report["environment"]["HOROVOD_SECRET_KEY"] == "(hidden)"
    assert report["environment"]["MASTER_ADDR"] == "10.1.2.3"
    assert "geheim" not in done.stdout
    assert [p for p in report["problems"] if "did you mean HVD_ORDER_SLICE_BYTES" in p]
    for test in report["self_test"].values():
        assert test["passed"]
        assert 0 < test["seconds"] < 100
    if report["versions"]["horovod"] != "not installed":
        assert report["transports"]["horovod"].startswith("0.")
        assert set(report["self_test"]) == {"torch.distributed", "horovod"}


def test_without_torch_it_says_so_and_how_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13 is gone')")
    done = doctor(path=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "NO: libcudart.so.13 is gone" in done.stdout
    assert "torch.distributed    FAILED" in done.stdout
    assert "cause: rank 0: ImportError: libcudart.so.13 is gone" in done.stdout
    assert "cure:  see the modules above" in done.stdout


def test_ranks_that_hang_are_ended_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\nif os.environ.get('RANK') == '1': os.kill(os.getpid(), signal.SIGSTOP)"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(REPOSITORY)]))
    test = run_self_test(2.0)
    assert not test.passed
    assert 2.0 <= test.seconds < 10.0
    assert "gave no answer in 2 s" in test.cause
    assert "1" in test.cause
    assert "GLOO_SOCKET_IFNAME" in test.cure


def test_a_name_that_does_not_resolve_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "no-such-host.invalid")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    _, problems = surroundings.network()
    assert "no-such-host.invalid, does not resolve" in problems[0]
    assert "/etc/hosts" in problems[0]
    assert problems[1].startswith("GLOO_SOCKET_IFNAME is eth77, which no interface")


def test_a_python_that_takes_too_long_to_start_does_not_end_the_doctor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(surroundings, "_START_S", 0.0)
    assert surroundings.alias_facts()["variable works"] is None
