"""nvcc, and the processors that kernels are compiled for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from toolchain.packages import package_folders

__all__ = ["cmake_arguments", "nvcc"]

OLDEST_NVCC = (12, 1)  # kernels with arguments of 32 KB
# Cubins for these, as far as nvcc knows them, and PTX of the newest for what comes later.
ARCHITECTURES = (80, 90, 100)


def nvcc() -> str | None:
    """Path of nvcc; None, with a line saying why, if there is none that can be used."""
    without = "building without kernels for CUDA (PyTorch's operators take their place)"
    found = os.environ.get("CUDACXX")
    if found is None:
        home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
        of_pip = [f"{f}/cu{major}/bin" for f in package_folders("nvidia") for major in (14, 13)]
        places = [*of_pip, *([f"{home}/bin"] if home else []), None, "/usr/local/cuda/bin"]
        found = next(filter(None, (shutil.which("nvcc", path=place) for place in places)), None)
    if not found:
        print(f"hvd_order: no nvcc was found; {without}")
        return None
    says = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    release = re.search(r"release (\d+)\.(\d+)", says)
    if release is None or (int(release[1]), int(release[2])) < OLDEST_NVCC:
        version = f"is {release[1]}.{release[2]}" if release else "does not tell its version"
        print(
            f"hvd_order: {found} {version}; {OLDEST_NVCC[0]}.{OLDEST_NVCC[1]} is needed; {without}"
        )
        return None
    return found


def cmake_arguments(nvcc: str, folder: Path) -> list[str]:
    """What CMake must know about nvcc; nothing, with a line saying why, if it cannot compile.

    Args:
        folder: where to try.
    """
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True)
    known = {int(number) for number in re.findall(r"compute_(\d+)", listed.stdout)}
    kept = [number for number in ARCHITECTURES if number in known]
    codes = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in kept]
    codes.append(f"-gencode=arch=compute_{kept[-1]},code=compute_{kept[-1]}")
    trial = folder / "nvcc_trial.cu"
    trial.write_text("#include <bit>\n__global__ void nothing() {}\n")
    command = [nvcc, "-std=c++20", *codes, "-c", str(trial), "-o", str(trial.with_suffix(".o"))]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        print(
            f"hvd_order: {nvcc} cannot compile, building without kernels for CUDA (PyTorch's "
            f"operators take their place):\n{tried.stdout}{tried.stderr}"
        )
        return []
    # nvcc may be a link or a script; it knows where the toolkit is.
    told = subprocess.run(
        [nvcc, "-dryrun", str(trial)], capture_output=True, text=True, check=True
    ).stderr
    top = re.search(r"TOP=(\S+)", told)
    return [
        f"-DHVD_ORDER_NVCC={nvcc}",
        f"-DHVD_ORDER_CUDA_HOME={top[1] if top else Path(nvcc).resolve().parents[1]}",
        f"-DHVD_ORDER_CUDA_CODES={';'.join(codes)}",
        f"-DHVD_ORDER_CUDA_ARCHITECTURES={' '.join(f'sm_{n}' for n in kept)} and newer",
    ]
