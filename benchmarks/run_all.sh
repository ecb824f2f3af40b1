#!/usr/bin/env bash
# The data files of benchmarks/results: all of them (`make bench`, about five hours), or those named without ".json".
# Leave the machine alone meanwhile. What needs a GPU: gpu_check.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python3

wanted=("$@")
failed=()
known=()

# record FILE MODULE OPTION...: runs a benchmark into benchmarks/results/FILE.json.
record() {
  local file=$1 module=$2
  shift 2
  known+=("$file")
  [ "${#wanted[@]}" = 0 ] || [[ " ${wanted[*]} " == *" $file "* ]] || return 0
  printf '\n==== %s\n' "$file"
  PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" "$python" -m "benchmarks.$module" "$@" \
    --out "benchmarks/results/$file.json" || failed+=("$file")
}

untuned=(--env HVD_ORDER_TUNE=0)
record side_by_side-resnet50 torch.side_by_side --models resnet50 \
  --systems ddp_tuned horovod hvd_order hvd_order_planned --rounds 3
record side_by_side-densenet121 torch.side_by_side --models densenet121 \
  --systems ddp_tuned horovod hvd_order hvd_order_planned --rounds 3
record side_by_side-resnet50-4 torch.side_by_side --models resnet50 --hosts 4 \
  --systems ddp_tuned hvd_order --rounds 2
record side_by_side-vgg16 torch.side_by_side --models vgg16 --rate-mbit 2000 \
  --systems ddp_tuned hvd_order --rounds 2 "${untuned[@]}"
record side_by_side-gpt2_small torch.side_by_side --models gpt2_small --rate-mbit 2000 \
  --systems ddp_tuned hvd_order --rounds 2 "${untuned[@]}"
record side_by_side-large torch.side_by_side --models vgg16 gpt2_small dlrm \
  --systems ddp_tuned hvd_order --buckets-mib 10 50 --rounds 2 --steps 3 "${untuned[@]}"
record side_by_side-bert_large torch.side_by_side --models bert_large \
  --systems ddp_tuned hvd_order --buckets-mib 10 50 --rounds 2 --steps 3 "${untuned[@]}"
record side_by_side-ratios torch.side_by_side --models resnet50 --ratio 0.25 0.5 2 4 \
  --systems ddp_tuned hvd_order --buckets-mib 2 5 10 --rounds 2
record side_by_side-fewer_bytes torch.side_by_side --models resnet50 --rate-mbit 400 --ratio 0.25 \
  --systems ddp ddp_bf16 int8 auto --rounds 2 --steps 4
record side_by_side-fewer_bytes-two_ranks torch.side_by_side --models resnet50 --rate-mbit 400 \
  --ratio 0.25 --ranks-per-host 2 --systems ddp ddp_bf16 int8 --rounds 2 --steps 3
record side_by_side-fewer_bytes-ratio_1 torch.side_by_side --models resnet50 \
  --systems hvd_order auto --rounds 3 --steps 4
record time_to_loss torch.time_to_loss
record slow_ranks torch.slow_ranks --runs 20 --healthy 3000
record account_cost torch.account_cost
record side_by_side-control torch.side_by_side --models parallel resnet50_by_kernels \
  --systems ddp_tuned hvd_order --buckets-mib 2 5 10 --rounds 2
record side_by_side-slow torch.side_by_side --models resnet50 --rate-mbit 100 \
  --systems ddp_tuned hvd_order --buckets-mib 5 10 --rounds 2 --steps 3 "${untuned[@]}"
record side_by_side-resnet50-8 torch.side_by_side --models resnet50 --hosts 8 --rate-mbit 200 \
  --systems ddp hvd_order --rounds 2 --steps 3 "${untuned[@]}"
for model in resnet50 densenet121; do
  record "side_by_side-clip-$model" torch.side_by_side --models "$model" --clip \
    --systems ddp_tuned hvd_order --rounds 3
done
for model in gpt2_small bert_large; do
  record "side_by_side-clip-$model" torch.side_by_side --models "$model" --clip \
    --systems ddp_tuned hvd_order --buckets-mib 10 50 --rounds 2 --steps 3 "${untuned[@]}"
done
record side_by_side-clip-densenet121-bound torch.side_by_side --models densenet121 --clip \
  --systems no_waiting no_waiting_halves ddp_tuned hvd_order --rounds 3
