"""The images that the tests run, built once."""

from __future__ import annotations

import pytest
from helpers.environments.podman import BASE, Podman, pip_mounts
from helpers.ranks import REPOSITORY


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
def build_options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pip")
    return ["--pull=never", "--network=host", "--format=docker", "--build-arg", f"BASE={BASE}",
            *pip_mounts(folder)]  # fmt: skip


@pytest.fixture(scope="session")
def runtime(podman: Podman, build_options: list[str]) -> str:
    return _build(podman, build_options, "runtime")


@pytest.fixture(scope="session")
def with_ssh(podman: Podman, build_options: list[str]) -> str:
    return _build(podman, build_options, "ssh")


def _build(podman: Podman, options: list[str], target: str) -> str:
    image = f"localhost/hvd_order_test:{target}"
    podman.run(
        "build", *options, "--target", target, "-f", "docker/Dockerfile", "-t", image, ".",
        folder=REPOSITORY,
    )  # fmt: skip
    size = int(podman.run("image", "inspect", "--format", "{{.Size}}", image))
    print(f"{image}: {size / 1e9:.2f} GB")
    return image
