#!/usr/bin/env bash
# The tests of logic and of the optimizer with another PyTorch than the pinned one, in a clone with an
# environment of its own: bash scripts/test_with_torch.sh 2.8
#
# `make test-torch` calls it. Tests of what prints every line of a job stay out: Gloo itself prints
# lines in PyTorch 2.8.
set -euo pipefail
cd "$(dirname "$0")/.."
release=${1:?which PyTorch, such as 2.8}

fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
git clone --quiet . "$fresh/hvd_order"
cd "$fresh/hvd_order"
echo "torch==$release.*" > requirements/torch.txt
make build HAS_TORCH=false
.venv/bin/python -m pip --quiet install --require-hashes -r requirements/lock/dev.txt
.venv/bin/python -c 'import torch; print("PyTorch", torch.__version__)'
.venv/bin/python -m pytest tests/unit tests/multiproc/optimizer
