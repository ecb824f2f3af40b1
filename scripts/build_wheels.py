"""Builds what `pip install hvd_order` takes: a wheel for each Python, and the sdist.

A wheel holds an engine for each PyTorch release of `TORCH_RELEASES`, so it needs no compiler where
it is installed. Of each release the build needs headers and four libraries, which stay in
build/wheels/torch. Wheels are built from the sdist: what it lacks, they miss.

Run by `make wheels`. Needs g++, and Linux.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build/wheels"
TORCH_RELEASES = ("2.15", "2.14", "2.13", "2.12", "2.11", "2.10", "2.9", "2.8")
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
_OLDEST_LIBSTDCXX = "scripts/toolchain/oldest_libstdcxx.h"
# All that _torch is linked with. They come from the PyTorch of the user, so no wheel holds them.
TORCH_LIBRARIES = ("c10", "torch", "torch_cpu", "torch_python")


def main() -> None:
    """Builds what the options ask for."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    source = _sdist(options.out)
    for python in options.pythons or _pythons():
        started = time.monotonic()
        environment = _environment(python)
        torches = options.torch_folders
        if torches is None:
            torches = [_torch(environment, release) for release in options.torch]
        wheel = _wheel(environment, source, torches, options.out)
        megabytes = wheel.stat().st_size / 1e6
        print(f"{wheel.name}: {megabytes:.1f} MB, {time.monotonic() - started:.0f} s", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--pythons",
        nargs="+",
        metavar="PYTHON",
        help="interpreters (default: 3.10 to 3.13, as found)",
    )
    parser.add_argument(
        "--torch", nargs="+", default=TORCH_RELEASES, metavar="RELEASE",
        help="PyTorch releases to build engines for (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--torch-folders", nargs="+", type=Path, metavar="FOLDER",
        help="installed PyTorch packages to build engines for instead",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for what is built")
    return parser.parse_args()


def _pythons() -> list[str]:
    """The interpreters of `PYTHONS` that this machine has; says which it lacks."""
    found, missing = [], []
    for version in PYTHONS:
        python = find_python(version)
        if python is None:
            missing.append(version)
        else:
            found.append(python)
    if missing:
        print(f"no wheel for Python {', '.join(missing)}: not on this machine", flush=True)
    if not found:
        raise SystemExit("no Python to build a wheel for; name one with --pythons")
    return found


def find_python(version: str) -> str | None:
    """A working interpreter of a version: from PATH, or kept by pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    kept = sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"), reverse=True)
    for python in (shutil.which(f"python{version}"), *map(str, kept)):
        # pyenv leaves a script of that name in PATH for versions that it does not select.
        if python and subprocess.run([python, "-c", ""], capture_output=True).returncode == 0:
            return python
    return None


def _sdist(out: Path) -> Path:
    """Makes the sdist; returns the folder with its content."""
    tools = _environment(sys.executable)
    code = (
        "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    )
    done = _run([tools, "-c", code, str(out)], output=True)
    archive = out / done.strip().splitlines()[-1]
    source = WORK / "source"
    shutil.rmtree(source, ignore_errors=True)
    with tarfile.open(archive) as tar:
        tar.extractall(WORK, filter="data")
    (WORK / archive.name.removesuffix(".tar.gz")).rename(source)
    print(f"{archive.name}: {archive.stat().st_size / 1e6:.1f} MB", flush=True)
    return source


def _environment(python: str) -> str:
    """Interpreter of an environment with what wheels are built with."""
    code = "import sys; print(f'cp{sys.version_info.major}{sys.version_info.minor}')"
    tag = _run([python, "-c", code], output=True).strip()
    found = WORK / f"venv-{tag}/bin/python"
    if not found.exists():
        _run([python, "-m", "venv", str(found.parents[1])])
    tools = str(ROOT / "requirements/lock/wheels.txt")
    _run([str(found), *_PIP, "install", "--quiet", "--require-hashes", "-r", tools])
    return str(found)


def _torch(python: str, release: str) -> Path:
    """Folder with the headers and libraries of a PyTorch release, fetched once."""
    folder = WORK / "torch" / Path(python).parents[1].name.removeprefix("venv-") / release
    if not (folder / "torch/version.py").exists():
        shutil.rmtree(folder, ignore_errors=True)
        fetched = folder / "fetched"
        wanted = f"torch=={release}.*"
        _run([python, *_PIP, "download", "--quiet", "--no-deps", "--dest", str(fetched), wanted])
        (wheel,) = fetched.glob("*.whl")
        libraries = {f"torch/lib/lib{name}.so" for name in TORCH_LIBRARIES}
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            kept = [n for n in names if n.startswith("torch/include/") or n in libraries]
            archive.extractall(folder, [*kept, "torch/version.py"])
        shutil.rmtree(fetched)
    return folder / "torch"


def _wheel(python: str, source: Path, torches: Sequence[Path], out: Path) -> Path:
    """Builds a wheel for a Python and gives it the tag of the oldest Linux that it runs on."""
    tag = Path(python).parents[1].name.removeprefix("venv-")
    raw = WORK / f"raw-{tag}"
    shutil.rmtree(raw, ignore_errors=True)
    binaries = str(Path(python).parent)
    environment = {
        **os.environ,
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "HVD_ORDER_TORCH_FOLDERS": os.pathsep.join(str(folder.resolve()) for folder in torches),
        "CXXFLAGS": f"{os.environ.get('CXXFLAGS', '')} -include {source / _OLDEST_LIBSTDCXX}",
        "HVD_ORDER_BUILD_DIR": str(WORK / f"cmake-{tag}"),
    }
    _run(
        [python, *_PIP, "wheel", "--no-build-isolation", "--no-deps", "-w", str(raw), str(source)],
        environment=environment,
    )
    (built,) = raw.glob("*.whl")
    repaired = raw / "repaired"
    excluded = [f"--exclude=lib{name}.so" for name in TORCH_LIBRARIES]
    _run(
        [python, "-m", "auditwheel", "repair", *excluded, "-w", str(repaired), str(built)],
        environment=environment,
    )
    (wheel,) = repaired.glob("*.whl")
    return Path(shutil.move(wheel, out / wheel.name))


_PIP = ("-m", "pip", "--disable-pip-version-check")


def _run(
    command: Sequence[str], environment: dict[str, str] | None = None, output: bool = False
) -> str:
    """Runs a program to its end.

    Raises:
        SystemExit: it failed; its output is shown.
    """
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=False, text=True,
        stdout=subprocess.PIPE, stderr=None if output else subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout}\nfailed: {' '.join(map(str, command))}")
    return done.stdout


if __name__ == "__main__":
    main()
