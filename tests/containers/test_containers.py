"""The images of docker/, built and run by podman on a base made of Debian's packages.

Needs root and Debian's packages podman, runc, netavark, aardvark-dns and mmdebstrap.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
from pathlib import Path

import pytest
from helpers.environments.installed import TRAIN, weights_in
from helpers.environments.podman import BASE, HARDENED, NEEDS_PODMAN, Podman
from helpers.ranks import REPOSITORY

import hvd_order

pytestmark = NEEDS_PODMAN


def test_the_image_passes_doctor_as_another_user_on_a_read_only_system(
    podman: Podman, runtime: str
) -> None:
    report = podman.run("run", *HARDENED, runtime)
    assert "_native/torch_" in report
    assert podman.run("run", *HARDENED, runtime, "id", "-u").strip() == "10001"


def test_the_image_has_labels_a_health_check_and_no_cuda(podman: Podman, runtime: str) -> None:
    (image,) = json.loads(podman.run("image", "inspect", runtime))
    labels = {name.rpartition(".")[2]: value for name, value in image["Labels"].items()
              if name.startswith("org.opencontainers.image.")}  # fmt: skip
    assert labels["title"] == "hvd_order"
    assert labels["version"] == hvd_order.__version__
    assert labels["licenses"] == "Apache-2.0"
    assert labels["revision"] == "unknown"  # no --build-arg SOURCE_COMMIT
    assert labels["name"] == BASE  # ...base.name
    check = image["Healthcheck"]["Test"][1:]
    assert podman.run("run", *HARDENED, runtime, *check).startswith("healthy: ")
    held = podman.run("run", *HARDENED, runtime, "pip", "list", "--format", "freeze")
    assert "+cpu" in held
    assert not re.search(r"^(nvidia|cuda|triton)", held, re.MULTILINE)


def test_the_image_lists_what_it_holds(podman: Podman, runtime: str) -> None:
    listed = podman.run("run", *HARDENED, runtime, "cat", "/opt/hvd_order/sbom.json")
    held = {
        (component["name"].lower().replace("_", "-"), component["version"])
        for component in json.loads(listed)["components"]
    }
    names = {name for name, _ in held}
    assert {"torch", "numpy", "hvd-order"} <= names
    locked = {
        pin
        for lock in ("image", "torch")
        for pin in re.findall(
            r"^([\w.-]+)==([^ ;]+)",
            (REPOSITORY / f"requirements/lock/{lock}.txt").read_text("utf-8"),
            re.MULTILINE,
        )
    }
    # pip is the one of Debian's venv; NVIDIA's libraries come with a PyTorch for its GPUs.
    others = re.compile(r"torch|hvd-order|pip|triton|(nvidia|cuda)-.*")
    assert not {pin for pin in held - locked if not others.fullmatch(pin[0])}


def test_the_image_trains_and_has_no_compiler(podman: Podman, runtime: str) -> None:
    for compiler in ("g++", "cc", "cmake", "ninja"):
        podman.run("run", *HARDENED, runtime, "which", compiler, code=1)
    mount = ["-v", f"{TRAIN}:/train.py:ro"]
    one = podman.run("run", *HARDENED, *mount, runtime, "python", "/train.py")
    two = podman.run(
        "run", *HARDENED, *mount, runtime, "hvd-order", "run", "-np", "2", "python", "/train.py"
    )
    assert weights_in(two) == pytest.approx(weights_in(one), abs=1e-6)


def test_two_nodes_run_the_benchmark_over_a_shaped_link(
    podman: Podman, runtime: str, build_options: list[str], tmp_path: Path
) -> None:
    compose = shutil.which("podman-compose", path=str(Path(sys.executable).parent))
    assert compose is not None, "requirements/dev.txt has podman-compose"
    image = "localhost/hvd_order:benchmark"
    podman.run(
        "build", *build_options, "-f", "docker/Dockerfile", "--target", "benchmark", "-t", image,
        ".", folder=REPOSITORY,
    )  # fmt: skip
    shutil.copytree(REPOSITORY / "docker", tmp_path / "docker")
    results = tmp_path / "out/compose"
    results.mkdir(parents=True)
    settings = {
        "RATE": "200mbit",
        "BENCHMARK": "--models small_cnn --systems ddp hvd_order --rounds 2 --steps 3 --settle 10",
    }
    command = [compose, "-f", "compose.yaml", "-p", f"hvd_order_test_{os.getpid()}"]
    try:
        podman.call(
            [*command, "up", "--no-build", "--abort-on-container-exit", "--exit-code-from",
             "node0"],
            tmp_path / "docker", more=settings,
        )  # fmt: skip
    finally:
        podman.call([*command, "down"], tmp_path / "docker", more=settings)
        podman.run("rmi", "--force", image)
    document = json.loads((results / "result.json").read_text())
    assert document["settings"]["ranks"] == 2
    # Shaped: tc's rate counts headers as well, so no more than it gets through.
    assert 0.1 < document["summary"]["link_gbit"] <= 0.2
    (row,) = document["summary"]["rows"]
    assert set(row["systems"]) == {"ddp", "hvd_order"}
    assert "| small_cnn" in (results / "result.md").read_text()
    assert (results / "result.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
@pytest.mark.skipif(platform.machine() != "x86_64", reason="nvcc for this machine is not pinned")
def test_the_image_for_cuda_has_kernels_and_says_that_there_is_no_gpu(
    podman: Podman, build_options: list[str]
) -> None:
    # With the PyTorch of this machine's package index; kernels are compiled by nvcc either way.
    image = "localhost/hvd_order_test:cuda"
    podman.run(
        "build", *build_options, "-f", "docker/Dockerfile.cuda", "-t", image, ".", folder=REPOSITORY
    )
    report = podman.run("run", *HARDENED, image)
    assert "kernels" in report
    podman.run("run", *HARDENED, image, "which", "nvcc", code=1)
    podman.run("rmi", "--force", image)
