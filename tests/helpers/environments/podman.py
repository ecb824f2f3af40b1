"""Podman with settings of its own, and what a build in it needs of this machine."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

__all__ = ["BASE", "HARDENED", "NEEDS_PODMAN", "Podman", "pip_mounts"]

BASE = "localhost/hvd_order_test_base:bookworm"
"""Made of Debian's packages by mmdebstrap: no registry of images is asked."""

HARDENED = ("--rm", "--read-only", "--tmpfs", "/tmp", "--cap-drop=all", "--network=none")
"""Options of `podman run` under which the images work."""

_PROGRAMS = ("podman", "runc", "mmdebstrap")
_missing = [program for program in _PROGRAMS if shutil.which(program) is None]
NEEDS_PODMAN = [
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
