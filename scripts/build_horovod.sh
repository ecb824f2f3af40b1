#!/usr/bin/env bash
# Real Horovod, built from source for the environment's PyTorch: the peer that tests and benchmarks
# compare with. `make horovod` calls it; alone: bash scripts/build_horovod.sh [--with-tensorflow]
#
# TensorFlow is built in where the environment has it; --with-tensorflow fails where it has not.
# The wheel is kept outside the checkout, so that it is built once for the same versions:
# ${XDG_CACHE_HOME:-~/.cache}/hvd_order/wheels. Its version tells what it was built for, as in
# 0.28.1+torch2.13.0.cpu.r123. Horovod is not maintained any more; what today's PyTorch,
# TensorFlow and CMake need changed in its source stands in patch_source.
# Settings: VENV (environment, default .venv), JOBS (compilers at once, default all processors).
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=${VENV:-.venv}
JOBS=${JOBS:-$(nproc 2> /dev/null || echo 2)}
RELEASE=0.28.1
RELEASE_SHA256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0
RUN_TIME=(cloudpickle psutil pyyaml packaging) # what Horovod imports besides the frameworks
WHEELS=${XDG_CACHE_HOME:-$HOME/.cache}/hvd_order/wheels

say() { echo "horovod: $*"; }
fail() {
  echo "horovod: $*" >&2
  exit 1
}

# ------------------------------------------------------------------------------ what is there
# Prints, a line each: PyTorch's version, TensorFlow's, Horovod's, and which of RUN_TIME lack; "-"
# for none. Reads package metadata alone: importing the frameworks would take seconds.
look() {
  "$python" - "${RUN_TIME[@]}" << 'PY'
import sys
from importlib.metadata import PackageNotFoundError, version

def installed(*names):
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            pass
    return "-"

print(installed("torch"))
print(installed("tensorflow", "tensorflow-cpu", "tf-nightly"))
print(installed("horovod"))
print(" ".join(name for name in sys.argv[1:] if installed(name) == "-") or "-")
PY
}

check_tools() {
  local missing=()
  command -v g++ > /dev/null || missing+=(g++)
  command -v make > /dev/null || missing+=(make)
  [ "${#missing[@]}" = 0 ] ||
    fail "needs ${missing[*]}; on Debian and Ubuntu: apt install ${missing[*]}"
  "$python" -c 'import os, sysconfig as s
raise SystemExit(not os.path.exists(os.path.join(s.get_path("include"), "Python.h")))' ||
    fail "this Python has no C headers; on Debian and Ubuntu: apt install python3-dev"
  [ "$tensorflow" = - ] || TF_CPP_MIN_LOG_LEVEL=3 "$python" -c 'import tensorflow' ||
    fail "the TensorFlow $tensorflow of $VENV cannot be imported, see above"
}

# ------------------------------------------------------------------------------ build
# edit FILE FROM TO: replaces text in a file; fails where nothing is to be replaced.
edit() {
  grep -q -- "$2" "$1" || fail "$1 has no '$2': patch_source does not fit this source"
  sed -i "s|$2|$3|g" "$1"
}

patch_source() {
  # The headers of PyTorch 2.13 and of TensorFlow 2.21 are C++20.
  edit CMakeLists.txt 'set(CMAKE_CXX_STANDARD 14)' 'set(CMAKE_CXX_STANDARD 20)'
  edit horovod/torch/CMakeLists.txt 'set(CMAKE_CXX_STANDARD 14)' 'set(CMAKE_CXX_STANDARD 20)'
  edit horovod/tensorflow/CMakeLists.txt 'set(CMAKE_CXX_STANDARD 17)' 'set(CMAKE_CXX_STANDARD 20)'
  # TensorFlow's packages no longer bring the headers of XLA that this file wants.
  edit horovod/tensorflow/CMakeLists.txt '^.*xla_mpi_ops\.cc.*$' ''
}

