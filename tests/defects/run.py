"""Applies seeded defects one at a time to a copy of the tree, each with the test that catches it.

``make defects`` runs all; ``ONLY="engine shim/residual_not_reset"`` some. A defect is *caught* if
its test passes without it and fails with it. The exit status is 1 if one is missed.

All tests run once without any defect, after one build. Then a compiled defect costs one build,
which also takes back the defect before it. Those come last: the others run beside sound modules.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[2]
_TEST_S = 300.0
_CPP = "cpp:"
_BUILD_DEVICE = """
import sys
sys.path.insert(0, "tests")
from helpers.device.test_device import load
load()
"""


@dataclass(frozen=True)
class Defect:
    """One small patch, and the test that catches it.

    Attributes:
        area: the file that lists it, without its ending.
        old, new: text that occurs once in `file`, and what takes its place.
        test: a node id of pytest, or ``cpp:`` and the name of a C++ test; empty: none is known.
        what: what a user would notice.
    """

    area: str
    name: str
    file: str
    function: str
    old: str
    new: str
    test: str
    what: str

    @property
    def is_compiled(self) -> bool:
        """Whether it needs a build."""
        return self.file.startswith("csrc/")

    def changed(self, text: str) -> str:
        """The file's text with the defect.

        Raises:
            ValueError: the text to replace is not there once.
        """
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.file} has the text of {self.name} {text.count(self.old)} times"
            )
        return text.replace(self.old, self.new)


def defects() -> list[Defect]:
    """All that are listed beside this file."""
    return [
        Defect(area=listing.stem, **each)
        for listing in sorted(Path(__file__).parent.glob("*.toml"))
        for each in tomllib.loads(listing.read_text("utf-8"))["defect"]
    ]


class Copy:
    """A copy of the tracked files, with the modules that are built in the tree."""

    def __init__(self, folder: Path) -> None:
        """Copies what differs; a folder that was kept keeps what was built in it."""
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
        )
        for name in listed.stdout.split("\0"):
            if name and not name.startswith("benchmarks/results/"):
                self._copy(ROOT / name)
        for module in (ROOT / "hvd_order").rglob("*.so"):
            self._copy(module)

    def _copy(self, path: Path) -> None:
        target = self.folder / path.relative_to(ROOT)
        if target.exists() and filecmp.cmp(path, target, shallow=False):
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)  # its time is now: Ninja builds what was compiled from it
        shutil.copymode(path, target)

    def build(self, tests: Sequence[str]) -> str:
        """Builds what changed and the tests need; returns what a build that fails has printed."""
        programs = [test.removeprefix(_CPP) for test in tests if test.startswith(_CPP)]
        commands = []
        if programs:
            folder = "build/tests"
            configure = ["cmake", "-S", ".", "-B", folder, "-G", "Ninja"]
            commands += [
                [*configure, "-DHVD_ORDER_PYTHON=OFF", "-DHVD_ORDER_WERROR=OFF"],
                ["cmake", "--build", folder, "--target", *programs],
            ]
        if len(programs) < len(tests):
            commands.append([sys.executable, "setup.py", "-q", "build_ext", "--inplace"])
        env = {
            **self._env(),
            "HVD_ORDER_BUILD_DIR": "build/modules",
            # Each file alone: a defect changes one.
            "CMAKE_ARGS": "-DHVD_ORDER_WERROR=OFF -DHVD_ORDER_UNITY=OFF",
        }
        for command in commands:
            code, said = self._run(command, env, timeout=3600.0)
            if code != 0:
                return said or f"status {code}"
        return ""

    def passes(self, test: str) -> tuple[bool, str]:
        """Runs a test; returns whether it passes, and what it printed last."""
        if test.startswith(_CPP):
            name = test.removeprefix(_CPP)
            command = ["ctest", "--test-dir", "build/tests", "-R", f"^{name}$", "--no-tests=error"]
        else:
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
        code, said = self._run(command, self._env(), timeout=_TEST_S)
        return code == 0, said

    def _env(self) -> dict[str, str]:
        return {
            **os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }  # fmt: skip

    def _run(
        self, command: Sequence[str], env: dict[str, str], timeout: float
    ) -> tuple[int | None, str]:
        try:
            done = subprocess.run(
                command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            return None, f"no end after {timeout:g} s"
        return done.returncode, (done.stdout + done.stderr)[-2000:]

    def tests_that_fail(self, defects: Sequence[Defect]) -> dict[str, str]:
        """Runs their tests without any of them; returns what those that fail have printed.

        Raises:
            SystemExit: the tree does not compile.
        """
        built = sorted({each.test for each in defects if each.is_compiled and each.test})
        if built and (said := self.build(built)):
            raise SystemExit(f"the tree does not compile:\n{said}")
        if any("/device/" in each.test for each in defects):  # no test has the time to build it
            self._run([sys.executable, "-c", _BUILD_DEVICE], self._env(), timeout=3600.0)
        failed = {}
        for test in sorted({each.test for each in defects if each.test}):
            passed, said = self.passes(test)
            if not passed:
                failed[test] = said
        return failed

    def try_out(self, defect: Defect) -> str:
        """Returns "caught", or why it is not."""
        path = self.folder / defect.file
        before = path.read_text("utf-8")
        try:
            path.write_text(defect.changed(before), "utf-8")
            if defect.is_compiled and (said := self.build([defect.test])):
                return f"it does not compile:\n{said}"
            passed, _ = self.passes(defect.test)
            return "MISSED" if passed else "caught"
        finally:
            path.write_text(before, "utf-8")


def chosen(only: Sequence[str]) -> Iterator[Defect]:
    """The defects of the areas and names in `only`; all if it is empty."""
    for defect in defects():
        if not only or defect.area in only or f"{defect.area}/{defect.name}" in only:
            yield defect


def main() -> int:
    """Tries the defects one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", metavar="AREA[/NAME]")
    parser.add_argument("--folder", type=Path, help="of the copy, which is kept (default: none)")
    parser.add_argument("--python-only", action="store_true", help="those that need no build")
    options = parser.parse_args()
    listed = [d for d in chosen(options.only) if not (options.python_only and d.is_compiled)]
    listed.sort(key=lambda defect: defect.is_compiled)
    missed = 0
    with tempfile.TemporaryDirectory() as temporary:
        copy = Copy(options.folder or Path(temporary))
        failed = copy.tests_that_fail(listed)
        for defect in listed:
            begin = time.monotonic()
            if not defect.test:
                verdict = "MISSED: no test is known"
            elif defect.test in failed:
                verdict = f"its test fails without it:\n{failed[defect.test]}"
            else:
                verdict = copy.try_out(defect)
            missed += verdict != "caught"
            print(f"{defect.area}/{defect.name}: {verdict} ({time.monotonic() - begin:.0f} s)",
                  flush=True)  # fmt: skip
    print(f"{len(listed) - missed} of {len(listed)} caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
