#!/bin/sh
# A node of compose.yaml: shapes its link, then runs its ranks of the benchmark.
#
# NODE, NODES: this node's number, and how many there are; node 0 is reached as "node0".
# RANKS: ranks of each node. BENCHMARK: options of the benchmark.
# RATE: of the link in each direction, as tc takes it; empty: as it is.
set -eu
interface=$(ip -o route show default | sed -n 's/.* dev \([^ ]*\).*/\1/p' | head -n 1)
interface=${interface:-eth0}
if [ -n "${RATE:-}" ]; then
  tc qdisc replace dev "$interface" root tbf rate "$RATE" burst 128kb latency 100ms
fi
export GLOO_SOCKET_IFNAME="$interface" NCCL_SOCKET_IFNAME="$interface"
exec torchrun --nnodes="${NODES:-2}" --node-rank="$NODE" --nproc-per-node="${RANKS:-1}" \
  --master-addr=node0 --master-port=29500 \
  benchmarks/torch/nodes.py --out /results/result.json ${BENCHMARK:-} "$@"
