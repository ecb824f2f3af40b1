"""The lock files agree with `requirements`, and CI and images install from them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[2]
SOURCES = REPOSITORY / "requirements"
LOCKS = SOURCES / "lock"
NAMES = sorted(file.name for file in SOURCES.glob("*.txt"))
CURE = "; after a change in requirements: make lock"

ENVIRONMENTS = [
    {
        "python_version": python, "python_full_version": f"{python}.9", "sys_platform": system,
        "platform_machine": machine, "platform_python_implementation": "CPython",
    }
    for python, (system, machine) in product(
        ("3.10", "3.11", "3.12", "3.13"),
        (("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64")),
    )
]  # fmt: skip


def pins(name: str) -> Iterator[Requirement]:
    """What a file of `requirements` names, and the files that it includes."""
    for line in (SOURCES / name).read_text("utf-8").splitlines():
        if line.startswith("-r "):
            yield from pins(line.removeprefix("-r ").strip())
        elif line and not line.startswith("#"):
            yield Requirement(line)


@cache
def locked(name: str) -> list[tuple[Requirement, list[str]]]:
    """The packages of a lock file, each with the indented lines below it."""
    found: list[tuple[Requirement, list[str]]] = []
    for line in (LOCKS / name).read_text("utf-8").splitlines():
        if line.startswith(("#", "--")):
            continue
        text = line.removesuffix("\\").strip()
        if line.startswith(" "):
            found[-1][1].append(text)
        else:
            found.append((Requirement(text), []))
    return found


def versions(requirements: Iterator[Requirement], where: dict[str, str]) -> dict[str, str]:
    """Version of each package that pip installs in an environment."""
    found: dict[str, str] = {}
    for requirement in requirements:
        if requirement.marker is None or requirement.marker.evaluate(where):
            name = canonicalize_name(requirement.name)
            exact = re.fullmatch(r"==([\w.+]+)", str(requirement.specifier))
            assert exact, f"{requirement} is no pin"
            assert found.get(name, exact[1]) == exact[1], f"two versions of {name} in {where}"
            found[name] = exact[1]
    return found


def of_pytorch(name: str) -> bool:
    """Whether a package belongs to one build of PyTorch, which no lock file holds."""
    return re.fullmatch(r"torch|torchvision|triton|(nvidia|cuda)-.*", name) is not None


def test_each_file_has_a_lock_file() -> None:
    assert sorted(file.name for file in LOCKS.iterdir()) == NAMES, CURE


@pytest.mark.parametrize("name", NAMES)
def test_the_lock_file_has_every_pin_in_its_version(name: str) -> None:
    for where in ENVIRONMENTS:
        wanted = versions((pin for pin in pins(name) if pin.name != "torch"), where)
        have = versions((requirement for requirement, _ in locked(name)), where)
        assert wanted.items() <= have.items(), f"{name} in {where}{CURE}"


@pytest.mark.parametrize("name", NAMES)
def test_the_lock_file_has_nothing_that_nothing_asks_for(name: str) -> None:
    files = {f"-r requirements/{file}": set(map(_name, pins(file))) for file in NAMES}
    inside = {_name(requirement) for requirement, _ in locked(name)} | {"torch", "torchvision"}
    for requirement, below in locked(name):
        via = [line.removeprefix("#").removeprefix(" via").strip() for line in below if "#" in line]
        asking = [who for who in via if who]
        assert asking, f"{requirement}: {below}"
        for who in asking:
            named = _name(requirement) in files[who] if who in files else who in inside
            assert named, f"{requirement}: {who} does not ask for it{CURE}"


@pytest.mark.parametrize("name", NAMES)
def test_every_line_has_hashes_and_names_no_place(name: str) -> None:
    for requirement, below in locked(name):
        hashes = [line for line in below if line.startswith("--hash")]
        assert hashes, requirement
        for line in hashes:
            assert re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", line), requirement
    lines = (LOCKS / name).read_text("utf-8").splitlines()
    # Without them a line added by hand could go without a hash, or build from source.
    assert [line for line in lines if line.startswith("-")] == [
        "--require-hashes",
        "--only-binary :all:",
    ]
    assert "://" not in "\n".join(lines)


@pytest.mark.parametrize("name", NAMES)
def test_no_lock_file_has_what_belongs_to_a_build_of_pytorch(name: str) -> None:
    direct = {_name(requirement) for requirement in pins(name)} - {"torch"}
    extra = {_name(requirement) for requirement, _ in locked(name)} - direct
    assert not [package for package in extra if of_pytorch(package)]


def test_all_lock_files_agree_on_versions() -> None:
    # They are installed into one environment, one after the other.
    for where in ENVIRONMENTS:
        versions((requirement for name in NAMES for requirement, _ in locked(name)), where)


# What is installed without hashes, and why: docs/security.md.
UNLOCKED = {
    "Makefile": [
        "-r requirements/torch.txt",
        'torchvision -c "$@.torch"',
        "--no-build-isolation --no-deps --editable .",
    ],
    "docker/Dockerfile": ['"${TORCH}"', "--no-index /opt/built/*.whl"],
    "docker/Dockerfile.cuda": ['"${TORCH}"', "--no-index /opt/built/*.whl", "${MODELS}"],
}


@pytest.mark.parametrize("file", UNLOCKED)
def test_ci_and_images_install_from_lock_files(file: str) -> None:
    text = (
        (REPOSITORY / file)
        .read_text("utf-8")
        .replace("$(LOCKED)", "--require-hashes -r requirements/lock")
    )
    commands = re.findall(
        r"(?:pip|\$\(PIP\)) install (?:--no-cache-dir )?(.*?)(?: \\| \|\|| &&|;|$)", text, re.M
    )
    assert len(commands) > 4, commands
    loose = [
        c
        for c in commands
        if not re.fullmatch(r"--require-hashes -r requirements/lock/\w+\.txt", c)
    ]
    assert loose == UNLOCKED[file]


def _name(requirement: Requirement) -> str:
    return canonicalize_name(requirement.name)
