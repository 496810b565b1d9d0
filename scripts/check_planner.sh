#!/bin/sh
# Measure this machine, carry out five runs that the fit has not seen, and compare them with what the planner says of them:
# the table of docs/explanation/planner.md. At least half an hour on two cores, with nothing else running.
set -eu
hybridengine=${HYBRIDENGINE:-.venv/bin/hybridengine}
folder=${1:-runs/planner-check}

train() {
  name=$1
  shift
  "$hybridengine" train configs/planner-check.yaml "run.folder=$folder" "run.name=$name" run.live=false "$@"
}

"$hybridengine" calibrate
train a actor.parallel=2-2-1 actor.generate=1-1 critic.parallel=1-4-1 reference.parallel=1-2-2 data.batch_size=96 \
  actor.mini_batches=3 critic.mini_batches=3
train b actor.parallel=2-1-2 actor.generate=1-1 critic.parallel=2-1-2 reference.parallel=1-2-2 data.batch_size=160 \
  rollout.max_response_tokens=64
train c actor.parallel=1-4-1 actor.generate=1-1 critic.parallel=1-2-2 reference.parallel=1-4-1 data.batch_size=40 \
  rollout.max_response_tokens=32 actor.bucket_bytes=8MiB model.build.num_layers=6 \
  model.build.hidden_size=512 model.build.ffn_hidden_size=1408 model.build.num_heads=16 model.build.num_kv_heads=8
train d actor.parallel=1-2-2 actor.generate=1-2 critic.parallel=1-1-4 reference.parallel=2-2-1 data.batch_size=384 \
  rollout.max_response_tokens=24 model.build.num_layers=2 model.build.hidden_size=192 model.build.ffn_hidden_size=416 \
  model.build.num_heads=6 model.build.num_kv_heads=2
train e cluster.ranks_per_node=[2] actor.parallel=1-2-1 actor.generate=1-1 critic.parallel=2-1-1 reference.parallel=1-1-2 \
  data.batch_size=144 rollout.max_response_tokens=40
"$hybridengine" plan --check "$folder/a" "$folder/b" "$folder/c" "$folder/d" "$folder/e"
