"""Checks the sdist and the wheels of `make wheels`, and writes what is published beside them.

Into the folder of the wheels go

* `SHA256SUMS`, for ``sha256sum --check``;
* `hvd_order-VERSION.cdx.json`, a software bill of materials (CycloneDX): what they were built with;
* `NOTES.md`, the section of CHANGELOG.md.

It publishes nothing. Run by `make release`; docs/releasing.md has the checklist.
"""

from __future__ import annotations

import argparse
import email
import hashlib
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
_NOTES = "NOTES.md"
_SUMS = "SHA256SUMS"
_IN_WHEELS = ("hvd_order/py.typed", "hvd_order_alias.pth", ".dist-info/licenses/LICENSE")
_IN_SDIST = ("CMakeLists.txt", "CHANGELOG.md", "LICENSE", "csrc/", "tests/", "docs/", "Makefile")


def main() -> None:
    """Checks, then writes.

    Raises:
        SystemExit: what is there cannot be published, with the reasons.
    """
    options = _options()
    version = re.findall(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)[0]
    wheels = sorted(options.dist.glob("*.whl"))
    sdists = sorted(options.dist.glob("*.tar.gz"))
    faults = [*_source_faults(version), *_content_faults(version, wheels, sdists)]
    for fault in faults:
        print(f"{'rehearsal: ' * options.rehearsal}{fault}", file=sys.stderr)
    if faults and not options.rehearsal:
        raise SystemExit(f"{len(faults)} reasons not to publish {version}; see docs/releasing.md")
    _run([BIN / "twine", "check", "--strict", *sdists, *wheels])
    # W002: the file that turns the alias on lies in site-packages, and once more in the package.
    _run([BIN / "check-wheel-contents", "--ignore", "W002", *wheels])
    bill = options.dist / f"hvd_order-{version}.cdx.json"
    _run([
        BIN / "cyclonedx-py", "requirements", "--pyproject", ROOT / "pyproject.toml",
        "--mc-type", "library", "--output-reproducible", "--of", "JSON", "-o", bill,
        ROOT / "requirements/lock/wheels.txt",
    ])  # fmt: skip
    (options.dist / _NOTES).write_text(_notes(version), "utf-8")
    files = [*sdists, *wheels, bill, options.dist / _NOTES]
    (options.dist / _SUMS).write_text("".join(f"{_sha256(f)}  {f.name}\n" for f in files), "utf-8")
    for file in [*files, options.dist / _SUMS]:
        print(f"{file.stat().st_size / 1e6:8.2f} MB  {file.name}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of the wheels")
    parser.add_argument(
        "--rehearsal", action="store_true", help="say what forbids a release, and go on"
    )
    return parser.parse_args()


def _source_faults(version: str) -> Iterator[str]:
    """What forbids a release of this checkout."""
    heading = _section(version)[0]
    if "unreleased" in heading:
        yield f"CHANGELOG.md: '{heading}' needs the day of the release in place of 'unreleased'"
    if _git("status", "--porcelain"):
        yield "the checkout has changes that are not committed"
    tags = _git("tag", "--points-at", "HEAD").split()
    if f"v{version}" not in tags:
        yield f"no tag v{version} at this commit"


def _content_faults(version: str, wheels: Sequence[Path], sdists: Sequence[Path]) -> Iterator[str]:
    """What is missing in the files, or of another version."""
    if not wheels or len(sdists) != 1:
        yield f"{len(wheels)} wheels and {len(sdists)} sdists; `make wheels` makes them"
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
            found = email.message_from_bytes(archive.read(metadata))["Version"]
        if found != version:
            yield f"{wheel.name} is of version {found}, the checkout of {version}"
        if "manylinux" not in wheel.name:
            yield f"{wheel.name} has no manylinux tag, so package indexes refuse it"
        for part in _IN_WHEELS:
            if not any(name.endswith(part) for name in names):
                yield f"{wheel.name} lacks {part}"
        engines = set(re.findall(r"/_native/(torch_\d+_\d+)/", "\n".join(names)))
        if engines != _engines():
            differ = ", ".join(sorted(engines ^ _engines()))
            yield f"{wheel.name} has engines for other PyTorch releases than the project: {differ}"
    for sdist in sdists:
        with tarfile.open(sdist) as archive:
            names = archive.getnames()
        top = f"hvd_order-{version}/"
        for part in _IN_SDIST:
            if not any(f"{name}/".startswith(top + part) for name in names):
                yield f"{sdist.name} lacks {part}"


def _engines() -> set[str]:
    """Folders of the engines that a wheel must have."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from build_wheels import TORCH_RELEASES

    return {f"torch_{release.replace('.', '_')}" for release in TORCH_RELEASES}


def _section(version: str) -> tuple[str, str]:
    """Heading and text of a version in CHANGELOG.md."""
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    match = re.search(rf"^## {re.escape(version)}\b(.*)\n((?:(?!## ).*\n?)*)", text, re.MULTILINE)
    if match is None:
        raise SystemExit(f"CHANGELOG.md has no heading '## {version} (day)'")
    return match[0].partition("\n")[0], match[2].strip()


def _notes(version: str) -> str:
    """Release notes; links into the checkout become plain text, since nothing lies beside them."""
    text = re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", _section(version)[1])
    return f"# hvd_order {version}\n\n{text}\n"


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _run(command: Sequence[str | Path]) -> None:
    """Runs a program.

    Raises:
        SystemExit: it failed.
    """
    if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
        raise SystemExit(f"failed: {' '.join(map(str, command))}")


if __name__ == "__main__":
    main()
