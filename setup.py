"""Builds the native modules through CMake: always ``_core`` and the operators for TensorFlow
``_tensorflow_ops``; ``_torch`` and ``_tensorflow_ops_cpp`` where PyTorch and TensorFlow are;
``_cuda`` where PyTorch and nvcc are.

PyTorch and TensorFlow are looked for in the environment that runs this file, so ``pip install``
needs ``--no-build-isolation`` to see them. Environment variables: ``CMAKE_ARGS`` (more arguments
for CMake), ``CMAKE_BUILD_PARALLEL_LEVEL`` (compilers at once; default: one a core),
``HVD_ORDER_BUILD_DIR`` (where CMake works; default: setuptools' own folder in ``build``) and
``CUDACXX`` (nvcc; default: of this environment, of ``CUDA_HOME``, in PATH, in /usr/local/cuda;
empty: none).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Command, Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
OLDEST_TORCH = (2, 8)
OLDEST_NVCC = (12, 1)  # kernels with arguments of 32 KB
# Cubins for these, as far as nvcc knows them, and PTX of the newest for what comes later.
CUDA_ARCHITECTURES = (80, 90, 100)


def torch_folder() -> Path | None:
    """Where PyTorch is installed; None, with a line saying why, if there is none to build for."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        print("hvd_order: PyTorch is not installed here; building without hvd_order.torch")
        return None
    folder = Path(spec.origin).parent
    found = re.search(r"__version__ = '(\d+)\.(\d+)", (folder / "version.py").read_text())
    if found and (int(found[1]), int(found[2])) < OLDEST_TORCH:
        print(
            f"hvd_order: PyTorch {found[1]}.{found[2]} is older than "
            f"{OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}; building without hvd_order.torch"
        )
        return None
    return folder


def torch_arguments() -> list[str]:
    """What CMake must know about PyTorch. Imports it, which takes seconds."""
    import torch
    from torch.utils import cpp_extension

    definitions = [f"_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    # PyTorch 2.8 lets extensions state which compiler's pybind11 types to share.
    for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI"):
        value = getattr(torch._C, f"_PYBIND11_{name}", None)
        if value is not None:
            definitions.append(f'PYBIND11_{name}="{value}"')
    return [
        f"-DHVD_ORDER_TORCH_INCLUDE_DIRS={';'.join(cpp_extension.include_paths())}",
        f"-DHVD_ORDER_TORCH_LIBRARY_DIRS={';'.join(cpp_extension.library_paths())}",
        f"-DHVD_ORDER_TORCH_DEFINITIONS={';'.join(definitions)}",
    ]


def tensorflow_folder() -> Path | None:
    """Where TensorFlow and its headers are installed, if anywhere. Does not import it."""
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    header = folder / "include/tensorflow/core/framework/op_kernel.h"
    return folder if header.exists() else None


def tensorflow_version() -> str:
    """Of the installed TensorFlow; its distributions have several names."""
    names = importlib.metadata.packages_distributions().get("tensorflow", [])
    return importlib.metadata.version(names[0]) if names else "unknown"


def tensorflow_arguments() -> list[str]:
    """What CMake must know about TensorFlow."""
    return [
        f"-DHVD_ORDER_TENSORFLOW_DIR={TENSORFLOW}",
        f"-DHVD_ORDER_TENSORFLOW_VERSION={tensorflow_version()}",
    ]


def nvcc() -> str | None:
    """Path of nvcc; None, with a line saying why, if there is none that can be used."""
    without = "building without kernels for CUDA (PyTorch's operators take their place)"
    wanted = os.environ.get("CUDACXX")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    spec = importlib.util.find_spec("nvidia")
    of_pip = [
        *(f"{folder}/cu{major}/bin" for folder in (spec and spec.submodule_search_locations) or ()
          for major in (14, 13)),
    ]  # fmt: skip
    places = [*of_pip, *([f"{home}/bin"] if home else []), None, "/usr/local/cuda/bin"]
    found = wanted
    if wanted is None:
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


def cuda_arguments(folder: Path) -> list[str]:
    """What CMake must know about nvcc; nothing, with a line saying why, if it cannot compile."""
    assert NVCC is not None
    listed = subprocess.run([NVCC, "--list-gpu-arch"], capture_output=True, text=True, check=True)
    known = {int(number) for number in re.findall(r"compute_(\d+)", listed.stdout)}
    kept = [number for number in CUDA_ARCHITECTURES if number in known]
    codes = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in kept]
    codes.append(f"-gencode=arch=compute_{kept[-1]},code=compute_{kept[-1]}")
    trial = folder / "nvcc_trial.cu"
    trial.write_text("#include <bit>\n__global__ void nothing() {}\n")
    command = [NVCC, "-std=c++20", *codes, "-c", str(trial), "-o", str(trial.with_suffix(".o"))]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        print(
            f"hvd_order: {NVCC} cannot compile, building without kernels for CUDA (PyTorch's "
            f"operators take their place):\n{tried.stdout}{tried.stderr}"
        )
        return []
    # nvcc may be a link or a script; it knows where the toolkit is.
    told = subprocess.run(
        [NVCC, "-dryrun", str(trial)], capture_output=True, text=True, check=True
    ).stderr
    top = re.search(r"TOP=(\S+)", told)
    return [
        f"-DHVD_ORDER_NVCC={NVCC}",
        f"-DHVD_ORDER_CUDA_HOME={top[1] if top else Path(NVCC).resolve().parents[1]}",
        f"-DHVD_ORDER_CUDA_CODES={';'.join(codes)}",
        f"-DHVD_ORDER_CUDA_ARCHITECTURES={' '.join(f'sm_{n}' for n in kept)} and newer",
    ]


