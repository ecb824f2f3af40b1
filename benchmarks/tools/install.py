"""From an empty container without a compiler to two ranks that train: how long does each step take?

See README.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.environments.installed import TRAIN, weights_in  # noqa: E402
from helpers.environments.podman import Podman, pip_mounts  # noqa: E402

from benchmarks.runner.question import Answer, ask, option  # noqa: E402

_BIN = "/env/bin"


def measure(options: argparse.Namespace) -> Answer:
    """Measures every step in a new container, some times."""
    if not options.wheel.is_file():
        raise SystemExit(f"error: there is no {options.wheel}; `make wheels` writes to dist")
    if shutil.which("podman") is None or os.geteuid() != 0:
        raise SystemExit("error: needs podman and root")
    with tempfile.TemporaryDirectory(prefix="hvd_order_bench_") as folder:
        podman = Podman(Path(folder))
        mounts = [
            *pip_mounts(Path(folder)),
            "-v", f"{options.wheel.resolve().parent}:/dist:ro", "-v", f"{TRAIN}:/train.py:ro",
        ]  # fmt: skip
        runs = [_run(podman, options, mounts) for _ in range(options.runs)]
    seconds = {name: [run[name] for run in runs] for name in runs[0]}
    for name, each in seconds.items():
        low, high = min(each), max(each)
        print(f"{statistics.median(each):8.1f} s  ({low:.1f} to {high:.1f})  {name}")
    wheel_mb = options.wheel.stat().st_size / 1e6
    print(f"{options.wheel.name}: {wheel_mb:.1f} MB")
    return Answer(
        {"seconds": seconds, "wheel_mb": wheel_mb},
        {name: statistics.median(each) for name, each in seconds.items()},
        {"wheel": options.wheel.name},
    )


def _run(podman: Podman, options: argparse.Namespace, mounts: list[str]) -> dict[str, float]:
    """Seconds of each step in one new container."""
    container = podman.run(
        "run", "--detach", "--network=host", "--pull=never", *mounts, options.base,
        "sleep", "infinity",
    ).strip()  # fmt: skip
    seconds: dict[str, float] = {}
    said: dict[str, str] = {}

    def step(name: str, command: str) -> None:
        started = time.monotonic()
        said[name] = podman.run("exec", container, "sh", "-ec", command)
        seconds[name] = time.monotonic() - started

    pip = f"{_BIN}/pip install --quiet --no-cache-dir"
    try:
        step("Debian's Python",
             "apt-get -qq update && apt-get -qq install --yes --no-install-recommends "
             "ca-certificates python3 python3-venv")  # fmt: skip
        step("PyTorch", f"python3 -m venv /env && {pip} {options.torch}")
        step("wheel", f"{pip} /dist/{options.wheel.name}")
        for compiler in ("cc", "g++", "nvcc"):
            podman.run("exec", container, "which", compiler, code=1)
        step("doctor", f"{_BIN}/hvd-order doctor")
        step("one process", f"{_BIN}/python /train.py")
        step("two ranks", f"{_BIN}/hvd-order run -np 2 {_BIN}/python /train.py")
    finally:
        podman.run("rm", "--force", "--time=0", container)
    _check_equal(said["one process"], said["two ranks"])
    return seconds


def _check_equal(one: str, two: str) -> None:
    """Two ranks must have trained as one process did."""
    pairs: list[Any] = list(zip(weights_in(one), weights_in(two), strict=True))
    apart = max(abs(a - b) for a, b in pairs)
    if apart > 1e-6:
        raise SystemExit(f"error: the weights of two ranks are {apart:g} from one process's")


if __name__ == "__main__":
    sys.exit(ask(
        "install", __doc__, measure,
        option("wheel", None, "of `make wheels`", type=Path, metavar="WHEEL"),
        option("--base", "debian:bookworm-slim",
               "image with apt, pulled before; its Python must be the wheel's"),
        option("--torch", "torch==2.13.0", "what pip installs"),
        option("--runs", 3, "new containers"),
        quick={"runs": 1},
    ))  # fmt: skip