record side_by_side-clip-resnet50-4 torch.side_by_side --models resnet50 --hosts 4 --clip \
  --systems no_waiting no_waiting_halves ddp_tuned hvd_order --rounds 2
record side_by_side-clip-densenet121-4 torch.side_by_side --models densenet121 --hosts 4 --clip \
  --systems no_waiting_halves ddp_tuned hvd_order --rounds 2
record side_by_side-clip-gpt2_small-4 torch.side_by_side --models gpt2_small --hosts 4 --clip \
  --systems ddp_tuned hvd_order --buckets-mib 10 50 --rounds 2 --steps 3 "${untuned[@]}"
record sharded-resnet50-4 torch.sharded
record side_by_side-real torch.side_by_side --models small_cnn demo_gpt \
  --systems ddp_tuned hvd_order --rounds 12
record side_by_side-resnet50-bound torch.side_by_side --models resnet50 \
  --systems no_waiting ddp_tuned hvd_order --rounds 4
record side_by_side-densenet121-bound torch.side_by_side --models densenet121 \
  --systems no_waiting ddp_tuned hvd_order --rounds 4
record side_by_side-densenet121-2000 torch.side_by_side --models densenet121 --rate-mbit 2000 \
  --systems no_waiting ddp_tuned hvd_order --rounds 4
both=(--systems ddp hvd_order)
record one_host-small torch.one_host --ranks 2 4 8 "${both[@]}" --rounds 60 --steps 60
record one_host-many torch.one_host --ranks 16 32 "${both[@]}" --rounds 12 --steps 20
record one_host-demo_gpt torch.one_host --model demo_gpt --ranks 2 "${both[@]}" --rounds 60 --steps 10
record one_host-small_cnn torch.one_host --model small_cnn --ranks 2 "${both[@]}" --rounds 60 --steps 10
if "$python" -c "import tensorflow" 2> /dev/null; then
  record side_by_side-tensorflow torch.side_by_side --framework tensorflow --models resnet50 --rounds 2
  record prediction-strategy planning.prediction.strategy --models resnet50
  record prediction-strategy-acks planning.prediction.strategy --models resnet50 --acks-first --steps 30
else
  echo "left out: TensorFlow is not installed"
fi
record device_wait engine.device_wait --layer-ms 8 --elements 262144
record overhead torch.overhead
record overhead-per_parameter torch.per_parameter
record throughput engine.throughput --credit-mib 32
record throughput-decisions engine.throughput --slice-mib 0.00390625 --total-mib 3.90625 \
  --credit-mib 0.015625
record hosts hosts.main
record scheduler_events engine.scheduler_events
record scale engine.scale
record planning planning.orders
record simulate planning.simulator_speed
record simulate-predict planning.predicted_steps
record prediction planning.prediction --models resnet50
record prediction-bounded planning.prediction --models resnet50 --modes bounded
record prediction-models planning.prediction --models densenet121 gpt2_small
record prediction-rate planning.prediction --models resnet50 densenet121 gpt2_small --rates-mbit 250
record prediction-sync planning.prediction --models resnet50 densenet121 gpt2_small --modes sync
record prediction-sync-rate planning.prediction --models resnet50 densenet121 gpt2_small --modes sync \
  --rates-mbit 250
record prediction-allreduce planning.prediction --models resnet50 densenet121 gpt2_small \
  --modes allreduce --steps 24
record prediction-queue planning.prediction --models resnet50 --modes sync --queue-ms 50
record prediction-speed planning.prediction.speed
record prediction-public planning.prediction.public
record parameter_server-order servers --only ordered raw --rounds 6 --steps 8
record parameter_server-straggler servers --only straggler --stragglers 1
record parameter_server-elastic servers --only elastic --events 10
record cluster-optimum cluster.optimum
record cluster-utility cluster.utility
record cluster-scale cluster.scale
record cluster-workload6 cluster.workload6
record cluster-order cluster.order
record cluster-order-alike cluster.order --alike
record cluster-fidelity cluster.fidelity --scale 3 --limit 1200

for file in "${wanted[@]}"; do
  [[ " ${known[*]} " == *" $file "* ]] || failed+=("$file (no such file)")
done
if [ "${#failed[@]}" -gt 0 ]; then
  printf '\nfailed: %s\n' "${failed[*]}"
  exit 1
fi