# A Python environment for the build alone, which sees the packages of $VENV behind its own:
# Horovod's CMake files are too old for CMake 4, which $VENV may have and need.
make_build_environment() {
  "$python" -m venv "$work/env"
  "$work/env/bin/python" -m pip --disable-pip-version-check --quiet install \
    'cmake>=3.18,<4' 'setuptools<80' wheel "${RUN_TIME[@]}"
  local packages
  packages=$("$work/env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  # All that $VENV finds modules in, but for the standard library.
  "$python" -c 'import os, sys, sysconfig
own = sysconfig.get_path("stdlib")
for p in filter(os.path.isdir, sys.path):
    if p.endswith("-packages") or not p.startswith(own):
        print(p)' > "$packages/frameworks.pth"
}

build_wheel() {
  local pip=("$work/env/bin/python" -m pip --disable-pip-version-check --quiet)
  echo "horovod==$RELEASE --hash=sha256:$RELEASE_SHA256" > "$work/source.txt"
  "${pip[@]}" download --no-deps --no-binary :all: --no-build-isolation \
    --dest "$work" --requirement "$work/source.txt"
  tar -xzf "$work/horovod-$RELEASE.tar.gz" -C "$work"
  cd "$work/horovod-$RELEASE"
  patch_source

  local settings=(
    HOROVOD_LOCAL_VERSION="$local_version"
    HOROVOD_CMAKE="$work/env/bin/cmake"
    HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1
    HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1
    CMAKE_GENERATOR="Unix Makefiles"
    MAKEFLAGS="-j$JOBS"
  )
  if [ "$tensorflow" = - ]; then
    settings+=(HOROVOD_WITHOUT_TENSORFLOW=1)
  else
    # Two libraries whose headers TensorFlow's own headers include as if they were at the top.
    local external
    external=$("$work/env/bin/python" -c \
      'import tensorflow; print(tensorflow.sysconfig.get_include() + "/external")' 2> /dev/null)
    settings+=(
      HOROVOD_WITH_TENSORFLOW=1
      CPLUS_INCLUDE_PATH="$external/highwayhash:$external/farmhash_archive/src${CPLUS_INCLUDE_PATH:+:$CPLUS_INCLUDE_PATH}"
    )
  fi
  env "${settings[@]}" "${pip[@]}" wheel --no-deps --no-build-isolation --wheel-dir "$work/wheel" .
  cd "$root"
}

# ------------------------------------------------------------------------------ main
with_tensorflow=no
for argument in "$@"; do
  case $argument in
    --with-tensorflow) with_tensorflow=yes ;;
    *) fail "unknown argument '$argument'; usage: bash $0 [--with-tensorflow]" ;;
  esac
done
root=$PWD
case $VENV in /*) python=$VENV/bin/python ;; *) python=$root/$VENV/bin/python ;; esac
[ -x "$python" ] || fail "there is no $VENV; first: make build"

found=$(look)
{ read -r torch && read -r tensorflow && read -r present && read -r lacking; } <<< "$found"
[ "$torch" != - ] || fail "$VENV has no PyTorch; first: make build"
[ "$tensorflow" != - ] || [ "$with_tensorflow" = no ] ||
  fail "--with-tensorflow: $VENV has no TensorFlow; $VENV/bin/python -m pip install tensorflow-cpu"

# The last part changes with the way it is built, so that a wheel built in an older way is not used.
recipe=$(declare -f patch_source build_wheel | cksum | cut -d' ' -f1)
local_version=torch$torch
[ "$tensorflow" = - ] || local_version+=.tf$tensorflow
local_version=$(tr -c '[:alnum:]\n' . <<< "${local_version,,}.r$recipe")
version=$RELEASE+$local_version

find_wheel() {
  local tag
  tag=$("$python" -c 'import sys, sysconfig
print(f"cp{sys.version_info[0]}{sys.version_info[1]}-*-" + sysconfig.get_platform().replace("-", "_"))')
  compgen -G "$WHEELS/horovod-$version-$tag.whl" | head -n 1
}

wheel=$(find_wheel || true)
if [ "$present" = "$version" ] && [ "$lacking" = - ]; then
  say "$version is installed in $VENV; its wheel: ${wheel:-not kept}"
  exit 0
fi

if [ -z "$wheel" ]; then
  check_tools
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  say "building $version with $JOBS compilers at once; this takes minutes"
  make_build_environment
  build_wheel
  mkdir -p "$WHEELS"
  built=$(compgen -G "$work/wheel/horovod-*.whl")
  # Into place in one step: who looks meanwhile sees all of it or none.
  cp "$built" "$WHEELS/.$$.part"
  mv "$WHEELS/.$$.part" "$WHEELS/${built##*/}"
  wheel=$(find_wheel) || fail "built ${built##*/}, which is not named as expected: horovod-$version"
fi

say "installing $wheel in $VENV"
pip=("$python" -m pip --disable-pip-version-check --quiet)
if [ "$lacking" != - ]; then
  read -ra lacking <<< "$lacking"
  "${pip[@]}" install "${lacking[@]}"
fi
"${pip[@]}" install --no-deps --force-reinstall "$wheel"
say "$version is installed in $VENV"
