#!/usr/bin/env bash
# All benchmarks that need no GPU, one after the other: `make bench`. Leave the machine alone
# meanwhile. Arguments are passed to none of them; each can be run alone with its own.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python3

failed=()
for folder in benchmarks/*/; do
  question=$(basename "$folder")
  case $question in common | gpu) continue ;; esac # gpu: see gpu_check.sh
  printf '\n==== %s\n' "$question"
  if [ "$question" = backends ] && ! "$python" -c "import tensorflow, mpi4py" 2> /dev/null; then
    echo "left out: TensorFlow or mpi4py is not installed"
  elif [ -e "$folder/main.py" ]; then
    "$python" "benchmarks/$question/main.py" || failed+=("$question")
  else
    bash "benchmarks/$question/run.sh" || failed+=("$question")
  fi
done

if [ "${#failed[@]}" -gt 0 ]; then
  printf '\nfailed: %s\n' "${failed[*]}"
  exit 1
fi
