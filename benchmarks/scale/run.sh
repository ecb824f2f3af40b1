#!/usr/bin/env bash
# Builds and runs agreement_bench.cc; prints a table. Needs only a C++20 compiler. Arguments: a file
# for the measurements, then the numbers of ranks; main.py makes a result file of it.
set -euo pipefail
cd "$(dirname "$0")/../.."
program=build/benchmarks/agreement_bench
mkdir -p "$(dirname "$program")"
"${CXX:-g++}" -std=c++20 -O3 -DNDEBUG -Wall -Wextra -Werror -Icsrc \
  benchmarks/scale/agreement_bench.cc csrc/scheduler/*.cc -o "$program"
exec "$program" "$@"
