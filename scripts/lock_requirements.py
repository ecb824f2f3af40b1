"""Writes the lock files, `requirements/lock/*.txt`: one for each file of `requirements`.

A lock file names each package that pip installs for that file, its dependencies' dependencies
among them, with one version for each Python and platform, and the hashes of its files. The versions
of all lock files come from one resolution, so that all of them fit into one environment.

PyTorch and what belongs to one build of it stay out (`OF_PYTORCH`): package indexes offer several
builds of one version, so no hash fits all. `lock/torch.txt` has its other dependencies.

Run by `make lock`. Needs uv, and a package index. Versions in the lock files are kept where they
still fit; --upgrade takes the newest.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = Path("requirements")
LOCKS = SOURCES / "lock"
OLDEST_PYTHON = "3.10"
OF_PYTORCH = re.compile(r"torch|torchvision|triton|(nvidia|cuda)-.*")
HEADER = """\
# Written by `make lock` from requirements/{name}; see "What is installed" in docs/security.md.
# Wheels alone: an sdist fetches what builds it, in versions that no file pins.
--require-hashes
--only-binary :all:
"""


def main() -> None:
    """Writes all lock files, and says which have changed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--upgrade", action="store_true", help="newest versions of all dependencies"
    )
    upgrade = parser.parse_args().upgrade
    sources = sorted(file.name for file in (ROOT / SOURCES).glob("*.txt"))
    (ROOT / LOCKS).mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        together = Path(folder) / "together.txt"
        if not upgrade:
            together.write_text("".join(_kept()), "utf-8")
        _compile(sources, together, "--no-annotate")
        for name in sources:
            file = Path(folder) / name
            _compile([name], file, "--generate-hashes", "--constraints", str(together))
            _write(name, file.read_text("utf-8"))
    for lock in (ROOT / LOCKS).glob("*.txt"):
        if lock.name not in sources:
            lock.unlink()
            print(f"removed: {lock.relative_to(ROOT)}")


def _kept() -> Iterator[str]:
    """The versions that the lock files have now: uv prefers those that its output file names."""
    for lock in sorted((ROOT / LOCKS).glob("*.txt")):
        for block in _blocks(lock.read_text("utf-8")):
            yield block.partition("\n")[0].removesuffix("\\").rstrip() + "\n"


def _compile(names: Sequence[str], out: Path, *options: str) -> None:
    """Lets uv resolve some files of `requirements` together.

    Raises:
        SystemExit: there is no uv beside this Python or in PATH, or nothing fits; uv says why.
    """
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        raise SystemExit("uv is needed: pip install --require-hashes -r requirements/lock/uv.txt")
    command = [
        uv, "pip", "compile", "--quiet", "--no-config", "--no-header", "--no-python-downloads",
        "--universal", "--python-version", OLDEST_PYTHON, "--only-binary", ":all:", *options,
        "--output-file", str(out), *(str(SOURCES / name) for name in names),
    ]  # fmt: skip
    if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
        raise SystemExit(f"requirements that do not fit together: {', '.join(names)}")


def _write(name: str, resolved: str) -> None:
    """Writes a lock file from what uv has resolved, without what belongs to PyTorch."""
    named = _named(name) - {"torch"}  # such as nvcc, which no build of PyTorch brings
    kept = [
        block for block in _blocks(resolved)
        if _package(block) in named or not OF_PYTORCH.fullmatch(_package(block))
    ]  # fmt: skip
    lock = ROOT / LOCKS / name
    text = HEADER.format(name=name) + re.sub(r" +# +-c .*\n", "", "".join(kept))
    if not lock.exists() or lock.read_text("utf-8") != text:
        lock.write_text(text, "utf-8")
        print(f"written: {lock.relative_to(ROOT)}, {len(kept)} packages")


def _named(name: str) -> set[str]:
    """The packages that a file of `requirements` names, or a file that it includes."""
    named = set()
    for line in (ROOT / SOURCES / name).read_text("utf-8").splitlines():
        if line.startswith("-r "):
            named |= _named(line.removeprefix("-r ").strip())
        elif line and not line.startswith("#"):
            named.add(_package(line))
    return named


def _package(requirement: str) -> str:
    return re.split(r"[=\[ ;]", requirement, maxsplit=1)[0].lower()


def _blocks(text: str) -> Iterator[str]:
    """The packages of a lock file, each with the indented lines below it."""
    return (found[0] for found in re.finditer(r"^[\w.-]+==.*\n(?:[ ].*\n)*", text, re.MULTILINE))


if __name__ == "__main__":
    main()
