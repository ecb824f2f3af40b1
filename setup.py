"""Builds the native modules through CMake: always ``_core`` and the operators for TensorFlow
``_tensorflow_ops``; an engine ``_torch`` for each PyTorch it is told of; ``_cuda`` where PyTorch
and nvcc are.

It builds for the PyTorch of the environment that it installs into. Environment variables:
``HVD_ORDER_TORCH_FOLDERS`` (folders of PyTorch's package to build engines for instead,
separated as in PATH; empty: none), ``CMAKE_ARGS`` (more arguments for CMake),
``CMAKE_BUILD_PARALLEL_LEVEL`` (compilers at once; default: one a core), ``HVD_ORDER_BUILD_DIR``
(where CMake works; default: setuptools' own folder in ``build``) and ``CUDACXX`` (nvcc; default: of
this environment, of ``CUDA_HOME``, in PATH, in /usr/local/cuda; empty: none).
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Command, Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(
    0, str(ROOT / "scripts")
)  # setuptools runs this file without its folder in the path
from toolchain import cuda, pytorch  # noqa: E402
from toolchain.programs import program  # noqa: E402

NATIVE = "hvd_order._native"  # its torch_engines.py finds the engines


def wanted_torches() -> tuple[list[pytorch.PyTorch], SystemExit | None]:
    """The PyTorch releases to build engines for, and why there is none where one is needed."""
    told = os.environ.get("HVD_ORDER_TORCH_FOLDERS")
    if told is not None:
        folders = [Path(folder) for folder in told.split(os.pathsep) if folder]
        return [pytorch.pytorch_at(folder) for folder in folders], None
    try:
        return [pytorch.installed()], None
    except SystemExit as reason:
        return [], reason


def torch_arguments() -> list[str]:
    """What CMake must know about each PyTorch."""
    arguments = [f"-DHVD_ORDER_TORCH_ENGINES={';'.join(torch.engine for torch in TORCHES)}"]
    for torch in TORCHES:
        told = {
            "INCLUDE_DIRS": map(str, torch.include_folders),
            "LIBRARY_DIR": [str(torch.folder / "lib")],
            "DEFINITIONS": torch.definitions(),
        }
        arguments += [
            f"-DHVD_ORDER_{torch.engine}_{key}={';'.join(values)}" for key, values in told.items()
        ]
    return arguments


class CMakeBuild(build_ext):
    """Lets CMake build all modules at once and puts them where setuptools wants them."""

    CUDA_WORKS = "cuda_works"  # a file that exists if so

    def run(self) -> None:
        """Builds, and remembers for whom: setuptools clears ``inplace`` while it builds."""
        if LACKING:  # an sdist or the names of the requirements need no PyTorch
            raise LACKING
        self.into_source_tree = bool(self.inplace)
        super().run()

    def build_extensions(self) -> None:
        """Builds all modules, then copies those that changed."""
        folder = Path(os.environ.get("HVD_ORDER_BUILD_DIR") or self.build_temp).absolute()
        self._configure(folder)
        if not (folder / self.CUDA_WORKS).exists():
            self.extensions = [e for e in self.extensions if e.name != f"{NATIVE}._cuda"]
        # Below CMake's folder a module has its place in the package; a target has no dots.
        places = [e.name.removeprefix(f"{NATIVE}.") for e in self.extensions]
        targets = [place.replace(".", "") for place in places]
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(os.cpu_count() or 1)
        build = [program("cmake"), "--build", str(folder), "--parallel", jobs, "--target", *targets]
        subprocess.run(build, check=True)
        for extension, place in zip(self.extensions, places, strict=True):
            # In place means not through build_lib: the next wheel is made from what lies there.
            target = ROOT if self.into_source_tree else Path(self.build_lib)
            self._place(
                folder / self.get_ext_filename(place),
                target / self.get_ext_filename(extension.name),
            )

    def _configure(self, folder: Path) -> None:
        """Runs CMake, unless what it would be told is what it was told last time."""
        toolchain = sorted((ROOT / "scripts/toolchain").glob("*.py"))
        compiles = json.dumps(
            [
                [str(ROOT), sys.executable, sys.version, *map(str, TORCHES)],
                [file.read_text("utf-8") for file in (Path(__file__), *toolchain)],
                [os.environ.get(name) for name in ("CMAKE_ARGS", "CXX", "CXXFLAGS", "LDFLAGS")],
            ]
        )
        told = [compiles, str(NVCC)]
        record = folder / "configured.txt"  # a line each
        before = record.read_text().splitlines() if record.exists() else []
        if before == told and (folder / "build.ninja").exists():
            return
        import pybind11

        folder.mkdir(parents=True, exist_ok=True)
        record.unlink(missing_ok=True)
        for_cuda = cuda.cmake_arguments(NVCC, folder) if NVCC else []
        # --fresh removes what has been compiled, too. That is still right where another nvcc has
        # come, as between `make build` and `make dev`. Where it has gone, CMake would remember it.
        had = before if len(before) == len(told) else ["", ""]
        keeps = had[0] == compiles and (for_cuda or had[1] == "None")
        fresh = [] if keeps else ["--fresh"]
        command = [program("cmake"), *fresh, "-S", str(ROOT), "-B", str(folder), "-G", "Ninja"]
        command += [
            f"-DCMAKE_MAKE_PROGRAM={program('ninja')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            *torch_arguments(),
            *for_cuda,
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        subprocess.run(command, check=True)
        (folder / self.CUDA_WORKS).unlink(missing_ok=True)
        if for_cuda:
            (folder / self.CUDA_WORKS).touch()
        record.write_text("\n".join(told))

    @staticmethod
    def _place(built: Path, wanted: Path) -> None:
        """Copies a changed module in one go: a process that runs the old one keeps it."""
        if wanted.exists() and wanted.stat().st_mtime_ns == built.stat().st_mtime_ns:
            return
        wanted.parent.mkdir(parents=True, exist_ok=True)
        temporary = wanted.with_name(wanted.name + ".new")
        shutil.copy2(built, temporary)
        temporary.replace(wanted)

    def copy_extensions_to_source(self) -> None:
        """Nothing: `build_extensions` has put them there."""


class BuildStartup(Command):
    """Puts the line behind ``HVD_ORDER_ALIAS=1`` where Python looks when it starts.

    Python reads .pth files at the top of site-packages only, where setuptools places no data.
    """

    SOURCE = "hvd_order/compat/horovod/hvd_order_alias.pth"

    def initialize_options(self) -> None:
        """Options as setuptools wants them."""
        self.editable_mode = False
        self.build_lib: str | None = None

    def finalize_options(self) -> None:
        """Takes the folder of the command ``build``."""
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        """Copies it; an editable wheel is packed from the folder that it is "installed" into."""
        if self.editable_mode:
            self.copy_file(self.SOURCE, self.get_finalized_command("install").install_lib)
        else:
            self.mkpath(str(self.build_lib))
            self.copy_file(self.SOURCE, str(self.build_lib))

    def get_outputs(self) -> list[str]:
        """What `run` writes, for the list of installed files."""
        return [str(Path(str(self.build_lib), Path(self.SOURCE).name))]

    def get_output_mapping(self) -> dict[str, str]:
        """Nothing that could be linked to its source."""
        return {}

    def get_source_files(self) -> list[str]:
        """What a source distribution needs."""
        return [self.SOURCE]


class Build(build):
    """Builds that as well."""

    sub_commands = (*build.sub_commands, ("build_startup", None))


TORCHES, LACKING = wanted_torches()
NVCC = cuda.nvcc() if TORCHES else None

setup(
    ext_modules=[
        Extension(f"{NATIVE}._core", []),
        *[Extension(f"{NATIVE}.{torch.engine}._torch", []) for torch in TORCHES],
        *([Extension(f"{NATIVE}._cuda", [])] if NVCC else []),
        Extension(f"{NATIVE}._tensorflow_ops", []),
    ],
    cmdclass={"build": Build, "build_ext": CMakeBuild, "build_startup": BuildStartup},
)
