#!/usr/bin/env bash
# Everything that needs a CUDA GPU: bash benchmarks/gpu_check.sh
#
# One GPU is enough; what needs two is skipped with a line. Builds first, with `make build` where
# packages can be installed, else with the PyTorch, cmake, ninja, pybind11, pytest and
# pytest-timeout of $PYTHON. Then the tests of tests/gpu run, and benchmarks/engine/gpu measures.
# One line PASS, FAIL or SKIP each; exit status 0 when nothing failed (also when there is no GPU).
# Settings: PYTHON (default python3), FULL=1 (also the benchmarks overhead and throughput).
# Arguments go to pytest: -k kernels.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin # compute-sanitizer

has_cuda() {
  "$1" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2> /dev/null
}

# The environment of `make build` where it can be made and sees the GPU; else what is installed.
log=$(mktemp)
trap 'rm -f "$log"' EXIT
python=.venv/bin/python
if make build PYTHON="$PYTHON" > "$log" 2>&1 && has_cuda "$python"; then
  echo "PASS  build: make build, $("$python" -c 'import torch; print("torch", torch.__version__)')"
elif has_cuda "$PYTHON"; then
  python=$PYTHON
  if ! HVD_ORDER_BUILD_DIR=build/gpu "$python" setup.py build_ext --inplace > "$log" 2>&1; then
    tail -n 30 "$log"
    echo "FAIL  build: $python setup.py build_ext --inplace"
    exit 1
  fi
  echo "PASS  build: setup.py with torch $("$python" -c 'import torch; print(torch.__version__)')"
else
  echo "SKIP  all GPU checks: torch.cuda.is_available() is False for $PYTHON and for .venv"
  exit 0
fi
grep -i "kernels for CUDA" "$log" || true
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

failed=0
if ! "$python" -c "import pytest, pytest_timeout" 2> /dev/null; then
  echo "SKIP  tests/gpu: pytest and pytest-timeout are not installed for $python"
elif "$python" -m pytest -q -m gpu tests/gpu "$@"; then
  echo "PASS  tests/gpu"
else
  echo "FAIL  tests/gpu"
  failed=1
fi
"$python" -m benchmarks.engine.gpu || failed=1
if [ "${FULL:-0}" = 1 ]; then
  for benchmark in torch.overhead engine.throughput; do
    if "$python" -m "benchmarks.$benchmark" --device cuda; then
      echo "PASS  benchmark $benchmark: ran, results right"
    else
      echo "FAIL  benchmark $benchmark"
      failed=1
    fi
  done
fi
exit "$failed"