def program(name: str) -> str:
    """Path of cmake or ninja: the one installed by pip, else the system's."""
    for folder in (Path(sys.executable).parent, None):
        found = shutil.which(name, path=folder and str(folder))
        if found:
            return found
    module = importlib.util.find_spec(name)  # pip's isolated builds have the module, not the script
    if module is not None and module.submodule_search_locations:
        package = importlib.import_module(name)
        folder = getattr(package, "CMAKE_BIN_DIR", None) or getattr(package, "BIN_DIR", "")
        found = shutil.which(name, path=folder)
        if found:
            return found
    raise SystemExit(f"hvd_order: {name} is needed to build; install it with: pip install {name}")


class CMakeBuild(build_ext):
    """Lets CMake build all modules at once and puts them where setuptools wants them."""

    CUDA_WORKS = "cuda_works"  # a file that exists if so

    def run(self) -> None:
        """Builds, and remembers for whom: setuptools clears ``inplace`` while it builds."""
        self.into_source_tree = bool(self.inplace)
        super().run()

    def build_extensions(self) -> None:
        """Builds all modules, then copies those that changed."""
        folder = Path(os.environ.get("HVD_ORDER_BUILD_DIR") or self.build_temp).absolute()
        self._configure(folder)
        if not (folder / self.CUDA_WORKS).exists():
            self.extensions = [e for e in self.extensions if e.name != "hvd_order._cuda"]
        names = [extension.name.rpartition(".")[2] for extension in self.extensions]
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(os.cpu_count() or 1)
        build = [program("cmake"), "--build", str(folder), "--parallel", jobs, "--target", *names]
        subprocess.run(build, check=True)
        for extension, name in zip(self.extensions, names, strict=True):
            built = folder / Path(self.get_ext_filename(name)).name
            # In place means not through build_lib: the next wheel is made from what lies there.
            target = ROOT if self.into_source_tree else Path(self.build_lib)
            self._place(built, target / self.get_ext_filename(extension.name))

    def _configure(self, folder: Path) -> None:
        """Runs CMake, unless what it would be told is what it was told last time."""
        torch = TORCH and [str(TORCH), (TORCH / "version.py").read_text()]
        tensorflow = TENSORFLOW and [str(TENSORFLOW), tensorflow_version()]
        told = json.dumps(
            [
                [str(ROOT), sys.executable, sys.version, torch, tensorflow, NVCC],
                Path(__file__).read_text(),
                [os.environ.get(name) for name in ("CMAKE_ARGS", "CXX", "CXXFLAGS", "LDFLAGS")],
            ]
        )
        record = folder / "configured.json"
        if record.exists() and record.read_text() == told and (folder / "build.ninja").exists():
            return
        import pybind11

        folder.mkdir(parents=True, exist_ok=True)
        cuda = cuda_arguments(folder) if NVCC else []
        command = [program("cmake"), "--fresh", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja"]
        command += [
            f"-DCMAKE_MAKE_PROGRAM={program('ninja')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            *(torch_arguments() if TORCH else []),
            *(tensorflow_arguments() if TENSORFLOW else []),
            *cuda,
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        subprocess.run(command, check=True)
        (folder / self.CUDA_WORKS).unlink(missing_ok=True)
        if cuda:
            (folder / self.CUDA_WORKS).touch()
        record.write_text(told)

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

    SOURCE = "hvd_order/horovod/hvd_order_alias.pth"

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


TORCH = torch_folder()
TENSORFLOW = tensorflow_folder()
NVCC = nvcc() if TORCH else None

setup(
    ext_modules=[
        Extension("hvd_order._core", []),
        *([Extension("hvd_order._torch", [])] if TORCH else []),
        *([Extension("hvd_order._cuda", [])] if NVCC else []),
        Extension("hvd_order._tensorflow_ops", []),
        *([Extension("hvd_order._tensorflow_ops_cpp", [])] if TENSORFLOW else []),
    ],
    cmdclass={"build": Build, "build_ext": CMakeBuild, "build_startup": BuildStartup},
)
