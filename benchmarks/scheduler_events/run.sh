#!/usr/bin/env bash
# Builds and runs the benchmark; prints a table. Needs only a C++20 compiler. An argument names a
# file for the rate of each repeat; main.py makes a result file of it.
set -euo pipefail
cd "$(dirname "$0")/../.."
program=build/benchmarks/scheduler_events_bench
mkdir -p "$(dirname "$program")"
"${CXX:-g++}" -std=c++20 -O3 -DNDEBUG -Wall -Wextra -Werror -Icsrc \
  benchmarks/scheduler_events/scheduler_events_bench.cc csrc/scheduler/*.cc -o "$program"
exec "$program" "$@"
