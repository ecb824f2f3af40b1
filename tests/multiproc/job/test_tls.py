"""Gloo over TLS where this PyTorch has it, with certificates made here; else the error says so."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from helpers.ranks import run_script
from helpers.training.scripts import trains_a_layer

TRAIN = f"""\
{trains_a_layer(size=64, steps=5)}
weights = hvd.allgather(model.weight.detach()[None])
assert all(torch.equal(weights[0], each) for each in weights)
print("trained", flush=True)
"""
TLS = "GLOO_DEVICE_TRANSPORT"


@pytest.fixture(scope="module")
def without_tls() -> str:
    """What a job over TLS says here without any certificate."""
    [end] = run_script(
        1,
        "import torch.distributed as dist; dist.init_process_group('gloo')",
        env={TLS: "TCP_TLS"},
    )
    return end.stderr


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, capture_output=True, check=True)


def authority(folder: Path) -> Path:
    """A new authority and a certificate of it."""
    folder.mkdir()
    new = ["req", "-newkey", "rsa:2048", "-nodes", "-sha256"]
    openssl(folder, *new, "-x509", "-subj", "/O=authority", "-days", "2", "-keyout", "ca.key",
            "-out", "ca.pem")  # fmt: skip
    openssl(folder, *new, "-subj", "/O=host", "-keyout", "host.key", "-out", "host.csr")
    openssl(folder, "x509", "-req", "-sha256", "-days", "2", "-in", "host.csr", "-CA", "ca.pem",
            "-CAkey", "ca.key", "-CAcreateserial", "-out", "host.pem")  # fmt: skip
    return folder


def variables(folder: Path) -> dict[str, str]:
    return {
        TLS: "TCP_TLS",
        f"{TLS}_TCP_TLS_PKEY": str(folder / "host.key"),
        f"{TLS}_TCP_TLS_CERT": str(folder / "host.pem"),
        f"{TLS}_TCP_TLS_CA_FILE": str(folder / "ca.pem"),
        "HVD_ORDER_TIMEOUT": "10",
    }


@pytest.fixture
def certificates(without_tls: str, tmp_path: Path) -> Mapping[str, str]:
    if "unsupported gloo device" in without_tls:
        pytest.skip("this PyTorch's Gloo was built without TLS (USE_GLOO_WITH_OPENSSL)")
    if shutil.which("openssl") is None:
        pytest.skip("certificates need: apt-get install openssl")
    return variables(authority(tmp_path / "ours"))


def test_where_gloo_has_no_tls_the_error_says_so(without_tls: str) -> None:
    if "unsupported gloo device" not in without_tls:
        pytest.skip("this PyTorch's Gloo has TLS")
    for end in run_script(2, TRAIN, env={TLS: "TCP_TLS"}):
        assert end.returncode == 1
        assert "InvalidUsage: GLOO_DEVICE_TRANSPORT is 'TCP_TLS', which this" in end.stderr


def test_a_job_trains_over_tls(certificates: Mapping[str, str]) -> None:
    for end in run_script(2, TRAIN, env=certificates):
        assert end.returncode == 0, end.stderr
        assert "trained" in end.stdout


def test_a_rank_with_a_certificate_of_somebody_else_is_not_let_in(
    certificates: Mapping[str, str], tmp_path: Path
) -> None:
    stranger = variables(authority(tmp_path / "theirs"))
    for end in run_script(2, TRAIN, env=lambda rank: stranger if rank else certificates):
        assert end.returncode == 1
        assert "trained" not in end.stdout
