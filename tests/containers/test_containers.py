"""The images of docker/, built and run by podman on a base made of Debian's packages.

No registry of images is asked: mmdebstrap makes the base. Needs root and Debian's packages podman,
runc, netavark, aardvark-dns and mmdebstrap.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from helpers.installed import TRAIN, weights_in

REPOSITORY = Path(__file__).parents[2]
BASE = "localhost/hvd_order_test_base:bookworm"
PROGRAMS = ("podman", "runc", "mmdebstrap")
_missing = [program for program in PROGRAMS if shutil.which(program) is None]
pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(_missing), reason=f"needs {', '.join(_missing)} (Debian's packages)"),
    pytest.mark.skipif(os.geteuid() != 0, reason="mmdebstrap and podman's networks need root here"),
]


class Podman:
    """Podman with settings, images and containers of its own."""

    def __init__(self, folder: Path) -> None:
        limit = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 16384)
        settings = folder / "containers.conf"
        # runc: crun refuses two hierarchies of cgroups. Limits: without CAP_SYS_RESOURCE a
        # container cannot have more than this process.
        settings.write_text(
            f'[containers]\ndefault_ulimits = ["nofile={limit}:{limit}", "nproc=8192:8192"]\n'
            '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
            '[network]\nnetwork_backend = "netavark"\n'
        )
        self.environment = {**os.environ, "CONTAINERS_CONF": str(settings)}

    def run(self, *arguments: str | Path, folder: Path | None = None, code: int = 0) -> str:
        return self.call(["podman", *arguments], folder, code)

    def call(
        self,
        command: Sequence[str | Path],
        folder: Path | None = None,
        code: int = 0,
        more: Mapping[str, str] | None = None,
    ) -> str:
        done = subprocess.run(
            command, env={**self.environment, **(more or {})}, cwd=folder, text=True,
            capture_output=True, timeout=1500, check=False,
        )  # fmt: skip
        said = f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
        assert done.returncode == code, f"{' '.join(map(str, command))}\n{said}"
        return done.stdout


def pip_mounts(folder: Path) -> list[str]:
    """This machine's pip settings for a build, with the folders and certificates they name."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    found = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        found[name.rpartition(".")[2]] = value.strip("'\"").replace("\\n", " ")
    kept = {
        key: found[key] for key in ("index-url", "extra-index-url", "find-links") if key in found
    }
    mounts = []
    certificates = found.get("cert", "/etc/ssl/certs/ca-certificates.crt")
    if Path(certificates).exists():
        mounts += ["-v", f"{certificates}:/run/host_certificates.crt:ro"]
        kept["cert"] = "/run/host_certificates.crt"
    for place in " ".join(kept.values()).split():
        path = Path(place.removeprefix("file://"))
        if path.is_absolute() and path.is_dir():
            # An index of files names files beside it.
            path = path.parent if place.startswith("file://") else path
            mounts += ["-v", f"{path}:{path}:ro"]
    settings = folder / "pip.conf"
    settings.write_text("[global]\n" + "".join(f"{key} = {value}\n" for key, value in kept.items()))
    return ["-v", f"{settings}:/etc/pip.conf:ro", *mounts]


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Podman:
    folder = tmp_path_factory.mktemp("podman")
    podman = Podman(folder)
    if BASE not in podman.run("images", "--format", "{{.Repository}}:{{.Tag}}").split():
        archive = folder / "base.tar"
        podman.call(
            ["mmdebstrap", "--quiet", "--variant=minbase", "--mode=root", "bookworm", archive]
        )
        podman.run("import", "--quiet", archive, BASE)
        archive.unlink()
    return podman


@pytest.fixture(scope="module")
def build_options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pip")
    return ["--pull=never", "--network=host", "--format=docker", "--build-arg", f"BASE={BASE}",
            *pip_mounts(folder)]  # fmt: skip


@pytest.fixture(scope="module")
def runtime(podman: Podman, build_options: list[str]) -> str:
    image = "localhost/hvd_order_test:runtime"
    podman.run(
        "build", *build_options, "-f", "docker/Dockerfile", "-t", image, ".", folder=REPOSITORY
    )
    size = int(podman.run("image", "inspect", "--format", "{{.Size}}", image))
    print(f"{image}: {size / 1e9:.2f} GB")
    return image


HARDENED = ("--rm", "--read-only", "--tmpfs", "/tmp", "--cap-drop=all", "--network=none")


def test_the_image_passes_doctor_as_another_user_on_a_read_only_system(
    podman: Podman, runtime: str
) -> None:
    report = podman.run("run", *HARDENED, runtime)
    assert "_torch_engines" in report
    assert podman.run("run", *HARDENED, runtime, "id", "-u").strip() == "10001"


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
